"""One ratio from several pairs of runs of the same two versions.

What makes a whole run slower or faster shows in none of its windows, see `pace_interval`. It differs from run to run,
so it becomes smaller in the mean of several pairs. How much the pairs scatter says how large it is. What is not known
of the load of others is taken to be the same in each pair, and stays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from telemetry.compare.pace_interval import RatioInterval, Z, t_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

_BEFORE: Final = 10.0
"""The intervals of the single pairs count like so many degrees of freedom: their scatter alone, of three or four pairs,
says little. Chosen beforehand; benchmarks/compare_sets.py shows how often the interval is right with it."""


def mean_ratio(pairs: Sequence[RatioInterval], turns: int | None = None) -> RatioInterval:
    """The mean of the ratios of at least one pair, and its interval.

    A pair with a shorter interval weighs more. If the pairs scatter by more than their intervals allow, the interval
    becomes longer; by less, a little shorter.

    Args:
        pairs: of each, the ratio and its interval.
        turns: how often runs of A and of B took turns, see `turns_of`; None: as often as there are pairs. If less
            often, a disturbance of many minutes may be in several runs of one side. Then the interval is no shorter
            than that of so many pairs.
    """
    if len(pairs) == 1:
        return pairs[0]
    logs = [math.log(pair.ratio) for pair in pairs]
    halves = [math.log(pair.high / pair.ratio) for pair in pairs]
    variances = [(half / Z) ** 2 for half in halves]
    weights = [1 / variance for variance in variances]
    total = sum(weights)
    mean = sum(weight * each for weight, each in zip(weights, logs, strict=True)) / total
    # What is unknown in all pairs alike does not make them differ.
    common = min(pair.doubt for pair in pairs) ** 2
    squares = sum((each - mean) ** 2 / (variance - common) for variance, each in zip(variances, logs, strict=True))
    freedom = _BEFORE + len(pairs) - 1
    own = (
        weight * weight * (variance - pair.doubt**2)
        for weight, variance, pair in zip(weights, variances, pairs, strict=True)
    )
    random = t_quantile(freedom) * math.sqrt((_BEFORE + squares) / freedom * sum(own)) / total
    doubt = sum(weight * pair.doubt for weight, pair in zip(weights, pairs, strict=True)) / total
    half = math.hypot(random, Z * doubt)
    if turns is not None and turns < len(pairs):
        half = max(half, min(halves) / math.sqrt(turns))
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), doubt)
