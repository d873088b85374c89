"""The charts of the page: what stands in them, and in which colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from telemetry.log.process import unix
from telemetry.model.records import COMPUTE, DATA_WAIT
from telemetry.report.goodput import SECONDS as GOODPUT_SECONDS
from telemetry.report.html import drawing, palette
from telemetry.report.html.drawing import (
    BYTES,
    CELSIUS,
    COUNT,
    HERTZ,
    RATIO,
    SECONDS,
    WATTS,
    Curve,
    Mark,
)
from telemetry.report.html.over_time import STEP, WAIT, Figures, ratio
from telemetry.util.words import duration, named, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from telemetry.log.lines import PhaseLine
    from telemetry.log.process import ProcessLog
    from telemetry.report.contract import Books, Rank, ReportValues, Snapshot
    from telemetry.report.html.drawing import Chart, TimeAxis
    from telemetry.report.html.over_time import OverTime

# -- sampled figures -----------------------------------------------------------------------------------------------


class _Sampled(NamedTuple):
    """The curve of a sampled figure. ``name``: the figure's name in the log."""

    name: str
    label: str
    colour: str
    dash: str = "solid"


class _SampledChart(NamedTuple):
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


def sampled_charts(axis: TimeAxis, figures: OverTime, wanted: Sequence[_SampledChart]) -> tuple[list[Chart], list[str]]:
    """Charts of the sampled figures that were measured, and the names of the other figures."""
    charts: list[Chart] = []
    missing = []
    for each in wanted:
        curves = [_sampled_curve(figures, curve) for curve in each.curves]
        missing += [f"{each.title}: {curve.label}" for curve in curves if not curve.is_measured]
        charts += axis.lines(each.key, each.title, each.unit, curves, each.note)
    return charts, missing


def _sampled_curve(figures: OverTime, wanted: _Sampled) -> Curve:
    by_rank = figures.sampled(wanted.name)
    low, high = (np.nanmin(by_rank, axis=0), np.nanmax(by_rank, axis=0)) if len(by_rank) > 1 else (None, None)
    return Curve(wanted.label, wanted.colour, np.nanmean(by_rank, axis=0), low, high, wanted.dash)


# -- the ledger, steps, throughput and cost ------------------------------------------------------------------------


def _ledger(spent: Mapping[str, Figures]) -> list[Curve]:
    """The ledger as shares."""
    total = np.sum([*spent.values()], axis=0)
    return [Curve(c.replace("_", " "), colour, ratio(spent[c], total)) for c, colour in palette.CATEGORIES.items()]


def ledger_over_time(axis: TimeAxis, figures: OverTime) -> list[Chart]:
    """How the time of all ranks was spent, as shares; empty if it is not known."""
    curves = _ledger({c: figures.total(c) for c in palette.CATEGORIES})
    return axis.shares("ledger", "Ledger over time", curves, "The time of all ranks, by category.")


def steps_over_time(axis: TimeAxis, figures: OverTime, marks: Sequence[Mark]) -> list[Chart]:
    """Percentiles of steps and waits of all ranks, and steps per second, if they are known."""
    found: list[Chart] = []
    for name, title, colour in ((STEP, "Step", palette.GREEN), (WAIT, "Wait", palette.RED)):
        curves = [
            Curve(label, colour, figures.percentiles(name, label), dash=dash)
            for label, dash in (("p50", "solid"), ("p95", "dashed"), ("p99", "dotted"))
        ]
        found += axis.lines(f"{name}-percentiles", f"{title} duration", SECONDS, curves, marks=marks)
    pace = ratio(figures.total("steps"), figures.total(DATA_WAIT, COMPUTE))
    curve = Curve("steps per second", palette.GREEN, pace)
    note = "Steps of the mean rank per second of its training loop."
    return found + axis.lines("pace", "Pace", COUNT, [curve], note)


def throughput(axis: TimeAxis, figures: OverTime) -> list[Chart]:
    """Samples and tokens per second of the training loop, summed over the ranks, if they are known."""
    loop = figures.added(DATA_WAIT) + figures.added(COMPUTE)
    note = "Per second of the training loop, summed over the ranks. Empty where a rank does not know it."
    found: list[Chart] = []
    for name, colour in (("samples", palette.GREEN), ("tokens", palette.BLUE)):
        rates = np.where(loop > 0, ratio(figures.added(name), loop), 0.0).sum(axis=0)  # NaN if one of them is
        curve = Curve(f"{name} per second", colour, np.where((loop > 0).any(axis=0), rates, np.nan))
        found += axis.lines(f"{name}-rate", f"{name.capitalize()} per second", COUNT, [curve], note)
    return found


def agent_cost(axis: TimeAxis, figures: OverTime) -> list[Chart]:
    """The cost of the agent as a share of the wall clock; empty if it is not known."""
    wall = figures.total(*palette.CATEGORIES)
    curves = [
        Curve("agent thread (CPU)", palette.BLUE, ratio(figures.total("agent"), wall)),
        Curve("hooks on the training thread", palette.ORANGE, ratio(figures.total("hooks"), wall)),
    ]
    note = "Share of the wall clock of the mean rank."
    return axis.lines("agent-cost", "Cost of the agent", RATIO, curves, note)


# -- bars ----------------------------------------------------------------------------------------------------------

_MAX_BARS: Final = 512


def ledger_by_rank(ranks: Sequence[Rank]) -> Chart:
    """The ledger of each rank, over all its processes. If there are many ranks, a bar shows a group of neighbours."""
    order = sorted({entry.rank for entry in ranks})
    size = -(-len(order) // _MAX_BARS)
    labels = [named(order[at : at + size]) for at in range(0, len(order), size)]
    bars = {rank: at // size for at, rank in enumerate(order)}
    spent = {category: np.zeros(len(labels)) for category in palette.CATEGORIES}
    for entry in ranks:
        for category, seconds in entry.ledger.items():
            spent[category][bars[entry.rank]] += seconds
    curves = _ledger(spent)
    note = f"Each bar is {size} ranks." if size > 1 else ""
    return drawing.bars("ledger-ranks", "Ledger by rank", RATIO, curves, labels, note, upright=True)


def breakdown(snapshots: Sequence[Snapshot]) -> list[Chart]:
    """The average step of each snapshot; empty without any."""
    if not snapshots:
        return []
    curves = [
        Curve(name, colour, np.array([float(snapshot.breakdown.get(name, 0.0)) for snapshot in snapshots]))
        for name, colour in palette.TRACE.items()
    ]
    labels = [f"snapshot {number}" for number in range(1, len(snapshots) + 1)]
    return [drawing.bars("breakdown", "Average step of each snapshot", RATIO, curves, labels)]


def goodput(books: Books) -> Chart:
    """Where the wall clock of the run went."""
    curves = [
        Curve(name.replace("_", " "), palette.GOODPUT[name], np.array([float(books.seconds[name])]))
        for name in GOODPUT_SECONDS
    ]
    note = f"Goodput {percent(books.goodput_ratio)}, effective training time {percent(books.ettr_ratio)}."
    return drawing.bars("goodput", "The wall clock of the run", SECONDS, curves, ["run"], note)


# -- marks ---------------------------------------------------------------------------------------------------------

_MAX_OF_A_KIND: Final = 256


def marks_of(
    values: ReportValues, processes: Sequence[ProcessLog], phases: Sequence[PhaseLine]
) -> tuple[list[Mark], str]:
    """Events and periods of the run, and a note about those that are left out. Of a kind the longest are there."""
    by_kind: dict[str, list[Mark]] = {kind: [] for kind in palette.MARKS}
    for mark in (*_marks(values, processes), *_phases(phases)):
        by_kind[mark.kind].append(mark)
    marks, notes = [], []
    for kind, own in by_kind.items():
        own.sort(key=lambda mark: mark.begin - (mark.end or mark.begin))
        marks += own[:_MAX_OF_A_KIND]
        if len(own) > _MAX_OF_A_KIND:
            notes.append(f"{_MAX_OF_A_KIND} of {len(own)} {kind} marks are shown.")
    return marks, " ".join(notes)


def _phases(lines: Sequence[PhaseLine]) -> Iterator[Mark]:
    for line in lines:
        begin = unix(line.started)
        if begin is not None:
            text = f"{line.name or line.category}, {duration(line.seconds)}"
            yield Mark(line.category, begin, begin + line.seconds, text)


def _marks(values: ReportValues, processes: Sequence[ProcessLog]) -> Iterator[Mark]:
    end = max((time for process in processes if (time := unix(process.last_time)) is not None), default=0.0)
    before = None
    for attempt in values.job.attempts:
        begin = unix(attempt.started)
        if before is not None and begin is not None:
            text = f"attempt {attempt.attempt} begins; attempt {before.attempt} ended: {before.end}"
            yield Mark("restart", begin, None, text)
        before = attempt
    for stall in values.stalls:
        begin, closed = unix(stall.opened or ""), unix(stall.closed) if stall.closed else end
        if begin is not None:
            text = f"rank {stall.rank}: {stall.cause}{'' if stall.closed else ', still open'}"
            yield Mark("stall", begin, max(begin, closed or begin), text)
    since = unix(values.hang.since or "") if values.hang else None
    if values.hang is not None and since is not None:
        yield Mark("hang", since, max(since, end), values.hang.verdict)
    for process in processes:
        for line in process.snapshots:
            begin = unix(line.time)
            if line.path and begin is not None:
                steps = f"steps {line.first_step} to {line.last_step}"
                yield Mark("snapshot", begin, None, f"rank {process.rank}: {steps}")
    for change in values.changes:
        begin = unix(change.at)
        if begin is not None:
            word = "slower" if change.ratio > 1 else "faster"
            yield Mark("change", begin, None, f"rank {change.rank}: steps {percent(abs(change.ratio - 1), 0)} {word}")
