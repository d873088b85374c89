"""Metrics of the agent itself: its cost, its errors and its collectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, Metric, MetricGroup, MetricLabel

if TYPE_CHECKING:
    from telemetry.core.views import RunView

COLLECTOR: Final = MetricLabel(
    "collector", ("nvml", "host", "process", "workers", "pressure", "torch_memory", "memory")
)
_NO_ATTEMPT: Final = "for a collector with nothing to read (`torch_memory` without CUDA), and before its first attempt"


def _up(view: RunView) -> dict[str, float]:
    return {health.name: health.up for health in view.collectors if health.up is not None}


def _durations(view: RunView) -> dict[str, float]:
    return {h.name: h.duration_seconds for h in view.collectors if h.duration_seconds is not None}


AGENT: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view,
    metrics=(
        Metric(
            name="telemetry_overhead_seconds_total",
            type=COUNTER,
            unit="seconds",
            label=MetricLabel("thread", ("training", "agent")),
            help="Time that the agent cost, by thread.",
            details=(
                "`training`: time on the training thread, extrapolated from one call in 64. `agent`: CPU time of the "
                "agent's own threads."
            ),
            read=lambda view: view.totals.overhead_seconds,
        ),
        Metric(
            name="telemetry_errors_total",
            type=COUNTER,
            unit="errors",
            label=MetricLabel("source"),
            help="Failures of the agent's own parts.",
            details="The log has the messages, in lines with `event` = `error`.",
            absent="for a source that has not failed",
            read=lambda view: view.errors,
        ),
        Metric(
            name="telemetry_dropped_steps_total",
            type=COUNTER,
            unit="steps",
            help="Steps that the agent dropped because the ring was full.",
            details=(
                "They are in `training_steps_total` and their time is in the ledger, but they are in no histogram."
            ),
            read=lambda view: view.totals.dropped_steps,
        ),
        Metric(
            name="telemetry_collector_up",
            type=GAUGE,
            label=COLLECTOR,
            help="1 if the collector's last attempt worked, else 0.",
            absent=_NO_ATTEMPT,
            read=_up,
        ),
        Metric(
            name="telemetry_collector_duration_seconds",
            type=GAUGE,
            unit="seconds",
            label=COLLECTOR,
            help="Duration of the collector's last attempt.",
            absent=_NO_ATTEMPT,
            read=_durations,
        ),
    ),
)
