"""``telemetry snapshot RUN_DIR [--rank all|N] [--steps K]``: requests a snapshot of a running job, and waits for it.

It must be called by the same user, on the same file system. Nothing is requested over HTTP.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import LOG_NAME, RECORDED
from telemetry.snapshot import agree
from telemetry.snapshot.agree import (
    InvalidMessageError,
    Plan,
    Request,
    RequestFolder,
    Result,
    ranks_of,
)
from telemetry.util.files import caches_folders, open_regular, parse_object
from telemetry.util.text import complain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        if not steps.isdecimal() or not 1 <= int(steps) <= agree.MAX_STEPS:
            raise ValueError(f"--steps {steps}: allowed is a number of steps, from 1 to {agree.MAX_STEPS}")
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
        interval = _interval_of_running(Path(run_dir))
        results = _Asking(Path(run_dir), wanted, say).results(interval)
    except (SnapshotCommandError, InvalidMessageError, OSError) as error:
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


class _Asking:
    """One request, from asking until the results are there."""

    def __init__(self, run_dir: Path, wanted: SnapshotOptions, say: Callable[[str], object]) -> None:
        self._snapshots = run_dir / "snapshots"
        if not self._snapshots.is_dir():
            raise SnapshotCommandError(
                f"there is no {self._snapshots}: this run takes no snapshots (max_snapshots is 0)"
            )
        self._files = RequestFolder(self._snapshots)
        self._wanted = wanted
        self._say = say
        who = f"telemetry snapshot, pid {os.getpid()}"
        self._request = Request(agree.new_id(time.time()), agree.COMMAND, agree.REQUEST, wanted.rank, wanted.steps, who)
        # Ranks on other nodes may answer, agree and record later by this, because they see the folder late.
        self._late_seconds = 2 * agree.CACHED_SECONDS if caches_folders(self._snapshots) else 0.0

    def results(self, interval: float) -> list[Result]:
        """Ask, and wait for the results. ``interval``: how often the ranks poll, in seconds."""
        self._files.write(self._request.id, "request", self._request)
        try:
            plan = self._agreed(interval)
            if plan.refused is not None:
                raise SnapshotCommandError(f"refused: {plan.refused}")
            self._say(f"steps {plan.first_step} to {plan.last_step}, agreed on by rank {_listed(plan.ranks)}")
            return self._recorded(plan)
        finally:
            names = self._names()
            if "plan" not in names:  # withdraw the request: nobody waits for it any more
                self._files.remove(self._request.id, names)

    def _agreed(self, interval: float) -> Plan:
        patience = min(self._wanted.timeout, 5 + 10 * interval) + self._late_seconds
        if not _until(lambda: "plan" in self._names(), patience):
            answered = ranks_of("answer", self._names())
            if answered:
                raise SnapshotCommandError(f"rank {_listed(answered)} answered, but wrote no plan")
            rank = self._request.rank
            who = "no rank answers" if rank is None else f"rank {rank} does not answer"
            raise SnapshotCommandError(
                f"{who} within {patience:.0f} s: the run makes no steps yet, is taking another snapshot, has another "
                "run folder, or its processes have ended; `telemetry report` shows the newest lines of its logs"
            )
        return self._files.read(self._request.id, "plan", Plan)

    def _recorded(self, plan: Plan) -> list[Result]:
        timeout = self._wanted.timeout + self._late_seconds
        whole = _until(lambda: ranks_of("result", self._names()) >= set(plan.ranks), timeout)
        ranks = sorted(ranks_of("result", self._names()))
        results = [self._files.read(self._request.id, f"result-{rank}", Result) for rank in ranks]
        if whole:
            self._files.remove(self._request.id, self._names())
        else:
            complain(
                f"rank {_listed(set(plan.ranks) - set(ranks))} has not reached step {plan.last_step} within "
                f"{timeout:g} s; when it does, its trace will be in {self._snapshots / plan.folder}"
            )
        return results

    def _names(self) -> set[str]:
        return self._files.scan().get(self._request.id, set())


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
    """Check that the run is still going on. Returns how often its ranks poll, in seconds."""
    logs = run_dir / "logs"
    paths = [path for path in logs.iterdir() if _is_newest_log(path.name)] if logs.is_dir() else []
    if not paths:
        raise SnapshotCommandError(f"{run_dir} is not a run folder: there is no log in {logs}")
    read = [ends for path in paths if (ends := _ends_of(path)) is not None]
    if not read:
        raise SnapshotCommandError(f"no log in {logs} can be read")
    running = [first for first, newest in read if newest.get("event") != "run_end"]
    if not running:
        last = max(str(newest.get("time")) for _, newest in read)
        raise SnapshotCommandError(f"the run in {run_dir} has ended, at {last}")
    settings = running[0].get("settings")
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
