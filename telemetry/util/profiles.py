"""Keeps and sums samples of stacks.

A sample is one look at a thread's stack, and the time that it stands for. `StackProfile` has the time spent in each
stack. A worker sends one, and the agent stores it. `AttributedSamples` makes one from samples of a worker's fetches,
and gives late samples back to the call that made them late. `sources.lines` and `hooks.worker_lines` take
the samples.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.util.gil import SWITCH_SECONDS
from telemetry.util.stacks import Spot, Stack

if TYPE_CHECKING:
    from collections.abc import Collection

FETCH: Final = "fetch"
SAMPLER: Final = "sampler"
WAIT: Final = "wait"
STEP: Final = "step"
CHECKPOINT: Final = "checkpoint"
"""The kinds of work of which samples are taken. The sampler's are a part of those of waits."""

MAX_STACKS: Final = 500
"""A profile has at most this many different stacks."""

OTHER_STACKS: Final[Stack] = ()
"""Stands for the stacks that are too many for a profile."""

_SEPARATORS: Final = {ord(character): "?" for character in "\t\r\n;"}
_OTHER_BYTES: Final = 128
"""These bytes are kept free for the line that sums up what was left out."""


class StackTime(NamedTuple):
    """Nanoseconds spent in a stack: of wall clock, on a core, and with the GIL held, as far as that is known."""

    wall_ns: int = 0
    cpu_ns: int = 0
    gil_ns: int = 0

    def plus(self, other: StackTime) -> StackTime:
        """The sum of both."""
        return StackTime(self.wall_ns + other.wall_ns, self.cpu_ns + other.cpu_ns, self.gil_ns + other.gil_ns)


class StackProfile:
    """The time spent in each stack.

    Attributes:
        times: time by stack, innermost frame first. `OTHER_STACKS` has the time of stacks that are too many.
        samples: number of samples.
    """

    __slots__ = ("samples", "times")

    def __init__(self) -> None:
        self.times: dict[Stack, StackTime] = {}
        self.samples = 0

    def add(self, stack: Stack, wall_ns: int, cpu_ns: int, samples: int = 1, *, gil_ns: int = 0) -> None:
        """Add time in a stack, seen by this many samples."""
        self.samples += samples
        self._count(stack, StackTime(wall_ns, cpu_ns, gil_ns))

    def merge(self, other: StackProfile) -> None:
        """Add everything in another profile."""
        self.samples += other.samples
        for stack, time in other.times.items():
            self._count(stack, time)

    def _count(self, stack: Stack, time: StackTime) -> None:
        if stack not in self.times and len(self.times) >= MAX_STACKS:
            stack = OTHER_STACKS
        self.times[stack] = time.plus(self.times.get(stack, StackTime()))

    @property
    def wall_ns(self) -> int:
        """The time in all stacks."""
        return sum(time.wall_ns for time in self.times.values())

    def _longest_first(self) -> list[tuple[Stack, StackTime]]:
        known = [item for item in self.times.items() if item[0] != OTHER_STACKS]
        return sorted(known, key=lambda item: -item[1].wall_ns)

    def packed(self, most: int) -> bytes:
        """The profile in at most ``most`` bytes. If they are too few, short times are only summed up."""
        stacks = self._longest_first()
        kept = len(stacks)
        while True:
            files: dict[str, int] = {}
            spots: dict[Spot, int] = {}
            times = [(time, [spots.setdefault(spot, len(spots)) for spot in stack]) for stack, time in stacks[:kept]]
            other = self.times.get(OTHER_STACKS, StackTime())
            for _, time in stacks[kept:]:
                other = other.plus(time)
            if other.wall_ns:
                times.append((other, []))
            places = [(files.setdefault(spot.file, len(files)), *spot[1:]) for spot in spots]
            content = json.dumps((self.samples, [*files], places, times), separators=(",", ":")).encode()
            if len(content) <= most or not kept:
                return content
            kept = kept * 3 // 4

    @classmethod
    def unpacked(cls, content: bytes) -> StackProfile:
        """Make the profile from what `packed` has returned.

        Raises:
            ValueError: the content is damaged.
        """
        profile = cls()
        try:
            profile.samples, files, places, times = json.loads(content)
            spots = [Spot(files[file], *place) for file, *place in places]
            for time, numbers in times:
                profile._count(tuple(spots[number] for number in numbers), StackTime(*time))
        except (IndexError, TypeError) as error:
            raise ValueError("not a profile") from error
        return profile

    def folded(self, root: str, most: int) -> bytes:
        """The stacks as folded text of at most ``most`` bytes, below a frame named ``root``. The longest come first."""
        lines: list[bytes] = []
        size, other = 0, self.times.get(OTHER_STACKS, StackTime()).wall_ns
        for stack, (wall, *_) in self._longest_first():
            names = (f"{spot.function} ({spot.file.rpartition(os.sep)[2]}:{spot.line})" for spot in reversed(stack))
            frames = ";".join((root, *(name.translate(_SEPARATORS) for name in names)))
            line = f"{frames} {max(1, wall // 1000)}\n".encode("utf-8", "backslashreplace")
            if size + len(line) > most - _OTHER_BYTES:
                other += wall
                continue
            size += len(line)
            lines.append(line)
        if other >= 1000:
            lines.append(f"{root};(other) {other // 1000}\n".encode())
        return b"".join(lines)


# -- for which line a late sample counts -------------------------------------------------------------------------------

LATE_WAITS: Final = 4
"""A thread waits for the GIL in pieces of the switch interval. Python code gives it up after one or two of them."""

_LATE_NS: Final = int(LATE_WAITS * SWITCH_SECONDS * 1e9)
_MIN_LATE: Final = 3
_FEW: Final = 3.0
"""A line holds the GIL if it has at most this many times the punctual samples of one call that always holds it."""

_PART: Final = 1 / 3
"""At most this part of a call's late samples is seen at the line behind it."""

_MIN_INSIDE: Final = 3
"""After this many pairs of samples it is known how much of its time a line is on a core."""

_MIN_FREE: Final = 5
_MAX_TURNS: Final = 0.25
"""A line releases the GIL if its samples that waited for it are at most this part of those that did not."""

_MIN_ON_CORE: Final = 0.2
"""Code that holds the GIL is on a core for at least this part of its time. Otherwise another thread holds it."""

_MAX_TURNS_BACK: Final = 0.5
"""Code gets back at most this part of its own time: another thread may be why a sample waited."""

_AS_LATE: Final = 0.5
"""A call's samples are, in the mean, at least this part as late where another line is seen."""


class _Late(NamedTuple):
    """Late samples: how many, the time that they stand for, their time on a core, and their delay."""

    samples: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0
    delay_ns: int = 0

    def plus(self, other: _Late, sign: int = 1) -> _Late:
        return _Late(*(mine + sign * its for mine, its in zip(self, other, strict=True)))

    def times(self, part: float) -> _Late:
        return _Late(*(int(part * mine) for mine in self))

    @property
    def mean_delay_ns(self) -> float:
        return self.delay_ns / max(self.samples, 1)


@dataclass(slots=True)
class _SamplesOfStack:
    """The samples of a stack. Times are in nanoseconds.

    Attributes:
        inside, inside_ns, inside_cpu_ns: samples that follow one of the same stack in the same fetch.
        free: samples that did not wait for the GIL. ``turns``: samples that waited for it, but were in time.
        lates: late samples by the length of the delay, each about twice the one before.
    """

    wall_ns: int = 0
    cpu_ns: int = 0
    inside: int = 0
    inside_ns: int = 0
    inside_cpu_ns: int = 0
    free: int = 0
    turns: int = 0
    turns_ns: int = 0
    lates: dict[int, _Late] = field(default_factory=dict)

    def late(self, least_ns: float = 0.0) -> _Late:
        found = _Late()
        for each in self.lates.values():
            if each.mean_delay_ns >= least_ns:
                found = found.plus(each)
        return found

    def behind(self, calls: Collection[_SamplesOfStack], least_ns: float) -> _Late:
        """The late samples of this line that waited for one of these calls.

        Those that are at least ``least_ns`` late, and of the others as many as the calls have themselves: a sample may
        be due shortly before the end of a call.
        """
        late = self.late(least_ns)
        less = self.late().plus(late, -1)
        theirs = sum(call.late(least_ns).samples for call in calls)
        shorter = sum(call.late().samples for call in calls) - theirs
        return late.plus(less.times(min(1.0, late.samples * shorter / max(theirs * less.samples, 1))))

    @property
    def releases_the_gil(self) -> bool:
        return self.free >= _MIN_FREE and self.turns + self.late().samples <= _MAX_TURNS * self.free

    @property
    def takes_turns(self) -> bool:
        return self.turns > max(_MIN_FREE, self.free) and self._is_on_core

    @property
    def _is_on_core(self) -> bool:
        """Whether it is on a core long enough to hold the GIL while others wait."""
        return self._clocked(self.wall_ns, self.cpu_ns) >= _MIN_ON_CORE * self.wall_ns

    def _clocked(self, wall_ns: int, cpu_ns: int) -> int:
        """The CPU time within this wall time. ``cpu_ns``: CPU time that may include the lines before it."""
        return wall_ns * self.inside_cpu_ns // self.inside_ns if self.inside >= _MIN_INSIDE else cpu_ns

    def time(self, wall_ns: int, cpu_ns: int) -> StackTime:
        """Its times, from what is left to it after samples have been moved."""
        late = self.late().samples
        waited = (self.turns + late) / max(self.free + self.turns + late, 1)
        on_core = wall_ns if self.takes_turns else self._clocked(wall_ns, cpu_ns)
        return StackTime(wall_ns, on_core, int(waited * wall_ns) if self._is_on_core else 0)

    def holds_the_gil(self, late: _Late) -> bool:
        """Whether these late samples show a call that holds the GIL."""
        call_ns = 2 * late.mean_delay_ns - _LATE_NS  # late samples are due anywhere before its last 2 ms
        if late.samples < _MIN_LATE or call_ns <= _LATE_NS:
            return False
        expected = late.samples * _LATE_NS / max(call_ns - _LATE_NS, _LATE_NS)
        return self.free + self.turns <= _FEW * expected + 1


class AttributedSamples:
    """Samples with how each was taken, to find the line that each counts for. Used by the thread that samples.

    A sample is late if a C call holds the GIL when it is due. After the call the sampling thread is not alone in
    waiting: another thread may get the GIL first, and after it the sampled thread, which goes on to its next call. The
    sample then sees that call. In a DataLoader worker the thread that sends batches waits from the beginning of each
    fetch: a quarter of the late samples of a first call were seen behind it (`python -m tests.lines`).

    All samples of a line show whether it holds the GIL. If a call holds it for 20 ms, nearly all of its samples are
    late. If most samples of a line are in time, the line does not hold the GIL. Its late samples then count for the
    call, if they are about as late as the call's own. So do the few late samples of the next line that is seen after
    the call, in its function or in one that has called that.

    Python code holds the GIL as well, but gives it up after the switch interval. A sample that is due shortly before it
    calls something that releases the GIL, a read for example, is seen at that call. Samples of such a call need not
    wait at all. So those that waited count for the code that made them wait.

    The CPU clock shows what was used since the sample before, perhaps by another line. A line that waits for 30 ms
    would get half of the CPU time of the 8 ms before it. So if two samples in a row see the same line in the same
    fetch, these show how much of its time it is on a core. Python code that others wait for is on a core all the time.
    """

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
            stack: the stack that was seen.
            wall_ns: the time that it stands for.
            cpu_ns: the CPU time in that time.
            delay_ns: how late it was.
            waits: how often this thread has waited for the GIL before it.
            fetch: the number of the fetch in which it was taken.
        """
        inside, self._before = self._before == (stack, fetch), (stack, fetch)
        self._profile.add(stack, wall_ns, cpu_ns)
        if stack not in self._profile.times:
            return  # the profile is full
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
            length = delay_ns.bit_length()
            seen.lates[length] = seen.lates.get(length, _Late()).plus(_Late(1, wall_ns, cpu_ns, delay_ns))

    def profile(self) -> StackProfile:
        """The time of each stack, after all samples so far."""
        profile = StackProfile()
        profile.merge(self._profile)
        moved = dict.fromkeys(self._seen, StackTime())
        self._count_late(moved)
        self._count_turns(moved)
        for stack, seen in self._seen.items():
            wall, cpu, _ = profile.times[stack].plus(moved[stack])
            profile.times[stack] = seen.time(wall, cpu)
        return profile

    def _count_late(self, moved: dict[Stack, StackTime]) -> None:
        """Give late samples back to calls that hold the GIL."""
        holders = {stack: seen for stack, seen in self._seen.items() if seen.holds_the_gil(seen.late())}
        held = {stack: seen.late() for stack, seen in holders.items() if not self._is_behind(stack, seen, holders)}
        held_ns = sum(late.wall_ns for late in held.values())
        if not held_ns:
            return
        least_ns = _AS_LATE * min(late.mean_delay_ns for late in held.values())
        calls = [holders[stack] for stack in held]
        others = {stack: seen.behind(calls, least_ns) for stack, seen in self._seen.items() if stack not in held}
        for stack, late in others.items():
            moved[stack] = moved[stack].plus(StackTime(-late.wall_ns, -late.cpu_ns))
        wall_ns = sum(late.wall_ns for late in others.values())
        cpu_ns = sum(late.cpu_ns for late in others.values())
        for stack, late in held.items():
            more = StackTime(wall_ns * late.wall_ns // held_ns, cpu_ns * late.wall_ns // held_ns)
            moved[stack] = moved[stack].plus(more)

    def _is_behind(self, stack: Stack, seen: _SamplesOfStack, holders: dict[Stack, _SamplesOfStack]) -> bool:
        """Whether a line is seen only because it follows a call that holds the GIL."""
        for other, call in holders.items():
            depth = _function_of_both(stack, other)
            if depth is None or other[-1 - depth].line >= stack[-1 - depth].line:
                continue
            held = call.late()
            behind = seen.behind([call], _AS_LATE * held.mean_delay_ns)
            few = 0 < behind.wall_ns <= _PART * held.wall_ns
            if few and not seen.holds_the_gil(seen.late().plus(behind, -1)):
                between = range(other[-1 - depth].line + 1, stack[-1 - depth].line)
                same = (each for each in self._seen if _function_of_both(each, stack) == depth)
                if not any(each[-1 - depth].line in between for each in same):
                    return True
        return False

    def _count_turns(self, moved: dict[Stack, StackTime]) -> None:
        """Give samples that waited at lines that release the GIL back to the code that they waited for."""
        releasing = {stack: seen.turns_ns for stack, seen in self._seen.items() if seen.releases_the_gil}
        turning = {stack: seen.turns_ns for stack, seen in self._seen.items() if seen.takes_turns}
        waited, turns = sum(releasing.values()), sum(turning.values())
        if not waited or not turns:
            return
        more = {stack: min(waited * ns // turns, int(_MAX_TURNS_BACK * ns)) for stack, ns in turning.items()}
        back = sum(more.values())
        for stack, more_ns in more.items():
            moved[stack] = moved[stack].plus(StackTime(more_ns))
        for stack, ns in releasing.items():
            moved[stack] = moved[stack].plus(StackTime(-(back * ns // waited)))


def _function_of_both(stack: Stack, other: Stack) -> int | None:
    """How many callers the innermost function has that two stacks have in common; None if they are the same in it."""
    for depth, (here, there) in enumerate(zip(reversed(stack), reversed(other), strict=False)):
        if here != there:
            return depth if (here.file, here.function) == (there.file, there.function) else None
    return None
