"""Finds what costs a step time without a wait for data and without a stall: work on the host, cores, the GIL, gc.

And puts growth of the steps in words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.causes import advise
from telemetry.diagnosis.changes import GROWN_MEMORY
from telemetry.diagnosis.cores import core_use, cores_missing, too_many_threads
from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.hot_lines import (
    ERRORS,
    MIN_SAMPLES,
    SURE,
    is_host_work,
    line_shares,
    top_line,
    waits_for_thread,
    whole_line,
)
from telemetry.diagnosis.model import gain_without
from telemetry.model.records import COMPUTE, DATA_WAIT, Advice
from telemetry.util.profiles import STEP
from telemetry.util.words import byte_size, duration, rough_duration, rounded_percent
from telemetry.util.words import milliseconds as ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.changes import StepChange
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.hot_lines import LineShare
    from telemetry.model.totals import Totals
    from telemetry.sources.proc import ThreadLoad
    from telemetry.sources.sampler import Sampler

_MIN_SHARE: Final = 0.1
"""Minimum share of the training loop that is worth a person's time."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The training process over some time in the loop.

    Attributes:
        totals: what was counted in this time. ``so_far``: since the first step; None if it is the same.
        cores: cores that the process may use.
        load: the threads with which the training thread computes, and itself; None if unknown. ``worker_loads``: the
            threads of each worker.
    """

    totals: Totals
    so_far: Totals | None = None
    cores: float = 1.0
    load: ThreadLoad | None = None
    worker_loads: Sequence[ThreadLoad] = ()

    @property
    def blocked_ratio(self) -> float | None:
        """Share of the loop in which the training thread had nothing to run; None if unknown.

        It was neither on a core, nor did it want one, nor did it wait for a batch that was not fetched yet.
        """
        totals, delivered = self.totals, self.totals.deliveries
        ran, wanted = totals.thread_cpu_seconds, totals.run_queue_delay_seconds
        if ran is None or wanted is None:
            return None
        fetch, transfer = delivered.fetch_wait_seconds, delivered.transfer_wait_seconds
        waited = totals.wait_seconds * (fetch / (fetch + transfer) if fetch + transfer > 0 else 1.0)
        return min(1.0, max(0.0, (totals.loop_seconds - ran - wanted - waited) / totals.loop_seconds))


def findings_of(time: StepTime, sampled: Sampler, evidence: Evidence) -> list[Finding]:
    """What was found. ``sampled``: the samples of the run so far. ``evidence``: the newest window."""
    host, own = _host_work(sampled, evidence), _own_collections(time, sampled, evidence)
    if host is not None and own is not None and _place(host) == _place(own):
        host = None  # a sample that came late may take a collection for the work of the line that called for it
    use = core_use(time.so_far or time.totals, evidence, time.load, time.cores)
    too_many = too_many_threads(time.load, time.worker_loads, time.cores, use.delay_ratio)
    cores = too_many or cores_missing(use, evidence)
    found = (
        host,
        _reader_thread(sampled, evidence),
        cores,
        _gil_held(time, sampled),
        _no_sync(time, sampled, evidence),
        own,
    )
    return [each for each in found if each is not None]


def _place(finding: Finding) -> tuple[str, int] | None:
    return next(((line.file, line.line) for line in finding.lines), None)


# -- work on the host between operators --------------------------------------------------------------------------------

_NEARLY_ALL: Final = 0.8

_BESIDE: Final = 0.1
"""No speed-up is predicted if the lines that call the work have more time of their own than this part of it."""


def _host_work(sampled: Sampler, evidence: Evidence) -> Finding | None:
    """The host's own work in the steps: logging, loops in Python. On a GPU it costs what the GPU idles, at most."""
    lines = line_shares(sampled.steps, STEP, only=is_host_work)
    if not lines or not evidence.steps:
        return None
    seen = sampled.seen
    in_steps = seen.step / (seen.step + seen.wait + seen.boundary)
    every = line_shares(sampled.steps, STEP)
    worst, named = _largest_work(lines, every)
    share = min(1.0, sum(line.share for line in worst))
    error = math.sqrt(max(share * (1 - share), 0.01) / sampled.steps.samples)
    if (share - ERRORS * error) * in_steps < _MIN_SHARE / 2 or share * in_steps < _MIN_SHARE:
        return None
    idle = evidence.gpu_idle_seconds / evidence.loop_seconds if evidence.gpu_idle_seconds is not None else None
    if evidence.pace.on_gpu and (idle is None or idle < _MIN_SHARE):
        return None
    low, gain, high = (
        gain_without(evidence, min(each * in_steps, 1.0 if idle is None else idle))
        for each in (share - ERRORS * error, share, min(0.98, share + ERRORS * error))
    )
    lost = min(share * in_steps, 1.0 if idle is None else idle)
    of_step = ms(share * evidence.step_compute_seconds)
    places = {(line.file, line.line) for line in worst if line.calls is not None}
    beside = sum(line.share for line in every if line.calls is None and (line.file, line.line) in places)
    if beside > _BESIDE * share:  # a loop: what else goes with it is not known
        low = gain = high = None
    exact = low is not None and high is not None and gain is not None and gain <= SURE * low and high <= SURE * gain
    return Finding(
        kind="host_work",
        share_ratio=round(lost, 4),
        text=f"{rounded_percent(share)} of each step is {named}: work on the host, and no operator of torch",
        lines=tuple(line.told() for line in lines if line.share >= _MIN_SHARE / 2),
        advice=(
            Advice(
                _instead(named, whole_line(worst)),
                predicted_speedup=gain if exact else high,
                because=f"it takes {of_step} of {ms(evidence.step_compute_seconds)} in each step",
                predicted_low=None if exact else low,
            ),
        ),
    )


def _instead(named: str, line: LineShare) -> str:
    """What to do about the work of a line. Nobody knows what it is for, unless its function is known."""
    if line.habit is not None:
        return f"{named}: {line.habit.do}"
    return f"make {named} cheaper, do it less often, or take it out of the step"


def _largest_work(on_host: Sequence[LineShare], lines: Sequence[LineShare]) -> tuple[list[LineShare], str]:
    """The lines of the work that takes most, and its name.

    It is that of one call, of one line, or of a function that hardly does anything else.
    """
    parts: dict[str, list[LineShare]] = defaultdict(list)
    for line in on_host:
        parts[line.calls or line.named].append(line)
    for file, number in dict.fromkeys((line.file, line.line) for line in on_host):
        part = [line for line in on_host if (line.file, line.line) == (file, number)]
        parts.setdefault(whole_line(part).named, part)
    for file, function in {(line.file, line.function) for line in on_host}:
        part = [line for line in on_host if (line.file, line.function) == (file, function)]
        whole = sum(line.share for line in lines if (line.file, line.function) == (file, function))
        if sum(line.share for line in part) >= _NEARLY_ALL * whole:
            parts.setdefault(function, part)
    name, worst = max(parts.items(), key=lambda item: (sum(line.share for line in item[1]), -len(item[1])))
    places = [*dict.fromkeys(line.place for line in worst)]
    return worst, whole_line(worst).named if len(places) == 1 else f"{name} at {_and(places[:3])}"


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# -- a thread of the script's own that reads the loader ----------------------------------------------------------------


def _reader_thread(sampled: Sampler, evidence: Evidence) -> Finding | None:
    """Waits in the steps for another thread, which reads a DataLoader. No hook sees them, so they count as compute."""
    if not evidence.read_by_thread or evidence.source is not None or not evidence.steps:
        return None
    lines = line_shares(sampled.steps, STEP, only=waits_for_thread)
    share = min(1.0, sum(line.share for line in lines))
    if share < _MIN_SHARE:
        return None
    waited = share * evidence.compute_seconds
    seen = structs.replace(
        evidence,
        source="watched",
        wait_seconds=evidence.wait_seconds + waited,
        compute_seconds=evidence.compute_seconds - waited,
    )
    workers = evidence.configured_workers
    loader = f"a DataLoader with num_workers={workers}" if workers else "a DataLoader without workers"
    return Finding(
        kind="reader_thread",
        share_ratio=round(share, 4),
        text=f"{rounded_percent(share)} of each step is {lines[0].named}: a wait for another thread, which reads "
        f"{loader}",
        lines=tuple(line.told() for line in lines if line.share >= _MIN_SHARE / 2),
        advice=tuple(advise("source_slow", seen)),
    )


# -- another thread that holds the GIL ---------------------------------------------------------------------------------


def _gil_held(time: StepTime, sampled: Sampler) -> Finding | None:
    """The thread that keeps the GIL from the training thread, which cannot lose more time than it is blocked.

    No speed-up is predicted: while the threads are sampled, the GIL changes hands sooner than it does without.
    """
    threads = [*sampled.threads.found.values()]
    worst = max(threads, key=lambda thread: thread.gil_share, default=None)
    blocked, totals = time.blocked_ratio, time.totals
    if worst is None or blocked is None:
        return None
    # Whatever else the training thread sleeps for, it also does while the GIL is free.
    blocked -= sampled.idle / max(1, sampled.free) * totals.compute_seconds / totals.loop_seconds
    lost = min(blocked, sum(thread.gil_share for thread in threads))
    line = top_line(worst.work)
    if lost < _MIN_SHARE or worst.gil_share < _MIN_SHARE:
        return None
    at = f" at {line.place} ({line.function})" if line is not None else ""
    return Finding(
        kind="gil_held",
        share_ratio=round(lost, 4),
        text=f"thread {worst.name} holds the GIL for {rounded_percent(worst.gil_share)} of the time{at}, and the "
        "training thread waits for it",
        lines=() if line is None else (line.told(),),
        advice=(
            Advice(
                f"move the work of thread {worst.name}{at} to a process of its own, or let it release the GIL",
                because=f"the training thread is blocked for {rounded_percent(blocked)} of the loop, and a thread that "
                "computes in Python keeps the GIL for the switch interval",
            ),
        ),
    )


# -- collections that the script starts itself -------------------------------------------------------------------------


def _own_collections(time: StepTime, sampled: Sampler, evidence: Evidence) -> Finding | None:
    garbage, loop_seconds = time.totals.garbage, time.totals.loop_seconds
    own = round(garbage.collections * (evidence.own_collections_ratio or 0.0))
    if not own or not evidence.steps:
        return None
    share = min(0.98, garbage.seconds / loop_seconds * own / garbage.collections)
    if share < _MIN_SHARE:
        return None
    line = top_line(sampled.collecting)
    at = f" at {line.place}" if line is not None else ""
    return Finding(
        kind="own_gc_collect",
        share_ratio=round(share, 4),
        text=f"the script calls gc.collect(){at} itself, {own} times in {loop_seconds:.0f} s; each call takes "
        f"{ms(garbage.seconds / garbage.collections)}",
        lines=() if line is None else (line.told(),),
        advice=(
            Advice(
                f"remove the call of gc.collect(){at}, or call it rarely: Python collects by itself",
                predicted_speedup=gain_without(evidence, share),
                because=f"it stops the training for {rounded_percent(share)} of the loop",
            ),
        ),
    )


# -- gradients that DDP reduces too often ------------------------------------------------------------------------------

_DDP: Final = "torch.nn.parallel.distributed"
_EVEN: Final = 0.5
"""The batches before the last one wait for ranks as well if each does so for this part of the last one's time."""


_OF_BACKWARD: Final = 0.5
"""At most this part of the rest of a backward pass goes into the reduction as well: it copies gradients, and its
threads take cores. With layers of 1,024 on a CPU the gain was 2.2, and 1.7 by the waits alone."""


def _no_sync(time: StepTime, sampled: Sampler, evidence: Evidence) -> Finding | None:
    """With several batches for each step of the optimizer, only the last backward pass has to reduce the gradients."""
    totals, steps, seen = time.totals, sampled.steps, sampled.seen
    each = round(totals.batches / totals.optimizer_steps) if totals.optimizer_steps else 0
    if each < 2 or not evidence.steps or steps.samples < MIN_SAMPLES:
        return None
    earlier = sum(ns for batch, ns in sampled.reducing.items() if batch < each)
    share = earlier / (seen.step + seen.wait + seen.boundary)
    if share < _MIN_SHARE or earlier < _EVEN * (each - 1) * sampled.reducing[each]:
        return None
    if not any(spot.module == _DDP for stack in steps.times for spot in stack):
        return None
    lines = line_shares(steps, STEP, only=lambda stack, _: stack[0].function == "_engine_run_backward")
    backward = min(1.0, sum(line.share for line in lines)) * seen.step / (seen.step + seen.wait + seen.boundary)
    most = share + _OF_BACKWARD * max(0.0, backward * (each - 1) / each - share)
    alone = structs.replace(evidence, peers=())  # all ranks change
    return Finding(
        kind="no_sync",
        share_ratio=round(share, 4),
        text=f"DDP reduces the gradients of each of the {each} batches of an optimizer step, and waits for the other "
        f"ranks in {rounded_percent(share)} of the loop for those before the last",
        lines=tuple(line.told() for line in lines if line.share >= _MIN_SHARE / 2),
        advice=(
            Advice(
                f"use model.no_sync() for the forward and backward passes of all but the last of the {each} batches of "
                "an optimizer step: DDP then reduces their sum once",
                predicted_speedup=gain_without(alone, min(0.95, most)),
                predicted_low=gain_without(alone, share),
                because=f"the sum of {each} gradients is reduced in one go as fast as one gradient",
            ),
        ),
    )


# -- steps that become slower and slower -------------------------------------------------------------------------------

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
        f"{rough_duration(growth.grew_seconds)} of training before, at step {growth.at.at_step}: "
    )
    in_step, *memory = growth.figures
    grown = f"{duration(in_step.before)} to {duration(in_step.after)}"
    part = "waiting for data" if growth.part == DATA_WAIT else "compute"
    text += f"{part} has grown from {grown}"
    caused = [line for line in lines if line.share * growth.after_seconds >= _MUCH_OF_GROWTH * longer]
    line = caused[0] if caused and growth.part == COMPUTE else None
    if line is not None:
        text += f", and {rounded_percent(line.share)} of each step is {line.named} now"
    for each in memory:
        text += f"; {GROWN_MEMORY[each.what]} has grown by {byte_size(each.after - each.before)} with it"
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
    if line is not None and line.habit is not None:
        return f"{line.named}: {line.habit.do}"
    return _KEPT if growth.figures[1:] else _REPEATED
