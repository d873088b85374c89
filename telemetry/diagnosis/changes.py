"""Changes of the step time: the newest blocks of steps against the usual ones, in minutes and in hours.

A block is a stretch of the training loop with the means over its steps. Blocks of 2 s and more show steps that become
slower and slower within minutes, and the trend of a short run. Blocks of 30 s show lasting changes in hours.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, TypeVar

from telemetry.log.lines import ChangedFigure, ChangeLine
from telemetry.model.records import (
    COMPUTE_PARTS,
    FASTER,
    GROWS,
    SLOWER,
    STEADY,
    UNCLEAR,
    StepTrend,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.model.totals import Totals

# -- the numbers -------------------------------------------------------------------------------------------------------
# Measured by `benchmarks.change_series` (simulated loops) if no other test is named.

SHORT_SECONDS: Final = 2.0
"""Length of a short block at first: with ticks of 1 s, a run that keeps its graph is told after half a minute."""

MAX_SHORT_SECONDS: Final = 8.0
MAX_SHORT: Final = 128
"""If there are so many short blocks, neighbours are joined, up to 8 s. So the last quarter of an hour is known: 50 %
longer steps over 10 minutes are growth."""

LONG_SECONDS: Final = 30.0
STRETCH: Final = 8
"""Length of a long block, and how many make a stretch. Pauses of minutes, epochs with evaluations and a random mix of
sequence lengths leave the median block of a stretch as it is: no change in 45 days."""

FIRST_SECONDS: Final = 60.0
"""Steps so early do not show how long steps usually take: they fill caches and choose kernels. With them, growth in the
fifth minute is missed (`tests/test_changes.py`)."""

YOUNG_SECONDS: Final = 120.0
"""In so many seconds of training, steps can become twice as long within a few ticks."""

LENGTHS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Growth may have begun so many short blocks ago. Half as many lengths find 50 % over 10 minutes too late."""

MIN_BEFORE: Final = 3
"""Minimum of stretches before a change, so that none is found in the first quarter of an hour."""

RECENT: Final = 4
"""Stretches that must all be faster. Told after one, 9 of 40 runs that had not changed were called faster."""

MAX_STRETCHES: Final = 128
"""Stretches that are kept, of a run of any length. A week has 2,500."""

MIN_RATIO: Final = 1.05
MIN_GROWTH: Final = 1.30
"""Minimum factor of a change, and of growth within minutes. A warm-up that ends makes steps 20 % slower at times."""

CROWDED_CORES: Final = 0.15
CROWDED_GROWTH: Final = 2.0
"""Minimum growth if other programs use so many more cores: steps that have their core become slower, too
(`tests/test_changes.py`)."""

MIN_MEMORY_BYTES: Final = 4 << 20
"""Minimum growth of memory that is told with that of the steps. The graph of kept states is 15 MB (`tests.reports`)."""

MOST: Final = 0.75
NEARLY_ALL: Final = 0.96
"""Quantiles: most of the newest steps are beyond nearly all before. Stretches that are 10 % of a run hide no change."""

STANDS_OUT: Final = 0.1
"""Part of the change by which they are. Without it, recurring stretches of long sequences were 12 changes a day."""

MIN_CLEARNESS: Final = 4.0
"""Minimum change in standard deviations (MAD). With 4, a slow-down by 12 % in a loop of 5 % noise is found in 80 % of
the runs, with 5 in 65 %."""

MAX_FIGURES: Final = 5
MIN_DIFFERENCE: Final = {"other_cores": 0.2, "read_bytes_per_second": 1e5}
"""Number of figures that are told with a change, and minimum differences of some, in addition to `MIN_RATIO`."""

MAX_JUMP: Final = 0.46
"""Largest part of the growth within a quarter of its time. Two equal jumps have half of it, and steps that become
longer by the same amount each, from 0 on, 0.43."""

SHORT_RUN_SECONDS: Final = 900.0
"""A run with less time in its training loop gets a verdict on its trend: all of it is in short blocks."""


# -- blocks of steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the training loop, with the means over its steps.

    Attributes:
        at_seconds: its start on the clock of `Totals.wall_seconds`. ``at_loop_seconds``, ``at_step``: seconds of the
            training loop, and steps, before it.
        steps: number of steps that ended in it. ``data_wait_seconds``, ``compute_seconds``: of a step.
        figures: what may explain them, by name and without unknown ones.
    """

    at_seconds: float
    at_loop_seconds: float
    at_step: int
    steps: int
    data_wait_seconds: float
    compute_seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.data_wait_seconds + self.compute_seconds

    @property
    def loop_seconds(self) -> float:
        """Seconds of all its steps."""
        return self.steps * self.step_seconds

    def __add__(self, later: Block) -> Block:
        steps = self.steps + later.steps

        def mean(mine: float, theirs: float) -> float:
            return (self.steps * mine + later.steps * theirs) / steps

        both = self.figures.keys() & later.figures.keys()
        return replace(
            self,
            steps=steps,
            data_wait_seconds=mean(self.data_wait_seconds, later.data_wait_seconds),
            compute_seconds=mean(self.compute_seconds, later.compute_seconds),
            figures={
                **later.figures,
                **self.figures,
                **{name: mean(self.figures[name], later.figures[name]) for name in both},
            },
        )


class BlockBuilder:
    """Takes the totals of each tick, and returns a block when it is full.

    Args:
        seconds: length of a block in seconds of the training loop. It has one step at least.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start: Totals | None = None

    def add(self, totals: Totals, gauges: Mapping[str, float]) -> Block | None:
        """Add the totals and the gauges of a tick. Returns a block if one is full now."""
        start = self._start = self._start or totals
        passed = totals.passed_since(start)
        if passed.loop_seconds < self._seconds or passed.steps == 0:
            return None
        self._start, added = totals, totals - start
        steps, delay, cpu = added.steps, added.run_queue_delay_seconds, added.sampled.cpu
        workers, stacks = added.sampled.workers, added.stacks
        known = {
            "fetch_seconds": workers.fetch_busy_seconds / workers.fetches if workers.fetches else None,
            "read_bytes_per_second": added.sampled.read_bytes.mean,
            "other_cores": cpu.other_cores.mean,
            "cpu_throttled_ratio": cpu.throttled_ratio.mean,
            "garbage_ratio": added.garbage.seconds / added.loop_seconds,
            "waiting_for_ranks_ratio": stacks.in_sync / stacks.samples if stacks.samples else None,
            "core_wait_seconds": None if delay is None else delay / steps,
        }
        figures = {**gauges, **{name: value for name, value in known.items() if value is not None}}
        figures |= {f"{part}_seconds": spent / steps for part, spent in (added.compute_parts or {}).items()}
        wait = max(0.0, added.wait_seconds - added.epochs.boundary_wait_seconds)
        ended = max(0.0, wait + added.compute_seconds - added.open_step_seconds)  # long steps fit in no block exactly
        compute = min(ended, max(0.0, added.compute_seconds - added.open_step_seconds))
        at_loop_seconds = start.loop_seconds - start.open_step_seconds
        return Block(
            start.wall_seconds, at_loop_seconds, start.steps, steps, (ended - compute) / steps, compute / steps, figures
        )


def _steps(blocks: Iterable[Block]) -> list[float]:
    return [block.step_seconds for block in blocks]


# -- comparisons -------------------------------------------------------------------------------------------------------


def is_slower(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether most of the later steps take longer than nearly all of the earlier ones, by a part of the difference."""
    margin = STANDS_OUT * (median(after) - median(before))
    return quantile(after, 1 - MOST) > quantile(before, NEARLY_ALL) + margin


def is_faster(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether most of the later steps take less time than nearly all of the earlier ones."""
    return is_slower([-seconds for seconds in before], [-seconds for seconds in after])


def is_clear(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the medians differ by `MIN_RATIO`, and by much more than the earlier ones scatter (MAD)."""
    usual, level = median(before), median(after)
    few = 1 + 2 / len(before)  # a few values do not show how much they scatter
    apart = max(level, usual) >= MIN_RATIO * min(level, usual)
    return apart and abs(level - usual) >= MIN_CLEARNESS * few * deviation(before)


def grows(seconds: Sequence[float]) -> bool:
    """Whether steps become slower in each quarter, by much more than they scatter, and not by a jump."""
    eighths = levels(seconds, 8)
    grown = eighths[-1] - eighths[0]
    quarters = [one + two for one, two in zip(eighths[::2], eighths[1::2], strict=True)]
    if not all(earlier < later for earlier, later in pairwise(quarters)):
        return False
    in_quarter = max(later - earlier for earlier, later in zip(eighths, eighths[2:], strict=False))
    scatter = deviation([later - earlier for earlier, later in pairwise(seconds)])
    return in_quarter <= MAX_JUMP * grown and grown >= MIN_CLEARNESS * scatter * math.sqrt(2 * 8 / len(seconds))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation by the median absolute deviation (MAD), which no single value changes."""
    usual = median(values)
    return 1.4826 * median(abs(value - usual) for value in values)


def quantile(values: Sequence[float], share: float) -> float:
    """The value at a share of the number of sorted values."""
    return sorted(values)[round(share * (len(values) - 1))]


_Value = TypeVar("_Value")


def parts(values: Sequence[_Value], count: int) -> list[Sequence[_Value]]:
    """A series in equal parts."""
    bounds = [len(values) * part // count for part in range(count + 1)]
    return [values[begin:end] for begin, end in pairwise(bounds)]


def levels(values: Sequence[float], count: int) -> list[float]:
    """The medians of equal parts of a series."""
    return [median(part) for part in parts(values, count)]


# -- a change ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change of the step time.

    Attributes:
        at: the first block after it, or the first in which steps grow.
        before_seconds, after_seconds: duration of a step.
        part: the part of a step that changed most: ``data_wait`` or ``compute``.
        figures: what changed with it. The first is the seconds of that part in a step.
        grew_seconds: seconds of the training loop in which steps became slower and slower; 0 for another change.
    """

    at: Block
    before_seconds: float
    after_seconds: float
    part: str
    figures: tuple[ChangedFigure, ...]
    grew_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Step time after the change over step time before it."""
        return self.after_seconds / self.before_seconds

    def lost_ratio(self, totals: Totals) -> float:
        """The share of the training loop so far that the steps have taken longer than before the change."""
        ended = totals.loop_seconds - totals.open_step_seconds
        lost = ended - self.at.at_loop_seconds - (totals.steps - self.at.at_step) * self.before_seconds
        return min(1.0, max(0.0, lost / ended)) if ended > 0 else 0.0

    def line(self, at: str) -> ChangeLine:
        """The line of the log. ``at``: when it happened, ISO-8601."""
        return ChangeLine(
            at=at,
            first_step=self.at.at_step,
            ratio=round(self.ratio, 4),
            part=self.part,
            step_before_seconds=self.before_seconds,
            step_after_seconds=self.after_seconds,
            figures=[*self.figures],
        )


def change_between(
    at: Block,
    before: Sequence[Block],
    after: Sequence[Block],
    figures: Iterable[ChangedFigure],
    grew_seconds: float = 0.0,
) -> StepChange:
    """The change from some blocks to others, by their medians."""
    step, *of_step = (
        ChangedFigure(name, *(median(getattr(block, name) for block in side) for side in (before, after)))
        for name in ("step_seconds", "data_wait_seconds", "compute_seconds")
    )
    most = max(of_step, key=lambda part: abs(part.after - part.before))
    return StepChange(at, step.before, step.after, most.what.removesuffix("_seconds"), (most, *figures), grew_seconds)


# -- minutes: steps that become slower and slower, and the trend of a short run ----------------------------------------


class GrowthDetector:
    """Follows the steps of a run, tick by tick. Its memory is bounded.

    Attributes:
        growth: the growth that was found, up to the newest step in it; None without one.
    """

    def __init__(self) -> None:
        self._builder = BlockBuilder(SHORT_SECONDS)
        self._block_seconds = SHORT_SECONDS
        self._filling: Block | None = None
        self._blocks: list[Block] = []
        self._loop_seconds = 0.0
        self.growth: StepChange | None = None

    @property
    def is_young(self) -> bool:
        """Whether steps can still become twice as long within a few ticks."""
        return self._loop_seconds < YOUNG_SECONDS

    def tick(self, totals: Totals, gauges: Mapping[str, float]) -> bool:
        """Add the totals and the gauges of a tick. Returns whether `growth` is new or has gone on."""
        self._loop_seconds = totals.loop_seconds
        block = self._builder.add(totals, gauges)
        found = find_growth(self._blocks) if block is not None and self._keep(block) else None
        if found is not None:
            self.growth = found if self.growth is None else _continued(self.growth, found)
        return found is not None

    def trend(self) -> StepTrend | None:
        """The trend of a short run, without its first steps; None for longer runs, and if too few steps are known."""
        blocks = self._blocks if self._filling is None else [*self._blocks, self._filling]
        if self._loop_seconds >= SHORT_RUN_SECONDS or len(blocks) < LENGTHS[0]:
            return None
        judged = blocks[len(blocks) // 6 :]
        first, *_, last = parts(_steps(judged), 4)
        before, after = median(first), median(last)
        if max(before, after) < MIN_RATIO * min(before, after):
            kind = STEADY
        elif is_slower(first, last):
            kind = GROWS if find_growth(blocks, MIN_RATIO) is not None else SLOWER
        else:
            kind = FASTER if is_faster(first, last) else UNCLEAR
        return StepTrend(kind, before, after, sum(block.loop_seconds for block in judged))

    def _keep(self, block: Block) -> bool:
        """Add a block to those that are kept. Returns whether one is complete now."""
        self._filling = block if self._filling is None else self._filling + block
        if self._filling.loop_seconds < self._block_seconds:
            return False
        self._blocks.append(self._filling)
        self._filling = None
        if len(self._blocks) >= MAX_SHORT and self._block_seconds < MAX_SHORT_SECONDS:
            self._block_seconds *= 2
            self._blocks = [one + two for one, two in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
        elif len(self._blocks) > MAX_SHORT:
            del self._blocks[0]
        return True


def _continued(before: StepChange, now: StepChange) -> StepChange:
    """The growth found before with its newest end, if it has gone on."""
    if now.part != before.part or now.before_seconds < before.before_seconds:
        return now
    in_step = ChangedFigure(before.figures[0].what, before.figures[0].before, now.figures[0].after)
    grew = now.at.at_loop_seconds + now.grew_seconds - before.at.at_loop_seconds
    return replace(before, after_seconds=now.after_seconds, figures=(in_step, *now.figures[1:]), grew_seconds=grew)


def find_growth(blocks: Sequence[Block], at_least: float = MIN_GROWTH) -> StepChange | None:
    """The longest growth of the newest blocks by at least this factor; None if they do not grow.

    Steps must also grow without the time that others have cost, and be slower than nearly all steps before: a run that
    has been as slow in an earlier epoch, with the same order of batches, does not grow.
    """
    seconds = _steps(blocks)
    for length in reversed(LENGTHS):
        window = blocks[-length:]
        if len(window) < LENGTHS[0] or not grows(seconds[-length:]):
            continue
        own, early = _own_seconds(blocks), sum(block.at_loop_seconds < FIRST_SECONDS for block in blocks)
        usual, (first, *_, last) = own[early:-length], parts(own[-length:], 8)
        others = _quarters(window, "other_cores")  # they share caches and memory, which no clock shows
        needed = CROWDED_GROWTH if others and others[-1] - others[0] >= CROWDED_CORES else at_least
        if median(last) < needed * median(first) or (usual and not is_slower(usual, parts(own[-length:], 4)[-1])):
            continue
        begin, *_, end = parts(window, 8)
        grew_seconds = sum(block.loop_seconds for block in window)
        growth = change_between(window[0], begin, end, _grown_memory(window), grew_seconds)
        if growth.ratio >= at_least:
            return growth
    return None


def _own_seconds(blocks: Sequence[Block]) -> list[float]:
    """Seconds of a step in each block, without the time that other programs, other ranks or a low clock have cost."""
    clock = max((block.figures.get("gpu_clock_hertz", 0.0) for block in blocks), default=0.0)
    found = []
    for block in blocks:
        compute = block.compute_seconds - block.figures.get("core_wait_seconds", 0.0)
        compute *= 1 - block.figures.get("waiting_for_ranks_ratio", 0.0)
        compute *= block.figures.get("gpu_clock_hertz", clock) / clock if clock else 1.0
        found.append(block.data_wait_seconds + max(0.0, compute))
    return found


GROWN_MEMORY: Final = {
    "cuda_bytes": "the memory of the tensors on the GPU",
    "training_bytes": "the memory of the training process",
}
"""Figures that are told with growth only. A lasting change has a forecast of the memory beside it."""


def _grown_memory(window: Sequence[Block]) -> list[ChangedFigure]:
    """The memory that grew all the time. Tensors on the GPU come first: the process may grow with them."""
    for name in GROWN_MEMORY:
        known = _quarters(window, name)
        if known and known == sorted(set(known)) and known[-1] - known[0] >= MIN_MEMORY_BYTES:
            return [ChangedFigure(name, known[0], known[-1])]
    return []


def _quarters(window: Sequence[Block], name: str) -> list[float]:
    """The medians of a figure in the quarters of the window; empty if it is not known."""
    known = [block.figures[name] for block in window if name in block.figures]
    return levels(known, 4) if len(known) >= 4 else []


# -- hours: lasting changes --------------------------------------------------------------------------------------------


class ChangeDetector:
    """Finds lasting changes in the ticks of a run. Its memory is bounded.

    A stretch of `STRETCH` blocks counts as its median block, so no single pause is a change. Of all earlier stretches,
    an even sample is kept. Steps have become slower if the newest stretch is slower than nearly all of this sample,
    and clearly slower than those since the last change. So stretches of long sequences that come again are no change.

    Attributes:
        ratio: step time now over step time before the slow-down that lasts; 1 without one, and None while too few
            blocks are known.
    """

    def __init__(self) -> None:
        self._builder = BlockBuilder(LONG_SECONDS)
        self._newest: list[Block] = []
        self._stretches: list[Block] = []
        self._seen = 0  # stretches, of which some are kept
        self._random = random.Random(0)  # noqa: S311 - a generator of its own: the script's may be seeded
        self._since = 0.0  # when the steps have changed last
        self._usual: float | None = None  # seconds of a step before the slow-down that lasts
        self._undone_below = 0.0  # seconds of a step
        self.ratio: float | None = None

    def tick(self, totals: Totals, gauges: Mapping[str, float]) -> StepChange | None:
        """Add the totals and gauges of a tick. Returns the change that they confirm."""
        block = self._builder.add(totals, gauges)
        return None if block is None else self.add(block)

    def add(self, block: Block) -> StepChange | None:
        """Add a block. Returns the change that it confirms."""
        self._newest.append(block)
        if len(self._newest) == 2 * STRETCH:
            self._remember()
        if len(self._newest) < STRETCH or len(self._stretches) < MIN_BEFORE:
            return None
        newest = self._newest[-STRETCH:]
        self.ratio = 1.0 if self._usual is None else median(_steps(newest)) / self._usual
        own = self._since_change()
        slow = [*own, *self._newest[:-STRETCH]]
        if self._usual is not None and slow and quantile(_steps(newest), MOST) < self._undone_below:
            return self._changed(slow, newest)
        third = len(own) // 3
        # The newest stretch shows a slow-down soon. To tell that steps are faster takes some stretches. Steps that
        # have become slower all the time since the last change differ between the first and the last third.
        for before, after in ((own, newest), (own[:-RECENT], own[-RECENT:]), (own[:third], own[len(own) - third :])):
            if len(before) < MIN_BEFORE or not is_clear(_steps(before), _steps(after)):
                continue
            known = [stretch for stretch in self._stretches if stretch.at_seconds < after[0].at_seconds]
            faster = after is not newest and is_faster(_steps(before), _steps(after))
            if faster or is_slower(_steps(known), _steps(after)):
                return self._changed(before, after)
        return None

    def _since_change(self) -> list[Block]:
        return [stretch for stretch in self._stretches if stretch.at_seconds >= self._since]

    def _changed(self, before: Sequence[Block], after: Sequence[Block]) -> StepChange:
        """The change between these blocks. The blocks since then are the measure from now on."""
        usual, level = median(_steps(before)), median(_steps(after))
        blocks = [*self._since_change(), *self._newest]
        past = [(block.step_seconds > (usual + level) / 2) == (level > usual) for block in blocks]
        # The place with the fewest blocks on the wrong side.
        places = range(1, len(blocks) - STRETCH // 2 + 1)
        place = min(places, key=lambda at: past[:at].count(True) + past[at:].count(False))
        self._since = blocks[place].at_seconds
        after = [block for block in after if block.at_seconds >= self._since] or after
        self._newest = [block for block in self._newest if block.at_seconds >= self._since]
        known = [stretch for stretch in self._stretches if stretch.at_seconds < self._since]
        if is_faster(_steps(known), _steps(after)):  # faster than ever: what was before is no measure any more
            self._stretches = self._since_change()
            self._seen = len(self._stretches)
        if level > usual:
            self._usual = usual if self._usual is None else self._usual
        elif level < self._undone_below:
            self._usual = None
        level = median(_steps(after))
        self._undone_below = 0.0 if self._usual is None else (self._usual + level) / 2
        self.ratio = 1.0 if self._usual is None else level / self._usual
        return change_between(blocks[place], before, after, _changed_figures(blocks[:place], blocks[place:]))

    def _remember(self) -> None:
        """Put the oldest of the newest blocks into the sample of stretches, as their median block."""
        stretch = sorted(self._newest[:STRETCH], key=lambda block: block.step_seconds)[STRETCH // 2]
        del self._newest[:STRETCH]
        self._seen += 1
        if len(self._stretches) == MAX_STRETCHES:  # each stretch so far is kept with the same probability
            place = self._random.randrange(self._seen)
            if place >= MAX_STRETCHES:
                return
            del self._stretches[place]
        self._stretches.append(stretch)


def _changed_figures(before: Sequence[Block], after: Sequence[Block]) -> list[ChangedFigure]:
    """The figures that changed with the steps, the largest change first. Of the compute's parts, only the largest."""
    found: list[tuple[float, ChangedFigure]] = []
    for name in sorted({name for block in after for name in block.figures} - GROWN_MEMORY.keys()):
        then, now = ([block.figures[name] for block in side if name in block.figures] for side in (before, after))
        if min(len(then), len(now)) < MIN_BEFORE:
            continue
        figure = ChangedFigure(name, median(then), median(now))
        low, high = sorted((figure.before, figure.after))
        size = high - low if name.endswith("_ratio") else high / low - 1 if low > 0 else high
        outside = not quantile(then, 0.1) <= figure.after <= quantile(then, 0.9)
        if outside and size >= MIN_RATIO - 1 and high - low >= MIN_DIFFERENCE.get(name, 0.0):
            found.append((size, figure))
    figures = [figure for _, figure in sorted(found, key=lambda each: each[0], reverse=True)]
    of_compute = [each for each in figures if each.what.removesuffix("_seconds") in COMPUTE_PARTS]
    smaller = sorted(of_compute, key=lambda each: abs(each.after - each.before))[:-1]
    return [each for each in figures if each not in smaller][:MAX_FIGURES]
