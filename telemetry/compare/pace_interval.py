"""The ratio of two runs' steps per second, with an interval that holds although steps are not independent.

The steps of a run are slow together: another process takes a core, a file system is busy, a clock is reduced. So the
scatter of single steps says too little about the scatter of their mean. The windows of the log are joined to blocks, and
the blocks are compared with each other. If longer blocks scatter more than independent ones would, the interval is that
of the longer blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_BLOCKS: Final = 8
"""Fewer blocks say too little about their scatter."""

BETWEEN_RUNS: Final = 0.005
"""Two runs of one script differ by about this standard deviation, relative to their pace, even where nothing disturbs
them: where their memory lies, which core they run on. No run shows this by itself. See benchmarks/compare_pairs.py."""

_Z: Final = 1.959964
"""The normal distribution's 97.5 % quantile."""


class Block(NamedTuple):
    """A stretch of a run: steps that ended in it, and seconds of its training loop."""

    steps: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """Steps per second of one run over another's: the ratio, and its 95 % interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Error:
    """Standard error of a run's pace, relative to it, and from how many degrees of freedom it was estimated."""

    relative: float
    freedom: int


def ratio_interval(blocks_a: Sequence[Block], blocks_b: Sequence[Block]) -> RatioInterval:
    """The ratio of the pace of B over that of A. Each has at least `MIN_BLOCKS` blocks, with steps."""
    ratio = _pace(blocks_b) / _pace(blocks_a)
    a, b = _error(blocks_a), _error(blocks_b)
    variance = a.relative**2 + b.relative**2
    # Welch and Satterthwaite: degrees of freedom of a sum of two variances.
    parts = a.relative**4 / a.freedom + b.relative**4 / b.freedom
    freedom = variance**2 / parts if parts > 0 else float(a.freedom + b.freedom)
    half = math.hypot(_t_quantile(freedom) * math.sqrt(variance), _Z * math.sqrt(2) * BETWEEN_RUNS)
    return RatioInterval(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def _pace(blocks: Sequence[Block]) -> float:
    return sum(block.steps for block in blocks) / sum(block.seconds for block in blocks)


def _error(blocks: Sequence[Block]) -> _Error:
    """The largest error of those from blocks of one window, of two, of four and so on."""
    found = []
    size = 1
    while len(blocks) // size >= MIN_BLOCKS:
        found.append(_error_of(_joined(blocks, size)))
        size *= 2
    return max(found, key=lambda error: error.relative * _t_quantile(error.freedom))


def _joined(blocks: Sequence[Block], size: int) -> list[Block]:
    """Each ``size`` neighbours as one block. What is left over at the end joins the last."""
    count = len(blocks) // size
    ends = [*(size * number for number in range(1, count)), len(blocks)]
    starts = [0, *ends[:-1]]
    return [
        Block(sum(b.steps for b in blocks[start:end]), sum(b.seconds for b in blocks[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _error_of(blocks: Sequence[Block]) -> _Error:
    """The error of a ratio of sums, from independent blocks of different lengths."""
    pace, count = _pace(blocks), len(blocks)
    squares = sum((block.steps - pace * block.seconds) ** 2 for block in blocks)
    steps = sum(block.steps for block in blocks)
    return _Error(math.sqrt(squares * count / (count - 1)) / steps, count - 1)


def _t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution: Cornish and Fisher's expansion, within 0.2 % from 7 on."""
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
