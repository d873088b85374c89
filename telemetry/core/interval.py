"""One tick of the agent, what happened between two of them, and the pace that peers see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from telemetry.core.totals import Totals


@dataclass(frozen=True, slots=True)
class RankPace:
    """One rank over its newest window, as its peers see it.

    Attributes:
        seconds: length of the window without the start of the run. ``steps``: that ended in it.
        compute_seconds: of it. ``exposed_wait_seconds``: None where it is not known. ``away_seconds``: neither waiting
            nor computing.
        samples: how often the training thread was sampled while it computed; ``in_sync_samples``: of them, in calls in
            which ranks wait for one another.
        on_gpu: whether it trains on a GPU: there ranks wait for one another wherever the host waits for the GPU.
            ``gpu_busy_ratio``: share of the time in which that ran something; a rank that waits for others keeps it
            busy.
        cause: of the rank's open stall. ``where``: the line of its own code it was sampled in most, outside of calls in
            which ranks wait.
        phase: the category of the ledger it is in, of an evaluation or a checkpoint: the others may wait for its end.
        seconds_without_step: since its newest step; ``waits_for_ranks``: whether it has spent them where ranks wait for
            one another.
        node: name of its node, of a rank on another one; None for a rank of this node.
        stuck: whether it has ended no step for ``stuck_seconds``. ``still_seconds``: since the hooks last saw its
            training thread go on, in whatever it does.
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
    node: str | None = None
    stuck: bool = False
    still_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was true at a tick, and is no counter.

    Attributes:
        source: where the batches since the last tick came from: ``training_thread`` (a DataLoader without workers),
            ``workers``, ``watched`` (an iterable that is no DataLoader), ``read_ahead`` (threads of the training
            process), None before the first batch.
        settings: of the loader in use, by the names of DataLoader's arguments.
        in_loop: the time since the last tick was mostly spent in the training loop.
        where: the line of the user's own code that the training thread was sampled in most, see `RankPace`.
        fetching_seconds: how long the longest fetch in progress has taken; None without a sample of the workers.
        fetched: of each live training worker, by its pid: its fetches so far, and the seconds they took.
        worker_cores: on how many cores the workers may run; None where that is not known.
        cores: that this rank may use, by its affinity and its cgroup's quota. ``quota_cores``: that quota.
        host_cores: of the machine, 0 where that is not known.
        on_gpu: whether there is a reading of the GPU.
        peers: the other ranks of this node.
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
