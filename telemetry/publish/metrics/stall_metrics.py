"""Metrics of stalls and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.hangs import HANG_KINDS
from telemetry.publish.metrics.metric import COUNTER, GAUGE, Metric, MetricGroup, MetricLabel
from telemetry.records import CAUSES, SNAPSHOT_OFF_REASONS, SNAPSHOT_RESULTS

if TYPE_CHECKING:
    from telemetry.core.views import HangView, SnapshotsView, StallView

CAUSE: Final = MetricLabel("cause", CAUSES)

STALLS: Final[MetricGroup[StallView]] = MetricGroup(
    record=lambda view: view.stalls,
    metrics=(
        Metric(
            name="training_stall_active",
            type=GAUGE,
            label=CAUSE,
            help="1 for the cause of the open stall, 0 for the others.",
            read=lambda stalls: () if stalls.active is None else (stalls.active,),
        ),
        Metric(
            name="training_straggler_rank",
            type=GAUGE,
            help="Number of the rank that this one waits for.",
            absent="unless the cause of the open stall is `straggler`",
            read=lambda stalls: stalls.straggler,
        ),
        Metric(
            name="training_stalls_total",
            type=COUNTER,
            label=CAUSE,
            help="Stalls that have opened, by the cause they opened with.",
            read=lambda stalls: stalls.opened,
        ),
        Metric(
            name="training_stall_lost_seconds_total",
            type=COUNTER,
            unit="seconds",
            label=CAUSE,
            help="Time that this rank lost in stalls.",
            details="Multiply it by the number of GPUs to get GPU time.",
            read=lambda stalls: stalls.lost_seconds,
        ),
    ),
)

HANG: Final[MetricGroup[HangView]] = MetricGroup(
    record=lambda view: view.hang,
    absent="unless the job hangs, and on ranks that do not serve their node",
    metrics=(
        Metric(
            name="training_hang_active",
            type=GAUGE,
            label=MetricLabel("kind", HANG_KINDS),
            help="1 for the kind of the hang, 0 for the others.",
            details="The log has the ranks and a sentence, in lines with `event` = `hang`.",
            read=lambda hang: (hang.kind,),
        ),
        Metric(
            name="training_hang_suspect_rank",
            type=GAUGE,
            help="Number of the rank that the others wait for while the job hangs.",
            details="Of several ranks the first.",
            absent="unless the job hangs and a rank is suspected, and on ranks that do not serve their node",
            read=lambda hang: hang.suspect,
        ),
        Metric(
            name="training_hang_place_info",
            type=GAUGE,
            label=MetricLabel("place"),
            help="Always 1. The label has the file and line where that rank is while the job hangs.",
            details="It names no folder. There is one value for each hang, and none otherwise.",
            absent=(
                "unless the job hangs and the line of the rank that is waited for is known, and on ranks that do not "
                "serve their node"
            ),
            read=lambda hang: None if hang.place is None else {hang.place: 1.0},
        ),
    ),
)

SNAPSHOTS: Final[MetricGroup[SnapshotsView]] = MetricGroup(
    record=lambda view: view.snapshots,
    metrics=(
        Metric(
            name="training_snapshots_total",
            type=COUNTER,
            label=MetricLabel("result", SNAPSHOT_RESULTS),
            help="Snapshots that this rank was asked for, by result.",
            details=(
                "`recorded`: the trace was written. `refused`: something else had priority (the script's own profiler, "
                "a limit). `failed`: an error. `skipped`: this rank did not reach the steps. The log has the reasons, "
                "in lines with `event` = `snapshot`."
            ),
            read=lambda snapshots: snapshots.results,
        ),
        Metric(
            name="training_snapshots_off",
            type=GAUGE,
            label=MetricLabel("reason", SNAPSHOT_OFF_REASONS),
            help="1 for the reason why this run takes no more snapshots.",
            details="`slower`: steps stayed slower after a snapshot. The log has the figures.",
            read=lambda snapshots: () if snapshots.off is None else (snapshots.off,),
        ),
    ),
)
