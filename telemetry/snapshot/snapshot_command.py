"""``telemetry snapshot RUN_DIR [--rank all|N] [--steps K]``: asks a running job for a snapshot, and waits for it.

It must be called by the same user, on the same file system. Nothing is requested over HTTP. The logs have the results.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import MsgspecError

from telemetry.log.lines import Line, RunEndLine, RunStartLine, SnapshotLine
from telemetry.log.reader import NoRunError, find_logs
from telemetry.log.tail import LogTail
from telemetry.model.records import RECORDED
from telemetry.safety.files import caches_folders
from telemetry.snapshot.plan import CACHED_SECONDS, REQUEST, Meeting, Request, new_id
from telemetry.util.words import complain, show

if TYPE_CHECKING:
    from collections.abc import Iterable

_POLL_SECONDS: Final = 0.1

_SETTING: Final = re.compile(r"\((snapshot_[a-z_]+)\)")
"""The setting in the reason why there is no trace."""

_GONE_SECONDS: Final = 120.0
"""A process whose log was written so long before the newest one, and four of its windows, was killed."""


class SnapshotCommandError(Exception):
    """There is no trace; the text has the reason and what to do."""


def snapshot(run_dir: str, rank: int | None, steps: int, timeout: float) -> int:
    """Request a snapshot of one rank or all, and print where it is. Returns the exit status: 1 without a trace."""
    try:
        lines = _results(Path(run_dir), rank, steps, timeout)
    except (SnapshotCommandError, NoRunError, MsgspecError, OSError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    for number, line in sorted(lines.items()):
        told = f"{line.result}: {line.why}"
        if line.path is not None:
            cut = f" ({line.why})" if line.why else ""
            told = f"steps {line.first_step} to {line.last_step}{cut}: {Path(run_dir, line.path)}"
        show(f"rank {number}: {told}\n")
    if any(line.result == RECORDED for line in lines.values()):
        return 0
    for name in sorted({name for line in lines.values() for name in _SETTING.findall(line.why or "")}):
        show(f"to allow it, start the run with a larger --{name.replace('_', '-')}\n")
    return 1


def _results(run_dir: Path, rank: int | None, steps: int, timeout: float) -> dict[int, SnapshotLine]:
    """The lines of all ranks that were asked and have answered, by rank."""
    logs, interval = _running(run_dir)
    asked = {rank} if rank is not None else set(logs)
    if not asked <= logs.keys():
        raise SnapshotCommandError(f"no process of rank {rank} is running; the ranks are {_listed(logs)}")
    snapshots = run_dir / "snapshots"
    if not snapshots.is_dir():
        raise SnapshotCommandError(f"this run takes no snapshots: its max_snapshots is 0, or {snapshots} is gone")
    meeting = Meeting(snapshots)
    request = Request(new_id(), REQUEST, rank, steps, f"telemetry snapshot, pid {os.getpid()}")
    # Ranks on other nodes may see the request, the plan and this node the results by this, because of cached folders.
    late = 2 * CACHED_SECONDS if caches_folders(snapshots) else 0.0
    found: dict[int, SnapshotLine] = {}
    meeting.ask(request)
    try:
        planned, patience = False, min(timeout, 5 + 10 * interval) + late
        deadline = time.monotonic() + patience
        while not asked <= found.keys():
            plan = meeting.next_plan()
            if plan is not None and plan.request.id == request.id:
                show(f"from step {plan.first_step} on, at most {plan.request.steps} steps\n")
                planned, deadline = True, time.monotonic() + timeout + late
            for each in asked:
                for line in _added(logs[each]):
                    if isinstance(line, SnapshotLine) and line.id == request.id:
                        found[each] = line
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        meeting.withdraw(request)
    missing = _listed(asked - found.keys())
    if missing and not (planned or found):
        raise SnapshotCommandError(
            f"rank {missing} does not answer within {patience:.0f} s: the run makes no steps yet, is taking another "
            "snapshot, or its processes have ended; `telemetry report` shows the newest lines of its logs"
        )
    if missing:
        complain(f"rank {missing} has no result within {timeout + late:g} s; its log will say where the trace is")
    return found


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _running(run_dir: Path) -> tuple[dict[int, list[LogTail]], float]:
    """The logs of the processes that run, by rank, and the seconds between two looks of theirs for a request."""
    read = []
    for name, paths in find_logs(run_dir).items():
        tail = LogTail(paths[-1])
        lines = _added([tail])
        if lines:
            read.append((name.rank, tail, lines, paths[-1].stat().st_mtime))
    if not read:
        raise SnapshotCommandError(f"no log in {run_dir} can be read")
    newest = max(written for *_, written in read)
    running: dict[int, list[LogTail]] = {}
    interval = 1.0
    for rank, tail, lines, written in read:
        gone = _GONE_SECONDS
        if isinstance(lines[0], RunStartLine):
            interval = float(lines[0].settings.interval_seconds)
            gone += 4 * lines[0].settings.log_interval_seconds
        if not isinstance(lines[-1], RunEndLine) and newest - written < gone:
            running.setdefault(rank, []).append(tail)
    if not running:
        ended = max(lines[-1].time for _, _, lines, _ in read)
        raise SnapshotCommandError(f"the run in {run_dir} has ended, at {ended}")
    return running, interval


def _added(tails: Iterable[LogTail]) -> list[Line]:
    """The lines that were added to logs; at first their first line and the last ones."""
    return [line for tail in tails for line in tail.read() if line is not None]
