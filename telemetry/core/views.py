"""The state of a rank that the endpoint shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.records import (
        CollectorHealth,
        GpuSample,
        Histogram,
        HostSample,
        MemoryGrowth,
        PressureSample,
        ProcessSample,
        TorchMemorySample,
        Totals,
        WorkersSample,
    )


@dataclass(frozen=True, slots=True)
class StallView:
    """Stalls so far: the cause of the open one (None for none), and by cause their number and seconds lost.

    ``straggler`` is the rank that this one waits for, if that is the cause of the open stall.
    """

    active: str | None
    opened: dict[str, int]
    lost_seconds: dict[str, float]
    straggler: int | None = None


@dataclass(frozen=True, slots=True)
class HangView:
    """A job that hangs: why, from `HANG_KINDS`, and the rank that the others wait for (the first; None for none).

    ``place``: file and line where that rank is, without folders; None if that is not known.
    """

    kind: str
    suspect: int | None
    place: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotsView:
    """Snapshots so far by result. ``off``: why no more are taken, from `SNAPSHOT_OFF_REASONS`; None if they are."""

    results: dict[str, int]
    off: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptView:
    """The attempt of the run: its number, how many in a row made no progress, and the run's lost seconds so far."""

    number: int
    without_progress: int
    lost_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything the endpoint shows of one rank at one moment: its counters and gauges. None: not measured.

    ``own_fetches``: durations of the training thread's own fetches, without workers. ``worker_fetches``: those of all
    workers so far, even if ``workers`` could not be read this time. ``energy_gpu``: the newest sample of the GPU whose
    energy is counted, even if ``gpu`` could not be read this time. ``step_change_ratio``: see `ChangeDetector`.
    ``gpu_hour_price``: the setting; None without it.
    ``samples_before``, ``tokens_before``: of the rank in earlier attempts of the run.
    """

    info: dict[str, str]
    ended: bool
    totals: Totals
    step_duration: Histogram
    wait_duration: Histogram
    last_step_unix_seconds: float | None
    errors: dict[str, int]
    stalls: StallView | None = None
    hang: HangView | None = None
    snapshots: SnapshotsView | None = None
    collectors: tuple[CollectorHealth, ...] = ()
    gpu: GpuSample | None = None
    energy_gpu: GpuSample | None = None
    host: HostSample | None = None
    process: ProcessSample | None = None
    workers: WorkersSample | None = None
    own_fetches: Histogram | None = None
    worker_fetches: Histogram | None = None
    pressure: PressureSample | None = None
    torch_memory: TorchMemorySample | None = None
    memory: MemoryGrowth | None = None
    attempt: AttemptView | None = None
    step_change_ratio: float | None = None
    gpu_hour_price: float | None = None
    samples_before: int = 0
    tokens_before: int = 0

    @property
    def samples(self) -> int | None:
        """Samples of this rank over all attempts; None if those of this one are not known."""
        return None if self.totals.samples is None else self.samples_before + self.totals.samples

    @property
    def tokens(self) -> int | None:
        """The same for tokens."""
        return None if self.totals.tokens is None else self.tokens_before + self.totals.tokens
