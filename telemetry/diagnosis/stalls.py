"""Opens and closes stalls, by the share of a window that one avoidable cause has cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.costs import costs
from telemetry.diagnosis.evidence import RecurringCostsWatch, aggregate
from telemetry.diagnosis.stragglers import OwnPaces, straggler
from telemetry.model.totals import MIN_STEPS_OF_A_RUN, Tick

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.model.records import RankPace
    from telemetry.model.totals import Passed, Totals
    from telemetry.util.identity import Identity

MIN_STEPS: Final = 5
"""Minimum steps of a window before its waits are judged. A stuck worker is named without steps."""

MIN_SECONDS_OF_A_RUN: Final = 2.0
"""Minimum seconds of the training loop for a stall of a run that ends before its first window is full."""

WINDOW_STEPS: Final = 2 * MIN_STEPS
"""If steps are long, a window grows until it has this many steps."""

MAX_WINDOWS: Final = 10.0
"""The longest window, in multiples of its usual length."""

MIN_SHARE: Final = 0.5
"""Minimum share of the window that must have been measured."""

_MORE: Final = 1 + 1e-6
"""A cause replaces another one only if it has cost more by this factor. Smaller differences are rounding errors."""


@dataclass(slots=True)
class StallCounts:
    """Stalls so far, by cause: how many have opened, and how many seconds they cost."""

    opened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    lost_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def lost(self) -> dict[str, float]:
        """The seconds lost; causes that cost nothing are left out."""
        return {cause: seconds for cause, seconds in self.lost_seconds.items() if seconds}


@dataclass(frozen=True, slots=True)
class DetectedStall:
    """The stall of a `StallDetector`, as far as it is known now.

    Attributes:
        cause: the cause with the largest cost. ``lost_seconds``: costs by cause.
        first_step: steps that had ended when it opened.
        loop_seconds, exposed_wait_seconds: sums since it opened; None if exposed wait is not known.
        evidence: the newest window that lost enough to open a stall. A window during recovery would give wrong advice.
        is_stuck: whether the rank is stuck. Such a stall ends when the run goes on.
    """

    cause: str
    first_step: int
    lost_seconds: dict[str, float]
    loop_seconds: float
    exposed_wait_seconds: float | None
    evidence: Evidence
    is_stuck: bool = False

    @property
    def exposed_wait_ratio(self) -> float | None:
        """Exposed wait over training-loop seconds of the stall."""
        if self.exposed_wait_seconds is None or self.loop_seconds <= 0:
            return None
        # The ratio may be just below 0 by rounding: it is a difference of differences.
        return min(1.0, max(0.0, self.exposed_wait_seconds / self.loop_seconds))


@dataclass(frozen=True, slots=True)
class StallUpdate:
    """A stall that has ``opened`` or ``closed``, has another cause (``renamed``), or continues (``held``)."""

    kind: str
    stall: DetectedStall


class StallDetector:
    """Detects the stalls of one rank.

    Args:
        window_seconds: length of the window.
        enter_ratio: a stall opens if this share of the window is lost: to waits for data, whatever their causes, or to
            one other cause. ``exit_ratio``: it closes below this share.
        identity: has the rank, which may become known later.
    """

    def __init__(self, window_seconds: float, enter_ratio: float, exit_ratio: float, identity: Identity) -> None:
        self._identity = identity
        self._window_seconds = window_seconds
        self._enter = enter_ratio
        self._exit = exit_ratio
        self._ticks: deque[Tick] = deque([Tick()])  # the ticks of the window; the window begins at the first
        self._skipped: Totals | None = None  # the sum of all skipped time
        self._steps = 0
        self._recurring = RecurringCostsWatch()
        self._own_paces = OwnPaces()
        self._evidence: Evidence | None = None  # the current window
        self._ever_opened = False
        self._straggler_ratio = 0.0  # the share that waiting for a straggler costs in the newest window
        self.stall: DetectedStall | None = None

    # -- tick by tick

    def update(self, tick: Tick) -> StallUpdate | None:
        """Add a tick. Returns the change of the stall, if any."""
        self._straggler_ratio = 0.0
        added = self._added(tick)
        if added.seconds > self._window_seconds:  # the machine slept, or a debugger paused it: nothing was measured
            self._begin_anew(tick)
            return None
        self._add(tick)
        if self.stall is not None and self.stall.is_stuck:
            lost = {self.stall.cause: self.stall.lost_seconds[self.stall.cause] + added.loop_seconds}
            self.stall = self._grown(self.stall, added, self.stall.cause, lost, self._aggregate())
            return StallUpdate("held", self.stall)
        evidence = self._aggregate()
        seen = evidence.loop_seconds + evidence.checkpoint_seconds
        if seen <= 0:
            return None  # evaluation or startup: there is no training to judge
        lost = costs(evidence)
        self._straggler_ratio = lost.get("straggler", 0.0) / max(evidence.loop_seconds, 1e-9)
        if self.stall is not None:
            return self._go_on(self.stall, added, lost, evidence)
        enough = evidence.steps >= MIN_STEPS and seen >= MIN_SHARE * self._window_seconds
        return self._open_if_costly(lost, evidence, enough=enough)

    def last(self) -> StallUpdate | None:
        """Judge the incomplete window of a run that has ended early."""
        if self._ever_opened or len(self._ticks) < 2:
            return None
        evidence = self._aggregate()
        seen = evidence.loop_seconds + evidence.checkpoint_seconds
        if evidence.steps < MIN_STEPS_OF_A_RUN or seen < MIN_SECONDS_OF_A_RUN:
            return None
        return self._open_if_costly(costs(evidence), evidence, enough=True)

    def skip(self, tick: Tick) -> None:
        """Leave out the time since the last tick, because nothing was measured in it."""
        self._straggler_ratio = 0.0
        skipped = tick.totals - self._ticks[-1].totals
        # A value that was not measured at this moment is not subtracted. Otherwise it would be unknown from now on.
        missing: dict[str, Any] = {field.name: 0.0 for field in fields(skipped) if getattr(skipped, field.name) is None}
        self._skipped = replace(skipped, **missing)

    def open_stuck(self, cause: str, seconds: float, tick: Tick) -> DetectedStall:
        """Open the stall of a rank that has been stuck for some seconds. It replaces the open stall."""
        added = self._added(tick)
        self._add(tick)
        # On the GPU's clock, a wait can only be measured after it is over.
        exposed = added.exposed_after_first_seconds
        known = exposed is not None and exposed >= added.wait_seconds
        exposed = (seconds if added.wait_seconds > 0 else 0.0) if known else None
        # What has been lost so far is in the stall that is replaced.
        lost = 0.0 if self.stall is not None else seconds
        self._ever_opened = True
        self.stall = DetectedStall(
            cause, tick.totals.steps, {cause: lost}, seconds, exposed, self._aggregate(), is_stuck=True
        )
        return self.stall

    def close_stuck(self, tick: Tick) -> None:
        """Close the stall of a stuck rank. The window begins anew, because its content was already reported."""
        self.stall = None
        self._begin_anew(tick)

    # -- results

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of the newest window; None before the second tick."""
        return self._aggregate() if len(self._ticks) > 1 else None

    @property
    def may_have_straggler(self) -> bool:
        """Whether waiting for a straggler costs so much that an open stall of it would not close."""
        return self._straggler_ratio >= self._exit

    def pace(self) -> RankPace | None:
        """The pace of this rank over its newest window, for its peers."""
        window = self.evidence
        if window is None:
            return None
        cause = None if self.stall is None else self.stall.cause
        return structs.replace(window.pace, rank=self._identity.rank, cause=cause)

    # -- the window

    def _begin_anew(self, tick: Tick) -> None:
        self.skip(tick)
        self._ticks = deque([self._ticks[-1]])
        self._evidence = None

    def _without_skipped(self, tick: Tick) -> Tick:
        return tick if self._skipped is None else Tick(tick.totals - self._skipped, tick.conditions)

    def _added(self, tick: Tick) -> Passed:
        return self._without_skipped(tick).totals.passed_since(self._ticks[-1].totals)

    def _add(self, tick: Tick) -> None:
        self._steps = tick.totals.steps
        tick = self._without_skipped(tick)
        self._recurring.add(tick)
        self._ticks.append(tick)
        self._evidence = None
        while len(self._ticks) > 2 and self._is_full_from(self._ticks[1].totals):
            self._ticks.popleft()

    def _is_full_from(self, oldest: Totals) -> bool:
        newest = self._ticks[-1].totals
        seconds, steps = newest.wall_seconds - oldest.wall_seconds, newest.steps - oldest.steps
        long = seconds >= MAX_WINDOWS * self._window_seconds
        return seconds >= self._window_seconds and (steps >= WINDOW_STEPS or long)

    def _aggregate(self) -> Evidence:
        if self._evidence is None:
            cause = self.stall.cause if self.stall is not None else None
            recurring, rank = self._recurring.costs, self._identity.rank
            found = aggregate(tuple(self._ticks), rank=rank, cause=cause, recurring=recurring)
            pace = structs.replace(found.pace, last_step=self._steps)
            self._own_paces.add(pace)
            earlier = self._own_paces.at_the_time_of(found.peers)
            self._evidence = structs.replace(found, pace=pace, earlier_paces=earlier)
        return self._evidence

    # -- the stall

    def _open_if_costly(self, lost: dict[str, float], evidence: Evidence, *, enough: bool) -> StallUpdate | None:
        """Open a stall if its cause costs enough. For a straggler that must not be by chance in the samples.

        With ten samples a second over 10 s, a rank that was 12 % slower seemed to cost 21 %. While a straggler may be
        there, samples are taken more often, so a real one is certain a few seconds later.
        """
        cause, ratio = _worst(lost, evidence)
        if ratio < self._enter or not (enough or cause == "worker_stuck"):
            return None
        if cause == "straggler":
            slow = straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
            surely = 0.0 if slow is None else (slow.lost - slow.error) * evidence.steps
            if surely < self._enter * evidence.loop_seconds:
                return None
        self._ever_opened = True
        first_step = self._steps - evidence.steps
        self.stall = DetectedStall(
            cause, first_step, dict(lost), evidence.loop_seconds, evidence.exposed_seconds, evidence
        )
        return StallUpdate("opened", self.stall)

    def _go_on(self, before: DetectedStall, added: Passed, lost: dict[str, float], evidence: Evidence) -> StallUpdate:
        _, ratio = _worst(lost, evidence)
        share = min(1.0, added.seconds / evidence.window_seconds) if evidence.window_seconds > 0 else 0.0
        total = dict(before.lost_seconds)
        for cause, seconds in lost.items():
            total[cause] = total.get(cause, 0.0) + seconds * share
        cause, _ = _costliest(total)
        both_wait = CAUSES[cause].is_wait and CAUSES[before.cause].is_wait
        if both_wait and total[cause] <= _MORE * total.get(before.cause, 0.0):
            cause = before.cause
        if ratio < self._enter and cause == before.cause:
            evidence = before.evidence
        stall = self._grown(before, added, cause, total, evidence)
        if ratio < self._exit:
            self.stall = None
            return StallUpdate("closed", stall)
        self.stall = stall
        return StallUpdate("renamed" if cause != before.cause else "held", stall)

    @staticmethod
    def _grown(
        before: DetectedStall, added: Passed, cause: str, lost: dict[str, float], evidence: Evidence
    ) -> DetectedStall:
        loop, exposed = before.loop_seconds + added.loop_seconds, before.exposed_wait_seconds
        more = added.exposed_after_first_seconds
        exposed = None if exposed is None or more is None else exposed + more
        return DetectedStall(cause, before.first_step, lost, loop, exposed, evidence, before.is_stuck)


def _worst(lost: dict[str, float], evidence: Evidence) -> tuple[str, float]:
    """The cause that cost most, and the share of the window that it cost, together with all others of its kind."""
    cause, seconds = _costliest(lost)
    whole = evidence.loop_and_checkpoint_seconds if cause == "checkpoint" else evidence.loop_seconds
    return cause, min(1.0, seconds / whole) if whole > 0 else 0.0


def _costliest(lost: dict[str, float]) -> tuple[str, float]:
    """The costliest cause and its seconds. All waits for data count together, under their largest cause."""
    waits = {cause: seconds for cause, seconds in lost.items() if CAUSES[cause].is_wait}
    kinds = [waits, *({cause: seconds} for cause, seconds in lost.items() if not CAUSES[cause].is_wait)]
    kind = max((kind for kind in kinds if kind), key=lambda kind: sum(kind.values()), default={"unknown": 0.0})
    return max(kind, key=lambda cause: kind[cause]), sum(kind.values())
