"""One machine: its GPUs, its cores and memory, and the ranks on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grafana_foundation_sdk.builders.dashboard import Row

from grafana import frame, shared_panels
from grafana.colours import BAD
from grafana.panels import Query, fair_bad, figure, graph, half
from grafana.shared_panels import Scope
from grafana.tables import Column, exposed_wait, lost_share, rows, steps_a_second

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries
    from grafana_foundation_sdk.models import dashboard

_NODE: Final = 'node="$node", run=~"$run"'

# The ranks on this node. Series without the label `node` are first narrowed down to the ranks of this node, which are
# few. Then they are matched with this node, because a rank of the same number may run on another node.
_HERE: Final = f"and on (run, rank) run_rank_node:training_run_info:max{{{_NODE}}}"
_RANKS: Final = 'run=~"$run", rank=~"$rank"'

_NO_GPU: Final = "No GPU, or it cannot be read"

_ERRORS: Final = {
    "training_gpu_xid_errors_total": "Xid errors",
    "training_gpu_ecc_corrected_errors_total": "corrected memory errors",
    "training_gpu_ecc_uncorrected_errors_total": "uncorrected memory errors",
    "training_gpu_corrected_remapped_rows_total": "rows replaced after corrected errors",
    "training_gpu_uncorrected_remapped_rows_total": "rows replaced after uncorrected errors",
    "training_gpu_row_remap_pending": "a row waits for a reset",
    "training_gpu_row_remap_failure": "a row could not be replaced",
    "training_gpu_pcie_replays_total": "PCIe replays",
}
"""What the legend says of each metric."""

_RANK: Final = "{{run}} rank {{rank}}"
_GPU: Final = "GPU {{gpu}}, {{run}} {{rank}}"
_SCOPE: Final = Scope(
    matchers=_RANKS, each_matchers=_RANKS, machines=_NODE, filter=_HERE, shown=_HERE, rank=_RANK, gpu=_GPU
)


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


def _traffic(link: str) -> str:
    received, sent = (f"training_gpu_{link}_{way}_bytes_per_second" for way in ("receive", "transmit"))
    return f"{received}{{{_RANKS}}} + {_of(sent)}"


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
        "ready, mean over its ranks.",
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
        "Share of all cores in use, by all processes of the machine.",
        "percentunit",
        Query(f"max(run_node:training_host_cpu:ratio{{{_NODE}}})"),
        steps=fair_bad(0.9, 0.98),
        decimals=0,
        no_value="not measured",
    )
    yield figure(
        "Memory",
        "Share of the memory in use. Page cache is not counted.",
        "percentunit",
        Query(f"max(run_node:training_host_memory_used:ratio{{{_NODE}}})"),
        steps=fair_bad(0.9, 0.97),
        decimals=0,
        no_value="not measured",
    )
    yield figure(
        "Worst pressure",
        "Share of time in which some task waited for a core, for I/O or for memory: the largest of the three. The "
        "graph below shows which.",
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
        "The ranks on this machine over the last five minutes, those that lose most first. If all of them starve, "
        "look at the machine or its storage. If only one starves, look at that rank's data.",
        lost_share("lost", f"({_of('run_rank:training_stall_lost_seconds:rate5m')}) {cause}", 160),
        exposed_wait(f"max by (run, rank) ({_of('run_rank:training_exposed_wait:ratio_rate5m')})", 160),
        steps_a_second("steps/s", f"max by (run, rank) ({_of('run_rank:training_steps:rate5m')})", 90),
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
    yield shared_panels.sm_activity(_SCOPE, "If a GPU is below its neighbours, look at its clock and power.")
    yield shared_panels.utilisation(_SCOPE, "High utilisation with low SM activity means busy but starved.")
    yield shared_panels.gpu_memory(_SCOPE, "A process that no longer belongs to a run may still hold memory.")
    yield shared_panels.power(_SCOPE, "If it is much less than its neighbours', the GPU waits or is throttled.")
    yield shared_panels.temperature(_SCOPE)
    yield shared_panels.sm_clock(_SCOPE, "If it is low, the graph of throttle reasons says why.")
    yield graph(
        "NVLink and PCIe",
        "What each GPU sends and receives. NVLink has the collectives within a node, PCIe the batches. If one has far "
        "less than its neighbours, its links or its switch are slow.",
        "Bps",
        Query(_traffic("nvlink"), f"NVLink {_GPU}"),
        Query(_traffic("pcie"), f"PCIe {_GPU}"),
        no_value="Not measured: needs Hopper or newer",
    )
    yield graph(
        "Temperature of the GPUs' memory",
        "Most GPUs lower their clocks at 95 to 105 degrees. If it is high while the GPU is cool, have it checked.",
        "celsius",
        Query(_SCOPE.each("training_gpu_memory_temperature_celsius"), _GPU),
        steps=fair_bad(90, 100),
        no_value="Not measured by these GPUs",
    )
    yield graph(
        "Clock of the GPUs' memory",
        "It is the same as long as the GPU works. If one is lower than its neighbours', the GPU is held back.",
        "hertz",
        Query(_SCOPE.each("training_gpu_memory_clock_hertz"), _GPU),
        no_value=_NO_GPU,
    )
    yield graph(
        "Power, of the limit",
        "Power draw of each GPU as a share of its limit. Near one, the limit sets the speed of the training. If the "
        "limit of one GPU is lower than that of its neighbours, someone has set it.",
        "percentunit",
        Query(_SCOPE.each_ratio("training_gpu_power_watts", "training_gpu_power_limit_watts"), _GPU),
        top=1,
        no_value=_NO_GPU,
    )
    yield graph(
        "Time with reduced clocks",
        "Share of time in which the power limit or heat reduced the clocks of each GPU. Unlike the graph of reasons "
        "below, it misses nothing between two samples.",
        "percentunit",
        Query(_SCOPE.each_rate("training_gpu_power_violation_seconds_total"), f"power, {_GPU}"),
        Query(_SCOPE.each_rate("training_gpu_thermal_violation_seconds_total"), f"heat, {_GPU}"),
        top=1,
        no_value="Not measured by these GPUs",
    )
    yield graph(
        "Errors of the GPUs",
        "Counts that are not zero. Corrected errors and single PCIe replays do no harm. Uncorrected errors, or a row "
        "that waits for a reset: drain the node and reset the GPU. A row that could not be replaced: have the GPU "
        "exchanged.",
        "short",
        *(Query(f"({_of(metric)}) > 0", f"{what}, {_GPU}") for metric, what in _ERRORS.items()),
        no_value="No errors, or no reading",
    )
    yield half(shared_panels.held_back(_SCOPE, "drain it if they do not pass"))
    yield half(
        graph(
            "Xid errors",
            "The last Xid of each GPU that a rank of this machine drives, as the agent reports it, else DCGM exporter; "
            "0 means no error. 13, 31, 43, 45: an error of the script. 79: the GPU has fallen off the bus. 48, 63, 64, "
            "94, 95: an error of its memory. Drain the node, and look at dmesg.",
            "none",
            Query(
                f"({_of('training_gpu_xid')}) or on (run, rank) "
                f"({_of('run_rank_gpu:training_gpu_info:max')}) * on (uuid) group_left () uuid:dcgm_xid_error:last",
                _GPU,
            ),
            steps=((1, BAD),),
            no_value=_NO_GPU,
        )
    )


def _machine() -> Iterator[timeseries.Panel]:
    yield graph(
        "CPU",
        "Share of all cores in use. If it is near one and workers are without a core, use fewer workers, or run "
        "less beside the training.",
        "percentunit",
        Query(f"max by (node) (run_node:training_host_cpu:ratio{{{_NODE}}})", "all cores"),
        Query(f"max(training_cgroup_cpu_throttled_ratio{{{_NODE}}})", "throttled by the cgroup's limit"),
        steps=fair_bad(0.9, 0.98),
        top=1,
    )
    yield shared_panels.pressure(_SCOPE, "this machine waited for the resource")
    yield graph(
        "Memory",
        "Memory in use on the machine, without page cache, and the parts of the training processes and of their "
        "workers. Pages that workers share count for each.",
        "bytes",
        Query(f"max(training_host_memory_total_bytes{{{_NODE}}})", "there is"),
        Query(f"max(training_host_memory_used_bytes{{{_NODE}}})", "in use"),
        Query(f"sum({_of('training_process_resident_memory_bytes')})", "training processes"),
        Query(f"sum({_of('training_loader_workers_memory_bytes')})", "workers"),
    )
    yield shared_panels.worker_states(
        _SCOPE,
        "Mean over the workers on this machine. Without a core: there are too many workers. Blocked: they wait for "
        "storage, the network or locks.",
    )
    yield shared_panels.process_cpu(_SCOPE)
    yield shared_panels.process_memory(
        _SCOPE, "When the machine runs out of memory, look first at the process that grows."
    )
