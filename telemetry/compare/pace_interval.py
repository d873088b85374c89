"""The ratio of two runs' steps per second, with an interval that holds although steps are not independent.

The steps of a run are slow together: another process takes a core, a file system is busy, a clock is reduced. So the
scatter of single steps says too little about the scatter of their mean. The windows of the
log are joined to blocks. What neighbouring blocks have in common counts once, and the interval is the longest of those
from blocks of one window, of two, of four and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_BLOCKS: Final = 2
"""A run with fewer has no scatter at all."""

MIN_BLOCKS: Final = 8
"""Fewer blocks say too little about how neighbours resemble each other. See `_half_of_few`."""

_USUAL_CORRELATION: Final = 0.45
"""Of neighbouring windows. In the recorded runs it is 0.4 to 0.5 of windows of a second, and 0.3 of windows of ten."""

_LIKENESS: Final = (1 + _USUAL_CORRELATION) / (1 - _USUAL_CORRELATION)
"""So many times the variance of a mean is that of independent windows."""

BETWEEN_RUNS: Final = 0.005
"""Two runs of one script differ by about this standard deviation, relative to their pace, even where nothing disturbs
them: where their memory lies, which core they run on. No run shows this by itself. See benchmarks/compare_pairs.py."""

_UNSEEN: Final = 0.012
_UNSEEN_SECONDS: Final = 1800.0
"""Some disturbances last longer than a run and show in none of its windows: programs of other virtual machines on the
same processor, which the guest cannot see. Calm runs of 35 s scattered by this, relative to their pace, and those of
three minutes by 1.0 to 1.7 %: in an hour the CPU time of the same work changed by 20 %. Only a run of hours has less of
it, and its own windows show more of it. See benchmarks/compare_loads.py."""

_UNSEEN_OF_CPU: Final = 0.02
"""Such disturbances make slower what uses a core, and no wait. So a run that computes all the time needs this as well.
Runs of 50 s scattered by 4 % in all; their windows show a part of that."""

_MAX_CORRELATION: Final = 0.95
_TENTHS: Final = 10

_CAUTION: Final = 0.5
"""The correlation is estimated with a standard error of about 1 / sqrt(number of blocks). This much of it is added."""

_FEWEST_INDEPENDENT: Final = 2.5
"""However alike neighbours are, a run is no less than this many independent deviations: with fewer, the interval would
have no end."""

Z: Final = 1.959964
"""The normal distribution's 97.5 % quantile."""

_T: Final = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624)
"""The same of Student's distribution, with 1, 2, … degrees of freedom."""


class PaceBlock(NamedTuple):
    """A stretch of a run: steps that ended in it, and seconds of its training loop.

    ``others``: share of the machine's cores that other programs used. ``held_up``: run-queue delay that they caused, in
    the part of the run that sets its pace, in seconds. ``workers_held_up``: of it, that of workers. ``cpu``: seconds
    in which that part of the run used a core; not those of a training thread that may wait for a GPU. None: not known.
    """

    steps: float
    seconds: float
    others: float | None = None
    held_up: float | None = None
    workers_held_up: float | None = None
    cpu: float | None = None


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """Steps per second of one run over another's: the ratio, and its 95 % interval.

    ``doubt``: the part of the interval's standard deviation, relative to the ratio, that further pairs of runs do not
    make smaller.
    """

    ratio: float
    low: float
    high: float
    doubt: float = 0.0


def ratio_interval(blocks_a: Sequence[PaceBlock], blocks_b: Sequence[PaceBlock], ranks: int = 1) -> RatioInterval:
    """The ratio of the pace of B over that of A. Each has at least `FEWEST_BLOCKS` blocks with steps, of all ranks."""
    unseen = between_runs(blocks_a, ranks), between_runs(blocks_b, ranks)
    return interval_around(pace(blocks_b) / pace(blocks_a), _deviations(blocks_a), _deviations(blocks_b), unseen)


def interval_around(
    ratio: float, a: Sequence[float], b: Sequence[float], unseen: Sequence[float], doubt: float = 0.0
) -> RatioInterval:
    """The interval of a ratio of two means.

    Args:
        ratio: the ratio.
        a: how far each window of one run is from that run's mean, relative to it, in order.
        b: of the other run.
        unseen: of each run, what `between_runs` returns.
        doubt: a standard deviation of the ratio that no window shows, relative to it; see `RatioInterval`.
    """
    few = min(len(a), len(b)) < MIN_BLOCKS
    seen, slow = (_half_of_few(a, b), 0.0) if few else (_half_of_many(a, b), _slow_part(a, b))
    half = math.hypot(seen, Z * math.hypot(*unseen, slow, doubt))
    return RatioInterval(ratio, ratio * math.exp(-half), ratio * math.exp(half), doubt)


def between_runs(blocks: Sequence[PaceBlock], ranks: int = 1) -> float:
    """The standard deviation of a run's pace that its windows do not show, relative to it.

    Args:
        blocks: of the run.
        ranks: how many it has: the seconds of a block are those of all of them.
    """
    seconds = sum(block.seconds for block in blocks) / ranks
    known = [block for block in blocks if block.cpu is not None]
    computing = sum(block.cpu or 0.0 for block in known) / sum(block.seconds for block in known) if known else 0.0
    unseen = math.hypot(_UNSEEN, _UNSEEN_OF_CPU * min(1.0, computing))
    return math.hypot(BETWEEN_RUNS, unseen * math.sqrt(_UNSEEN_SECONDS / (_UNSEEN_SECONDS + seconds)))


def _slow_part(a: Sequence[float], b: Sequence[float]) -> float:
    """The standard deviation between two runs that comes from what is slower than a run.

    Where tenths of a run still resemble their neighbours, the disturbances last as long as a run. Then whole runs
    differ by about as much as these tenths do.
    """
    size = max(1, min(len(a), len(b)) // _TENTHS)
    a, b = _joined(a, size), _joined(b, size)
    correlation = min(_MAX_CORRELATION, max(0.0, _correlation(a, b)))
    variance = sum(value * value / (len(side) - 1) for side in (a, b) for value in side)
    return math.sqrt(correlation * variance)


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Of neighbours in either series, corrected for its bias in short series (Kendall 1954)."""
    count = len(a) + len(b)
    squares = sum(value * value for value in (*a, *b))
    products = sum(one * next_ for side in (a, b) for one, next_ in pairwise(side))
    return (products / squares + 2 / count) / (1 - 6 / count) if squares > 0 else 0.0


def _half_of_few(a: Sequence[float], b: Sequence[float]) -> float:
    """Half of the interval of the difference of two means, where a run has fewer than `MIN_BLOCKS` windows.

    They cannot tell how long their disturbances last. So neighbours are taken to resemble each other as they usually
    do, and whole runs to differ by as much as their windows do. Of a longer run the windows are joined to about as many
    blocks: what is slow in it shows between these.
    """
    variance = weighted = 0.0
    for each in (a, b):
        blocks = _joined(each, max(1, len(each) // MIN_BLOCKS))
        freedom = len(blocks) - 1
        windows = sum(value * value for value in blocks) / freedom
        part = windows * (_LIKENESS / len(blocks) + 1)
        variance += part
        weighted += part * part / freedom
    return t_quantile(variance * variance / weighted) * math.sqrt(variance) if weighted > 0 else 0.0


def _half_of_many(a: Sequence[float], b: Sequence[float]) -> float:
    halves, size = [], 1
    while min(len(a), len(b)) // size >= MIN_BLOCKS:
        halves.append(_half(_joined(a, size), _joined(b, size), neighbours=size == 1))
        size *= 2
    return max(halves)


def _half(a: Sequence[float], b: Sequence[float], *, neighbours: bool) -> float:
    """Half of the interval of the difference of two means, from deviations that follow one another.

    Args:
        a: the deviations of one run, in order.
        b: of the other run.
        neighbours: whether the deviations of neighbours resemble each other. Then their correlation is estimated from
            both runs together, which are of one kind. A run has as many independent deviations as an autoregressive
            series with that correlation.
    """
    correlation = 0.0
    if neighbours:
        caution = _CAUTION / math.sqrt(len(a) + len(b))
        correlation = min(_MAX_CORRELATION, max(0.0, _correlation(a, b) + caution))
    variance = weighted = 0.0
    for each in (a, b):
        length = len(each)
        independent = max(_FEWEST_INDEPENDENT, length * (1 - correlation) / (1 + correlation))
        part = sum(value * value for value in each) / length / (independent - 1)
        variance += part
        weighted += part * part / (independent - 1)
    # Welch and Satterthwaite: degrees of freedom of a sum of two variances.
    return t_quantile(variance * variance / weighted) * math.sqrt(variance) if weighted > 0 else 0.0


def pace(blocks: Sequence[PaceBlock]) -> float:
    """Steps per second of the training loop."""
    return sum(block.steps for block in blocks) / sum(block.seconds for block in blocks)


def _joined(deviations: Sequence[float], size: int) -> list[float]:
    """Of each ``size`` neighbours as one block. What is left over at the end joins the last."""
    count = len(deviations) // size
    ends = [*(size * number for number in range(1, count)), len(deviations)]
    starts = [0, *ends[:-1]]
    scale = count / len(deviations)
    return [scale * sum(deviations[start:end]) for start, end in zip(starts, ends, strict=True)]


def _deviations(blocks: Sequence[PaceBlock]) -> list[float]:
    """How many steps more each block has than the run's pace gives, relative to the mean block's steps.

    The mean of such deviations has the error of the run's pace, for blocks of different lengths as well.
    """
    whole = pace(blocks)
    mean = sum(block.steps for block in blocks) / len(blocks)
    return [(block.steps - whole * block.seconds) / mean for block in blocks]


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution: up to 3 % too long below 2 degrees of freedom, else within 0.5 %.

    From 7 degrees of freedom on it is Cornish and Fisher's expansion, and for fewer the table.
    """
    n = freedom
    if n < len(_T):
        low = max(1, min(int(n), len(_T) - 1))
        share = (1 / low - 1 / n) / (1 / low - 1 / (low + 1))
        return math.exp((1 - share) * math.log(_T[low - 1]) + share * math.log(_T[low]))
    z = Z
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
