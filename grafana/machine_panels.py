"""The machines of a run, and its processes on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import shared_panels
from grafana.panels import Query, fair_bad, graph, half
from grafana.selection import RUN, RUN_SCOPE, SELECTED, SHOWN, WORST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries


def machine() -> Iterator[timeseries.Panel]:
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
