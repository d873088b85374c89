"""Finds steps that become slower within minutes: growth in one direction, and the part of the step that grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.changes import FIRST_SECONDS, BlockBuilder, LoopBlock, clearness, part_levels
from telemetry.diagnosis.findings import Finding
from telemetry.records import (
    COMPUTE,
    CUDA,
    DATA_WAIT,
    FASTER,
    GROWS,
    SLOWER,
    STEADY,
    TRAINING,
    UNCLEAR,
    Advice,
    StepTrend,
)
from telemetry.util.text import byte_size, duration, rough_duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.diagnosis.lines import LineShare
    from telemetry.totals import Totals

# -- whether the steps of some blocks grow -----------------------------------------------------------------------------
# The blocks are divided into eight parts, of which each has a level. They must rise nearly all the time, and no two
# parts may have most of the growth: `ChangeDetector` finds sudden changes. The steps must also grow without the time
# that other programs or a lower clock have cost. The growth may be even by a factor, so that logarithms count, or by an
# amount.

MIN_RATIO: Final = 1.30
"""Steps that have become slower by this factor are reported. Smaller growth is left to `ChangeDetector`."""

_LENGTHS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The growth may have begun so many blocks ago."""

_PARTS: Final = 8
_MIN_RISING: Final = 21
"""In so many of the 28 pairs of parts, the later one must be slower."""

_MIN_QUARTER: Final = 0.1
"""Least share of the growth from each quarter to the next."""

_MAX_JUMP: Final = 0.5
_MAX_AMOUNT: Final = 0.46
"""Largest share of the growth within two parts: of its logarithm, and of its amount. Two equal jumps have half of the
amount each. Steps that become longer by the same amount each, from 0 on, have 0.43 of it in the first parts."""

_MIN_CLEARNESS: Final = 6.0
"""Least growth in standard errors of a level."""

_NEARLY_ALL: Final = 0.9
"""The last quarter must be slower than nearly all blocks before the growth, by half of it at least. A run that has been
as slow before, as in an earlier epoch with the same order of batches, does not grow."""

_CROWDED_RATIO: Final = 2.0
_MIN_CROWDING: Final = {"other_cores": 0.15, "cpu_throttled_ratio": 0.1}
"""If other programs use so many more cores than at the beginning, or the CPU quota is used up so much more often, only
growth by `_CROWDED_RATIO` is reported: they share caches and memory with this run, which no clock shows."""


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """Steps that have become slower, in one direction.

    Attributes:
        at_seconds: begin of the growth on the clock of `Totals.wall_seconds`. ``step``: the first step in it.
        loop_seconds: seconds of the training loop in which they grew. ``begin_loop_seconds``: those before.
        before_seconds, after_seconds: duration of a step at both ends.
        part: the part of a step that has grown most, ``data_wait`` or ``compute``; ``part_before_seconds`` and
            ``part_after_seconds``: its duration at both ends.
        memory, memory_bytes: the memory that grew with the steps, `TRAINING` or `CUDA`, and by how much; None and 0 if
            neither grew all the time.
    """

    at_seconds: float
    step: int
    loop_seconds: float
    begin_loop_seconds: float
    before_seconds: float
    after_seconds: float
    part: str
    part_before_seconds: float
    part_after_seconds: float
    memory: str | None = None
    memory_bytes: float = 0.0

    @property
    def ratio(self) -> float:
        """Step time at the end over step time at the begin."""
        return self.after_seconds / self.before_seconds

    def lost_ratio(self, totals: Totals) -> float:
        """The share of the training loop so far that the steps took longer than at the begin of the growth."""
        ended = totals.loop_seconds - totals.open_step_seconds
        grown = ended - self.begin_loop_seconds
        lost = grown - (totals.steps - self.step) * self.before_seconds
        return min(1.0, max(0.0, lost / ended)) if ended > 0 else 0.0


def find_growth(
    blocks: Sequence[LoopBlock], at_least: float = MIN_RATIO, *, settled_at: float = 0.0
) -> StepGrowth | None:
    """The growth of the newest blocks by at least this factor; None if they do not grow.

    Args:
        blocks: blocks of similar length, the oldest first.
        at_least: the factor.
        settled_at: earlier blocks do not show how long steps take usually, on the clock of `Totals.wall_seconds`.
    """
    found = []
    seconds, own = [block.step_seconds for block in blocks], _own_seconds(blocks)
    for length in sorted({min(length, len(blocks)) for length in _LENGTHS}):
        at, quarter = len(blocks) - length, length // 4
        if length < _PARTS or not _grows(seconds[at:], at_least):
            continue
        window = blocks[at:]
        first, last = median(own[at : at + quarter]), median(own[-quarter:])
        needed = max(at_least, _CROWDED_RATIO) if _crowded(window) else at_least
        known = [each for each, block in zip(own[:at], blocks, strict=False) if block.at_seconds >= settled_at]
        if last >= needed**0.75 * first and _is_new(last, known, math.sqrt(at_least)):
            found.append(_described(window))
    largest = max(found, key=lambda growth: growth.ratio, default=None)
    return largest if largest is not None and largest.ratio >= at_least else None


def _grows(seconds: Sequence[float], at_least: float) -> bool:
    part = len(seconds) // _PARTS
    first, last = median(seconds[:part]), median(seconds[-part:])
    needed = at_least ** ((_PARTS - 1) / _PARTS)  # from the middle of the first part to that of the last
    if min(seconds) <= 0 or last < needed * first:
        return False
    logs = [math.log(value) for value in seconds]
    bounds = [len(logs) * part // _PARTS for part in range(_PARTS + 1)]
    levels = [median(logs[begin:end]) for begin, end in pairwise(bounds)]
    grown = levels[-1] - levels[0]
    rising = sum(later > earlier for earlier, later in combinations(levels, 2))
    even = _is_even(levels, _MAX_JUMP) or _is_even([math.exp(level) for level in levels], _MAX_AMOUNT)
    if rising < _MIN_RISING or not even:
        return False
    steps = [later - earlier for earlier, later in pairwise(logs)]
    usual = median(steps)
    scatter = 1.4826 * median(abs(step - usual) for step in steps) / math.sqrt(2)
    return grown >= _MIN_CLEARNESS * scatter * math.sqrt(2 * _PARTS / len(logs))


def _is_even(levels: Sequence[float], max_jump: float) -> bool:
    grown = levels[-1] - levels[0]
    jump = max(later - earlier for earlier, later in zip(levels, levels[2:], strict=False))
    quarters = [(one + two) / 2 for one, two in zip(levels[::2], levels[1::2], strict=True)]
    slowest = min(later - earlier for earlier, later in pairwise(quarters))
    return jump <= max_jump * grown and slowest >= _MIN_QUARTER * grown


def _own_seconds(window: Sequence[LoopBlock]) -> list[float]:
    """Seconds of a step in each block, without the time that other programs, other ranks or a low clock have cost."""
    clock = max((block.signals.get(_CLOCK, 0.0) for block in window), default=0.0)
    found = []
    for block in window:
        signals = block.signals
        compute = block.compute_seconds / block.steps - signals.get("core_wait_seconds", 0.0)
        compute *= 1 - signals.get("waiting_for_ranks_ratio", 0.0)
        compute *= signals.get(_CLOCK, clock) / clock if clock else 1.0
        found.append(block.wait_seconds / block.steps + max(0.0, compute))
    return found


_CLOCK: Final = "gpu_clock_hertz"


def _crowded(window: Sequence[LoopBlock]) -> bool:
    quarter = len(window) // 4
    for name, at_least in _MIN_CROWDING.items():
        then, now = _signal(window[:quarter], name), _signal(window[-quarter:], name)
        if then is not None and now is not None and now - then >= at_least:
            return True
    return False


def _is_new(last: float, known: Sequence[float], by: float) -> bool:
    usual = sorted(known)
    return not usual or last > by * usual[round(_NEARLY_ALL * (len(usual) - 1))]


def _described(window: Sequence[LoopBlock]) -> StepGrowth:
    ends = max(2, len(window) // 16)
    first, last = window[:ends], window[-ends:]
    waits, computes = zip(part_levels(first), part_levels(last), strict=True)
    part = DATA_WAIT if waits[1] - waits[0] >= computes[1] - computes[0] else COMPUTE
    shown = waits if part == DATA_WAIT else computes
    before, (memory, size) = _first_seconds(window), _memory_growth(window)
    return StepGrowth(
        at_seconds=window[0].at_seconds,
        step=window[0].step,
        loop_seconds=sum(block.loop_seconds for block in window),
        begin_loop_seconds=window[0].at_loop_seconds,
        before_seconds=before,
        after_seconds=median(block.step_seconds for block in last),
        part=part,
        part_before_seconds=max(0.0, shown[0] - (median(block.step_seconds for block in first) - before)),
        part_after_seconds=shown[1],
        memory=memory,
        memory_bytes=size,
    )


_MEMORY: Final = {CUDA: "cuda_bytes", TRAINING: "training_bytes"}
"""The signals of blocks that are memory. Tensors on the GPU come first: the process may grow with them."""

_MIN_MEMORY_BYTES: Final = 4 << 20


def _memory_growth(window: Sequence[LoopBlock]) -> tuple[str | None, float]:
    """The memory that grew from each third of the window to the next, and by how much in all of it."""
    third = len(window) // 3
    for memory, name in _MEMORY.items():
        levels = [_signal(part, name) for part in (window[:third], window[third:-third], window[-third:])]
        known = [level for level in levels if level is not None]
        if len(known) == len(levels) and known[0] < known[1] < known[2]:
            grown = 1.5 * (known[2] - known[0])  # from the begin to the end
            if grown >= _MIN_MEMORY_BYTES:
                return memory, grown
    return None, 0.0


def _first_seconds(window: Sequence[LoopBlock]) -> float:
    """The duration of the first step: fast growth has made the mean of the first block larger already."""
    places = [(block.step + block.steps / 2, block.step_seconds) for block in window[:3]]
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(places, 2))
    level = median(seconds - slope * (place - window[0].step) for place, seconds in places)
    return min(max(level, window[0].step_seconds / 2), median(seconds for _, seconds in places))


def _signal(blocks: Sequence[LoopBlock], name: str) -> float | None:
    known = [block.signals[name] for block in blocks if name in block.signals]
    return median(known) if known else None


# -- in words ----------------------------------------------------------------------------------------------------------

_MUCH_OF_GROWTH: Final = 0.5
"""A line causes the growth if it takes more than this share of the time that the steps have become longer by."""

_OF_MEMORY: Final = {TRAINING: "the memory of the training process", CUDA: "the memory of the tensors on the GPU"}

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


def growth_finding(growth: StepGrowth, totals: Totals, lines: Sequence[LineShare] = ()) -> Finding:
    """The growth in words. No speed-up is predicted: the longer the run goes on, the larger it is.

    Args:
        growth: the growth.
        totals: the run so far.
        lines: the lines of code in which the steps spend their time now, first the one that has grown most.
    """
    longer = growth.after_seconds - growth.before_seconds
    text = (
        f"Steps take {duration(growth.after_seconds)}, and took {duration(growth.before_seconds)} "
        f"{rough_duration(growth.loop_seconds)} of training before, at step {growth.step}: "
    )
    grown = f"{duration(growth.part_before_seconds)} to {duration(growth.part_after_seconds)}"
    part = "waiting for data" if growth.part == DATA_WAIT else "compute"
    text += f"{part} has grown from {grown}"
    caused = [line for line in lines if line.share * growth.after_seconds >= _MUCH_OF_GROWTH * longer]
    line = caused[0] if caused and growth.part == COMPUTE else None
    if line is not None:
        text += f", and {rounded_percent(line.share)} of each step is {line.named} now"
    if growth.memory is not None:
        text += f"; {_OF_MEMORY[growth.memory]} has grown by {byte_size(growth.memory_bytes)} with it"
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


def _action(growth: StepGrowth, line: LineShare | None) -> str:
    if growth.part == DATA_WAIT:
        return _FETCHES
    if line is not None and (line.calls or "").endswith(".backward"):
        return _KEPT_GRAPH
    return _KEPT if growth.memory is not None else _REPEATED


# -- follows the steps of a run ----------------------------------------------------------------------------------------

_BLOCK_SECONDS: Final = 2.0
_MAX_BLOCK_SECONDS: Final = 8.0
_FIRST_SECONDS: Final = 1.0
MAX_BLOCKS: Final = 128
"""Blocks have 2 s of the training loop at first. When there are too many, neighbours are joined, up to 8 s. So the last
quarter of an hour is known."""

SHORT_RUN_SECONDS: Final = 900.0
"""A run with less time in its training loop gets a verdict on its trend. `ChangeDetector` judges longer ones."""

_MIN_TREND: Final = 1.05


class GrowthDetector:
    """Follows the steps of a run, tick by tick. Its memory is bounded.

    Attributes:
        growth: the growth that was found, up to the newest step in it; None without one.
    """

    def __init__(self) -> None:
        self._builder = BlockBuilder(_BLOCK_SECONDS, least_steps=1, first_seconds=_FIRST_SECONDS)
        self._spacing = _BLOCK_SECONDS
        self._filling: LoopBlock | None = None
        self._blocks: list[LoopBlock] = []
        self._loop_seconds = 0.0
        self._settled_at = math.inf
        self.growth: StepGrowth | None = None

    def tick(self, totals: Totals, signals: Mapping[str, float]) -> None:
        """Add the totals and the sampled figures of a tick."""
        self._loop_seconds = totals.loop_seconds
        if totals.loop_seconds >= FIRST_SECONDS:
            self._settled_at = min(self._settled_at, totals.wall_seconds)
        block = self._builder.add(totals, signals)
        if block is not None and self._keep(block):
            found = find_growth(self._blocks, settled_at=self._settled_at)
            if found is not None:
                self.growth = found if self.growth is None else _continued(self.growth, found)

    def trend(self) -> StepTrend | None:
        """The trend of a short run; None for longer runs, and if too few steps are known."""
        blocks = self._blocks if self._filling is None else [*self._blocks, self._filling]
        if self._loop_seconds >= SHORT_RUN_SECONDS or len(blocks) < _PARTS:
            return None
        judged = blocks[len(blocks) // 6 :]
        quarter = max(2, len(judged) // 4)
        first, last = ([block.step_seconds for block in end] for end in (judged[:quarter], judged[-quarter:]))
        before, after = median(first), median(last)
        kind = SLOWER if after > before else FASTER
        if find_growth(blocks, _MIN_TREND, settled_at=self._settled_at) is not None:
            kind = GROWS
        elif 1 / _MIN_TREND < after / before < _MIN_TREND:
            kind = STEADY
        elif clearness(first, last, drift=True) < _MIN_CLEARNESS:
            kind = UNCLEAR
        return StepTrend(kind, before, after, sum(block.loop_seconds for block in judged))

    def _keep(self, block: LoopBlock) -> bool:
        """Add a block to those that are kept. Returns whether one is complete now."""
        self._filling = block if self._filling is None else self._filling + block
        if self._filling.loop_seconds < self._spacing:
            return False
        self._blocks.append(self._filling)
        self._filling = None
        if len(self._blocks) > MAX_BLOCKS and self._spacing < _MAX_BLOCK_SECONDS:
            self._spacing *= 2
            self._blocks = [one + two for one, two in zip(self._blocks[::2], self._blocks[1::2], strict=False)]
        elif len(self._blocks) > MAX_BLOCKS:
            del self._blocks[0]
        return True


_SAME: Final = 0.9


def _continued(before: StepGrowth, now: StepGrowth) -> StepGrowth:
    """The growth found before with its newest end, if it has gone on."""
    if now.part != before.part or now.before_seconds < _SAME * before.before_seconds:
        return now
    return replace(
        before,
        loop_seconds=max(before.loop_seconds, now.loop_seconds + now.at_seconds - before.at_seconds),
        after_seconds=max(before.after_seconds, now.after_seconds),
        part_after_seconds=max(before.part_after_seconds, now.part_after_seconds),
        memory=now.memory or before.memory,
        memory_bytes=max(before.memory_bytes, now.memory_bytes),
    )
