"""The log files of a run, read back: tolerant of what is torn, killed, still growing or newer than this reader."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.sketch import Sketch, parse_counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME: Final = re.compile(r"rank-(\d+)\.(\d+)(?:\.(\d+))?\.jsonl(?:\.(\d+))?")
"""Rank, pid, which life of that pid (none for the first), and how often the file was rotated away."""


_OF_THE_RANK: Final = ("local_rank", "world_size", "launcher", "rank_source", "claimed_rank")
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
    run: object = None

    @property
    def started(self) -> str:
        """When the process began, ISO-8601; sorts as text."""
        return str(self.head.get("started") or self.head.get("time") or "")


def load(run_dir: Path) -> list[ProcessLog]:
    """Every process of the newest run in a folder, by rank and then by start.

    Raises:
        NoRunError: there is no such folder, or no log in it.
    """
    logs = run_dir / "logs"
    if not logs.is_dir():
        raise NoRunError(f"{run_dir} is no run folder: there is no {logs}")
    files: dict[tuple[int, int, int], list[tuple[int, Path]]] = {}
    for path in logs.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            key = (int(match[1]), int(match[2]), int(match[3] or 1))
            files.setdefault(key, []).append((int(match[4] or 0), path))
    if not files:
        raise NoRunError(f"there is no log in {logs}: no file is named rank-<rank>.<pid>.jsonl")
    lives = _Lives()
    for (rank, pid, _), parts in sorted(files.items()):
        lives.load(rank, pid, parts)
    processes = lives.all
    newest = max(processes, key=lambda process: process.started)
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
        newest = ProcessLog(rank, pid)
        by_node: dict[object, ProcessLog] = {}
        self.all.append(newest)
        for _, path in sorted(parts, reverse=True):  # the highest number is the oldest
            for line in _lines(path):
                if line is None:
                    newest.torn_lines += 1
                    continue
                node = line.get("node")
                log = by_node.get(node)
                if log is None or line.get("event") == "run_start":
                    log = self._life_of(line, log, unused=None if by_node else newest, who=(rank, pid))
                newest = by_node[node] = log
                _take(line, log)

    def _life_of(
        self, line: dict[str, Any], log: ProcessLog | None, *, unused: ProcessLog | None, who: tuple[int, int]
    ) -> ProcessLog:
        id_ = line.get("life")
        known = self._by_id.get(id_) if isinstance(id_, str) else None
        if known is not None:
            if unused is not None and not unused.torn_lines:
                self.all.remove(unused)
            return known
        if log is None or not line.get("continued"):
            log = unused
            if log is None:
                log = ProcessLog(*who)
                self.all.append(log)
        if isinstance(id_, str):
            self._by_id[id_] = log
        return log


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a file; None for one that cannot be read."""
    try:
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = orjson.loads(raw)
                except ValueError:
                    if raw.strip():
                        yield None
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        yield None  # rotated away or unreadable: what the others say still holds


def _take(line: dict[str, Any], log: ProcessLog) -> None:
    event, rank = line.get("event"), line.get("rank")
    if isinstance(rank, int) and rank >= 0:
        log.rank = rank
    log.run = line.get("run")
    log.head = log.head or {name: line.get(name) for name in ("local_rank", "node", "time")}
    log.last_time = max(log.last_time, str(line.get("time", "")))
    if event == "run_start":
        if "started" in log.head:  # it goes on in another file, or as another rank
            log.head |= {name: line[name] for name in _OF_THE_RANK if name in line}
        else:
            log.head = line
            if line.get("continued"):  # the files before this one are gone: it carries what was in them
                _add(log.step, line.get("step_sketch"), line.get("step_max_seconds"))
                _add(log.wait, line.get("data_wait_sketch"), line.get("data_wait_max_seconds"))
    elif event == "window":
        log.totals = line
        for sketch, name in ((log.step, "step"), (log.wait, "data_wait")):
            longest = line.get(f"{name}_seconds")
            _add(sketch, line.get(f"{name}_sketch"), longest.get("max") if isinstance(longest, dict) else None)
    elif event == "run_end":
        log.totals, log.ended = line, True
    elif event in {"stall_open", "stall_close"}:
        log.stalls.append(line)
    elif event == "snapshot":
        log.snapshots.append(line)
    elif event == "error":
        log.errors.append(line)


def _add(sketch: Sketch, counts: object, largest: object) -> None:
    sketch.merge(parse_counts(counts), float(largest) if isinstance(largest, (int, float)) else 0.0)
