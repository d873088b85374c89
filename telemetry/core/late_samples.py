"""Gives late samples back to the line that held the GIL.

A sample is late if a C call holds the GIL when it is due. After the call the sampling thread is not alone in waiting:
another thread may get the GIL first, and after it the sampled thread, which goes on to its next call. The sample then
sees that call. In a DataLoader worker the thread that sends batches waits from the beginning of each fetch: a quarter
of the late samples of a first call were seen behind it (`python -m tests.lines`).

All samples of a line tell whether it holds the GIL. If a call holds it for 20 ms, nearly all of its samples are late.
If most samples of a line are in time, the line does not hold the GIL. Its late samples then count for the call, if
they are about as late as those of the call. So do the few late samples of the line that follows the call in the same
function.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.core.stack_profile import StackProfile
from telemetry.core.switch_interval import SWITCH_SECONDS

if TYPE_CHECKING:
    from telemetry.core.stacks import Stack

LATE_WAITS: Final = 4
"""A thread waits for the GIL in pieces of the switch interval. Python code gives it up after one or two of them."""

_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it
_LATE_NS: Final = int(LATE_WAITS * SWITCH_SECONDS * 1e9)
_MIN_LATE: Final = 3
_FEW: Final = 3.0
"""A line holds the GIL if at most this many times as many samples are in time as of one call that always holds it."""

_PART: Final = 1 / 3
"""The largest part of the late samples of a call that are seen at the line behind it."""

_AS_LATE: Final = 0.5
"""A sample of a call is, in the mean, at least this part as late where another line is seen."""


def thread_waits() -> int:
    """How often this thread has waited so far: for a lock, the GIL, or the end of a sleep.

    Source: ``ru_nvcsw`` of getrusage. Where the kernel does not count them, it stays 0, and no sample is late.
    """
    return resource.getrusage(_THREAD).ru_nvcsw if _THREAD is not None else 0


@dataclass(slots=True)
class _SamplesOfStack:
    """The samples of a stack. Times are in nanoseconds; ``delay_ns`` is how late the late ones were."""

    in_time: int = 0
    late: int = 0
    late_ns: int = 0
    late_cpu_ns: int = 0
    delay_ns: int = 0

    @property
    def mean_delay_ns(self) -> float:
        return self.delay_ns / max(self.late, 1)

    @property
    def holds_the_gil(self) -> bool:
        if self.late < _MIN_LATE:
            return False
        call_ns = 2 * self.mean_delay_ns - _LATE_NS  # late samples are due anywhere before its last 2 ms
        expected = self.late * _LATE_NS / max(call_ns - _LATE_NS, _LATE_NS)
        return self.in_time <= _FEW * expected + 1


class LateSamples:
    """A profile, and which of its samples were late. Used by the thread that samples."""

    def __init__(self) -> None:
        self._profile = StackProfile()
        self._seen: dict[Stack, _SamplesOfStack] = {}

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self._profile.samples

    def add(self, stack: Stack, wall_ns: int, cpu_ns: int, *, delay_ns: int, waits: int) -> None:
        """Add a sample.

        Args:
            stack: what was seen.
            wall_ns: the time that it stands for.
            cpu_ns: how much of that was CPU time.
            delay_ns: how late it was.
            waits: how often this thread has waited for the GIL before it.
        """
        self._profile.add(stack, wall_ns, cpu_ns)
        if stack not in self._profile.times:
            return  # one of too many
        seen = self._seen.setdefault(stack, _SamplesOfStack())
        if waits < LATE_WAITS:
            seen.in_time += 1
        else:
            seen.late += 1
            seen.late_ns += wall_ns
            seen.late_cpu_ns += cpu_ns
            seen.delay_ns += delay_ns

    def profile(self) -> StackProfile:
        """The profile in which late samples count for the stacks that hold the GIL, if there are such stacks."""
        profile = StackProfile()
        profile.merge(self._profile)
        holders = {stack: seen for stack, seen in self._seen.items() if seen.holds_the_gil}
        holders = {stack: seen for stack, seen in holders.items() if not _is_behind(stack, seen, holders)}
        held = sum(seen.late_ns for seen in holders.values())
        if not held:
            return profile
        least_ns = _AS_LATE * min(seen.mean_delay_ns for seen in holders.values())
        moved = moved_cpu = 0
        for stack, seen in self._seen.items():
            if seen.late and stack not in holders and seen.mean_delay_ns >= least_ns:
                wall, cpu = profile.times[stack]
                profile.times[stack] = wall - seen.late_ns, cpu - seen.late_cpu_ns
                moved, moved_cpu = moved + seen.late_ns, moved_cpu + seen.late_cpu_ns
        for stack, seen in holders.items():
            wall, cpu = profile.times[stack]
            profile.times[stack] = wall + moved * seen.late_ns // held, cpu + moved_cpu * seen.late_ns // held
        return profile


def _is_behind(stack: Stack, seen: _SamplesOfStack, holders: dict[Stack, _SamplesOfStack]) -> bool:
    """Whether a line is only seen since it follows a call of the same function that holds the GIL."""
    here = stack[0]
    return any(
        other[1:] == stack[1:]
        and (other[0].file, other[0].function) == (here.file, here.function)
        and other[0].line < here.line
        and seen.late_ns <= _PART * call.late_ns
        and seen.mean_delay_ns >= _AS_LATE * call.mean_delay_ns
        for other, call in holders.items()
    )
