"""Writes ``expected/`` anew; run folders that are named are taken in as inputs first."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from tests import goldens


def main() -> None:
    replaced = {
        str(Path(sys.prefix).resolve().parent).encode(): b"/home/user",
        str(goldens.HERE.parents[1]).encode(): b"/home/user",
        sys.base_prefix.encode(): b"/usr",
        f'"{socket.gethostname()}"'.encode(): b'"node-a"',
    }
    for folder in map(Path, sys.argv[1:]):
        goldens.pack(folder, replaced | {str(folder.resolve().parent).encode(): b"/home/user"})
    for name in [name for name in os.environ if name.startswith("TELEMETRY_")]:
        del os.environ[name]
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        goldens.unpack(Path(folder), *goldens.names())
        events = goldens.events_of([Path(name) for name in goldens.names() if name.startswith("real-")])
        found = goldens.of_comparisons() | goldens.of_traces() | goldens.of_zoo() | goldens.of_metrics()
        found |= goldens.of_help() | goldens.of_doctor()
        for name in goldens.names():
            found |= goldens.of_run(name)
    found[goldens.EVENTS.name] = json.dumps(events, indent=1) + "\n"
    goldens.EXPECTED.mkdir(exist_ok=True)
    for old in goldens.EXPECTED.iterdir():
        old.unlink()
    for name, text in found.items():
        (goldens.EXPECTED / name).write_text(text, "utf-8")


main()
