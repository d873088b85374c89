"""Takes samples: looks at a thread's stack at random moments, to find the line of code in which its time goes.

All run on the agent thread: `LineSampler` while a stall is open, `StepSampler` in any run, `ThreadSampler` in a job of
several ranks. There a sample of the training thread only costs 20 to 50 us in which it holds the GIL. Workers sample
themselves (`hooks.worker_lines`).
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from threading import get_native_id
from typing import TYPE_CHECKING, Final

from telemetry.sources.proc import is_running, read_schedule
from telemetry.sources.stacks import collective_in, in_backward
from telemetry.util.clock import NS, clock_gettime_ns, now_ns, thread_clock
from telemetry.util.gil import restore_switch_interval, shorten_switch_interval
from telemetry.util.profiles import CHECKPOINT, FETCH, STEP, WAIT, StackProfile
from telemetry.util.sample_times import FIRST_MAX_SHARE, FIRST_SAMPLES, SampleTimes
from telemetry.util.stacks import Stack, fetch_part, line_of, python_threads, stack_of, users_spot
from telemetry.util.threads import named

if TYPE_CHECKING:
    from telemetry.hooks.tracker import StepTracker

_LINES: Final = "lines"
_STEPS: Final = "steps"
"""Who needs the short switch interval: the samples of a stall, or those of the steps."""

# -- the threads that delay a stalled run ------------------------------------------------------------------------------

_GAP_SECONDS: Final = 0.02

_LATE_NS: Final = NS // 1000
"""After a shorter delay, no C call has held the GIL."""

_MAX_SHARE: Final = 0.003
"""The samples, with what it takes to wake the agent thread for them, take at most this share of a core."""


class LineSampler:
    """Profiles of the threads of this process, by what the training thread was doing.

    Attributes:
        profiles: the profiles by kind of work.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._kinds: frozenset[str] = frozenset()
        self._times: SampleTimes | None = None
        self.profiles: dict[str, StackProfile] = {}

    def want(self, kinds: frozenset[str]) -> None:
        """Sample these kinds of work from now on. Without any, take no sample."""
        self._kinds = kinds
        if kinds and self._times is None:
            shorten_switch_interval(_LINES)
            self._times = SampleTimes(_GAP_SECONDS, FIRST_MAX_SHARE)
        elif not kinds and self._times is not None:
            restore_switch_interval(_LINES)
            self._times = None

    @property
    def sampling(self) -> bool:
        """Whether samples are taken now."""
        return self._times is not None

    def gap(self) -> float:
        """Seconds to wait for the next sample, which begins to cost now. If the wait is cut short, no sample is due."""
        if self._times is None:
            return float("inf")
        self._times.starts()
        return self._times.gap()

    def sample(self, due_ns: int) -> None:
        """Take the sample that was due at a stamp."""
        times = self._times
        if times is not None:
            self._sample(times, times.weight_ns(due_ns, now_ns()), 1)

    def late(self, due_ns: int) -> None:
        """Count the time since a stamp at which other work of the agent thread was due, if a C call held it up.

        No sample can become due in that time. So without it, code that holds the GIL would get too small a share. What
        the wait has cost does not count, because the thread wakes for that work anyway: if it did, a slow rank, which
        others wait for, would take 2 samples a second.
        """
        times = self._times
        if times is not None and (delay := times.delay_ns(due_ns, now_ns())) > _LATE_NS:
            self._sample(times, delay, 0)

    def _sample(self, times: SampleTimes, wall: int, samples: int) -> None:
        tracker = self._tracker
        doing = WAIT if tracker.waiting_since > 0 else CHECKPOINT if tracker.checkpointing else STEP
        if doing in self._kinds and (doing != STEP or tracker.stepping):
            self._add(doing, stack_of(tracker.thread), wall, samples)
        if FETCH in self._kinds:
            for thread in python_threads():
                if thread.ident != tracker.thread:
                    self._add(FETCH, fetch_part(thread.stack), wall, samples)
        if sum(profile.samples for profile in self.profiles.values()) >= FIRST_SAMPLES:
            times.max_share = _MAX_SHARE
        if samples:
            times.taken()

    def _add(self, kind: str, stack: Stack, wall_ns: int, samples: int) -> None:
        if stack:
            self.profiles.setdefault(kind, StackProfile()).add(stack, wall_ns, wall_ns, samples)


# -- the steps of any run ----------------------------------------------------------------------------------------------
# A run without a stall is sampled, too, but seldom: the samples say what its steps spend their time in. They come in
# short bursts, because the short switch interval costs something, and without it Python code would not be seen.

_BURST_SAMPLES: Final = 4
_BURST_GAP_SECONDS: Final = 0.012

_EVERY_SECONDS: Final = ((60.0, 1.7), (300.0, 5.0), (float("inf"), 20.0))
"""Mean time from one burst to the next, up to so many seconds of training. Later it is 12 samples a minute. If the time
grew at once, one burst would count as much as all before it."""

_PART_SECONDS: Final = 10.0
_FIRST_SECONDS: Final = 120.0

_NOT_YET_NS: Final = NS // 2

_LATE_BURST_NS: Final = 6 * NS // 1000
"""A burst that begins so late has waited for a long call that holds the GIL: more than the usual switch interval."""

_COLLECTED_NS: Final = NS // 1000
"""A sample that was due so long before the end of a collection has waited for that end."""

_BUSY_THREAD: Final = 0.1
"""A thread that is on a core for a smaller share of the time cannot hold the GIL for long."""

_LOOK_NS: Final = 20_000
"""So long this thread keeps the GIL, to see whether another thread runs without it."""

_RESTS: Final = 0.6
"""A thread rests in a line if it is seen there while the GIL is free this often, relative to its other samples."""

_MAX_LOOKED_AT: Final = 64
_MAX_BUSY: Final = 4


@dataclass(slots=True)
class BusyThread:
    """Another Python thread of the training process that is often on a core.

    Attributes:
        cpu_ns: its time on a core, in ``wall_ns`` of the wall clock.
        free: samples that found the GIL free. ``without_gil``: those of them in which it ran, so it needed no GIL.
        profile: its stacks in the other samples. ``resting``: those in which it did not run while the GIL was free.
    """

    name: str
    cpu_ns: int = 0
    wall_ns: int = 0
    free: int = 0
    without_gil: int = 0
    profile: StackProfile = field(default_factory=StackProfile)
    resting: StackProfile = field(default_factory=StackProfile)

    @property
    def work(self) -> StackProfile:
        """Its stacks without those in which it sleeps or waits, where it is also seen when it wants the GIL again.

        Code that holds the GIL is never seen while the GIL is free.
        """
        work = StackProfile()
        for stack, time in self.profile.times.items():
            rested = self.resting.times.get(stack)
            if rested is None or rested.wall_ns < _RESTS * time.wall_ns:
                samples = self.profile.samples * time.wall_ns // max(1, self.profile.wall_ns)
                work.add(stack, time.wall_ns, time.cpu_ns, samples)
        return work

    @property
    def gil_share(self) -> float:
        """The share of the time in which it holds the GIL: while it is on a core, unless it runs code without it."""
        if not self.wall_ns or not self.profile.samples:
            return 0.0
        return max(0.0, self.cpu_ns / self.wall_ns - self.without_gil / max(1, self.free))


def _caller_of_collection(stack: Stack) -> Stack | None:
    """The stack below a function of `gc.callbacks`; None outside of one.

    Python calls such a function at the end of a collection, before the collecting thread goes on. So each sample that
    had to wait for the collection finds the thread in it. Those of the agent are C code, and are in no stack.
    """
    codes = [getattr(function, "__code__", None) for function in gc.callbacks]
    names = {(code.co_filename, code.co_name) for code in codes if code is not None}
    places = (depth for depth, spot in enumerate(stack) if (spot.file, spot.function) in names)
    depth = next(places, None) if names else None
    return None if depth is None else stack[depth + 1 :]


class StepSampler:
    """Samples what the steps of a run spend their time in, with or without a stall.

    Attributes:
        steps: the stacks of the training thread in its steps. Of the times of a stack, the time on a core includes
            run-queue delay. The time with the GIL is that of samples that had to wait for it, but for no collection.
        bursts: how many bursts there have been.
        wait_ns: time in waits for batches, by the same samples.
        evaluation: the stacks of the training thread in waits of evaluations for their loaders. ``evaluating``: those
            in the rest of evaluations.
        parts: the stacks in ``steps`` before `follow` was called, in parts: one for each ten seconds of the first two
            minutes of training, and the last one for all that came later, too.
        newest: like ``steps``, since `follow` was called; None before.
        free: samples of steps that found the GIL free. ``idle``: those of them in which the training thread had nothing
            to run: it slept, or waited for a device or for storage, but not for the GIL.
        collecting: stacks in which a sample waited for the end of a garbage collection.
        threads: other Python threads that are often on a core, by their native id.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._random = random.Random()  # noqa: S311 - our own, so that the training's numbers stay the same
        self._times = SampleTimes(_BURST_GAP_SECONDS)
        self._next_ns = now_ns() + _NOT_YET_NS
        self._left = 0  # samples of the burst in progress
        self._before: tuple[int, int] | None = None  # stamp, and time that the training thread was not blocked
        self._queued_ns = -1  # time that the agent thread has waited for a core; below 0 before it is known
        self._first_ns = 0
        self._ran: dict[int, int] = {}  # time on a core by native id
        self._looked_ns = 0
        self._watched: dict[int, int] = {}  # the ident of each busy thread by native id
        self.bursts = 0
        self.steps = StackProfile()
        self.evaluation = StackProfile()
        self.evaluating = StackProfile()
        self.parts: list[StackProfile] = []
        self.newest: StackProfile | None = None
        self.wait_ns = 0
        self.free = self.idle = 0
        self.collecting = StackProfile()
        self.threads: dict[int, BusyThread] = {}

    def gap(self) -> float:
        """Seconds to wait for the next sample, or for the next burst."""
        return self._times.gap() if self._left else max(0.0, (self._next_ns - now_ns()) / NS)

    def sample(self, due_ns: int, waits: int) -> None:
        """Take the sample that was due at a stamp, or begin a burst.

        Args:
            due_ns: the stamp.
            waits: how often this thread has waited for the GIL since then.
        """
        now = now_ns()
        if not self._left and now < self._next_ns:
            return
        delay = self._times.delay_ns(due_ns, now)
        # First: whatever reads a file gives the GIL up, and then the thread goes on.
        stack, collected_ns = stack_of(self._tracker.thread), self._tracker.garbage.ended_ns - due_ns
        if self._left:
            # With its whole delay, one sample of a short burst could count as much as all others.
            wall = self._times.weight_ns(due_ns, due_ns + min(delay, _LATE_BURST_NS))
            self._take(stack, waits, wall, collected_ns, _COLLECTED_NS)
            self._left -= 1
        elif self._begin(now):
            if delay < _LATE_BURST_NS:
                self._queued()  # counts from here on
            else:
                # The burst was due during the call, and all its samples will come after it. So they count for the call.
                self._before = None  # the call had a core
                wall = _BURST_SAMPLES * self._times.weight_ns(now, now)
                self._take(stack, waits, wall, collected_ns, _LATE_BURST_NS)
                self._left = 0
        if not self._left:
            self.end()

    def follow(self) -> None:
        """Begin `newest`, and sample as often as in the first minutes of training."""
        self.newest, self._first_ns, self._next_ns = StackProfile(), 0, now_ns()

    def end(self) -> None:
        """End a burst in progress."""
        self._left = 0
        restore_switch_interval(_STEPS)

    def _begin(self, now: int) -> bool:
        """Begin a burst. Returns whether there is something to sample."""
        if not self._trains() and not self._tracker.evaluating:
            self._next_ns = now + _NOT_YET_NS
            return False
        self._first_ns = self._first_ns or now
        passed = (now - self._first_ns) / NS
        if self.newest is None and len(self.parts) * _PART_SECONDS <= passed < _FIRST_SECONDS:
            self.parts.append(StackProfile())
        seconds = next(every for until, every in _EVERY_SECONDS if passed < until)
        self._next_ns = now + int(seconds * (0.5 + self._random.random()) * NS)
        self._times.part = _BURST_SAMPLES * _BURST_GAP_SECONDS / seconds
        self._left = _BURST_SAMPLES
        self.bursts += 1
        self._look_for_busy_threads(now)
        self._not_blocked(now)
        shorten_switch_interval(_STEPS)
        return True

    def _trains(self) -> bool:
        tracker = self._tracker
        return tracker.stepping or (tracker.waiting_since > 0 and tracker.batch_seen)

    def _take(self, stack: Stack, waits: int, wall: int, collected_ns: int, sure_ns: int) -> None:
        """Take a sample.

        Args:
            stack: the stack of the training thread.
            waits: how often this thread has waited for the GIL.
            wall: the time that the sample stands for, ns.
            collected_ns: time from when it was due to the end of the newest collection; below 0 if that had ended.
            sure_ns: after so long a wait, the training thread gave the GIL up right at the end of the collection.
                After a shorter one, it has gone on to another line.
        """
        tracker = self._tracker
        if tracker.evaluating and stack:
            (self.evaluation if tracker.waiting_since < 0 else self.evaluating).add(stack, wall, wall)
        if not self._trains():
            return
        waiting = tracker.waiting_since > 0
        self._take_busy_threads(waits, wall)  # before a file is read
        not_blocked = self._not_blocked(now_ns())
        # Without a core, this thread may have missed the end of the collection.
        collected = waits > 1 and collected_ns >= sure_ns + self._queued()
        caller = _caller_of_collection(stack)
        if caller is not None:
            stack, collected = caller, True
        if waits > 0 and collected_ns > 0 and not collected:
            return
        stack = () if waiting and not collected else stack
        if collected and stack:
            self.collecting.add(stack, wall, wall)
        if waiting:
            self.wait_ns += wall
        elif stack:
            gil = wall if waits > 0 and not collected else 0
            profiles = [self.steps, self.newest] if self.newest is not None else [self.steps, *self.parts[-1:]]
            for profile in profiles:
                profile.add(stack, wall, int(wall * not_blocked), gil_ns=gil)
            if waits <= 0:
                self.free += 1
                self.idle += not is_running(tracker.native_thread)

    def _take_busy_threads(self, waits: int, wall: int) -> None:
        for native, ident in self._watched.items():
            thread = self.threads[native]
            stack = stack_of(ident)
            if stack and waits > 0:
                thread.profile.add(stack, wall, wall)
            if waits <= 0:
                runs = _runs_without_gil(native)
                thread.free += 1
                thread.without_gil += runs
                if stack and not runs:
                    thread.resting.add(stack, wall, wall)

    def _not_blocked(self, now: int) -> float:
        """The share of the time since the sample before in which the training thread was on a core or wanted one."""
        schedule, before = read_schedule("self", self._tracker.native_thread), self._before
        wanted = 0 if schedule is None else schedule.run_ns + schedule.runnable_ns
        self._before = now, wanted
        if schedule is None or before is None:
            return 1.0
        return min(1.0, (wanted - before[1]) / max(1, now - before[0]))

    def _queued(self) -> int:
        """The time that this thread has waited for a core since the last call, ns. What is not known counts 0."""
        schedule, before = read_schedule("self", get_native_id()), self._queued_ns
        self._queued_ns = -1 if schedule is None else schedule.runnable_ns
        return max(0, self._queued_ns - before) if before >= 0 else 0

    def _look_for_busy_threads(self, now: int) -> None:
        before, passed = self._ran, now - self._looked_ns
        self._ran, self._looked_ns = {}, now
        busy: list[tuple[int, int, int, str]] = []  # time on a core, native id, ident, name
        # `threading.enumerate` takes a lock, which a hanging thread may hold. So this reads the dictionary directly.
        for ident, thread in list(getattr(threading, "_active", {}).items())[:_MAX_LOOKED_AT]:
            native = thread.native_id
            if native is None or ident == self._tracker.thread or named(ident) is not None:
                continue
            schedule = read_schedule("self", native)
            if schedule is None:
                continue
            self._ran[native] = schedule.run_ns
            ran = schedule.run_ns - before.get(native, schedule.run_ns)
            if native in self.threads and native in before:
                self.threads[native].cpu_ns += ran
                self.threads[native].wall_ns += passed
            if ran >= _BUSY_THREAD * passed:
                busy.append((ran, native, ident, str(thread.name)))
        busy = sorted(busy, reverse=True)[:_MAX_BUSY]
        self._watched = {native: ident for _, native, ident, _ in busy}
        for ran, native, _, name in busy:
            self.threads.setdefault(native, BusyThread(name, ran, passed))


def _runs_without_gil(native: int) -> bool:
    """Whether a thread is on a core while this one keeps the GIL.

    Its state does not tell: a read of /proc gives the GIL up, which wakes a thread that waits for it.
    """
    clock = thread_clock(native)
    try:
        began, ran = now_ns(), clock_gettime_ns(clock)
        while now_ns() - began < _LOOK_NS:
            pass
        return clock_gettime_ns(clock) - ran > (now_ns() - began) / 2
    except OSError:
        return False


# -- the training thread in a job of several ranks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThreadSamples:
    """The samples since the last call.

    Attributes:
        samples: samples in which the thread computed. ``in_sync``: those in which ranks wait for one another.
        where: the line of the user's own code in most of the other samples, if there are any.
    """

    samples: int
    in_sync: int
    where: str | None


class ThreadSampler:
    """Samples the training thread while it is in a step and does not wait for a batch."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._samples = 0
        self._in_sync = 0
        self._places: Counter[str] = Counter()

    def sample(self) -> None:
        """Take one sample of the thread if it computes."""
        tracker = self._tracker
        if not tracker.stepping or tracker.waiting_since:
            return
        stack = stack_of(tracker.thread)
        if not stack:
            return
        self._samples += 1
        # In a collective, in DDP, or in a backward pass that reduces, ranks wait for one another.
        if collective_in(stack) is not None and not (in_backward(stack) and _is_on_a_core(tracker)):
            self._in_sync += 1
            return
        own = users_spot(stack)
        if own is not None:
            self._places[line_of(own)] += 1

    def take(self) -> ThreadSamples:
        """The samples since the last call."""
        seen = self._places.most_common(1)
        taken = ThreadSamples(self._samples, self._in_sync, seen[0][0] if seen else None)
        self._samples = self._in_sync = 0
        self._places.clear()
        return taken


def _is_on_a_core(tracker: StepTracker) -> bool:
    """Whether a backward pass computes on a core and waits for no rank. A wait for a GPU may use a core, too."""
    return tracker.device is None and tracker.accelerator is None and is_running(tracker.native_thread)
