"""Advice for batches that are fetched fast enough on average, but arrive late.

They are late at the start of an epoch, behind a single slow batch, in the transfer from the worker, or because a
worker is stuck.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from telemetry.core.formatting import milliseconds as ms
from telemetry.core.recommendation import Advice
from telemetry.diagnose.advice.throughput import ON_CPU
from telemetry.diagnose.causes import THRESHOLDS
from telemetry.diagnose.model import (
    compute_seconds,
    gain_of,
    step_seconds,
    supply_in_order,
    supply_seconds,
    times_less,
    with_transfer,
)
from telemetry.diagnose.own_time import own_time, without_own_time

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

_MAX_PREFETCH: Final = 64
_PREFETCH_HEADROOM: Final = 1.25
"""The advised prefetching covers this multiple of the longest fetch."""

_BOUNDARY_SHARE: Final = 0.05
"""The advised epoch length leaves epoch boundaries this share of the time."""

_NO_COMPUTE: Final = 1e-6
"""Compute of a step, in seconds, that is too short to hide anything behind it."""

_MIN_MENTIONED_SHARE: Final = 0.1
"""The reason mentions a secondary cost from this share of the main one on: waits near epoch boundaries against waits at
them, and the release of a batch against its transfer."""

_MAPPED_BYTE_SECONDS: Final = 0.3e-9
"""Seconds of the training thread per byte of one large tensor: its pages are mapped, touched and released. Measured by
`python -m benchmarks.handover`."""

_SLOW_TRANSFER: Final = 1.1
"""Transfers from busy workers get advice of their own if they make a step longer by at least this factor."""


def startup(evidence: Evidence) -> list[Advice]:
    """Each epoch waits until its workers have started."""
    now, epochs = step_seconds(evidence), evidence.epochs
    if now is None:
        return []
    boundary = (epochs.boundary_wait_seconds + epochs.near_boundary_wait_seconds) / evidence.steps
    often = f"{epochs.boundaries} epochs began in the window"
    if (
        epochs.boundaries < THRESHOLDS.epoch_boundaries
    ):  # epochs are longer than the window, so it holds no fair share of them
        rest = now - epochs.boundary_wait_seconds / evidence.steps
        now = rest / max(1e-9, 1 - epochs.boundary_ratio)
        boundary = now - rest
        often = f"{100 * epochs.boundary_ratio:.0f} % of the loop is spent at epoch boundaries"
    if evidence.settings.get("persistent_workers"):
        return _longer_epochs(evidence, now, boundary, often)
    because = (
        f"{often}: workers were started and stopped for {epochs.boundary_wait_seconds:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    # One fetch that was not prefetched remains at each boundary. After an epoch that was left early, kept workers first
    # finish the batches that it had requested.
    asked = int(evidence.settings.get("prefetch_factor") or 2)
    fetches = epochs.boundaries + epochs.left * asked
    first = min(boundary, (evidence.workers.fetch_seconds or 0.0) * fetches / evidence.steps)
    gain = gain_of(evidence, now - boundary + first, now=now)
    if evidence.settings.get("loader_used_again") is False:
        action = "make the DataLoader once, with persistent_workers=True, and iterate over it in every epoch"
        because += "; every epoch made a new DataLoader"
        return [Advice(action, None, None, gain, because)]
    return [Advice("keep the workers between epochs", "persistent_workers", "True", gain, because)]


def _longer_epochs(evidence: Evidence, now: float, boundary: float, often: str) -> list[Advice]:
    """For persistent workers: longer epochs, so that the work at the start of an epoch is done less often."""
    rest, epochs = now - boundary, evidence.epochs
    if rest <= 0:
        return []
    longer = times_less(boundary, rest, _BOUNDARY_SHARE)
    because = (
        f"{often}: {epochs.boundary_wait_seconds:.1f} s of {evidence.loop_seconds:.1f} s were waits for first batches, "
        "although the workers are persistent"
    )
    if epochs.near_boundary_wait_seconds >= _MIN_MENTIONED_SHARE * epochs.boundary_wait_seconds:
        because += (
            f", and {epochs.near_boundary_wait_seconds:.1f} s for batches next to them: "
            "workers start and end one by one"
        )
    action = f"make epochs {longer} times as long, or do the data set's work at the start of an epoch only once"
    return [Advice(action, None, str(longer), gain_of(evidence, rest + boundary / longer, now=now), because)]


def uneven(evidence: Evidence) -> list[Advice]:
    """Single batches are late: some fetches are long, or one worker is always slower."""
    compute, supply, in_order = compute_seconds(evidence), supply_seconds(evidence), supply_in_order(evidence)
    if compute is None or supply is None or in_order is None:
        return []
    because = (
        f"{evidence.workers.count} workers are enough on average (a batch every {ms(supply)}, "
        f"{ms(compute)} of compute), but single batches are late"
    )
    if evidence.delivery.head_of_line_wait_seconds > 0:
        because += (
            f"; for {evidence.delivery.head_of_line_wait_seconds:.1f} s finished batches waited behind a slow one"
        )
    boundary = evidence.epochs.boundary_wait_seconds / evidence.steps
    advice = _further_ahead(evidence, compute, max(compute, in_order) + boundary, because)
    if not evidence.settings.get("in_order") or evidence.workers.count < 2:
        return advice
    transfer_wait = evidence.delivery.transfer_wait_seconds / evidence.steps  # unchanged: no worker prefetches more
    gain = gain_of(evidence, max(compute, supply) + boundary + transfer_wait)
    action = "take batches in the order in which they are finished, if their order does not matter"
    if in_order <= compute:
        return [*advice, Advice(action, "in_order", "False", gain, because)]
    slowest = ms(evidence.workers.slowest_fetch_seconds or 0.0)
    because += f"; one worker takes {slowest} a batch, and the others wait for its turn"
    alike = "give every worker an equal share of the slow data: distribute shards by where they are stored"
    return [Advice(action, "in_order", "False", gain, because), Advice(alike, None, None, gain, because), *advice]


def transferred_by_busy_workers(evidence: Evidence) -> bool:
    """Whether a finished batch has to wait for its worker, which is busy with the next one.

    With the sharing strategy ``file_descriptor`` a thread of the worker sends each tensor when the training process
    asks for it. While a fetch runs Python, that thread gets the GIL only once in 5 ms. (PyTorch docs:
    torch.multiprocessing, sharing strategies.)
    """
    by_descriptor = evidence.settings.get("sharing_strategy") == "file_descriptor"
    return by_descriptor and (evidence.workers.cpu_ratio or 0.0) >= ON_CPU


def _further_ahead(evidence: Evidence, compute: float, step: float, because: str) -> list[Advice]:
    """A larger prefetch factor.

    ``step`` is the predicted step without late batches and without the transfer. Both are added here. With busy workers
    prefetching alone does not help: fetches are no longer late, but transfers are.
    """
    factor = int(evidence.settings.get("prefetch_factor") or 2)
    wanted = _prefetch(evidence, factor, compute)
    if wanted <= factor:
        return []
    because += f"; up to {wanted * evidence.workers.count} batches will then be in memory"
    step += _still_late(evidence, factor, wanted, compute)
    handed_over, idle, busy = (
        with_transfer(evidence, step),
        evidence.delivery.transfer_seconds,
        evidence.delivery.transfer_from_busy_seconds,
    )
    at_once = step + (idle or 0.0) * evidence.batches_per_step
    late = idle is not None and busy is not None and busy > idle and handed_over >= _SLOW_TRANSFER * at_once
    if not late or not transferred_by_busy_workers(evidence):
        action = "let workers prefetch more batches"
        return [Advice(action, "prefetch_factor", str(wanted), gain_of(evidence, handed_over), because)]
    action = (
        "call torch.multiprocessing.set_sharing_strategy('file_system') and let workers prefetch more batches with "
        f"prefetch_factor={wanted}"
    )
    because += f"; a finished batch takes {ms(busy or 0.0)} to transfer while its worker is busy with the next one"
    return [Advice(action, None, None, gain_of(evidence, at_once), because)]


def _prefetch(evidence: Evidence, factor: int, compute: float) -> int:
    """The prefetch factor that hides the longest fetch behind compute.

    A worker starts on a batch when the training thread takes the one ``workers * factor`` before it.
    """
    if evidence.workers.longest_fetch_seconds is None or compute < _NO_COMPUTE:
        return 4 * factor
    wanted = math.ceil(_PREFETCH_HEADROOM * evidence.workers.longest_fetch_seconds / (evidence.workers.count * compute))
    return min(_MAX_PREFETCH, max(2 * factor, wanted))


def _still_late(evidence: Evidence, factor: int, wanted: int, compute: float) -> float:
    """Seconds of a step that remain as waits for late batches with a larger prefetch factor."""
    longest = evidence.workers.longest_fetch_seconds
    if longest is None:
        return 0.0
    hidden_now, hidden = (evidence.workers.count * f * compute for f in (factor, wanted))
    if longest <= hidden_now:
        return 0.0
    late = max(0.0, evidence.mid_epoch_wait_seconds) / evidence.steps
    return late * max(0.0, longest - hidden) / (longest - hidden_now)


def transfer(evidence: Evidence) -> list[Advice]:
    """Finished batches take long to reach the training thread, and to be released.

    Objects that are unpickled on the training thread start garbage collections. Fewer objects start fewer. But a
    collection inside ``next()`` may also be the sampler's, so the prediction is a range if they matter. In the zoo they
    took 4 ms of each step of 69 ms where a batch is hundreds of small tensors.
    """
    collected = 0.0
    if evidence.source == "workers" and evidence.steps:
        collected = own_time(evidence).garbage_seconds / evidence.steps
        evidence = without_own_time(evidence)
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    transfer_wait = evidence.delivery.transfer_wait_seconds / evidence.steps
    freed = min(compute, (evidence.delivery.release_seconds or 0.0) * evidence.batches_per_step)
    crowded = _crowded_by_pickling(evidence) * (compute - freed)
    size = _pickled_bytes(evidence) * evidence.batches_per_step
    kept = min(transfer_wait + freed, size * _MAPPED_BYTE_SECONDS)
    if transfer_wait > 0:
        because = f"a finished batch takes {ms(transfer_wait)} of every {ms(now)} to reach the training thread"
        if freed >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f", and {ms(freed)} to be released"
        if crowded >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f"; the training thread waits {ms(crowded)} for a core while workers pickle batches"
        if kept >= _MIN_MENTIONED_SHARE * transfer_wait:
            because += f"; {ms(kept)} remain for its {size / 1e6:.1f} MB, however it is sent"
    else:
        ready = evidence.delivery.ready_batches or 0.0
        because = f"{ready:.1f} batches are ready on average, and a step still takes {ms(now)}"
    then, supply = now - transfer_wait - freed - crowded + kept, supply_seconds(evidence) or 0.0
    gain, low = gain_of(evidence, max(then, supply)) if transfer_wait > 0 else None, None
    if transfer_wait > 0 and collected >= _MIN_MENTIONED_SHARE * then > 0:
        because += f"; collections of garbage inside next() take {ms(collected)}, some or all because of its objects"
        gain, low = gain_of(evidence, max(then - collected, supply)), gain
    action = (
        "send less data: few large tensors per batch instead of many small ones or Python objects; "
        "smaller types (uint8)"
    )
    advice = [Advice(action, None, None, gain, because, None if gain == low else low)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        background = gain_of(evidence, now - transfer_wait) if transfer_wait > 0 else None
        advice.insert(0, Advice(action, "pin_memory", "True", background, because))
    if transferred_by_busy_workers(evidence):
        action = "share tensors as files: torch.multiprocessing.set_sharing_strategy('file_system')"
        advice.append(
            Advice(
                action,
                None,
                None,
                None,
                "the tensors of finished batches are transferred by workers that are busy with the next ones",
            )
        )
    return advice


def _pickled_bytes(evidence: Evidence) -> float:
    """Bytes of a batch that are written to the pipe now, and would have to be sent in another way."""
    return (evidence.workers.written_bytes or 0.0) / evidence.workers.fetches if evidence.workers.fetches else 0.0


def _crowded_by_pickling(evidence: Evidence) -> float:
    """Share of the compute that is run-queue delay because workers that pickle batches use the cores.

    The run-queue delay is spread evenly over the loop. Pickling is blamed for its share of the load on the cores.
    """
    pickling = evidence.workers.pickling_cores
    if not pickling or not evidence.cpu.run_queue_delay_seconds or evidence.loop_seconds <= 0:
        return 0.0
    fetching = (evidence.workers.busy_ratio or 0.0) * evidence.workers.count * (evidence.workers.cpu_ratio or 0.0)
    beside = max(
        pickling, evidence.cpu.cores_of_others or 0.0
    )  # pickling is not part of a fetch, so the others' cores include it
    return min(1.0, evidence.cpu.run_queue_delay_seconds / evidence.loop_seconds) * pickling / (fetching + beside)


def stuck_worker(evidence: Evidence) -> list[Advice]:
    """One fetch does not end."""
    longest = max(evidence.workers.long_fetch_seconds, default=0.0)
    if evidence.workers.fetching_seconds >= longest:
        because = f"one fetch has been in progress for {evidence.workers.fetching_seconds:.0f} s"
    else:
        because = f"one fetch was in progress for {longest:.0f} s"
    raising = "without a timeout the DataLoader waits forever"
    return [
        Advice("find out what that worker waits for: a lock, a mount, remote storage", None, None, None, because),
        Advice("make the DataLoader raise an error when a worker is stuck", "timeout", "120", None, raising),
    ]
