"""What to change in how batches are loaded, and what that is worth.

By the cause that the loader, or whatever the batches come from, has been found to be the trouble for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnose.causes import THRESHOLDS, crowded_out
from telemetry.diagnose.model import (
    best_workers,
    compute_seconds,
    gain_of,
    ms,
    predicted_step,
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

_ON_CPU: Final = 0.5
"""Workers whose fetches run for this share of their time keep their interpreter busy."""

_SIDE_BY_SIDE: Final = 1.1
"""CPU time of work that several processes share, relative to one that does it all: caches and memory are shared too."""

_WORKERS_BATCH_SECONDS: Final = 0.004
"""Of the cores, that a batch costs when a worker fetches it: sent, mapped, and not always there when it is asked for.

Both are measured by `python -m benchmarks.worker_cost`; where there are workers already, all that is in what they take.
"""

_EDGES_SHARE: Final = 0.05
"""Of the time, that the starts of epochs may take: epochs are advised to be so much longer."""

_NO_COMPUTE: Final = 1e-6
"""Seconds of a step, below which nothing can be hidden behind it."""

_WORTH_SAYING: Final = 0.1
"""What is waited next to the edges of epochs is spoken of from this share of the waits at the edges themselves."""

_HANDED_OVER_LATE: Final = 1.1
"""A step is so many times longer where busy workers hand its batches over: then something is to be done about it."""


def no_workers(evidence: Evidence) -> list[Advice]:
    """Batches are fetched on the training thread."""
    in_workers = _fetch_in_workers(
        evidence, "load batches in worker processes", "the training thread fetches each batch itself"
    )
    return [*in_workers, *_shorter_fetch(evidence)]


def _shorter_fetch(evidence: Evidence) -> list[Advice]:
    """Of batches that the training thread fetches: what is left where the cores are no more than that takes."""
    share, batches = evidence.own_fetch_cpu_share, evidence.steps * evidence.batches_per_step
    if share is None or not batches:
        return []
    fetch = evidence.wait / batches
    no_core = min(1.0, (evidence.own_runnable or 0.0) / evidence.seconds) if evidence.seconds > 0 else 0.0
    share = min(1.0, share + no_core)
    if share < _ON_CPU:
        return [
            _faster_storage(f"the training thread waits in {100 * (1 - share):.0f} % of the {ms(fetch)} of a batch")
        ]
    return [_cheaper(f"each batch takes {ms(fetch * share)} of CPU time on the training thread", evidence)]


def _fetch_in_workers(evidence: Evidence, action: str, why: str) -> list[Advice]:
    now = step_seconds(evidence)
    if now is None:
        return []
    fetch = evidence.wait / evidence.steps
    moved, fetch_cpu = _without_own_fetches(evidence, fetch)
    first = evidence.edges * fetch / evidence.batches_per_step / evidence.steps  # of an epoch: nobody prefetches it
    workers, step = best_workers(moved, fetch, fetch_cpu, edge=first)
    if step is None:
        return []
    if evidence.edges >= THRESHOLDS.edges:
        action += ", kept from epoch to epoch (persistent_workers=True)"
    because = f"{why}: {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    return [Advice(action, "num_workers", str(workers), gain_of(evidence, step), because)]


def _without_own_fetches(evidence: Evidence, fetch: float) -> tuple[Evidence, float]:
    """The evidence as it were without the training thread's own fetches, and the CPU time of a step's in workers."""
    own_cpu, compute = evidence.process_cpu_per_step, compute_seconds(evidence) or 0.0
    if evidence.own_fetch_cpu_share is not None:
        fetch_cpu = min(fetch * evidence.own_fetch_cpu_share, own_cpu or fetch)
    else:  # what the process ran beyond its compute, it ran for them
        fetch_cpu = fetch if own_cpu is None else min(fetch, max(0.0, own_cpu - compute))
    rest = compute if own_cpu is None else max(min(own_cpu, compute), own_cpu - fetch_cpu)
    in_workers = _SIDE_BY_SIDE * fetch_cpu + _WORKERS_BATCH_SECONDS * evidence.batches_per_step
    return replace(evidence, process_cpu_per_step=_SIDE_BY_SIDE * rest), in_workers


def _spent_on(evidence: Evidence) -> str:
    share = evidence.own_fetch_cpu_share
    return "" if share is None else f", {100 * share:.0f} % of it on the CPU"


def cpu_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and run."""
    return [*_more_workers(evidence), _cheaper(f"each batch takes {_in_a_worker(evidence)}", evidence)]


def io_bound(evidence: Evidence) -> list[Advice]:
    """The workers are the limit, and wait."""
    fetch, blocked = evidence.fetch_seconds, evidence.blocked_share
    advice = _more_workers(evidence, ", if what they wait for can serve more at once")
    if fetch is not None and blocked is not None:
        because = f"workers are blocked for {100 * blocked:.0f} % of the {ms(fetch)} a batch takes them"
        if evidence.read_bytes and evidence.fetches:
            because += f", and read {evidence.read_bytes / evidence.fetches / 1e6:.1f} MB from storage for it"
        advice.append(_faster_storage(because))
    return advice


def throttled(evidence: Evidence) -> list[Advice]:
    """There are not cores enough, or the workers may not use them."""
    share = evidence.runnable_share if evidence.runnable_share is not None else evidence.blocked_share or 0.0
    because = f"workers could run but have no core for {100 * share:.0f} % of their time in fetches"
    if evidence.throttled_ratio:
        used_up = 100 * evidence.throttled_ratio
        because += f"; the CPU quota of {evidence.cores:g} cores was used up in {used_up:.0f} % of its periods"
    if evidence.worker_cores is not None:
        more = _other_cores(evidence, f"{because}: they may run on {evidence.worker_cores} of {evidence.cores:g} cores")
    else:
        more = Advice("give the job more CPU cores; more workers would not help", None, None, None, because)
    return [
        *_fewer_workers(evidence),
        more,
        _cheaper(f"on the core, each batch takes {_in_a_worker(evidence)}", evidence),
    ]


def _other_cores(evidence: Evidence, because: str) -> Advice:
    """Where the workers are held to fewer cores than there are."""
    on_its_own, fetch_cpu = _fetch_on_its_own(evidence)
    free = replace(evidence, worker_cores=None)
    step = predicted_step(free, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=max(1, evidence.workers))
    action = "let the workers run on every core: a worker_init_fn, taskset or OMP_PROC_BIND holds them to a few"
    return Advice(action, None, None, None if step is None else gain_of(evidence, step), because)


def _fetch_on_its_own(evidence: Evidence) -> tuple[float, float]:
    """Seconds a worker with a core to itself takes for the batches of a step, and how many of them on that core."""
    fetch = (evidence.fetch_seconds or 0.0) * evidence.batches_per_step
    on_core = fetch if evidence.fetch_cpu_seconds is None else evidence.fetch_cpu_seconds * evidence.batches_per_step
    return fetch * (1 - (evidence.runnable_share or 0.0)), on_core


def _fewer_workers(evidence: Evidence) -> list[Advice]:
    """Where the workers crowd out the training thread: as many as leave it a core. It wins no more than it lacked."""
    crowded, now = crowded_out(evidence), step_seconds(evidence)
    if evidence.fetch_seconds is None or evidence.fetch_cpu_seconds is None or now is None or not crowded:
        return []
    alone = replace(evidence, compute=max(0.0, evidence.compute - crowded))
    on_its_own, fetch_cpu = _fetch_on_its_own(evidence)
    steps = {
        workers: step
        for workers in range(1, evidence.workers)
        if (step := predicted_step(alone, fetch=on_its_own, fetch_cpu=fetch_cpu, workers=workers)) is not None
    }
    if not steps:
        return []
    best = min(steps.values())
    fewest = min(workers for workers, step in steps.items() if step <= 1.01 * best)
    best = max(best, now - (evidence.own_runnable or 0.0) / evidence.steps)
    because = (
        f"{evidence.workers} workers and the training thread share {evidence.cores:g} cores, and it had none for "
        f"{crowded:.1f} s of {evidence.loop:.1f} s"
    )
    fewer = max(1, fewest // _loaders(evidence))
    if fewer >= _workers_each(evidence):
        return []
    return [Advice("use fewer workers", "num_workers", str(fewer), gain_of(evidence, best), because)]


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
    return by_descriptor and (evidence.cpu_share or 0.0) >= _ON_CPU


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
    """Finished batches take long to come."""
    now = step_seconds(evidence)
    if now is None:
        return []
    moved = evidence.moved / evidence.steps
    if moved > 0:
        because = f"a finished batch takes {ms(moved)} of every {ms(now)} to reach the training thread"
    else:
        ready = evidence.ready_batches or 0.0
        because = f"{ready:.1f} batches lie ready on average while the training thread waits for {ms(now)} steps"
    gain = gain_of(evidence, now - moved) if moved > 0 else None
    action = "send less: few large tensors in a batch, not many small ones or Python objects; smaller types (uint8)"
    advice = [Advice(action, None, None, gain, because)]
    if evidence.on_gpu and not evidence.settings.get("pin_memory"):
        action = "pin batches in the background and copy them with non_blocking=True"
        advice.insert(0, Advice(action, "pin_memory", "True", gain, because))
    if _handed_over_by_busy_workers(evidence):
        action = "share tensors by file: torch.multiprocessing.set_sharing_strategy('file_system')"
        advice.append(
            Advice(action, None, None, None, "workers that are busy hand the tensors of finished batches over")
        )
    return advice


def stuck_worker(evidence: Evidence) -> list[Advice]:
    """One fetch goes on and on."""
    because = f"one fetch has been in progress for {evidence.stuck_seconds:.0f} s"
    raising = "a DataLoader with a timeout fails instead of hanging"
    return [
        Advice("look at what that worker waits for: a lock, a mount, a remote store", None, None, None, because),
        Advice("let a stuck worker raise", "timeout", "120", None, raising),
    ]


def slow_source(evidence: Evidence) -> list[Advice]:
    """Batches come from an iterable that is no DataLoader."""
    now, compute = step_seconds(evidence), compute_seconds(evidence)
    if now is None or compute is None:
        return []
    fetch = evidence.wait / evidence.steps
    because = f"the watched iterable takes {ms(fetch)} of every {ms(now)}{_spent_on(evidence)}"
    advice = _fetch_in_workers(
        evidence, "read it in a DataLoader's workers, as an IterableDataset", "the watched iterable is read in the loop"
    )
    on_cpu = evidence.own_fetch_cpu_share or 0.0
    # Python runs one thread at a time: what a thread that reads ahead runs itself, the training thread waits for.
    step = max(compute, fetch) if on_cpu < 0.5 else compute + fetch * on_cpu
    ahead = Advice("read ahead on another thread, some batches deep", None, None, gain_of(evidence, step), because)
    return sorted([ahead, *advice], key=lambda a: -(a.predicted_speedup or 0.0))


def _more_workers(evidence: Evidence, provided: str = "") -> list[Advice]:
    fetch = evidence.fetch_seconds
    if fetch is None or not evidence.steps:
        return []
    workers, step = best_workers(evidence, *_fetch_on_its_own(evidence))
    if step is None or workers <= evidence.workers:
        return []
    because = (
        f"{evidence.workers} workers of {ms(fetch)} a batch deliver one every {ms(fetch / max(1, evidence.workers))}"
        f"; more deliver more{provided}"
    )
    more = math.ceil(workers / _loaders(evidence))
    if more <= _workers_each(evidence):
        return []
    return [Advice("use more workers", "num_workers", str(more), gain_of(evidence, step), because)]


def _loaders(evidence: Evidence) -> int:
    """How many with workers the loop reads side by side: ``num_workers`` is set for each of them."""
    return max(1, round(evidence.workers / _workers_each(evidence)))


def _workers_each(evidence: Evidence) -> int:
    """``num_workers`` as it is, of the loader that is waited for."""
    return int(evidence.settings.get("num_workers") or evidence.workers or 1)


def _in_a_worker(evidence: Evidence) -> str:
    took = evidence.fetch_cpu_seconds or evidence.fetch_seconds or 0.0
    return f"{ms(took)} of CPU time in a worker"


def _cheaper(because: str, evidence: Evidence) -> Advice:
    to_gpu = "move augmentation to the GPU, " if evidence.on_gpu else ""
    action = f"make the transforms cheaper: decode at a smaller size, {to_gpu}store data prepared"
    return Advice(action, None, None, None, because)


def _faster_storage(because: str) -> Advice:
    return Advice("read from faster storage, or cache the data set locally", None, None, None, because)
