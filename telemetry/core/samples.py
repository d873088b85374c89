"""One reading of each polled source."""

from __future__ import annotations

from dataclasses import dataclass, field

from telemetry.core.log_kind import NEWEST


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of this rank's GPU.

    Attributes:
        sm_active_source: where ``sm_active_ratio`` comes from: ``gpm`` (hardware counters), ``process`` (the share of
            time this process ran a kernel) or None when there is no reading.
        energy_joules: of the whole GPU since its driver was loaded.
        throttled: the reasons the clocks are held back right now, from `THROTTLE_REASONS`.
    """

    index: int
    uuid: str
    name: str
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_active_source: str | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    memory_bandwidth_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = field(default=None, metadata=NEWEST)
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    throttled: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HostSample:
    """CPU and memory of the machine. ``cpu_ratio`` is over all cores, since the previous sample."""

    cpu_ratio: float | None
    cpu_count: int
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """This process.

    Attributes:
        cpu_seconds: user + system time since it began. ``children_cpu_seconds``: of its children that have ended and
            been waited for.
        runnable_seconds: run-queue delay of its training thread; None if the kernel does not report it.
            ``running_seconds``: its time on a core.
    """

    cpu_seconds: float = field(metadata=NEWEST)
    resident_memory_bytes: int
    threads: int
    runnable_seconds: float | None = field(default=None, metadata=NEWEST)
    running_seconds: float | None = field(default=None, metadata=NEWEST)
    children_cpu_seconds: float = field(default=0.0, metadata=NEWEST)


@dataclass(frozen=True, slots=True)
class PressureSample:
    """Pressure stall information and cgroup limits.

    Attributes:
        pressure_ratio: by resource (``cpu``, ``io``, ``memory``), the share of time some task waited for it.
        cgroup_cpu_limit: cores the cgroup may use, None without a limit. ``cgroup_cpu_used``: cores that all of it has
            used, other ranks too; None without a limit.
        cgroup_throttled_ratio: share of the enforcement periods in which the cgroup was throttled.
    """

    pressure_ratio: dict[str, float] = field(default_factory=dict)
    cgroup_cpu_limit: float | None = None
    cgroup_cpu_used: float | None = None
    cgroup_throttled_ratio: float | None = None
    cgroup_memory_limit_bytes: int | None = None
    cgroup_memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TorchMemorySample:
    """The CUDA caching allocator on the training thread's device."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class CollectorHealth:
    """State of one collector. ``up`` is None before its first attempt."""

    name: str
    up: bool | None
    duration_seconds: float | None
    reason: str | None
