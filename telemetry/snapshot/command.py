"""``telemetry snapshot RUN_DIR [--rank all|N] [--steps K]``: requests a snapshot of a running job, and waits for it.

It must be called by the same user, on the same file system. Nothing is requested over HTTP.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.log_lines import Line, RunEndLine, RunStartLine
from telemetry.records import RECORDED
from telemetry.report.logs import NoRunError, find_logs, parsed
from telemetry.snapshot import agree
from telemetry.snapshot.agree import InvalidMessageError, Plan, Request, RequestFolder, Result, ranks_of
from telemetry.top.run_folder import LogTail
from telemetry.util.files import caches_folders
from telemetry.util.text import complain, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_POLL_SECONDS: Final = 0.1


class SnapshotCommandError(Exception):
    """There is no trace; the text has the reason and what to do."""


def snapshot(run_dir: str, rank: int | None, steps: int, timeout: float) -> int:
    """Request a snapshot of one rank or all, and print where it is. Returns the exit status: 1 without a trace."""
    try:
        results = _results(Path(run_dir), rank, steps, timeout)
    except (SnapshotCommandError, NoRunError, InvalidMessageError, OSError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    for result in results:
        told = f"{result.result}: {result.why}"
        if result.path is not None:
            cut = f" ({result.why})" if result.why else ""
            told = f"steps {result.first_step} to {result.last_step}{cut}: {Path(run_dir, result.path)}"
        show(f"rank {result.rank}: {told}\n")
    return 0 if any(result.result == RECORDED for result in results) else 1


def _results(run_dir: Path, rank: int | None, steps: int, timeout: float) -> list[Result]:
    interval = _interval_of_running(run_dir)
    snapshots = run_dir / "snapshots"
    if not snapshots.is_dir():
        raise SnapshotCommandError(f"there is no {snapshots}: this run takes no snapshots (max_snapshots is 0)")
    files = RequestFolder(snapshots)
    who = f"telemetry snapshot, pid {os.getpid()}"
    request = Request(agree.new_id(time.time()), agree.COMMAND, agree.REQUEST, rank, steps, who)
    # Ranks on other nodes may answer, agree and record later by this, because they see the folder late.
    late = 2 * agree.CACHED_SECONDS if caches_folders(snapshots) else 0.0

    def names() -> set[str]:
        return files.scan().get(request.id, set())

    files.write(request.id, "request", request)
    try:
        patience = min(timeout, 5 + 10 * interval) + late
        if not _until(lambda: "plan" in names(), patience):
            raise SnapshotCommandError(_no_plan(rank, ranks_of("answer", names()), patience))
        plan = files.read(request.id, "plan", Plan)
        if plan.refused is not None:
            raise SnapshotCommandError(f"refused: {plan.refused}")
        show(f"steps {plan.first_step} to {plan.last_step}, agreed on by rank {_listed(plan.ranks)}\n")
        whole = _until(lambda: ranks_of("result", names()) >= set(plan.ranks), timeout + late)
        ranks = sorted(ranks_of("result", names()))
        results = [files.read(request.id, f"result-{each}", Result) for each in ranks]
        if whole:
            files.remove(request.id, names())
        else:
            complain(
                f"rank {_listed(set(plan.ranks) - set(ranks))} has not reached step {plan.last_step} within "
                f"{timeout + late:g} s; when it does, its trace will be in {snapshots / plan.folder}"
            )
        return results
    finally:
        left = names()
        if "plan" not in left:  # withdraw the request: nobody waits for it any more
            files.remove(request.id, left)


def _no_plan(rank: int | None, answered: set[int], patience: float) -> str:
    if answered:
        return f"rank {_listed(answered)} answered, but wrote no plan"
    who = "no rank answers" if rank is None else f"rank {rank} does not answer"
    return (
        f"{who} within {patience:.0f} s: the run makes no steps yet, is taking another snapshot, has another "
        "run folder, or its processes have ended; `telemetry report` shows the newest lines of its logs"
    )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _interval_of_running(run_dir: Path) -> float:
    """Check that the run is still going on. Returns the time between two polls of its ranks, in seconds."""
    read = [lines for log in find_logs(run_dir)[0] if (lines := LogTail(log.paths[-1]).read())]
    if not read:
        raise SnapshotCommandError(f"no log in {run_dir} can be read")
    newest = [next((found for raw in reversed(lines) if (found := _line(raw))), Line()) for lines in read]
    running = [lines[0] for lines, last in zip(read, newest, strict=True) if not isinstance(last, RunEndLine)]
    if not running:
        raise SnapshotCommandError(f"the run in {run_dir} has ended, at {max(last.time for last in newest)}")
    first = _line(running[0])
    return float(first.settings.interval_seconds) if isinstance(first, RunStartLine) else 1.0


def _line(raw: bytes) -> Line | None:
    found = parsed(raw)
    return None if found is None else found[0]
