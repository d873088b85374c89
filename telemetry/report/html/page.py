"""The report of a run as one HTML page. Its template has the tables and the order of the sections' contents."""

from __future__ import annotations

import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import bokeh
from bokeh.document import Document
from bokeh.models import ColumnDataSource
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from telemetry.diagnosis.verdict import BAD, VerdictKind, healthy_share
from telemetry.model.records import CATEGORIES
from telemetry.report.as_text import KWH, MAX_ROWS, memory_lines, sum_lines
from telemetry.report.attempt_list import FAILED, KILLED, RUNNING
from telemetry.report.html import charts
from telemetry.report.html.drawing import HEAT_COLOURS, TimeAxis
from telemetry.report.html.heat_map import heat_map
from telemetry.util.words import duration, listed, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.verdict import Loss
    from telemetry.report.contract import ReportValues, Snapshot
    from telemetry.report.html.drawing import Chart
    from telemetry.report.html.over_time import OverTime, RunRecorder
    from telemetry.report.summary import Report

_STATES: Final = {
    VerdictKind.SLOWED: "Slower than need be",
    VerdictKind.UNKNOWN: "Not known",
    VerdictKind.NO_STEPS: "No step yet",
    VerdictKind.UNMEASURED: "Measured",
}
"""The state in a few words, for kinds of verdicts whose value does not say it."""

_MAX_SNAPSHOTS: Final = 24

_COSTLY_RESTARTS: Final = 0.05
"""From this share of the wall clock on, restarts are mentioned in the state of a run."""

_FOLDER: Final = Path(__file__).parent


class _Section(NamedTuple):
    """A part of the page. ``absent``: figures that it would show but that were not measured."""

    key: str
    title: str
    charts: Sequence[Chart] = ()
    absent: str = ""
    has_tables: bool = False


def html_page(found: Report, recorder: RunRecorder) -> str:
    """The report of a run as one HTML page. ``recorder``: it has taken the lines of the logs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about times in which nothing was measured
        figures = recorder.over_time(found.processes)
        sections = _sections(found, recorder, figures)
    drawn = [chart for section in sections for chart in section.charts]
    for chart in drawn:
        chart.plot.name = chart.key
    document = Document()
    # Not the plots: page.js has to reach all of them, and adds them itself.
    document.add_root(ColumnDataSource({"plots": [chart.plot for chart in drawn]}))
    state, kind = _state_of(found)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {each.__name__: each for each in (duration, rough_duration, percent, plain_number, listed)}
    library = (Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js").read_text("utf-8")
    return environment.get_template("page.html").render(
        values=found.values,
        said=found.verdict.lines,
        state=state,
        kind=kind,
        worst=_worst(found.verdict.loss),
        lost_seconds=(lost := sum(found.lost_seconds.values())),
        lost_share=found.of_all_ranks(lost),
        processes=found.processes,
        bin_seconds=figures.width_seconds,
        written=datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
        notes=[*memory_lines(found), *found.notes],
        sections=sections,
        stalls=sorted(found.values.stalls, key=lambda stall: -sum(stall.details.lost_seconds.values())),
        snapshots=_read_snapshots(found.values),
        ranks=sorted(found.values.ranks, key=lambda rank: -(rank.exposed_wait_ratio or 0.0)),
        categories=CATEGORIES,
        sums=sum_lines(found.values),
        kwh=KWH,
        most=MAX_ROWS,
        heat_colours=HEAT_COLOURS,
        library=Markup(library.replace("</script", "<\\/script")),  # noqa: S704 - not of a log
        drawings=document.to_json(deferred=False),
    )


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


def _worst(loss: Loss) -> tuple[str, str]:
    """The exposed wait of the rank that the verdict is about, and what it is a share of."""
    worst = loss.worst
    if worst is None:
        return "-" if loss.kind == VerdictKind.NO_STEPS else "not known", ""
    if worst.exposed_ratio is None:
        return "not measured", ""
    starved = loss.kind == VerdictKind.STARVED
    ratio, after = (worst.exposed_ratio, "") if starved else healthy_share(worst)
    return percent(ratio), f"of the training loop{after}, worst rank ({worst.rank})"


# -- the sections --------------------------------------------------------------------------------------------------


def _sections(found: Report, recorder: RunRecorder, figures: OverTime) -> list[_Section]:
    """The sections that have something. The template adds their tables."""
    values, axis = found.values, TimeAxis(figures.edges)
    marks, note = charts.marks_of(values, found.processes, recorder.phases)
    steps = [*charts.steps_over_time(axis, figures, marks), *axis.marks("marks", "Events", marks, note)]
    nodes = {process.rank: str(process.head.node) for process in found.processes}
    several = len({rank.rank for rank in values.ranks}) > 1
    hot = any(stall.details.lines for stall in values.stalls)
    cold = (
        "no stall lasted long enough to sample its lines" if values.stalls else "there was no stall to sample lines in"
    )
    gpu = [_sampled("gpu", "GPU", *charts.sampled_charts(axis, figures, charts.GPU))] if found.on_gpus else []
    read = _read_snapshots(values)
    sections = [
        _Section("ledger", "Where the time went", charts.ledger_over_time(axis, figures)),
        _Section("ranks", "Every rank, over time", heat_map(axis, figures, nodes) if several else ()),
        _Section("steps", "Steps and waits", steps, "" if steps else "no step has ended"),
        _Section("stalls", "Stalls", has_tables=bool(values.stalls)),
        _Section("lines", "Hot lines", (), "" if hot else cold, hot),
        _Section("throughput", f"Throughput{' and energy' if found.on_gpus else ''}", charts.throughput(axis, figures),
                 _unknown_sums(found), True),
        *gpu,
        _sampled("workers", "Workers", *charts.sampled_charts(axis, figures, charts.WORKERS)),
        _sampled("host", "Memory and CPU", *charts.sampled_charts(axis, figures, charts.HOST)),
        _Section("snapshots", "Snapshots: what a step consists of", charts.breakdown(read),
                 "" if read else "no trace was recorded or read"),
        _Section("attempts", "Attempts and goodput", [charts.goodput(values.job.goodput)]),
        _Section("by-rank", "Every rank, in sum", [charts.ledger_by_rank(values.ranks)] if several else (), "", True),
        _Section("agent", "What the agent cost", charts.agent_cost(axis, figures)),
    ]  # fmt: skip
    return [each for each in sections if each.charts or each.absent or each.has_tables]


def _sampled(key: str, title: str, drawn: Sequence[Chart], missing: Sequence[str]) -> _Section:
    return _Section(key, title, drawn, "; ".join(missing) if drawn else "no sample of it is in the logs")


def _unknown_sums(found: Report) -> str:
    values = found.values
    known = (("samples", values.throughput.samples), ("tokens", values.throughput.tokens))
    unknown = [f"{name} (not counted on every rank)" for name, total in known if total is None]
    if found.on_gpus and sum((values.gpu_energy_joules or {}).values()) <= 0:
        unknown.append("energy of the GPUs (no GPU with an energy counter was read)")
    if found.on_gpus and values.cost is None:
        unknown.append("cost (gpu_hour_price is not set)")
    return "; ".join(unknown)


def _read_snapshots(values: ReportValues) -> list[Snapshot]:
    return [snapshot for snapshot in values.snapshots if snapshot.breakdown][-_MAX_SNAPSHOTS:]
