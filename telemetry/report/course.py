"""The course of each attempt through the training: where it resumed, how far it came, and which steps were lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.log.process import Point, point_at
from telemetry.report.attempt_list import FINISHED, RUNNING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.attempt_list import Attempt, Life

ASSUMED: Final = "assumed"

_AHEAD: Final = 2
"""A loop that reads so many batches ahead does not throw them away."""

_NEW_RUN_SECONDS: Final = 60.0
"""A launcher, or a loop in a shell, starts a run that has failed again sooner. A person takes longer."""

_TOLERANCE: Final = 0.02
"""Counts of steps and of optimizer steps that differ by this share are the same: the last step may be open."""


@dataclass(frozen=True)
class Course:
    """The course of an attempt through the training.

    Attributes:
        resumed: position at which it began. ``resumed_from``: ``optimizer``, ``told``, or ``assumed``.
        end: position that it reached.
        kept: position up to which its steps were kept; ``end`` if nothing was lost.
        per_position: steps of the loop for one position: more than one with gradient accumulation.
        axis: unit of the positions: ``optimizer_steps`` or ``steps``.
        rate: number of these units per position: several optimizers each step once.
        replayed: number of batches that were drawn and thrown away.
    """

    attempt: Attempt
    resumed: float
    resumed_from: str
    end: float
    kept: float
    per_position: float
    axis: str
    rate: float
    replayed: int

    @property
    def lost_steps(self) -> int:
        """Steps of the loop whose results were lost."""
        if not (self.attempt.broke_off or self.attempt.replaced):
            return 0
        return round(max(0.0, self.end - max(self.kept, self.resumed)) * self.per_position)

    @property
    def steps(self) -> int:
        """Steps of the loop without the replay."""
        return max(0, max(life.totals.steps_total or 0 for life in self.attempt.lives) - self.replayed)

    @property
    def has_position(self) -> bool:
        """Whether the position of the attempt is known, or it has done a step."""
        return self.resumed_from != ASSUMED or self.steps > 0

    def points(self, life: Life) -> tuple[Point, Point, Point]:
        """The totals of a process when its first new step began, at its last step that was kept, and at its end."""
        told, last = life.totals.resumption, life.last_point
        waited = min(life.totals.first_wait_seconds, last.data_wait)
        if told.replayed_batches is None and self.replayed:  # it ended before its agent could know
            first = point_at([Point(data_wait=waited), *life.log.progress.points, last], "steps", self.replayed)
        else:
            compute = max(0.0, told.replay_seconds - told.replay_wait_seconds)
            first = Point(steps=self.replayed, data_wait=waited + told.replay_wait_seconds, compute=compute)
        first = first._replace(optimizer_steps=life.offset)
        end = Point(*map(max, last, first))
        return first, self._cut(life, first, end), end

    def _cut(self, life: Life, first: Point, end: Point) -> Point:
        if self.end <= self.resumed and self.attempt.broke_off:
            return first  # it has not come to the end of a step
        if self.kept >= self.end:
            return end
        value = max(0.0, (self.kept - self.resumed) * self.rate) + getattr(first, self.axis)
        saves = (Point.at(save) for save in reversed(life.log.saves) if save.loop_seconds is not None)
        found = next((save for save in saves if getattr(save, self.axis) == value), None)
        found = found or point_at([first, *life.log.progress.points, end], self.axis, value)
        return Point(*(min(most, max(each, least)) for each, least, most in zip(found, first, end, strict=True)))


def courses_of(attempts: Sequence[Attempt]) -> list[Course]:
    """The course of each attempt, the oldest first."""
    courses: list[Course] = []
    for attempt in attempts:
        course = _course(attempt, courses)
        # A later attempt repeats what an earlier one did beyond this position, unless the earlier one was complete.
        for index, earlier in enumerate(courses):
            done = earlier.attempt.how == FINISHED and not earlier.attempt.replaced
            if course.has_position and not done and earlier.kept > course.resumed:
                courses[index] = replace(earlier, kept=course.resumed)
        courses.append(course)
    # No later attempt shows where the newest attempt with steps is resumed: at its newest checkpoint.
    last = max((i for i, course in enumerate(courses) if course.has_position), default=None)
    if last is not None and attempts[last].broke_off:
        newest = newest_checkpoint(courses[last])
        at = courses[last].resumed if newest is None else newest
        courses[last] = replace(courses[last], kept=min(courses[last].kept, at))
    return courses


def newest_run(courses: Sequence[Course]) -> int:
    """The first attempt of the newest run in the folder. A later start that resumes nothing is a run of its own."""
    last = len(courses) - 1
    for number in range(last, 0, -1):
        course = courses[number]
        known = course.has_position or (number == last and course.attempt.how != RUNNING)
        if known and _begins_anew(course, courses[number - 1].attempt):
            return number
    return 0


def _begins_anew(course: Course, before: Attempt) -> bool:
    heads = [life.log.head for life in course.attempt.lives]
    if course.resumed > 0 or before.replaced or any(head.restarts or head.launcher == "kubernetes" for head in heads):
        return False
    return before.how == FINISHED or course.attempt.begin - before.end >= _NEW_RUN_SECONDS


def newest_checkpoint(course: Course) -> float | None:
    """Position of the newest checkpoint that was complete when an attempt ended; None if it has written none.

    A checkpoint that several ranks write is complete when all have written it, and it counts only if it holds an
    optimizer's state, where any does.
    """
    by_position: dict[float, set[int]] = {}
    saves = [(life, save) for life in course.attempt.lives for save in life.log.saves if save.complete]
    resumable = [pair for pair in saves if pair[1].holds_optimizer is not False] or saves
    for life, save in resumable:
        by_optimizer = course.axis == "optimizer_steps"
        value = (save.optimizer_steps_total or 0) - life.offset
        value = value if by_optimizer else (save.steps_total or 0) - course.replayed
        by_position.setdefault(course.resumed + max(0.0, value) / course.rate, set()).add(life.rank)
    writers = max((len(ranks) for ranks in by_position.values()), default=0)
    return max((position for position, ranks in by_position.items() if len(ranks) == writers), default=None)


def _course(attempt: Attempt, earlier: Sequence[Course]) -> Course:
    leading = max(attempt.lives, key=lambda life: (life.totals.optimizer_steps_total, -life.rank))
    totals = leading.totals
    done = totals.optimizer_steps_total - leading.offset
    rate = float(max(1, totals.resumption.optimizers or 1)) if done > 0 else 1.0
    resumed, resumed_from = _resumed(attempt, earlier)
    steps = totals.steps_total or 0
    replayed = totals.resumption.replayed_batches
    if replayed is None:
        replayed = _drawn(steps, done / rate, earlier) if resumed > 0 else 0
    steps = max(0, steps - replayed)
    position = done / rate if done > 0 else float(steps)
    same = not position or abs(steps - position) <= 2 + _TOLERANCE * position
    per_position = 1.0 if same else steps / position
    end, axis = resumed + position, "optimizer_steps" if done > 0 else "steps"
    return Course(attempt, resumed, resumed_from, end, end, per_position, axis, rate, replayed)


def _drawn(steps: int, position: float, earlier: Sequence[Course]) -> int:
    """How many batches an attempt has thrown away that ended too early to know. The steps of earlier attempts tell."""
    stepped = [c.per_position for c in earlier if c.axis == "optimizer_steps" and c.end > c.resumed]
    if not stepped:
        return 0
    drawn = steps - round(position * stepped[-1])
    return drawn if drawn > max(_AHEAD, stepped[-1]) else 0


def _resumed(attempt: Attempt, earlier: Sequence[Course]) -> tuple[float, str]:
    for life in sorted(attempt.lives, key=lambda life: life.rank):
        found = life.totals.resumption
        if found.resumed_step is not None and found.resumed_from is not None:
            return float(found.resumed_step), found.resumed_from
    if not any(life.totals.resumption.restore_seconds for life in attempt.lives):
        return 0.0, ASSUMED  # it has loaded nothing, or was killed before
    newest = [position for course in earlier if (position := newest_checkpoint(course)) is not None]
    return (newest[-1] if newest else 0.0), ASSUMED
