"""Snapshots, stalls, and what the agent itself costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.colours import CAUSES
from grafana.panels import Query, fair_bad, graph
from grafana.selection import of, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries


def agent() -> Iterator[timeseries.Panel]:
    """Its findings, its cost, its health."""
    yield graph(
        "Snapshots",
        "Traces since the start, by how they ended, over the chosen ranks. Recorded traces are in the run folder; "
        "`telemetry trace` reads them. The log (event snapshot) says why others were refused or failed.",
        "short",
        Query(f"sum by (result) ({of('training_snapshots_total')}) > 0", "{{result}}"),
        Query(f"sum by (reason) ({of('training_snapshots_off')}) > 0", "switched off: {{reason}}"),
        no_value="No snapshots",
    )
    yield graph(
        "Stalls",
        "Stalls that have opened since the start, by the cause they opened with, over the chosen ranks. Each has its "
        "evidence and its advice in the log and in `telemetry report`.",
        "short",
        Query(f"sum by (cause) ({of('training_stalls_total')}) > 0", "{{cause}}"),
        colours=CAUSES,
        no_value="No stall has opened",
    )
    yield graph(
        "Cost of the agent",
        "Share of a core, mean over the chosen ranks: time on the training thread, and CPU time of the agent's own "
        "threads. The budget is 1 % and 2 %. Above it, raise interval_seconds or turn gpu_events off.",
        "percentunit",
        Query(f"avg by (thread) ({rate('telemetry_overhead_seconds_total')})", "{{thread}}"),
        steps=fair_bad(0.01, 0.02),
        decimals=2,
    )
    yield graph(
        "Duration of the collectors",
        "How long each collector's last attempt took, the longest of the chosen ranks. A slow `nvml` means that the "
        "driver has a problem; slow `workers` means that there are very many workers.",
        "s",
        Query(f"max by (collector) ({of('telemetry_collector_duration_seconds')})", "{{collector}}"),
    )
    yield graph(
        "Collectors that fail",
        "Ranks on which a collector's last attempt failed. The log (event error) has the message. What the "
        "collector measures is absent meanwhile, not zero.",
        "short",
        Query(f"count by (collector) ({of('telemetry_collector_up')} == 0)", "{{collector}}"),
        stacked=True,
        no_value="All collectors work",
    )
    yield graph(
        "Errors and dropped steps",
        "Failures of the agent's own parts, and steps that it dropped, since the start. The time of dropped steps "
        "is still in the ledger. Neither affects the training. Report an error that repeats.",
        "short",
        Query(f"sum by (source) ({of('telemetry_errors_total')})", "errors: {{source}}"),
        Query(f"sum({of('telemetry_dropped_steps_total')}) > 0", "dropped steps"),
        no_value="None",
    )
