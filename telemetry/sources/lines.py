"""Samples the threads of the training process: the code that delays batches or steps, and where ranks wait.

The agent thread takes the samples. A sample of the training thread only costs 20 to 50 us in which it holds the GIL.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.lines import CHECKPOINT, FETCH, STEP, WAIT
from telemetry.sources.proc import is_running
from telemetry.sources.stacks import collective_in, in_backward
from telemetry.util.clock import NS, now_ns
from telemetry.util.gil import restore_switch_interval, shorten_switch_interval
from telemetry.util.sampling import SampleTimes, StackProfile, fetch_part
from telemetry.util.stacks import line_of, python_threads, stack_of, users_spot

if TYPE_CHECKING:
    from telemetry.hooks.tracker import StepTracker
    from telemetry.util.stacks import Stack

_GAP_SECONDS: Final = 0.02

_LATE_NS: Final = NS // 1000
"""After a shorter delay, no C call has held the GIL."""

_USER: Final = "lines"


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
            shorten_switch_interval(_USER)
            self._times = SampleTimes(_GAP_SECONDS)
        elif not kinds and self._times is not None:
            restore_switch_interval(_USER)
            self._times = None

    def begin(self) -> None:
        """Forget all samples."""
        self.profiles = {}

    @property
    def sampling(self) -> bool:
        """Whether samples are taken now."""
        return self._times is not None

    def gap(self) -> float:
        """Seconds to wait for the next sample. If the wait is cut short, no sample is due."""
        return self._times.gap() if self._times is not None else float("inf")

    def sample(self, due_ns: int) -> None:
        """Take the sample that was due at a stamp."""
        times = self._times
        if times is not None:
            self._sample(times, times.weight_ns(due_ns, now_ns()), 1)

    def late(self, due_ns: int) -> None:
        """Count the time since a stamp at which other work of the agent thread was due, if a C call held it up.

        No sample can become due in that time. So without it, code that holds the GIL would get too small a share.
        """
        times = self._times
        if times is not None and (delay := times.delay_ns(due_ns, now_ns())) > _LATE_NS:
            self._sample(times, delay, 0)

    def _sample(self, times: SampleTimes, wall: int, samples: int) -> None:
        times.starts()
        tracker = self._tracker
        doing = WAIT if tracker.waiting_since > 0 else CHECKPOINT if tracker.checkpointing else STEP
        if doing in self._kinds and (doing != STEP or tracker.stepping):
            self._add(doing, stack_of(tracker.thread), wall, samples)
        if FETCH in self._kinds:
            for thread in python_threads():
                if thread.ident != tracker.thread:
                    self._add(FETCH, fetch_part(thread.stack), wall, samples)
        times.taken(samples)

    def _add(self, kind: str, stack: Stack, wall_ns: int, samples: int) -> None:
        if stack:
            self.profiles.setdefault(kind, StackProfile()).add(stack, wall_ns, wall_ns, samples)


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
