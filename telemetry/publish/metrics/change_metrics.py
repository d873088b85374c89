"""The metric of lasting changes of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import GAUGE, Metric, MetricGroup

if TYPE_CHECKING:
    from telemetry.core.views import RunView

CHANGES: Final[MetricGroup[RunView]] = MetricGroup(
    record=lambda view: view,
    metrics=(
        Metric(
            name="training_step_change_ratio",
            type=GAUGE,
            unit="ratio",
            help="Duration of a step now, relative to that before the slow-down that holds on; 1 without one.",
            details=(
                "1.12: steps take 12 % longer than before. The log has when, which part of the step and what changed "
                "with it, in lines with `event` = `change`. See [Changes](changes.md)."
            ),
            absent="while the training loop has run for less than about 15 minutes",
            read=lambda view: view.step_change_ratio,
        ),
    ),
)
