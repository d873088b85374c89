"""A rank's state as Prometheus families, rendered one by one.

Families come from `prometheus_client`'s value classes and never from its global registry or its metric objects,
which ``PROMETHEUS_MULTIPROC_DIR`` would turn into files. docs/METRICS.md lists what is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from telemetry.records import (
    CAUSES,
    SNAPSHOT_OFF_REASONS,
    THROTTLE_REASONS,
    GpuSample,
    Histogram,
    RunView,
    StallView,
    WorkersSample,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.samples import Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _One:
    """A registry of one family, which is how `generate_latest` wants it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


class Renderer:
    """Turns families into text. Half of them are as they were a second ago, and are not rendered again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[Sample], tuple[bytes, bytes]]] = {}

    def render(self, family: Metric) -> tuple[bytes, bytes]:
        """One family: its HELP and TYPE lines, and its samples."""
        samples, text = self._known.get(family.name, (None, (b"", b"")))
        if samples != family.samples:
            text = _text(family)
            self._known[family.name] = (family.samples, text)
        return text


def _added(one: Histogram | None, other: Histogram | None) -> Histogram | None:
    if one is None or other is None:
        return one or other
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Histogram(one.bounds, counts, one.total + other.total)


def _text(family: Metric) -> tuple[bytes, bytes]:
    text = generate_latest(_One(family))
    split = text.index(b"\n", text.index(b"\n") + 1) + 1
    return text[:split], text[split:]


class Families:
    """Builds the families of one rank.

    Args:
        run: name of the run; with ``rank`` on every sample.
        rank: global rank.
    """

    def __init__(self, run: str, rank: int) -> None:
        self._labels = {"run": run, "rank": str(rank)}

    def of(self, view: RunView) -> Iterator[Metric]:
        """The families of a view. What was not measured is not there."""
        yield self._info("training_run", "What this rank runs on; join on run and rank.", view.info)
        yield self._gauge("training_run_ended", "1 once the run has ended by itself.", float(view.ended))
        yield from self._loop(view)
        if view.stalls is not None:
            yield from self._stalls(view.stalls)
        if view.snapshots is not None:
            yield self._by(
                "training_snapshots",
                "Snapshots of this rank, by how they ended.",
                "result",
                view.snapshots.results,
                counter=True,
            )
            yield self._by(
                "training_snapshots_off",
                "1 for the reason for which no more snapshots are taken.",
                "reason",
                {reason: float(reason == view.snapshots.off) for reason in SNAPSHOT_OFF_REASONS},
            )
        yield from self._agent(view)
        if view.gpu is not None:
            yield from self._gpu(view.gpu)
        if view.torch_memory is not None:
            memory = view.torch_memory
            yield self._gauge(
                "training_cuda_memory_allocated_bytes",
                "Memory tensors hold on the GPU.",
                memory.allocated_bytes,
            )
            yield self._gauge(
                "training_cuda_memory_reserved_bytes",
                "Memory PyTorch's allocator holds.",
                memory.reserved_bytes,
            )
        yield from self._process(view)
        yield from self._host(view)
        yield from self._loader(view)

    def _loop(self, view: RunView) -> Iterator[Metric]:
        yield self._counter("training_steps", "Training steps that have ended.", view.steps)
        yield self._counter("training_optimizer_steps", "Calls of an optimizer's step.", view.optimizer_steps)
        yield self._histogram(
            "training_step_duration_seconds", "Wait and compute of a training step.", view.step_duration
        )
        yield self._histogram(
            "training_wait_duration_seconds", "What a training step waited for its batch.", view.wait_duration
        )
        yield self._by(
            "training_time_seconds",
            "Where the time of this rank went; the categories add up to its wall clock.",
            "category",
            view.ledger_seconds,
            counter=True,
        )
        if view.exposed_wait_seconds is not None:
            yield self._counter(
                "training_exposed_wait_seconds",
                "Waiting for data that the device felt.",
                view.exposed_wait_seconds,
            )
        if view.last_step_unix_seconds is not None:
            yield self._gauge(
                "training_last_step_timestamp_seconds",
                "Unix time at which the newest step ended.",
                view.last_step_unix_seconds,
            )

    def _stalls(self, stalls: StallView) -> Iterator[Metric]:
        yield self._by(
            "training_stall_active",
            "1 for the cause of the stall that is open.",
            "cause",
            {cause: float(cause == stalls.active) for cause in CAUSES},
        )
        if stalls.straggler is not None:
            yield self._gauge("training_straggler_rank", "The rank that this one waits for.", stalls.straggler)
        yield self._by("training_stalls", "Stalls that have opened.", "cause", stalls.opened, counter=True)
        yield self._by(
            "training_stall_lost_seconds",
            "Time of this rank lost in stalls.",
            "cause",
            stalls.lost_seconds,
            counter=True,
        )

    def _agent(self, view: RunView) -> Iterator[Metric]:
        yield self._by(
            "telemetry_overhead_seconds",
            "What the agent itself cost: time on the training thread, CPU time of its own threads.",
            "thread",
            view.overhead_seconds,
            counter=True,
        )
        yield self._by("telemetry_errors", "Failures of the agent's own parts.", "source", view.errors, counter=True)
        yield self._counter("telemetry_dropped_steps", "Steps the agent could not keep.", view.dropped_steps)
        up = {h.name: float(h.up) for h in view.collectors if h.up is not None}
        took = {h.name: h.duration_seconds for h in view.collectors if h.duration_seconds is not None}
        yield self._by("telemetry_collector_up", "1 where the collector's last attempt worked.", "collector", up)
        yield self._by(
            "telemetry_collector_duration_seconds",
            "How long the collector's last attempt took.",
            "collector",
            took,
        )

    def _gpu(self, gpu: GpuSample) -> Iterator[Metric]:
        labels = {"gpu": str(gpu.index), "uuid": gpu.uuid}
        readings: Sequence[tuple[str, str, float | None]] = (
            (
                "utilization_ratio",
                "Share of time in which any kernel ran: busy, not efficient.",
                gpu.utilization_ratio,
            ),
            ("sm_active_ratio", "Share of the SMs that were active.", gpu.sm_active_ratio),
            ("sm_occupancy_ratio", "Warps resident on the SMs, of those possible.", gpu.sm_occupancy_ratio),
            (
                "tensor_active_ratio",
                "Share of time in which the tensor cores were active.",
                gpu.tensor_active_ratio,
            ),
            (
                "memory_bandwidth_ratio",
                "Memory bandwidth used, of what is there.",
                gpu.memory_bandwidth_ratio,
            ),
            ("memory_used_bytes", "Memory in use on the GPU, by all processes.", gpu.memory_used_bytes),
            ("memory_total_bytes", "Memory of the GPU.", gpu.memory_total_bytes),
            ("power_watts", "Power draw.", gpu.power_watts),
            ("temperature_celsius", "Temperature of the GPU.", gpu.temperature_celsius),
            ("sm_clock_hertz", "Clock of the SMs.", gpu.sm_clock_hertz),
            ("sm_clock_max_hertz", "The highest clock the SMs have.", gpu.sm_clock_max_hertz),
        )
        for name, text, value in readings:
            if value is not None:
                yield self._gauge(f"training_gpu_{name}", text, value, labels)
        if gpu.throttled is not None:
            yield self._by(
                "training_gpu_throttled",
                "1 for each reason for which the clocks are held back.",
                "reason",
                {reason: float(reason in gpu.throttled) for reason in THROTTLE_REASONS},
                labels,
            )
        source = {"sm_active_source": gpu.sm_active_source or "none", "name": gpu.name}
        yield self._info("training_gpu", "The GPU of this rank, and where its SM activity is read.", labels | source)

    def _process(self, view: RunView) -> Iterator[Metric]:
        process = view.process
        if process is None:
            return
        yield self._counter("training_process_cpu_seconds", "CPU time of the training process.", process.cpu_seconds)
        yield self._gauge(
            "training_process_resident_memory_bytes",
            "Resident memory of the process.",
            process.resident_memory_bytes,
        )
        yield self._gauge("training_process_threads", "Threads of the training process.", process.threads)

    def _host(self, view: RunView) -> Iterator[Metric]:
        host, pressure = view.host, view.pressure
        if host is not None:
            if host.cpu_ratio is not None:
                yield self._gauge("training_host_cpu_ratio", "CPU use of the machine, of all cores.", host.cpu_ratio)
            yield self._gauge(
                "training_host_memory_used_bytes", "Memory in use on the machine.", host.memory_used_bytes
            )
            yield self._gauge("training_host_memory_total_bytes", "Memory of the machine.", host.memory_total_bytes)
        if pressure is None:
            return
        if pressure.pressure_ratio:
            yield self._by(
                "training_host_pressure_ratio",
                "Share of time in which some task waited for the resource.",
                "resource",
                pressure.pressure_ratio,
            )
        limits = (
            ("cpu_limit_cores", "CPU limit of the cgroup.", pressure.cgroup_cpu_limit),
            (
                "cpu_throttled_ratio",
                "Share of periods in which the cgroup was throttled.",
                pressure.cgroup_throttled_ratio,
            ),
            ("memory_limit_bytes", "Memory limit of the cgroup.", pressure.cgroup_memory_limit_bytes),
            ("memory_used_bytes", "Memory in use in the cgroup.", pressure.cgroup_memory_used_bytes),
        )
        for name, text, value in limits:
            if value is not None:
                yield self._gauge(f"training_cgroup_{name}", text, value)

    def _loader(self, view: RunView) -> Iterator[Metric]:
        workers = view.workers
        fetches = _added(view.own_fetches, view.worker_fetches)
        if fetches is not None:
            yield self._histogram(
                "training_loader_fetch_duration_seconds",
                "What a worker, or the training thread itself, took for one batch.",
                fetches,
            )
        if workers is None:
            return
        yield self._gauge("training_loader_workers", "Live DataLoader workers of this rank.", workers.workers)
        yield self._gauge(
            "training_loader_workers_memory_bytes",
            "Resident memory of the workers.",
            workers.resident_memory_bytes,
        )
        ratios = (
            ("busy", "in a fetch", workers.busy_ratio),
            ("cpu", "running", workers.cpu_ratio),
            ("runnable", "ready to run, without a core", workers.runnable_ratio),
            ("blocked", "blocked in a fetch: storage, network, locks", workers.blocked_ratio),
        )
        for name, doing, ratio in ratios:
            if ratio is not None:
                text = f"Share of time the workers were {doing}."
                yield self._gauge(f"training_loader_worker_{name}_ratio", text, ratio)
        if workers.ready_batches is not None:
            yield self._gauge(
                "training_loader_ready_batches",
                "Batches that lie ready for the training thread.",
                workers.ready_batches,
            )
        yield from self._deliveries(workers)

    def _deliveries(self, workers: WorkersSample) -> Iterator[Metric]:
        if workers.slack_seconds is not None:
            yield self._gauge(
                "training_loader_slack_seconds",
                "How long a batch had lain ready when it was asked for.",
                workers.slack_seconds,
            )
        yield self._gauge(
            "training_loader_head_of_line_batches",
            "Finished batches that wait behind one that is not.",
            workers.head_of_line_batches,
        )
        waits = (
            ("late", "Waits for batches whose fetch had not ended.", workers.late_seconds_total),
            ("moved", "Waits for batches whose fetch had ended: sending, the sampler.", workers.moved_seconds_total),
            ("head_of_line", "Of the late waits, while a later batch was ready.", workers.head_of_line_seconds_total),
        )
        for name, text, seconds in waits:
            yield self._counter(f"training_loader_{name}_seconds", text, seconds)

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        names = self._labels | dict(labels or {})
        family = GaugeMetricFamily(name, text, labels=list(names))
        family.add_metric(list(names.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
        *,
        counter: bool = False,
    ) -> Metric:
        names = self._labels | dict(labels or {})
        kind = CounterMetricFamily if counter else GaugeMetricFamily
        family = kind(name, text, labels=[*names, label])
        for key, value in values.items():
            family.add_metric([*names.values(), key], value)
        return family

    def _info(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        return self._gauge(f"{name}_info", text, 1.0, labels)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        seen, buckets = 0, []
        for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family
