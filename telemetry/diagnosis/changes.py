"""Changes of the step time: the newest blocks of steps against the usual ones, in minutes and in hours.

A block is a stretch of the training loop with the mean of its steps. Blocks of 2 s and more show steps that become
slower and slower within minutes, and the trend of a short run. Blocks of 30 s show lasting changes in hours.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from telemetry.diagnosis.findings import Finding
from telemetry.model.records import (
    COMPUTE,
    COMPUTE_PARTS,
    DATA_WAIT,
    FASTER,
    GROWS,
    SLOWER,
    STEADY,
    UNCLEAR,
    Advice,
    StepTrend,
)
from telemetry.util.words import byte_size, duration, rough_duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.diagnosis.hot_lines import LineShare
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
fifth minute is missed (`tests/test_growth.py`)."""

LENGTHS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Growth may have begun so many short blocks ago. Half as many lengths find 50 % over 10 minutes too late."""

MIN_BEFORE: Final = 3
"""Least stretches before a change, so that none is found in the first quarter of an hour."""

RECENT: Final = 4
"""Stretches that must all be faster. Told after one, 9 of 40 runs that had not changed were called faster."""

MAX_STRETCHES: Final = 128
"""Stretches that are kept, of a run of any length. A week has 2,500."""

MIN_RATIO: Final = 1.05
MIN_GROWTH: Final = 1.30
"""Least factor of a change, and of growth within minutes. A warm-up that ends makes steps 20 % slower at times."""

CROWDED: Final = {"other_cores": 0.15, "cpu_throttled_ratio": 0.1}
CROWDED_GROWTH: Final = 2.0
"""Least growth if other programs use so many more cores, or the quota is used up so much more often: steps that have
their core become slower, too (`tests/test_growth.py`)."""

UNDONE_GROWTH: Final = 0.9
"""Growth from a step that is shorter than this part of the first one is another growth."""

MIN_MEMORY_BYTES: Final = 4 << 20
"""Least growth of memory that is told with that of the steps. The graph of kept states is 15 MB (`tests.reports`)."""

MOST: Final = 0.75
NEARLY_ALL: Final = 0.96
"""Quantiles: most of the newest steps are beyond nearly all before. Stretches that are 10 % of a run hide no change."""

STANDS_OUT: Final = 0.1
"""Part of the change by which they are. Without it, recurring stretches of long sequences were 12 changes a day."""

MIN_CLEARNESS: Final = 4.0
"""Least change in standard deviations (MAD). With 4, a slow-down by 12 % in a loop of 5 % noise is found in 80 % of the
runs, with 5 in 65 %."""

MIN_SCATTER: Final = 0.01
"""Least standard deviation, relative. Without it, three alike stretches gave false alarms in 1 of 20 noisy runs."""

UNDONE: Final = 0.4
"""A slow-down is undone if most of the newest steps have kept less than this part of it."""

MAX_COMPANIONS: Final = 5
MIN_COMPANIONS: Final = {"other_cores": 0.2, "read_bytes_per_second": 1e5}
"""Number of figures that are told with a change, and least differences of some, in addition to `MIN_RATIO`."""

MAX_JUMP: Final = 0.46
"""Largest part of the growth within a quarter of its time. Two equal jumps have half of it, and steps that become
longer by the same amount each, from 0 on, 0.43."""

SHORT_RUN_SECONDS: Final = 900.0
"""A run with less time in its training loop gets a verdict on its trend: all of it is in short blocks."""


# -- blocks of steps ---------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of a step, and those of its two parts."""

    step: float
    wait: float
    compute: float


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the training loop.

    Attributes:
        at_seconds: its start on the clock of `Totals.wall_seconds`. ``step``, ``at_loop_seconds``: number of steps, and
            seconds of the training loop, before it.
        steps: number of steps that ended in it. ``wait_seconds``, ``compute_seconds``: their sums over these steps.
        signals: figures by name, without unknown ones: means of counters, and gauges at its end.
    """

    at_seconds: float
    step: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    signals: Mapping[str, float] = field(default_factory=dict)
    at_loop_seconds: float = 0.0

    @property
    def loop_seconds(self) -> float:
        """Seconds of its steps."""
        return self.wait_seconds + self.compute_seconds

    @property
    def times(self) -> Times:
        """The means over its steps."""
        return Times(self.loop_seconds / self.steps, self.wait_seconds / self.steps, self.compute_seconds / self.steps)

    def __add__(self, later: Block) -> Block:
        share = self.steps / (self.steps + later.steps)
        both = self.signals.keys() & later.signals.keys()
        mean = {name: share * self.signals[name] + (1 - share) * later.signals[name] for name in both}
        return replace(
            self,
            steps=self.steps + later.steps,
            wait_seconds=self.wait_seconds + later.wait_seconds,
            compute_seconds=self.compute_seconds + later.compute_seconds,
            signals={**later.signals, **self.signals, **mean},
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
        workers, cpu, stacks, delay = (
            added.sampled.workers,
            added.sampled.cpu,
            added.stacks,
            added.run_queue_delay_seconds,
        )
        known = {
            "fetch_seconds": workers.fetch_busy_seconds / workers.fetches if workers.fetches else None,
            "read_bytes_per_second": added.sampled.read_bytes.mean,
            "other_cores": cpu.other_cores.mean,
            "cpu_throttled_ratio": cpu.throttled_ratio.mean,
            "garbage_ratio": added.garbage.seconds / added.loop_seconds if added.loop_seconds > 0 else None,
            "waiting_for_ranks_ratio": stacks.in_sync / stacks.samples if stacks.samples else None,
            "core_wait_seconds": None if delay is None else delay / added.steps,
        }
        signals = {**gauges, **{name: value for name, value in known.items() if value is not None}}
        signals |= {f"{part}_seconds": spent / added.steps for part, spent in (added.compute_parts or {}).items()}
        wait = max(0.0, added.wait_seconds - added.epochs.boundary_wait_seconds)
        ended = max(0.0, wait + added.compute_seconds - added.open_step_seconds)  # long steps fit in no block exactly
        compute = min(ended, max(0.0, added.compute_seconds - added.open_step_seconds))
        at = start.loop_seconds - start.open_step_seconds
        return Block(start.wall_seconds, start.steps, added.steps, ended - compute, compute, signals, at)


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
    scatter = max(1.4826 * median(abs(seconds - usual) for seconds in before), MIN_SCATTER * usual)
    few = 1 + 2 / len(before)  # a few values do not show how much they scatter
    apart = max(level, usual) >= MIN_RATIO * min(level, usual)
    return apart and abs(level - usual) >= MIN_CLEARNESS * few * scatter


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


def grows(seconds: Sequence[float]) -> bool:
    """Whether steps become slower in each quarter, by much more than they scatter, and not by a jump."""
    eighths = levels(seconds, 8)
    grown = eighths[-1] - eighths[0]
    quarters = [one + two for one, two in zip(eighths[::2], eighths[1::2], strict=True)]
    if not all(earlier < later for earlier, later in pairwise(quarters)):
        return False
    in_quarter = max(later - earlier for earlier, later in zip(eighths, eighths[2:], strict=False))
    apart = [later - earlier for earlier, later in pairwise(seconds)]
    usual = median(apart)
    scatter = 1.4826 * median(abs(each - usual) for each in apart)
    return in_quarter <= MAX_JUMP * grown and grown >= MIN_CLEARNESS * scatter * math.sqrt(2 * 8 / len(seconds))


# -- a change ----------------------------------------------------------------------------------------------------------


class Companion(NamedTuple):
    """A figure that changed together with the steps, before and after. Its name contains its unit."""

    what: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StepChange:
    """A change of the step time.

    Attributes:
        at: the first block after it, or the first in which steps grow.
        before_seconds, after_seconds: duration of a step.
        part: the part of a step that changed most: ``data_wait`` or ``compute``.
        companions: figures that changed with it. The first is the seconds of that part in a step.
        grew_seconds: seconds of the training loop in which steps became slower and slower; 0 for another change.
    """

    at: Block
    before_seconds: float
    after_seconds: float
    part: str
    companions: tuple[Companion, ...]
    grew_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Step time after the change over step time before it."""
        return self.after_seconds / self.before_seconds

    def lost_ratio(self, totals: Totals) -> float:
        """The share of the training loop so far that the steps have taken longer than before the change."""
        ended = totals.loop_seconds - totals.open_step_seconds
        lost = ended - self.at.at_loop_seconds - (totals.steps - self.at.step) * self.before_seconds
        return min(1.0, max(0.0, lost / ended)) if ended > 0 else 0.0


def _described(
    at: Block, before: Times, after: Times, companions: Iterable[Companion], grew_seconds: float = 0.0
) -> StepChange:
    part, in_step = COMPUTE, Companion("compute_seconds", before.compute, after.compute)
    if abs(after.wait - before.wait) >= abs(after.compute - before.compute):
        part, in_step = DATA_WAIT, Companion("data_wait_seconds", before.wait, after.wait)
    return StepChange(at, before.step, after.step, part, (in_step, *companions), grew_seconds)


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

    def tick(self, totals: Totals, gauges: Mapping[str, float]) -> None:
        """Add the totals and the gauges of a tick."""
        self._loop_seconds = totals.loop_seconds
        block = self._builder.add(totals, gauges)
        if block is not None and self._keep(block):
            found = find_growth(self._blocks)
            if found is not None:
                self.growth = found if self.growth is None else _continued(self.growth, found)

    def trend(self) -> StepTrend | None:
        """The trend of a short run; None for longer runs, and if too few steps are known."""
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
    if now.part != before.part or now.before_seconds < UNDONE_GROWTH * before.before_seconds:
        return now
    in_step = before.companions[0]._replace(after=now.companions[0].after)
    companions = (in_step, *now.companions[1:])
    grew = now.at.at_loop_seconds + now.grew_seconds - before.at.at_loop_seconds
    return replace(before, after_seconds=now.after_seconds, companions=companions, grew_seconds=grew)


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
        needed = CROWDED_GROWTH if _is_crowded(window) else at_least
        if median(last) < needed * median(first) or (usual and not is_slower(usual, parts(own[-length:], 4)[-1])):
            continue
        first_blocks, *_, last_blocks = parts(window, 8)
        before, after = _medians(first_blocks), _medians(last_blocks)
        if after.step >= at_least * before.step:
            grew = sum(block.loop_seconds for block in window)
            return _described(window[0], before, after, _grown_memory(window), grew)
    return None


def _own_seconds(blocks: Sequence[Block]) -> list[float]:
    """Seconds of a step in each block, without the time that other programs, other ranks or a low clock have cost."""
    clock = max((block.signals.get("gpu_clock_hertz", 0.0) for block in blocks), default=0.0)
    found = []
    for block in blocks:
        compute = block.times.compute - block.signals.get("core_wait_seconds", 0.0)
        compute *= 1 - block.signals.get("waiting_for_ranks_ratio", 0.0)
        compute *= block.signals.get("gpu_clock_hertz", clock) / clock if clock else 1.0
        found.append(block.times.wait + max(0.0, compute))
    return found


def _is_crowded(window: Sequence[Block]) -> bool:
    """Whether other programs use more cores than at the begin: they share caches and memory, which no clock shows."""
    known = ((_levels(window, name), more) for name, more in CROWDED.items())
    return any(levels[-1] - levels[0] >= more for levels, more in known if levels)


_MEMORY: Final = {
    "cuda_bytes": "the memory of the tensors on the GPU",
    "training_bytes": "the memory of the training process",
}


def _grown_memory(window: Sequence[Block]) -> list[Companion]:
    """The memory that grew all the time. Tensors on the GPU come first: the process may grow with them."""
    for name in _MEMORY:
        known = _levels(window, name)
        if known and known == sorted(set(known)) and known[-1] - known[0] >= MIN_MEMORY_BYTES:
            return [Companion(name, known[0], known[-1])]
    return []


def _levels(window: Sequence[Block], name: str) -> list[float]:
    """The medians of a figure in the quarters of the window; empty if it is not known."""
    known = [block.signals[name] for block in window if name in block.signals]
    return levels(known, 4) if len(known) >= 4 else []


# -- in words ----------------------------------------------------------------------------------------------------------

_MUCH_OF_GROWTH: Final = 0.5
"""A line causes the growth if it takes more than this share of the time that the steps have become longer by."""

_KEPT_GRAPH: Final = (
    "let no step keep the graph of the steps before: add loss.item() or loss.detach() to what is carried on, detach "
    "hidden states, and call backward() without retain_graph=True"
)
_KEPT: Final = "keep nothing of earlier steps that each step goes through again: keep sums, or the newest values"
_REPEATED: Final = (
    "look for what each step adds to and then goes through: a list, a hook, a parameter group, a handler of a logger"
)
_FETCHES: Final = (
    "look for what the data set adds to with every sample and then goes through: a list, a cache, an open file"
)


def growth_finding(growth: StepChange, totals: Totals, lines: Sequence[LineShare] = ()) -> Finding:
    """The growth in words. No speed-up is predicted: the longer the run goes on, the larger it is.

    Args:
        growth: the growth.
        totals: the run so far.
        lines: the lines of code in which the steps spend their time now, first the one that has grown most.
    """
    longer = growth.after_seconds - growth.before_seconds
    text = (
        f"Steps take {duration(growth.after_seconds)}, and took {duration(growth.before_seconds)} "
        f"{rough_duration(growth.grew_seconds)} of training before, at step {growth.at.step}: "
    )
    in_step, *memory = growth.companions
    grown = f"{duration(in_step.before)} to {duration(in_step.after)}"
    part = "waiting for data" if growth.part == DATA_WAIT else "compute"
    text += f"{part} has grown from {grown}"
    caused = [line for line in lines if line.share * growth.after_seconds >= _MUCH_OF_GROWTH * longer]
    line = caused[0] if caused and growth.part == COMPUTE else None
    if line is not None:
        text += f", and {rounded_percent(line.share)} of each step is {line.named} now"
    for each in memory:
        text += f"; {_MEMORY[each.what]} has grown by {byte_size(each.after - each.before)} with it"
    lost = growth.lost_ratio(totals)
    return Finding(
        kind="step_growth",
        share_ratio=round(lost, 4),
        text=text,
        lines=tuple(line.told() for line in lines) if growth.part == COMPUTE else (),
        advice=(
            Advice(
                _action(growth, line),
                because=f"{rounded_percent(lost)} of the training loop so far is what the steps have grown by",
            ),
        ),
    )


def _action(growth: StepChange, line: LineShare | None) -> str:
    if growth.part == DATA_WAIT:
        return _FETCHES
    if line is not None and (line.calls or "").endswith(".backward"):
        return _KEPT_GRAPH
    return _KEPT if growth.companions[1:] else _REPEATED


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
        self._undone_below = 0.0
        self.ratio: float | None = None

    def tick(self, totals: Totals, gauges: Mapping[str, float]) -> StepChange | None:
        """Add the totals and gauges of a tick. Returns the change that they confirm."""
        block = self._builder.add(totals, gauges)
        return None if block is None else self.add(block)

    def add(self, block: Block) -> StepChange | None:
        """Add a block. Returns the change that it confirms."""
        self._newest.append(block)
        if len(self._newest) == 2 * STRETCH:
            self._remember(STRETCH)
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
        past = [(block.times.step > (usual + level) / 2) == (level > usual) for block in blocks]
        # The place with the fewest blocks on the wrong side.
        places = range(1, len(blocks) - STRETCH // 2 + 1)
        place = min(places, key=lambda at: past[:at].count(True) + past[at:].count(False))
        at = blocks[place]
        self._since = at.at_seconds
        after = [block for block in after if block.at_seconds >= self._since] or after
        old = sum(block.at_seconds < self._since for block in self._newest)
        if old >= STRETCH // 2:
            self._remember(old)
        else:
            del self._newest[:old]
        known = [stretch for stretch in self._stretches if stretch.at_seconds < self._since]
        if is_faster(_steps(known), _steps(after)):  # faster than ever: what was before is no measure any more
            self._stretches = self._since_change()
            self._seen = len(self._stretches)
        if level > usual:
            self._usual = usual if self._usual is None else self._usual
        elif level < self._undone_below:
            self._usual = None
        level = median(_steps(after))
        self._undone_below = 0.0 if self._usual is None else self._usual + UNDONE * (level - self._usual)
        self.ratio = 1.0 if self._usual is None else level / self._usual
        return _described(at, _medians(before), _medians(after), _companions(blocks[:place], blocks[place:]))

    def _remember(self, count: int) -> None:
        """Put the first of the newest blocks into the sample of stretches, as their median block."""
        stretch = sorted(self._newest[:count], key=lambda block: block.times.step)[count // 2]
        del self._newest[:count]
        self._seen += 1
        if len(self._stretches) == MAX_STRETCHES:  # each stretch so far is kept with the same probability
            place = self._random.randrange(self._seen)
            if place >= MAX_STRETCHES:
                return
            del self._stretches[place]
        self._stretches.append(stretch)


def _steps(blocks: Iterable[Block]) -> list[float]:
    return [block.times.step for block in blocks]


def _medians(blocks: Sequence[Block]) -> Times:
    return Times(*(median(values) for values in zip(*(block.times for block in blocks), strict=True)))


def _companions(before: Sequence[Block], after: Sequence[Block]) -> list[Companion]:
    """The figures that changed with the steps, the largest change first. Of the compute's parts, only the largest."""
    found: list[tuple[float, Companion]] = []
    for name in {name for block in after for name in block.signals}:
        then, now = ([block.signals[name] for block in side if name in block.signals] for side in (before, after))
        if min(len(then), len(now)) < MIN_BEFORE:
            continue
        companion = Companion(name, median(then), median(now))
        low, high = sorted(companion[1:])
        size = high - low if name.endswith("_ratio") else high / low - 1 if low > 0 else high
        outside = not quantile(then, 0.1) <= companion.after <= quantile(then, 0.9)
        if outside and size >= MIN_RATIO - 1 and high - low >= MIN_COMPANIONS.get(name, 0.0):
            found.append((size, companion))
    companions = [companion for _, companion in sorted(found, reverse=True)]
    of_compute = [each for each in companions if each.what.removesuffix("_seconds") in COMPUTE_PARTS]
    smaller = sorted(of_compute, key=lambda each: abs(each.after - each.before))[:-1]
    return [each for each in companions if each not in smaller][:MAX_COMPANIONS]
