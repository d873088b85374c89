"""One machine: its GPUs, its cores and memory, and the ranks on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grafana_foundation_sdk.builders.dashboard import Row

from grafana import frame
from grafana.colours import BAD
from grafana.panels import Query, fair_bad, figure, graph, half
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries
    from grafana_foundation_sdk.models import dashboard

_NODE: Final = 'node="$node", run=~"$run"'

# Whoever runs here. Series without the label `node` are first narrowed down by the ranks of this node, which are few,
# and then held against it, because a rank's number alone may be of another node.
_HERE: Final = f"and on (run, rank) run_rank_node:training_run_info:max{{{_NODE}}}"
_RANKS: Final = 'run=~"$run", rank=~"$rank"'

_RANK: Final = "{{run}} rank {{rank}}"
_GPU: Final = "GPU {{gpu}}, {{run}} {{rank}}"
_NONE: Final = "No GPU, or no NVML"


def node() -> dashboard.Dashboard:
    """The dashboard."""
    ranks_here = 'run_rank_node:training_run_info:max{node="$node"'
    board = (
        frame.board(
            frame.NODE,
            "Training / Node",
            "One machine: the ranks on it, its GPUs, cores, memory and pressure.",
            hours=1,
        )
        .with_variable(
            frame.variable("node", "Node", "label_values(training_run_info, node)", "The machine that is shown")
        )
        .with_variable(
            frame.variable("run", "Run", f"label_values({ranks_here}}}, run)", "Runs on this machine", several=True)
        )
        .with_variable(
            frame.variable(
                "rank",
                "Rank",
                f'label_values({ranks_here}, run=~"$run"}}, rank)',
                "Ranks on this machine",
                several=True,
            )
        )
    )
    sections = {"Now": _figures(), "Ranks on this node": _ranks(), "GPUs": _gpus(), "Machine": _machine()}
    for title, panels in sections.items():
        board = board.with_row(Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return frame.built(board)


def _of(metric: str, more: str = "") -> str:
    return f"{metric}{{{_RANKS}{', ' + more if more else ''}}} {_HERE}"


def _figures() -> Iterator[Any]:
    yield figure(
        "Ranks",
        "Ranks on this machine that are alive.",
        "short",
        Query(f"count(({_of('training_run_ended')}) == 0)"),
        no_value="none",
    )
    yield figure(
        "Exposed wait",
        "Share of the training loop in which the devices of this machine had nothing to run because no batch was "
        "there, mean over its ranks.",
        "percentunit",
        Query(f"avg({_of('run_rank:training_exposed_wait:ratio_rate1m')})"),
        steps=fair_bad(0.1, 0.2),
        decimals=1,
        no_value="not measured",
    )
    yield figure(
        "SM activity",
        "How much of this machine's GPUs worked, mean over them.",
        "percentunit",
        Query(f"avg({_of('run_rank_gpu:training_gpu_sm_active:ratio')})"),
        decimals=0,
        no_value="no GPU",
    )
    yield figure(
        "CPU",
        "Of all cores, of every process on the machine.",
        "percentunit",
        Query(f"max(run_node:training_host_cpu:ratio{{{_NODE}}})"),
        steps=fair_bad(0.9, 0.98),
        decimals=0,
        no_value="not measured",
    )
    yield figure(
        "Memory",
        "In use, of what there is; page cache is not counted.",
        "percentunit",
        Query(f"max(run_node:training_host_memory_used:ratio{{{_NODE}}})"),
        steps=fair_bad(0.9, 0.97),
        decimals=0,
        no_value="not measured",
    )
    yield figure(
        "Worst pressure",
        "Share of time in which some task waited for a core, for I/O or for memory, whichever is most. Below is which.",
        "percentunit",
        Query(f"max(run_node_resource:training_host_pressure:ratio{{{_NODE}}})"),
        steps=fair_bad(0.25, 0.6),
        decimals=0,
        no_value="not measured",
    )


def _ranks() -> Iterator[Any]:
    cause = "* on (run, rank) group_left (cause) run_rank_cause:training_stall_lost_seconds:top_rate5m"
    yield rows(
        "Ranks",
        "The ranks on this machine over the last five minutes, those that lose most first. All of them starving points "
        "at the machine or its storage; one of them at that rank's data.",
        Column(
            "lost",
            "percentunit",
            f"({_of('run_rank:training_stall_lost_seconds:rate5m')}) {cause}",
            steps=fair_bad(0.1, 0.2),
            bar=1,
            width=160,
        ),
        Column(
            "exposed wait",
            "percentunit",
            f"max by (run, rank) ({_of('run_rank:training_exposed_wait:ratio_rate5m')})",
            steps=fair_bad(0.1, 0.2),
            bar=1,
            width=160,
        ),
        Column(
            "steps/s", "short", f"max by (run, rank) ({_of('run_rank:training_steps:rate5m')})", decimals=2, width=90
        ),
        Column(
            "since the last step",
            "s",
            f"max by (run, rank) ({_of('run_rank:training_last_step_age:seconds')})",
            steps=fair_bad(60, 120),
            decimals=0,
            width=150,
        ),
        Column("memory", "bytes", f"max by (run, rank) ({_of('training_process_resident_memory_bytes')})", decimals=1),
        Column("workers", "short", f"max by (run, rank) ({_of('training_loader_workers')})", width=90),
        Column(
            "their memory", "bytes", f"max by (run, rank) ({_of('training_loader_workers_memory_bytes')})", decimals=1
        ),
        keys={"run": 0, "rank": 80, "cause": 240},
        links={"run": frame.TO_RUN, "rank": frame.TO_RANK},
        sort=["lost"],
        no_value="No rank is on this node",
    )


def _gpus() -> Iterator[timeseries.Panel]:
    yield graph(
        "SM activity",
        "How much of each GPU worked: from hardware counters (the agent's, or else DCGM exporter's), on older GPUs the "
        "share of time in which the process ran a kernel. One that lags behind its neighbours: see its clock and "
        "power.",
        "percentunit",
        Query(_of("run_rank_gpu:training_gpu_sm_active:ratio"), _GPU),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Utilisation",
        "Share of time in which any kernel ran. High with a low SM activity: busy but starved.",
        "percentunit",
        Query(_of("run_rank_gpu:training_gpu_utilization:ratio"), _GPU),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "GPU memory in use",
        "Of what each GPU has, by all processes: one that is nobody's any more may still hold some.",
        "percentunit",
        Query(
            f"training_gpu_memory_used_bytes{{{_RANKS}}} / training_gpu_memory_total_bytes{{{_RANKS}}} {_HERE}", _GPU
        ),
        steps=fair_bad(0.9, 0.97),
        top=1,
        no_value=_NONE,
    )
    yield graph(
        "Power",
        "Power draw. Much less than the neighbours': it waits, or it is held back.",
        "watt",
        Query(_of("training_gpu_power_watts"), _GPU),
        no_value=_NONE,
    )
    yield graph(
        "Temperature",
        "Around 85 to 90 degrees most GPUs lower their clocks by themselves: look at fans and air flow.",
        "celsius",
        Query(_of("training_gpu_temperature_celsius"), _GPU),
        steps=fair_bad(80, 88),
        no_value=_NONE,
    )
    yield graph(
        "SM clock, of the highest",
        "The clock of each GPU as a share of the highest it has. Low: the graph of what holds GPUs back says why.",
        "percentunit",
        Query(f"training_gpu_sm_clock_hertz{{{_RANKS}}} / training_gpu_sm_clock_max_hertz{{{_RANKS}}} {_HERE}", _GPU),
        top=1,
        no_value=_NONE,
    )
    yield half(
        graph(
            "GPUs held back, by reason",
            "GPUs whose clock is lowered right now. Heat and power brakes are faults of this machine: drain it if they "
            "do not pass. The power cap is what a well-used GPU runs into.",
            "short",
            Query(f"sum by (reason) ({_of('training_gpu_throttled')}) > 0", "{{reason}}"),
            no_value="No GPU is held back",
        )
    )
    yield half(
        graph(
            "Xid errors (DCGM)",
            "The last Xid of each GPU that a rank of this machine drives, as DCGM exporter saw it; 0 is none. 79: the "
            "GPU has fallen off the bus. 48, 63, 64, 94, 95: its memory. Drain the node, and look into dmesg.",
            "none",
            Query(
                f"({_of('run_rank_gpu:training_gpu_info:max')}) * on (uuid) group_left () uuid:dcgm_xid_error:last",
                _GPU,
            ),
            steps=((1, BAD),),
            no_value="No DCGM exporter, or it has seen none",
        )
    )


def _machine() -> Iterator[timeseries.Panel]:
    yield graph(
        "CPU",
        "Of all cores. Near one while workers are without a core: fewer workers, or less beside the training.",
        "percentunit",
        Query(f"max by (node) (run_node:training_host_cpu:ratio{{{_NODE}}})", "all cores"),
        Query(f"max({_of('training_cgroup_cpu_throttled_ratio')})", "throttled by the cgroup's limit"),
        steps=fair_bad(0.9, 0.98),
        top=1,
    )
    yield graph(
        "Pressure",
        "Share of time in which some task of this machine waited for the resource. I/O: the storage is slow. CPU: too "
        "few cores. Memory: it is about to run out.",
        "percentunit",
        Query(f"max by (resource) (run_node_resource:training_host_pressure:ratio{{{_NODE}}})", "{{resource}}"),
        top=1,
        colours={"cpu": "green", "io": "orange", "memory": "red"},
        no_value="The kernel does not tell (/proc/pressure)",
    )
    yield graph(
        "Memory",
        "In use on the machine, without page cache, and what of it the training processes and their workers hold; "
        "pages that workers share count for each.",
        "bytes",
        Query(f"max({_of('training_host_memory_total_bytes')})", "there is"),
        Query(f"max({_of('training_host_memory_used_bytes')})", "in use"),
        Query(f"sum({_of('training_process_resident_memory_bytes')})", "training processes"),
        Query(f"sum({_of('training_loader_workers_memory_bytes')})", "workers"),
    )
    yield graph(
        "What the workers do",
        "Mean over the workers on this machine. Without a core: too many of them. Blocked: storage, network, locks.",
        "percentunit",
        Query(f"avg({_of('training_loader_worker_cpu_ratio')})", "running"),
        Query(f"avg({_of('training_loader_worker_blocked_ratio')})", "blocked"),
        Query(f"avg({_of('training_loader_worker_runnable_ratio')})", "without a core"),
        stacked=True,
        top=1,
        colours={"running": "green", "blocked": "orange", "without a core": "red"},
        no_value="No workers (num_workers=0)",
    )
    yield graph(
        "CPU of the training processes",
        "Cores that each rank's own process uses, without its workers.",
        "short",
        Query(f"rate(training_process_cpu_seconds_total{{{_RANKS}}}[$__rate_interval]) {_HERE}", _RANK),
    )
    yield graph(
        "Memory of the training processes",
        "Resident memory of each rank's own process. One that grows is the one to look at when the machine runs out.",
        "bytes",
        Query(_of("training_process_resident_memory_bytes"), _RANK),
    )
