"""Which settings a loader, the cores and the memory can hold, and why not the others."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.sources.cgroup import PressureSource
from telemetry.sources.collector import CollectorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.tune.memory_room import Room
    from telemetry.tune.trial_result import Settings, Trial

_WORKERS_PER_CORE: Final = 4
_MAX_WORKERS: Final = 32
"""As in the advice: more workers than cores help only where fetches wait for storage."""

_USABLE: Final = 0.8
"""Share of the memory that a proposal may fill."""

_GROWTH: Final = 1.3
"""Workers grow after a trial: pages that they share with the training process are copied when they are touched."""

_UNKNOWN: Final = 0.5
"""What a worker is assumed to take before one was measured, as a share of what the training process takes."""

_DEFAULT_PREFETCH: Final = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can hold.

    Attributes:
        room: memory before the first trial. ``shared``: bytes for batches in shared memory; None if unknown.
        cores: cores of this job. ``ranks``: processes that train.
        loaders: how many loaders are tuned, which all get the same settings.
    """

    room: Room
    shared: int | None
    cores: int
    ranks: int
    loaders: int = 1

    @property
    def max_workers(self) -> int:
        """The most workers of one loader that the cores can hold."""
        return max(1, min(_MAX_WORKERS, _WORKERS_PER_CORE * self.cores // (self.ranks * self.loaders)))

    def against(self, wanted: Settings, known: Trial, trials: Sequence[Trial]) -> str:
        """Why settings cannot be tried; empty if they can.

        Args:
            wanted: the settings.
            known: the trial that they are derived from.
            trials: all trials so far, for what a worker takes.
        """
        workers = int(_value(wanted, known, "num_workers") or 0)
        if workers > self.max_workers:
            return f"{workers} workers are more than {self.cores} cores can hold"
        if not workers:
            return ""
        ahead = workers * int(_value(wanted, known, "prefetch_factor") or _DEFAULT_PREFETCH)
        queued = ahead * known.batch_bytes * self.ranks * self.loaders
        if self.shared is not None and queued > _USABLE * self.shared:
            return f"{ahead} batches of {known.batch_bytes >> 20} MiB do not fit into /dev/shm"
        if not known.memory_bytes:
            return ""
        each = max((trial.worker_bytes or 0 for trial in trials), default=0)
        # Before any worker was measured, the limit that is watched in the trial itself is the one that counts.
        each = int(_GROWTH * each) if each else int(_UNKNOWN * known.memory_bytes / self.ranks)
        need = self._base(known) + workers * self.ranks * self.loaders * each + queued
        if need > _USABLE * self.room.left and (workers > 1 or known.worker_bytes):
            return f"{workers} workers would need about {need >> 20} of {self.room.left >> 20} MiB"
        return ""

    def _base(self, known: Trial) -> int:
        present = self._present(known)
        return known.memory_bytes - present * (known.worker_bytes or 0)

    def _present(self, known: Trial) -> int:
        return int(known.settings.get("num_workers") or 0) * self.ranks * self.loaders


def usable_cores() -> int:
    """The cores that this process may use: by its affinity, and by the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota = PressureSource().read().cgroup_cpu_limit
    except CollectorError:
        quota = None
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _value(wanted: Settings, known: Trial, name: str) -> Any:
    return wanted.loader.get(name, known.settings.get(name))
