"""The training loop of a process in parts, and how much of each part it was stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION
from telemetry.report.attempts import FINISHED, RUNNING, unix
from telemetry.report.progress_points import Point
from telemetry.report.resumption import first_point, last_point

if TYPE_CHECKING:
    from telemetry.report.attempts import Life
    from telemetry.report.process_log import ProcessLog
    from telemetry.report.resumption import Course

BEGINNING: Final = "beginning"
REPLAYED: Final = "replayed"
KEPT: Final = "kept"
LOST_STEPS: Final = "lost"

_PHASES: Final = (EVALUATION, CHECKPOINT)

Part = tuple[str, str]
"""The wait for the first batch (`BEGINNING`), the replay, the steps that were kept and those that were lost; and of
these `DATA_WAIT` or `COMPUTE`."""


class Stuck(NamedTuple):
    """A time without progress.

    Attributes:
        opened: when it was noticed. ``closed``: when it was over; None: never.
        before: seconds that it had lasted when it was noticed.
        steps: of the loop that had ended before it.
        category: what the training thread was doing, as in the ledger.
    """

    opened: str
    closed: str | None
    before: float
    steps: int
    category: str

    @property
    def since(self) -> float | None:
        """Unix time of its start."""
        opened = unix(self.opened)
        return None if opened is None else opened - self.before

    def seconds(self, end: float) -> float:
        """How long it lasted, in a process that ended at a Unix time."""
        opened, closed = unix(self.opened), end if self.closed is None else unix(self.closed)
        return 0.0 if opened is None or closed is None else max(0.0, closed - opened) + self.before


def stuck_of(log: ProcessLog) -> list[Stuck]:
    """The times a process was stuck."""
    found: list[Stuck] = []
    for line in log.stalls:
        evidence = line.get("evidence", {})
        opened = line.get("opened") or line.get("time", "")
        if line.get("event") == "stall_open" and "stuck_in" in evidence:
            before = float(evidence.get("stuck_for_seconds") or 0.0)
            found.append(Stuck(opened, None, before, line.get("first_step", 0), evidence["stuck_in"]))
        elif line.get("event") == "stall_close" and found and found[-1].opened == opened:
            found[-1] = found[-1]._replace(closed=line.get("closed") or line.get("time"))
    return found


def loop_parts(life: Life, course: Course) -> tuple[dict[Part, float], float]:
    """The seconds of each part of the training loop without the times it was stuck, and how long it was stuck."""
    first, last = first_point(life), last_point(life)
    end = Point(*(max(own, begun) for own, begun in zip(last, first, strict=True)))
    cut = _cut(life, course, first, end)
    parts = {
        (KEPT, DATA_WAIT): cut.wait_seconds - first.wait_seconds,
        (KEPT, COMPUTE): cut.compute_seconds - first.compute_seconds,
        (LOST_STEPS, DATA_WAIT): end.wait_seconds - cut.wait_seconds,
        (LOST_STEPS, COMPUTE): end.compute_seconds - cut.compute_seconds,
        (REPLAYED, DATA_WAIT): life.totals.get("replay_wait_seconds", 0.0),
        (REPLAYED, COMPUTE): first.compute_seconds,
        (BEGINNING, DATA_WAIT): min(life.totals.get("first_wait_seconds", 0.0), last.wait_seconds),
    }
    total = 0.0
    for stuck in stuck_of(life.log):
        if stuck.category in _PHASES:
            continue
        left, there = stuck.seconds(life.end), _place(stuck, life, course, cut, end)
        # A tick knows late that the run goes on: then the part may be shorter.
        for part in sorted(parts, key=lambda part: (part[0] != there, part[1] != stuck.category)):
            taken = max(0.0, min(left, parts[part]))
            parts[part] -= taken
            total += taken
            left -= taken
    return parts, total


def stuck_in_phases(life: Life) -> dict[str, float]:
    """How long a process was stuck in evaluations and in checkpoints, of the time in them."""
    spent = life.totals.get("ledger_total_seconds", {})
    stuck = dict.fromkeys(_PHASES, 0.0)
    for each in stuck_of(life.log):
        if each.category in stuck:
            stuck[each.category] += each.seconds(life.end)
    return {phase: min(seconds, spent.get(phase, 0.0)) for phase, seconds in stuck.items()}


def stuck_in_saves(log: ProcessLog) -> float:
    """Seconds for which a process was stuck in checkpoints that it went on from. They are no usual cost of one."""
    hangs = [each for each in stuck_of(log) if each.category == CHECKPOINT and each.closed is not None]
    return min(log.save_seconds, sum(each.seconds(0.0) for each in hangs))


def _cut(life: Life, course: Course, first: Point, end: Point) -> Point:
    """Where the steps that were kept end."""
    if course.end <= course.resumed and course.attempt.how not in {FINISHED, RUNNING}:
        return first  # it has not come to the end of a step
    if course.kept >= course.end:
        return end
    return Point(*(min(most, max(at, least)) for at, least, most in zip(course.cut(life), first, end, strict=True)))


def _place(stuck: Stuck, life: Life, course: Course, cut: Point, end: Point) -> str:
    """Where a process was stuck."""
    if stuck.steps == 0 and stuck.category == DATA_WAIT:
        return BEGINNING
    if stuck.steps < life.totals.get("replayed_batches", 0):
        return REPLAYED
    if cut == end:
        return KEPT
    if stuck.closed is None or stuck.steps >= cut.steps:
        return LOST_STEPS
    save = course.save_at_cut(life)
    if save is None or stuck.steps + 1 != save.steps:
        return KEPT
    saved, since = unix(save.started), stuck.since  # both in one step
    return LOST_STEPS if saved is not None and since is not None and saved <= since else KEPT
