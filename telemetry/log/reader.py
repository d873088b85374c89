"""Reads the logs of a run. They may be damaged, still growing, of a killed process, or of a newer version.

No other module decodes a line. A line that is damaged, or whose fields are not of its record's types, is skipped and
counted.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import structs

from telemetry.log.lines import (
    KINDS,
    LOG_NAME,
    AnyLine,
    Line,
    RunStartLine,
    StallLine,
    read_heartbeat,
)
from telemetry.log.process import ProcessLog
from telemetry.model.records import StallRecord
from telemetry.safety.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from telemetry.report.html.over_time import RunRecorder

_MAX_LINE_BYTES: Final = 1 << 24
"""A longer line is damaged, such as the end of a sparse file. The rest of its file is not read."""

_FREQUENT: Final = re.compile(rb'\{"time":"[^"]*","event":"(window|gpu|host|workers)"')
"""The beginning of a line that is written in every log interval."""

_THINNED_BYTES: Final = 1 << 22
_EVERY: Final = 8
"""Of a file that is larger and was rotated away, one in so many of these lines is read. The next file begins with the
sums of all before it. A week of 64 ranks has 8 GB of logs, and to read a line takes ten times as long as to skip it."""


class NoRunError(Exception):
    """The folder has no run; the text has the reason."""


# -- one line ------------------------------------------------------------------------------------------------------


class _AnyEvent(Line, frozen=True, kw_only=True):
    """A line of any event. What it has besides is not read."""

    event: str


_DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(AnyLine)
_STALL_DECODER: Final = msgspec.json.Decoder(StallRecord)
_LINE_BREAK: Final = re.compile(rb"\\(n|u000[aA])")
_EVENT_DECODER: Final = msgspec.json.Decoder(_AnyEvent)


def decoded(raw: bytes) -> Line | None:
    """The record of a line; None if it is damaged. One of an event that only a newer version knows is a `Line`."""
    try:
        if _LINE_BREAK.search(raw):
            raw = msgspec.json.encode(_unbroken(msgspec.json.decode(raw)))
        line = _DECODER.decode(raw)
        if isinstance(line, StallLine):
            stall = _STALL_DECODER.decode(raw)
            stall.evidence |= msgspec.to_builtins(stall.details)
            line = structs.replace(line, stall=stall)
    except (ValueError, OverflowError, RecursionError):
        return _of_unknown_event(raw)
    return line


def _unbroken(value: Any) -> Any:
    """The fields without line breaks in their texts, which would forge a line of the report. Stacks have them."""
    match value:
        case str():
            return value.replace("\n", " ")
        case list():
            return [_unbroken(each) for each in value]
        case dict():
            return {_unbroken(name): each if name == "stacks" else _unbroken(each) for name, each in value.items()}
    return value


def _of_unknown_event(raw: bytes) -> Line | None:
    try:
        line = _EVENT_DECODER.decode(raw)
    except (ValueError, RecursionError):
        return None
    return None if line.event in KINDS else line


# -- the files of a folder -----------------------------------------------------------------------------------------


class LogName(NamedTuple):
    """What the name of a log says. ``number`` counts the logs of this rank and pid."""

    rank: int
    pid: int
    number: int


def named_by(match: re.Match[str]) -> LogName:
    """The name of a log from a match of `LOG_NAME`."""
    return LogName(int(match["rank"]), int(match["pid"]), int(match["number"] or 1))


def find_logs(run_dir: Path) -> dict[LogName, list[Path]]:
    """The logs in a run folder in their order. Each has files that were rotated away from it first, the oldest first.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    folder = run_dir / "logs"
    if not folder.is_dir():
        raise NoRunError(f"{run_dir} is not a run folder: there is no {folder}{_instead_of(run_dir)}")
    files: dict[LogName, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match and path.is_file():
            files.setdefault(named_by(match), []).append((int(match["rotated"] or 0), path))
    if not files:
        raise NoRunError(f"there is no log in {folder}: no file is named rank-<rank>.<pid>.jsonl")
    # The highest number is the oldest.
    return {name: [path for _, path in sorted(parts, reverse=True)] for name, parts in sorted(files.items())}


def _instead_of(folder: Path) -> str:
    """A hint at the run folder that was probably meant: the parent of these logs, or the newest run in this folder."""
    try:
        if any(LOG_NAME.fullmatch(path.name) for path in folder.iterdir()):
            return f"; its run folder is {folder.absolute().parent}"
        inside = [(logs.stat().st_mtime, logs.parent) for logs in folder.glob("*/logs") if logs.is_dir()]
    except OSError:
        return ""
    return f"; the newest run in it is {max(inside)[1]}" if inside else ""


def _lines(path: Path, *, thinned: bool) -> Iterator[Line | None]:
    """The lines of a file, as `decoded` returns them. What cannot be read counts as one damaged line.

    ``thinned``: if the file is large, some of the frequent lines are left out, but not the last window.
    """
    seen, left_out = Counter[bytes](), b""
    try:
        file = open_regular(path)
        if file is None:
            return
        with file:
            thinned = thinned and os.fstat(file.fileno()).st_size > _THINNED_BYTES
            for raw in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
                frequent = _FREQUENT.match(raw) if thinned else None
                if frequent is not None and raw.endswith(b"}\n"):
                    event = frequent[1]
                    seen[event] += 1
                    leave_out = seen[event] % _EVERY != 0
                    if event == b"window":
                        left_out = raw if leave_out else b""
                    if leave_out:
                        continue
                yield decoded(raw)
                if len(raw) == _MAX_LINE_BYTES:
                    return
    except OSError:
        yield None  # rotated away or unreadable; the other files still count
    if left_out:
        yield decoded(left_out)


# -- the process that a line belongs to ----------------------------------------------------------------------------


class ProcessLogs:
    """Sorts log lines by process, in whichever file they are. ``all``: the processes so far.

    Several processes write to one file if a container is restarted with the same pid, or if two nodes share the folder.
    One process writes to several files if it gets another rank. A ``run_start`` that does not continue a log begins
    another process.
    """

    def __init__(self) -> None:
        self.all: list[ProcessLog] = []
        self._by_life: dict[str | None, ProcessLog] = {}
        self._newest: dict[LogName, dict[str | None, ProcessLog]] = {}  # by node; None: of all nodes

    def add(self, name: LogName, line: Line | None) -> ProcessLog:
        """Add the next line of a log; None for a damaged one. Returns its process."""
        newest = self._newest.setdefault(name, {})
        log = newest.get(None if line is None else line.node)
        if isinstance(line, RunStartLine):
            log = self._by_life.get(line.life) or (log if line.continued else None)
        if log is None and None in newest and newest[None].empty:
            log = newest[None]  # it has only damaged lines so far
        if log is None:
            log = ProcessLog(name.rank, name.pid)
            self.all.append(log)
        newest[None] = log
        if line is None:
            log.damaged_lines += 1
            return log
        newest[line.node] = log
        if isinstance(line, RunStartLine) and line.life:
            self._by_life[line.life] = log
        log.add(line)
        return log


def take_heartbeats(folder: Path, processes: Iterable[ProcessLog]) -> None:
    """Set ``beat`` of each process that did not end by itself."""
    for process in processes:
        if not process.ended:
            process.beat = read_heartbeat(folder, process.head.life)


# -- all logs ------------------------------------------------------------------------------------------------------


def load(run_dir: Path, recorder: RunRecorder | None = None, *, all_windows: bool = False) -> list[ProcessLog]:
    """All processes of the newest run in a folder, by rank and then by start.

    Args:
        run_dir: the run folder.
        recorder: takes the lines.
        all_windows: whether no window of a large file is left out.

    Raises:
        NoRunError: the folder does not exist, or has no log with a line.
    """
    logs, processes = find_logs(run_dir), ProcessLogs()
    if recorder is not None:
        recorder.begin(len({name.rank for name in logs}))
    for name, paths in logs.items():
        for line in (line for path in paths for line in _lines(path, thinned=not all_windows and path != paths[-1])):
            process = processes.add(name, line)
            if recorder is not None and line is not None:
                recorder.take(line, process)
    if not processes.all:
        raise NoRunError(f"the logs in {run_dir / 'logs'} have no line")
    newest = max(processes.all, key=lambda process: process.started)
    own = [process for process in processes.all if process.run == newest.run]
    take_heartbeats(run_dir / "attempts", own)
    return sorted(own, key=lambda process: (process.rank, process.started))
