"""Panels that the Run and the Node dashboard share. Each dashboard adds its own advice to the description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from grafana.colours import PRESSURE, WORKERS
from grafana.panels import Query, fair_bad, graph

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import timeseries

    from grafana.panels import Steps

_NO_GPU: Final = "No GPU, or it cannot be read"


@dataclass(frozen=True, slots=True)
class Scope:
    """How the queries of one dashboard choose their series.

    Args:
        matchers: matchers of the runs and ranks.
        each_matchers: matchers of the runs and ranks that are drawn as one line each.
        machines: matchers of the recorded series of whole machines.
        filter: PromQL after an aggregated metric; empty for none.
        shown: PromQL after a metric that is drawn as one line per rank or GPU.
        rank: legend of a rank.
        gpu: legend of a GPU.
    """

    matchers: str
    each_matchers: str
    machines: str
    filter: str
    shown: str
    rank: str
    gpu: str

    def of(self, metric: str) -> str:
        """A metric that is then aggregated over the ranks."""
        return f"{metric}{{{self.matchers}}} {self.filter}".rstrip()

    def each(self, metric: str) -> str:
        """A metric as one line per rank or GPU."""
        return f"{metric}{{{self.each_matchers}}} {self.shown}"

    def each_ratio(self, part: str, whole: str) -> str:
        """The ratio of two metrics as one line per rank or GPU."""
        return f"{part}{{{self.each_matchers}}} / {self.each(whole)}"

    def each_rate(self, counter: str) -> str:
        """The rate of a counter as one line per rank or GPU."""
        return f"rate({counter}{{{self.each_matchers}}}[$__rate_interval]) {self.shown}"


def sm_activity(scope: Scope, advice: str) -> timeseries.Panel:
    """How much of each GPU worked."""
    return _by_gpu(
        scope,
        "SM activity",
        f"How much of each GPU worked, from hardware counters (the agent's, else DCGM exporter's). {advice}",
        "percentunit",
        scope.each("run_rank_gpu:training_gpu_sm_active:ratio"),
        top=1,
    )


def utilisation(scope: Scope, advice: str) -> timeseries.Panel:
    """The share of time in which any kernel ran."""
    description = f"Share of time in which any kernel ran. {advice}"
    expr = scope.each("run_rank_gpu:training_gpu_utilization:ratio")
    return _by_gpu(scope, "Utilisation", description, "percentunit", expr, top=1)


def gpu_memory(scope: Scope, advice: str) -> timeseries.Panel:
    """The used memory of each GPU, as a share of its total memory."""
    description = f"Share of each GPU's memory that is in use, by all processes. {advice}"
    expr = scope.each_ratio("training_gpu_memory_used_bytes", "training_gpu_memory_total_bytes")
    return _by_gpu(scope, "GPU memory in use", description, "percentunit", expr, steps=fair_bad(0.9, 0.97), top=1)


def power(scope: Scope, advice: str) -> timeseries.Panel:
    """The power draw of each GPU."""
    description = f"Power draw of each GPU. {advice}"
    return _by_gpu(scope, "Power", description, "watt", scope.each("training_gpu_power_watts"))


def sm_clock(scope: Scope, advice: str) -> timeseries.Panel:
    """The clock of each GPU."""
    description = f"The clock of each GPU as a share of its maximum. {advice}"
    expr = scope.each_ratio("training_gpu_sm_clock_hertz", "training_gpu_sm_clock_max_hertz")
    return _by_gpu(scope, "SM clock, of the highest", description, "percentunit", expr, top=1)


def temperature(scope: Scope) -> timeseries.Panel:
    """The temperature of each GPU."""
    description = (
        "Temperature of each GPU. Most GPUs lower their clocks at 85 to 90 degrees: check the fans and the air flow of "
        "the node."
    )
    expr = scope.each("training_gpu_temperature_celsius")
    return _by_gpu(scope, "Temperature", description, "celsius", expr, steps=fair_bad(80, 88))


def _by_gpu(
    scope: Scope, title: str, description: str, unit: str, expr: str, *, steps: Steps = (), top: float | None = None
) -> timeseries.Panel:
    """A graph with one line for each GPU. The arguments are those of `graph`."""
    return graph(title, description, unit, Query(expr, scope.gpu), steps=steps, top=top, no_value=_NO_GPU)


def held_back(scope: Scope, advice: str) -> timeseries.Panel:
    """GPUs whose clock is reduced."""
    return graph(
        "GPUs held back, by reason",
        f"GPUs whose clock is lowered right now. Heat and power brakes are faults of the machine: {advice}. A "
        "well-used GPU reaches its power cap.",
        "short",
        Query(f"sum by (reason) ({scope.of('training_gpu_throttled')}) > 0", "{{reason}}"),
        no_value="No GPU is held back",
    )


def worker_states(scope: Scope, description: str) -> timeseries.Panel:
    """The shares of the workers' time by state."""
    return graph(
        "What the workers do",
        description,
        "percentunit",
        Query(f"avg({scope.of('training_loader_worker_cpu_ratio')})", "running"),
        Query(f"avg({scope.of('training_loader_worker_blocked_ratio')})", "blocked"),
        Query(f"avg({scope.of('training_loader_worker_runnable_ratio')})", "without a core"),
        stacked=True,
        top=1,
        colours=WORKERS,
        no_value="No workers (num_workers=0)",
    )


def pressure(scope: Scope, where: str) -> timeseries.Panel:
    """The pressure on each resource of the machines."""
    return graph(
        "Pressure",
        f"Share of time in which some task of {where}. I/O: the storage is slow. CPU: there are too few cores. "
        "Memory: it is running out.",
        "percentunit",
        Query(
            f"max by (resource) (run_node_resource:training_host_pressure:ratio{{{scope.machines}}})", "{{resource}}"
        ),
        top=1,
        colours=PRESSURE,
        no_value="The kernel does not report it (/proc/pressure)",
    )


def process_cpu(scope: Scope, advice: str = "") -> timeseries.Panel:
    """Cores that the training processes use."""
    return graph(
        "CPU of the training processes",
        f"Cores that each rank's own process uses, without its workers. {advice}".rstrip(),
        "short",
        Query(scope.each_rate("training_process_cpu_seconds_total"), scope.rank),
    )


def process_memory(scope: Scope, advice: str) -> timeseries.Panel:
    """Memory of the training processes."""
    return graph(
        "Memory of the training processes",
        f"Resident memory of each rank's own process. {advice}",
        "bytes",
        Query(scope.each("training_process_resident_memory_bytes"), scope.rank),
    )
