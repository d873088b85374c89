"""Collects from the agent's parts what the endpoint shows of this rank."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from telemetry._version import __version__
from telemetry.node.metrics import RunView
from telemetry.util.processes import job_labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.collectors import CollectorPoller
    from telemetry.agent.restarts import RunCounts, RunLosses
    from telemetry.agent.stalls import StallMonitor
    from telemetry.agent.trends import ChangeMonitor, MemoryWatch
    from telemetry.node.metrics import HangView
    from telemetry.records import GpuSample, Totals
    from telemetry.snapshot.control import SnapshotControl
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity


class RunViewBuilder:
    """Builds a `RunView` from the agent's parts."""

    def __init__(
        self,
        *,
        accounting: Accounting,
        collectors: CollectorPoller,
        memory: MemoryWatch,
        stalls: StallMonitor,
        snapshots: SnapshotControl,
        losses: RunLosses,
        counts: RunCounts,
        changes: ChangeMonitor,
        errors: ErrorLog,
        wall: WallClock,
        hang: Callable[[], HangView | None],
        energy_gpu: Callable[[], GpuSample | None],
        gpu_hour_price: float | None,
    ) -> None:
        self._accounting = accounting
        self._collectors = collectors
        self._memory = memory
        self._stalls = stalls
        self._snapshots = snapshots
        self._losses = losses
        self._counts = counts
        self._changes = changes
        self._errors = errors
        self._wall = wall
        self._hang = hang
        self._energy_gpu = energy_gpu
        self._gpu_hour_price = gpu_hour_price
        self._job_labels = job_labels()

    def view(self, totals: Totals, identity: Identity, *, ended: bool) -> RunView:
        """The current state, with these counters."""
        samples_before, tokens_before = self._counts.before
        accounting, collectors, last = self._accounting, self._collectors, self._accounting.ledger.last_step_ns
        return RunView(
            info=_info_labels(identity) | self._job_labels,
            started_unix_seconds=self._wall.unix_seconds(accounting.ledger.start_ns),
            ended=ended,
            totals=totals,
            step_duration=accounting.stats.histogram(),
            wait_duration=accounting.stats.wait_histogram(),
            last_step_unix_seconds=None if last is None else self._wall.unix_seconds(last),
            errors=dict(self._errors.counts),
            stalls=self._stalls.view(),
            hang=self._hang(),
            snapshots=self._snapshots.view(),
            collectors=collectors.health(),
            gpu=collectors.newest("nvml"),
            energy_gpu=self._energy_gpu(),
            host=collectors.newest("host"),
            process=collectors.newest("process"),
            workers=collectors.newest("workers"),
            own_fetches=accounting.own_fetches(),
            worker_fetches=collectors.worker_fetches(),
            pressure=collectors.newest("pressure"),
            torch_memory=collectors.newest("torch_memory"),
            memory=self._memory.view(),
            attempt=self._losses.view(),
            samples_before=samples_before,
            tokens_before=tokens_before,
            step_change_ratio=self._changes.ratio,
            gpu_hour_price=self._gpu_hour_price,
        )


def _info_labels(identity: Identity) -> dict[str, str]:
    torch = sys.modules.get("torch")
    return {
        "node": identity.node,
        "local_rank": str(identity.local_rank),
        "world_size": str(identity.world_size),
        "launcher": identity.launcher,
        "telemetry_version": __version__,
        "python_version": platform.python_version(),
        "torch_version": str(getattr(torch, "__version__", "")),
    }
