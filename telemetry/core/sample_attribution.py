"""Says which line a sample counts for: the one that held the GIL when it was due, and the one that used the CPU.

A sample is late if a C call holds the GIL when it is due. After the call the sampling thread is not alone in waiting:
another thread may get the GIL first, and after it the sampled thread, which goes on to its next call. The sample then
sees that call. In a DataLoader worker the thread that sends batches waits from the beginning of each fetch: a quarter
of the late samples of a first call were seen behind it (`python -m tests.lines`).

All samples of a line tell whether it holds the GIL. If a call holds it for 20 ms, nearly all of its samples are late.
If most samples of a line are in time, the line does not hold the GIL. Its late samples then count for the call, if
they are about as late as those of the call. So do the few late samples of the line that follows the call in the same
function.

Python code holds the GIL as well, but gives it up after the switch interval. A sample that is due shortly before it
calls something that releases the GIL, a read for example, is seen at that call. Samples of such a call need not wait at
all. So those that waited count for the code that made them wait.

The CPU clock tells what was used since the sample before, perhaps by another line. A line that waits for 30 ms would
get half of the CPU time of the 8 ms before it. So where two samples in a row see the same line in the same fetch, these
say how much of its time a line is on a core. Python code that others wait for is on a core all the time.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.stack_profile import StackProfile, StackTime
from telemetry.core.switch_interval import SWITCH_SECONDS

if TYPE_CHECKING:
    from telemetry.util.stacks import Stack

LATE_WAITS: Final = 4
"""A thread waits for the GIL in pieces of the switch interval. Python code gives it up after one or two of them."""

_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it
_LATE_NS: Final = int(LATE_WAITS * SWITCH_SECONDS * 1e9)
_MIN_LATE: Final = 3
_FEW: Final = 3.0
"""A line holds the GIL if at most this many times as many samples are in time as of one call that always holds it."""

_PART: Final = 1 / 3
"""The largest part of the late samples of a call that are seen at the line behind it."""

_MIN_INSIDE: Final = 3
"""So many pairs of samples tell how much of its time a line is on a core."""

_MIN_FREE: Final = 5
_MAX_TURNS: Final = 0.25
"""A line releases the GIL if at most this part as many of its samples waited for it as did not."""

_MIN_ON_CORE: Final = 0.2
"""Who holds the GIL is on a core for at least this part of its time, by the CPU clock. Else another thread holds it."""

_MAX_TURNS_BACK: Final = 0.5
"""Code gets at most this part of its own time back: another thread may be why a sample waited."""

_AS_LATE: Final = 0.5
"""A sample of a call is, in the mean, at least this part as late where another line is seen."""


def thread_waits() -> int:
    """How often this thread has waited so far: for a lock, the GIL, or the end of a sleep.

    Source: ``ru_nvcsw`` of getrusage. Where the kernel does not count them, it stays 0, and no sample is late.
    """
    return resource.getrusage(_THREAD).ru_nvcsw if _THREAD is not None else 0


@dataclass(slots=True)
class _Late:
    """Late samples: how many, the time that they stand for, how much of it was on a core, and how late they were."""

    samples: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0
    delay_ns: int = 0

    def add(self, samples: int, wall_ns: int, cpu_ns: int, delay_ns: int) -> None:
        self.samples += samples
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns
        self.delay_ns += delay_ns

    @property
    def mean_delay_ns(self) -> float:
        return self.delay_ns / max(self.samples, 1)


class _SamplesOfStack:
    """The samples of a stack. Times are in nanoseconds.

    Attributes:
        inside, inside_ns, inside_cpu_ns: samples that follow one of the same stack in the same fetch.
        free: samples that did not wait for the GIL. ``turns``: those that did, and were in time.
    """

    __slots__ = (
        "_late", "cpu_ns", "free", "inside", "inside_cpu_ns", "inside_ns", "turns", "turns_ns", "wall_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0
        self.inside = self.inside_ns = self.inside_cpu_ns = 0
        self.free = self.turns = self.turns_ns = 0
        self._late: dict[int, _Late] = {}  # by the length of the delay, each about twice the one before

    def add_late(self, wall_ns: int, cpu_ns: int, delay_ns: int) -> None:
        """Add a late sample."""
        self._late.setdefault(delay_ns.bit_length(), _Late()).add(1, wall_ns, cpu_ns, delay_ns)

    def late(self, least_ns: float = 0.0) -> _Late:
        """The samples that are at least about this late."""
        found = _Late()
        for each in self._late.values():
            if each.mean_delay_ns >= least_ns:
                found.add(each.samples, each.wall_ns, each.cpu_ns, each.delay_ns)
        return found

    @property
    def releases_the_gil(self) -> bool:
        return self.free >= _MIN_FREE and self.turns + self.late().samples <= _MAX_TURNS * self.free

    @property
    def takes_turns(self) -> bool:
        return self.turns > max(_MIN_FREE, self.free) and self._is_on_core

    @property
    def _is_on_core(self) -> bool:
        """Whether it may be what others wait for."""
        return self._clocked(self.wall_ns, self.cpu_ns) >= _MIN_ON_CORE * self.wall_ns

    def _clocked(self, wall_ns: int, cpu_ns: int) -> int:
        """The CPU time of this wall clock, by the CPU clock. ``cpu_ns``: with that of the lines before it."""
        return wall_ns * self.inside_cpu_ns // self.inside_ns if self.inside >= _MIN_INSIDE else cpu_ns

    def time(self, wall_ns: int, cpu_ns: int) -> StackTime:
        """What becomes of its time, after samples have been moved."""
        late = self.late().samples
        waited = (self.turns + late) / max(self.free + self.turns + late, 1)
        on_core = wall_ns if self.takes_turns else self._clocked(wall_ns, cpu_ns)
        return StackTime(wall_ns, on_core, int(waited * wall_ns) if self._is_on_core else 0)

    def holds_the_gil(self, *, without: _Late | None = None) -> bool:
        """Whether its late samples are those of a call that holds the GIL. ``without``: late samples of another one."""
        late = self.late()
        if without is not None:
            late.add(-without.samples, -without.wall_ns, -without.cpu_ns, -without.delay_ns)
        call_ns = 2 * late.mean_delay_ns - _LATE_NS  # late samples are due anywhere before its last 2 ms
        if late.samples < _MIN_LATE or call_ns <= _LATE_NS:
            return False
        expected = late.samples * _LATE_NS / max(call_ns - _LATE_NS, _LATE_NS)
        return self.free + self.turns <= _FEW * expected + 1


class AttributedSamples:
    """Samples, and how each was taken. Used by the thread that samples."""

    def __init__(self) -> None:
        self._profile = StackProfile()
        self._seen: dict[Stack, _SamplesOfStack] = {}
        self._before: tuple[Stack, int] | None = None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self._profile.samples

    def add(self, stack: Stack, wall_ns: int, cpu_ns: int, *, delay_ns: int, waits: int, fetch: int) -> None:
        """Add a sample.

        Args:
            stack: what was seen.
            wall_ns: the time that it stands for.
            cpu_ns: how much of that was CPU time.
            delay_ns: how late it was.
            waits: how often this thread has waited for the GIL before it.
            fetch: the number of the fetch in which it was taken.
        """
        inside, self._before = self._before == (stack, fetch), (stack, fetch)
        self._profile.add(stack, wall_ns, cpu_ns)
        if stack not in self._profile.times:
            return  # one of too many
        seen = self._seen.setdefault(stack, _SamplesOfStack())
        seen.wall_ns += wall_ns
        seen.cpu_ns += cpu_ns
        if inside:
            seen.inside += 1
            seen.inside_ns += wall_ns
            seen.inside_cpu_ns += cpu_ns
        if waits < 1:
            seen.free += 1
        elif waits < LATE_WAITS:
            seen.turns += 1
            seen.turns_ns += wall_ns
        else:
            seen.add_late(wall_ns, cpu_ns, delay_ns)

    def profile(self) -> StackProfile:
        """The time of each stack, after all samples so far."""
        profile = StackProfile()
        profile.merge(self._profile)
        self._count_late(profile)
        self._count_turns(profile)
        for stack, seen in self._seen.items():
            wall, cpu, _ = profile.times[stack]
            profile.times[stack] = seen.time(wall, cpu)
        return profile

    def _count_late(self, profile: StackProfile) -> None:
        """Give late samples back to the calls that hold the GIL, if there are such calls."""
        holders = {stack: seen for stack, seen in self._seen.items() if seen.holds_the_gil()}
        holders = {stack: seen for stack, seen in holders.items() if not _is_behind(stack, seen, holders)}
        held = {stack: seen.late() for stack, seen in holders.items()}
        held_ns = sum(late.wall_ns for late in held.values())
        if not held_ns:
            return
        least_ns = _AS_LATE * min(late.mean_delay_ns for late in held.values())
        moved = StackTime(0, 0)
        for stack, seen in self._seen.items():
            if stack not in held and (late := seen.late(least_ns)).samples:
                profile.times[stack] = profile.times[stack].plus(StackTime(-late.wall_ns, -late.cpu_ns))
                moved = moved.plus(StackTime(late.wall_ns, late.cpu_ns))
        for stack, late in held.items():
            more = StackTime(moved.wall_ns * late.wall_ns // held_ns, moved.cpu_ns * late.wall_ns // held_ns)
            profile.times[stack] = profile.times[stack].plus(more)

    def _count_turns(self, profile: StackProfile) -> None:
        """Give samples that waited at lines that release the GIL back to the code that they waited for."""
        releasing = {stack: seen for stack, seen in self._seen.items() if seen.releases_the_gil and seen.turns}
        turning = {stack: seen.turns_ns for stack, seen in self._seen.items() if seen.takes_turns}
        moved = sum(seen.turns_ns for seen in releasing.values())
        if not moved or not turning:
            return
        all_turns = sum(turning.values())
        more = {stack: min(moved * ns // all_turns, int(_MAX_TURNS_BACK * ns)) for stack, ns in turning.items()}
        back = sum(more.values())
        for stack, seen in releasing.items():
            less = back * seen.turns_ns // moved
            profile.times[stack] = profile.times[stack].plus(StackTime(-less, 0))
        for stack, more_ns in more.items():
            profile.times[stack] = profile.times[stack].plus(StackTime(more_ns, 0))


def _is_behind(stack: Stack, seen: _SamplesOfStack, holders: dict[Stack, _SamplesOfStack]) -> bool:
    """Whether a line is only seen since it follows a call of the same function that holds the GIL."""
    here = stack[0]
    for other, call in holders.items():
        same_function = other[1:] == stack[1:] and (other[0].file, other[0].function) == (here.file, here.function)
        if same_function and other[0].line < here.line:
            held = call.late()
            behind = seen.late(_AS_LATE * held.mean_delay_ns)
            if 0 < behind.wall_ns <= _PART * held.wall_ns and not seen.holds_the_gil(without=behind):
                return True
    return False
