"""The Fleet dashboard, for all runs: what is lost, where to look first, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana_foundation_sdk.builders.dashboard import Row

from grafana import frame
from grafana.colours import BAD, CAUSES, FAIR
from grafana.cost_panels import costs, lost_in_range
from grafana.panels import Query, bars, fair_bad, figure, graph, half
from grafana.tables import Column, exposed_wait, lost_share, rows, sm_activity, steps_a_second

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import bargauge, stat, table, timeseries
    from grafana_foundation_sdk.models import dashboard

_RUNS: Final = 'run=~"$run"'
_NONE_OF_THEM: Final = f"0 * sum by (run) (run:training_ranks_alive:sum{{{_RUNS}}})"
_NODE: Final = "* on (run, rank) group_left (node) run_rank_node:training_run_info:max"
_CAUSE: Final = "* on (run, rank) group_left (cause) run_rank_cause:training_stall_lost_seconds:top_rate5m"

# A number of GPUs, read once a minute and summed, gives GPU-minutes. A run that starts or ends counts for the time that
# it was there.
_LOST_MINUTES: Final = f"sum_over_time(run_cause:training_stall_lost_seconds:rate5m{{{_RUNS}}}[$__range:1m])"
_LOST_MINUTES_AT_END: Final = _LOST_MINUTES.replace("1m]", "1m] @ end()")


def fleet() -> dashboard.Dashboard:
    """The dashboard."""
    board = frame.board(
        frame.FLEET,
        "Training / Fleet",
        "All training runs: GPU-hours lost to starvation and other stalls, the worst runs, ranks and GPUs.",
        hours=6,
        refresh="1m",
    ).with_variable(
        frame.variable("run", "Run", "label_values(training_run_info, run)", "Runs that are shown", several=True)
    )
    board = board.with_row(Row("What is lost"))
    for one in _figures():
        board = board.with_panel(one)
    for each in _losses():
        board = board.with_panel(each)
    board = board.with_row(Row("What it costs"))
    for priced in costs(_RUNS):
        board = board.with_panel(priced)
    board = board.with_row(Row("Where to look first")).with_panel(_worst_runs()).with_panel(_worst_ranks())
    board = board.with_row(Row("Runs that make no progress")).with_panel(_no_progress().span(18))
    board = board.with_panel(lost_in_range(_RUNS).height(6))
    board = board.with_row(Row("What is trained"))
    for each in _throughput_by_run():
        board = board.with_panel(each)
    board = board.with_row(Row("GPUs that are busy but starved")).with_panel(_starved_gpus())
    for each in _gpus():
        board = board.with_panel(each)
    return frame.built(board)


def _figures() -> Iterator[stat.Panel]:
    yield figure(
        "Runs",
        "Runs of which at least one rank is alive. Fewer than you expect: look for runs that make no progress, below.",
        "short",
        Query(f"count(run:training_ranks_alive:sum{{{_RUNS}}} > 0)"),
    )
    yield figure(
        "Ranks",
        "Ranks that are alive, over all runs. One rank drives one GPU.",
        "short",
        Query(f"sum(run:training_ranks_alive:sum{{{_RUNS}}})"),
    )
    yield figure(
        "GPUs lost right now",
        "Time lost in stalls per second, summed over all ranks. 3 means the equivalent of three idle GPUs. The "
        "tables below show which runs lose them.",
        "short",
        Query(f"sum(run_cause:training_stall_lost_seconds:rate5m{{{_RUNS}}})"),
        steps=fair_bad(0.5, 2),
        decimals=1,
    )
    yield figure(
        "GPU-hours lost",
        "Lost in stalls in the time range of the dashboard, over all ranks and causes. The bars beside the graph "
        "show the causes.",
        "short",
        Query(f"sum({_LOST_MINUTES}) / 60"),
        steps=fair_bad(1, 10),
        decimals=1,
        of_range=True,
    )
    yield figure(
        "Starving ranks",
        "Ranks whose device had nothing to run for more than 20 % of their training loop in the last five minutes, "
        "because no batch was ready. The worst are listed below, each with its cause.",
        "short",
        Query(f"count(run_rank:training_exposed_wait:ratio_rate5m{{{_RUNS}}} > 0.2) or vector(0)"),
        steps=((1, FAIR), (10, BAD)),
    )
    yield figure(
        "Stuck ranks",
        "Ranks that have ended no step for two minutes and ten mean steps, in a run that neither evaluates nor saves. "
        "The table of runs that make no progress says which.",
        "short",
        Query(f"count(run_rank:training_stuck:seconds{{{_RUNS}}}) or vector(0)"),
        steps=((1, BAD),),
    )


def _losses() -> Iterator[timeseries.Panel | bargauge.Panel]:
    yield half(
        graph(
            "GPUs lost, by cause",
            "Time lost in stalls per second, summed over all ranks. 3 means the equivalent of three idle GPUs. The "
            "runbook says what to do about each cause. The tables below show which ranks are affected.",
            "short",
            Query(f"sum by (cause) (run_cause:training_stall_lost_seconds:rate5m{{{_RUNS}}}) > 0.005", "{{cause}}"),
            stacked=True,
            colours=CAUSES,
            decimals=2,
            no_value="Nothing is lost",
        )
    )
    yield bars(
        "GPU-hours lost, by cause",
        "Over the time range of the dashboard, all runs together. Begin with the longest. The runbook says what to "
        "do about its cause.",
        "short",
        Query(f"sort_desc(sum by (cause) ({_LOST_MINUTES}) / 60 > 0.005)", "{{cause}}"),
        colours=CAUSES,
        no_value="Nothing is lost",
    )
    yield (
        graph(
            "GPUs lost, by run",
            "The ten runs that lose most in the time range. Open one from the table below.",
            "short",
            Query(
                f"sum by (run) (run_cause:training_stall_lost_seconds:rate5m{{{_RUNS}}}) and on (run) "
                f"topk(10, sum by (run) ({_LOST_MINUTES_AT_END}) > 0)",
                "{{run}}",
            ),
            stacked=True,
            decimals=2,
            no_value="Nothing is lost",
        )
        .height(8)
        .span(6)
    )


def _worst_runs() -> table.Panel:
    lost = f"topk(50, sum by (run) ({_LOST_MINUTES})) / 60"  # of runs that have ended too, which have no cause any more
    return rows(
        "Worst runs",
        "Runs by the GPU-hours that they lost to stalls in the time range. Open one to see its verdict over time. "
        "The cause is the one that costs it most now.",
        Column(
            "GPU-hours lost",
            "short",
            f"{lost} * on (run) group_left (cause) run_cause:training_stall_lost_seconds:top_rate5m or on (run) {lost}",
            steps=fair_bad(0.1, 1),
            decimals=2,
        ),
        Column(
            "GPUs lost now",
            "short",
            f"sum by (run) (run_cause:training_stall_lost_seconds:rate5m{{{_RUNS}}})",
            steps=fair_bad(0.2, 1),
            decimals=2,
        ),
        exposed_wait(f"avg by (run) (run_rank:training_exposed_wait:ratio_rate5m{{{_RUNS}}})", 200),
        Column("ranks", "short", f"sum by (run) (run:training_ranks_alive:sum{{{_RUNS}}})", width=90),
        steps_a_second("steps/s a rank", f"avg by (run) (run_rank:training_steps:rate5m{{{_RUNS}}})"),
        keys={"run": 0, "cause": 240},
        links={"run": frame.TO_RUN},
        sort=["GPU-hours lost"],
    ).height(8)


def _worst_ranks() -> table.Panel:
    selection = f"topk(25, run_rank:training_stall_lost_seconds:rate5m{{{_RUNS}}} > 0)"
    worst = f"and on (run, rank) {selection}"
    return rows(
        "Worst ranks",
        "The 25 ranks that lose most now. If a rank starves, the cause names what the loader lacks. With the cause "
        "`straggler` this rank waits for another one, which the Run dashboard names.",
        lost_share("lost now", f"{selection} {_NODE} {_CAUSE}", 200),
        exposed_wait(f"max by (run, rank) (run_rank:training_exposed_wait:ratio_rate5m{{{_RUNS}}} {worst})", 200),
        steps_a_second("steps/s", f"max by (run, rank) (run_rank:training_steps:rate5m{{{_RUNS}}} {worst})"),
        sm_activity(f"max by (run, rank) (run_rank_gpu:training_gpu_sm_active:ratio{{{_RUNS}}}) {worst}", 160),
        keys={"run": 0, "rank": 80, "node": 220, "cause": 240},
        links={"run": frame.TO_RUN, "rank": frame.TO_RANK, "node": frame.TO_NODE},
        sort=["lost now"],
        no_value="No rank loses time to a stall",
    )


def _no_progress() -> table.Panel:
    return rows(
        "Time since the last step",
        "By the rank that has waited longest. Stuck: the rank is alive but ends no step, and no evaluation or "
        "checkpoint explains it; its log has every stack. Gone: the rank has disappeared without ending by itself; "
        "look at the end of its stderr.",
        Column(
            "since the last step",
            "s",
            f"topk(20, max by (run) (run_rank:training_last_step_age:seconds{{{_RUNS}}}))",
            steps=fair_bad(60, 120),
            width=180,
        ),
        Column(
            "stuck ranks",
            "short",
            f"count by (run) (run_rank:training_stuck:seconds{{{_RUNS}}}) or {_NONE_OF_THEM}",
            steps=((1, BAD),),
        ),
        Column(
            "ranks gone",
            "short",
            f"count by (run) (instance_run_rank:training_run_info:last{{{_RUNS}}} unless on (run, rank) "
            f"training_run_info) or {_NONE_OF_THEM}",
            steps=((1, BAD),),
        ),
        Column(
            "attempts without progress",
            "short",
            f"max by (run) (training_run_attempts_without_progress{{{_RUNS}}})",
            steps=((1, FAIR), (2, BAD)),
        ),
        steps_a_second("steps/s a rank", f"avg by (run) (run_rank:training_steps:rate1m{{{_RUNS}}})"),
        keys={"run": 0},
        links={"run": frame.TO_RUN},
        sort=["ranks gone", "since the last step"],
        no_value="No run is there",
    ).height(6)


def _starved_gpus() -> table.Panel:
    utilization = f"run_rank_gpu:training_gpu_utilization:ratio{{{_RUNS}}}"
    activity = f"run_rank_gpu:training_gpu_sm_active:ratio{{{_RUNS}}}"
    gap = f"topk(25, max by (run, rank, gpu) ({utilization} - {activity}))"
    shown = f"and on (run, rank, gpu) {gap}"
    return rows(
        "Utilisation against SM activity",
        "Utilisation is the share of time in which any kernel ran. SM activity is how much of the GPU worked. If "
        "the first is high and the second low, the GPU looks busy but is not: kernels are too small, or start too "
        "late. Open the rank: exposed wait shows whether data is the reason.",
        Column("gap", "percentunit", f"{gap} {_NODE}", steps=fair_bad(0.3, 0.6), width=90),
        Column(
            "utilisation",
            "percentunit",
            f"max by (run, rank, gpu) ({utilization} {shown})",
            bar=1,
            width=200,
        ),
        sm_activity(f"max by (run, rank, gpu) ({activity} {shown})", 200),
        exposed_wait(
            f"max by (run, rank, gpu) ((run_rank_gpu:training_gpu_info:max {shown}) * on (run, rank) group_left () "
            f"run_rank:training_exposed_wait:ratio_rate5m{{{_RUNS}}})",
            200,
        ),
        keys={"run": 0, "rank": 80, "node": 220, "gpu": 70},
        links={"run": frame.TO_RUN, "rank": frame.TO_RANK, "node": frame.TO_NODE},
        sort=["gap"],
        no_value="No run publishes figures of its GPUs",
    )


def _gpus() -> Iterator[timeseries.Panel]:
    yield half(
        graph(
            "Utilisation and SM activity, all GPUs",
            "Means over all GPUs, and the tenth that works least. A wide gap between the means shows a fleet that "
            "is busy but starved.",
            "percentunit",
            Query(f"avg(run_rank_gpu:training_gpu_utilization:ratio{{{_RUNS}}})", "utilisation, mean"),
            Query(f"avg(run_rank_gpu:training_gpu_sm_active:ratio{{{_RUNS}}})", "SM activity, mean"),
            Query(f"quantile(0.1, run_rank_gpu:training_gpu_sm_active:ratio{{{_RUNS}}})", "SM activity, lowest tenth"),
            top=1,
            no_value="No run publishes figures of its GPUs",
        )
    )
    yield half(
        graph(
            "GPUs held back",
            "GPUs whose clock is lowered right now, by reason. Heat and power brakes are faults of the machine; a "
            "well-used GPU reaches its power cap.",
            "short",
            Query(f"sum by (reason) (training_gpu_throttled{{{_RUNS}}}) > 0", "{{reason}}"),
            no_value="No GPU is held back",
        )
    )


def _throughput_by_run() -> Iterator[timeseries.Panel]:
    """Samples and tokens a second, by run."""
    for name, absent in (
        ("samples", "the size of a batch is not known"),
        ("tokens", "the script tells no tokens"),
    ):
        yield half(
            graph(
                f"{name.capitalize()} a second, by run",
                "Of all ranks together, in the last five minutes: the ten runs with most. Evaluations, checkpoints "
                f"and restarts make it lower. A run is absent where {absent}.",
                "short",
                Query(f"topk(10, run:training_{name}:rate5m{{{_RUNS}}})", "{{run}}"),
                no_value="Not known",
            )
        )
