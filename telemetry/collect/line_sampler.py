"""Samples the code that delays batches or steps on threads of the training process.

The agent thread takes the samples, while a stall is open and at no other time. It reads the training thread, and
workers that are threads of this process. Each sample holds the GIL for about 50 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.core.fetch_stacks import fetch_part
from telemetry.core.sample_times import SampleTimes
from telemetry.core.stack_profile import StackProfile
from telemetry.core.switch_interval import restore_switch_interval, shorten_switch_interval
from telemetry.util.clock import NS, now_ns
from telemetry.util.stacks import python_threads, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.util.stacks import Stack

_GAP_SECONDS: Final = 0.02
"""Mean time between samples."""

_LATE_NS: Final = NS // 1000
"""A shorter delay is no C call that holds the GIL."""

_USER: Final = "lines"

FETCH: Final = "fetch"
"""The kind of work of a thread of this process that makes batches. The others are those of the training thread."""


class LineSampler:
    """Profiles of the threads of this process, by what the training thread was doing.

    Args:
        thread: returns the ident of the training thread.
        doing: returns what the training thread does now, such as ``wait`` or ``step``; None for anything else.

    Attributes:
        profiles: by kind of work.
    """

    def __init__(self, thread: Callable[[], int], doing: Callable[[], str | None]) -> None:
        self._thread = thread
        self._doing = doing
        self._kinds: frozenset[str] = frozenset()
        self._times: SampleTimes | None = None
        self.profiles: dict[str, StackProfile] = {}

    def want(self, kinds: frozenset[str]) -> None:
        """Sample these kinds of work from now on. Without any, no sample is taken."""
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
        """Seconds to wait for the next sample. The wait may be cut short: then no sample is due."""
        return self._times.gap() if self._times is not None else float("inf")

    def sample(self, due_ns: int) -> None:
        """Take the sample that was due at a stamp."""
        times = self._times
        if times is not None:
            self._sample(times, times.weight_ns(due_ns, now_ns()), 1)

    def late(self, due_ns: int) -> None:
        """Count the time since a stamp at which the agent thread had something else to do, if a C call held it up.

        No sample can become due in that time. So without it, code that holds the GIL would get too small a share.
        """
        times = self._times
        if times is not None and (delay := times.delay_ns(due_ns, now_ns())) > _LATE_NS:
            self._sample(times, delay, 0)

    def _sample(self, times: SampleTimes, wall: int, samples: int) -> None:
        times.starts()
        doing = self._doing()
        if doing in self._kinds and doing is not None:
            self._add(doing, stack_of(self._thread()), wall, samples)
        if FETCH in self._kinds:
            for thread in python_threads():
                if thread.ident != self._thread():
                    self._add(FETCH, fetch_part(thread.stack), wall, samples)
        times.taken(samples)

    def _add(self, kind: str, stack: Stack, wall_ns: int, samples: int) -> None:
        if stack:
            self.profiles.setdefault(kind, StackProfile()).add(stack, wall_ns, wall_ns, samples)
