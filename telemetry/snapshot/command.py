"""``telemetry snapshot RUN_DIR [--rank all|N] [--steps K]``: requests a snapshot of a running job, and waits for it.

It must be called by the same user, on the same file system. Nothing is requested over HTTP.
"""

from __future__ import annotations

import getpass
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.log_names import LOG_NAME
from telemetry.records import RECORDED
from telemetry.snapshot import protocol as p
from telemetry.snapshot.private_folder import Folder, open_folder
from telemetry.snapshot.rendezvous import CACHED_SECONDS
from telemetry.snapshot.request_files import RENDEZVOUS_FOLDER, RequestFiles, clear, dump, load, new_id, scan
from telemetry.util.files import caches_folders, open_regular, parse_object
from telemetry.util.text import complain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_SECONDS: Final = 0.1
_TAIL_BYTES: Final = 1 << 16


class SnapshotCommandError(Exception):
    """There is no trace; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """The options of the command: the rank (None for all), how many steps, and how many seconds to wait."""

    rank: int | None
    steps: int
    timeout: float

    @classmethod
    def parse(cls, rank: str, steps: str, timeout: str) -> SnapshotOptions:
        """Read the options.

        Raises:
            ValueError: one is invalid; the text says which, and what is allowed.
        """
        if rank != "all" and not rank.isdecimal():
            raise ValueError(f"--rank {rank}: allowed is all, or the number of a rank")
        if not steps.isdecimal() or not 1 <= int(steps) <= p.MAX_STEPS:
            raise ValueError(f"--steps {steps}: allowed is a number of steps, from 1 to {p.MAX_STEPS}")
        try:
            seconds = float(timeout)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e6:
            raise ValueError(f"--timeout {timeout}: allowed is a number of seconds")
        return cls(None if rank == "all" else int(rank), int(steps), seconds)


def snapshot(run_dir: str, wanted: SnapshotOptions, say: Callable[[str], object]) -> int:
    """Request a snapshot, wait for it, and print where the traces are. Returns the exit status: 1 without a trace."""
    try:
        interval = _running(Path(run_dir))
        results = _ask(Path(run_dir), wanted, interval, say)
    except (SnapshotCommandError, OSError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    for result in results:
        if result.path is not None:
            cut = f" ({result.why})" if result.why else ""
            steps = f"steps {result.first_step} to {result.last_step}"
            say(f"rank {result.rank}: {steps}{cut}: {Path(run_dir, result.path)}")
        else:
            say(f"rank {result.rank}: {result.result}: {result.why}")
    return 0 if any(result.result == RECORDED for result in results) else 1


def _ask(run_dir: Path, wanted: SnapshotOptions, interval: float, say: Callable[[str], object]) -> list[p.Result]:
    request = p.Request(
        id=new_id(time.time()),
        kind=p.COMMAND,
        reason=p.REQUEST,
        rank=wanted.rank,
        steps=wanted.steps,
        asked_by=f"telemetry snapshot, pid {os.getpid()}",
    )
    with _rendezvous(run_dir) as folder:
        folder.write(f"{request.id}.request.json", dump(request))
        try:
            plan = _agreed(folder, request, wanted, interval)
            if plan.refused is not None:
                raise SnapshotCommandError(f"refused: {plan.refused}")
            ranks = ", ".join(map(str, plan.ranks))
            say(f"steps {plan.first_step} to {plan.last_step}, agreed on by rank {ranks}")
            return _results(folder, plan, wanted)
        finally:
            files = scan(folder).get(request.id, RequestFiles())
            if not files.plan:  # withdraw the request: nobody waits for it any more
                clear(folder, request.id, files)


def _agreed(folder: Folder, request: p.Request, wanted: SnapshotOptions, interval: float) -> p.Plan:
    patience = min(wanted.timeout, 5 + 10 * interval) + _notice(folder)
    if not _until(lambda: _files(folder, request).plan, patience):
        answered = sorted(_files(folder, request).answers)
        if answered:
            raise SnapshotCommandError(f"rank {', '.join(map(str, answered))} answered, but wrote no plan")
        who = "no rank answers" if request.rank is None else f"rank {request.rank} does not answer"
        raise SnapshotCommandError(
            f"{who} within {patience:.0f} s: the run makes no steps yet, is taking another snapshot, has another run "
            "folder, or its processes have ended; `telemetry report` shows the newest lines of its logs"
        )
    try:
        return p.plan_from(load(folder, f"{request.id}.plan.json"))
    except p.InvalidError as error:
        raise SnapshotCommandError(f"the plan cannot be read: {error}") from None


def _results(folder: Folder, plan: p.Plan, wanted: SnapshotOptions) -> list[p.Result]:
    timeout = wanted.timeout + _notice(folder)
    whole = _until(lambda: _files(folder, plan.request).results >= set(plan.ranks), timeout)
    results = []
    for rank in sorted(_files(folder, plan.request).results):
        try:
            results.append(p.result_from(load(folder, f"{plan.request.id}.result-{rank}.json")))
        except p.InvalidError as error:
            raise SnapshotCommandError(f"the result of rank {rank} cannot be read: {error}") from None
    if not whole:
        missing = sorted(set(plan.ranks) - {result.rank for result in results})
        complain(
            f"rank {', '.join(map(str, missing))} has not reached step {plan.last_step} within "
            f"{timeout:g} s; when it does, its trace will be in {folder.path.parent / plan.folder}"
        )
    else:
        clear(folder, plan.request.id, _files(folder, plan.request))
    return results


def _notice(folder: Folder) -> float:
    """Seconds by which ranks on other nodes may answer, agree and record later, because they see the folder late."""
    return 2 * CACHED_SECONDS if caches_folders(folder.path) else 0.0


def _files(folder: Folder, request: p.Request) -> RequestFiles:
    return scan(folder).get(request.id, RequestFiles())


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@contextmanager
def _rendezvous(run_dir: Path) -> Iterator[Folder]:
    snapshots = run_dir / "snapshots"
    try:
        owner = snapshots.lstat().st_uid
    except FileNotFoundError:
        raise SnapshotCommandError(
            f"there is no {snapshots}: this run takes no snapshots (max_snapshots is 0)"
        ) from None
    if owner != os.getuid():
        raise SnapshotCommandError(f"{snapshots} belongs to another user (uid {owner}); this is {getpass.getuser()}")
    with open_folder(snapshots), open_folder(snapshots / RENDEZVOUS_FOLDER, make=True) as folder:
        yield folder


def _running(run_dir: Path) -> float:
    """Check that the run is still going on. Returns how often its ranks poll, in seconds."""
    logs = run_dir / "logs"
    paths = [path for path in logs.iterdir() if _is_newest_log(path.name)] if logs.is_dir() else []
    if not paths:
        raise SnapshotCommandError(f"{run_dir} is not a run folder: there is no log in {logs}")
    logs_read = [ends for path in paths if (ends := _ends_of(path)) is not None]
    if not logs_read:
        raise SnapshotCommandError(f"no log in {logs} can be read")
    newest = [line for _, line in logs_read]
    if all(line.get("event") == "run_end" for line in newest):
        last = max(str(line.get("time")) for line in newest)
        raise SnapshotCommandError(f"the run in {run_dir} has ended, at {last}")
    first = next(first for first, line in logs_read if line.get("event") != "run_end")
    settings = first.get("settings")
    interval = settings.get("interval_seconds") if isinstance(settings, dict) else None
    return float(interval) if isinstance(interval, (int, float)) else 1.0


def _is_newest_log(name: str) -> bool:
    """Whether a file is a log that was not rotated away."""
    match = LOG_NAME.fullmatch(name)
    return match is not None and match["rotated"] is None


def _ends_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first and the newest complete line of a log; None if it cannot be read."""
    try:
        file = open_regular(path)
        if file is None:
            return None
        with file:
            first = parse_object(file.readline(_TAIL_BYTES)) or {}
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return None
    return first, next((found for line in reversed(lines) if (found := parse_object(line))), {})
