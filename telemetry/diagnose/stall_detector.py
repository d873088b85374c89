"""Decide: a stall opens when waits for data, or another cause, have cost their share of a window; it closes at less.

A state machine over ticks, and nothing else: no clock, no threads. The first batch of a run, an epoch that
ends and a machine that slept are no stalls; there must be enough steps, and enough of a window, to mean it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.tick import Tick
from telemetry.diagnose.aggregate import aggregate
from telemetry.diagnose.causes import WAITS, costs
from telemetry.diagnose.recurring_costs import RecurringCostsWatch

if TYPE_CHECKING:
    from telemetry.core.tick import RankPace
    from telemetry.core.totals import Totals
    from telemetry.diagnose.evidence import Evidence

MIN_STEPS: Final = 5
"""Steps a window must have before its waits mean something; a stuck worker is named without."""

MIN_STEPS_OF_A_RUN: Final = 20
"""Steps of a run that ends before it has filled its window ..."""

MIN_SECONDS_OF_A_RUN: Final = 2.0
"""... and seconds of its training loop, before it can have stalled."""

WINDOW_STEPS: Final = 2 * MIN_STEPS
"""Of long steps the window holds so many, however long they take ..."""

MAX_WINDOWS: Final = 10.0
"""... up to so many times its length."""

MIN_SHARE: Final = 0.5
"""Share of the window that must have been seen."""

_MORE: Final = 1 + 1e-6
"""A cause has cost more than another from this factor on: what is less is rounding, and renames no stall."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall as far as it has come.

    Attributes:
        cause: what has cost most of it; ``lost_seconds``: by cause.
        opened_step: steps that had ended when it opened.
        exposed_ratio: exposed wait over training-loop seconds, since it opened; None where exposure is not known.
        evidence: of the newest window that was lost enough to open a stall: what a recovery looks like advises nothing.
        stuck: whether it is a run that is stuck: it ends when the run goes on.
    """

    cause: str
    opened_step: int
    lost_seconds: dict[str, float]
    loop_seconds: float
    exposed_wait_seconds: float | None
    evidence: Evidence
    is_hang: bool = False

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed wait over training-loop seconds of the stall."""
        if self.exposed_wait_seconds is None or self.loop_seconds <= 0:
            return None
        return min(1.0, self.exposed_wait_seconds / self.loop_seconds)


@dataclass(frozen=True, slots=True)
class Change:
    """What an update has changed: ``opened``, ``closed``, or a stall whose cause is now another (``renamed``)."""

    kind: str
    stall: Stall


@dataclass(frozen=True, slots=True)
class _Added:
    """Seconds since the last tick."""

    seconds: float
    wait: float
    loop: float
    exposed_wait: float | None


class StallDetector:
    """Follows one rank.

    Args:
        window_seconds: length of the window that is judged.
        enter_ratio: share of it lost that opens a stall: to waits for data, whatever their causes, or to one cause of
            another kind. ``exit_ratio`` closes it.
        rank: whose stalls these are.
    """

    def __init__(self, window_seconds: float, enter_ratio: float, exit_ratio: float, rank: int = 0) -> None:
        self.rank = rank
        self._window_seconds = window_seconds
        self._enter = enter_ratio
        self._exit = exit_ratio
        self._ticks: deque[Tick] = deque([Tick()])  # of the window; the first is where it begins
        self._skipped: Totals | None = None  # what is left out of all that has been seen since
        self._steps = 0
        self._recurring = RecurringCostsWatch()
        self._evidence: Evidence | None = None  # of the window as it is
        self._ever_opened = False
        self.stall: Stall | None = None

    def update(self, tick: Tick) -> Change | None:
        """Take in what happened since the last tick. Returns what that changed."""
        added = self._added(tick)
        if added.seconds > self._window_seconds:  # a machine that slept, a debugger's pause: nothing can be said of it
            self._begin_anew(tick)
            return None
        self._add(tick)
        if self.stall is not None and self.stall.is_hang:
            return self._hold_hang(self.stall, added)
        evidence = self._aggregate()
        if evidence.loop_seconds + evidence.checkpoints.seconds <= 0:
            return None  # an evaluation, a start-up: no training to judge
        lost = costs(evidence)
        cause, ratio = _worst(lost, evidence)
        if self.stall is not None:
            return self._go_on(self.stall, added, lost, ratio, evidence)
        seen = evidence.loop_seconds + evidence.checkpoints.seconds
        enough = evidence.steps >= MIN_STEPS and seen >= MIN_SHARE * self._window_seconds
        if ratio < self._enter or not (enough or cause == "worker_stuck"):
            return None
        return self._open(cause, lost, evidence)

    def skip(self, tick: Tick) -> None:
        """Nothing can be said of the time since the last tick: leave it out of everything."""
        skipped = tick.totals - self._ticks[-1].totals
        # What was not measured at this moment is not left out. It must not be missing from all that follows.
        missing: dict[str, Any] = {field.name: 0.0 for field in fields(skipped) if getattr(skipped, field.name) is None}
        self._skipped = replace(skipped, **missing)

    def open_hang(self, cause: str, seconds: float, tick: Tick) -> Stall:
        """The run is stuck, and has been for so many seconds. What was open is replaced."""
        added = self._added(tick)
        self._add(tick)
        # On the GPU's clock a wait is exposed only once it is over: until then nobody has measured it.
        known = added.exposed_wait is not None and added.exposed_wait >= added.wait
        exposed = (seconds if added.wait > 0 else 0.0) if known else None
        # What has been lost so far stands in the stall that is replaced.
        lost = 0.0 if self.stall is not None else seconds
        self._ever_opened = True
        self.stall = Stall(cause, tick.totals.steps, {cause: lost}, seconds, exposed, self._aggregate(), is_hang=True)
        return self.stall

    def close_hang(self, tick: Tick) -> None:
        """The run goes on. What the window holds has been told: the next stall is judged from now on."""
        self.stall = None
        self._begin_anew(tick)

    def _hold_hang(self, before: Stall, added: _Added) -> Change:
        spent, more = added.loop, added.exposed_wait
        exposed = None if before.exposed_wait_seconds is None or more is None else before.exposed_wait_seconds + more
        lost = {before.cause: before.lost_seconds[before.cause] + spent}
        loop = before.loop_seconds + spent
        self.stall = Stall(before.cause, before.opened_step, lost, loop, exposed, self._aggregate(), is_hang=True)
        return Change("held", self.stall)

    def _begin_anew(self, tick: Tick) -> None:
        self.skip(tick)
        self._ticks = deque([self._ticks[-1]])
        self._evidence = None

    def _without_skipped(self, tick: Tick) -> Tick:
        return tick if self._skipped is None else Tick(tick.totals - self._skipped, tick.conditions)

    def _added(self, tick: Tick) -> _Added:
        now, before = self._without_skipped(tick).totals, self._ticks[-1].totals
        exposed, exposed_before = now.exposed_after_first_seconds, before.exposed_after_first_seconds
        return _Added(
            seconds=now.wall_seconds - before.wall_seconds,
            wait=now.wait_seconds - before.wait_seconds,
            loop=now.loop_seconds - before.loop_seconds,
            exposed_wait=None if exposed is None or exposed_before is None else exposed - exposed_before,
        )

    def _add(self, tick: Tick) -> None:
        self._steps = tick.totals.steps
        tick = self._without_skipped(tick)
        self._recurring.add(tick)
        self._ticks.append(tick)
        self._evidence = None
        while len(self._ticks) > 2 and self._is_full_from(self._ticks[1].totals):
            self._ticks.popleft()

    def _is_full_from(self, oldest: Totals) -> bool:
        """Whether a window that begins there is full."""
        newest = self._ticks[-1].totals
        seconds, steps = newest.wall_seconds - oldest.wall_seconds, newest.steps - oldest.steps
        long = seconds >= MAX_WINDOWS * self._window_seconds
        return seconds >= self._window_seconds and (steps >= WINDOW_STEPS or long)

    def last(self) -> Change | None:
        """The run ends: one that was too short for a window is judged by what there is of it."""
        if self._ever_opened or len(self._ticks) < 2:
            return None
        evidence = self._aggregate()
        lost = costs(evidence)
        cause, ratio = _worst(lost, evidence)
        seen = evidence.loop_seconds + evidence.checkpoints.seconds
        if ratio < self._enter or evidence.steps < MIN_STEPS_OF_A_RUN or seen < MIN_SECONDS_OF_A_RUN:
            return None
        return self._open(cause, lost, evidence)

    def pace(self) -> RankPace | None:
        """What this rank's peers may know of its newest window."""
        if len(self._ticks) < 2:
            return None
        return replace(self._aggregate().pace, rank=self.rank, cause=None if self.stall is None else self.stall.cause)

    def _aggregate(self) -> Evidence:
        if self._evidence is None:
            cause = self.stall.cause if self.stall is not None else None
            costs_so_far = self._recurring.costs
            self._evidence = aggregate(tuple(self._ticks), rank=self.rank, cause=cause, recurring=costs_so_far)
        return self._evidence

    def _open(self, cause: str, lost: dict[str, float], evidence: Evidence) -> Change:
        self._ever_opened = True
        opened_step = self._steps - evidence.steps
        loop, exposed = evidence.loop_seconds, evidence.exposed_wait_seconds
        self.stall = Stall(cause, opened_step, dict(lost), loop, exposed, evidence)
        return Change("opened", self.stall)

    def _go_on(self, before: Stall, added: _Added, lost: dict[str, float], ratio: float, evidence: Evidence) -> Change:
        share = min(1.0, added.seconds / evidence.seconds) if evidence.seconds > 0 else 0.0
        total = dict(before.lost_seconds)
        for cause, seconds in lost.items():
            total[cause] = total.get(cause, 0.0) + seconds * share
        more = added.exposed_wait
        exposed = None if before.exposed_wait_seconds is None or more is None else before.exposed_wait_seconds + more
        cause, _ = _costliest(total)
        if {cause, before.cause} <= WAITS and total[cause] <= _MORE * total.get(before.cause, 0.0):
            cause = before.cause
        loop = before.loop_seconds + added.loop
        if ratio < self._enter and cause == before.cause:
            evidence = before.evidence
        self.stall = Stall(cause, before.opened_step, total, loop, exposed, evidence)
        if ratio < self._exit:
            closed, self.stall = self.stall, None
            return Change("closed", closed)
        return Change("renamed" if cause != before.cause else "held", self.stall)


def _worst(lost: dict[str, float], evidence: Evidence) -> tuple[str, float]:
    """The cause that cost most, and the share of the window that it cost with all others of its kind."""
    cause, seconds = _costliest(lost)
    whole = evidence.loop_and_checkpoint_seconds if cause == "checkpoint" else evidence.loop_seconds
    return cause, min(1.0, seconds / whole) if whole > 0 else 0.0


def _costliest(lost: dict[str, float]) -> tuple[str, float]:
    """What cost most, and how many seconds: all waits for data together, by the name of what made most of them."""
    if not lost:
        return "unknown", 0.0
    waits = {cause: seconds for cause, seconds in lost.items() if cause in WAITS}
    kinds = [waits, *({cause: seconds} for cause, seconds in lost.items() if cause not in WAITS)]
    kind = max((kind for kind in kinds if kind), key=lambda kind: sum(kind.values()))
    return max(kind, key=lambda cause: kind[cause]), sum(kind.values())
