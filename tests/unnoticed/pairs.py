"""Runs a script bare and under the agent, each in a process of its own: nobody may be able to tell the two apart."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.processes import HANG, quiet, write
from tests.faults.warm_python import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULE = ("-m", "telemetry", "run")
COMMAND = (str(Path(sys.executable).with_name("telemetry")), "run")
ITSELF = ()
"""What starts a script under the agent. The last one is for a script that starts the agent itself."""

_OWN = re.compile(r"\b0x[0-9a-f]+|\bpid=\d+|^W\d{4} [\d:.]+ +\d+ ", re.MULTILINE)
"""What no two processes say alike: addresses, pids, and the time and the process before a warning of torch's."""


@dataclass
class Ended:
    """How a process ended, what it said, and the files in its working folder."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]


def pair(
    folder: Path,
    source: str,
    *arguments: object,
    under: Sequence[str] = MODULE,
    cold: bool = False,
    options: Sequence[str] = (),
    module: bool = False,
    beside: Mapping[str, str] = {},
    preload: str = "",
    **variables: str,
) -> tuple[Ended, Ended]:
    """Run a script bare and under the agent, both at once, each in a working folder of its own.

    Args:
        folder: gets the working folders ``bare`` and ``ours``, and the run folder ``ours-run``.
        source: the script.
        arguments: of the script.
        under: what starts the script under the agent.
        cold: start a new Python, for scripts that are about how a process starts. Others run in a process with torch.
        options: of this Python.
        module: run the script by its name, not as a file.
        beside: other files in the script's folder.
        preload: a module that the process has, too.
        variables: of the environment.
    """
    running = []
    for name in ("bare", "ours"):
        place = folder / name
        script = write(place, "script.py", source)
        for file, content in beside.items():
            write(place, file, content)
        env = quiet(**({"TELEMETRY_RUN_DIR": str(folder / f"{name}-run")} | variables))
        if name == "bare":
            env["TELEMETRY_DISABLED"] = "1"  # for a script that starts the agent itself
        command = [*(under if name == "ours" else ()), *(("-m", "script") if module else (script,)), *arguments]
        streams = [(folder / f"{name}.{stream}").open("w+b") for stream in ("out", "err")]
        running.append((_start(command, place, env, streams, cold, options, preload), streams, place))
    bare, ours = [_ended(*each) for each in running]
    return bare, ours


def _start(command, place, env, streams, cold, options, preload):
    with Path("/dev/null").open("rb") as nothing:
        if cold:
            whole = [sys.executable, *options, *map(str, command)]
            return subprocess.Popen(whole, cwd=place, env=env, stdin=nothing, stdout=streams[0], stderr=streams[1])
        numbers = [each.fileno() for each in (nothing, *streams)]
        return ForkedProcess(
            command, place, env, stdin=numbers[0], stdout=numbers[1], stderr=numbers[2], preload=preload
        )


def _ended(process, streams, place: Path) -> Ended:
    try:
        code, texts = process.wait(HANG), []
    except subprocess.TimeoutExpired:
        if isinstance(process, subprocess.Popen):  # the other kind has killed it
            process.kill()
        raise
    for stream in streams:
        with stream:
            stream.seek(0)
            texts.append(_OWN.sub("", stream.read().decode().replace(str(place), ".")))
    found = {path.relative_to(place): path for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts}
    return Ended(code, *texts, {str(name): path.read_bytes() for name, path in found.items() if path.is_file()})


def unchanged(folder: Path, source: str, *arguments: object, code: int = 0, **how) -> Ended:
    """Run a script as `pair`, and compare. Returns how it ended without the agent, which must be with this status."""
    bare, ours = pair(folder, source, *arguments, **how)
    if bare.code != code or not bare.out:
        pytest.fail(f"the script itself is wrong: it ended with {bare.code}\n{bare.out}{bare.err}")
    assert (ours.code, ours.out, ours.err) == (bare.code, bare.out, bare.err), (
        f"it ended with {ours.code}",
        *difflib.unified_diff(bare.out.splitlines(), ours.out.splitlines(), "bare", "ours", n=0),
        *difflib.unified_diff(bare.err.splitlines(), ours.err.splitlines(), "bare", "ours", n=0),
    )
    assert ours.files == bare.files
    return bare
