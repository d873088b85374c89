"""The causes of lost time: one table with all properties of each cause.

`telemetry.diagnosis.costs` computes what a cause costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis import advice
from telemetry.diagnosis.costs import costs, without_own_time
from telemetry.diagnosis.misuse import mended_first
from telemetry.diagnosis.model import WORTH_IT
from telemetry.util.profiles import CHECKPOINT, FETCH, STEP, WAIT
from telemetry.util.words import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.model.records import Advice


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of lost time.

    Attributes:
        means: in plain words.
        advise: what to change, the most useful first; None if there is no advice.
        is_wait: whether it is a cause of exposed wait. Whether a run is starved depends on the sum of these.
        work: the work that is sampled during its stalls to find the lines of the user's code. Empty for causes that
            spend no time in code.
        per_step: whether it is about the time of a step. Without a step there is no advice.
        own_time: whether its advice looks at the training thread's own time inside ``next()`` itself.
    """

    means: str = ""
    advise: Callable[[Evidence], list[Advice]] | None = None
    is_wait: bool = False
    work: tuple[str, ...] = ()
    per_step: bool = False
    own_time: bool = False


CAUSES: Final = {
    "loader_on_training_thread": Cause(
        "the training thread makes the batches itself",
        advice.on_training_thread,
        is_wait=True,
        work=(WAIT, FETCH),
        per_step=True,
        own_time=True,
    ),
    "workers_cpu_bound": Cause(
        "the CPU time of the workers is the limit", advice.cpu_bound, is_wait=True, work=(FETCH,)
    ),
    "workers_io_bound": Cause(
        "the workers wait for storage or the network", advice.io_bound, is_wait=True, work=(FETCH,)
    ),
    "workers_throttled": Cause("the workers wait for cores", advice.throttled, is_wait=True, work=(FETCH,)),
    "worker_startup": Cause(
        "workers start anew, or fetch a first batch, at each epoch", advice.startup, is_wait=True, per_step=True
    ),
    "uneven_batches": Cause(
        "the workers are fast enough on average, but single batches are late",
        advice.uneven,
        is_wait=True,
        work=(FETCH,),
        per_step=True,
    ),
    "batch_transfer": Cause(
        "batches are ready, but their way into the training process is slow",
        advice.transfer,
        is_wait=True,
        per_step=True,
        own_time=True,
    ),
    "worker_stuck": Cause("a worker does not go on", advice.stuck_worker, is_wait=True),
    "source_slow": Cause(
        "the iterable that the loop reads is slow", advice.slow_source, is_wait=True, work=(WAIT, FETCH), per_step=True
    ),
    "straggler": Cause("this rank waits for another one", advice.slow_rank, per_step=True),
    "checkpoint": Cause("the training waits while checkpoints are written", advice.checkpoint, work=(CHECKPOINT,)),
    "gc_pause": Cause(
        "garbage collections of Python stop the training", advice.garbage, work=(STEP, WAIT), own_time=True
    ),
    "recompiling": Cause("torch.compile compiles again and again", advice.recompiling),
    "host_bound": Cause("the GPU waits for the Python code of the step", advice.host_bound, work=(STEP,)),
    "gpu_throttled": Cause("the GPU has reduced its clock", advice.gpu_throttled),
    "unknown": Cause(is_wait=True, work=(FETCH,)),
}
"""Why a run loses time, by name: the values of the ``cause`` label."""


# -- advice for a cause ------------------------------------------------------------------------------------------------

_MAX_ADVICE: Final = 3


def advise(name: str, evidence: Evidence) -> tuple[Advice, ...]:
    """At most three changes, the most useful first. Empty if no change would help."""
    cause = CAUSES.get(name)
    if cause is None or cause.advise is None or (cause.per_step and not evidence.steps):
        return ()
    wanted = mended_first(evidence) if cause.is_wait and evidence.steps else []
    if not wanted:
        own = evidence.source != "workers" or cause.own_time
        wanted = cause.advise(evidence if own else without_own_time(evidence))
    worth_it = (a for a in wanted if a.predicted_speedup is None or a.predicted_speedup >= WORTH_IT)
    return tuple(worth_it)[:_MAX_ADVICE]


# -- two causes at once: those that cost nearly as much as the one that a stall is named after -------------------------

_SIMILAR: Final = 0.5
"""Least cost of another cause that is named, as a share of the cost of the first one."""

_MIN_SHARE: Final = 0.1
"""Least cost of another cause that is named, as a share of the time."""

_MAX_NAMED: Final = 2


def shares_of(cause: str, evidence: Evidence) -> dict[str, float]:
    """The shares of the training loop and checkpoints that the cause of a stall, and causes of similar size, have cost.

    The cause of the stall stays the first, and then comes the largest.
    """
    whole, lost = evidence.loop_and_checkpoint_seconds, costs(evidence)
    if whole <= 0 or cause not in lost:
        return {}
    least = max(_SIMILAR * lost[cause], _MIN_SHARE * whole)
    similar = [name for name in lost if name not in {cause, "unknown"} and lost[name] >= least]
    named = [cause, *sorted(similar, key=lambda name: -lost[name])[:_MAX_NAMED]]
    return {name: min(1.0, lost[name] / whole) for name in named}


def with_what_remains(wanted: Sequence[Advice], others: Mapping[str, float]) -> tuple[Advice, ...]:
    """Advice for the first cause, with the shares of the other causes that remain after it is followed."""

    def remaining(one: Advice) -> str:
        gain = one.predicted_speedup or 1.0
        left = [f"{cause} with {rounded_percent(min(1.0, share * gain))}" for cause, share in others.items()]
        return f"{'' if one.predicted_speedup is None else 'afterwards '}{' and '.join(left)} of the time remain"

    return tuple(structs.replace(one, because=f"{one.because}; {remaining(one)}") for one in wanted)
