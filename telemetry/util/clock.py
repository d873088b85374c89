"""Time: durations from the monotonic clock, timestamps from an anchor to the wall clock."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

NS: Final = 1_000_000_000

now_ns: Final = time.perf_counter_ns
"""Monotonic nanoseconds: 39 ns a call."""

# A script may replace functions of `time` for its own threads. These are bound when `telemetry` is imported, and all
# code that runs in a training process takes them from here.
clock_gettime: Final = time.clock_gettime
clock_gettime_ns: Final = time.clock_gettime_ns
monotonic: Final = time.monotonic
monotonic_ns: Final = time.monotonic_ns
pthread_getcpuclockid: Final = time.pthread_getcpuclockid
process_time_ns: Final = time.process_time_ns
sleep: Final = time.sleep
thread_time: Final = time.thread_time
thread_time_ns: Final = time.thread_time_ns
unix_ns: Final = time.time_ns
unix_time: Final = time.time


def thread_clock(native: int) -> int:
    """The CPU clock of a thread, as pthread_getcpuclockid computes it. A read fails once the thread has ended."""
    return ~native << 3 | 6


_STEP_TOLERANCE_NS: Final = NS

_FIRST: Final = -62_135_596_800.0
_LAST: Final = 253_402_300_799.0
"""Unix times of the years 1 and 9999."""


class WallClock:
    """Turns monotonic stamps into Unix time.

    The anchor is taken once. ``resync`` moves it only when the wall clock was stepped by more than a second, or when
    the machine slept for longer. So timestamps agree with the other logs of the machine and do not jitter.
    """

    __slots__ = ("_mono", "_offset_ns", "_wall")

    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, mono_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._wall = wall_ns
        self._mono = mono_ns
        self._offset_ns = wall_ns() - mono_ns()

    def resync(self) -> float:
        """Follow a stepped wall clock. Returns the seconds of the step, or 0.0."""
        offset = self._wall() - self._mono()
        step = offset - self._offset_ns
        if abs(step) <= _STEP_TOLERANCE_NS:
            return 0.0
        self._offset_ns = offset
        return step / NS

    def unix_seconds(self, stamp_ns: int) -> float:
        """Unix time in seconds of a monotonic stamp."""
        return (stamp_ns + self._offset_ns) / NS

    def iso(self, stamp_ns: int | None = None) -> str:
        """A monotonic stamp, or now, as ISO-8601 in UTC with milliseconds."""
        stamp = self._mono() if stamp_ns is None else stamp_ns
        return iso_time(self.unix_seconds(stamp))


def iso_time(unix_seconds: float) -> str:
    """ISO-8601 in UTC with milliseconds, ``2026-01-02T03:04:05.678Z``; the nearest that the calendar has."""
    moment = datetime.fromtimestamp(min(max(unix_seconds, _FIRST), _LAST), tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
