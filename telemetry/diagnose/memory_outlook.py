"""When the memory of a run is used up, and by which of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from telemetry.core.memory_records import CUDA, MEMORY_PARTS, SHARED_MEMORY, WORKERS, MemoryGrowth
from telemetry.diagnose.lasting_growth import LastingGrowth, lasting_growth, long_enough, peak, slope_since

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.diagnose.reading_history import TimedReading

MEMORY: Final = "memory"

_MIN_BYTES: Final = 16 << 20
_MIN_LIMIT_RATIO: Final = 0.01
"""Growth by less than 16 MiB, or than this share of the limit, within the time that was judged is of no interest."""

_HORIZON: Final = 4.0
"""The end of the memory is forecast for at most this many times the time from which it is told."""

_FIRST_EPOCH_HORIZON: Final = 2.0
"""... and this many times if the workers grow, are started anew in each epoch, and it is not known when that is."""

_MIN_SHARE: Final = 0.3
"""A part is named if it makes up this share of what is used up."""

_COPIED_SHARE: Final = 0.5
"""Workers copy on write if their shared memory falls by this share of what their own memory grows by."""


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """The histories that are judged, and the newest readings. Bytes over seconds.

    Attributes:
        parts: by part, from `MEMORY_PARTS`.
        used: what this run and all others use of the limit: minus the bytes that are available.
        shared_memory_used: what this run and all others use of /dev/shm: minus the bytes that are free.
        workers_shared: anonymous memory that workers share with the process that forked them.
        free: what is left now, of ``memory``, ``shared_memory`` and ``cuda``. One that is not known is missing.
        limit_bytes: the memory limit, for the least growth of interest; None if not known.
        workers_end: whether the workers are started anew in each epoch, and no epoch has ended yet.
    """

    parts: Mapping[str, tuple[TimedReading, ...]] = field(default_factory=dict)
    used: tuple[TimedReading, ...] = ()
    shared_memory_used: tuple[TimedReading, ...] = ()
    workers_shared: tuple[TimedReading, ...] = ()
    free: Mapping[str, float] = field(default_factory=dict)
    limit_bytes: float | None = None
    workers_end: bool = False


def memory_outlook(now: MemoryReadings) -> MemoryGrowth:
    """Judge the histories. What was not measured for long enough is missing in the result."""
    at_least = max(float(_MIN_BYTES), _MIN_LIMIT_RATIO * (now.limit_bytes or 0.0))
    growths = {part: lasting_growth(readings, at_least) for part, readings in now.parts.items()}
    rates = {
        part: growth.per_second if growth is not None else 0.0
        for part, growth in growths.items()
        if long_enough(now.parts[part])
    }
    ends = [_end_of_memory(now, growths, at_least)]
    ends.append(_end_of_part(SHARED_MEMORY, lasting_growth(now.shared_memory_used, at_least), now.free))
    ends.append(_end_of_part(CUDA, growths.get(CUDA), now.free))
    known = [end for end in ends if end is not None]
    if known:
        end = min(known, key=lambda end: end.seconds)
        if end.where is not None:  # its growth was seen, even if it is not even enough to be judged by itself
            rates[end.where] = end.per_second
        return MemoryGrowth(rates, end.where, end.per_second, end.seconds, end.exhausted, end.copied)
    where = max(rates, key=lambda part: rates[part], default=None)
    if where is None or rates[where] <= 0 or _levels_off(growths[where], now.free.get(where, now.free.get(MEMORY))):
        return MemoryGrowth(dict.fromkeys(rates, 0.0))
    return MemoryGrowth(rates, where, rates[where])


@dataclass(frozen=True, slots=True)
class _End:
    """One kind of memory is used up."""

    exhausted: str
    seconds: float
    where: str | None
    per_second: float
    copied: bool = False


def _end_of_memory(now: MemoryReadings, growths: Mapping[str, LastingGrowth | None], at_least: float) -> _End | None:
    growth, free = lasting_growth(now.used, at_least), now.free.get(MEMORY)
    if growth is None:  # what others use goes up and down, but a part of this run may grow all the same
        own = [growth for part, growth in growths.items() if growth is not None and part != CUDA]
        growth = max(own, key=lambda growth: growth.per_second, default=None)
    if growth is None or free is None:
        return None
    free = max(0.0, min(free, -peak(now.used, growth)))
    slopes = {
        part: slope
        for part in MEMORY_PARTS
        if part != CUDA and (slope := slope_since(now.parts.get(part, ()), growth.since)) is not None
    }
    where = max(slopes, key=lambda part: slopes[part], default=None)
    if where is not None and slopes[where] < _MIN_SHARE * growth.per_second:
        where = None
    horizon, copied = _HORIZON, False
    if where == WORKERS:
        shared = slope_since(now.workers_shared, growth.since)
        copied = shared is not None and -shared >= _COPIED_SHARE * slopes[WORKERS]
        if copied and now.workers_shared[-1].value < free:
            return None  # all that they can copy fits
        horizon = _FIRST_EPOCH_HORIZON if now.workers_end else _HORIZON
    seconds = growth.seconds_to(free)
    if seconds > horizon * growth.seconds:
        return None
    return _End(MEMORY, seconds, where, growth.per_second if where is None else slopes[where], copied)


def _end_of_part(part: str, growth: LastingGrowth | None, left: Mapping[str, float]) -> _End | None:
    free = left.get(part)
    if growth is None or free is None:
        return None
    seconds = growth.seconds_to(free)
    return _End(part, seconds, part, growth.per_second) if seconds <= _HORIZON * growth.seconds else None


def _levels_off(growth: LastingGrowth | None, free: float | None) -> bool:
    """Whether it will have stopped before the memory is used up."""
    return growth is not None and free is not None and growth.seconds_to(free) == math.inf
