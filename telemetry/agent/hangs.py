"""Detects whether this rank hangs, and collects the stacks that show where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.hangs import (
    MAX_EXCUSES,
    HangDetector,
    Moment,
    StepTimes,
    hang_advice,
    hang_cause,
)
from telemetry.records import CHECKPOINT, DATA_WAIT, EVALUATION
from telemetry.sources.stacks import (
    DEBUGGER,
    EPOCH_END,
    all_stacks,
    fetch_in,
    inside,
    place,
    stack_hash,
)
from telemetry.util.clock import NS, now_ns
from telemetry.util.stacks import stack_of

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.config import Config
    from telemetry.hooks.tracker import StepTracker
    from telemetry.hooks.worker_block import StackPort
    from telemetry.records import Advice, Passed, RankPace
    from telemetry.sources.stacks import StuckPlace


_LEFT_SECONDS: Final = 10.0
"""A process that was interrupted in a hang may need this long to end. After that, its end has another reason."""


# -- this rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang as it is now.

    Attributes:
        kind: ``opened``, ``held`` or ``closed``.
        cause: one of `CAUSES`.
        category: the ledger category of the training thread.
        seconds: time without progress.
        at: the innermost frames of the training thread, as text.
        missing: the rank that has not reached the synchronisation in which this rank waits, if known.
    """

    kind: str
    cause: str
    category: str
    seconds: float
    at: str
    missing: RankPace | None = None

    def evidence(self) -> dict[str, Any]:
        """The fields of the hang in the evidence of the log."""
        return {"stuck_for_seconds": round(self.seconds, 3), "stuck_in": self.category, "stuck_at": self.at}

    def advice(self) -> tuple[Advice, ...]:
        """Advice where to look."""
        return hang_advice(self.category, self.seconds, self.at, self.missing)


class HangMonitor:
    """Follows the hangs of one rank on the agent thread.

    Attributes:
        fetch: where the worker stands whose fetch takes longest, read by `stacks`; None without one.
        left: the hang that ended a moment ago because the loop was left, as by Ctrl-C; None without one.
    """

    def __init__(self, config: Config, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._watch = HangDetector(config.stuck_seconds, config.interval_seconds)
        self._hang: Hang | None = None
        self.fetch: StuckPlace | None = None
        self.left: Hang | None = None
        self._left_seconds = 0.0
        self._steps_before = 0  # steps that had ended when the newest hang began

    def tick(
        self,
        added: Passed | None,
        source: str | None,
        accounting: Accounting,
        *,
        waits_for_far_ranks: bool = False,
        peer_phase: str | None = None,
    ) -> Hang | None:
        """Add a tick. Returns the hang that is open or has just closed; else None.

        Args:
            added: what has passed since the last tick; None if the process was stopped, also in a debugger.
            source: where batches come from, see `Conditions`.
            accounting: has the training thread's category and step durations.
            waits_for_far_ranks: this rank waits for other ranks, and some of them are on other nodes.
            peer_phase: whether another rank is in an evaluation or a checkpoint, see `Moment`.
        """
        seconds, loop_seconds = (0.0, 0.0) if added is None else (added.seconds, added.loop_seconds)
        tracker, ledger, stats = self._tracker, accounting.ledger, accounting.stats
        waiting, in_phase = ledger.category == DATA_WAIT, ledger.category in {CHECKPOINT, EVALUATION}
        moment = Moment(
            loop_seconds=loop_seconds,
            progress=tracker.progress,
            steps=stats.steps,
            loop_left=tracker.loop_left and not waiting and not in_phase,
            at_epoch_boundary=waiting and ledger.at_epoch_boundary,
            seconds=seconds,
            waits_for_far_ranks=waits_for_far_ranks,
            phase_at=stack_hash(stack_of(tracker.thread)) if in_phase else None,
            peer_phase=peer_phase,
        )

        def step_times() -> StepTimes:
            durations = stats.durations()
            return StepTimes(p99=durations.quantile(0.99), longest=durations.largest if durations.total else None)

        kind = self._watch.update(moment, step_times)
        self._left_seconds += seconds
        if self._left_seconds > _LEFT_SECONDS or accounting.steps_total > self._steps_before:
            self.left = None
        if kind == "opened":
            self.fetch = None
            self._steps_before = accounting.steps_total
            self._hang = self._opened(ledger.category, source)
        elif kind is not None and self._hang is not None:
            before, seconds = self._hang, max(self._hang.seconds, self._watch.seconds)
            self._hang = replace(before, kind=kind, seconds=seconds)
            if kind == "closed" and accounting.steps_total == self._steps_before:
                self.left, self._left_seconds = self._hang, 0.0
        else:
            self._hang = None
        return self._hang

    @property
    def still_seconds(self) -> float:
        """Seconds since the hooks last saw the training thread do anything."""
        return self._watch.still_seconds

    def in_debugger(self) -> bool:
        """Whether a person has stopped the training thread in a debugger."""
        return inside(stack_of(self._tracker.thread), DEBUGGER)

    def blame(self, hang: Hang, missing: RankPace) -> Hang:
        """Add to a hang the rank that it waits for."""
        self._hang = replace(hang, cause="straggler", missing=missing)
        return self._hang

    def stacks(self) -> list[str]:
        """The stacks of all threads and workers, each as a text. Takes at most 1.5 s."""
        workers: list[tuple[int, int, float | None, StackPort | None]] = []
        for loader in sorted(self._tracker.loaders.live(), key=lambda handle: not handle.training):
            ports = loader.block.stack_ports() if loader.block is not None else {}
            counters = {c.pid: c for c in loader.block.read()} if loader.block is not None else {}
            for number, pid in enumerate(loader.pids):
                since = counters[pid].fetching_since_ns if pid in counters else None
                seconds = None if since is None else (now_ns() - since) / NS if since else 0.0
                workers.append((number, pid, seconds, ports.get(pid)))
        texts = all_stacks(self._tracker.thread, workers)
        self.fetch = fetch_in(texts)
        return texts

    def _opened(self, category: str, source: str | None) -> Hang | None:
        stack = stack_of(self._tracker.thread)
        ending = inside(stack, EPOCH_END) and self._watch.excuses < MAX_EXCUSES
        if not stack or inside(stack, DEBUGGER) or ending:
            self._watch.excuse()
            return None
        seconds = self._watch.seconds
        cause = hang_cause(category, source, self._longest_fetch(), seconds)
        return Hang("opened", cause, category, seconds, place(stack))

    def _longest_fetch(self) -> float:
        """Seconds of the longest fetch in progress, over all loaders.

        A new loader counts, too, although it may turn out to evaluate. The workers' samples leave such a loader out
        once another one has trained.
        """
        blocks = [loader.block for loader in self._tracker.loaders.live() if loader.block is not None]
        since = [c.fetching_since_ns for block in blocks for c in block.read() if c.fetching_since_ns]
        return (now_ns() - min(since)) / NS if since else 0.0
