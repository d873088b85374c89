"""The Run dashboard, for one run: where its time goes, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders.dashboard import Row

from grafana import frame
from grafana.agent_panels import agent
from grafana.colours import BAD, FAIR, NEUTRAL
from grafana.cost_panels import energy_in_range, lost_in_range
from grafana.gpu_panels import gpus
from grafana.loader_panels import loader
from grafana.loop_panels import ledger, ranks, throughput, verdict
from grafana.machine_panels import machine
from grafana.selection import ALL_RANKS, SELECTED, SELECTED_NOT_ALL, SHOWN_RANKS, of

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def run() -> dashboard.Dashboard:
    """The dashboard."""
    board = (
        frame.board(
            frame.RUN,
            "Training / Run",
            "One training run: its verdict, where the time goes, its ranks, GPUs, data loaders and machines.",
            hours=1,
        )
        .with_variable(frame.variable("run", "Run", "label_values(training_run_info, run)", "The run that is shown"))
        .with_variable(
            frame.variable(
                "rank",
                "Rank",
                'label_values(training_run_info{run="$run"}, rank)',
                "Ranks that are shown; of many, graphs by rank show the 16 that lose most",
                several=True,
                every=ALL_RANKS,
            )
        )
        .with_variable(
            frame.variable(
                "worst", "Worst ranks", SHOWN_RANKS, "Ranks that graphs by rank read", several=True, hidden=True
            )
        )
        .annotation(
            frame.Marks(
                "Stalls",
                f"count by (cause) ({of('run_rank_cause:training_stall_active:max')})",
                "stall: {{cause}}",
                FAIR,
            )
        )
        .annotation(
            frame.Marks(
                "Hangs",
                'max by (run, kind) (training_hang_active{run="$run"} == 1) * on (run) group_left (place) '
                'topk by (run) (1, max by (run, place) (training_hang_place_info{run="$run"})) or '
                'max by (run, kind) (training_hang_active{run="$run"} == 1) '
                'unless on (run) training_hang_place_info{run="$run"}',
                "the job hangs: {{kind}} {{place}}",
                BAD,
            )
        )
        .annotation(
            frame.Marks(
                "Snapshots",
                f"sum by (result) (run_result:training_snapshots:increase2m{{{SELECTED}}} or "
                f"increase(training_snapshots_total{{{SELECTED_NOT_ALL}}}[$__rate_interval])) > 0",
                "snapshot {{result}}",
                NEUTRAL,
            )
        )
        .annotation(
            frame.Marks(
                "Attempts",
                'count_values("attempt", training_run_attempt{run="$run"}) '
                'unless count_values("attempt", training_run_attempt{run="$run"} offset 1m)',
                "attempt {{attempt}} begins",
                NEUTRAL,
            )
        )
        .annotation(
            frame.Marks(
                "Changes",
                'max by (run) (training_step_change_ratio{run="$run"}) > 1.05 unless '
                'max by (run) (training_step_change_ratio{run="$run"} offset 2m) > 1.05',
                "steps became slower",
                FAIR,
            )
        )
        .annotation(
            frame.Marks("Ended", 'count(training_run_ended{run="$run", rank=~"$rank"} == 1)', "ranks have ended", BAD)
        )
    )
    sections = {
        "Verdict": verdict(),
        "Where the time goes": (
            *ledger(),
            throughput(),
            lost_in_range('run="$run"').span(6).height(8),
            energy_in_range('run="$run"').span(6).height(8),
        ),
        "Rank by rank": ranks(),
        "GPUs": gpus(),
        "Data loader": loader(),
        "Host and pressure": machine(),
        "Snapshots, and the agent itself": agent(),
    }
    for title, panels in sections.items():
        board = board.with_row(Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return frame.built(board)
