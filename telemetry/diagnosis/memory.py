"""Memory that grows: whether the growth lasts, when the memory is used up, and what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.log_lines import MemoryForecast
from telemetry.records import CUDA, MEMORY_PARTS, SHARED_MEMORY, TRAINING, WORKERS
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.records import GpuSample, MemorySample, TorchMemorySample


# -- the history of one figure in a fixed amount of memory, however long the run ---------------------------------------

MAX_READINGS: Final = 64
"""The most readings in one history."""


class TimedReading(NamedTuple):
    """A figure at a time in seconds."""

    seconds: float
    value: float


class ReadingHistory:
    """Readings that are evenly spread over the time since the first one.

    When the history is full, neighbours are merged, and the spacing doubles. At the maximum spacing the oldest readings
    are dropped instead.

    Args:
        spacing: seconds between two readings at first. Readings in between are merged.
        max_spacing: largest distance of two readings in seconds.
        highest: whether merged readings become the highest of them, and not their mean.

    Attributes:
        readings: the merged readings, the oldest first.
    """

    def __init__(self, spacing: float, max_spacing: float, *, highest: bool = False) -> None:
        self.readings: list[TimedReading] = []
        self._spacing = spacing
        self._highest = highest
        self._max_spacing = max_spacing
        self._slot = 0
        self._now: list[TimedReading] = []  # readings to merge

    def add(self, seconds: float, value: float) -> bool:
        """Add a reading. Returns whether `readings` has changed."""
        changed = bool(self._now) and int(seconds / self._spacing) != self._slot
        if changed:
            self._close_slot()
        self._slot = int(seconds / self._spacing)
        self._now.append(TimedReading(seconds, value))
        return changed

    def _close_slot(self) -> None:
        self.readings.append(self._merge(self._now))
        self._now = []
        if len(self.readings) < MAX_READINGS:
            return
        if 2 * self._spacing > self._max_spacing:
            del self.readings[0]
            return
        self._spacing *= 2
        self.readings = [self._merge(pair) for pair in zip(self.readings[::2], self.readings[1::2], strict=True)]

    def _merge(self, readings: Sequence[TimedReading]) -> TimedReading:
        times, values = zip(*readings, strict=True)
        return TimedReading(fmean(times), max(values) if self._highest else fmean(values))


# -- whether a figure grows for good, and how fast ---------------------------------------------------------------------
# Memory also grows at the start of a run, up to a cache's size, in steps, and in a saw-tooth while workers live. These
# are no leaks. So only even growth counts, and only if it is large compared with each fall of the figure so far.

SHARES: Final = (2 / 3, 1 / 3, 1 / 6)
"""Shares of the history, its newest part, that are judged. The first third is always left out: it is the start-up."""

_MIN_READINGS: Final = 8
_MIN_SECONDS: Final = 20.0

_MIN_TIMES_FALL: Final = 2.0
"""Growth counts if it is this many times the largest fall of the figure. If workers are started anew in each epoch,
their memory falls by as much as it grows."""

_QUARTERS: Final = 4
_MIN_EVEN: Final = 0.3
"""Each quarter of the time must grow over the last by this share of the mean. A single jump is no growth."""

_SLOWING: Final = 0.75
"""Growth slows down if it is less in each third of the time than in the one before, and if the last third has less than
this share of the first. It is then assumed to slow down further in the same way."""

_THIRDS: Final = 3


@dataclass(frozen=True, slots=True)
class LastingGrowth:
    """Growth that lasts.

    Attributes:
        per_second: growth per second over the judged time. ``seconds``: length of that time.
        since: start of that time.
        slowing: growth in a third of that time over that in the third before it; 1 if it does not slow down.
        newest: growth in the last third.
    """

    per_second: float
    seconds: float
    since: float
    slowing: float = 1.0
    newest: float = 0.0

    def seconds_to(self, amount: float) -> float:
        """Time until it has grown by an amount; infinite if the growth ends before."""
        if self.slowing >= 1:
            return amount / self.per_second
        # A geometric series of thirds, of which the next has grown by `following`.
        following = self.newest * self.slowing
        left = 1 - amount * (1 - self.slowing) / following if following > 0 else 0.0
        return self.seconds / _THIRDS * math.log(left) / math.log(self.slowing) if left > 0 else math.inf


def lasting_growth(readings: Sequence[TimedReading], at_least: float) -> LastingGrowth | None:
    """The growth over the longest part of the history with growth of ``at_least`` so much; None if there is none."""
    if len(readings) < _MIN_READINGS:
        return None
    first, last = readings[0].seconds, readings[-1].seconds
    fall: float | None = None
    for share in SHARES:
        window = [reading for reading in readings if reading.seconds >= last - share * (last - first)]
        seconds = window[-1].seconds - window[0].seconds
        if len(window) < _MIN_READINGS or seconds < _MIN_SECONDS:
            return None
        quarters = _quarters(window)
        # Checked first: it takes no time, and most figures do not grow.
        if quarters[-1] - quarters[0] < at_least * (_QUARTERS - 1) / _QUARTERS:
            continue
        fall = _largest_fall(readings) if fall is None else fall
        slope = slope_of(window)
        grown = slope * seconds
        if grown < max(at_least, _MIN_TIMES_FALL * fall):
            continue
        if min(b - a for a, b in pairwise(quarters)) < _MIN_EVEN * grown / _QUARTERS:
            continue
        return LastingGrowth(slope, seconds, window[0].seconds, *_slowing(window))
    return None


def slope_of(readings: Sequence[TimedReading]) -> float:
    """The median slope between two readings (Theil and Sen). A single wrong reading does not change it."""
    return median((b.value - a.value) / (b.seconds - a.seconds) for a, b in combinations(readings, 2))


def long_enough(readings: Sequence[TimedReading]) -> bool:
    """Whether the readings are enough to judge growth."""
    return len(readings) >= _MIN_READINGS and SHARES[0] * (readings[-1].seconds - readings[0].seconds) >= _MIN_SECONDS


def peak(readings: Sequence[TimedReading], growth: LastingGrowth) -> float:
    """The highest value that the figure reaches now and then, at the time of the last reading.

    This is the highest reading since the growth began, moved along it. A peak, such as a checkpoint, uses up the
    memory. For growth that slows down this would be too high, so it is the last reading.
    """
    last = readings[-1]
    if growth.slowing < 1:
        return last.value
    return max(r.value + growth.per_second * (last.seconds - r.seconds) for r in readings if r.seconds >= growth.since)


def slope_since(readings: Sequence[TimedReading], since: float) -> float | None:
    """The slope from a time on, from its first to its last quarter; None if there are fewer than four readings.

    The shared memory of workers is seldom read, so their own is a staircase, where most pairs have no slope.
    """
    window = [reading for reading in readings if reading.seconds >= since]
    if len(window) < _QUARTERS:
        return None
    values, part = _quarters(window), len(window) // _QUARTERS
    seconds = median(r.seconds for r in window[-part:]) - median(r.seconds for r in window[:part])
    return (values[-1] - values[0]) / seconds


def _slowing(window: Sequence[TimedReading]) -> tuple[float, float]:
    """``slowing`` and ``newest`` of `LastingGrowth`."""
    bounds = [(len(window) - 1) * part // _THIRDS for part in range(_THIRDS + 1)]
    thirds = [window[a : b + 1] for a, b in pairwise(bounds)]
    slopes = [slope_of(third) for third in thirds]
    newest = slopes[-1] * (thirds[-1][-1].seconds - thirds[-1][0].seconds)
    slows = slopes[0] > slopes[1] > slopes[2] and slopes[2] < _SLOWING * slopes[0]
    return (math.sqrt(max(0.0, slopes[2]) / slopes[0]) if slows else 1.0), newest


def _quarters(window: Sequence[TimedReading]) -> list[float]:
    bounds = [len(window) * part // _QUARTERS for part in range(_QUARTERS + 1)]
    return [median(r.value for r in window[a:b]) for a, b in pairwise(bounds)]


def _largest_fall(readings: Sequence[TimedReading]) -> float:
    """The largest fall below an earlier reading. A single reading that stands out does not count."""
    values = [reading.value for reading in readings]
    smooth = [median(values[max(0, i - 1) : i + 2]) for i in range(len(values))]
    fall, highest = 0.0, smooth[0]
    for value in smooth:
        highest = max(highest, value)
        fall = max(fall, highest - value)
    return fall


# -- when the memory of a run is used up, and by which part ------------------------------------------------------------

MEMORY: Final = "memory"
USED: Final = "used"
SHARED_MEMORY_USED: Final = "shared_memory_used"
"""What this run and all others use of the limit and of /dev/shm, as minus the bytes that are left."""

COPYABLE: Final = "copyable"
"""Anonymous memory that the workers share with the process that forked them."""

_MIN_BYTES: Final = 16 << 20
_MIN_LIMIT_RATIO: Final = 0.01
"""Growth of less than 16 MiB, or than this share of the limit, within the judged time is ignored."""

_MIN_SMALL_RATIO: Final = 0.05
"""In a small /dev/shm, such as the 64 MB of a container, growth by this share counts although it is below 16 MiB."""

_HORIZON: Final = 4.0
"""The end of the memory is forecast for at most this many times the judged time."""

_FIRST_EPOCH_HORIZON: Final = 2.0
"""The same limit if the workers grow and are started anew in each epoch, and no epoch has ended yet."""

_MIN_SHARE: Final = 0.3
"""A part is named if it causes this share of the growth."""

_COPIED_SHARE: Final = 0.5
"""Workers copy on write if their shared memory falls by this share of the growth of their own memory."""


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """How the memory of a run grows.

    Attributes:
        bytes_per_second: lasting growth by part, from `MEMORY_PARTS`; 0 for a part that does not grow for good. A part
            is missing if it was not measured for long enough.
        where: the part that grows most; None if none does, or if none of them causes the growth.
        where_bytes_per_second: growth of that part, or else of what uses up the memory.
        exhausted_in_seconds: time until no memory is left, at this rate; None if that is not in sight.
        exhausted: the memory that is used up then: ``memory``, ``shared_memory`` or ``cuda``.
        copied_on_write: whether the growth of the workers is memory of the training process that they copy.
    """

    bytes_per_second: dict[str, float] = field(default_factory=dict)
    where: str | None = None
    where_bytes_per_second: float | None = None
    exhausted_in_seconds: float | None = None
    exhausted: str | None = None
    copied_on_write: bool = False


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """What is judged.

    Attributes:
        histories: bytes over seconds of `MEMORY_PARTS`, `USED`, `SHARED_MEMORY_USED` and `COPYABLE`.
        free: bytes that are left of ``memory``, ``shared_memory`` and ``cuda``, as far as they are known.
        limit_bytes: the memory limit, from which the least relevant growth is derived; None if not known.
        workers_end: whether the workers are started anew in each epoch, and no epoch has ended yet.
    """

    histories: Mapping[str, Sequence[TimedReading]]
    free: Mapping[str, float]
    limit_bytes: float | None
    workers_end: bool

    def of(self, name: str) -> Sequence[TimedReading]:
        """One history; empty if it was not measured."""
        return self.histories.get(name, ())

    def least(self) -> float:
        """The least growth of the memory that counts."""
        return _least(self.limit_bytes)

    def shared_memory_growth(self) -> LastingGrowth | None:
        """The growth of what this run and all others use of /dev/shm."""
        own, free = self.of(SHARED_MEMORY), self.free.get(SHARED_MEMORY)
        size = None if not own or free is None else own[-1].value + free
        return lasting_growth(self.of(SHARED_MEMORY_USED), _least(size))


def _least(limit: float | None) -> float:
    """The least growth that counts for memory with a limit."""
    if limit is None:
        return float(_MIN_BYTES)
    return max(min(_MIN_BYTES, _MIN_SMALL_RATIO * limit), _MIN_LIMIT_RATIO * limit)


def memory_outlook(now: MemoryReadings) -> MemoryGrowth:
    """Judge the histories. Parts that were not measured for long enough are missing in the result."""
    growths = {part: lasting_growth(now.of(part), now.least()) for part in MEMORY_PARTS}
    rates = {
        part: 0.0 if growth is None else growth.per_second
        for part, growth in growths.items()
        if long_enough(now.of(part))
    }
    ends = (
        _end_of_memory(now, growths),
        _end_of_part(SHARED_MEMORY, now.shared_memory_growth(), now.free.get(SHARED_MEMORY)),
        _end_of_part(CUDA, growths[CUDA], now.free.get(CUDA)),
    )
    first = min((end for end in ends if end is not None), key=lambda end: end.exhausted_in_seconds or 0, default=None)
    if first is not None:
        if first.where is not None:  # its growth was seen, even if it is too uneven to be judged by itself
            rates[first.where] = first.where_bytes_per_second or 0.0
        return replace(first, bytes_per_second=rates)
    where = max(rates, key=lambda part: rates[part], default=None)
    if where is None or rates[where] <= 0:
        return MemoryGrowth(dict.fromkeys(rates, 0.0))
    growth, free = growths[where], now.free.get(where, now.free.get(MEMORY))
    if growth is not None and free is not None and growth.seconds_to(free) == math.inf:
        return MemoryGrowth(dict.fromkeys(rates, 0.0))  # the growth ends before the memory is used up
    return MemoryGrowth(rates, where, rates[where])


def _end_of_memory(now: MemoryReadings, growths: Mapping[str, LastingGrowth | None]) -> MemoryGrowth | None:
    growth, free = lasting_growth(now.of(USED), now.least()), now.free.get(MEMORY)
    if growth is None:  # the memory of others goes up and down, but a part of this run may still grow
        own = [growth for part, growth in growths.items() if growth is not None and part != CUDA]
        growth = max(own, key=lambda growth: growth.per_second, default=None)
    if growth is None or free is None:
        return None
    free = max(0.0, min(free, -peak(now.of(USED), growth)))
    slopes = {
        part: slope
        for part in MEMORY_PARTS
        if part != CUDA and (slope := slope_since(now.of(part), growth.since)) is not None
    }
    where = max(slopes, key=lambda part: slopes[part], default=None)
    if where is not None and slopes[where] < _MIN_SHARE * growth.per_second:
        where = None
    horizon, copied = _HORIZON, False
    if where == WORKERS:
        copyable = now.of(COPYABLE)
        shared = slope_since(copyable, growth.since)
        copied = shared is not None and -shared >= _COPIED_SHARE * slopes[WORKERS]
        if copied and copyable[-1].value < free:
            return None  # all that they can copy fits
        horizon = _FIRST_EPOCH_HORIZON if now.workers_end else _HORIZON
    seconds = growth.seconds_to(free)
    if seconds > horizon * growth.seconds:
        return None
    return MemoryGrowth({}, where, growth.per_second if where is None else slopes[where], seconds, MEMORY, copied)


def _end_of_part(part: str, growth: LastingGrowth | None, free: float | None) -> MemoryGrowth | None:
    if growth is None or free is None:
        return None
    seconds = growth.seconds_to(free)
    return MemoryGrowth({}, part, growth.per_second, seconds, part) if seconds <= _HORIZON * growth.seconds else None


# -- what to do about memory that grows --------------------------------------------------------------------------------

_COPIED: Final = (
    "a list or dict of Python objects is copied on write, because reading an object changes its reference count; keep "
    "the data in numpy or Arrow arrays"
)

_BY_PART: Final = {
    TRAINING: (
        "the script keeps something of every step; look for lists of losses or outputs (append loss.item() or "
        "tensor.detach().clone() of what is needed) and for caches without a limit"
    ),
    WORKERS: (
        "the data set keeps something of every sample, or a library it uses leaks; look for caches without a limit "
        "(functools.lru_cache with maxsize=None, a dict), and for files and readers that stay open"
    ),
    SHARED_MEMORY: (
        "batches from the workers, or views of them, are kept; keep tensor.clone() of what is needed and drop the rest"
    ),
    CUDA: ("tensors on the GPU are kept; append loss.item() instead of the loss, and outputs as tensor.detach().cpu()"),
}


def memory_advice(growth: MemoryGrowth) -> str:
    """The advice; empty if it is not known what grows."""
    if growth.where is None:
        return ""
    return _COPIED if growth.copied_on_write else _BY_PART[growth.where]


# -- follows the memory of a run ---------------------------------------------------------------------------------------

READ_SECONDS: Final = 2.0
"""Readings that come faster are merged."""

_SPANS: Final = (1350.0, 64.0)
"""Maximum seconds between two readings, for the two histories of each figure: they reach back a day and an hour."""

_JUDGE_SECONDS: Final = 5.0

_MAX_MISSED: Final = 3
"""A forecast is withdrawn only after this many judgements without one, because a busy machine changes the pace."""


class MemoryWatch:
    """Keeps the memory histories of one rank, and judges them."""

    def __init__(self) -> None:
        self._histories: tuple[dict[str, ReadingHistory], ...] = tuple({} for _ in _SPANS)
        self._last: MemorySample | None = None
        self._changed = False
        self._judged_ns = 0
        self._growth: MemoryGrowth | None = None
        self._missed = 0

    def tick(
        self,
        sample: MemorySample | None,
        gpu: GpuSample | None,
        allocator: TorchMemorySample | None,
        *,
        workers_end: bool,
        now: int | None = None,
    ) -> None:
        """Take a new reading, if there is one, and judge the histories if they have changed.

        Do not call it before the first step has ended: what a run needs at its start is not growth.

        Args:
            sample: the newest reading.
            gpu: that of the GPU.
            allocator: that of the CUDA allocator.
            workers_end: the workers start anew in each epoch, and the first epoch has not ended.
            now: monotonic nanoseconds.
        """
        if sample is None or sample is self._last:
            return
        self._last = sample
        now = now_ns() if now is None else now
        for name, value in _values(sample, allocator).items():
            for histories, span in zip(self._histories, _SPANS, strict=True):
                if name not in histories:  # of what others use, peaks count
                    highest = name in {USED, SHARED_MEMORY_USED}
                    histories[name] = ReadingHistory(READ_SECONDS, span, highest=highest)
                self._changed |= histories[name].add(now / NS, value)
        if self._changed and now - self._judged_ns >= _JUDGE_SECONDS * NS:
            self._changed = False
            self._take(self._judge(_free(sample, gpu, allocator), sample, workers_end=workers_end), now)

    def view(self, now: int | None = None) -> MemoryGrowth | None:
        """The growth as of now; None before the first judgement."""
        growth = self._growth
        if growth is None or growth.exhausted_in_seconds is None:
            return growth
        passed = ((now_ns() if now is None else now) - self._judged_ns) / NS
        return replace(growth, exhausted_in_seconds=max(0.0, growth.exhausted_in_seconds - passed))

    def line_field(self, now: int | None = None) -> MemoryForecast:
        """The growth for the log; empty if no memory grows for good."""
        growth = self.view(now)
        if growth is None or growth.where_bytes_per_second is None:
            return MemoryForecast()
        return MemoryForecast(
            growth_bytes_per_hour=round(growth.where_bytes_per_second * 3600),
            where=growth.where,
            exhausted_in_seconds=growth.exhausted_in_seconds,
            exhausted=growth.exhausted,
            copied_on_write=growth.copied_on_write,
            advice=memory_advice(growth) or None,
        )

    def _take(self, growth: MemoryGrowth, now: int) -> None:
        forecast = self._growth is not None and self._growth.exhausted_in_seconds is not None
        self._missed = self._missed + 1 if forecast and growth.exhausted_in_seconds is None else 0
        self._growth = self.view(now) if 0 < self._missed <= _MAX_MISSED else growth
        self._judged_ns = now

    def _judge(self, free: Mapping[str, float], sample: MemorySample, *, workers_end: bool) -> MemoryGrowth:
        """Judge the longer history, or the shorter one if growth began only lately."""
        found = MemoryGrowth()
        for histories in self._histories:
            kept = {name: history.readings for name, history in histories.items()}
            found = memory_outlook(MemoryReadings(kept, free, sample.memory_limit_bytes, workers_end))
            if found.where_bytes_per_second is not None:
                break
        return found


def _values(sample: MemorySample, allocator: TorchMemorySample | None) -> dict[str, float]:
    """The measured values, by the name of their history."""
    left, shared_left = sample.memory_available_bytes, sample.shared_memory_free_bytes
    values = {
        TRAINING: sample.training_bytes,
        WORKERS: sample.workers_bytes,
        SHARED_MEMORY: sample.shared_memory_bytes,
        CUDA: None if allocator is None else allocator.allocated_bytes,
        COPYABLE: sample.workers_shared_bytes,
        USED: None if left is None else -left,
        SHARED_MEMORY_USED: None if shared_left is None else -shared_left,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _free(sample: MemorySample, gpu: GpuSample | None, allocator: TorchMemorySample | None) -> dict[str, float]:
    """The bytes that are left, where that was measured."""
    free = {MEMORY: sample.memory_available_bytes, SHARED_MEMORY: sample.shared_memory_free_bytes}
    if gpu is not None and allocator is not None:
        total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
        if total is not None and used is not None:  # tensors can also use what the allocator holds and does not use
            free[CUDA] = max(0, total - max(0, used - allocator.reserved_bytes) - allocator.allocated_bytes)
    return {name: float(value) for name, value in free.items() if value is not None}
