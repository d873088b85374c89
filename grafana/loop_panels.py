"""The training loop: verdict, ledger, ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grafana import frame
from grafana.colours import BAD, CATEGORIES, CAUSES, COMPUTE_PARTS, NO_STALL, WAITS
from grafana.panels import Query, fair_bad, figure, graph, half, heat_map, timeline
from grafana.selection import (
    LOOP,
    SHOWN,
    WORST,
    buckets,
    of,
    of_each,
    rate,
    rate_of_each,
    spent,
    summed_rate,
    summed_time,
)
from grafana.tables import Column, exposed_wait, lost_share, rows, sm_activity, steps_a_second

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import heatmap, table, timeseries

_STATES: Final = {0: ("no stall", NO_STALL)} | {
    number: (cause, colour) for number, (cause, colour) in enumerate(CAUSES.items(), start=1)
}


def verdict() -> Iterator[Any]:
    """What is wrong, and since when."""
    yield figure(
        "Exposed wait, worst rank",
        "Share of the training loop in which the device had nothing to run because no batch was ready, for the rank "
        "with the largest share. In a job whose ranks keep pace, it holds up all others. Above 20 % it is starving: "
        "the timeline shows the cause.",
        "percentunit",
        Query(f"max({of('run_rank:training_exposed_wait:ratio_rate1m')})"),
        steps=fair_bad(0.1, 0.2),
        decimals=1,
        no_value="not measured",
    )
    yield figure(
        "Ranks in a stall",
        "Ranks that now lose more than 20 % of their time to one avoidable cause.",
        "short",
        Query(f"count({of('run_rank_cause:training_stall_active:max')}) or vector(0)"),
        steps=((1, BAD),),
    )
    yield figure(
        "GPU-hours lost",
        "Lost in stalls in the time range, over the chosen ranks.",
        "short",
        Query(f"sum(sum_over_time({of('run_rank:training_stall_lost_seconds:rate5m')}[$__range:1m])) / 60"),
        steps=fair_bad(0.1, 1),
        decimals=2,
        of_range=True,
    )
    yield figure(
        "Steps a second",
        "Of one rank, mean over the chosen ranks. Ranks of one job keep pace with the slowest.",
        "short",
        Query(f"avg({rate('training_steps_total')})"),
        decimals=2,
    )
    yield figure(
        "Since the last step",
        "Of the rank that has waited longest. Minutes without an evaluation or a checkpoint: the newest stall_open "
        "line of its log has every stack.",
        "s",
        Query(f"max({of('run_rank:training_last_step_age:seconds')})"),
        steps=fair_bad(60, 120),
        decimals=0,
        no_value="ended",
    )
    yield figure(
        "Ranks alive",
        "Ranks of the whole run that have not ended. If it is fewer than the run has, a process has died.",
        "short",
        Query('run:training_ranks_alive:sum{run="$run"}'),
    )
    terms = " + ".join(
        f'{number} * sum by (run, rank) (training_stall_active{{{SHOWN}, cause="{cause}"}})'
        for number, cause in enumerate(CAUSES, start=1)
    )
    yield timeline(
        "Verdict by rank",
        "The open stall of each rank, by its cause. Of many ranks, the 16 that lose most. `telemetry report` on the "
        "run folder has the advice and the predicted speed-up.",
        Query(f"({terms}) {WORST}", "rank {{rank}}"),
        _STATES,
    )
    yield half(
        graph(
            "Lost time, by cause",
            "Time lost in stalls per second, summed over the chosen ranks. 3 means the equivalent of three idle "
            "GPUs. The runbook says what to do about each cause.",
            "short",
            Query(f"sum by (cause) ({of('run_rank_cause:training_stall_lost_seconds:rate5m')}) > 0.005", "{{cause}}"),
            stacked=True,
            colours=CAUSES,
            decimals=2,
            no_value="Nothing is lost",
        )
    )
    yield half(
        graph(
            "Ranks that are waited for",
            "How many ranks wait for a straggler, by the rank that they name. Look at that rank's row in the table of "
            "ranks: it waits for data, is busy elsewhere, or its GPU is slow. While the job hangs, the rank "
            "that holds it up; the report and the log have the line.",
            "short",
            Query(
                'count_values by (run) ("straggler", training_straggler_rank{run="$run"})',
                "waiting for rank {{straggler}}",
            ),
            Query(
                'count_values by (run) ("suspect", training_hang_suspect_rank{run="$run"})',
                "the job hangs: rank {{suspect}}",
            ),
            stacked=True,
            no_value="No rank is waited for",
        )
    )


def ledger() -> Iterator[timeseries.Panel]:
    """Where the time goes."""
    yield half(
        graph(
            "Ledger",
            "The share of each category of the ledger, mean over the chosen ranks. The shares add up to one; if "
            "they do not, the agent was not running. Red is waiting for data. A GPU does not notice all of it.",
            "percentunit",
            *(Query(f"avg({spent(category)})", category) for category in CATEGORIES),
            decimals=1,
            stacked=True,
            top=1,
            colours=CATEGORIES,
        )
    )
    exposed = summed_rate("training_exposed_wait_seconds")
    waited, loop = summed_time('category="data_wait"'), summed_time(LOOP)
    yield half(
        graph(
            "Exposed and hidden wait",
            "Share of the training loop spent waiting for data. Exposed: the device had nothing to run; a faster "
            "loader saves this time. Hidden: the device was still at work; this costs nothing. Without a GPU all of "
            "it is exposed.",
            "percentunit",
            Query(f"{exposed} / ({loop} > 0)", "exposed"),
            Query(f"clamp_min({waited} - {exposed}, 0) / ({loop} > 0)", "hidden"),
            stacked=True,
            top=1,
            colours=WAITS,
            no_value="Not measured",
        )
    )
    steps, waits = buckets("training_step_duration_seconds"), buckets("training_wait_duration_seconds")
    yield half(
        graph(
            "Step duration",
            "Percentiles over all steps of the chosen ranks, from a histogram with wide buckets. The log has them "
            "within 1 %. A 99th percentile far above the median shows single late batches, or pauses.",
            "s",
            *(Query(f"histogram_quantile({q}, {steps})", name) for q, name in _PERCENTILES),
        )
    )
    yield half(
        graph(
            "Wait a step",
            "Percentiles of the time that a step waits for its batch, over all steps of the chosen ranks. A 99th "
            "percentile far above the median shows single late batches, or the first batch of each epoch.",
            "s",
            *(Query(f"histogram_quantile({q}, {waits})", name) for q, name in _PERCENTILES),
        )
    )


_PERCENTILES: Final = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def throughput() -> timeseries.Panel:
    """Samples and tokens."""
    return half(
        graph(
            "Samples and tokens a second",
            "Of the chosen ranks together, evaluations and checkpoints included. Absent if the size "
            "of a batch is not known, or the script tells no tokens.",
            "short",
            Query(f"sum({rate('training_samples_total')})", "samples"),
            Query(f"sum({rate('training_tokens_total')})", "tokens"),
            no_value="Not known",
        )
    )


def parts() -> timeseries.Panel:
    """What the compute consists of."""
    whole = f"sum({rate('training_compute_seconds_total')})"
    return half(
        graph(
            "Compute, by part",
            "The share of each part of the compute of the chosen ranks, from samples of the training thread's stack. "
            "With a GPU this is the time of the host. `compile` is the work of torch.compile.",
            "percentunit",
            *(
                Query(
                    f"sum({rate('training_compute_seconds_total', f'part={chr(34)}{part}{chr(34)}')}) / {whole}", part
                )
                for part in COMPUTE_PARTS
            ),
            decimals=1,
            stacked=True,
            top=1,
            colours=COMPUTE_PARTS,
            no_value="Not split: no backward pass was seen yet",
        )
    )


def ranks() -> Iterator[Any]:
    """One rank against the others."""
    durations, waits = (rate_of_each(f"training_{what}_duration_seconds_bucket") for what in ("step", "wait"))
    own_step = of("run_rank:training_own_step:seconds_rate5m")
    yield half(
        graph(
            "Step duration (p95), by rank",
            "The 95th percentile of each rank's steps. In a job whose ranks keep pace these are equal and do not "
            "show the slow rank. The wait shows it.",
            "s",
            Query(
                f"histogram_quantile(0.95, sum by (run, rank, le) ({durations})) {WORST}",
                "rank {{rank}}",
            ),
        )
    )
    yield half(
        graph(
            "Wait a step (p95), by rank",
            "The 95th percentile of the time that each rank's steps wait for their batch. A rank far above the "
            "others has a slow loader. The others wait for it in their compute.",
            "s",
            Query(f"histogram_quantile(0.95, sum by (run, rank, le) ({waits})) {WORST}", "rank {{rank}}"),
        )
    )
    yield half(
        graph(
            "Exposed wait, by rank",
            "Share of each rank's training loop in which its device had nothing to run. Above the lines: starving.",
            "percentunit",
            Query(of_each("run_rank:training_exposed_wait:ratio_rate1m"), "rank {{rank}}"),
            steps=fair_bad(0.2, 0.5),
            top=1,
            no_value="Not measured",
        )
    )
    computing = rate_of_each("training_time_seconds_total", 'category="compute"')
    steps = rate_of_each("training_steps_total")
    yield half(
        graph(
            "Compute a step, by rank",
            "Mean compute of each rank's step, including collectives. In a job whose ranks keep pace, the straggler "
            "has the least compute: the others wait for it here.",
            "s",
            Query(
                f"sum by (run, rank) ({computing}) / (sum by (run, rank) ({steps}) > 0) {WORST}",
                "rank {{rank}}",
            ),
        )
    )
    yield half(
        graph(
            "Own part of a step, by rank",
            "Mean time of a step that each rank does not spend waiting for other ranks, of the 16 slowest. The highest "
            "line is the slowest rank of the run, even if it is only a few percent slower.",
            "s",
            Query(
                f"{own_step} and on (run, rank) topk(16, avg_over_time({own_step}[$__range] @ end()))", "rank {{rank}}"
            ),
            no_value="Needs several ranks, and no GPU",
        )
    )
    yield half(
        graph(
            "The slowest rank, and slow nodes",
            "By how much of a step the slowest rank's own part is longer than the median rank's; and the same for "
            "each node whose ranks are all slower, on average. All ranks wait for them.",
            "percentunit",
            Query('run_rank_node:training_slowest_rank:excess_ratio{run="$run"}', "rank {{rank}} on {{node}}"),
            Query('run_node:training_slow_node:excess_ratio{run="$run"} > 0', "every rank on {{node}}"),
            steps=fair_bad(0.03, 0.15),
            no_value="Needs several ranks, and no GPU",
        )
    )
    yield from _maps()
    yield _table()


def _maps() -> Iterator[heatmap.Panel]:
    yield heat_map(
        "Exposed wait, every rank over time",
        "A line of the map for each rank: the share of its training loop in which its device had nothing to run for "
        "want of a batch. A line that stands out is a rank whose loader is slow, several side by side are a node. A "
        "column is all ranks at that moment, such as the start of an epoch.",
        "percentunit",
        Query(of("run_rank:training_exposed_wait:ratio_rate1m"), "{{rank}}"),
        no_value="Not measured",
    )
    yield heat_map(
        "Slower than the median rank, every rank over time",
        "A line of the map for each rank: by how much of a step its own part is longer than the median rank's. Waiting "
        "for data is part of it. All ranks wait for a line that stands out; several side by side are a node.",
        "percentunit",
        Query(f"clamp_min({of('run_rank_node:training_own_step:excess_ratio')}, 0)", "{{rank}}"),
        no_value="Needs several ranks, and no GPU",
    )


def _table() -> table.Panel:
    node = "* on (run, rank) group_left (node) run_rank_node:training_run_info:max"
    cause = "* on (run, rank) group_left (cause) run_rank_cause:training_stall_lost_seconds:top_rate5m"
    zero = f"0 * max by (run, rank) ({of('run_rank:training_stall_lost_seconds:rate5m')})"
    waiting, computing = (
        f"sum by (run, rank) ({of('run_rank_category:training_time_seconds:rate5m', matcher)}) or {zero}"
        for matcher in ('category="data_wait"', 'category="compute"')
    )
    return rows(
        "Ranks",
        "The chosen ranks over the last five minutes, those that lose most first. If one rank has much wait and "
        "little compute, and all others have the opposite, it is the straggler. `held up by it` is what the ranks of "
        "its node lose to it.",
        lost_share("lost", f"topk(100, {of('run_rank:training_stall_lost_seconds:rate5m')}) {node} {cause}", 150),
        exposed_wait(f"max by (run, rank) ({of('run_rank:training_exposed_wait:ratio_rate5m')})", 150),
        Column(
            "waiting",
            "percentunit",
            waiting,
            bar=1,
            width=150,
        ),
        Column(
            "computing",
            "percentunit",
            computing,
            bar=1,
            width=150,
        ),
        Column(
            "held up by it",
            "percentunit",
            f"max by (run, rank) ({of('run_rank_node:training_straggler:max_rate5m')})",
            steps=fair_bad(0.05, 0.15),
            width=130,
        ),
        steps_a_second("steps/s", f"max by (run, rank) ({of('run_rank:training_steps:rate5m')})", 90),
        sm_activity(f"max by (run, rank) ({of('run_rank_gpu:training_gpu_sm_active:ratio')})", 140),
        keys={"rank": 80, "node": 0, "cause": 240},
        links={"rank": frame.TO_RANK_OF_RUN, "node": frame.TO_NODE},
        sort=["lost"],
        no_value="No rank of this run is there",
    )
