"""Puts the page together: which charts and tables are in which section, and what each says as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from telemetry.records import CATEGORIES
from telemetry.report.goodput import KWH, cost_lines, energy_lines, throughput_lines
from telemetry.report.goodput import SECONDS as GOODPUT_SECONDS
from telemetry.report.html import charts as specs
from telemetry.report.html import palette
from telemetry.report.html.charts import (
    GPU,
    HOST,
    WORKERS,
    BarChart,
    Curve,
    HeatMap,
    TimeChart,
    agent_cost,
    heat_map,
    ledger_by_rank,
    ledger_shares,
    mark_chart,
    not_measured,
    sampled_charts,
    shown,
    step_percentiles,
    steps_per_second,
    throughput,
)
from telemetry.report.summary import flops_of
from telemetry.util.text import duration, percent, plain_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.html.charts import Chart
    from telemetry.report.html.recorder import RunRecorder
    from telemetry.report.process_log import ProcessLog

_MAX_TABLE_ROWS: Final = 64
_MAX_SNAPSHOTS: Final = 24
_MAX_STALLS: Final = 40


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table: headings, rows of cells as text, and what is left out."""

    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of the page. ``absent``: what it would show and was not measured."""

    key: str
    title: str
    charts: list[Chart]
    tables: list[PageTable]
    absent: str = ""


def sections(
    summary: dict[str, Any], processes: Sequence[ProcessLog], recorder: RunRecorder, end: float
) -> list[PageSection]:
    """All sections below the verdict, in their order."""
    run = summary["run"]
    ranks = {rank: row for (of, rank), row in recorder.rows.items() if of == run}
    rows = sorted(ranks.values())
    nodes = {process.rank: str(process.head.get("node")) for process in processes}
    over_time = bool(rows) and recorder.grid.used > 0
    marks = mark_chart(summary, processes, recorder, end) if over_time else None
    pace = steps_per_second(recorder, rows) if over_time else None
    steps: list[Chart] = [*step_percentiles(recorder), *([pace] if pace else []), *([marks] if marks else [])]
    heat = heat_map(recorder, ranks, nodes) if over_time else None
    found = [
        _section("ledger", "Where the time went", [ledger_shares(recorder, rows)] if over_time else [], []),
        _section("ranks", "Every rank, over time", [heat] if heat else [], []),
        _section("steps", "Steps and waits", steps, [], "no step has ended"),
        _section("stalls", "Stalls", [], _stalls(summary)),
        _section("lines", "Hot lines", [], _hot_lines(summary), "lines are sampled during a stall, and none was"),
    ]
    rates = throughput(recorder, rows) if over_time else []
    unknown = _unknown_sums(summary)
    found.append(_section("throughput", "Throughput and energy", rates, _spent(summary), "; ".join(unknown)))
    for key, title, wanted in (("gpu", "GPU", GPU), ("workers", "Workers", WORKERS), ("host", "Memory and CPU", HOST)):
        charts = sampled_charts(recorder, rows, wanted) if over_time else []
        missing = not_measured(recorder, rows, wanted) if over_time and charts else ["no sample of it is in the logs"]
        found.append(_section(key, title, list(charts), [], "; ".join(missing)))
    found += [
        _section(
            "snapshots", "Snapshots: what a step consists of", *_snapshots(summary), "no trace was recorded or read"
        ),
        _section("attempts", "Attempts and goodput", [_goodput(summary)], [_attempts(summary)]),
        _section("by-rank", "Every rank, in sum", [ledger_by_rank(summary["ranks"])], [_ranks(summary)]),
        _section("agent", "What the agent cost", [agent_cost(recorder, rows)] if over_time else [], []),
    ]
    return [section for section in found if section.charts or section.tables or section.absent]


def _section(
    key: str, title: str, charts: Sequence[Chart], tables: Sequence[PageTable], absent: str = ""
) -> PageSection:
    always = key in {"throughput", "gpu", "workers", "host"}
    return PageSection(key, title, list(charts), list(tables), absent if always or not (charts or tables) else "")


def _spent(summary: dict[str, Any]) -> list[PageTable]:
    """What the run trained on, used and cost, and the energy by category."""
    lines = [
        *throughput_lines(summary["throughput"]),
        *energy_lines(summary["gpu_energy_joules"]),
        *cost_lines(summary["cost"]),
    ]
    rows = [[text.strip()] for text in lines if text.strip()]
    tables = [PageTable("Sums of the run", ("of all ranks and attempts",), rows)] if rows else []
    energy = summary["gpu_energy_joules"] or {}
    total = sum(energy.values())
    if total > 0:
        by_category = [
            [category.replace("_", " "), f"{plain_number(joules / KWH)} kWh", percent(joules / total)]
            for category in CATEGORIES
            for joules in (energy[category],)
        ]
        note = "Of the whole GPUs. The split is an estimate by time."
        tables.append(PageTable("Energy of the GPUs by category", ("", "energy", "share"), by_category, note))
    return tables


def _unknown_sums(summary: dict[str, Any]) -> list[str]:
    """What of these sums is not known, and why or what to set."""
    known = summary["throughput"]
    unknown = [f"{name} (not counted on every rank)" for name in ("samples", "tokens") if known[name] is None]
    if sum((summary["gpu_energy_joules"] or {}).values()) <= 0:
        unknown.append("energy of the GPUs (no GPU with an energy counter was read)")
    if summary["cost"] is None:
        unknown.append("cost (gpu_hour_price is not set)")
    return unknown


def as_table(chart: Chart) -> PageTable:
    """The main figures of a chart, for people who cannot see it."""
    if isinstance(chart, TimeChart):
        rows = [[curve.label, *(shown(value, chart.unit) for value in _of(curve))] for curve in chart.curves]
        return PageTable(chart.title, ("", "lowest", "mean", "highest", "last"), rows)
    if isinstance(chart, BarChart):
        headings = ("", *(curve.label for curve in chart.curves))
        bars = [
            [label, *(shown(float(curve.values[at]), chart.unit) for curve in chart.curves)]
            for at, label in enumerate(chart.labels[:_MAX_TABLE_ROWS])
        ]
        left = len(chart.labels) - len(bars)
        return PageTable(chart.title, headings, bars, f"{left} more" if left > 0 else "")
    if isinstance(chart, HeatMap):
        rows = [
            [
                metric.label,
                *(shown(value, metric.unit) for value in _spread(metric.cells)),
                chart.rows[_odd_row(metric.cells)],
            ]
            for metric in chart.metrics
        ]
        return PageTable(chart.title, ("", "lowest", "median", "highest", "most different"), rows)
    rows = [[kind, str(sum(mark.kind == kind for mark in chart.marks))] for kind in chart.kinds]
    return PageTable(chart.title, ("", "marks"), rows)


def _of(curve: Curve) -> list[float | None]:
    values = curve.values[np.isfinite(curve.values)]
    if not len(values):
        return [None] * 4
    low = curve.low if curve.low is not None else curve.values
    high = curve.high if curve.high is not None else curve.values
    return [float(np.nanmin(low)), float(values.mean()), float(np.nanmax(high)), float(values[-1])]


def _spread(cells: specs.Figures) -> list[float]:
    return [float(each(cells)) for each in (np.nanmin, np.nanmedian, np.nanmax)]


def _odd_row(cells: specs.Figures) -> int:
    filled = np.where(np.isfinite(cells), cells, np.nanmedian(cells))
    return int(np.abs(filled.mean(axis=1) - np.median(filled)).argmax())


def _stalls(summary: dict[str, Any]) -> list[PageTable]:
    stalls = sorted(summary["stalls"], key=lambda stall: -sum(stall["evidence"].get("lost_seconds", {}).values()))
    rows = []
    for stall in stalls[:_MAX_STALLS]:
        lost = sum(stall["evidence"].get("lost_seconds", {}).values())
        steps = f"{stall['first_step']} to {stall['last_step']}" if stall["last_step"] else str(stall["first_step"])
        until = str(stall["closed"]) if stall["closed"] else "still open"
        said = str(stall["evidence"].get("line_verdict") or "")
        rows.append([str(stall["rank"]), str(stall["cause"]), str(stall["opened"]), until, steps, duration(lost), said])
    left = len(stalls) - len(rows)
    note = f"The costliest {len(rows)} of {len(stalls)} stalls; --json has all." if left > 0 else ""
    headings = ("rank", "cause", "opened", "closed", "steps", "lost", "line")
    return [PageTable("Stalls, the costliest first", headings, rows, note)] if rows else []


def _hot_lines(summary: dict[str, Any]) -> list[PageTable]:
    stalls = [stall for stall in summary["stalls"] if stall["evidence"].get("lines")]
    stalls.sort(key=lambda stall: -sum(stall["evidence"].get("lost_seconds", {}).values()))
    tables, seen = [], set()
    for stall in stalls:
        if stall["cause"] in seen:
            continue
        seen.add(stall["cause"])
        rows = [
            [
                percent(line["share_ratio"]),
                f"{line['file']}:{line['line']}",
                str(line["function"] or ""),
                str(line["calls"] or ""),
            ]
            for line in stall["evidence"]["lines"]
        ]
        title = f"{stall['cause']} on rank {stall['rank']}"
        tables.append(PageTable(title, ("share of the time", "line", "in", "calls"), rows))
    return tables


def _snapshots(summary: dict[str, Any]) -> tuple[list[Chart], list[PageTable]]:
    read = [snapshot for snapshot in summary["snapshots"] if snapshot["breakdown"]][-_MAX_SNAPSHOTS:]
    if not read:
        return [], []
    curves = tuple(
        Curve(name, colour, np.array([float(snapshot["breakdown"].get(name, 0.0)) for snapshot in read]))
        for name, colour in palette.TRACE.items()
    )
    labels = tuple(f"snapshot {at + 1}" for at in range(len(read)))
    chart = BarChart("breakdown", "Average step of each snapshot", specs.RATIO, labels, curves)
    rows = [
        [str(at + 1), str(s["rank"]), f"{s['first_step']} to {s['last_step']}", str(s["reason"] or ""), str(s["path"]),
         flops_of(s), "; ".join(str(a["action"]) for a in s.get("advice", ())[:2])]
        for at, s in enumerate(read)
    ]  # fmt: skip
    return [chart], [PageTable("Snapshots", ("", "rank", "steps", "for", "trace", "FLOPs", "advice"), rows)]


def _goodput(summary: dict[str, Any]) -> BarChart:
    books = summary["job"]["goodput"]
    curves = tuple(
        Curve(name.replace("_", " "), palette.GOODPUT[name], np.array([float(books["seconds"][name])]))
        for name in GOODPUT_SECONDS
    )
    note = f"Goodput {percent(books['goodput_ratio'])}, effective training time {percent(books['ettr_ratio'])}."
    return BarChart("goodput", "The wall clock of the run", specs.SECONDS, ("run",), curves, note=note)


def _attempts(summary: dict[str, Any]) -> PageTable:
    rows = [
        [str(a["attempt"]), str(a["started"]), str(a["ended"] or "-"), str(a["end"]), str(a.get("reason") or ""),
         str(a["ranks"]), str(a["steps"]), "-" if a["resumed_from_step"] is None else str(a["resumed_from_step"]),
         "-" if a["lost_steps"] is None else str(a["lost_steps"])]
        for a in summary["job"]["attempts"]
    ]  # fmt: skip
    shown_rows = rows[-_MAX_TABLE_ROWS:]
    note = (
        f"The newest {len(shown_rows)} of {len(rows)} attempts; --json has all." if len(rows) > len(shown_rows) else ""
    )
    headings = ("attempt", "started", "ended", "end", "reason", "ranks", "steps", "resumed at", "steps lost")
    return PageTable("Attempts", headings, shown_rows, note)


def _ranks(summary: dict[str, Any]) -> PageTable:
    ranks = sorted(summary["ranks"], key=lambda rank: -(rank["exposed_wait_ratio"] or 0.0))[:_MAX_TABLE_ROWS]
    rows = [
        [str(r["rank"]), str(r["node"]), str(r["pid"]), str(r["steps"]), duration(r["step_seconds"]["p50"]),
         duration(r["step_seconds"]["p99"]), duration(r["data_wait_seconds"]["p50"]),
         duration(r["data_wait_seconds"]["p99"]),
         "not measured" if r["exposed_wait_ratio"] is None else percent(r["exposed_wait_ratio"]),
         *(percent(r["ledger"][c] / r["wall_seconds"]) if r["wall_seconds"] else "-" for c in CATEGORIES)]
        for r in ranks
    ]  # fmt: skip
    headings = ("rank", "node", "pid", "steps", "step p50", "p99", "wait p50", "p99", "exposed wait",
                *(c.replace("_", " ") for c in CATEGORIES))  # fmt: skip
    left = len(summary["ranks"]) > len(rows)
    note = f"The {len(rows)} of {len(summary['ranks'])} that waited most; --json has all." if left else ""
    return PageTable("Figures of each process", headings, rows, note)
