"""Metrics of the attempts of a run, and of what restarts and hangs have cost it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.publish.metrics.metric import COUNTER, GAUGE, Metric, MetricGroup, MetricLabel

if TYPE_CHECKING:
    from telemetry.core.views import AttemptView

LOST: Final = MetricLabel("category", ("redone", "restore", "replay", "startup", "stuck", "down"))

ATTEMPTS: Final[MetricGroup[AttemptView]] = MetricGroup(
    record=lambda view: view.attempt,
    absent="on other ranks than 0",
    metrics=(
        Metric(
            name="training_run_attempt",
            type=GAUGE,
            help="Number of this attempt of the run, from 0.",
            details="A run that is restarted in the same run folder, under the same name, begins another attempt.",
            read=lambda attempt: attempt.number,
        ),
        Metric(
            name="training_run_attempts_without_progress",
            type=GAUGE,
            help="Attempts in a row that ended without completing a checkpoint.",
            details="Those directly before this one; 0 as soon as this one completes a checkpoint.",
            read=lambda attempt: attempt.without_progress,
        ),
        Metric(
            name="training_run_lost_seconds_total",
            type=COUNTER,
            unit="seconds",
            label=LOST,
            help="Time that restarts and hangs have cost the run, over all its attempts.",
            details=(
                "It goes on from the attempts before, through a small file in the run folder. Multiply it by the "
                "number of ranks to get GPU time. `redone` is counted when the next attempt begins. "
                "[Goodput](goodput.md) explains the categories."
            ),
            read=lambda attempt: attempt.lost_seconds,
        ),
    ),
)
