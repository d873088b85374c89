"""What to change where batches are fetched fast enough and come late all the same, and what that is worth.

At the start of an epoch, behind a single slow one, on their way from the worker, or not at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import THRESHOLDS
from telemetry.diagnose.loading import ON_CPU
from telemetry.diagnose.model import (
    compute_seconds,
    gain_of,
    ms,
    step_seconds,
    supply_in_order,
    supply_seconds,
    times_less,
    with_moving,
)
from telemetry.records import Advice

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

_MOST_PREFETCH: Final = 64
_SPARE: Final = 1.25
"""Batches are prefetched for so many times the longest fetch that was seen."""

_EDGES_SHARE: Final = 0.05
"""Of the time, that the starts of epochs may take: epochs are advised to be so much longer."""

_NO_COMPUTE: Final = 1e-6
"""Seconds of a step, below which nothing can be hidden behind it."""

_WORTH_SAYING: Final = 0.1
"""What is waited next to the edges of epochs is spoken of from this share of the waits at the edges themselves; what
it takes to free a batch, of what it takes to move it."""

_MAPPED: Final = 0.3e-9
"""Seconds of the training thread for a byte that comes in one large tensor: its pages are mapped, touched for the first
time and given back (`python -m benchmarks.handover`)."""

_HANDED_OVER_LATE: Final = 1.1
"""A step is so many times longer where busy workers hand its batches over: then something is to be done about it."""


def startup(evidence: Evidence) -> list[Advice]:
    """Every epoch waits for its workers to start."""
    now = step_seconds(evidence)
    if now is None:
        return []
    edge = (evidence.edge_wait + evidence.around_edges) / evidence.steps
    often = f"{evidence.edges} epochs began in the window"
    if evidence.edges < THRESHOLDS.edges:  # epochs are longer than the window: what it holds of them is no fair part
        rest = now - evidence.edge_wait / evidence.steps
        now = rest / max(1e-9, 1 - evidence.edge_share)
        edge = now - rest
        often = f"{100 * evidence.edge_share:.0f} % of the loop is at the edges of epochs"
    if evidence.settings.get("persistent_workers"):
        return _longer_epochs(evidence, now, edge, often)
    because = f"{often}: workers were started and stopped for {evidence.edge_wait:.1f} s of {evidence.loop:.1f} s"
    # What remains at an edge is one fetch that nobody prefetched; and workers that go on first finish what was asked of
    # them in an epoch that was left.
    asked = int(evidence.settings.get("prefetch_factor") or 2)
    fetches = evidence.edges + evidence.left * asked
    first = min(edge, (evidence.fetch_seconds or 0.0) * fetches / evidence.steps)
    gain = gain_of(evidence, now - edge + first, now=now)
    if evidence.settings.get("loader_used_again") is False:
        action = "make the DataLoader once, with persistent_workers=True, and iterate over it in every epoch"
        because += ", each time of a new DataLoader"
        return [Advice(action, None, None, gain, because)]
    return [Advice("keep the workers between epochs", "persistent_workers", "True", gain, because)]


def _longer_epochs(evidence: Evidence, now: float, edge: float, often: str) -> list[Advice]:
    """Where the workers are kept already: what else they do at the start of an epoch is done less often."""
    rest = now - edge
    if rest <= 0:
        return []
    longer = times_less(edge, rest, _EDGES_SHARE)
    because = (
        f"{often}: {evidence.edge_wait:.1f} s of {evidence.loop:.1f} s were waited for first batches, of workers that "
        "were kept"
    )
    if evidence.around_edges >= _WORTH_SAYING * evidence.edge_wait:
        because += f", and {evidence.around_edges:.1f} s for those next to them: they start, and end, one by one"
    action = f"make epochs {longer} times as long, or do once what the data set does at the start of each"
    return [Advice(action, None, str(longer), gain_of(evidence, rest + edge / longer, now=now), because)]


def uneven(evidence: Evidence) -> list[Advice]:
    """Single batches are late: of a long fetch now and then, or of a worker that is always slower."""
    compute, supply, in_order = compute_seconds(evidence), supply_seconds(evidence), supply_in_order(evidence)
    if compute is None or supply is None or in_order is None:
        return []
    because = (
        f"{evidence.workers} workers would suffice on average (a batch every {ms(supply)} against {ms(compute)} of "
        "compute), but single batches are late"
    )
    if evidence.head_of_line > 0:
        because += f"; for {evidence.head_of_line:.1f} s finished batches waited behind a slow one"
    edge = evidence.edge_wait / evidence.steps
    advice = _further_ahead(evidence, compute, max(compute, in_order) + edge, because)
    if not evidence.settings.get("in_order") or evidence.workers < 2:
        return advice
    moved = evidence.moved / evidence.steps  # as it is: no worker runs further ahead
    gain = gain_of(evidence, max(compute, supply) + edge + moved)
    action = "take batches as they are finished, where their order does not matter"
    if in_order <= compute:
        return [*advice, Advice(action, "in_order", "False", gain, because)]
    because += f"; one worker takes {ms(evidence.slowest_fetch or 0.0)} a batch, and has its turn like the others"
    alike = "give every worker a like share of the slow data: deal shards out by where they lie"
    return [Advice(action, "in_order", "False", gain, because), Advice(alike, None, None, gain, because), *advice]


def _handed_over_by_busy_workers(evidence: Evidence) -> bool:
    """Whether a finished batch has to wait for its worker, which is busy with the next.

    A tensor that is shared by file descriptor is handed over, when it is asked for, by a thread of its worker, and that
    has the interpreter once in 5 ms while a fetch runs Python. (pytorch: torch.multiprocessing, sharing strategies.)
    """
    by_descriptor = evidence.settings.get("sharing_strategy") == "file_descriptor"
    return by_descriptor and (evidence.cpu_share or 0.0) >= ON_CPU


def _further_ahead(evidence: Evidence, compute: float, step: float, because: str) -> list[Advice]:
    """A larger prefetch factor, with which a step takes ``step``, and what is still late, and to move its batches.

    Where workers are busy, prefetching alone changes late batches into batches that are handed over late.
    """
    factor = int(evidence.settings.get("prefetch_factor") or 2)
    wanted = _prefetch(evidence, factor, compute)
    if wanted <= factor:
        return []
    because += f"; up to {wanted * evidence.workers} batches then lie in memory"
    step += _still_late(evidence, factor, wanted, compute)
    handed_over, idle, busy = with_moving(evidence, step), evidence.moving_seconds, evidence.moving_from_busy_seconds
    at_once = step + (idle or 0.0) * evidence.batches_per_step
    late = idle is not None and busy is not None and busy > idle and handed_over >= _HANDED_OVER_LATE * at_once
    if not late or not _handed_over_by_busy_workers(evidence):
        action = "let workers run further ahead"
        return [Advice(action, "prefetch_factor", str(wanted), gain_of(evidence, handed_over), because)]
    action = (
        "share tensors by file, torch.multiprocessing.set_sharing_strategy('file_system'), and let workers run further "
        f"ahead, prefetch_factor={wanted}"
    )
    because += f"; and one that is finished takes {ms(busy or 0.0)} to be handed over by a worker busy with the next"
    return [Advice(action, None, None, gain_of(evidence, at_once), because)]


def _prefetch(evidence: Evidence, factor: int, compute: float) -> int:
    """The prefetch factor that hides the longest fetch behind compute.

    A worker begins with a batch when the training thread takes the one ``workers * factor`` before it.
    """
    if evidence.longest_fetch is None or compute < _NO_COMPUTE:
        return 4 * factor
    wanted = math.ceil(_SPARE * evidence.longest_fetch / (evidence.workers * compute))
    return min(_MOST_PREFETCH, max(2 * factor, wanted))


def _still_late(evidence: Evidence, factor: int, wanted: int, compute: float) -> float:
    """Seconds of a step for which late batches are still waited for with a larger prefetch factor."""
    longest = evidence.longest_fetch
    if longest is None:
        return 0.0
    hidden_now, hidden = (evidence.workers * f * compute for f in (factor, wanted))
    if longest <= hidden_now:
        return 0.0
    late = max(0.0, evidence.wait - evidence.edge_wait) / evidence.steps
    return late * max(0.0, longest - hidden) / (longest - hidden_now)


def transfer(evidence: Evidence) -> list[Advice]:
    """Finished batches take long to come, and to go."""
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    moved = evidence.moved / evidence.steps
    freed = min(compute, (evidence.freeing_seconds or 0.0) * evidence.batches_per_step)
    crowded = _crowded_by_packing(evidence) * (compute - freed)
    size = _pickled_bytes(evidence) * evidence.batches_per_step
    kept = min(moved + freed, size * _MAPPED)
    if moved > 0:
        because = f"a finished batch takes {ms(moved)} of every {ms(now)} to reach the training thread"
        if freed >= _WORTH_SAYING * moved:
            because += f", and {ms(freed)} to be freed"
        if crowded >= _WORTH_SAYING * moved:
            because += f"; for {ms(crowded)} the training thread has no core because workers pack batches"
        if kept >= _WORTH_SAYING * moved:
            because += f"; {ms(kept)} remain for its {size / 1e6:.1f} MB, however they are sent"
    else:
        ready = evidence.ready_batches or 0.0
        because = f"{ready:.1f} batches lie ready on average while the training thread waits for {ms(now)} steps"
    then = max(now - moved - freed - crowded + kept, supply_seconds(evidence) or 0.0)
    gain = gain_of(evidence, then) if moved > 0 else None
    action = "send less: few large tensors in a batch, not many small ones or Python objects; smaller types (uint8)"
    advice = [Advice(action, None, None, gain, because)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        background = gain_of(evidence, now - moved) if moved > 0 else None
        advice.insert(0, Advice(action, "pin_memory", "True", background, because))
    if _handed_over_by_busy_workers(evidence):
        action = "share tensors by file: torch.multiprocessing.set_sharing_strategy('file_system')"
        advice.append(
            Advice(action, None, None, None, "workers that are busy hand the tensors of finished batches over")
        )
    return advice


def _pickled_bytes(evidence: Evidence) -> float:
    """Of a batch: what passes the pipe now, and has to be sent in another way."""
    return (evidence.written_bytes or 0.0) / evidence.fetches if evidence.fetches else 0.0


def _crowded_by_packing(evidence: Evidence) -> float:
    """Share of the compute in which the training thread could run, and workers that pack batches have its core.

    Compute has its share of the time without a core, and packing its share of what else is on the cores.
    """
    packing = evidence.packing_cores
    if not packing or not evidence.own_runnable or evidence.loop <= 0:
        return 0.0
    fetching = (evidence.busy_ratio or 0.0) * evidence.workers * (evidence.cpu_share or 0.0)
    beside = max(packing, evidence.cores_of_others or 0.0)  # packing is no fetch, so it is in the others' too
    return min(1.0, evidence.own_runnable / evidence.loop) * packing / (fetching + beside)


def stuck_worker(evidence: Evidence) -> list[Advice]:
    """One fetch goes on and on."""
    longest = max(evidence.long_fetches, default=0.0)
    if evidence.stuck_seconds >= longest:
        because = f"one fetch has been in progress for {evidence.stuck_seconds:.0f} s"
    else:
        because = f"one fetch was in progress for {longest:.0f} s"
    raising = "a DataLoader with a timeout fails instead of hanging"
    return [
        Advice("look at what that worker waits for: a lock, a mount, a remote store", None, None, None, because),
        Advice("let a stuck worker raise", "timeout", "120", None, raising),
    ]
