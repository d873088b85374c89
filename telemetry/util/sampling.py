"""Samples of a thread's stack: when they are taken, how much time each stands for, and for which line it counts.

`SampleTimes` and `SampleBursts` decide when. `AttributedSamples` gives late samples back to the call that made them
late. `StackProfile` is the result, which a worker sends and the agent stores. `WorkerSampler` does it in a DataLoader
worker; `sources.lines` samples the threads of the training process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.util.clock import NS, clock_gettime_ns, now_ns, pthread_getcpuclockid, sleep, thread_time_ns
from telemetry.util.errors import let_pass
from telemetry.util.gil import SWITCH_SECONDS, restore_switch_interval, shorten_switch_interval, thread_waits
from telemetry.util.stacks import Spot, Stack, stack_of
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from telemetry.hooks.worker_block import WorkerBlock

LOADER_CODE: Final = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_FETCHER: Final = f"{LOADER_CODE}_utils{os.sep}fetch.py"


def is_fetcher(spot: Spot) -> bool:
    """Whether a DataLoader makes a batch in this frame."""
    return spot.function == "fetch" and spot.file.endswith(_FETCHER)


def fetch_part(stack: Stack) -> Stack:
    """The frames of the fetch, the fetcher's own last; empty if the thread is in no fetch."""
    for number in range(len(stack) - 1, -1, -1):
        if is_fetcher(stack[number]):
            return stack[: number + 1]
    return ()


# -- profiles ----------------------------------------------------------------------------------------------------------

MAX_STACKS: Final = 500
"""A profile has at most this many different stacks. The time of others is only summed up."""

_SEPARATORS: Final = {ord(character): "?" for character in "\t\r\n;"}
_OTHER_BYTES: Final = 128
"""These bytes are kept free for the line that sums up what was left out."""


class StackTime(NamedTuple):
    """Nanoseconds spent in a stack: of wall clock, on a core, and with the GIL held, as far as that is known."""

    wall_ns: int
    cpu_ns: int
    gil_ns: int = 0

    def plus(self, other: StackTime) -> StackTime:
        """The sum of both."""
        return StackTime(self.wall_ns + other.wall_ns, self.cpu_ns + other.cpu_ns, self.gil_ns + other.gil_ns)


class StackProfile:
    """The time spent in each stack.

    Attributes:
        times: time by stack, innermost frame first.
        samples: number of samples.
        other_ns, other_cpu_ns: time in stacks that are too many for ``times``.
    """

    __slots__ = ("other_cpu_ns", "other_ns", "samples", "times")

    def __init__(self) -> None:
        self.times: dict[Stack, StackTime] = {}
        self.samples = 0
        self.other_ns = 0
        self.other_cpu_ns = 0

    def add(self, stack: Stack, wall_ns: int, cpu_ns: int, samples: int = 1, *, gil_ns: int = 0) -> None:
        """Add time in a stack, seen by this many samples."""
        self.samples += samples
        self._count(stack, StackTime(wall_ns, cpu_ns, gil_ns))

    def merge(self, other: StackProfile) -> None:
        """Add everything in another profile."""
        self.samples += other.samples
        self.other_ns += other.other_ns
        self.other_cpu_ns += other.other_cpu_ns
        for stack, time in other.times.items():
            self._count(stack, time)

    def _count(self, stack: Stack, time: StackTime) -> None:
        before = self.times.get(stack)
        if before is not None:
            self.times[stack] = before.plus(time)
        elif len(self.times) < MAX_STACKS:
            self.times[stack] = time
        else:
            self.other_ns += time.wall_ns
            self.other_cpu_ns += time.cpu_ns

    @property
    def wall_ns(self) -> int:
        """The time in all stacks."""
        return self.other_ns + sum(time.wall_ns for time in self.times.values())

    def longest_first(self) -> list[tuple[Stack, StackTime]]:
        """The stacks and their times, the longest first."""
        return sorted(self.times.items(), key=lambda item: -item[1].wall_ns)

    def packed(self, most: int) -> bytes:
        """The profile in at most ``most`` bytes. If they are too few, short times are only summed up."""
        stacks = self.longest_first()
        kept = len(stacks)
        while True:
            files: dict[str, int] = {}
            spots: dict[Spot, int] = {}
            numbers = [[spots.setdefault(spot, len(spots)) for spot in stack] for stack, _ in stacks[:kept]]
            places = [(files.setdefault(spot.file, len(files)), *spot[1:]) for spot in spots]
            other = self.other_ns + sum(time.wall_ns for _, time in stacks[kept:])
            other_cpu = self.other_cpu_ns + sum(time.cpu_ns for _, time in stacks[kept:])
            times = [time for _, time in stacks[:kept]]
            profile = (self.samples, other, other_cpu, [*files], places, numbers, times)
            content = json.dumps(profile, separators=(",", ":")).encode()
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
            profile.samples, profile.other_ns, profile.other_cpu_ns, files, places, numbers, times = json.loads(content)
            spots = [Spot(files[file], *place) for file, *place in places]
            for stack, time in zip(numbers, times, strict=True):
                profile._count(tuple(spots[number] for number in stack), StackTime(*time))
        except (IndexError, TypeError) as error:
            raise ValueError("not a profile") from error
        return profile

    def folded(self, root: str, most: int) -> bytes:
        """The stacks as folded text of at most ``most`` bytes, below a frame named ``root``. The longest come first."""
        lines: list[bytes] = []
        size, other = 0, self.other_ns
        for stack, (wall, *_) in self.longest_first():
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


# -- when --------------------------------------------------------------------------------------------------------------

_MAX_OWN_SHARE: Final = 0.008
"""The gaps grow until the sampling thread takes at most this share of a core."""

BURST_SECONDS: Final = 0.1
"""Length of a burst, which ends with the next sample."""

_SECONDS_PER_FETCH: Final = 0.0004
_MAX_SHARE: Final = 0.009
_MAX_SHARE_OF_FETCHES: Final = 0.005
"""For a sampled worker: extra CPU seconds per fetch for the short switch interval; its largest share of a core in all;
and the largest share for the fetches. The samples take the rest. The target is 1 %."""

_MIN_PART: Final = 0.1
_MAX_REST_SECONDS: Final = 2.0

_MAX_DELAY_NS: Final = 20 * NS
"""After a longer delay, the process was stopped: no C call takes so long."""


class SampleTimes:
    """The times of one thread's samples, and how much time each stands for. Used on that thread.

    The gaps between samples are random, exponentially distributed. So every moment is sampled equally often, also in
    code that repeats in a fixed rhythm, and it does not matter where the sampling pauses. A sample stands for the mean
    gap, plus its delay: the sampling thread waited for the GIL then, which one C call may have held all that time.

    While a thread runs Python, another one gets the GIL after the switch interval, 5 ms by default, or earlier, when
    the thread makes a call that releases the GIL. So Python code of less than 5 ms would hardly be seen: its time would
    count for the call after it. Therefore the interval is shortened while a process is sampled.

    Args:
        gap_seconds: mean gap between samples.

    Attributes:
        max_share: the largest share of a core that samples take.
        part: samples are taken in this part of the time, in bursts. The weights make up for the rest.
    """

    def __init__(self, gap_seconds: float, max_share: float = _MAX_OWN_SHARE) -> None:
        self._least = self._mean = gap_seconds
        self.max_share = max_share
        self.part = 1.0
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._samples = 0
        self._cpu_ns = 0
        self._began_ns = thread_time_ns()

    def gap(self) -> float:
        """Seconds to wait for the next sample."""
        return self._random.expovariate(1 / self._mean)

    def weight_ns(self, due_ns: int, taken_ns: int) -> int:
        """The time that a sample stands for. It was due at one stamp and taken at the other."""
        return int((self._mean * NS + self.delay_ns(due_ns, taken_ns)) / self.part)

    @staticmethod
    def delay_ns(due_ns: int, taken_ns: int) -> int:
        """The time by which a thread was late."""
        return min(max(0, taken_ns - due_ns), _MAX_DELAY_NS)

    def taken(self, samples: int = 1) -> None:
        """Count a sample that was taken now. If samples cost too much CPU time, the mean gap grows.

        If it was not due after a gap, ``samples`` is 0, and only its cost counts.
        """
        self._samples += samples
        self._cpu_ns = thread_time_ns() - self._began_ns
        self._mean = max(self._least, self.part * self._cpu_ns / max(1, self._samples) / NS / self.max_share)

    def starts(self) -> None:
        """Count the cost of samples from now on, without this thread's earlier work."""
        self._began_ns = thread_time_ns() - self._cpu_ns


class SampleBursts:
    """Decides when a worker rests between samples, with its own switch interval. Used on the sampling thread.

    The short interval has a cost: threads that send batches wake and switch more often, which takes up to 0.4 ms of CPU
    per batch (`benchmarks.line_cost`). So a worker that fetches many batches per second is sampled in bursts.

    Args:
        times: gets the part of the time in which samples are taken, and the largest share of a core for it. The part is
            the whole time while the rate of fetches is unknown or low.
        now: the stamp at which the first burst begins.
        fetches: how many fetches have begun so far.
    """

    def __init__(self, times: SampleTimes, now: int, fetches: int) -> None:
        self._times = times
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._first = now, fetches
        self._began_ns = now

    def rest(self, now: int) -> float | None:
        """Seconds to rest at this stamp; None if the burst goes on. They are random, for an equal chance."""
        passed = (now - self._began_ns) / NS
        if passed < BURST_SECONDS:
            return None
        return min(_MAX_REST_SECONDS, passed * (1 / self._times.part - 1) * (0.5 + self._random.random()))

    def begin(self, now: int, fetches: int) -> None:
        """Begin a burst. ``fetches``: how many have begun so far.

        Their rate decides how much of the time is sampled. It is the rate since the first burst: if each burst had its
        own rate, fetches that are short for a moment would decide how much their neighbours count.
        """
        first_ns, before = self._first
        share = _SECONDS_PER_FETCH * (fetches - before) / max(1, now - first_ns) * NS
        part = max(_MIN_PART, _MAX_SHARE_OF_FETCHES / max(share, _MAX_SHARE_OF_FETCHES))
        self._times.part = part
        self._times.max_share = min(_MAX_OWN_SHARE, _MAX_SHARE - min(part * share, _MAX_SHARE_OF_FETCHES))
        self._began_ns = now


# -- which line --------------------------------------------------------------------------------------------------------

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
    call, if they are about as late as the call's own. So do the few late samples of the line that follows the call
    in the same function.

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
        moved = {stack: StackTime(0, 0) for stack in self._seen}
        self._count_late(moved)
        self._count_turns(moved)
        for stack, seen in self._seen.items():
            wall, cpu, _ = profile.times[stack].plus(moved[stack])
            profile.times[stack] = seen.time(wall, cpu)
        return profile

    def _count_late(self, moved: dict[Stack, StackTime]) -> None:
        """Give late samples back to calls that hold the GIL."""
        holders = {stack: seen for stack, seen in self._seen.items() if seen.holds_the_gil(seen.late())}
        held = {stack: seen.late() for stack, seen in holders.items() if not _is_behind(stack, seen, holders)}
        held_ns = sum(late.wall_ns for late in held.values())
        if not held_ns:
            return
        least_ns = _AS_LATE * min(late.mean_delay_ns for late in held.values())
        wall_ns = cpu_ns = 0
        for stack, seen in self._seen.items():
            if stack not in held:
                late = seen.late(least_ns)
                moved[stack] = moved[stack].plus(StackTime(-late.wall_ns, -late.cpu_ns))
                wall_ns, cpu_ns = wall_ns + late.wall_ns, cpu_ns + late.cpu_ns
        for stack, late in held.items():
            more = StackTime(wall_ns * late.wall_ns // held_ns, cpu_ns * late.wall_ns // held_ns)
            moved[stack] = moved[stack].plus(more)

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
            moved[stack] = moved[stack].plus(StackTime(more_ns, 0))
        for stack, ns in releasing.items():
            moved[stack] = moved[stack].plus(StackTime(-(back * ns // waited), 0))


def _is_behind(stack: Stack, seen: _SamplesOfStack, holders: dict[Stack, _SamplesOfStack]) -> bool:
    """Whether a line is seen only because it follows a call of the same function that holds the GIL."""
    here = stack[0]
    for other, call in holders.items():
        same_function = other[1:] == stack[1:] and (other[0].file, other[0].function) == (here.file, here.function)
        if same_function and other[0].line < here.line:
            held = call.late()
            behind = seen.late(_AS_LATE * held.mean_delay_ns)
            few = 0 < behind.wall_ns <= _PART * held.wall_ns
            if few and not seen.holds_the_gil(seen.late().plus(behind, -1)):
                return True
    return False


# -- in a worker -------------------------------------------------------------------------------------------------------

_GAP_SECONDS: Final = 0.008

_USER: Final = "lines"

_FIRST_WRITE_NS: Final = NS // 10
_WRITE_NS: Final = NS
"""The profile is written after 0.1 s, and then at intervals that double up to 1 s: a worker may live for only one
short epoch."""


class WorkerSampler:
    """Samples the fetches of a DataLoader worker while the agent asks for it. Made on the thread that fetches.

    The worker's probe looks at the request once per fetch, and calls `ask` while there is one. A thread of the worker
    then reads the stack of the fetching thread at random moments, and writes the profile into the shared block. It ends
    with the request. A thread does not survive a fork, and this one holds no lock at which a child could hang.

    Args:
        block: has the requests, and gets the profile.
        worker: the number of the worker.
    """

    def __init__(self, block: WorkerBlock, worker: int) -> None:
        self._counters = block.counters(worker)
        self._area = block.profile_area(worker)
        self._pid = os.getpid()
        self._fetcher = threading.get_ident()
        self._running = False
        self._fetches = 0
        self._session = 0
        self._began_ns = 0
        self._samples = AttributedSamples()
        module = sys.modules.get("torch.utils.data._utils.worker")
        self._loop = vars(module) if module is not None else None

    def ask(self) -> None:
        """Start the thread unless it runs. Called at the start of a fetch."""
        self._fetches += 1
        if self._running or os.getpid() != self._pid:
            return
        self._running = True
        try:
            OwnThread(self._run, name="telemetry-lines").start()
        except Exception as error:
            let_pass(error)  # no thread can be started: this worker does not try again

    def _run(self) -> None:
        shorten_switch_interval(_USER)
        try:
            self._sample()
        except Exception:
            pass  # nothing can report it from here. The agent sees a worker without a profile
        finally:
            restore_switch_interval(_USER)
            self._running = False

    def _sample(self) -> None:
        times = SampleTimes(_GAP_SECONDS)
        cpu_clock = pthread_getcpuclockid(self._fetcher)
        before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
        written_ns, write_after = before_ns, _FIRST_WRITE_NS
        bursts = SampleBursts(times, before_ns, self._fetches)
        while True:
            gap = times.gap()
            waits = thread_waits()
            due = now_ns() + int(gap * NS)
            _sleep(gap)
            now = now_ns()
            waits = thread_waits() - waits - 1  # for the GIL; one was the sleep
            session, until = self._counters.sample_session, self._counters.sample_until_ns
            if session != self._session:
                self._session, self._began_ns, self._samples = session, now, AttributedSamples()
            if now >= until:
                break
            stack = fetch_part(stack_of(self._fetcher, self._loop)) if self._counters.fetching_since_ns else ()
            cpu = clock_gettime_ns(cpu_clock)
            if stack:
                wall = times.weight_ns(due, now)
                on_core = min(1.0, (cpu - cpu_before) / max(1, now - before_ns))
                delay = times.delay_ns(due, now)
                self._samples.add(stack, wall, int(wall * on_core), delay_ns=delay, waits=waits, fetch=self._fetches)
            before_ns, cpu_before = now, cpu
            if now - written_ns >= write_after:
                written_ns, write_after = now, min(2 * write_after, _WRITE_NS)
                self._write()
            times.taken()
            pause = bursts.rest(now_ns())
            if pause is not None:
                if pause:  # with the switch interval that this process has without samples
                    restore_switch_interval(_USER)
                    _sleep(pause)
                    shorten_switch_interval(_USER)
                    before_ns, cpu_before = now_ns(), clock_gettime_ns(cpu_clock)
                bursts.begin(now_ns(), self._fetches)
        self._write()

    def _write(self) -> None:
        if self._samples.samples:
            content = self._samples.profile().packed(self._area.HALF_BYTES)
            self._area.write(self._session, self._pid, self._began_ns, content)


def _sleep(seconds: float) -> None:
    rest()
    sleep(seconds)
    work()
