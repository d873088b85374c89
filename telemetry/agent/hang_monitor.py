"""Whether this rank is stuck, and if so, where everybody stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from telemetry.collect.stack_capture import DEBUGGER, EPOCH_END, all_stacks, inside, place
from telemetry.collect.stuck_place import fetch_in
from telemetry.core.clock import NS, now_ns
from telemetry.core.labels import DATA_WAIT
from telemetry.core.stacks import stack_of
from telemetry.diagnose.hang_detector import MAX_EXCUSES, Moment, StepTimes, StuckWatch, stuck_advice, stuck_cause

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.attach.step_tracker import StepTracker
    from telemetry.collect.stuck_place import StuckPlace
    from telemetry.config import Config
    from telemetry.core.interval import RankPace
    from telemetry.core.recommendation import Advice
    from telemetry.core.worker_records import StackPort
    from telemetry.diagnose.step_stats import StepStats


@dataclass(frozen=True, slots=True)
class Stuck:
    """A run that is stuck, as far as it has come.

    Attributes:
        kind: ``opened``, ``held`` or ``closed``.
        cause: from `CAUSES`. ``category``: what the training thread does, in the words of the ledger.
        seconds: how long nothing has been seen to go on.
        at: the innermost frames of the training thread, in words.
        missing: the rank that has not come to where this one waits for the others.
    """

    kind: str
    cause: str
    category: str
    seconds: float
    at: str
    missing: RankPace | None = None

    def evidence(self) -> dict[str, Any]:
        """For the log."""
        return {"stuck_seconds": round(self.seconds, 3), "stuck_in": self.category, "stuck_at": self.at}

    def advice(self) -> tuple[Advice, ...]:
        """Where to look."""
        return stuck_advice(self.category, self.seconds, self.at, self.missing)


class HangMonitor:
    """Follows one rank. Runs on the agent thread.

    Attributes:
        fetch: where the worker stands that has been in a fetch for longest, since `stacks`; None without one.
    """

    def __init__(self, config: Config, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._watch = StuckWatch(config.stuck_seconds, config.interval_seconds)
        self._stuck: Stuck | None = None
        self.fetch: StuckPlace | None = None

    def tick(
        self, loop_seconds: float, source: str | None, accounting: Accounting, *, seconds: float = 0.0
    ) -> Stuck | None:
        """Take in what happened since the last tick. Returns a run that is stuck, or just was; None for no such.

        Args:
            loop_seconds: spent in the training loop since then; 0.0 where the process did not run.
            source: where batches come from, see `Conditions`.
            accounting: knows what the training thread does now, and how long steps take.
            seconds: that have passed since then.
        """
        tracker, ledger, stats = self._tracker, accounting.ledger, accounting.stats
        waiting = ledger.category == DATA_WAIT
        moment = Moment(
            loop_seconds=loop_seconds,
            progress=tracker.progress,
            steps=stats.steps,
            loop_left=tracker.loop_left and not waiting,
            at_edge=waiting and ledger.at_epoch_boundary,
            seconds=seconds,
        )
        kind = self._watch.update(moment, lambda: _steps(stats))
        if kind == "opened":
            self.fetch = None
            self._stuck = self._opened(ledger.category, source)
        elif kind is not None and self._stuck is not None:
            before, seconds = self._stuck, max(self._stuck.seconds, self._watch.seconds)
            self._stuck = replace(before, kind=kind, seconds=seconds)
        else:
            self._stuck = None
        return self._stuck

    @property
    def still_seconds(self) -> float:
        """Since the hooks last saw the training thread go on, in whatever it does."""
        return self._watch.still_seconds

    def in_debugger(self) -> bool:
        """Whether a person has stopped the training thread to look at it."""
        return inside(stack_of(self._tracker.thread), DEBUGGER)

    def blame(self, stuck: Stuck, missing: RankPace) -> Stuck:
        """The same run that is stuck, now that it is known which rank it waits for."""
        self._stuck = replace(stuck, cause="straggler", missing=missing)
        return self._stuck

    def stacks(self) -> list[str]:
        """Every stack there is to be had, a text each. Takes a second and a half at most."""
        workers: list[tuple[int, int, float | None, StackPort | None]] = []
        for loader in sorted(self._tracker.sources.live(), key=lambda handle: not handle.training):
            ports = loader.block.stack_ports() if loader.block is not None else {}
            counters = {c.pid: c for c in loader.block.read()} if loader.block is not None else {}
            for number, pid in enumerate(loader.pids):
                since = counters[pid].fetching_since_ns if pid in counters else None
                seconds = None if since is None else (now_ns() - since) / NS if since else 0.0
                workers.append((number, pid, seconds, ports.get(pid)))
        texts = all_stacks(self._tracker.thread, workers)
        self.fetch = fetch_in(texts)
        return texts

    def _opened(self, category: str, source: str | None) -> Stuck | None:
        stack = stack_of(self._tracker.thread)
        ending = inside(stack, EPOCH_END) and self._watch.excuses < MAX_EXCUSES
        if not stack or inside(stack, DEBUGGER) or ending:
            self._watch.excuse()
            return None
        seconds = self._watch.seconds
        cause = stuck_cause(category, source, self._longest_fetch(), seconds)
        return Stuck("opened", cause, category, seconds, place(stack))

    def _longest_fetch(self) -> float:
        """Seconds of the longest fetch in progress, of all loaders: what a new one is for, its first batch tells.

        The samples of the workers leave such a loader out once another one has trained.
        """
        blocks = [loader.block for loader in self._tracker.sources.live() if loader.block is not None]
        since = [c.fetching_since_ns for block in blocks for c in block.read() if c.fetching_since_ns]
        return (now_ns() - min(since)) / NS if since else 0.0


def _steps(stats: StepStats) -> StepTimes:
    durations = stats.durations()
    return StepTimes(p99=durations.quantile(0.99), longest=durations.largest if durations.total else None)
