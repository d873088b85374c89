"""Memory that grows: whether the growth lasts, when the memory is used up, and what to do.

Each figure has one history. A leak grows evenly: its slope is the median of all slopes between two readings (Theil and
Sen). Memory that levels off, grows in steps or falls again, as workers' does at the end of an epoch, is no leak.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.changes import levels, parts
from telemetry.log.lines import MemoryForecast
from telemetry.model.records import CUDA, MEMORY_PARTS, SHARED_MEMORY, TRAINING, WORKERS
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.model.records import GpuSample, MemorySample, TorchMemorySample

# -- the numbers -------------------------------------------------------------------------------------------------------
# Measured by `tests.faults.leak_campaign`, or by the made-up runs of `tests/test_memory_growth.py`.

MAX_READINGS: Final = 128
SPACING_SECONDS: Final = 2.0
MAX_SPACING_SECONDS: Final = 128.0
"""A history has so many readings, with the distance that they have at first and at last: it reaches back 4 hours."""

SHARES: Final = (2 / 3, 1 / 3, 1 / 6, 1 / 12)
"""Shares of the history, its newest part, that are judged. A leak that begins on the second day is found by the shorter
ones. The first third is left out, because it is the start-up: tensors and caches of 12 GB are no leak."""

MIN_READINGS: Final = 10
"""At fewer readings, 18 s at first, nothing is judged: a run that lives for 90 s is told at 40 % of its life."""

MIN_RATIO: Final = 0.01
MIN_BYTES: Final = 16 << 20
"""Growth of less than 1 % of the memory is ignored, and of less than 16 MiB if its size is not known."""

MIN_TIMES_FALL: Final = 2.0
"""Growth counts if it is this many times the largest fall of the figure. If workers are started anew in each epoch,
their memory falls by as much as it grows: without this, half of the judgements in epochs of 20 minutes are wrong."""

MIN_EVEN: Final = 0.3
"""Each quarter of the time must grow by this share of the mean, so that one jump of 20 GB is no growth."""

SLOWING: Final = 0.85
"""Growth that becomes less from quarter to quarter, and less than this share of the first, levels off. Without this,
memory that levels off at 85 % of the limit is told to run out for an hour."""

HORIZON: Final = 3.0
"""The end is forecast for at most so many times the time in which growth was seen: from a third of a run's life on."""

MIN_SHARE: Final = 0.3
"""A part is named if it causes this share of the growth: other processes may do."""

COPIED_SHARE: Final = 0.5
"""Workers copy on write, as from a list, if their shared memory falls by this share of the growth of their own."""

JUDGE_SECONDS: Final = 5.0
"""Minimum seconds between two judgements, which take milliseconds while memory grows."""

# -- the history of one figure -----------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """A figure at a time in seconds."""

    seconds: float
    value: float


class History:
    """Readings at even distances in a fixed amount of memory: those of the whole run, later those of the last 4 hours.

    Args:
        highest: whether readings that are closer become the highest of them, and not their mean.

    Attributes:
        readings: the readings, the oldest first.
    """

    def __init__(self, *, highest: bool = False) -> None:
        self.readings: list[Reading] = []
        self._highest = highest
        self._spacing = SPACING_SECONDS
        self._now: list[Reading] = []  # to be merged

    def add(self, seconds: float, value: float) -> bool:
        """Add a reading. Returns whether `readings` has changed."""
        full = bool(self._now) and int(seconds / self._spacing) != int(self._now[0].seconds / self._spacing)
        if full:
            self.readings.append(self._merged(self._now))
            self._now = []
            if len(self.readings) == MAX_READINGS and self._spacing < MAX_SPACING_SECONDS:
                self._spacing *= 2
                self.readings = [
                    self._merged(pair) for pair in zip(self.readings[::2], self.readings[1::2], strict=True)
                ]
            elif len(self.readings) > MAX_READINGS:
                del self.readings[0]
        self._now.append(Reading(seconds, value))
        return full

    def _merged(self, readings: Sequence[Reading]) -> Reading:
        times, values = zip(*readings, strict=True)
        return Reading(fmean(times), max(values) if self._highest else fmean(values))


# -- whether a figure grows for good -----------------------------------------------------------------------------------


class Growth(NamedTuple):
    """Growth that lasts: its slope, and the time in which it was seen."""

    per_second: float
    since: float
    seconds: float


def lasting_growth(readings: Sequence[Reading], minimum: float) -> Growth | None:
    """The growth over the longest part of the history that grows evenly; None if no part does.

    The first third is always left out: it is the start-up.

    Args:
        readings: the history.
        minimum: growth in bytes that counts.
    """
    for share in SHARES:
        last = readings[-1].seconds if readings else 0.0
        window = [each for each in readings if each.seconds >= last - share * (last - readings[0].seconds)]
        if len(window) < MIN_READINGS:
            return None
        quarters = levels(_values(window), 4)
        if quarters[-1] - quarters[0] < 0.75 * minimum:  # checked first: most figures do not grow
            continue
        rises = [later - earlier for earlier, later in pairwise(quarters)]
        slope, seconds = slope_of(window), window[-1].seconds - window[0].seconds
        grown = slope * seconds
        even = min(rises) >= MIN_EVEN * grown / 4
        slows = rises[0] > rises[1] > rises[2] and rises[2] < SLOWING * rises[0]
        if even and not slows and grown >= max(minimum, MIN_TIMES_FALL * _largest_fall(readings)):
            return Growth(slope, window[0].seconds, seconds)
    return None


def long_enough(readings: Sequence[Reading]) -> bool:
    """Whether the readings are enough to judge growth."""
    return SHARES[0] * len(readings) >= MIN_READINGS


def slope_of(readings: Sequence[Reading]) -> float:
    """The median slope between two readings. A single wrong reading does not change it."""
    return median((b.value - a.value) / (b.seconds - a.seconds) for a, b in combinations(readings, 2))


def _slope_of_stairs(readings: Sequence[Reading]) -> float:
    """The slope from the first to the last quarter.

    What workers share is seldom read, so their own is a staircase, where most pairs of readings have no slope.
    """
    first, *_, last = parts(readings, 4)
    seconds = median(each.seconds for each in last) - median(each.seconds for each in first)
    return (median(_values(last)) - median(_values(first))) / seconds


def _values(readings: Sequence[Reading]) -> list[float]:
    return [reading.value for reading in readings]


def _largest_fall(readings: Sequence[Reading]) -> float:
    """The largest fall below an earlier reading. A single reading that stands out does not count."""
    values = _values(readings)
    smooth = [median(values[max(0, at - 1) : at + 2]) for at in range(len(values))]
    return max(highest - value for highest, value in zip(accumulate(smooth, max), smooth, strict=True))


# -- when the memory of a run is used up, and by which part ------------------------------------------------------------

MEMORY: Final = "memory"
USED: Final = "used"
SHARED_MEMORY_USED: Final = "shared_memory_used"
"""What this run and all others use of the limit and of /dev/shm, as minus the bytes that are left."""

COPYABLE: Final = "copyable"
"""Anonymous memory that the workers share with the process that forked them."""


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


def memory_outlook(
    histories: Mapping[str, Sequence[Reading]], free: Mapping[str, float], limit: float | None
) -> MemoryGrowth:
    """Judge the histories. Parts that were not measured for long enough are missing in the result.

    Args:
        histories: bytes over seconds of `MEMORY_PARTS`, `USED`, `SHARED_MEMORY_USED` and `COPYABLE`.
        free: bytes that are left of ``memory``, ``shared_memory`` and ``cuda``, as far as they are known.
        limit: the memory limit; None if not known.
    """
    sizes = {
        part: histories[part][-1].value + free[part]
        for part in (SHARED_MEMORY, CUDA)
        if part in free and histories.get(part)
    }
    judged = {
        part: lasting_growth(histories[part], _min_growth(sizes.get(part, limit)))
        for part in MEMORY_PARTS
        if long_enough(histories.get(part, ()))
    }
    growths = {part: growth for part, growth in judged.items() if growth is not None}
    rates = {part: growths[part].per_second if part in growths else 0.0 for part in judged}
    # Others may use /dev/shm, too: then no part is named.
    of_all = lasting_growth(histories.get(SHARED_MEMORY_USED, ()), _min_growth(sizes.get(SHARED_MEMORY)))
    own = SHARED_MEMORY if SHARED_MEMORY in growths else None
    ends = (
        _end_of_memory(histories, free.get(MEMORY), growths, _min_growth(limit)),
        _end(SHARED_MEMORY, own, of_all or growths.get(SHARED_MEMORY), free.get(SHARED_MEMORY)),
        _end(CUDA, CUDA, growths.get(CUDA), free.get(CUDA)),
    )
    first = min((end for end in ends if end is not None), key=lambda end: end.exhausted_in_seconds or 0, default=None)
    if first is not None:
        if first.where is not None:  # its growth was seen, even if it is too uneven to be judged by itself
            rates[first.where] = rates.get(first.where) or first.where_bytes_per_second or 0.0
        return replace(first, bytes_per_second=rates)
    where = max(growths, key=lambda part: rates[part], default=None)
    return MemoryGrowth(rates, where, None if where is None else rates[where])


def _min_growth(size: float | None) -> float:
    """The minimum growth, in bytes, that counts for memory of a size."""
    return float(MIN_BYTES) if size is None else MIN_RATIO * size


def _end(exhausted: str, where: str | None, growth: Growth | None, free: float | None) -> MemoryGrowth | None:
    """The end of a memory by its growth; None if it is not in sight."""
    if growth is None or free is None or free > HORIZON * growth.seconds * growth.per_second:
        return None
    return MemoryGrowth({}, where, growth.per_second, free / growth.per_second, exhausted)


def _end_of_memory(
    histories: Mapping[str, Sequence[Reading]], free: float | None, growths: Mapping[str, Growth], minimum: float
) -> MemoryGrowth | None:
    """The end of the memory of the cgroup or the machine, which the parts of this run share with others."""
    used, own = histories.get(USED, ()), [growth for part, growth in growths.items() if part != CUDA]
    # The memory of others may go up and down while a part of this run grows.
    growth = lasting_growth(used, minimum) or max(own, key=lambda each: each.per_second, default=None)
    if growth is None or free is None:
        return None
    # A peak, such as a checkpoint, uses up the memory: the highest one since the growth began, moved along it.
    last = used[-1].seconds
    peak = max(each.value + growth.per_second * (last - each.seconds) for each in used if each.seconds >= growth.since)
    end = _end(MEMORY, None, growth, max(0.0, min(free, -peak)))
    since = {
        name: [reading for reading in histories.get(name, ()) if reading.seconds >= growth.since]
        for name in (TRAINING, WORKERS, SHARED_MEMORY, COPYABLE)
    }
    slopes = {name: _slope_of_stairs(readings) for name, readings in since.items() if len(readings) >= 4}
    copyable = slopes.pop(COPYABLE, 0.0)
    where = max(slopes, key=lambda part: slopes[part], default=None)
    if end is None or where is None or slopes[where] < MIN_SHARE * growth.per_second:
        return end
    copied = where == WORKERS and -copyable >= COPIED_SHARE * slopes[where]
    if copied and since[COPYABLE][-1].value < free:
        return None  # all that they can copy fits
    return replace(end, where=where, where_bytes_per_second=slopes[where], copied_on_write=copied)


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


# -- follows the memory of a run ---------------------------------------------------------------------------------------


class MemoryWatch:
    """Keeps the memory histories of one rank, and judges them."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}
        self._last: MemorySample | None = None
        self._judged_ns = 0
        self._changed = False
        self._growth: MemoryGrowth | None = None

    def tick(
        self,
        sample: MemorySample | None,
        gpu: GpuSample | None,
        allocator: TorchMemorySample | None,
        now: int | None = None,
    ) -> None:
        """Take a new reading, if there is one, and judge the histories if they have changed.

        Do not call it before the first step has ended: what a run needs at its start is not growth.

        Args:
            sample: the newest reading.
            gpu: that of the GPU.
            allocator: that of the CUDA allocator.
            now: monotonic nanoseconds.
        """
        if sample is None or sample is self._last:
            return
        self._last = sample
        now = now_ns() if now is None else now
        for name, value in _figures(sample, allocator).items():
            history = self._histories.setdefault(name, History(highest=name in {USED, SHARED_MEMORY_USED}))
            self._changed |= history.add(now / NS, value)
        if self._changed and now - self._judged_ns >= JUDGE_SECONDS * NS:
            self._changed, self._judged_ns = False, now
            readings = {name: history.readings for name, history in self._histories.items()}
            self._growth = memory_outlook(readings, _free(sample, gpu, allocator), sample.memory_limit_bytes)

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
            advice=_COPIED if growth.copied_on_write else _BY_PART.get(growth.where or ""),
        )


def _figures(sample: MemorySample, allocator: TorchMemorySample | None) -> dict[str, float]:
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
