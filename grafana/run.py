"""The Run dashboard, for one run: where its time goes, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana_foundation_sdk.builders.dashboard import Row

from grafana import frame, shared_panels
from grafana.colours import BAD, CAUSES, FAIR, NEUTRAL, WAITED_FOR
from grafana.cost_panels import energy_in_range, lost_in_range
from grafana.loop_panels import ledger, parts, ranks, throughput, verdict
from grafana.panels import Query, fair_bad, graph, half
from grafana.selection import (
    ALL_RANKS,
    LOOP,
    RUN,
    RUN_SCOPE,
    SELECTED,
    SELECTED_NOT_ALL,
    SHOWN,
    SHOWN_RANKS,
    WORST,
    buckets,
    of,
    of_all,
    of_each,
    rate,
    summed_rate,
    summed_time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries
    from grafana_foundation_sdk.models import dashboard

_NO_WORKERS: Final = "No workers (num_workers=0)"


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
            parts().span(24),
        ),
        "Rank by rank": ranks(),
        "GPUs": _gpus(),
        "Data loader": _loader(),
        "Host and pressure": _machine(),
        "Snapshots, and the agent itself": _agent(),
    }
    for title, panels in sections.items():
        board = board.with_row(Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return frame.built(board)


# -- the data loaders -------------------------------------------------------------------------------------------------


def _loader() -> Iterator[timeseries.Panel]:
    """What the workers do, and how far ahead they are."""
    yield shared_panels.worker_states(
        RUN_SCOPE,
        "Mean over the workers of the chosen ranks. Running near one: they are CPU-bound, and more workers or "
        "cheaper decoding help. Blocked: they wait for storage, the network or locks. Without a core: there are "
        "more workers than cores, or a CPU limit. Idle: they are ahead of the training.",
    )
    yield graph(
        "Workers",
        "Live worker processes, over the chosen ranks. Without persistent_workers they end with each epoch.",
        "short",
        Query(f"sum({of('training_loader_workers')})", "workers"),
        Query(f"min({of('training_loader_workers')})", "fewest of a rank"),
        no_value="Not measured",
    )
    yield graph(
        "Ready batches, by rank",
        "Batches that are ready for the training. At zero each step waits for its batch. At the prefetch depth the "
        "loader is fast enough.",
        "short",
        Query(of_each("training_loader_ready_batches"), "rank {{rank}}"),
        no_value=_NO_WORKERS,
    )
    yield graph(
        "Slack, by rank",
        "How long a batch had been ready when it was requested. It shrinks before the device idles. At zero the "
        "loader is too slow.",
        "s",
        Query(of_each("training_loader_slack_seconds"), "rank {{rank}}"),
        no_value=_NO_WORKERS,
    )
    loop = f"({summed_time(LOOP)} > 0)"
    fetch_wait, blocked, transfer_wait = (
        summed_rate(f"training_loader_{what}_seconds") for what in ("fetch_wait", "head_of_line", "transfer_wait")
    )
    yield graph(
        "What the waits are for",
        "Share of the training loop. Fetch wait: the fetch of the batch had not ended; a faster loader helps. Head of "
        "line: the same, while a later batch of another worker was ready; a larger prefetch_factor or in_order=False "
        "helps. Transfer wait: the fetch had ended, and the batch was still being sent and pinned; pin_memory and "
        "fewer, larger tensors help.",
        "percentunit",
        Query(f"clamp_min({fetch_wait} - {blocked}, 0) / {loop}", "fetch wait"),
        Query(f"{blocked} / {loop}", "head of line"),
        Query(f"{transfer_wait} / {loop}", "transfer wait"),
        stacked=True,
        colours=WAITED_FOR,
        no_value=_NO_WORKERS,
    )
    fetches = buckets("training_loader_fetch_duration_seconds")
    yield graph(
        "Fetch time of a batch",
        "Percentiles over all workers of the chosen ranks; without workers, over the fetches of the training "
        "thread. Divided by the number of workers, this is the time per batch of the loader: compare it with the "
        "step. A long tail shows single slow samples or files.",
        "s",
        *(
            Query(f"histogram_quantile({q}, {fetches})", name)
            for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
        ),
        no_value="No fetch was seen to end",
    )
    yield half(
        graph(
            "Finished batches held up, by rank",
            "Finished batches that wait for an earlier, unfinished one. The log (event workers) names the worker "
            "that they wait for.",
            "short",
            Query(of_each("training_loader_head_of_line_batches"), "rank {{rank}}"),
            no_value=_NO_WORKERS,
        )
    )
    yield half(
        graph(
            "Memory of the workers, by rank",
            "Resident memory, summed over a rank's workers. Shared pages count for each worker. If it grows with "
            "every epoch, reference counts of Python objects cause copies: keep the index in NumPy or Arrow.",
            "bytes",
            Query(of_each("training_loader_workers_memory_bytes"), "rank {{rank}}"),
            no_value=_NO_WORKERS,
        )
    )


# -- the GPUs ---------------------------------------------------------------------------------------------------------


def _gpus() -> Iterator[timeseries.Panel]:
    """Activity, memory, power, and reasons for low clocks."""
    yield shared_panels.sm_activity(
        RUN_SCOPE,
        "Low while the rank does not wait for data: kernels are too small, or the host is too slow; take a snapshot.",
    )
    yield shared_panels.utilisation(
        RUN_SCOPE, "This means busy, not efficient: compare it with the SM activity beside it."
    )
    yield graph(
        "Occupancy, tensor cores, memory bandwidth",
        "Means over the chosen ranks, from hardware counters: the agent's on Hopper and newer, for tensor cores else "
        "DCGM exporter's. Tensor cores near zero in a model of matrix products mean that mixed precision is off. "
        "Memory bandwidth near one means that kernels wait for memory.",
        "percentunit",
        Query(f"avg({of('training_gpu_sm_occupancy_ratio')})", "warps resident"),
        Query(
            f"avg({of('training_gpu_tensor_active_ratio')}) or "
            f"avg({of('run_rank_gpu:training_gpu_info:max')} * on (uuid) group_left () uuid:dcgm_tensor_active:ratio)",
            "tensor cores active",
        ),
        Query(f"avg({of('training_gpu_memory_bandwidth_ratio')})", "memory bandwidth used"),
        top=1,
        no_value="Not measured: needs Hopper or newer, or DCGM exporter",
    )
    yield shared_panels.gpu_memory(
        RUN_SCOPE,
        "Close to one, a larger batch would run out of memory. Far below, a larger batch may use the GPU better.",
    )
    yield graph(
        "Memory of PyTorch's allocator",
        "The largest over the chosen ranks. Reserved far above allocated means fragmentation. If allocated grows "
        "with every step, a tensor is kept.",
        "bytes",
        Query(f"max({of('training_cuda_memory_allocated_bytes')})", "allocated by tensors"),
        Query(f"max({of('training_cuda_memory_reserved_bytes')})", "reserved"),
        Query(f"max({of('training_gpu_memory_used_bytes')})", "in use on the GPU"),
        no_value="No CUDA",
    )
    yield shared_panels.power(
        RUN_SCOPE,
        "A GPU that works draws most of its limit; one that waits for data draws far less than its neighbours.",
    )
    yield shared_panels.sm_clock(
        RUN_SCOPE, "If it is lower than its neighbours', look at the throttle reasons and its temperature."
    )
    yield shared_panels.temperature(RUN_SCOPE)
    yield shared_panels.held_back(RUN_SCOPE, "they slow the whole job")


# -- the machines, and the processes on them --------------------------------------------------------------------------


def _machine() -> Iterator[timeseries.Panel]:
    """CPU, memory, pressure."""
    yield graph(
        "CPU of the machines",
        "Share of all cores in use, by node. If it is near one and workers are without a core, use fewer workers, "
        "or run less beside the training.",
        "percentunit",
        Query(f"run_node:training_host_cpu:ratio{{{RUN}}}", "{{node}}"),
        steps=fair_bad(0.9, 0.98),
        top=1,
    )
    yield graph(
        "Memory of the machines",
        "Share of the memory in use, by node. Page cache is not counted. Above 90 % find out what grows: the "
        "processes are below, and their workers are in the row of the loader.",
        "percentunit",
        Query(f"run_node:training_host_memory_used:ratio{{{RUN}}}", "{{node}}"),
        Query(f"run_node:training_cgroup_memory_used:ratio{{{RUN}}}", "{{node}}, of the cgroup's limit"),
        steps=fair_bad(0.9, 0.97),
        top=1,
    )
    yield shared_panels.pressure(RUN_SCOPE, "a machine waited for the resource, on the worst node")
    yield graph(
        "Throttled by the CPU limit",
        "Share of the periods in which the job's cgroup had used up its CPU and was stopped, by node. Anything but "
        "zero slows workers and training alike: raise the limit, or start fewer workers.",
        "percentunit",
        Query(f"max by (node) (training_cgroup_cpu_throttled_ratio{{{RUN}}})", "{{node}}"),
        steps=fair_bad(0.05, 0.2),
        top=1,
        no_value="No CPU limit",
    )
    yield shared_panels.process_cpu(
        RUN_SCOPE, "If it is near one for a single-threaded loop, the host slows the GPU down."
    )
    yield shared_panels.process_memory(RUN_SCOPE, "Steady growth is a leak: look for loss tensors that are kept.")
    yield half(
        graph(
            "Memory that grows for good",
            "Growth per second, by part: of the training process, its workers, shared memory, and tensors on the GPU. "
            "Zero means that it does not grow, or only for a while. `telemetry report` says what to look for.",
            "Bps",
            Query(
                f"max by (run, rank, where) (training_memory_growth_bytes_per_second{{{SHOWN}}}) {WORST}",
                "{{where}}, rank {{rank}}",
            ),
            no_value="Not measured yet",
        )
    )
    yield half(
        graph(
            "Time until memory is used up",
            "At the present growth, on the worst rank of each node. Write a checkpoint before.",
            "s",
            Query(
                f"min by (node) (training_memory_exhausted_in_seconds{{{SELECTED}}} "
                f"* on (run, rank) group_left (node) run_rank_node:training_run_info:max{{{RUN}}})",
                "{{node}}",
            ),
            no_value="No end in sight",
        )
    )


# -- snapshots, stalls, and what the agent itself costs ---------------------------------------------------------------


def _agent() -> Iterator[timeseries.Panel]:
    """Its findings, its cost, its health."""
    snapshots = of_all("run_result:training_snapshots:sum", "training_snapshots_total")
    stalls = of_all("run_cause:training_stalls:sum", "training_stalls_total")
    durations = of_all("run_collector:telemetry_collector_duration_seconds:max", "telemetry_collector_duration_seconds")
    failing = of_all("run_collector:telemetry_collector_down:count", "1 - telemetry_collector_up")
    yield graph(
        "Snapshots",
        "Traces since the start, by how they ended, over the chosen ranks. Recorded traces are in the run folder; "
        "`telemetry trace` reads them. The log (event snapshot) says why others were refused or failed.",
        "short",
        Query(f"sum by (result) {snapshots} > 0", "{{result}}"),
        no_value="No snapshots",
    )
    yield graph(
        "Stalls",
        "Stalls that have opened since the start, by the cause they opened with, over the chosen ranks. Each has its "
        "evidence and its advice in the log and in `telemetry report`.",
        "short",
        Query(f"sum by (cause) {stalls} > 0", "{{cause}}"),
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
        "How long each collector's last attempt took, the longest of the chosen ranks. A slow `nvml` or `amdsmi` means "
        "that the driver has a problem; slow `workers` means that there are very many workers.",
        "s",
        Query(f"max by (collector) {durations}", "{{collector}}"),
    )
    yield graph(
        "Collectors that fail",
        "Ranks on which a collector's last attempt failed. The log (event error) has the message. What the "
        "collector measures is absent meanwhile, not zero.",
        "short",
        Query(f"sum by (collector) {failing} > 0", "{{collector}}"),
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
