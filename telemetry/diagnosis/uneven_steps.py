"""Finds steps that differ because their batches differ in length: samples in random order, of which a batch is padded.

No tensor is looked at. What is known is how long steps take, and how the batches are made.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.model import gain_without
from telemetry.model.records import Advice
from telemetry.util.words import duration

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.util.sketch import Sketch

_MIN_STEPS: Final = 100
_MIN_SAMPLES: Final = 8
"""Samples of a batch. With few of them, batches that are not padded but joined differ as much."""

_MIN_RATIO: Final = 2.0
_SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
_MIN_SPREAD: Final = 1.08
"""Steps differ if nine of ten take less than so many times what one of ten does, and all between these differ, too: one
more second in every tenth step, or an optimizer that steps every other time, is something else."""

_NOTHING: Final = 0.1
"""If one of ten steps takes less than this part of the mean, it does nothing: transformers' Trainer asks for all the
batches of an update first, so that of two steps one has all the compute."""

_CALM: Final = 0.1
"""If more of the time is waits for data, or waits for a core, these may be what makes steps differ."""

_MIN_GAIN: Final = 1.2


def uneven_steps(steps: Sketch, evidence: Evidence, delay_ratio: float) -> Finding | None:
    """Steps that differ by the length of their batches, and what batches of samples of similar length would bring.

    Args:
        steps: how long the steps of the run have taken.
        evidence: the newest window.
        delay_ratio: share of the time in which the training thread had no core.
    """
    traits, now = evidence.traits, evidence.loop_seconds
    drawn_at_random = traits.shuffled and traits.own_collate and (traits.batch_size or 0) >= _MIN_SAMPLES
    if not drawn_at_random or not evidence.steps or steps.total < _MIN_STEPS or now <= 0:
        return None
    if evidence.wait_seconds >= _CALM * now or delay_ratio >= _CALM:
        return None
    levels = [steps.quantile(share) or 0.0 for share in _SHARES]
    if levels[-1] < _MIN_RATIO * levels[0] or any(b < _MIN_SPREAD * a for a, b in pairwise(levels)):
        return None
    mean, alike, least = _of_similar_length(steps, traits.batch_size or 1)
    if levels[0] < _NOTHING * mean:
        return None
    low, high = (gain_without(evidence, max(0.0, 1 - each / mean)) for each in (alike, least))
    if low is None or high is None or low < _MIN_GAIN:
        return None
    text = (
        f"Steps of the same code take {duration(levels[0])} to {duration(levels[-1])} (p10 to p90): their batches, "
        "whose samples are drawn at random, differ in length"
    )
    because = (
        f"if a step takes as long as its longest sample makes it, batches of similar samples take {duration(least)} to "
        f"{duration(alike)} on average instead of {duration(mean)}"
    )
    action = (
        "if batches are padded, group samples by length: a batch_sampler that sorts some batches at a time by length "
        "makes them of similar samples"
    )
    lost = round(1 - alike / mean, 4)
    return Finding(
        kind="uneven_steps",
        share_ratio=lost,
        text=text,
        advice=(Advice(action, None, None, high, because, low if low < high else None),),
    )


def _of_similar_length(steps: Sketch, size: int) -> tuple[float, float, float]:
    """The mean seconds of a step now, and the most and the least if each batch had samples of one length.

    A step takes as long as the longest of its ``size`` samples makes it. So if a share ``p`` of the steps is shorter
    than some time, a share ``p ** (1 / size)`` of the samples is. Of those that are shorter than any step nothing is
    known: at most they are as long as the shortest step, and at least they are spread evenly below it.
    """
    mean = alike = seen = below = 0.0
    shortest: tuple[float, float] | None = None
    for seconds, count in steps.values():
        seen += count
        share = (seen / steps.total) ** (1 / size)
        mean += seconds * count / steps.total
        alike += seconds * (share - below)
        shortest = shortest or (seconds, share)
        below = share
    seconds, share = shortest or (0.0, 0.0)
    return mean, alike, alike - share * seconds / 2
