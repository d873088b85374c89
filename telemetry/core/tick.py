"""One tick of the agent, the conditions at it, and the pace of a rank as its peers see it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

from telemetry.core.labels import CAUSES
from telemetry.core.totals import Totals

DEBUGGED: Final = "debugger"
"""The phase of a rank whose training thread a debugger has paused."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """One rank over its newest window, as its peers see it.

    Attributes:
        seconds: length of the window without the start of the run. ``steps``: steps that ended in it. ``last_step``:
            steps of the run that had ended at its end. It shows which windows of two ranks are of the same time: what
            other nodes say is some seconds old.
        compute_seconds: compute in the window. ``exposed_wait_seconds``: None if unknown. ``away_seconds``: neither
            wait nor compute.
        samples: how often the training thread was sampled while it computed. ``in_sync_samples``: samples in calls in
            which ranks wait for one another.
        on_gpu: whether it trains on a GPU. There, ranks wait for one another wherever the host waits for the GPU.
            ``gpu_busy_ratio``: share of the time in which the GPU ran something. A rank that waits for others keeps its
            GPU busy.
        cause: the cause of the rank's open stall; None without one. ``where``: the line of the user's code in most
            samples, outside of calls in which ranks wait.
        phase: the category of the ledger, if it is an evaluation or a checkpoint, or `DEBUGGED`: other ranks may wait
            for its end.
        seconds_without_step: time since its newest step. ``waits_for_ranks``: whether it has spent this time in calls
            in which ranks wait for one another.
        away_in: the category of the ledger with most of the time that is neither wait nor compute; None without any.
        core_wait_seconds: how long its training thread was runnable without a core, in the window; None if unknown.
            ``cores_busy_ratio``: use of all cores of its machine.
        node: name of its node, for a rank on another node; None for a rank of this node.
        node_ranks: number of ranks on that node; 0 for a rank of this node. ``node_fastest``: whether it is one of the
            fastest of them. If the others wait even for these, they wait for all ranks of that node.
        stuck: whether it has ended no step for ``stuck_seconds``. ``still_seconds``: time since the hooks last saw
            progress of its training thread, of any kind.
        run_wait_seconds, run_loop_seconds, run_first_wait_seconds: of the whole run so far, as `RankWaits` has them.
            ``run_exposed_seconds``: None if it is unknown, or batches were not seen.
        run_cause: the cause of its costliest stall of the run; None without one. ``run_lost_seconds``: what that cost.
    """

    rank: int
    seconds: float
    steps: int
    compute_seconds: float
    exposed_wait_seconds: float | None
    away_seconds: float
    samples: int = 0
    in_sync_samples: int = 0
    on_gpu: bool = False
    cause: str | None = None
    where: str | None = None
    phase: str | None = None
    seconds_without_step: float = 0.0
    waits_for_ranks: bool = False
    gpu_busy_ratio: float | None = None
    away_in: str | None = None
    core_wait_seconds: float | None = None
    cores_busy_ratio: float | None = None
    node: str | None = None
    node_ranks: int = 0
    node_fastest: bool = False
    stuck: bool = False
    last_step: int = 0
    still_seconds: float = 0.0
    run_wait_seconds: float = 0.0
    run_loop_seconds: float = 0.0
    run_first_wait_seconds: float = 0.0
    run_exposed_seconds: float | None = None
    run_cause: str | None = None
    run_lost_seconds: float = 0.0


_NUMBERS: Final = frozenset({
    "rank", "seconds", "steps", "compute_seconds", "away_seconds", "samples", "in_sync_samples", "seconds_without_step",
    "node_ranks", "last_step", "run_wait_seconds", "run_loop_seconds", "run_first_wait_seconds", "run_lost_seconds",
})  # fmt: skip
_PACE_DEFAULTS: Final = {field.name: field.default for field in fields(RankPace)}


def pace_fields(pace: RankPace) -> dict[str, Any]:
    """A pace as JSON values, without fields that have their default. `pace_from` makes it again.

    In a job of 1,250 nodes a node reads 1,400 paces every 10 s.
    """
    return {name: value for name in _PACE_DEFAULTS if (value := getattr(pace, name)) != _PACE_DEFAULTS[name]}


def pace_from(found: dict[str, Any]) -> RankPace:
    """A pace as another process has written it. Fields that a newer version has added are left out.

    Raises:
        TypeError: a field is missing or is not a number although it must be one.
        ValueError: a number is infinite, or none.
    """
    newer = found.keys() - _PACE_DEFAULTS.keys()
    pace = RankPace(**({name: found[name] for name in found.keys() - newer} if newer else found))
    for name in found.keys() & _NUMBERS:
        value = found[name]
        if not isinstance(value, (int, float)):
            raise TypeError(name)
        if not abs(value) < math.inf:  # NaN compares false
            raise ValueError(name)
    exposed = pace.run_exposed_seconds
    if exposed is not None and not (isinstance(exposed, (int, float)) and abs(exposed) < math.inf):
        raise TypeError("run_exposed_seconds")
    if pace.run_cause is not None and pace.run_cause not in CAUSES:
        raise ValueError("run_cause")
    return pace


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was true at a tick and is not a counter.

    Attributes:
        source: where the batches since the last tick came from: ``training_thread`` (a DataLoader without workers),
            ``workers``, ``watched`` (an iterable that is not a DataLoader), ``read_ahead`` (threads of the training
            process), None before the first batch.
        settings: settings of the loader in use, by the names of DataLoader's arguments.
        in_loop: whether most of the time since the last tick was spent in the training loop.
        where: the line of the user's code in most samples of the training thread, see `RankPace`.
        fetching_seconds: duration so far of the longest fetch in progress; None without a sample of the workers.
        fetched: for each live training worker, by pid: its fetches so far, and their seconds.
        worker_cores: number of cores that the workers may use; None if unknown.
        cores: cores that this rank may use, by its affinity and its cgroup's quota. ``quota_cores``: that quota.
        host_cores: cores of the machine, 0 if unknown.
        on_gpu: whether there is a reading of the GPU.
        peers: the other ranks of this node, and the ranks of other nodes that this one may wait for.
    """

    source: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    in_loop: bool = True
    where: str | None = None
    fetching_seconds: float | None = None
    fetched: dict[int, tuple[int, float]] = field(default_factory=dict)
    worker_cores: int | None = None
    cores: float = 1.0
    quota_cores: float | None = None
    host_cores: int = 0
    on_gpu: bool = False
    peers: tuple[RankPace, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The counters of the run at one tick, and the conditions."""

    totals: Totals = Totals()
    conditions: Conditions = Conditions()
