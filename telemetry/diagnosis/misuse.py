"""Ways to use a loader that make other advice wrong: the same samples from each worker, no items, an iterator per step.

More workers, or workers that are kept, change nothing for the better while one of these is true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.model import Fetch, alone_in_worker, gain_of, predicted_step, step_with
from telemetry.model.records import Advice, HotLine
from telemetry.util.words import milliseconds as ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.model.records import FindingKind

SPLIT: Final = "divide the data set's items among the workers: use get_worker_info() in its __iter__"

_MIN_SHARE: Final = 0.1
"""A way that costs less than this share of the loop is no finding."""


def mended_first(evidence: Evidence) -> list[Advice]:
    """The advice that comes before all other advice about the loader; empty if the loader is used rightly."""
    return [advice for _, advice in _wrong_uses(evidence)][:1]


def _wrong_uses(evidence: Evidence) -> Iterator[tuple[FindingKind, Advice]]:
    if evidence.same_batches:
        yield "duplicate_samples", _split(evidence)
    if evidence.steps_per_iterator is not None:
        yield "iterator_per_step", _one_iterator(evidence)
    if evidence.source == "workers" and evidence.empty_workers:
        yield "empty_workers", _more_shards(evidence)


def misuse(evidence: Evidence) -> list[Finding]:
    """What is wrong about the use of the loader, if it costs enough."""
    found, workers, loop = [], evidence.configured_workers, evidence.loop_seconds
    waiting = min(1.0, (evidence.exposed_seconds or 0.0) / loop) if loop > 0 else 0.0
    for kind, advice in _wrong_uses(evidence):
        share, place, worth = waiting, evidence.traits.sample_code, bool(evidence.steps) and waiting >= _MIN_SHARE
        if kind == "duplicate_samples":
            worth = workers > 1
            share = max(waiting, 1 - 1 / max(1, workers))  # the waits are for samples that come several times
        elif kind == "iterator_per_step":
            worth, place = evidence.edge_wait_seconds >= _MIN_SHARE * loop, evidence.iterated_at
        lines: tuple[HotLine, ...] = ()
        if place is not None:
            file, line, function = place
            lines = (HotLine(file=file, line=line, function=function, share_ratio=share),)
        if worth:
            found.append(Finding(kind=kind, share_ratio=share, text=advice.because, lines=lines, advice=(advice,)))
    return found


def _split(evidence: Evidence) -> Advice:
    workers = evidence.configured_workers
    because = f"{workers} workers have given the same batches, so each sample comes several times"
    return Advice(f"{SPLIT}, so that each worker gives a part of the items", None, None, None, because)


def _one_iterator(evidence: Evidence) -> Advice:
    now, steps = evidence.step_seconds, evidence.steps
    because = (
        f"{evidence.edges} iterators were made for {steps} steps; their starts, first batches and ends take "
        f"{ms(evidence.edge_wait_seconds / steps)} of every {ms(now)}"
    )
    action = (
        "make the iterator once, before the loop, and take each batch from it: batches = iter(loader), next(batches)"
    )
    gain, low, fetch = None, None, alone_in_worker(evidence)
    if evidence.source == "workers" and fetch is not None and evidence.configured_workers:
        # Drawing the indices of an epoch and starting the workers end with the iterators. So does their CPU time: what
        # is left of it is at most the compute of the step.
        kept, cpu = evidence, evidence.process_cpu_per_step_seconds
        if cpu is not None:
            cpu = min(cpu, evidence.step_compute_seconds)
            kept = structs.replace(kept, process_cpu_per_step_seconds=cpu)
        # Without its CPU time, a fetch may need a core all the time or never.
        least = fetch if evidence.fetch_cpu_seconds is not None else Fetch(fetch.seconds, 0.0)
        gain, low = (
            gain_of(evidence, predicted_step(kept, each, evidence.configured_workers, boundary=0.0))
            for each in (least, fetch)
        )
    return Advice(action, None, None, gain, because, None if low == gain else low)


def _more_shards(evidence: Evidence) -> Advice:
    empty, workers = evidence.empty_workers, evidence.configured_workers
    because = f"{empty} of {workers} workers get no items: the data set has fewer shards than workers"
    action = f"divide the data set into at least {workers} shards (files) of about the same size"
    return Advice(action, None, None, gain_of(evidence, step_with(evidence, workers)), because)
