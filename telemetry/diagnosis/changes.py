"""Finds lasting changes of the duration of steps: sudden changes and slow drifts."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.records import CHECKPOINT, COMPUTE, COMPUTE_PARTS, DATA_WAIT, EVALUATION

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from telemetry.totals import Totals


# -- loop blocks -------------------------------------------------------------------------------------------------------
# They join ticks to blocks of the training loop, to measure the steps without occasional interruptions of the loop.

BLOCK_SECONDS: Final = 30.0
"""Length of a block in seconds of the training loop. Single pauses, and long sequences between short ones, are a small
part of such a block."""

BLOCK_STEPS: Final = 8
"""Least steps in a block, however long they take."""

FIRST_SECONDS: Final = 60.0
"""This time at the start belongs to no block: its steps fill caches, start workers and choose kernels."""

SETTLE_TICKS: Final = 3
"""After an epoch boundary, an evaluation or a checkpoint, this many ticks belong to no block."""

RARE_SECONDS: Final = 120.0
"""Interruptions that are more frequent than this are part of the loop."""


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """A stretch of the training loop.

    Attributes:
        at_seconds: start of the block on the clock of `Totals.wall_seconds`. ``step``: number of steps before it.
        steps: number of steps that ended in it. ``wait_seconds``, ``compute_seconds``: their sums over these steps.
        at_loop_seconds: seconds of the training loop before it.
        signals: means of sampled figures by name, without unknown ones.
        held_slow, held_fast: step time that most of several blocks in a row exceeded, or stayed below. The means of
            joined blocks do not show them. Without any, they are 0 and infinite.
    """

    at_seconds: float
    step: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    signals: Mapping[str, float] = field(default_factory=dict)
    at_loop_seconds: float = 0.0
    held_slow: float = 0.0
    held_fast: float = math.inf

    @property
    def loop_seconds(self) -> float:
        """Seconds of its steps."""
        return self.wait_seconds + self.compute_seconds

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return self.loop_seconds / self.steps

    def __add__(self, later: LoopBlock) -> LoopBlock:
        share = self.steps / (self.steps + later.steps)
        both = self.signals.keys() & later.signals.keys()
        mean = {name: share * self.signals[name] + (1 - share) * later.signals[name] for name in both}
        return LoopBlock(
            self.at_seconds,
            self.step,
            self.steps + later.steps,
            self.wait_seconds + later.wait_seconds,
            self.compute_seconds + later.compute_seconds,
            {**later.signals, **self.signals, **mean},
            self.at_loop_seconds,
            max(self.held_slow, later.held_slow),
            min(self.held_fast, later.held_fast),
        )


class BlockBuilder:
    """Takes the totals of each tick, and returns a block when it is full.

    Args:
        seconds: length of a block in seconds of the training loop.
        least_steps: least steps in a block, however long they take.
        first_seconds: this time at the start belongs to no block.
    """

    def __init__(self, seconds: float, *, least_steps: int, first_seconds: float = 0.0) -> None:
        self._seconds, self._least_steps, self._first_seconds = seconds, least_steps, first_seconds
        self._start: Totals | None = None
        self._signals: dict[str, tuple[float, int]] = {}
        self._interruptions = (0, 0.0)
        self._interrupted_at = 0.0
        self._settling = 0

    def add(self, totals: Totals, signals: Mapping[str, float]) -> LoopBlock | None:
        """Add the totals and sampled figures of a tick. Returns a block if one is full now."""
        if self._rare_interruption(totals):
            # The block in progress is not used: the interruption may have begun in it.
            self._start, self._settling = None, SETTLE_TICKS
        elif self._settling or totals.loop_seconds < self._first_seconds:
            self._settling = max(0, self._settling - 1)
        elif self._start is None:
            self._start, self._signals = totals, {}
        else:
            for name, value in signals.items():
                total, count = self._signals.get(name, (0.0, 0))
                self._signals[name] = (total + value, count + 1)
            passed = totals.passed_since(self._start)
            if passed.loop_seconds >= self._seconds and passed.steps >= self._least_steps:
                return self._take(totals, self._start)
        return None

    def _rare_interruption(self, totals: Totals) -> bool:
        epochs, ledger = totals.epochs, totals.ledger_seconds
        now = epochs.boundaries + epochs.left, ledger.get(EVALUATION, 0.0) + ledger.get(CHECKPOINT, 0.0)
        if now == self._interruptions:
            return False
        rare = totals.loop_seconds - self._interrupted_at >= RARE_SECONDS
        self._interruptions, self._interrupted_at = now, totals.loop_seconds
        return rare

    def _take(self, totals: Totals, start: Totals) -> LoopBlock:
        """The block from ``start`` on, with the sampled figures and those that come from counters."""
        added = totals - start
        workers, cpu, own, delay = added.sampled.workers, added.sampled.cpu, added.own, added.run_queue_delay_seconds
        known = {
            "fetch_seconds": workers.fetch_busy_seconds / workers.fetches if workers.fetches else None,
            "read_bytes_per_second": added.sampled.read_bytes.mean,
            "other_cores": cpu.other_cores.mean,
            "cpu_throttled_ratio": cpu.throttled_ratio.mean,
            "garbage_ratio": added.garbage.seconds / added.loop_seconds if added.loop_seconds > 0 else None,
            "waiting_for_ranks_ratio": own.in_sync_samples / own.stack_samples if own.stack_samples else None,
            "core_wait_seconds": None if delay is None else delay / added.steps,
        }
        signals = {name: total / count for name, (total, count) in self._signals.items()}
        signals |= {name: value for name, value in known.items() if value is not None}
        signals |= {f"{part}_seconds": spent / added.steps for part, spent in (added.compute_parts or {}).items()}
        self._start, self._signals = totals, {}
        wait = max(0.0, added.wait_seconds - added.epochs.boundary_wait_seconds)
        ended = max(0.0, wait + added.compute_seconds - added.open_step_seconds)  # long steps fit in no block exactly
        compute = min(ended, max(0.0, added.compute_seconds - added.open_step_seconds))
        at = start.loop_seconds - start.open_step_seconds
        return LoopBlock(start.wall_seconds, start.steps, added.steps, ended - compute, compute, signals, at)


# -- finds lasting changes of the duration of steps: sudden changes and slow drifts ------------------------------------
# All blocks of the run are kept, and old ones are joined in pairs. So their number stays small, and a run of weeks is
# remembered to its start. A change must be clear against the scatter of the blocks, where neighbours are similar. And
# steps must take longer than nearly all steps before: if the run has been as slow before, it has not changed. So
# neither a recurring mix of short and long sequences nor a single pause, however long, is a change. Joined blocks
# remember how long steps took in stretches that are shorter than they are.

MIN_RATIO: Final = 1.05
"""A smaller ratio of step times is not reported."""

MIN_CLEARNESS: Final = 6.0
"""Least difference of the medians in standard errors. It is high because each block is judged at many places."""

MIN_BEFORE: Final = 20
MIN_AFTER: Final = 8
"""Least blocks on each side of a change."""

MIN_DRIFT: Final = 60
"""Least blocks for a drift: the first third of them is compared with the last."""

_LENGTHS: Final = (8, 11, 16, 22, 32, 45, 64)
_NEAR: Final = 12
"""How many blocks may be after a change, and how far from the best of these places the exact one is searched. To judge
every place would take milliseconds."""

MAX_RECENT: Final = 40
MAX_OLD: Final = 80
"""Blocks that are kept: the newest as they are, and the old ones joined."""

_OFTEN: Final = 0.75
_RARELY: Final = 0.04
_NEW: Final = 1.01
"""Most blocks after a change take longer, by this factor, than most blocks before it."""

_AGAIN: Final = 1.03
"""Blocks of recurring stretches differ by up to this factor."""

_UNDONE: Final = 0.4
"""A slow-down is undone if most of the newest steps have kept less than this share of it."""

_MIN_SCATTER: Final = 0.01
_MAX_CORRELATION: Final = 0.97
_FEW: Final = 6
"""The correction of the correlation's bias is not defined for so few values. A trend of half a minute has six."""

_ROUNDING: Final = 1e-9

MAX_COMPANIONS: Final = 5

_MIN_COMPANION_RATIO: Final = 1.05
_MIN_COMPANION_SHARE: Final = 0.05
"""A share of the time has changed with the steps if it differs by this much; any other figure by that factor."""

_PARTS: Final = tuple(f"{part}_seconds" for part in COMPUTE_PARTS)
"""Seconds of a step by part of the compute. Only the part that has changed most is told."""

_COMPANION_MINIMA: Final = {"other_cores": 0.2, "read_bytes_per_second": 1e5}
"""Least differences of these figures in addition to the factor."""


class Companion(NamedTuple):
    """A figure that changed together with the steps, before and after. Its name contains its unit."""

    what: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StepChange:
    """One lasting change.

    Attributes:
        at_seconds: time of the change on the clock of `Totals.wall_seconds`. ``step``: the first step after it.
        before_seconds, after_seconds: median duration of a step.
        part: the part of a step that changed most: ``data_wait`` or ``compute``.
        companions: figures that changed with it. The first is the seconds of that part in a step.
    """

    at_seconds: float
    step: int
    before_seconds: float
    after_seconds: float
    part: str
    companions: tuple[Companion, ...] = ()

    @property
    def ratio(self) -> float:
        """Step time after the change over step time before it."""
        return self.after_seconds / self.before_seconds


class ChangeDetector:
    """Finds changes in the blocks that the agent thread adds. Its memory is bounded.

    Attributes:
        ratio: step time now over step time before the slow-down that lasts; 1 without one, and None while too few
            blocks are known.
    """

    def __init__(self) -> None:
        self._builder = BlockBuilder(BLOCK_SECONDS, least_steps=BLOCK_STEPS, first_seconds=FIRST_SECONDS)
        self._old: list[LoopBlock] = []
        self._recent: list[LoopBlock] = []
        self._newest_old: deque[float] = deque(maxlen=MIN_AFTER)  # step times of the newest blocks that became old
        self._since = 0.0  # earlier blocks were judged already
        self._usual: float | None = None  # seconds of a step before the slow-down that lasts
        self._undone_below = 0.0
        self.ratio: float | None = None

    def tick(self, totals: Totals, signals: Mapping[str, float]) -> StepChange | None:
        """Add the totals and sampled figures of a tick. Returns the change that they confirm."""
        block = self._builder.add(totals, signals)
        return None if block is None else self.add(block)

    def add(self, block: LoopBlock) -> StepChange | None:
        """Add a block. Returns the change that it confirms."""
        self._recent.append(block)
        if len(self._recent) > MAX_RECENT:
            self._old.append(self._with_held(self._recent.pop(0)))
            if len(self._old) > MAX_OLD:  # neighbours are joined; of an odd number the newest stays as it is
                pairs = [one + two for one, two in zip(self._old[::2], self._old[1::2], strict=False)]
                self._old = pairs + self._old[2 * len(pairs) :]
        known = [*self._old, *self._recent]
        if len(known) < MIN_BEFORE + MIN_AFTER:
            return None
        newest = known[-MIN_AFTER:]
        self.ratio = 1.0 if self._usual is None else _level(newest) / self._usual
        if self._usual is not None and _quantile([each.step_seconds for each in newest], _OFTEN) < self._undone_below:
            before = [each for each in known if self._since <= each.at_seconds < newest[0].at_seconds]
            self._usual, self.ratio, self._since = None, 1.0, newest[0].at_seconds
            return _described(before, newest, newest[0])
        first = next((at for at, each in enumerate(known) if each.at_seconds >= self._since), len(known))
        place = find_change(known, first)
        if place is None:
            return None
        before, after = known[first : place.start], known[place.end :]
        change = _described(before, after, known[place.start])
        self._since = known[place.end].at_seconds
        if change.ratio < 1:  # faster than ever: earlier blocks are no measure any more
            self._old, self._recent, self._usual, self.ratio = [], after, None, 1.0
            self._newest_old.clear()
        else:
            self._usual = change.before_seconds if self._usual is None else self._usual
            self._undone_below = self._usual + _UNDONE * (change.after_seconds - self._usual)
            self.ratio = change.after_seconds / self._usual
        return change

    def _with_held(self, block: LoopBlock) -> LoopBlock:
        """Add the quantiles of the newest old blocks to a block that becomes old."""
        self._newest_old.append(block.step_seconds)
        if len(self._newest_old) < MIN_AFTER:
            return block
        slow, fast = _quantile(self._newest_old, 1 - _OFTEN), _quantile(self._newest_old, _OFTEN)
        return replace(block, held_slow=slow, held_fast=fast)


class Place(NamedTuple):
    """The place of a change: blocks before ``start`` and from ``end`` on differ. Only for a drift the two are apart."""

    start: int
    end: int


def find_change(blocks: Sequence[LoopBlock], first: int = 0) -> Place | None:
    """The place at which steps changed for good; None if they did not.

    Args:
        blocks: all known blocks, the oldest first.
        first: the first block after the last change. The blocks before it only show what is not new.
    """
    seconds = [block.step_seconds for block in blocks]
    best, clearest = None, MIN_CLEARNESS
    size = len(seconds) - first
    third = size // 3
    places = [Place(at, at) for length in _LENGTHS if (at := len(seconds) - length) >= first + MIN_AFTER]
    if size >= MIN_DRIFT:
        places.append(Place(first + third, len(seconds) - third))
    for place in places:
        if place.start < MIN_BEFORE:
            continue
        before, after = seconds[first : place.start], seconds[place.end :]
        ratio = median(after) / median(before)
        if not 1 / MIN_RATIO < ratio < MIN_RATIO and _is_new(blocks[: place.start], after):
            clear = clearness(before, after, drift=place.start != place.end)
            if clear > clearest:
                best, clearest = place, clear
    if best is None or best.start != best.end:
        return best

    def scatter(at: int) -> float:
        sides = seconds[first:at], seconds[at:]
        return sum(abs(value - middle) for side in sides for middle in (median(side),) for value in side)

    low, high = max(first + MIN_AFTER // 2, best.start - _NEAR), min(len(seconds) - MIN_AFTER // 2, best.start + _NEAR)
    exact = min(range(low, high + 1), key=scatter)  # the place near by that leaves least scatter on both sides
    return Place(exact, exact)


def _is_new(before: Sequence[LoopBlock], after: Sequence[float]) -> bool:
    """Whether the blocks after a place take longer than nearly all blocks before it, or less time than nearly all."""
    usual = median(each.step_seconds for each in before)
    slow = [max(each.step_seconds, each.held_slow * _scatter(each.held_slow, usual)) for each in before]
    fast = [min(each.step_seconds, each.held_fast / _scatter(usual, each.held_fast)) for each in before]
    slower = _quantile(after, 1 - _OFTEN) > _NEW * _quantile(slow, 1 - _RARELY)
    return slower or _NEW * _quantile(after, _OFTEN) < _quantile(fast, _RARELY)


def _scatter(longer: float, shorter: float) -> float:
    """The factor by which a stretch may differ from an earlier one and be the same; 1 for small differences."""
    return _AGAIN if longer > MIN_RATIO * shorter else 1.0


def clearness(before: Sequence[float], after: Sequence[float], *, drift: bool = False) -> float:
    """The difference of two medians in standard errors, which are larger because neighbours are similar.

    ``drift``: the values drift on both sides, too, which is no scatter.
    """
    usual, level = median(before), median(after)
    sides = [[value - middle for value in side] for side, middle in ((before, usual), (after, level))]
    sides = [_without_drift(side) for side in sides] if drift else sides
    scatter = max(1.4826 * median(abs(value) for side in sides for value in side), _MIN_SCATTER * usual)
    clipped = [[max(-3 * scatter, min(3 * scatter, value)) for value in side] for side in sides]
    alike = correlation(clipped, at_most=_MAX_CORRELATION)
    error = 1.2533 * scatter * math.sqrt((1 + alike) / (1 - alike) * (1 / len(before) + 1 / len(after)))
    return abs(level - usual) / error


def correlation(sides: Sequence[Sequence[float]], *, at_most: float, caution: float = 0.0) -> float:
    """The correlation of neighbours in two series, corrected for its bias in short series (Kendall 1954).

    ``caution``: number of standard errors to add.
    """
    count = sum(map(len, sides))
    squares = sum(value * value for side in sides for value in side)
    products = sum(one * next_ for side in sides for one, next_ in pairwise(side))
    if squares <= 0:
        return 0.0
    found = products / squares + 2 / count
    if count <= _FEW:  # so few do not tell how large it is
        return at_most if found > _ROUNDING else 0.0
    found /= 1 - _FEW / count
    return min(at_most, max(0.0, found + caution / math.sqrt(count)))


def _without_drift(values: Sequence[float]) -> list[float]:
    """The values without a straight line through the levels of their halves."""
    half = len(values) // 2
    slope = (median(values[-half:]) - median(values[:half])) / (len(values) - half)
    return [value - slope * (place - (len(values) - 1) / 2) for place, value in enumerate(values)]


def _described(before: Sequence[LoopBlock], after: Sequence[LoopBlock], at: LoopBlock) -> StepChange:
    waits, computes = zip(part_levels(before), part_levels(after), strict=True)
    by_wait = abs(waits[1] - waits[0]) >= abs(computes[1] - computes[0])
    part = DATA_WAIT if by_wait else COMPUTE
    in_step = Companion(f"{part}_seconds", *(waits if by_wait else computes))
    return StepChange(
        at_seconds=at.at_seconds,
        step=at.step,
        before_seconds=_level(before),
        after_seconds=_level(after),
        part=part,
        companions=(in_step, *_companions(before, after)),
    )


def _companions(before: Sequence[LoopBlock], after: Sequence[LoopBlock]) -> list[Companion]:
    """The figures that changed with the steps, the largest change first."""
    found: list[tuple[float, Companion]] = []
    for name in {name for block in after for name in block.signals}:
        then = [block.signals[name] for block in before if name in block.signals]
        now = [block.signals[name] for block in after if name in block.signals]
        if len(then) < MIN_AFTER // 2 or len(now) < MIN_AFTER // 2:
            continue
        companion = Companion(name, median(then), median(now))
        low, high = sorted((companion.before, companion.after))
        share = name.endswith("_ratio")
        size = high - low if share else high / low - 1 if low > 0 else high
        enough = size >= (_MIN_COMPANION_SHARE if share else _MIN_COMPANION_RATIO - 1)
        outside = not _quantile(then, 0.1) <= companion.after <= _quantile(then, 0.9)
        if enough and outside and high - low >= _COMPANION_MINIMA.get(name, 0.0):
            found.append((size, companion))
    found.sort(key=lambda each: -each[0])
    companions = [companion for _, companion in found]
    parts = sorted((each for each in companions if each.what in _PARTS), key=lambda each: abs(each.after - each.before))
    return [each for each in companions if each not in parts[:-1]][:MAX_COMPANIONS]


def part_levels(blocks: Sequence[LoopBlock]) -> tuple[float, float]:
    """The median wait and the median compute of a step."""
    waits = median(block.wait_seconds / block.steps for block in blocks)
    return waits, median(block.compute_seconds / block.steps for block in blocks)


def _level(blocks: Sequence[LoopBlock]) -> float:
    return median(block.step_seconds for block in blocks)


def _quantile(values: Collection[float], share: float) -> float:
    """The value at a share of the number of sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
