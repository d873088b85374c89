"""What the commands print: no text of others commands the terminal, and no encoding ends a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from telemetry.util.text import one_line, plain

TITLE = "\x1b]0;owned\x07"
COLOUR = "\x9b31m"
HOSTILE = f"{TITLE}{COLOUR}\u202e\nrank 0: all is well\r"


def telemetry(*arguments, encoding="utf-8", **options):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(
        [sys.executable, "-m", "telemetry", *map(str, arguments)], capture_output=True, env=environment, **options
    )


def not_plain(output: bytes, encoding: str) -> set[str]:
    return {c for c in output.decode(encoding) if not c.isprintable()} - {"\n"}


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run that has ended, and whose every text is an attack."""
    common = dict(time="2026-01-01T00:00:00.000Z", run=HOSTILE, rank=0, local_rank=0, node=HOSTILE, pid=7)
    ledger = dict(startup=0.0, data_wait=8.0, compute=2.0, evaluation=0.0, checkpoint=0.0, other=0.0)
    advice = [dict(action=HOSTILE, setting=HOSTILE, value=HOSTILE, predicted_speedup=2.0, because=HOSTILE)]
    evidence = dict(stuck_in="data_wait", stuck_at=HOSTILE, stacks=[HOSTILE, f"{HOSTILE}\n{HOSTILE}"])
    totals = dict(steps_total=10, wall_seconds=10.0, ledger_total_seconds=ledger, exposed_wait_total_seconds=8.0)
    lines = [
        common | dict(event="run_start", started=common["time"]),
        common | dict(event="stall_open", cause=HOSTILE, opened=HOSTILE, evidence=evidence, advice=advice),
        common | dict(event="error", source="jsonl", message=HOSTILE, errors_total=1),
        common | dict(event="snapshot", path=f"snapshots/{HOSTILE}", reason=HOSTILE, first_step=1, last_step=2),
        common | dict(event="run_end") | totals,
    ]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.7.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_report_cannot_command_the_terminal(hostile_run, encoding):
    done = telemetry("report", hostile_run, encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert not_plain(done.stdout + done.stderr, encoding) == set()
    assert b"owned" in done.stdout
    assert not any(line.startswith(b"rank 0: all is well") for line in done.stdout.splitlines()), "a forged line"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_the_json_report_stays_json_in_any_encoding(hostile_run, encoding):
    done = telemetry("report", hostile_run, "--json", encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert not_plain(done.stdout, encoding) == set()
    assert "owned" in json.loads(done.stdout)["ranks"][0]["node"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_errors_of_the_commands_cannot_command_it(hostile_run, tmp_path, encoding):
    for arguments in (
        ["report", f"no{TITLE}where\u20ac"],
        ["trace", f"no{TITLE}where\u20ac"],
        ["snapshot", hostile_run],
        ["snapshot", f"no{TITLE}where\u20ac"],
        ["snapshot", hostile_run, "--rank", f"{TITLE}\u20ac"],
        ["run", f"no{TITLE}where\u20ac.py"],
        ["doctor", "--run-dir", tmp_path / f"a{TITLE}\u20ac"],
        [f"{TITLE}\u20ac"],
    ):
        done = telemetry(*arguments, encoding=encoding)
        assert b"Traceback" not in done.stderr, done.stderr
        assert not_plain(done.stdout + done.stderr, encoding) == set(), arguments


def test_output_that_cannot_be_written_is_an_error(hostile_run):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "telemetry", "report", str(hostile_run)], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.decode().startswith("telemetry: the standard output cannot be written")
    assert b"Traceback" not in done.stderr


def test_text_that_is_plain_stays_as_it_is():
    assert plain("äöü € 日本 |\nb") == "äöü € 日本 |\nb"
    assert plain("a\x1b[0m\tb\x00") == "a\\x1b[0m\\tb\\x00"
    assert one_line("a\nb\r\nc") == "a b c"
