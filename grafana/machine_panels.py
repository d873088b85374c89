"""The machines of a run, and its processes on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from grafana.panels import Query, fair_bad, graph
from grafana.selection import WORST, of, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grafana_foundation_sdk.builders import timeseries

_RUN: Final = 'run="$run"'


def machine() -> Iterator[timeseries.Panel]:
    """CPU, memory, pressure."""
    yield graph(
        "CPU of the machines",
        "Of all cores, by node. Near one, and workers without a core: fewer workers, or less beside the training.",
        "percentunit",
        Query(f"run_node:training_host_cpu:ratio{{{_RUN}}}", "{{node}}"),
        steps=fair_bad(0.9, 0.98),
        top=1,
    )
    yield graph(
        "Memory of the machines",
        "In use, of what there is, by node; page cache is not counted. Above 90 % find out who grows: the processes "
        "and their workers are below and in the row of the loader.",
        "percentunit",
        Query(f"run_node:training_host_memory_used:ratio{{{_RUN}}}", "{{node}}"),
        Query(f"run_node:training_cgroup_memory_used:ratio{{{_RUN}}}", "{{node}}, of the cgroup's limit"),
        steps=fair_bad(0.9, 0.97),
        top=1,
    )
    yield graph(
        "Pressure",
        "Share of time in which some task of a machine waited for the resource; the worst node. I/O: the storage is "
        "slow. CPU: too few cores. Memory: it is about to run out.",
        "percentunit",
        Query(f"max by (resource) (run_node_resource:training_host_pressure:ratio{{{_RUN}}})", "{{resource}}"),
        top=1,
        colours={"cpu": "green", "io": "orange", "memory": "red"},
        no_value="The kernel does not tell (/proc/pressure)",
    )
    yield graph(
        "Throttled by the CPU limit",
        "Share of the periods in which the job's cgroup had used up its CPU and was stopped. Anything but zero slows "
        "workers and training alike: raise the limit, or start fewer workers.",
        "percentunit",
        Query(f"max by (run, rank) ({of('training_cgroup_cpu_throttled_ratio')}) {WORST}", "rank {{rank}}"),
        steps=fair_bad(0.05, 0.2),
        top=1,
        no_value="No CPU limit",
    )
    yield graph(
        "CPU of the training processes",
        "Cores that each rank's own process uses, without its workers. Near one for a single-threaded loop says that "
        "the host holds the GPU up.",
        "short",
        Query(f"{rate('training_process_cpu_seconds_total')} {WORST}", "rank {{rank}}"),
    )
    yield graph(
        "Memory of the training processes",
        "Resident memory of each rank's own process. Steady growth is a leak: look for losses that are kept.",
        "bytes",
        Query(f"{of('training_process_resident_memory_bytes')} {WORST}", "rank {{rank}}"),
    )
