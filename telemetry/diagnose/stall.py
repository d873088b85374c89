"""Decide: a stall opens when waits for data, or another cause, have cost their share of a window; it closes at less.

A state machine over slices of time, and nothing else: no clock, no threads. The first batch of a run, an epoch that
ends and a machine that slept are no stalls; there must be enough steps, and enough of a window, to mean it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import WAITS, costs
from telemetry.diagnose.gather import gather
from telemetry.diagnose.periods import Checkpoints, Edges

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence
    from telemetry.records import RankPace, Slice

LEAST_STEPS: Final = 5
"""Steps a window must have before its waits mean something; a stuck worker is named without."""

LEAST_STEPS_OF_A_RUN: Final = 20
"""Steps of a run that ends before it has filled its window ..."""

LEAST_SECONDS_OF_A_RUN: Final = 2.0
"""... and seconds of its training loop, before it can have stalled."""

WINDOW_STEPS: Final = 2 * LEAST_STEPS
"""Of long steps the window holds so many, however long they take ..."""

MOST_WINDOWS: Final = 10.0
"""... up to so many times its length."""

LEAST_SHARE: Final = 0.5
"""Share of the window that must have been seen."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall as far as it has come.

    Attributes:
        cause: what has cost most of it; ``lost`` has the seconds of every cause.
        opened_step: steps that had ended when it opened.
        exposed_ratio: exposed wait over training-loop seconds, since it opened; None where exposure is not known.
        evidence: of the newest window that was lost enough to open a stall: what a recovery looks like advises nothing.
        stuck: whether it is a run that is stuck: it ends when the run goes on.
    """

    cause: str
    opened_step: int
    lost: dict[str, float]
    loop: float
    exposed: float | None
    evidence: Evidence
    stuck: bool = False

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed wait over training-loop seconds of the stall."""
        return None if self.exposed is None or self.loop <= 0 else min(1.0, self.exposed / self.loop)


@dataclass(frozen=True, slots=True)
class Change:
    """What an update has changed: ``opened``, ``closed``, or a stall whose cause is now another (``renamed``)."""

    kind: str
    stall: Stall


class StallMachine:
    """Follows one rank.

    Args:
        window_seconds: length of the window that is judged.
        enter_ratio: share of it lost that opens a stall: to waits for data, whatever their causes, or to one cause of
            another kind. ``exit_ratio`` closes it.
        rank: whose stalls these are.
    """

    def __init__(self, window_seconds: float, enter_ratio: float, exit_ratio: float, rank: int = 0) -> None:
        self.rank = rank
        self._window = window_seconds
        self._enter = enter_ratio
        self._exit = exit_ratio
        self._slices: deque[Slice] = deque()
        self._held = 0.0
        self._held_steps = 0
        self._steps = 0
        self._checkpoints = Checkpoints()
        self._edges = Edges()
        self._ever_opened = False
        self.stall: Stall | None = None

    def update(self, piece: Slice) -> Change | None:
        """Take in what happened since the last tick. Returns what that changed."""
        if piece.seconds > self._window:  # a machine that slept, a debugger's pause: nothing can be said of it
            self._forget()
            return None
        self._add(piece)
        if self.stall is not None and self.stall.stuck:
            return self._hold_stuck(self.stall, piece)
        evidence = self._gather()
        if evidence.loop + evidence.checkpoint <= 0:
            return None  # an evaluation, a start-up: no training to judge
        lost = costs(evidence)
        cause, ratio = _worst(lost, evidence)
        if self.stall is not None:
            return self._go_on(piece, lost, ratio, evidence)
        seen = evidence.loop + evidence.checkpoint
        enough = evidence.steps >= LEAST_STEPS and seen >= LEAST_SHARE * self._window
        if ratio < self._enter or not (enough or cause == "worker_stuck"):
            return None
        return self._open(cause, lost, evidence)

    def open_stuck(self, cause: str, seconds: float, piece: Slice) -> Stall:
        """The run is stuck, and has been for so many seconds. What was open is replaced."""
        self._add(piece)
        # On the GPU's clock a wait is exposed only once it is over: until then nobody has measured it.
        known = piece.exposed is not None and piece.exposed >= piece.wait
        exposed = (seconds if piece.wait > 0 else 0.0) if known else None
        # What has been lost so far stands in the stall that is replaced.
        lost = 0.0 if self.stall is not None else seconds
        self._ever_opened = True
        self.stall = Stall(cause, self._steps, {cause: lost}, seconds, exposed, self._gather(), stuck=True)
        return self.stall

    def close_stuck(self) -> None:
        """The run goes on. What the window holds has been told: the next stall is judged from now on."""
        self.stall = None
        self._forget()

    def _hold_stuck(self, before: Stall, piece: Slice) -> Change:
        spent = piece.wait + piece.compute
        exposed = None if before.exposed is None or piece.exposed is None else before.exposed + piece.exposed
        lost = {before.cause: before.lost[before.cause] + spent}
        loop = before.loop + spent
        self.stall = Stall(before.cause, before.opened_step, lost, loop, exposed, self._gather(), stuck=True)
        return Change("held", self.stall)

    def _forget(self) -> None:
        self._slices.clear()
        self._held = 0.0
        self._held_steps = 0

    def _add(self, piece: Slice) -> None:
        self._checkpoints.add(piece)
        self._edges.add(piece)
        self._steps += piece.steps
        self._slices.append(piece)
        self._held += piece.seconds
        self._held_steps += piece.steps
        while self._is_spare(self._slices[0]):
            oldest = self._slices.popleft()
            self._held -= oldest.seconds
            self._held_steps -= oldest.steps

    def _is_spare(self, oldest: Slice) -> bool:
        """Whether the window is full without it."""
        held, steps = self._held - oldest.seconds, self._held_steps - oldest.steps
        return held >= self._window and (steps >= WINDOW_STEPS or held >= MOST_WINDOWS * self._window)

    def last(self) -> Change | None:
        """The run ends: one that was too short for a window is judged by what there is of it."""
        if self._ever_opened or not self._slices:
            return None
        evidence = self._gather()
        lost = costs(evidence)
        cause, ratio = _worst(lost, evidence)
        seen = evidence.loop + evidence.checkpoint
        if ratio < self._enter or evidence.steps < LEAST_STEPS_OF_A_RUN or seen < LEAST_SECONDS_OF_A_RUN:
            return None
        return self._open(cause, lost, evidence)

    def pace(self) -> RankPace | None:
        """What this rank's peers may know of its newest window."""
        return self._gather().pace if self._slices else None

    def _gather(self) -> Evidence:
        return gather(
            tuple(self._slices),
            rank=self.rank,
            cause=self.stall.cause if self.stall is not None else None,
            checkpoint_interval=self._checkpoints.interval,
            early_checkpoint=self._checkpoints.early,
            edge_share=self._edges.share,
            edge_share_of_sampler=self._edges.share_of_sampler,
        )

    def _open(self, cause: str, lost: dict[str, float], evidence: Evidence) -> Change:
        self._ever_opened = True
        self.stall = Stall(cause, self._steps - evidence.steps, dict(lost), evidence.loop, evidence.exposed, evidence)
        return Change("opened", self.stall)

    def _go_on(self, piece: Slice, lost: dict[str, float], ratio: float, evidence: Evidence) -> Change:
        before = self.stall
        assert before is not None  # noqa: S101 - update has looked
        share = min(1.0, piece.seconds / evidence.seconds) if evidence.seconds > 0 else 0.0
        total = dict(before.lost)
        for cause, seconds in lost.items():
            total[cause] = total.get(cause, 0.0) + seconds * share
        exposed = None if before.exposed is None or piece.exposed is None else before.exposed + piece.exposed
        cause, _ = _costliest(total)
        loop = before.loop + piece.wait + piece.compute
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
    whole = evidence.with_checkpoints if cause == "checkpoint" else evidence.loop
    return cause, min(1.0, seconds / whole) if whole > 0 else 0.0


def _costliest(lost: dict[str, float]) -> tuple[str, float]:
    """What cost most, and how many seconds: all waits for data together, by the name of what made most of them."""
    if not lost:
        return "unknown", 0.0
    waits = {cause: seconds for cause, seconds in lost.items() if cause in WAITS}
    kinds = [waits, *({cause: seconds} for cause, seconds in lost.items() if cause not in WAITS)]
    kind = max((kind for kind in kinds if kind), key=lambda kind: sum(kind.values()))
    return max(kind, key=lambda cause: kind[cause]), sum(kind.values())
