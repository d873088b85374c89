"""What the endpoint shows of this rank, put together from the agent's parts."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from telemetry._version import __version__
from telemetry.core.job_labels import job_labels
from telemetry.core.views import RunView

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.agent.run_losses import RunLosses
    from telemetry.agent.sampler import Sampler
    from telemetry.agent.snapshot_control import SnapshotControl
    from telemetry.agent.stall_monitor import StallMonitor
    from telemetry.core.clock import WallClock
    from telemetry.core.errors import ErrorLog
    from telemetry.core.identity import Identity
    from telemetry.core.totals import Totals


class RunViewBuilder:
    """Knows where each part of a `RunView` comes from."""

    def __init__(
        self,
        *,
        accounting: Accounting,
        sampler: Sampler,
        stalls: StallMonitor,
        snapshots: SnapshotControl,
        losses: RunLosses,
        errors: ErrorLog,
        wall: WallClock,
    ) -> None:
        self._accounting = accounting
        self._sampler = sampler
        self._stalls = stalls
        self._snapshots = snapshots
        self._losses = losses
        self._errors = errors
        self._wall = wall
        self._job_labels = job_labels()

    def view(self, totals: Totals, identity: Identity, *, ended: bool) -> RunView:
        """The state of this moment, with these counters."""
        accounting, sampler, last = self._accounting, self._sampler, self._accounting.ledger.last_step_ns
        return RunView(
            info=_info_labels(identity) | self._job_labels,
            ended=ended,
            totals=totals,
            step_duration=accounting.stats.histogram(),
            wait_duration=accounting.stats.wait_histogram(),
            last_step_unix_seconds=None if last is None else self._wall.unix_seconds(last),
            errors=dict(self._errors.counts),
            stalls=self._stalls.view(),
            snapshots=self._snapshots.view(),
            collectors=sampler.health(),
            gpu=sampler.newest("nvml"),
            host=sampler.newest("host"),
            process=sampler.newest("process"),
            workers=sampler.newest("workers"),
            own_fetches=accounting.own_fetches(),
            worker_fetches=sampler.worker_fetches(),
            pressure=sampler.newest("pressure"),
            torch_memory=sampler.newest("torch_memory"),
            attempt=self._losses.view(),
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
