"""Samples the training thread: what its steps, waits, evaluations and checkpoints spend their time in.

Any run is sampled, but seldom: more often while it is young, while waits matter, while ranks wait for one another, and
while a stall is open. One sample takes about 0.2 ms of the agent thread, and for 20 to 50 us of it holds the GIL.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from telemetry.model.records import COMPUTE_PARTS
from telemetry.model.totals import StackTotals
from telemetry.safety.gil import switch_interval
from telemetry.safety.processes import read_schedule
from telemetry.safety.threads import listed_threads, named
from telemetry.seams.collectives import collective_in, in_backward
from telemetry.seams.ring import S_COMPUTE, S_STARTUP
from telemetry.sources.parts import PartReader
from telemetry.sources.proc import thread_state
from telemetry.sources.unseen_loop import UnseenLoop
from telemetry.util.clock import NS, now_ns
from telemetry.util.profiles import (
    BETWEEN,
    CHECKPOINT,
    EVALUATING,
    EVALUATION_WAIT,
    FETCH,
    STEP,
    WAIT,
    StackProfile,
    StackTime,
)
from telemetry.util.sampling import SampleClock, runs_beside
from telemetry.util.stacks import (
    Spot,
    fetch_part,
    in_sampler,
    in_seams,
    is_library,
    line_of,
    python_threads,
    stack_of,
    users_spot,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.seams.tracker import StepTracker
    from telemetry.util.sampling import Sample
    from telemetry.util.stacks import Stack

# -- how often ---------------------------------------------------------------------------------------------------------

_CALM: Final = ((60.0, 0.3), (300.0, 1.25), (float("inf"), 5.0))
"""Mean seconds between samples, up to so many seconds of training."""

_WAITS: Final = 0.3
"""Mean seconds while waits for batches matter: a window of 30 s then has 100 samples of what is in them."""

_UNSEEN_SECONDS: Final = 60.0
_UNSEEN: Final = 0.05
_EVALUATING: Final = 0.1
"""Mean seconds in the first minute of a loop without loaders, and in its startup and in later evaluations: only samples
show when these begin and end. In that minute they may take `_FIRST_SHARE`."""

_GAPS: Final = 0.15
"""Mean seconds while the time between two loops matters: a tenth of half a minute then has 20 samples."""

_RANKS: Final = 0.1
_SLOW_RANK: Final = 0.02
"""Mean seconds in a job of several ranks: usually, and while one rank holds the others up. A rank of the zoo's
`straggler-compute` pauses for 60 ms in steps of 71 ms. Predictions were up to 42 % off with ten samples a second, and
up to 15 % with fifty."""

_STALL: Final = 0.02
_STALL_SECONDS: Final = 20.0
_FIRST_SHARE: Final = 0.006
_MAX_SHARE: Final = 0.002
"""Mean seconds while the lines of a stall are wanted. Samples take at most so much of a core: in the first seconds of a
stall, whose samples name its line and decide how exact the shares are, and at any other time."""


@dataclass(slots=True)
class Wanted:
    """What the rest of the agent wants to know from the samples now.

    Attributes:
        kinds: the kinds of work of which lines are wanted; empty without a stall.
        gaps: whether the time between loops matters.
        waits: whether waits for batches matter. ``ranks``: whether the job has several ranks. ``slow_rank``: whether
            one of them holds the others up.
    """

    kinds: frozenset[str] = frozenset()
    waits: bool = False
    gaps: bool = False
    ranks: bool = False
    slow_rank: bool = False


_SLEEPS: Final = (
    ("do_wait", Spot("<os>", 0, "waitpid", "os")),
    ("kernel_clone", Spot("<os>", 0, "posix_spawn", "os")),
    ("pipe_read", Spot("<os>", 0, "read", "os")),
    ("recvmsg", Spot("<os>", 0, "recv", "socket")),
    ("stream_read", Spot("<os>", 0, "recv", "socket")),
    ("connect", Spot("<os>", 0, "connect", "socket")),
    ("folio_wait", Spot("<os>", 0, "storage", "")),
    ("log_wait", Spot("<os>", 0, "storage", "")),
)
"""What a line that has called C code waits for, by the kernel function in which its thread sleeps. No operator of torch
sleeps there."""

# -- the samples -------------------------------------------------------------------------------------------------------

_LOOP: Final = frozenset({S_STARTUP, S_COMPUTE})
"""What the hooks take a loop without loaders for: startup, until an optimizer of torch has stepped."""

_RIGHT_AFTER_NS: Final = NS // 1000
_PART_SECONDS: Final = 10.0
_FIRST_SECONDS: Final = 120.0


class Sampler:
    """Samples the training thread, on the agent thread.

    Attributes:
        wanted: what the samples are needed for. Others set it once a tick.
        seen: sums over the samples of the run. ``part_ns``: time by part of the compute, see `PartReader`.
        run: the stacks of the training thread over the run, by kind of work. `STEP` is the compute of steps, `WAIT` the
            waits for batches.
        stall: the same since `begin_stall`, and the fetches of other threads; None without a stall.
        parts: the stacks of steps in parts, before `follow` is called: one for each ten seconds of the first two
            minutes of training, and the last one for all that came later, too. ``newest``: since `follow`.
        free: samples of steps that found the GIL free. ``idle``: those of them in which the thread was blocked.
        collecting: stacks of samples that were due during a garbage collection.
        threads: other Python threads that are often on a core.
        loop: what samples tell of a loop without loaders.
        reducing: how long backward passes on the host had nothing to run, as while DDP reduces gradients (ns), by the
            number of the batch since the optimizer's newest step, from 1.
    """

    def __init__(self, tracker: StepTracker, sleep: Callable[[float], object]) -> None:
        self._tracker = tracker
        self._clock = SampleClock(sleep)
        self._sleep = sleep
        self.wanted = Wanted()
        self._drawn_for: tuple[float, float] = (0.0, 0.0)
        self._began_ns = self._stall_ns = 0
        self._parts = PartReader()
        self._requests: set[tuple[str, int]] = set()  # lines that ask for batches
        self._places: Counter[str] = Counter()
        self.seen = StackTotals()
        self.part_ns = dict.fromkeys(COMPUTE_PARTS, 0)
        self.run: dict[str, StackProfile] = {}
        self.stall: dict[str, StackProfile] | None = None
        self.parts: list[StackProfile] = []
        self.newest: StackProfile | None = None
        self.free = self.idle = 0
        self.collecting = StackProfile()
        self.threads = BusyThreads(tracker)
        self.loop = UnseenLoop()
        self.reducing: Counter[int] = Counter()

    @property
    def steps(self) -> StackProfile:
        """The stacks in the compute of steps, over the run."""
        return self.run.get(STEP) or StackProfile()

    def part_of(self, stack: Stack) -> str:
        """The part of the compute that a stack of a step is in."""
        return self._parts.part_of(stack)

    def begin_stall(self) -> None:
        """Begin `stall`."""
        self.stall, self._stall_ns = {}, now_ns()

    def follow(self) -> None:
        """Begin `newest`, and sample as often as in the first minute of training."""
        self.newest, self._began_ns = StackProfile(), 0

    def take_place(self) -> str | None:
        """The line of the user's code in most samples of compute since the last call, without waits for ranks."""
        seen = self._places.most_common(1)
        self._places.clear()
        return seen[0][0] if seen else None

    def wait(self, seconds: float) -> None:
        """Sleep for some seconds, and take the sample that becomes due in that time, if any, or those of a burst."""
        mean, share = self._rate()
        if (mean, share) != self._drawn_for:
            self._drawn_for = mean, share
            self._clock.draw(mean, share)
        if self._wants_burst() and self._clock.left_seconds > 0:
            self._burst(min(seconds, self._clock.left_seconds))
            return
        tracker = self._tracker
        if self._clock.wait(tracker.native_thread, seconds):
            self._clock.wait_until_due(tracker.native_thread)
            # First: what follows may give the GIL up.
            kind, at_boundary, batch = self._kind(), tracker.at_boundary, tracker.batches_since_optimizer
            sample = self._clock.take(tracker.thread, tracker.native_thread)
            if tracker.active:
                self._take(sample, kind, at_boundary=at_boundary)
                if kind == STEP and sample.blocked and self._on_host and in_backward(sample.stack):
                    self.reducing[batch] += sample.wall_ns
            self._clock.draw(mean, share)

    def _rate(self) -> tuple[float, float]:
        """The mean seconds between samples, and the largest share of a core that they may take."""
        wanted, now = self.wanted, now_ns()
        if wanted.kinds:
            young = now - self._stall_ns < _STALL_SECONDS * NS
            return _STALL, _FIRST_SHARE if young else _MAX_SHARE
        passed = (now - self._began_ns) / NS if self._began_ns else 0.0
        mean, most = next(every for until, every in _CALM if passed < until), _MAX_SHARE
        if self._unseen:
            runs = self.loop.began_ns or self._tracker.stepping
            if runs and passed < _UNSEEN_SECONDS:
                mean, most = min(mean, _UNSEEN), _FIRST_SHARE
            elif self.loop.evaluating or not runs:
                mean = min(mean, _EVALUATING)
        if wanted.waits:
            mean = min(mean, _WAITS)
        if wanted.gaps:
            mean = min(mean, _GAPS)
        if wanted.ranks:
            mean = min(mean, _SLOW_RANK if wanted.slow_rank else _RANKS)
        return mean, most

    def _kind(self) -> str | None:
        """The kind of work that the training thread does now; None for any other."""
        tracker = self._tracker
        waiting = tracker.waiting_since
        if waiting > 0:
            return WAIT if tracker.batch_seen else None
        if tracker.evaluating:
            return EVALUATION_WAIT if waiting else EVALUATING
        if tracker.checkpointing:
            return CHECKPOINT
        if tracker.between_loops and not waiting:
            return BETWEEN
        runs = self.loop.began_ns and tracker.category == S_STARTUP
        return STEP if (tracker.stepping or runs) and not waiting else None

    @property
    def _on_host(self) -> bool:
        return self._tracker.device is None and self._tracker.accelerator is None

    @property
    def _unseen(self) -> bool:
        """Whether the training thread asks no loader for batches, or has not begun to."""
        return not (self._tracker.batch_seen or self._tracker.explicit)

    def _wants_burst(self) -> bool:
        """Whether close samples should show how often a backward pass begins: no optimizer steps."""
        loop, tracker = self.loop, self._tracker
        if not (loop.began_ns and self._unseen) or tracker.optimizer_steps or not tracker.active:
            return False
        return loop.pace.due((now_ns() - loop.began_ns) / NS)

    def _burst(self, seconds: float) -> None:
        """Take close samples for some seconds, as long as a burst is wanted and the loop goes on."""
        tracker, loop, until = self._tracker, self.loop, now_ns() + int(seconds * NS)
        pace = loop.pace
        while now_ns() < until and self._wants_burst():
            switch_interval.shorten()
            try:
                if self._sleep(pace.gap_seconds):
                    return
                kind, stack = self._kind(), stack_of(tracker.thread)
            finally:
                switch_interval.restore()
            now = now_ns()
            if kind != STEP or loop.take(stack, now, tracker.thread):
                pace.away()
                self._sleep(_EVALUATING)
            else:
                pace.take(now, (now - loop.began_ns) / NS, backward=in_backward(stack))

    def _take(self, sample: Sample, kind: str | None, *, at_boundary: bool) -> None:
        tracker, wall = self._tracker, sample.wall_ns
        if self._unseen or self.loop.evaluating:
            kind = self._of_unseen_loop(sample, kind)
        if FETCH in self.wanted.kinds and self.stall is not None:
            for thread in python_threads():
                fetch = fetch_part(thread.stack) if thread.ident != tracker.thread else ()
                if fetch:
                    self.stall.setdefault(FETCH, StackProfile()).add(fetch, StackTime(wall, wall))
        if kind in {WAIT, STEP}:
            self.threads.take(waited=sample.waited, wall_ns=wall)
        if kind == STEP:
            self._take_step(sample)
        elif kind is not None:
            self._add(kind, sample.stack, sample.time, self.run, self.stall)
            if kind == WAIT:
                self._take_wait(sample, at_boundary=at_boundary)

    def _of_unseen_loop(self, sample: Sample, kind: str | None) -> str | None:
        """The kind of work of a sample, where only its stack tells a loop from a startup and from an evaluation."""
        loop, tracker = self.loop, self._tracker
        if not self._unseen or kind not in {STEP, None} or tracker.in_phase or tracker.category not in _LOOP:
            loop.away(sample.taken_ns)
            return kind
        if loop.take(sample.stack, sample.taken_ns, tracker.thread):
            return EVALUATING
        return STEP if loop.began_ns else kind

    def _take_step(self, sample: Sample) -> None:
        seen, stack, wall = self.seen, sample.stack, sample.wall_ns
        self._began_ns = self._began_ns or now_ns()
        seen.step += wall
        for part, ns in self._parts.take(stack, wall, self._tracker.thread):
            self.part_ns[part] += ns
        if stack and (stack[0].file, stack[0].line) in self._requests:
            seen.freeing += wall
        self._take_place(sample)
        collecting = self._take_collection(sample)
        if collecting is not None:
            self._add(STEP, collecting, sample.time, self.stall)
            return
        stack = (*self._sleeps_in(sample), *stack)
        self._add(STEP, stack, sample.time, self.run, self.stall)
        passed = (now_ns() - self._began_ns) / NS
        if self.newest is not None:
            self.newest.add(stack, sample.time)
        else:
            if len(self.parts) * _PART_SECONDS <= passed < _FIRST_SECONDS or not self.parts:
                self.parts.append(StackProfile())
            self.parts[-1].add(stack, sample.time)
        if not sample.waited:
            self.free += 1
            self.idle += sample.blocked

    def _sleeps_in(self, sample: Sample) -> tuple[Spot, ...]:
        """The call in which a line of the user's own waits, if it has called C code, as ``os.system`` is."""
        if not sample.blocked or not sample.stack or is_library(sample.stack[0].file):
            return ()
        state = thread_state("self", self._tracker.native_thread)
        return next(((call,) for function, call in _SLEEPS if function in state), ())

    def _take_wait(self, sample: Sample, *, at_boundary: bool) -> None:
        seen, stack, wall, cpu = self.seen, sample.stack, sample.wall_ns, sample.cpu_ns
        self._take_collection(sample)
        sampler = in_sampler(stack)
        ours = max((depth for depth, spot in enumerate(stack) if in_seams(spot)), default=-1)
        if ours >= 0:  # the statement that asks for the batch calls our wrapper, perhaps through a generator
            self._requests.update((spot.file, spot.line) for spot in stack[ours + 1 :])
        if at_boundary:
            seen.boundary += wall
            seen.boundary_sampler += wall * sampler
            seen.boundary_sampler_cpu += cpu * sampler
        else:
            seen.wait += wall
            seen.wait_cpu += cpu
            seen.sampler += wall * sampler
            seen.sampler_cpu += cpu * sampler

    def _take_collection(self, sample: Sample) -> Stack | None:
        """Take a sample of a garbage collection. Returns the stack that has called for it, empty if unknown.

        It returns None for any other sample. In a collection, this thread has waited until its end, or has found the
        other thread in a function of `gc.callbacks`. Python calls these at the end, and if one is in Python, it gives
        up the GIL. If this thread had no core then, the other one has gone on meanwhile.
        """
        codes = [getattr(function, "__code__", None) for function in gc.callbacks]
        names = {(code.co_filename, code.co_name) for code in codes if code is not None}
        depth = next((depth for depth, spot in enumerate(sample.stack) if (spot.file, spot.function) in names), -1)
        ended = self._tracker.garbage.ended_within(sample.due_ns, sample.taken_ns)
        if depth < 0 and not ended:
            return None
        if depth < 0 and sample.taken_ns - ended >= _RIGHT_AFTER_NS:
            return ()
        self.collecting.add(sample.stack[depth + 1 :], sample.time)
        return sample.stack[depth + 1 :]

    def _take_place(self, sample: Sample) -> None:
        stack, ranks = sample.stack, self.wanted.ranks
        self.seen.samples += ranks
        # In a collective, in DDP, or in a backward pass that reduces, ranks wait for one another. A backward pass that
        # is on a core, or wants one, computes; with a GPU, the host's wait for it may use a core, too.
        computes = in_backward(stack) and self._on_host and not sample.blocked
        if ranks and not computes and collective_in(stack) is not None:
            self.seen.in_sync += 1
            return
        own = users_spot(stack)
        if own is not None:
            self._places[line_of(own)] += 1

    def _add(self, kind: str, stack: Stack, time: StackTime, *to: dict[str, StackProfile] | None) -> None:
        for profiles in to:
            if profiles is not None and stack:
                profiles.setdefault(kind, StackProfile()).add(stack, time)


# -- other threads that hold the GIL -----------------------------------------------------------------------------------

_BUSY_THREAD: Final = 0.1
"""A thread that is on a core for a smaller share of the time cannot hold the GIL for long."""

_LOOK_SECONDS: Final = 1.0
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
                work.add(stack, time, self.profile.samples * time.wall_ns // max(1, self.profile.wall_ns))
        return work

    @property
    def gil_share(self) -> float:
        """The share of the time in which it holds the GIL: while it is on a core, unless it runs code without it."""
        if not self.wall_ns or not self.profile.samples:
            return 0.0
        return max(0.0, self.cpu_ns / self.wall_ns - self.without_gil / max(1, self.free))


class BusyThreads:
    """Finds Python threads beside the training thread that are often on a core, and samples them.

    Attributes:
        found: these threads, by native id.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._ran: dict[int, int] = {}  # time on a core by native id
        self._looked_ns = 0
        self._watched: dict[int, int] = {}  # the ident of each busy thread by native id
        self.found: dict[int, BusyThread] = {}

    def take(self, *, waited: bool, wall_ns: int) -> None:
        """Sample them, for a sample of the training thread that has ``waited`` for the GIL or not."""
        for native, ident in self._watched.items():
            thread, stack = self.found[native], stack_of(ident)
            if waited and stack:
                thread.profile.add(stack, StackTime(wall_ns, wall_ns))
            elif not waited:
                runs = runs_beside(native)
                thread.free += 1
                thread.without_gil += runs
                if stack and not runs:
                    thread.resting.add(stack, StackTime(wall_ns, wall_ns))
        now = now_ns()
        if now - self._looked_ns >= _LOOK_SECONDS * NS:
            self._look(now)

    def _look(self, now: int) -> None:
        before, passed = self._ran, now - self._looked_ns
        self._ran, self._looked_ns = {}, now
        busy: list[tuple[int, int, int, str]] = []  # time on a core, native id, ident, name
        for ident, thread in list(listed_threads().items())[:_MAX_LOOKED_AT]:
            native = thread.native_id
            if native is None or ident == self._tracker.thread or named(ident) is not None:
                continue
            schedule = read_schedule("self", native)
            if schedule is None:
                continue
            self._ran[native] = schedule.run_ns
            ran = schedule.run_ns - before.get(native, schedule.run_ns)
            if native in self.found and native in before:
                self.found[native].cpu_ns += ran
                self.found[native].wall_ns += passed
            if native in before and ran >= _BUSY_THREAD * passed:
                busy.append((ran, native, ident, str(thread.name)))
        busy = sorted(busy, reverse=True)[:_MAX_BUSY]
        self._watched = {native: ident for _, native, ident, _ in busy}
        for ran, native, _, name in busy:
            self.found.setdefault(native, BusyThread(name, ran, passed))
