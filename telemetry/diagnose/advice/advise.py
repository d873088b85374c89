"""Advice for each cause: what to change, and the predicted speed-up.

A change is left out when the model of a step (`diagnose.model`) predicts no gain from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.core.formatting import milliseconds as ms
from telemetry.core.recommendation import Advice
from telemetry.diagnose.advice import latency, throughput
from telemetry.diagnose.model import gain_of, gain_over_window, step_seconds, supply_seconds, times_less
from telemetry.diagnose.own_time import own_time, without_own_time
from telemetry.diagnose.straggler import straggler

if TYPE_CHECKING:
    from telemetry.diagnose.evidence import Evidence

WORTH_IT: Final = 1.05
"""Advice with a smaller predicted speed-up is left out: it is not worth a person's time."""

_MIN_MENTIONED_SHARE: Final = 0.1
"""The reason mentions the time around checkpoints from this share of the checkpoint time on."""

_MOSTLY_INSIDE_NEXT: Final = 0.5
"""Share of the collection time inside ``next()`` from which on the advice is about ``next()``."""

_MUCH_LONGER: Final = 1.5
"""The reason mentions that rare checkpoints take longer from this factor on."""

_CHECKPOINT_SHARE: Final = 0.05
"""The advised checkpoint interval leaves checkpoints this share of the time."""

_MAX_ADVICE: Final = 3


def advise(cause: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the most useful first. Empty if no change would help."""
    make = _BY_CAUSE.get(cause)
    if make is None:
        return ()
    own = cause in {"loader_on_training_thread", "gc_pause", "batch_transfer"}  # they look at that time themselves
    if evidence.source == "workers" and not own:
        evidence = without_own_time(evidence)
    wanted = make(evidence)
    return tuple(a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)[:_MAX_ADVICE]


def _checkpoint(evidence: Evidence) -> list[Advice]:
    whole, around = evidence.loop_and_checkpoint_seconds, evidence.checkpoints.extra_compute_seconds
    because = f"checkpoints took {evidence.checkpoints.seconds:.1f} s of {whole:.1f} s"
    if around >= _MIN_MENTIONED_SHARE * evidence.checkpoints.seconds:
        # Renaming a file over the previous one releases the old data: 0.1 s for 250 MB in the page cache.
        because += (
            f", and the steps around them {around:.1f} s more than other steps: "
            "renaming or uploading a file takes time too"
        )
    take = min(whole, evidence.checkpoints.seconds + around)
    without = whole - take
    seldom = times_less(take, without, _CHECKPOINT_SHARE)
    # A rare checkpoint takes as long as the first ones, which had no older file to reuse: torch.save of 250 MB takes
    # 1.0 s into a new file, but 0.3 s just after a file of that size was released.
    rare = max(1, evidence.checkpoints.steps) * evidence.checkpoints.first_seconds
    if rare >= _MUCH_LONGER * take:
        because += (
            f"; the first of them took {evidence.checkpoints.first_seconds:.1f} s each, and rare ones will take as long"
        )
    gain = gain_over_window(evidence, without + max(take, rare) / seldom, now=whole)
    action = f"write a checkpoint {seldom} times less often"
    if evidence.checkpoints.steps > 1 and evidence.steps > evidence.checkpoints.steps:
        every = evidence.steps / evidence.checkpoints.steps
        action = f"write a checkpoint every {seldom * every:.0f} steps, not every {every:.0f}"
    behind = "write checkpoints in the background with torch.distributed.checkpoint.async_save"
    return [Advice(action, None, str(seldom), gain, because), Advice(behind, None, None, None, because)]


def _garbage(evidence: Evidence) -> list[Advice]:
    supply = (supply_seconds(evidence) or 0.0) * evidence.steps  # a step is never shorter than the workers' supply
    gain = gain_over_window(
        evidence, max(evidence.loop_seconds - evidence.garbage.seconds, supply), now=evidence.loop_seconds
    )
    because = (
        f"garbage collection stopped the training thread for {evidence.garbage.seconds:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    inside = own_time(evidence).all_garbage_seconds
    freeze = "call gc.freeze() after the model and the data set are built"
    if inside < _MOSTLY_INSIDE_NEXT * evidence.garbage.seconds:
        return [Advice(freeze, "gc.freeze()", None, gain, because)]
    because += f", {inside:.1f} s of it inside next()"
    where = "the sampler" if evidence.source == "workers" else "the data set, the sampler or collate_fn"
    calls = f"remove calls of gc.collect() from code that runs inside next() on the training thread: {where}"
    return [
        Advice(freeze, "gc.freeze()", None, gain, because),
        Advice(calls, None, None, gain, because),
    ]


def _straggler(evidence: Evidence) -> list[Advice]:
    slow, now = straggler(evidence.pace, evidence.peers, evidence.earlier_paces), step_seconds(evidence)
    if slow is None or now is None:
        return []
    because = f"{slow.name} {slow.why}; this rank waits for it {ms(slow.lost)} of every {ms(now)}"
    action = f"make {slow.name} as fast as the others: all ranks run at the pace of the slowest"
    return [Advice(action, None, None, gain_of(evidence, now - slow.lost, but=slow.rank), because)]


def _host_bound(evidence: Evidence) -> list[Advice]:
    idle = evidence.gpu.idle_seconds or 0.0
    because = f"no kernel ran for {idle:.1f} s of {evidence.loop_seconds:.1f} s, although batches were ready"
    if evidence.pace.where is not None:
        because += f"; the training thread was mostly in {evidence.pace.where}"
    bound = gain_over_window(evidence, evidence.loop_seconds - idle, now=evidence.loop_seconds)
    if bound is not None and bound < WORTH_IT:
        return []
    most = "" if bound is None else f"; without that, steps could be {bound:g} times as fast at most"
    return [
        Advice("launch fewer, larger kernels: torch.compile, CUDA graphs", None, None, None, because + most),
        Advice(
            "remove calls that make the host wait for the GPU: .item(), .cpu(), printing a tensor",
            None,
            None,
            None,
            because,
        ),
    ]


def _gpu_throttled(evidence: Evidence) -> list[Advice]:
    slowed = evidence.gpu.slowed_seconds or 0.0
    because = (
        f"the GPU throttles its clock (temperature or power), which cost {slowed:.1f} s of "
        f"{evidence.loop_seconds:.1f} s"
    )
    gain = gain_over_window(evidence, evidence.loop_seconds - slowed, now=evidence.loop_seconds)
    return [Advice("check the cooling and the power supply of the node, or move the job", None, None, gain, because)]


_BY_CAUSE: Final = {
    "loader_on_training_thread": throughput.on_training_thread,
    "workers_cpu_bound": throughput.cpu_bound,
    "workers_io_bound": throughput.io_bound,
    "workers_throttled": throughput.throttled,
    "worker_startup": latency.startup,
    "uneven_batches": latency.uneven,
    "batch_transfer": latency.transfer,
    "worker_stuck": latency.stuck_worker,
    "source_slow": throughput.slow_source,
    "straggler": _straggler,
    "checkpoint": _checkpoint,
    "gc_pause": _garbage,
    "host_bound": _host_bound,
    "gpu_throttled": _gpu_throttled,
}
