"""Finds out who takes the cores that the training thread lacks: its own threads, its workers, or other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.advice import fewer_workers
from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.model import gain_without
from telemetry.model.records import Advice
from telemetry.util.words import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.model.totals import Totals
    from telemetry.sources.proc import ThreadLoad

# -- threads beyond the cores ------------------------------------------------------------------------------------------

_BEYOND: Final = 1.5
_QUEUED: Final = 0.5
"""There are too many threads if so many times the cores want to run, and so many of them for each core wait for it at
any time. Idle threads are no problem."""

_MIN_TOLD: Final = 0.1
"""The share of the time without a core from which on it is told with too many threads."""

_THREADS_OF_WORKER: Final = 3
"""A worker has two threads of its own: one fetches, and one pickles."""


def too_many_threads(
    load: ThreadLoad | None, loads: Sequence[ThreadLoad], cores: float, delay_ratio: float = 0.0
) -> Finding | None:
    """Threads of the training process beyond its cores, or else those of its workers.

    Args:
        load: the threads with which the training thread computes, and itself; None if unknown.
        loads: the threads of each worker.
        cores: cores that the process may use.
        delay_ratio: share of the time in which the training thread itself had no core.
    """
    on_cores = "1 core" if cores == 1 else f"{cores:g} cores"
    if load is not None and _too_many(load.active, load.queued, cores):
        wanted = max(1, int(cores))
        text = (
            f"{load.active} threads of the training process compute on {on_cores}, and {load.queued:.1f} of them wait "
            "for a core at any time"
        )
        action = _as_many_threads(wanted)
        because = "the threads of an operator wait for one another, and the last of them waits for a core"
    else:
        active, queued = sum(each.active for each in loads), sum(each.queued for each in loads)
        most, wanted = max((each.active for each in loads), default=0), 1
        if most < _THREADS_OF_WORKER or not _too_many(active, queued, cores):
            return None
        text = (
            f"{len(loads)} worker{'s' * (len(loads) > 1)} compute with {active} threads on {on_cores}, and "
            f"{queued:.1f} of them wait for a core at any time"
        )
        action = (
            "let each worker compute with one thread: torch.set_num_threads(1), cv2.setNumThreads(0) in its "
            "worker_init_fn, or OMP_NUM_THREADS=1"
        )
        because = f"{most} threads of a worker want to run at the same time"
    advice = Advice(action, "OMP_NUM_THREADS", str(wanted), because=because)
    share = round(delay_ratio, 4) if delay_ratio >= _MIN_TOLD else None
    if share is not None:
        text += f"; the training thread has none for {rounded_percent(share)} of the time"
    return Finding(kind="threads_oversubscribed", share_ratio=share, text=text, advice=(advice,))


def _too_many(active: int, queued: float, cores: float) -> bool:
    return active >= _BEYOND * cores + 0.5 and queued >= _QUEUED * cores


def _as_many_threads(cores: int) -> str:
    return f"compute with as many threads as cores: OMP_NUM_THREADS={cores}, or torch.set_num_threads({cores})"


# -- a training thread without a core ----------------------------------------------------------------------------------

CROWDED: Final = 0.2
"""The share of the time without a core that is told: that of a stall. On a shared machine some per cent are usual."""

_MIN_CORES: Final = 0.1
"""Who uses less is not named. The same share of the periods of a CPU quota."""


_OWN_CORES: Final = (
    "give this job cores of its own: end the other programs, or reserve cores (CPU request, --cpus-per-task)"
)
_OWN_CORES_FOR_RANKS: Final = "give each rank cores of its own: fewer threads in each, or more cores for the job"


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The run-queue delay of the training thread, and who uses the cores meanwhile.

    Attributes:
        delay_seconds: time in which the thread was ready to run and had no core, of ``seconds``.
        others: cores that other processes use, with the ``ranks`` other ranks of this job on the node.
        workers: cores that its own workers use. ``threads``: that the other threads of the training process use.
        quota_ratio: share of the periods in which the CPU quota of the cgroup was used up.
    """

    delay_seconds: float
    seconds: float
    others: float = 0.0
    ranks: int = 0
    workers: float = 0.0
    threads: float = 0.0
    quota_ratio: float = 0.0

    @property
    def delay_ratio(self) -> float:
        """Share of the time without a core."""
        return min(0.98, self.delay_seconds / self.seconds) if self.seconds > 0 else 0.0


def core_use(totals: Totals, evidence: Evidence, load: ThreadLoad | None = None, cores: float = 1.0) -> CoreUse:
    """The delay over some time of the run, and who uses the cores in the newest window.

    ``load``: the threads with which the training thread computes; None if unknown. ``cores``: what the process may use.
    """
    fetching = (evidence.worker_busy_ratio or 0.0) * evidence.workers * (evidence.worker_cpu_ratio or 0.0)
    return CoreUse(
        delay_seconds=totals.run_queue_delay_seconds or 0.0,
        seconds=sum(totals.ledger_seconds.values()),
        others=evidence.cores_of_others or 0.0,
        ranks=sum(peer.node is None for peer in evidence.peers),
        workers=fetching + (evidence.pickling_cores or 0.0),
        threads=load.running * (1 - 1 / load.active) if load is not None and load.active > cores else 0.0,
        quota_ratio=evidence.throttled_ratio or 0.0,
    )


def cores_missing(use: CoreUse, evidence: Evidence | None = None) -> Finding | None:
    """A training thread that is short of cores, if it is known who uses them and what would help.

    Args:
        use: the delay, and the users.
        evidence: the newest window, for predictions. Without it, only others are told.
    """
    who, advice = _taken_by(use, evidence)
    if use.delay_ratio < CROWDED or not advice:
        return None
    lacks = f"is ready to run and has no core for {rounded_percent(use.delay_ratio)} of the time"
    text = f"The training thread {lacks}: {who}"
    return Finding(kind="cores_missing", share_ratio=round(use.delay_ratio, 4), text=text, advice=advice)


def _taken_by(use: CoreUse, evidence: Evidence | None) -> tuple[str, tuple[Advice, ...]]:
    """Who uses the cores, and what to do about the one that uses most; no advice if nothing is known to help."""

    def without_delay(action: str) -> tuple[Advice, ...]:
        because = f"it waited {use.delay_seconds:.1f} s of {use.seconds:.1f} s for a core"
        # Other ranks of the node get cores as well, so they do not limit this one.
        gain = None if evidence is None else gain_without(structs.replace(evidence, peers=()), use.delay_ratio)
        return (Advice(action, predicted_speedup=gain, because=because),)

    if use.quota_ratio > _MIN_CORES:
        who = f"the CPU quota of its cgroup was used up in {rounded_percent(use.quota_ratio)} of the periods"
        return who, without_delay("raise the CPU limit of the job, or compute with fewer threads and workers")
    ranks = f" (with {use.ranks} other rank{'s' * (use.ranks > 1)} of this job)" if use.ranks else ""
    users = {f"other processes{ranks}": use.others, "its own workers": use.workers, "its other threads": use.threads}
    named = sorted(((cores, user) for user, cores in users.items() if cores >= _MIN_CORES), reverse=True)
    who = " and ".join(f"{user} use {cores:.1f} core{'s' * (f'{cores:.1f}' != '1.0')}" for cores, user in named)
    most = max(users.values())
    if most == use.others and named:
        return who, without_delay(_OWN_CORES_FOR_RANKS if use.ranks else _OWN_CORES)
    if not named or evidence is None:
        return who, ()
    if most == use.threads:
        return who, without_delay(_as_many_threads(max(1, int(evidence.cores))))
    # If the workers need so much of the cores to fetch in time, fewer of them would not help.
    return who, tuple(fewer_workers(evidence))
