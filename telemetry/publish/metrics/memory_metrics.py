"""Metrics of memory that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import GAUGE, Metric, MetricGroup, MetricLabel
from telemetry.records import MEMORY_PARTS

if TYPE_CHECKING:
    from telemetry.records import MemoryGrowth

WHERE: Final = MetricLabel("where", MEMORY_PARTS)

MEMORY_GROWTH: Final[MetricGroup[MemoryGrowth]] = MetricGroup(
    record=lambda view: view.memory,
    absent="in the first seconds of training",
    metrics=(
        Metric(
            name="training_memory_growth_bytes_per_second",
            type=GAUGE,
            unit="bytes",
            label=WHERE,
            help="Lasting growth of memory: 0 for a part that does not grow for good.",
            details=(
                "Growth at the start, up to a cache's size, in single jumps, and of workers that are started anew in "
                "each epoch is not counted. [Memory](memory.md) explains the parts."
            ),
            absent="for a part that the run does not have, such as `workers` without workers",
            read=lambda growth: growth.bytes_per_second,
        ),
        Metric(
            name="training_memory_exhausted_in_seconds",
            type=GAUGE,
            unit="seconds",
            help="Time until memory is used up, if it goes on growing as it does.",
            details=(
                "The memory limit of the cgroup or the memory of the machine, `/dev/shm`, or the memory of the GPU, "
                "whichever is used up first."
            ),
            absent="while no memory grows for good, or its end is not in sight",
            read=lambda growth: growth.exhausted_in_seconds,
        ),
    ),
)
