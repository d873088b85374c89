"""The books of a run as text: one sentence on where its GPU-hours went, its attempts, and how often to save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.records import STARTUP
from telemetry.report.attempts import FAILED, FINISHED, KILLED, RUNNING
from telemetry.report.goodput import DOWN, LOST, PRODUCTIVE, REDONE, REPLAY, RESTORE, STUCK, Goodput, reason_of
from telemetry.report.resumption import ASSUMED
from telemetry.util.text import plain_number, rounded_percent

if TYPE_CHECKING:
    from telemetry.report.resumption import Course

_MIN_RATIO: Final = 0.005
"""A category with a smaller share of the GPU-hours is not mentioned."""

_WORDS: Final = {
    REDONE: "redone",
    DOWN: "down",
    STUCK: "stuck",
    RESTORE: "restoring",
    REPLAY: "replaying",
    STARTUP: "starting up",
}

_REPLAY_WORTH: Final = 0.01
"""From this share of the wall clock on, replay is worth an advice."""

_MAX_ATTEMPTS: Final = 20


def verdict(goodput: Goodput) -> str:
    """One sentence on the GPU-hours of a run with several attempts; empty for one attempt."""
    total = sum(goodput.rank_seconds.values())
    if len(goodput.courses) < 2 or total <= 0:
        return ""
    productive = goodput.rank_seconds[PRODUCTIVE]
    costs = sorted(((goodput.rank_seconds[c], c) for c in LOST), reverse=True)
    parts = [
        f"{_hours(seconds)} {_WORDS[category]}{_after(goodput) if category == REDONE else ''}"
        for seconds, category in costs
        if seconds / total >= _MIN_RATIO
    ]
    lost = f": {', '.join(parts)}" if parts else ""
    kept = f"{_hours(productive)} were productive ({rounded_percent(productive / total)})"
    return f"Of {_hours(total)} GPU-hours, {kept}{lost}."


def ended_by_oom(goodput: Goodput) -> str:
    """A sentence on a run that the OOM killer has ended; empty for others."""
    attempt = goodput.courses[-1].attempt if goodput.courses else None
    if attempt is None or attempt.oom is None or attempt.how not in {FAILED, KILLED}:
        return ""
    text = attempt.oom.text
    return (
        f"The run has ended: {text}. Raise the memory limit of its cgroup, or use less: fewer DataLoader workers, or a "
        "smaller prefetch_factor."
    )


def section(goodput: Goodput) -> list[str]:
    """The lines of the report: the attempts, and the advice. Empty for one attempt."""
    if not verdict(goodput):
        return []
    shown = goodput.courses[-_MAX_ATTEMPTS:]
    lines = ["", "attempts:"]
    if len(shown) < len(goodput.courses):
        lines.append(f"the newest {len(shown)} of {len(goodput.courses)} attempts; --json has all")
    lines += [_attempt(course) for course in shown]
    return lines + [f"  {text}" for text in advice(goodput)]


def advice(goodput: Goodput) -> list[str]:
    """What to change, and what that is worth."""
    found = []
    told = goodput.experience
    best, now = told.best_interval_seconds, told.interval_seconds
    if told.gain is not None and best is not None and now is not None and told.failure_seconds is not None:
        predicted = told.predicted(best) or 0.0
        found.append(
            f"write a checkpoint every {_duration(best)} instead of every {_duration(now)}: predicted effective "
            f"training time {rounded_percent(predicted)} (a checkpoint stops the training for "
            f"{_duration(told.checkpoint_seconds or 0.0)}, and the run fails once in {_duration(told.failure_seconds)})"
        )
    elif told.failures and not told.checkpoints:
        found.append("write checkpoints: the run has written none, so each restart begins from nothing")
    if goodput.wall_seconds > 0 and goodput.seconds[REPLAY] / goodput.wall_seconds >= _REPLAY_WORTH:
        found.append(
            "resume the data without drawing batches again: a stateful loader (torchdata's StatefulDataLoader), or a "
            f"sampler that skips; {_duration(goodput.seconds[REPLAY])} went into batches that were thrown away"
        )
    return found


def _attempt(course: Course) -> str:
    attempt = course.attempt
    text = f"  attempt {attempt.number}: {attempt.how}, {course.steps} steps on {attempt.ranks} ranks"
    if course.source != ASSUMED or course.resumed:
        assumed = " (assumed: the newest complete checkpoint)" if course.source == ASSUMED else ""
        text += f", resumed at step {course.resumed:.0f}{assumed}"
    if (attempt.replaced or attempt.how in {FAILED, KILLED}) and course.lost_steps:
        text += f", {course.lost_steps} steps lost"
    reason = reason_of(attempt)
    return text if reason is None else f"{text} ({reason})"


def _after(goodput: Goodput) -> str:
    """What the redone steps are there for."""
    ends = [course.attempt.how for course in goodput.courses if course.attempt.how not in {FINISHED, RUNNING}]
    parts = []
    for how, one, many in ((KILLED, "kill", "kills"), (FAILED, "failure", "failures")):
        number = ends.count(how)
        if number:
            parts.append(f"{number} {one if number == 1 else many}")
    return f" after {' and '.join(parts)}" if parts else ""


def _hours(seconds: float) -> str:
    """Hours with two digits that matter."""
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}" if hours >= 0.995 else f"{plain_number(hours, 2)}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{plain_number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
