"""Where each attempt resumed, and which of its steps were lost when it ended.

Positions are counted in optimizer steps of the whole training, as Adam counts them. A process counts its own; the
position at which it resumed is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.report.attempts import FINISHED, RUNNING
from telemetry.report.progress_points import Point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.attempts import Attempt, Life
    from telemetry.report.process_log import Save

ASSUMED: Final = "assumed"

_FIRST_STEP_BATCHES: Final = 2
"""So many batches without a step of an optimizer are no replay yet."""

_TELLING_POSITION: Final = 2
"""From this step of its optimizers on, a process has logged how much of its loop was replay."""

_TOLERANCE: Final = 0.02
"""Steps and optimizer steps that differ by no more are the same steps: the last one may be open."""


@dataclass(frozen=True, slots=True)
class Course:
    """The way of an attempt through the training.

    Attributes:
        attempt: which.
        resumed: position at which it began. ``source``: ``optimizer``, ``told``, or ``assumed``.
        end: position that it reached.
        kept: position up to which its steps were kept; ``end`` if nothing was lost.
        per_position: steps of the loop for one position, as with gradient accumulation.
        axis: figure of `Point` that positions are counted by.
        rate: how much of that figure makes one position: several optimizers each step once.
        replayed: batches that were drawn and thrown away.
        in_replay: whether it ended before it had come to its first new step.
    """

    attempt: Attempt
    resumed: float
    source: str
    end: float
    kept: float
    per_position: float
    axis: int
    rate: float
    replayed: int
    in_replay: bool = False

    @property
    def lost_steps(self) -> int:
        """Steps of the loop that were done in vain."""
        return round(max(0.0, self.end - max(self.kept, self.resumed)) * self.per_position)

    @property
    def steps(self) -> int:
        """Steps of the loop, without the replay."""
        return max(0, max(int(life.totals.get("steps_total", 0)) for life in self.attempt.lives) - self.replayed)

    def cut(self, life: Life) -> Point:
        """Where a process was when it came to the last position that was kept."""
        save = self.save_at_cut(life)
        if save is not None and save.point is not None:
            return save.point
        return life.log.points.at(self.axis, self._cut_value(life), first_point(life), last_point(life))

    def save_at_cut(self, life: Life) -> Save | None:
        """The checkpoint that a process wrote at the last position that was kept; None if it wrote none there."""
        value = self._cut_value(life)
        for save in reversed(life.log.saves):
            if save.point is not None and save.point[self.axis] == value:
                return save
        return None

    def _cut_value(self, life: Life) -> float:
        """The last position that was kept, as a process counts."""
        value = max(0.0, (self.kept - self.resumed) * self.rate)
        return value + (offset(life) if self.axis == 0 else first_point(life).steps)


def courses_of(attempts: Sequence[Attempt]) -> list[Course]:
    """The way of each attempt, oldest first."""
    courses: list[Course] = []
    for attempt in attempts:
        course = _course(attempt, courses)
        # What an earlier attempt did beyond this position is done again, unless it had come to its end.
        for index, earlier in enumerate(courses):
            done = earlier.attempt.how == FINISHED and not earlier.attempt.replaced
            if _has_position(course) and not done and earlier.kept > course.resumed:
                courses[index] = replace(earlier, kept=course.resumed)
        courses.append(course)
    # No later attempt tells where the newest of those with steps is resumed: at its newest checkpoint.
    last = max((i for i, course in enumerate(courses) if _has_position(course)), default=None)
    if last is not None and attempts[last].how not in {FINISHED, RUNNING}:
        newest = newest_checkpoint(courses[last])
        at = courses[last].resumed if newest is None else newest
        courses[last] = replace(courses[last], kept=min(courses[last].kept, at))
    return courses


def _has_position(course: Course) -> bool:
    return course.source != ASSUMED or course.steps > 0


def newest_checkpoint(course: Course) -> float | None:
    """Position of the newest checkpoint that was complete when an attempt ended; None if it has written none.

    A checkpoint that several ranks write is complete when all have written it, and it counts only if it holds an
    optimizer's state, where any does.
    """
    by_position: dict[float, set[int]] = {}
    saves = [(life, save) for life in course.attempt.lives for save in life.log.saves if save.complete]
    resumable = [pair for pair in saves if pair[1].holds_optimizer] or saves
    for life, save in resumable:
        value = save.optimizer_steps - offset(life) if course.axis == 0 else save.steps - course.replayed
        by_position.setdefault(course.resumed + max(0.0, value) / course.rate, set()).add(life.rank)
    writers = max((len(ranks) for ranks in by_position.values()), default=0)
    return max((position for position, ranks in by_position.items() if len(ranks) == writers), default=None)


def _course(attempt: Attempt, earlier: Sequence[Course]) -> Course:
    leading = max(attempt.lives, key=lambda life: (life.totals.get("optimizer_steps_total", 0), -life.rank))
    totals = leading.totals
    done = totals.get("optimizer_steps_total", 0) - offset(leading)
    replayed = int(totals.get("replayed_batches", 0))
    steps = max(0, totals.get("steps_total", 0) - replayed)
    axis = 0 if done > 0 else 1
    rate = float(max(1, totals.get("optimizers", 1))) if axis == 0 else 1.0
    position = done / rate if axis == 0 else float(steps)
    resumed, source = _resumed(attempt, earlier)
    drawn = 0 if replayed else _drawn(steps, position if axis == 0 else 0.0, earlier)
    of_first_step = max([_FIRST_STEP_BATCHES, *(course.per_position for course in earlier)])
    in_replay = resumed > 0 and drawn > of_first_step
    if in_replay:
        replayed += drawn
    if in_replay or (axis == 1 and drawn):
        steps, position = steps - drawn, position if axis == 0 else 0.0
    per_position = 1.0 if abs(steps - position) <= 2 + _TOLERANCE * position or not position else steps / position
    end = resumed + position
    return Course(attempt, resumed, source, end, end, per_position, axis, rate, replayed, in_replay)


def _drawn(steps: int, position: float, earlier: Sequence[Course]) -> int:
    """Batches that were drawn before the first optimizer step: a replay, or part of that step.

    The second optimizer step tells what was replay. Before it, the steps of earlier attempts tell.

    Args:
        steps: of the loop.
        position: steps of each optimizer.
        earlier: earlier attempts.
    """
    stepped = [course.per_position for course in earlier if course.axis == 0 and course.end > course.resumed]
    if not stepped or position >= _TELLING_POSITION:
        return 0
    return max(0, steps - round(position * stepped[-1]))


def _resumed(attempt: Attempt, earlier: Sequence[Course]) -> tuple[float, str]:
    """Where an attempt began, and what tells it."""
    for life in sorted(attempt.lives, key=lambda life: life.rank):
        if "resumed_step" in life.totals and "resumed_from" in life.totals:
            return float(life.totals["resumed_step"]), str(life.totals["resumed_from"])
    restored = any(life.totals.get("restore_seconds") for life in attempt.lives)
    if not restored:
        return 0.0, ASSUMED  # it has loaded nothing, or was killed before
    newest = [position for course in earlier if (position := newest_checkpoint(course)) is not None]
    return (newest[-1] if newest else 0.0), ASSUMED


def offset(life: Life) -> int:
    """Optimizer steps of a process before it loaded the state from which positions are counted."""
    return int(life.totals.get("resumed_at_optimizer_steps", 0))


def first_point(life: Life) -> Point:
    """How far a process had come when its first step began: the first wait and the replay are over."""
    totals = life.totals
    replay, wait = totals.get("replay_seconds", 0.0), totals.get("replay_wait_seconds", 0.0)
    first_wait = totals.get("first_wait_seconds", 0.0)
    return Point(offset(life), totals.get("replayed_batches", 0), first_wait + wait, max(0.0, replay - wait))


def last_point(life: Life) -> Point:
    """How far a process had come at its end."""
    totals = life.totals
    spent = totals.get("ledger_total_seconds", {})
    return Point(
        totals.get("optimizer_steps_total", 0),
        totals.get("steps_total", 0),
        spent.get("data_wait", 0.0),
        spent.get("compute", 0.0),
    )
