"""The log files of a run, read back: tolerant of what is torn, killed, still growing or newer than this reader."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.files import open_regular
from telemetry.report.schema import checked
from telemetry.sketch import Sketch, parse_counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME: Final = re.compile(r"rank-(\d+)\.(\d+)(?:\.(\d+))?\.jsonl(?:\.(\d+))?")
"""Rank, pid, which life of that pid (none for the first), and how often the file was rotated away."""

_OF_THE_RANK: Final = ("local_rank", "world_size", "claimed_rank")
"""Fields of ``run_start`` that change when a process learns its rank."""


class NoRunError(Exception):
    """The folder holds no run; the text says what was looked for."""


@dataclass
class ProcessLog:
    """What one life of a process of a run has logged: from one start of the agent to its end.

    Attributes:
        rank: the one it had last: a process may learn its rank after its first lines.
        head: its ``run_start``.
        totals: the newest line that carries the totals of the run so far (``window`` or ``run_end``).
        ended: whether ``run_end`` is there: the process ended by itself.
        step: step durations; ``wait``: data waits. Of the whole run, also where old files were rotated away.
        stalls, snapshots, errors: lines of these events, oldest first.
        torn_lines: lines that could not be read.
        wrong_fields: fields that were left out because they were of the wrong type.
        skipped: names of logs of the run that are no regular file and were not read; in the newest process only.
    """

    rank: int
    pid: int
    head: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    last_time: str = ""
    ended: bool = False
    step: Sketch = field(default_factory=Sketch)
    wait: Sketch = field(default_factory=Sketch)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    torn_lines: int = 0
    wrong_fields: int = 0
    skipped: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def started(self) -> str:
        """When the process began, ISO-8601; sorts as text."""
        started: str = self.head.get("started") or self.head.get("time") or ""
        return started


def load(run_dir: Path) -> list[ProcessLog]:
    """Every process of the newest run in a folder, by rank and then by start.

    Raises:
        NoRunError: there is no such folder, or no log in it.
    """
    logs = run_dir / "logs"
    if not logs.is_dir():
        raise NoRunError(f"{run_dir} is no run folder: there is no {logs}")
    files: dict[tuple[int, int, int], list[tuple[int, Path]]] = {}
    skipped: list[str] = []
    for path in logs.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and not path.is_file():  # a FIFO would be waited for
            skipped.append(path.name)
        elif match:
            key = (int(match[1]), int(match[2]), int(match[3] or 1))
            files.setdefault(key, []).append((int(match[4] or 0), path))
    if not files:
        raise NoRunError(f"there is no log in {logs}: no file is named rank-<rank>.<pid>.jsonl")
    lives = _Lives()
    for (rank, pid, _), parts in sorted(files.items()):
        lives.load(rank, pid, parts)
    processes = lives.all
    newest = max(processes, key=lambda process: process.started)
    newest.skipped = sorted(skipped)
    return sorted(
        (process for process in processes if process.run == newest.run),
        key=lambda process: (process.rank, process.started),
    )


class _Lives:
    """Tells the lives of processes apart, whatever file their lines are in.

    A file has been written by several where a container was restarted with the same pid, or where two nodes share the
    folder. A ``run_start`` that does not continue a log begins another life.
    """

    def __init__(self) -> None:
        self.all: list[ProcessLog] = []
        self._by_id: dict[str, ProcessLog] = {}

    def load(self, rank: int, pid: int, parts: list[tuple[int, Path]]) -> None:
        """Read one file with what was rotated away of it."""
        newest = unused = ProcessLog(rank, pid)
        by_node: dict[str, ProcessLog] = {}
        self.all.append(unused)
        for _, path in sorted(parts, reverse=True):  # the highest number is the oldest
            for line, wrong in _lines(path):
                if line is None:
                    newest.torn_lines += 1
                    continue
                node = line.get("node")
                log = newest if node is None else by_node.get(node)  # without it the line was damaged
                if log is None or line.get("event") == "run_start":
                    log = self._life_of(line, log, ProcessLog(rank, pid) if by_node else unused)
                newest = log
                if node is not None:
                    by_node[node] = log
                log.wrong_fields += wrong
                _take(line, log)
        if by_node and not unused.head and not unused.torn_lines:  # all of it belongs to a life of another file
            self.all = [log for log in self.all if log is not unused]

    def _life_of(self, line: dict[str, Any], log: ProcessLog | None, fresh: ProcessLog) -> ProcessLog:
        id_ = line.get("life")
        if id_ in self._by_id:
            return self._by_id[id_]
        if log is None or not line.get("continued"):
            log = fresh
            if self.all[-1] is not fresh:
                self.all.append(fresh)
        if id_ is not None:
            self._by_id[id_] = log
        return log


def _lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """The lines of a file, None for one that cannot be read; and how many fields of it were left out as wrong."""
    try:
        file = open_regular(path)
        if file is None:
            return
        with file:
            for raw in file:
                try:
                    line = orjson.loads(raw)
                except ValueError:
                    if raw.strip():
                        yield None, 0
                    continue
                if isinstance(line, dict):
                    sound, wrong = checked(line)
                    yield sound, len(wrong)
    except OSError:
        yield None, 0  # rotated away or unreadable: what the others say still holds


def _take(line: dict[str, Any], log: ProcessLog) -> None:
    event, log.rank = line.get("event"), line.get("rank", log.rank)
    log.run = line.get("run", log.run)
    log.head = log.head or {name: line.get(name) for name in ("local_rank", "node", "time")}
    log.last_time = max(log.last_time, line.get("time", ""))
    if event == "run_start":
        if "started" in log.head:  # it goes on in another file, or as another rank
            log.head |= {name: line[name] for name in _OF_THE_RANK if name in line}
        else:
            log.head = line
            if line.get("continued"):  # the files before this one are gone: it carries what was in them
                _add(log.step, line.get("step_sketch"), line.get("step_max_seconds"))
                _add(log.wait, line.get("data_wait_sketch"), line.get("data_wait_max_seconds"))
    elif event == "window":
        _take_totals(line, log)
        for sketch, name in ((log.step, "step"), (log.wait, "data_wait")):
            _add(sketch, line.get(f"{name}_sketch"), line.get(f"{name}_seconds", {}).get("max"))
    elif event == "run_end":
        _take_totals(line, log)
        log.ended = True
    elif event in {"stall_open", "stall_close"}:
        log.stalls.append(line)
    elif event == "snapshot":
        log.snapshots.append(line)
    elif event == "error":
        log.errors.append(line)


def _take_totals(line: dict[str, Any], log: ProcessLog) -> None:
    """The newest totals stand for the whole run, unless the line was damaged: then those before it do."""
    if line.keys() >= {"ledger_total_seconds", "wall_seconds", "steps_total"}:
        log.totals = line


def _add(sketch: Sketch, counts: object, largest: float | None) -> None:
    sketch.merge(parse_counts(counts), largest or 0.0)
