"""When a thread is sampled, and how much time a sample stands for.

The gaps between samples are random, exponentially distributed. So every moment is sampled equally often, also in code
that repeats in a fixed rhythm, and it does not matter where the sampling pauses. A sample stands for the mean gap, and
also for the time from the moment that was due to the moment of the sample: the sampling thread waited for the GIL then,
which one C call may have held all that time.

While a thread runs Python, another one gets the GIL after the switch interval, 5 ms by default, or earlier, when the
thread makes a call that releases the GIL. So Python code of less than 5 ms would hardly be seen: its time would count
for the call after it. Therefore the interval is shortened while a process is sampled.

The short interval has a cost of its own: threads that send batches wake and switch more often, which takes up to
0.4 ms of CPU per batch (`benchmarks.line_cost`). So a worker that fetches many batches per second is sampled in bursts.
Between them it rests, with its own switch interval.
"""

from __future__ import annotations

import random
from typing import Final

from telemetry.util.clock import NS, thread_time_ns

_MAX_OWN_SHARE: Final = 0.008
"""The gaps grow until the sampling thread takes at most this share of a core."""

BURST_SECONDS: Final = 0.1
"""Length of a burst. After it the next sample is the last one."""

_SECONDS_PER_FETCH: Final = 0.0004
_MAX_SHARE: Final = 0.009
_MAX_SHARE_OF_FETCHES: Final = 0.005
"""What a sampled worker takes more: CPU seconds per fetch, for the short switch interval; the largest share of a core
in all; and that of the fetches. The samples take the rest. The target is 1 %."""

_MIN_PART: Final = 0.1
_MAX_REST_SECONDS: Final = 2.0

_MAX_DELAY_NS: Final = 20 * NS
"""A longer delay is no C call: the process was stopped."""


class SampleTimes:
    """The times of the samples that one thread takes. Used on that thread.

    Args:
        gap_seconds: mean gap between samples.

    Attributes:
        max_share: the largest share of a core that samples take.
        part: the part of the time in which samples are taken, in bursts. The weights make up for the rest.
    """

    def __init__(self, gap_seconds: float) -> None:
        self._least = self._mean = gap_seconds
        self.max_share = _MAX_OWN_SHARE
        self.part = 1.0
        self._random = random.Random()  # noqa: S311 - of our own, so that the training's numbers stay the same
        self._samples = 0
        self._cpu_ns = 0
        self._began_ns = thread_time_ns()

    def gap(self) -> float:
        """Seconds to wait for the next sample."""
        return self._random.expovariate(1 / self._mean)

    def weight_ns(self, due_ns: int, taken_ns: int) -> int:
        """The time that a sample stands for, which was due at one stamp and was taken at another."""
        return int((self._mean * NS + self.delay_ns(due_ns, taken_ns)) / self.part)

    @staticmethod
    def delay_ns(due_ns: int, taken_ns: int) -> int:
        """The time by which a thread was late."""
        return min(max(0, taken_ns - due_ns), _MAX_DELAY_NS)

    def taken(self, samples: int = 1) -> None:
        """Count a sample that was taken now. If samples cost too much CPU time, the mean gap grows.

        ``samples`` is 0 if it was not due after a gap: then only its cost counts.
        """
        self._samples += samples
        self._cpu_ns = thread_time_ns() - self._began_ns
        self._mean = max(self._least, self.part * self._cpu_ns / max(1, self._samples) / NS / self.max_share)

    def starts(self) -> None:
        """Count the cost of samples from now on: what this thread did before was something else."""
        self._began_ns = thread_time_ns() - self._cpu_ns


class SampleBursts:
    """Says when a worker rests between samples. Used on the sampling thread.

    Args:
        times: gets the part of the time in which samples are taken: all of it until the rate of fetches is known, and
            while it is low; and the largest share of a core for it.
        now: the stamp at which the first burst begins.
        fetches: how many fetches have begun so far.
    """

    def __init__(self, times: SampleTimes, now: int, fetches: int) -> None:
        self._times = times
        self._random = random.Random()  # noqa: S311 - of our own, so that the training's numbers stay the same
        self._first = now, fetches
        self._began_ns = now

    def rest(self, now: int) -> float | None:
        """Seconds to rest at this stamp; None if the burst goes on. The length is random, for an equal chance."""
        passed = (now - self._began_ns) / NS
        if passed < BURST_SECONDS:
            return None
        return min(_MAX_REST_SECONDS, passed * (1 / self._times.part - 1) * (0.5 + self._random.random()))

    def begin(self, now: int, fetches: int) -> None:
        """Begin a burst. ``fetches``: how many have begun so far.

        Their rate says how much of the time is sampled. It is the rate since the first burst: if each burst had a rate
        of its own, fetches that are short for a moment would decide how much their neighbours count.
        """
        first_ns, before = self._first
        share = _SECONDS_PER_FETCH * (fetches - before) / max(1, now - first_ns) * NS
        part = max(_MIN_PART, _MAX_SHARE_OF_FETCHES / max(share, _MAX_SHARE_OF_FETCHES))
        self._times.part = part
        self._times.max_share = min(_MAX_OWN_SHARE, _MAX_SHARE - min(part * share, _MAX_SHARE_OF_FETCHES))
        self._began_ns = now
