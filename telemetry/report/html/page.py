"""The report of a run as one HTML page: the texts above the charts, and the contents of the sections."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from telemetry.diagnosis.verdict import BAD, VerdictKind, healthy_share
from telemetry.records import CATEGORIES
from telemetry.report.attempts import FAILED, KILLED, RUNNING, log_interval
from telemetry.report.goodput import SECONDS as GOODPUT_SECONDS
from telemetry.report.html import charts, drawing, palette
from telemetry.report.html.charts import BARS, MAX_TABLE_ROWS, Chart, Curve, Sums, Table, TimeAxis
from telemetry.report.process_log import unix
from telemetry.report.text import KWH, memory_lines, sum_lines
from telemetry.util.text import duration, listed, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.verdict import Loss
    from telemetry.report.contract import ReportValues
    from telemetry.report.html.recorder import RunRecorder
    from telemetry.report.summary import Report

_STATES: Final = {
    VerdictKind.SLOWED: "Slower than need be",
    VerdictKind.UNKNOWN: "Not known",
    VerdictKind.NO_STEPS: "No step yet",
    VerdictKind.UNMEASURED: "Measured",
}
"""The state in a few words, for kinds of verdicts whose value does not say it."""

_MAX_ADVICE: Final = 3
_MAX_NODES: Final = 8
_MAX_SNAPSHOTS: Final = 24
_MAX_STALLS: Final = 40

_COSTLY_RESTARTS: Final = 0.05
"""From this share of the wall clock on, restarts are mentioned in the state of a run."""

_BIN_INTERVALS: Final = 1.2
"""The least width of a bin in log intervals, so that no bin is empty; but a short run gets `_MIN_BINS` bins."""

_MIN_BINS: Final = 20

_FOLDER: Final = Path(__file__).parent
_NO_MARKUP: Final = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)
"""The characters that could end a script element are escaped."""


class _Tile(NamedTuple):
    """One figure of the run, as text. ``note``: what it refers to, or why it is absent."""

    label: str
    value: str
    note: str = ""


class _Section(NamedTuple):
    """A part of the page. ``absent``: figures that it would show but that were not measured."""

    key: str
    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    absent: str = ""


def html_page(found: Report, recorder: RunRecorder) -> str:
    """The report of a run as one HTML page. ``recorder``: it has taken the lines of the logs."""
    recorder.finish()
    grid = recorder.grid
    grid.widen(_BIN_INTERVALS * max(map(log_interval, found.processes), default=0.0), _MIN_BINS)
    axis = TimeAxis(tuple(grid.begins()), grid.width_seconds) if grid.used else None
    sections = [each for each in _sections(found, recorder, axis) if each.charts or each.tables or each.absent]
    drawn = [chart for section in sections for chart in section.charts]
    marks = [mark for chart in drawn for mark in chart.marks]
    items = {
        chart.key: drawing.drawing(chart, axis or TimeAxis((0.0,), 1.0), marks) | chart.read_out() for chart in drawn
    }
    state, kind = _state_of(found)
    advice = found.values.advice
    page = {
        "run": found.values.run,
        "state": state,
        "kind": kind,
        "verdict": found.values.verdict,
        "first": advice[:_MAX_ADVICE],
        "more": advice[_MAX_ADVICE:],
        "tiles": _tiles(found),
        "facts": _facts(found, axis),
        "notes": [*memory_lines(found), *found.notes, *_own_notes(recorder)],
    }
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        page=page,
        sections=sections,
        width_ms=axis.width_seconds * 1e3 if axis else 0,
        heat_colours=drawing.heat_colours(),
        style=_own("page.css"),
        code=_own("page.js"),
        library=Markup(drawing.script().replace("</script", "<\\/script")),  # noqa: S704 - not of a log
        items=Markup(json.dumps(items, separators=(",", ":")).translate(_NO_MARKUP)),  # noqa: S704 - no markup is left
    )


def _own(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text("utf-8"))  # noqa: S704 - a file of this package


# -- above the charts ----------------------------------------------------------------------------------------------


def _state_of(found: Report) -> tuple[str, str]:
    kind = found.verdict.kind
    words = _STATES.get(kind, kind.value.capitalize())
    attempts, ettr = found.values.job.attempts, found.values.job.goodput.ettr_ratio
    end = attempts[-1].end if attempts else RUNNING
    if end in {FAILED, KILLED}:
        return end.capitalize() if kind == VerdictKind.FAILED else f"{words}, then {end}", BAD
    if len(attempts) > 1 and ettr is not None and 1 - ettr >= _COSTLY_RESTARTS:
        return f"{words}, and restarts cost {percent(1 - ettr, 0)}", BAD
    return words, found.verdict.level


def _tiles(found: Report) -> list[_Tile]:
    ranks, books, attempts = found.values.ranks, found.values.job.goodput, len(found.values.job.attempts)
    loop, steps = sum(rank.loop_seconds for rank in ranks), sum(rank.steps for rank in ranks)
    wall = sum(rank.wall_seconds for rank in ranks)
    agent = sum(sum(rank.overhead_seconds.values()) for rank in ranks)
    lost = sum(found.lost_seconds.values())
    return [
        _Tile("Wall clock", rough_duration(books.wall_seconds), f"{attempts} attempt{'s' * (attempts != 1)}"),
        _Tile("Goodput", percent(books.goodput_ratio), "of the wall clock trained something that was kept"),
        _Tile("Steps per second", plain_number(steps / loop) if loop > 0 else "-", "of the training loop, mean rank"),
        _exposed_wait(found.verdict.loss),
        _Tile("Lost in stalls", f"{plain_number(lost / 3600)} h", "GPU-hours, over all ranks"),
        _Tile(
            "Cost of the agent",
            percent(agent / wall, 3) if wall > 0 else "-",
            f"{duration(agent / steps)} a step" if steps else "",
        ),
    ]


def _exposed_wait(loss: Loss) -> _Tile:
    """The exposed wait of the rank that the verdict is about."""
    worst = loss.worst
    if worst is None:
        return _Tile("Exposed wait", "-" if loss.kind == VerdictKind.NO_STEPS else "not known")
    if worst.exposed_ratio is None:
        return _Tile("Exposed wait", "not measured")
    starved = loss.kind == VerdictKind.STARVED
    ratio, after = (worst.exposed_ratio, "") if starved else healthy_share(worst)
    return _Tile("Exposed wait", percent(ratio), f"of the training loop{after}, worst rank ({worst.rank})")


def _facts(found: Report, axis: TimeAxis | None) -> list[tuple[str, str]]:
    processes, newest, nodes = found.processes, found.processes[-1], found.values.job.nodes
    gpus = sorted({str(name) for process in processes if (name := process.environment.get("gpu"))})
    loader = ", ".join(f"{name}={value}" for name, value in newest.loader.items())
    versions = ", ".join(f"{name} {value}" for name, value in newest.environment.items() if name != "gpu")
    facts = [
        ("Started", min(process.started for process in processes)),
        ("Newest line", max(process.last_time for process in processes)),
        ("Ranks", str(found.values.job.ranks)),
        ("Nodes", f"{len(nodes)}: {listed(nodes, _MAX_NODES)}"),
        ("GPU", ", ".join(gpus) or "none seen"),
        ("Loader", loader or "not known"),
        ("Environment", versions or "not known"),
        ("Written", datetime.now(tz=timezone.utc).isoformat(timespec="seconds")),
    ]
    return [*facts, ("Time bins", f"{plain_number(axis.width_seconds)} s")] if axis else facts


def _own_notes(recorder: RunRecorder) -> list[str]:
    notes = ["Of windows and samples, the charts show some in each time bin, if a bin has many. Sums are exact."]
    if recorder.cut:
        notes.append("The oldest log files are gone: what was before the first line that is left is spread evenly.")
    if recorder.ranks_left_out:
        notes.append("There are more ranks than the charts have room for; the tables and sums have all of them.")
    return notes


# -- the sections --------------------------------------------------------------------------------------------------


def _sections(found: Report, recorder: RunRecorder, axis: TimeAxis | None) -> list[_Section]:
    values = found.values
    sums = Sums(recorder) if axis else None
    end = max((time for process in found.processes if (time := unix(process.last_time)) is not None), default=0.0)
    nodes = {process.rank: str(process.head.node) for process in found.processes}
    marks = charts.mark_chart(values, found.processes, recorder, end) if sums else None
    steps = [*charts.steps_over_time(sums), *([marks] if marks else [])] if sums else []
    heat = charts.heat_map(sums, nodes) if sums else None
    stalls, lines = _stalls(values), _hot_lines(values)
    sections = [
        _Section("ledger", "Where the time went", [charts.ledger_shares(sums)] if sums else []),
        _Section("ranks", "Every rank, over time", [heat] if heat else []),
        _Section("steps", "Steps and waits", steps, absent="" if steps else "no step has ended"),
        _Section("stalls", "Stalls", tables=stalls),
        _Section("lines", "Hot lines", (), lines, "" if lines else "lines are sampled during a stall, and none was"),
    ]
    rates = charts.throughput(sums) if sums else []
    sections.append(_Section("throughput", "Throughput and energy", rates, _spent(values), _unknown_sums(values)))
    for key, title, wanted in (
        ("gpu", "GPU", charts.GPU),
        ("workers", "Workers", charts.WORKERS),
        ("host", "Memory and CPU", charts.HOST),
    ):
        sampled, missing = charts.sampled_charts(sums, wanted) if sums else ([], [])
        absent = "; ".join(missing) if sampled else "no sample of it is in the logs"
        sections.append(_Section(key, title, sampled, absent=absent))
    return [
        *sections,
        _snapshots(values),
        _Section("attempts", "Attempts and goodput", [_goodput(values)], [_attempts(values)]),
        _Section("by-rank", "Every rank, in sum", [charts.ledger_by_rank(values.ranks)], [_ranks(values)]),
        _Section("agent", "What the agent cost", [charts.agent_cost(sums)] if sums else []),
    ]


def _stalls(values: ReportValues) -> list[Table]:
    stalls = sorted(values.stalls, key=lambda stall: -sum(stall.lost.values()))
    rows = [
        [str(stall.rank), stall.cause, str(stall.opened), stall.closed or "still open",
         f"{stall.first_step} to {stall.last_step}" if stall.last_step else str(stall.first_step),
         duration(sum(stall.lost.values())), stall.line_verdict]
        for stall in stalls[:_MAX_STALLS]
    ]  # fmt: skip
    left = len(stalls) - len(rows)
    note = f"The costliest {len(rows)} of {len(stalls)} stalls; --json has all." if left > 0 else ""
    headings = ("rank", "cause", "opened", "closed", "steps", "lost", "line")
    return [Table("Stalls, the costliest first", headings, rows, note)] if rows else []


def _hot_lines(values: ReportValues) -> list[Table]:
    """For each cause, the lines of code of its costliest stall."""
    tables: dict[str, Table] = {}
    for stall in sorted(values.stalls, key=lambda stall: -sum(stall.lost.values())):
        if stall.lines and stall.cause not in tables:
            rows = [
                [percent(at.share_ratio), f"{at.file}:{at.line}", at.function or "", at.calls or ""]
                for at in stall.lines
            ]
            headings = ("share of the time", "line", "in", "calls")
            tables[stall.cause] = Table(f"{stall.cause} on rank {stall.rank}", headings, rows)
    return [*tables.values()]


def _spent(values: ReportValues) -> list[Table]:
    rows = [[text] for text in sum_lines(values)]
    tables = [Table("Sums of the run", ("of all ranks and attempts",), rows)] if rows else []
    energy = values.gpu_energy_joules or {}
    total = sum(energy.values())
    if total > 0:
        by_category = [
            [name.replace("_", " "), f"{plain_number(joules / KWH)} kWh", percent(joules / total)]
            for name, joules in energy.items()
        ]
        note = "Of the whole GPUs. The split is an estimate by time."
        tables.append(Table("Energy of the GPUs by category", ("", "energy", "share"), by_category, note))
    return tables


def _unknown_sums(values: ReportValues) -> str:
    known = (("samples", values.throughput.samples), ("tokens", values.throughput.tokens))
    unknown = [f"{name} (not counted on every rank)" for name, total in known if total is None]
    if sum((values.gpu_energy_joules or {}).values()) <= 0:
        unknown.append("energy of the GPUs (no GPU with an energy counter was read)")
    if values.cost is None:
        unknown.append("cost (gpu_hour_price is not set)")
    return "; ".join(unknown)


def _snapshots(values: ReportValues) -> _Section:
    key, title = "snapshots", "Snapshots: what a step consists of"
    read = [snapshot for snapshot in values.snapshots if snapshot.breakdown][-_MAX_SNAPSHOTS:]
    if not read:
        return _Section(key, title, absent="no trace was recorded or read")
    curves = tuple(
        Curve(name, colour, np.array([float(snapshot.breakdown.get(name, 0.0)) for snapshot in read]))
        for name, colour in palette.TRACE.items()
    )
    labels = tuple(f"snapshot {at + 1}" for at in range(len(read)))
    rows = [
        [str(at), str(s.rank), f"{s.first_step} to {s.last_step}", s.reason or "", s.path,
         "; ".join(each.action for each in s.suggestions[:2])]
        for at, s in enumerate(read, 1)
    ]  # fmt: skip
    headings = ("", "rank", "steps", "for", "trace", "advice")
    chart = Chart("breakdown", "Average step of each snapshot", BARS, charts.RATIO, curves, labels)
    return _Section(key, title, [chart], [Table("Snapshots", headings, rows)])


def _goodput(values: ReportValues) -> Chart:
    books = values.job.goodput
    curves = tuple(
        Curve(name.replace("_", " "), palette.GOODPUT[name], np.array([float(books.seconds[name])]))
        for name in GOODPUT_SECONDS
    )
    note = f"Goodput {percent(books.goodput_ratio)}, effective training time {percent(books.ettr_ratio)}."
    return Chart("goodput", "The wall clock of the run", BARS, charts.SECONDS, curves, ("run",), note)


def _attempts(values: ReportValues) -> Table:
    attempts = values.job.attempts
    rows = [
        [str(a.attempt), a.started, a.ended or "-", a.end, a.reason or "", str(a.ranks), str(a.steps),
         "-" if a.resumed_from_step is None else str(a.resumed_from_step), str(a.lost_steps)]
        for a in attempts[-MAX_TABLE_ROWS:]
    ]  # fmt: skip
    note = f"The newest {len(rows)} of {len(attempts)} attempts; --json has all." if len(attempts) > len(rows) else ""
    headings = ("attempt", "started", "ended", "end", "reason", "ranks", "steps", "resumed at", "steps lost")
    return Table("Attempts", headings, rows, note)


def _ranks(values: ReportValues) -> Table:
    ranks = sorted(values.ranks, key=lambda rank: -(rank.exposed_wait_ratio or 0.0))[:MAX_TABLE_ROWS]
    rows = [
        [str(r.rank), str(r.node), str(r.pid), str(r.steps),
         *map(duration, (r.step_seconds.p50, r.step_seconds.p99, r.data_wait_seconds.p50, r.data_wait_seconds.p99)),
         "not measured" if r.exposed_wait_ratio is None else percent(r.exposed_wait_ratio),
         *(percent(r.ledger[c] / r.wall_seconds) if r.wall_seconds else "-" for c in CATEGORIES)]
        for r in ranks
    ]  # fmt: skip
    headings = ("rank", "node", "pid", "steps", "step p50", "p99", "wait p50", "p99", "exposed wait",
                *(c.replace("_", " ") for c in CATEGORIES))  # fmt: skip
    left = len(values.ranks) > len(rows)
    note = f"The {len(rows)} of {len(values.ranks)} that waited most; --json has all." if left else ""
    return Table("Figures of each process", headings, rows, note)
