"""Reads the log files of a run. They may be damaged, still growing, of a killed process, or of a newer version."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from telemetry.log_lines import (
    KINDS,
    LOG_NAME,
    AnyLine,
    Line,
    RunStartLine,
    StallEvidence,
    StallLine,
    StragglerCodeLine,
    read_heartbeat,
)
from telemetry.report.process_log import ProcessLog, unix
from telemetry.util.files import open_regular
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from telemetry.report.html.recorder import RunRecorder

_DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(AnyLine)
_BEGINNING: Final = re.compile(rb'\{"time":"[^"]*","event":"(\w+)"')
"""The beginning of each line that the agent writes."""

_WRONG_PLACE: Final = re.compile(r"`\$((?:\.\w+|\[\d+\])+)")
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]")
"""One step of a path such as ``$.advice[0].value``, which is the place of a wrong value in a message of msgspec."""

_FREQUENT: Final = frozenset({b"window", b"gpu", b"host", b"workers"})
"""The events of every window. Some of their lines are skipped unparsed.

A week of 64 ranks has 8 GB of logs. Parsing a line takes 5 us, reading and skipping it 0.7 us.
"""

_WINDOW_SECONDS: Final = 300.0
"""Time between two windows that are read if nobody needs the others. A process is taken to go on evenly meanwhile."""

_MAX_SKIPPED: Final = 1 << 30
_MAX_HEAD_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 1 << 24
_BUFFER_BYTES: Final = 1 << 17
"""With 8 KiB, skipping a line took half as long again."""

_MIN_BYTES_SIDE_BY_SIDE: Final = 1 << 28
"""This process reads smaller logs alone in a second or two."""

_MAX_PROCESSES: Final = 16
"""With more processes, the storage is the limit."""


class NoRunError(Exception):
    """The folder has no run; the text has the reason."""


# -- one line ------------------------------------------------------------------------------------------------------


def parsed(raw: bytes) -> tuple[Line | None, int] | None:
    """Parse a line of a log. Returns None if it is empty or no object.

    Returns:
        Its record, or None if it cannot be read, and how many fields were left out because of a wrong type. A line of
        an event that this version does not know is a `Line`.
    """
    try:
        if raw.isascii() and b"\\" not in raw:  # otherwise a text may have to be escaped
            with suppress(msgspec.ValidationError):
                line = _DECODER.decode(raw)
                return line, _leave_out_damaged_evidence(line)
        fields = msgspec.json.decode(raw)
        if not isinstance(fields, dict):
            return None
        event = fields.pop("event", None)
        line, wrong = _sound(_printable(fields), KINDS.get(event, Line) if isinstance(event, str) else Line)
        return line, wrong + _leave_out_damaged_evidence(line)
    except (ValueError, RecursionError):
        return (None, 0) if raw.strip() else None


def _leave_out_damaged_evidence(line: Line) -> int:
    """Drop the fields of a stall's evidence that have a wrong type. Returns their number."""
    if not isinstance(line, (StallLine, StragglerCodeLine)) or not line.evidence:
        return 0
    known = StallEvidence.__annotations__
    sound, wrong = _sound(dict(line.evidence), StallEvidence)
    for name in known.keys() & line.evidence.keys():
        del line.evidence[name]
    line.evidence.update((name, sound[name]) for name in known if name in sound)
    return wrong


def _sound(fields: dict[str, Any], kind: Any) -> tuple[Any, int]:
    """The fields of a record that have the right types, and the number of the other fields."""
    wrong = 0
    while True:
        try:
            return msgspec.convert(fields, kind, str_keys=True), wrong
        except msgspec.ValidationError as error:
            place = _WRONG_PLACE.search(str(error))
            if place is None:
                raise
            *way, last = [name or int(at) for name, at in _STEP.findall(place[1])]
            inner: Any = fields
            for step in way:
                inner = inner[step]
            wrong += inner.pop(last) is not None


def _printable(value: Any) -> Any:
    """The value with all texts on one line, and escaped. The stacks of a stuck run have line breaks."""
    if isinstance(value, str):
        return value if value.isprintable() else one_line(value)
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {_printable(name): each if name == "stacks" else _printable(each) for name, each in value.items()}
    return value


def take_heartbeats(folder: Path, processes: Iterable[ProcessLog]) -> None:
    """Set ``beat`` of each process that did not end by itself."""
    for process in processes:
        if not process.ended:
            process.beat = read_heartbeat(folder, process.head.life)


# -- the files of a folder -----------------------------------------------------------------------------------------


class RotatedLog(NamedTuple):
    """One log. ``paths``: its file, and the files that were rotated away from it, the oldest first."""

    rank: int
    pid: int
    paths: list[Path]


def find_logs(run_dir: Path) -> tuple[list[RotatedLog], list[str]]:
    """The logs in a run folder by rank, pid and number, and the names of logs that are not regular files.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    folder = run_dir / "logs"
    if not folder.is_dir():
        raise NoRunError(f"{run_dir} is not a run folder: there is no {folder}{_instead_of(run_dir)}")
    files: dict[tuple[int, int, int], list[tuple[int, Path]]] = {}
    skipped: list[str] = []
    for path in folder.iterdir():
        match = LOG_NAME.fullmatch(path.name)
        if match and not path.is_file():  # opening a FIFO would block
            skipped.append(path.name)
        elif match:
            key = (int(match["rank"]), int(match["pid"]), int(match["number"] or 1))
            files.setdefault(key, []).append((int(match["rotated"] or 0), path))
    if not files:
        raise NoRunError(f"there is no log in {folder}: no file is named rank-<rank>.<pid>.jsonl")
    # The highest number is the oldest.
    logs = [
        RotatedLog(rank, pid, [path for _, path in sorted(parts, reverse=True)])
        for (rank, pid, _), parts in sorted(files.items())
    ]
    return logs, sorted(skipped)


def _instead_of(folder: Path) -> str:
    """A hint at the run folder that was probably meant: the parent of these logs, or the newest run in this folder."""
    try:
        if any(LOG_NAME.fullmatch(path.name) for path in folder.iterdir()):
            return f"; its run folder is {folder.absolute().parent}"
        inside = [(logs.stat().st_mtime, logs.parent) for logs in folder.glob("*/logs") if logs.is_dir()]
    except OSError:
        return ""
    return f"; the newest run in it is {max(inside)[1]}" if inside else ""


def _head_of(path: Path) -> Line:
    """The first line of a file, normally its ``run_start``; an empty line if it cannot be read."""
    try:
        file = open_regular(path)
        if file is None:
            return Line()
        with file:
            found = parsed(file.readline(_MAX_HEAD_BYTES))
    except OSError:
        return Line()
    return (found and found[0]) or Line()


def _newest_run(logs: Sequence[RotatedLog]) -> tuple[str, int]:
    """The newest run by the first lines of the files, and the number of its ranks with a log."""
    ranks: dict[str, set[int]] = {}
    began: dict[str, str] = {}
    for log in logs:
        for head in map(_head_of, log.paths):
            started = head.started if isinstance(head, RunStartLine) else ""
            ranks.setdefault(head.run, set()).add(log.rank)
            began[head.run] = max(began.get(head.run, ""), started or head.time)
    run = max(began, key=began.__getitem__)
    return run, len(ranks[run])


# -- the process that a line belongs to ----------------------------------------------------------------------------


class ProcessLogs:
    """Sorts log lines by process, in whichever file they are. ``all``: the processes so far.

    Several processes write to one file if a container is restarted with the same pid, or if two nodes share the folder.
    A ``run_start`` that does not continue a log begins another process.
    """

    def __init__(self) -> None:
        self.all: list[ProcessLog] = []
        self._by_life: dict[str, ProcessLog] = {}

    def of_file(self, rank: int, pid: int) -> LinesOfFile:
        """An object that takes the lines of one log, with its rotated files."""
        unused = ProcessLog(rank, pid)
        self.all.append(unused)
        return LinesOfFile(self, unused)

    def leave_out_if_empty(self, file: LinesOfFile) -> None:
        """Drop the process of a file, after its last line, if all lines belong to processes of other files."""
        if file.by_node and file.unused.empty and not file.unused.torn_lines:
            self.all = [log for log in self.all if log is not file.unused]

    def log_of(self, line: Line, log: ProcessLog | None, fresh: ProcessLog) -> ProcessLog:
        """The process of a first line. ``log``: process of the line before; ``fresh``: process for a new log."""
        life, continued = (line.life, line.continued) if isinstance(line, RunStartLine) else (None, False)
        if life in self._by_life:
            return self._by_life[life]
        if log is None or not continued:
            log = fresh
            if all(each is not fresh for each in reversed(self.all)):
                self.all.append(fresh)
        if life is not None:
            self._by_life[life] = log
        return log


class LinesOfFile:
    """The lines of one log, in the order in which they were written.

    Attributes:
        newest: process of the newest line.
        by_node: newest process of each node. ``unused``: process of this file, before its first line.
    """

    def __init__(self, logs: ProcessLogs, unused: ProcessLog) -> None:
        self._logs = logs
        self.newest = self.unused = unused
        self.by_node: dict[str, ProcessLog] = {}

    def add(self, line: Line | None, wrong: int) -> None:
        """Add a line, as `parsed` returns it."""
        if line is None:
            self.newest.torn_lines += 1
            return
        log = self.newest if line.node is None else self.by_node.get(line.node)  # one without a node is damaged
        if log is None or isinstance(line, RunStartLine):
            fresh = ProcessLog(self.unused.rank, self.unused.pid) if self.by_node else self.unused
            log = self._logs.log_of(line, log, fresh)
        self.newest = log
        if line.node is not None:
            self.by_node[line.node] = log
        log.wrong_fields += wrong
        log.add(line)


# -- the lines of one log ------------------------------------------------------------------------------------------


class _Selection:
    """Decides which lines of one file are parsed. All are, but for those of the frequent events.

    The first line of a frequent event is parsed, and then one line in so many seconds as the recorder needs.

    Args:
        recorder: recorder of the page; None if only the sums are needed.
        windows: whether windows may be skipped: a later line of the process has their sums.

    Attributes:
        skipped_windows: whether a window was skipped. ``newest_skipped``: the newest window if it was, else empty.
    """

    def __init__(self, recorder: RunRecorder | None, *, windows: bool) -> None:
        self._recorder = recorder
        self._windows = windows
        self._left: dict[bytes, int] = {}  # how many of the next lines with an event to skip
        self._newest: dict[bytes, tuple[float, int]] = {}
        self.skipped_windows = False
        self.newest_skipped = b""

    def lines(self, path: Path) -> Iterator[tuple[Line | None, int]]:
        """The lines of a file that are not skipped, as `parsed` returns them; a torn line if it cannot be read."""
        try:
            file = open_regular(path, buffer_bytes=_BUFFER_BYTES)
            if file is None:
                return
            left = self._left
            with file:
                for raw in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
                    begins = _BEGINNING.match(raw)
                    event = begins[1] if begins else b""
                    if left.get(event) and raw.endswith(b"}\n"):  # a torn line is counted
                        left[event] -= 1
                        if event == b"window":
                            self.skipped_windows, self.newest_skipped = True, raw
                        continue
                    if len(raw) == _MAX_LINE_BYTES and not raw.endswith(b"\n"):
                        yield None, 0  # damaged, such as a sparse file; the rest counts as one torn line
                        return
                    found = parsed(raw)
                    if found is not None:
                        if event in _FREQUENT and found[0] is not None:
                            self._note_parsed(event, found[0])
                        yield found
            newest = parsed(self.newest_skipped) if self.newest_skipped else None
            if newest is not None:  # the next file may have no window yet, and its head no totals
                yield newest
        except OSError:
            yield None, 0  # rotated away or unreadable; the other files still count

    def _note_parsed(self, event: bytes, line: Line) -> None:
        """Decide how many lines to skip after a line of a frequent event, from the time since the last one."""
        if event == b"window":
            self.newest_skipped = b""
            if not self._windows:
                return
        if self._recorder is not None:
            spacing = self._recorder.spacing_seconds()
        else:
            spacing = _WINDOW_SECONDS if event == b"window" else math.inf
        time = unix(line.time)
        if time is None or spacing == math.inf:
            self._left[event] = 0 if time is None else _MAX_SKIPPED
            return
        before, skipped = self._newest.get(event, (time, 0))
        each = (time - before) / (skipped + 1)
        self._left[event] = min(max(0, int(spacing / each) - 1), _MAX_SKIPPED) if each > 0 else 0
        self._newest[event] = time, self._left[event]

    def keep_windows(self) -> None:
        self._windows = False
        self._left.pop(b"window", None)


def _read_log(file: LinesOfFile, paths: Sequence[Path], recorder: RunRecorder | None, run: str, *, all_: bool) -> None:
    """Read one log with its rotated files. The recorder gets the lines of one run."""
    skipped = False
    for path, later in zip(paths, [*paths[1:], None], strict=True):
        selection = _Selection(recorder, windows=not all_ and _has_sums_of(later, path))
        for line, wrong in selection.lines(path):
            before = file.newest
            file.add(line, wrong)
            if line is None:
                continue
            if file.newest is not before and before is not file.unused:
                selection.keep_windows()  # of several processes in one file
            if skipped and isinstance(line, RunStartLine):
                file.newest.take_sums(line)
                skipped = False
            if recorder is not None and file.newest.run == run:
                recorder.take(line, file.newest)
        skipped = selection.skipped_windows


def _has_sums_of(later: Path | None, path: Path) -> bool:
    """Whether a later file is of the same process, and its first line has the sums of the windows in a file."""
    if later is None:
        return False
    first, head = _head_of(path), _head_of(later)
    if not isinstance(first, RunStartLine) or not isinstance(head, RunStartLine) or first.life is None:
        return False
    return head.life == first.life and head.step_sketch is not None and head.data_wait_sketch is not None


# -- all logs ------------------------------------------------------------------------------------------------------


def load(
    run_dir: Path, recorder: RunRecorder | None = None, *, all_windows: bool = False, side_by_side: bool = False
) -> list[ProcessLog]:
    """All processes of the newest run in a folder, by rank and then by start.

    Args:
        run_dir: the run folder.
        recorder: takes every line of that run that is not skipped. It gets none if the newest run begins in the middle
            of a file, as where nodes of two runs write to one.
        all_windows: whether every window is read. Otherwise some are skipped where a later line of the process has
            their sums.
        side_by_side: whether other processes may be started to read large logs.

    Raises:
        NoRunError: the folder does not exist, or has no log.
    """
    logs, skipped = find_logs(run_dir)
    run = ""
    if recorder is not None:
        run, ranks = _newest_run(logs)
        recorder.begin(ranks)
    found = (side_by_side and _read_side_by_side(logs, recorder, run)) or _read(logs, recorder, run, all_=all_windows)
    newest = max(found, key=lambda process: process.started)
    if recorder is not None and newest.run != run:
        recorder.begin(1)
    own = [process for process in found if process.run == newest.run]
    take_heartbeats(run_dir / "attempts", own)
    newest.skipped = skipped
    return sorted(own, key=lambda process: (process.rank, process.started))


def _read(
    logs: Sequence[RotatedLog], recorder: RunRecorder | None, run: str, *, all_: bool = False
) -> list[ProcessLog]:
    processes = ProcessLogs()
    for log in logs:
        file = processes.of_file(log.rank, log.pid)
        _read_log(file, log.paths, recorder, run, all_=all_)
        processes.leave_out_if_empty(file)
    return processes.all


def _read_side_by_side(logs: Sequence[RotatedLog], recorder: RunRecorder | None, run: str) -> list[ProcessLog] | None:
    """Read with several processes: parsing takes one core, and most machines have more.

    The logs of one pid stay together, because a process that gets another rank goes on in another log.

    Returns:
        None if it is not worth it, or not possible. The caller must then read; the recorder is still empty.
    """
    by_pid: dict[int, list[RotatedLog]] = {}
    for log in logs:
        by_pid.setdefault(log.pid, []).append(log)
    count = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES, len(by_pid))
    if count < 2 or sum(map(_size, logs)) < _MIN_BYTES_SIDE_BY_SIDE:
        return None
    pids = [*by_pid]
    shares = [sorted(log for pid in pids[first::count] for log in by_pid[pid]) for first in range(count)]
    recorders = [None if recorder is None else recorder.part(len({log.rank for log in share})) for share in shares]
    try:
        # Forked: a new interpreter would import all of this again. The commands have no threads.
        with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool:
            found = [*pool.map(_read_share, shares, recorders, repeat(run))]
    except (OSError, BrokenProcessPool):  # no process can be started, or one was killed
        return None
    for _, part in found:
        if recorder is not None and part is not None:
            recorder.add(part)
    return [log for processes, _ in found for log in processes]


def _read_share(
    logs: Sequence[RotatedLog], recorder: RunRecorder | None, run: str
) -> tuple[list[ProcessLog], RunRecorder | None]:
    return _read(logs, recorder, run), recorder


def _size(log: RotatedLog) -> int:
    try:
        return sum(path.stat().st_size for path in log.paths)
    except OSError:
        return 0
