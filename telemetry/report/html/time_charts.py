"""The charts over time, from the sums that were gathered while the logs were read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.report.html import palette
from telemetry.report.html.chart_specs import BYTES, CELSIUS, COUNT, HERTZ, RATIO, SECONDS, WATTS, Curve, TimeChart
from telemetry.report.html.run_recorder import AGENT, HOOKS, SAMPLES, STEP, THROUGHPUT_OF, TOKENS, WAIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.html.chart_specs import Figures
    from telemetry.report.html.run_recorder import RunRecorder
    from telemetry.report.html.time_grid import Array


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampled figure that gets a curve: its name in the log, its label and colour."""

    name: str
    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True, slots=True)
class _SampledChart:
    key: str
    title: str
    unit: str
    curves: Sequence[_Sampled]
    note: str = ""


_BAND: Final = "Line: mean over the ranks. Band: lowest to highest rank."

GPU: Final = (
    _SampledChart(
        "gpu-activity", "GPU activity", RATIO,
        (_Sampled("gpu.sm_active_ratio", "SM activity", palette.GREEN),
         _Sampled("gpu.utilization_ratio", "utilisation", palette.BLUE, "dashed")),
        f"Utilisation is the share of time in which any kernel ran; not efficiency. {_BAND}",
    ),
    _SampledChart(
        "gpu-memory", "GPU memory", BYTES,
        (_Sampled("gpu.memory_used_bytes", "used", palette.PURPLE),
         _Sampled("gpu.memory_total_bytes", "of the GPU", palette.GREY, "dashed")),
    ),
    _SampledChart("gpu-power", "GPU power", WATTS, (_Sampled("gpu.power_watts", "power", palette.ORANGE),)),
    _SampledChart("gpu-clock", "SM clock", HERTZ, (_Sampled("gpu.sm_clock_hertz", "SM clock", palette.LIGHT_BLUE),)),
    _SampledChart(
        "gpu-temperature", "GPU temperature", CELSIUS,
        (_Sampled("gpu.temperature_celsius", "temperature", palette.RED),),
    ),
    _SampledChart("gpu-throttled", "Reduced GPU clocks", RATIO,
                  (_Sampled("gpu.throttled", "samples with reduced clocks", palette.RED),)),
)  # fmt: skip

WORKERS: Final = (
    _SampledChart(
        "workers-state", "DataLoader workers", RATIO,
        (_Sampled("workers.cpu_ratio", "running", palette.GREEN),
         _Sampled("workers.blocked_ratio", "blocked", palette.RED),
         _Sampled("workers.runnable_ratio", "run-queue delay", palette.ORANGE, "dashed")),
        "Share of the wall clock of the mean worker. Blocked: waits for storage, the network or a lock. Run-queue "
        "delay: waits for a core.",
    ),
    _SampledChart(
        "workers-ready", "Ready batches", COUNT,
        (_Sampled("workers.ready_batches", "ready batches of a rank", palette.BLUE),
         _Sampled("workers.workers", "workers of a rank", palette.GREY, "dashed")),
    ),
)  # fmt: skip

HOST: Final = (
    _SampledChart(
        "host-memory", "Memory", BYTES,
        (_Sampled("host.memory_used_bytes", "used on the node", palette.PURPLE),
         _Sampled("host.memory_total_bytes", "of the node", palette.GREY, "dashed"),
         _Sampled("host.process_resident_memory_bytes", "training process", palette.GREEN),
         _Sampled("host.workers_bytes", "workers of a rank", palette.ORANGE),
         _Sampled("host.shared_memory_bytes", "shared memory (/dev/shm)", palette.LIGHT_BLUE)),
        _BAND,
    ),
    _SampledChart(
        "host-cpu", "CPU and pressure of the nodes", RATIO,
        (_Sampled("host.cpu_ratio", "CPU", palette.GREEN),
         _Sampled("host.cpu_pressure", "CPU pressure", palette.ORANGE, "dashed"),
         _Sampled("host.io_pressure", "I/O pressure", palette.RED, "dashed"),
         _Sampled("host.memory_pressure", "memory pressure", palette.PURPLE, "dashed")),
        "Pressure: share of time in which some task waited for it.",
    ),
)  # fmt: skip


def sampled_charts(recorder: RunRecorder, rows: Sequence[int], wanted: Sequence[_SampledChart]) -> list[TimeChart]:
    """Charts of sampled figures. A curve, or a chart, that was not measured is left out."""
    charts = []
    for each in wanted:
        curves = [_sampled_curve(recorder, rows, curve) for curve in each.curves]
        measured = tuple(curve for curve in curves if curve.is_measured)
        if measured:
            charts.append(TimeChart(each.key, each.title, each.unit, measured, note=each.note))
    return charts


def not_measured(recorder: RunRecorder, rows: Sequence[int], wanted: Sequence[_SampledChart]) -> list[str]:
    """The names of the sampled figures of some charts that no rank has."""
    return [
        f"{each.title}: {curve.label}"
        for each in wanted
        for curve in each.curves
        if not recorder.grid.sums(f"{curve.name}#")[list(rows)].any()
    ]


def means(recorder: RunRecorder, rows: Sequence[int], name: str) -> Figures:
    """The mean of a sampled figure by rank and bin; NaN without a sample."""
    return _ratio(recorder.grid.sums(name)[list(rows)], recorder.grid.sums(f"{name}#")[list(rows)])


def ledger_shares(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart:
    """How the time of all ranks was spent, as shares."""
    sums = {c: recorder.grid.sums(c)[list(rows)].sum(axis=0, dtype=np.float64) for c in palette.CATEGORIES}
    total = np.sum(list(sums.values()), axis=0)
    curves = tuple(
        Curve(c.replace("_", " "), colour, _ratio(sums[c], total)) for c, colour in palette.CATEGORIES.items()
    )
    return TimeChart(
        "ledger", "Ledger over time", RATIO, curves, stacked=True, note="The time of all ranks, by category."
    )


def step_percentiles(recorder: RunRecorder) -> list[TimeChart]:
    """Steps and waits of all ranks by percentile."""
    charts = []
    for name, title, colour in ((STEP, "Step", palette.GREEN), (WAIT, "Wait", palette.RED)):
        found = [None if sketch is None else sketch.percentiles() for sketch in recorder.grid.sketches(name)]
        curves = tuple(
            Curve(label, colour, np.array([np.nan if p is None else getattr(p, label) for p in found]), dash=dash)
            for label, dash in (("p50", "solid"), ("p95", "dashed"), ("p99", "dotted"))
        )
        if any(curve.is_measured for curve in curves):
            charts.append(TimeChart(f"{name}-percentiles", f"{title} duration", SECONDS, curves))
    return charts


def steps_per_second(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart | None:
    """Steps per second of the training loop of the mean rank; None without a step."""
    steps = recorder.grid.sums("steps")[list(rows)].sum(axis=0, dtype=np.float64)
    loop = sum(recorder.grid.sums(c)[list(rows)].sum(axis=0, dtype=np.float64) for c in (DATA_WAIT, COMPUTE))
    curve = Curve("steps per second", palette.GREEN, _ratio(steps, loop))
    note = "Steps of the mean rank per second of its training loop."
    return TimeChart("pace", "Pace", COUNT, (curve,), note=note) if curve.is_measured else None


def throughput(recorder: RunRecorder, rows: Sequence[int]) -> list[TimeChart]:
    """Samples and tokens per second of the training loop, summed over the ranks. One that is not known is left out."""
    charts = []
    loop = np.sum([recorder.grid.sums(c)[list(rows)] for c in (DATA_WAIT, COMPUTE)], axis=0)
    for name, colour in ((SAMPLES, palette.GREEN), (TOKENS, palette.BLUE)):
        known = recorder.grid.sums(THROUGHPUT_OF[name])[list(rows)]
        rates = _ratio(recorder.grid.sums(name)[list(rows)], known)
        unknown = ((loop > 0) & (known <= 0)).any(axis=0) | (known <= 0).all(axis=0)
        curve = Curve(f"{name} per second", colour, np.where(unknown, np.nan, np.nansum(rates, axis=0)))
        note = "Per second of the training loop, summed over the ranks. Empty where a rank does not know it."
        if curve.is_measured:
            charts.append(TimeChart(f"{name}-rate", f"{name.capitalize()} per second", COUNT, (curve,), note=note))
    return charts


def agent_cost(recorder: RunRecorder, rows: Sequence[int]) -> TimeChart:
    """What the agent itself costs, as a share of the wall clock."""
    wall = np.sum([recorder.grid.sums(c)[list(rows)] for c in palette.CATEGORIES], axis=0).sum(axis=0)
    curves = tuple(
        Curve(label, colour, _ratio(recorder.grid.sums(name)[list(rows)].sum(axis=0, dtype=np.float64), wall))
        for name, label, colour in (
            (AGENT, "agent thread (CPU)", palette.BLUE),
            (HOOKS, "hooks on the training thread", palette.ORANGE),
        )
    )
    return TimeChart("agent-cost", "Cost of the agent", RATIO, curves, note="Share of the wall clock of the mean rank.")


def _sampled_curve(recorder: RunRecorder, rows: Sequence[int], wanted: _Sampled) -> Curve:
    by_rank = means(recorder, rows, wanted.name)
    sums = recorder.grid.sums(wanted.name)[list(rows)].sum(axis=0, dtype=np.float64)
    mean = _ratio(sums, recorder.grid.sums(f"{wanted.name}#")[list(rows)].sum(axis=0, dtype=np.float64))
    low = high = None
    if len(rows) > 1:
        there = np.isfinite(by_rank)
        low = np.where(there.any(axis=0), np.where(there, by_rank, np.inf).min(axis=0), np.nan)
        high = np.where(there.any(axis=0), np.where(there, by_rank, -np.inf).max(axis=0), np.nan)
    return Curve(wanted.label, wanted.colour, mean, low, high, wanted.dash)


def _ratio(above: Figures | Array, below: Figures | Array) -> Figures:
    """A quotient; NaN where there is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan).astype(np.float64)
