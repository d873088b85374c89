"""What to change, and what it is worth.

A change that the model of a step (`diagnose.model`) does not make faster is not advised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnose import arrival, loading
from telemetry.diagnose.model import gain_of, gain_over_window, ms, step_seconds, supply_seconds, times_less
from telemetry.diagnose.own_time import own_time, without_own_time
from telemetry.diagnose.straggler import straggler
from telemetry.records import Advice

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

WORTH_IT: Final = 1.05
"""A predicted speed-up below this is not worth a person's time."""

_WORTH_SAYING: Final = 0.1
"""What is done around checkpoints is spoken of from this share of the checkpoints themselves."""

_MOSTLY: Final = 0.5
"""From this share on, collections are spoken of as those inside ``next()``."""

_MUCH_LONGER: Final = 1.5
"""From here on it is said that a rare checkpoint takes longer."""

_CHECKPOINT_SHARE: Final = 0.05
"""Of the time, that checkpoints may take: they are advised to be written so much less often."""

_MOST_ADVICE: Final = 3


def advise(cause: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the one to make first in front. Empty where nothing would help."""
    make = _BY_CAUSE.get(cause)
    if make is None:
        return ()
    own = cause in {"loader_on_training_thread", "gc_pause"}  # whose subject that time is
    if evidence.source == "workers" and not own:
        evidence = without_own_time(evidence)
    wanted = make(evidence)
    return tuple(a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)[:_MOST_ADVICE]


def _checkpoint(evidence: Evidence) -> list[Advice]:
    whole, around = evidence.with_checkpoints, evidence.around_checkpoints
    because = f"checkpoints took {evidence.checkpoint:.1f} s of {whole:.1f} s"
    if around >= _WORTH_SAYING * evidence.checkpoint:
        # To rename a file over the last one frees that: 0.1 s for 250 MB in the page cache.
        because += f", and their steps {around:.1f} s more than other steps: to rename or upload a file takes time too"
    take = min(whole, evidence.checkpoint + around)
    without = whole - take
    seldom = times_less(take, without, _CHECKPOINT_SHARE)
    # One that is rare takes what the first ones took, which found nothing of an older one to write over: torch.save of
    # 250 MB into a new file 1.0 s, where it takes 0.3 s when a file of that size has just been freed.
    rare = max(1, evidence.checkpoints) * evidence.early_checkpoint
    if rare >= _MUCH_LONGER * take:
        because += f"; the first of them took {evidence.early_checkpoint:.1f} s each, as rare ones will"
    gain = gain_over_window(evidence, without + max(take, rare) / seldom, now=whole)
    action = f"write a checkpoint {seldom} times less often"
    if evidence.checkpoints > 1 and evidence.steps > evidence.checkpoints:
        every = evidence.steps / evidence.checkpoints
        action = f"write a checkpoint every {seldom * every:.0f} steps, not every {every:.0f}"
    behind = "write it while training goes on: torch.distributed.checkpoint.async_save"
    return [Advice(action, None, str(seldom), gain, because), Advice(behind, None, None, None, because)]


def _garbage(evidence: Evidence) -> list[Advice]:
    supply = (supply_seconds(evidence) or 0.0) * evidence.steps  # no step is shorter than the workers' supply
    gain = gain_over_window(evidence, max(evidence.loop - evidence.garbage, supply), now=evidence.loop)
    because = f"garbage collection stopped the training thread for {evidence.garbage:.1f} s of {evidence.loop:.1f} s"
    inside = own_time(evidence).collecting
    freeze = "call gc.freeze() once the model and the data set are built"
    if inside < _MOSTLY * evidence.garbage:
        return [Advice(freeze, "gc.freeze()", None, gain, because)]
    because += f", {inside:.1f} s of it inside next()"
    where = "the sampler" if evidence.source == "workers" else "the data set, the sampler or collate_fn"
    calls = f"take gc.collect() out of what runs inside next() on the training thread, if it is called there: {where}"
    return [
        Advice(freeze, "gc.freeze()", None, gain, because),
        Advice(calls, None, None, gain, because),
    ]


def _straggler(evidence: Evidence) -> list[Advice]:
    slow, now = straggler(evidence.pace, evidence.peers), step_seconds(evidence)
    if slow is None or now is None:
        return []
    because = f"rank {slow.rank} {slow.why}; this rank waits {ms(slow.lost)} of every {ms(now)} for it"
    action = f"make rank {slow.rank} as fast as the others: it is the slowest, and all have its pace"
    return [Advice(action, None, None, gain_of(evidence, now - slow.lost, but=slow.rank), because)]


def _host_bound(evidence: Evidence) -> list[Advice]:
    idle = evidence.gpu_idle or 0.0
    because = f"no kernel ran for {idle:.1f} s of {evidence.loop:.1f} s, though no batch was waited for"
    if evidence.pace.where is not None:
        because += f"; the training thread was mostly in {evidence.pace.where}"
    bound = gain_over_window(evidence, evidence.loop - idle, now=evidence.loop)
    if bound is not None and bound < WORTH_IT:
        return []
    most = "" if bound is None else f"; without that, steps could be {bound:g} times as fast at most"
    return [
        Advice("launch fewer, larger kernels: torch.compile, CUDA graphs", None, None, None, because + most),
        Advice(
            "remove what makes the host wait for the GPU: .item(), .cpu(), print of a tensor", None, None, None, because
        ),
    ]


def _gpu_throttled(evidence: Evidence) -> list[Advice]:
    slowed = evidence.gpu_slowed or 0.0
    because = f"the GPU's clock is held back (heat or power supply), which cost {slowed:.1f} s of {evidence.loop:.1f} s"
    gain = gain_over_window(evidence, evidence.loop - slowed, now=evidence.loop)
    return [Advice("have the node's cooling and power supply looked at, or move the job", None, None, gain, because)]


_BY_CAUSE: Final = {
    "loader_on_training_thread": loading.on_training_thread,
    "workers_cpu_bound": loading.cpu_bound,
    "workers_io_bound": loading.io_bound,
    "workers_throttled": loading.throttled,
    "worker_startup": arrival.startup,
    "uneven_batches": arrival.uneven,
    "batch_transfer": arrival.transfer,
    "worker_stuck": arrival.stuck_worker,
    "source_slow": loading.slow_source,
    "straggler": _straggler,
    "checkpoint": _checkpoint,
    "gc_pause": _garbage,
    "host_bound": _host_bound,
    "gpu_throttled": _gpu_throttled,
}
