"""What a faster line, or a batch without it, would bring: the predicted speed-up, and the sentence of the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.core.formatting import milliseconds as ms
from telemetry.core.formatting import rounded_percent
from telemetry.core.recommendation import Advice, factor_text
from telemetry.diagnose import line_shares as work
from telemetry.diagnose.model import gain_of, gain_over_window, predicted_step, step_seconds, supply_seconds
from telemetry.diagnose.own_time import own_time

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence
    from telemetry.diagnose.line_shares import LineShare

_WORTH_IT: Final = 1.05
_MIN_SHARE: Final = 0.1
"""A line gets advice from this share on."""

_ERRORS: Final = 2
_SURE: Final = 1.2
"""A prediction is a range if the share may be off by twice its standard error, and the speed-up by this factor then.

Of a line with 96 % of a step, 150 samples cannot tell whether the step would be 14 or 60 times as fast without it.
"""

_TURNS_SECONDS: Final = 0.005
"""How much longer a fetch may take where sending batches takes turns with it: Python's default switch interval."""

_HOLDS_THE_GIL: Final = 0.5
"""Code that holds the GIL for less than this part of its time leaves it to other threads."""

_PART: Final = {
    work.FETCH: "each fetch",
    work.WAIT: "each wait for a batch",
    work.SAMPLER: "the sampler",
    work.STEP: "each step",
    work.CHECKPOINT: "each checkpoint",
}


def verdict_part(line: LineShare, kind: str) -> str:
    """How much of what: ``61 % of each fetch``."""
    return f"{rounded_percent(line.share)} of {_PART[kind]}"


def line_verdict(evidence: Evidence, kind: str, line: LineShare, *, cause: str) -> str:
    """One sentence on the line that takes most."""
    text = f"{verdict_part(line, kind)} is {line.named}"
    seconds = _seconds_of(evidence, kind)
    gain, low = _gain_or_range(evidence, kind, line, 1.0, cause=cause)
    predicted = "" if gain is None else f", predicted {factor_text(gain, low)} times the steps per second"
    if seconds is not None and kind in {work.FETCH, work.WAIT}:
        short = "a fetch" if kind == work.FETCH else "a wait"
        text += f"; without it {short} takes {ms(seconds * (1 - line.share))}"
        text += predicted
    elif gain is not None:
        text += f"; without it{predicted}"
    return text


def line_advice(evidence: Evidence, kind: str, line: LineShare, *, cause: str) -> tuple[Advice, ...]:
    """The two what-ifs for the line that takes most: twice as fast, and removed. Empty if neither is worth it.

    Args:
        evidence: the window.
        kind: what was sampled.
        line: the line.
        cause: cause of the stall.
    """
    if line.share < _MIN_SHARE:
        return ()
    expected = _gain(evidence, kind, line, 1.0, cause=cause)
    if expected is None or expected < _WORTH_IT:
        return ()
    (removed, removed_low), (halved, halved_low) = (
        _gain_or_range(evidence, kind, line, part, cause=cause) for part in (1.0, 0.5)
    )
    seconds = _seconds_of(evidence, kind)
    because = f"{verdict_part(line, kind)} is this line"
    if seconds is not None:
        because += f": {ms(seconds * line.share)} of {ms(seconds)}"
    name = line.named
    where = {work.STEP: "the step", work.CHECKPOINT: "the checkpoint"}.get(kind, "the loader")
    return (
        Advice(
            f"take {name} out of {where}: do it once, before the training", None, None, removed, because, removed_low
        ),
        Advice(f"make {name} twice as fast", None, None, halved, because, halved_low),
    )


def _seconds_of(evidence: Evidence, kind: str) -> float | None:
    """Mean seconds of the work that was sampled; None if they are not known."""
    batches = evidence.steps * evidence.batches_per_step
    if kind == work.FETCH:
        return evidence.workers.fetch_seconds
    if kind == work.WAIT and batches:
        return evidence.wait_seconds / batches
    if kind == work.STEP and evidence.steps:
        return evidence.compute_seconds / evidence.steps
    if kind == work.CHECKPOINT and evidence.checkpoints.steps:
        return evidence.checkpoints.seconds / evidence.checkpoints.steps
    return None


def _gain_or_range(
    evidence: Evidence, kind: str, line: LineShare, part: float, *, cause: str
) -> tuple[float | None, float | None]:
    """The factor that `_gain` gives, and None; or, if the samples and the model do not tell, the most and the least."""
    gain, low, high = (
        _gain(evidence, kind, _with_share(line, line.share + errors * line.error), part, cause=cause)
        for errors in (0, -_ERRORS, _ERRORS)
    )
    if gain is None or low is None or high is None:
        return gain, None
    sampled = gain <= _SURE * low and high <= _SURE * gain
    if kind == work.FETCH and part == 1.0 and _will_take_turns(line):
        least = line if sampled else _with_share(line, line.share - _ERRORS * line.error)
        slowed = _gain(evidence, kind, least, part, cause=cause, longer=_TURNS_SECONDS)
        if slowed is not None and (not sampled or gain > _SURE * slowed):
            return (gain if sampled else high), slowed
    return (gain, None) if sampled else (high, low)


def _will_take_turns(line: LineShare) -> bool:
    """Whether sending batches may make the fetches longer once the line is gone.

    A thread of the worker sends each batch while the next one is fetched. A line that releases the GIL leaves it to
    that thread. If what remains of the fetch holds the GIL, the two take turns. Each batch of one worker took 2.6 to
    4.9 ms longer then (`c_releases_gil` and `read` of `tests.lines`).
    """
    return line.gil_ratio < _HOLDS_THE_GIL <= line.rest_gil_ratio


def _with_share(line: LineShare, share: float) -> LineShare:
    """The line if its share were another one, and that of the CPU time with it. A quarter of the rest always stays."""
    share = min(max(share, 0.0), 1 - (1 - line.share) / 4)
    return replace(line, share=share, cpu_share=min(line.cpu_share * share / line.share, 1.0))


def _gain(
    evidence: Evidence, kind: str, line: LineShare, part: float, *, cause: str, longer: float = 0.0
) -> float | None:
    """Predicted factor on the steps per second if ``part`` of the line's time is saved.

    ``longer``: seconds that each fetch takes longer then, see `_will_take_turns`.
    """
    now, saved = step_seconds(evidence), part * min(line.share, 1 - line.error)  # something else takes time as well
    if kind == work.CHECKPOINT:
        whole = evidence.loop_and_checkpoint_seconds
        return gain_over_window(evidence, whole - saved * min(whole, evidence.checkpoints.seconds), now=whole)
    if now is None:
        return None
    if kind == work.FETCH:
        then = _with_shorter_fetch(evidence, now, saved, part * line.cpu_share, cause=cause, longer=longer)
    elif kind == work.WAIT:
        then = now - saved * evidence.wait_seconds / evidence.steps
    elif kind == work.SAMPLER:
        own = own_time(evidence)
        sampling = own.exposed_ratio * own.all_sampler_seconds / evidence.steps
        then = max(now - saved * sampling, supply_seconds(evidence) or 0.0)
    elif cause == "host_bound":
        idle = (evidence.gpu.idle_seconds or 0.0) / evidence.steps
        then = now - min(idle, saved * evidence.compute_seconds / evidence.steps)
    else:
        then = max(now * (1 - saved), supply_seconds(evidence) or 0.0)
    return None if then is None else gain_of(evidence, then)


def _with_shorter_fetch(
    evidence: Evidence, now: float, saved: float, saved_cpu: float, *, cause: str, longer: float
) -> float | None:
    """Seconds of a step if the workers' fetches become shorter by these shares of wall clock and of CPU time."""
    workers = evidence.workers
    if workers.fetch_seconds is None or not workers.count:
        return None
    if cause == "uneven_batches":  # the workers are fast enough on average: only the waits become shorter
        return now - saved * max(0.0, evidence.mid_epoch_wait_seconds) / evidence.steps
    on_its_own = workers.fetch_seconds * evidence.batches_per_step * (1 - (workers.runnable_ratio or 0.0))
    cpu = (workers.fetch_seconds if workers.fetch_cpu_seconds is None else workers.fetch_cpu_seconds) * (
        evidence.batches_per_step
    )
    then = predicted_step(
        evidence,
        fetch=on_its_own * (1 - saved) + longer * evidence.batches_per_step,
        fetch_cpu=cpu * (1 - saved_cpu),
        workers=workers.count,
    )
    if then is None:
        return None
    received = (evidence.delivery.receive_cpu_seconds or 0.0) * evidence.batches_per_step  # on the training thread
    return min(max(then, (evidence.compute_seconds / evidence.steps) + received), now)
