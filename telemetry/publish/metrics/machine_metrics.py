"""Metrics of the training process, its machine and its cgroup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, Metric, MetricGroup, MetricLabel

if TYPE_CHECKING:
    from telemetry.records import HostSample, PressureSample, ProcessSample

RESOURCE: Final = MetricLabel("resource", ("cpu", "io", "memory"))

PROCESS: Final[MetricGroup[ProcessSample]] = MetricGroup(
    record=lambda view: view.process,
    absent="without `/proc`",
    metrics=(
        Metric(
            name="training_process_cpu_seconds_total",
            type=COUNTER,
            unit="seconds",
            help="CPU time of the training process, without its workers.",
            read=lambda process: process.cpu_seconds,
        ),
        Metric(
            name="training_process_resident_memory_bytes",
            type=GAUGE,
            unit="bytes",
            help="Resident memory of the training process.",
            read=lambda process: process.resident_memory_bytes,
        ),
        Metric(
            name="training_process_threads",
            type=GAUGE,
            unit="threads",
            help="Threads of the training process.",
            read=lambda process: process.threads,
        ),
    ),
)

HOST: Final[MetricGroup[HostSample]] = MetricGroup(
    record=lambda view: view.host,
    of_node=True,
    metrics=(
        Metric(
            name="training_host_cpu_ratio",
            type=GAUGE,
            unit="ratio",
            help="CPU use of the machine, over all its cores.",
            absent="at the first reading",
            read=lambda host: host.cpu_ratio,
        ),
        Metric(
            name="training_host_memory_used_bytes",
            type=GAUGE,
            unit="bytes",
            help="Memory of the machine that is not available.",
            read=lambda host: host.memory_used_bytes,
        ),
        Metric(
            name="training_host_memory_total_bytes",
            type=GAUGE,
            unit="bytes",
            help="Total memory of the machine.",
            read=lambda host: host.memory_total_bytes,
        ),
    ),
)

PRESSURE: Final[MetricGroup[PressureSample]] = MetricGroup(
    record=lambda view: view.pressure,
    of_node=True,
    metrics=(
        Metric(
            name="training_host_pressure_ratio",
            type=GAUGE,
            unit="ratio",
            label=RESOURCE,
            help="Share of time in which some task of the machine waited for the resource.",
            absent="where the kernel has no `/proc/pressure`; at the first reading",
            read=lambda pressure: pressure.pressure_ratio or None,
        ),
        Metric(
            name="training_cgroup_cpu_limit_cores",
            type=GAUGE,
            unit="cores",
            help="CPU limit of the cgroup.",
            absent="without a limit",
            read=lambda pressure: pressure.cgroup_cpu_limit,
        ),
        Metric(
            name="training_cgroup_cpu_throttled_ratio",
            type=GAUGE,
            unit="ratio",
            help="Share of the enforcement periods in which the cgroup was throttled.",
            absent="without a CPU controller; at the first reading",
            read=lambda pressure: pressure.cgroup_throttled_ratio,
        ),
        Metric(
            name="training_cgroup_memory_limit_bytes",
            type=GAUGE,
            unit="bytes",
            help="Memory limit of the cgroup.",
            absent="without a limit",
            read=lambda pressure: pressure.cgroup_memory_limit_bytes,
        ),
        Metric(
            name="training_cgroup_memory_used_bytes",
            type=GAUGE,
            unit="bytes",
            help="Memory in use in the cgroup.",
            absent="without a memory controller",
            read=lambda pressure: pressure.cgroup_memory_used_bytes,
        ),
    ),
)
