"""The report of a run as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from telemetry.diagnosis import verdict as run_verdict
from telemetry.diagnosis.verdict import lost_seconds
from telemetry.records import COMPUTE, DATA_WAIT, speedup_text
from telemetry.report.attempts import FAILED, KILLED, RUNNING, log_interval, unix
from telemetry.report.goodput import goodput_advice
from telemetry.report.html import drawing, palette
from telemetry.report.html.charts import BarChart, HeatMap, MarkChart, TimeAxis, TimeChart
from telemetry.report.html.sections import as_table, sections
from telemetry.report.process_log import stalls_of
from telemetry.report.text import memory_lines
from telemetry.util.text import duration, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.verdict import RunFinding, Verdict
    from telemetry.report.html.charts import Chart
    from telemetry.report.html.recorder import RunRecorder
    from telemetry.report.html.sections import PageSection, PageTable
    from telemetry.report.process_log import ProcessLog
    from telemetry.report.summary import Report

GOOD: Final = "good"
BAD: Final = "bad"
UNKNOWN: Final = "unknown"

_STATES: Final = {
    run_verdict.HEALTHY: ("Healthy", GOOD),
    run_verdict.STARVED: ("Starved", BAD),
    run_verdict.STUCK: ("Stuck", BAD),
    run_verdict.HANGS: ("Hangs", BAD),
    run_verdict.HUNG: ("Hung", BAD),
    run_verdict.STALLED: ("Stalled", BAD),
    run_verdict.UNKNOWN: ("Not known", UNKNOWN),
    run_verdict.NO_STEPS: ("No step yet", UNKNOWN),
    run_verdict.UNMEASURED: ("Measured", UNKNOWN),
}
"""For each kind of verdict: the state in two words, and whether it is a good one."""

_MAX_ADVICE: Final = 3

_COSTLY_RESTARTS: Final = 0.05
"""From this share of the wall clock on, restarts belong to the state of a run."""


@dataclass(frozen=True, slots=True)
class AdviceCard:
    """One change.

    Attributes:
        typed: what to set, if it is a setting.
        speedup: factor on the steps per second; None without a prediction. ``gain``: the same as text, which may be a
            range.
    """

    typed: str
    action: str
    because: str
    about: str
    speedup: float | None = None
    gain: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the run, as text. ``note``: what it is of, or why it is absent."""

    label: str
    value: str
    note: str = ""


def _state_of(summary: dict[str, Any], verdict: Verdict) -> tuple[str, str]:
    """The state of the run in a few words, and `GOOD`, `BAD` or `UNKNOWN`."""
    words, kind = _STATES[verdict.kind]
    attempts, ettr = summary["job"]["attempts"], summary["job"]["goodput"]["ettr_ratio"]
    end = attempts[-1]["end"] if attempts else RUNNING
    if end in {FAILED, KILLED}:
        return f"{words}, then {end}", BAD
    if len(attempts) > 1 and ettr is not None and 1 - ettr >= _COSTLY_RESTARTS:
        return f"{words}, and restarts cost {percent(1 - ettr, 0)}", BAD
    return words, kind


def _advice_cards(found: Report) -> list[AdviceCard]:
    """All advice, the largest predicted speed-up first, then by the cost of the stall; each change once.

    The verdict is about the processes that no later one has replaced, so advice is for their stalls.
    """
    cards: dict[tuple[str, str], AdviceCard] = {}
    stalls = [stall for process in found.now for stall in stalls_of(process)]
    for stall in sorted(stalls, key=lambda stall: -lost_seconds(stall)):
        about = f"for {stall['cause']} on rank {stall['rank']}"
        for advice in stall["advice"]:
            _add(cards, advice, about)
        for other in stall["evidence"].get("also", []):
            for advice in other.get("advice", []):
                _add(cards, advice, f"for {other.get('cause')} on rank {stall['rank']}")
    for text in goodput_advice(found.goodput):
        change, _, because = text.partition(": ")
        cards.setdefault(("", text), AdviceCard("", change, because, "for restarts"))
    for snapshot in found.values["snapshots"]:
        for advice in snapshot.get("advice", ())[:1]:
            share = f" (up to {percent(advice['share_ratio'], 0)} of the step)" if advice["share_ratio"] else ""
            card = AdviceCard("", advice["action"], f"{advice['because']}{share}", "from a trace")
            cards.setdefault(("", card.action), card)
    return sorted(cards.values(), key=lambda card: -(card.speedup or 0.0))


def _add(cards: dict[tuple[str, str], AdviceCard], advice: dict[str, Any], about: str) -> None:
    setting, value = advice.get("setting"), advice.get("value")
    typed = f"{setting}={value}" if setting and value is not None else str(setting or "")
    action, because = str(advice.get("action") or ""), str(advice.get("because") or "")
    card = AdviceCard(typed, action, because, about, advice.get("predicted_speedup"), speedup_text(advice))
    cards.setdefault((str(setting or ""), action), card)


def _tiles(found: Report) -> list[Tile]:
    """The main figures. What was not measured says so."""
    ranks, job = found.values["ranks"], found.values["job"]
    books = job["goodput"]
    loop = sum(rank["ledger"][DATA_WAIT] + rank["ledger"][COMPUTE] for rank in ranks)
    steps = sum(rank["steps"] for rank in ranks)
    wall = sum(rank["wall_seconds"] for rank in ranks)
    lost = sum(found.lost_seconds.values())
    agent = sum(sum(rank["overhead_seconds"].values()) for rank in ranks)
    goodput = books["goodput_ratio"]
    return [
        Tile("Wall clock", rough_duration(books["wall_seconds"]), _attempts(len(job["attempts"]))),
        Tile("Goodput", percent(goodput), "of the wall clock trained something that was kept"),
        Tile("Steps per second", plain_number(steps / loop) if loop > 0 else "-", "of the training loop, mean rank"),
        _exposed_wait(found.verdict.finding),
        Tile("Lost in stalls", f"{plain_number(lost / 3600)} h", "GPU-hours, over all ranks"),
        Tile(
            "Cost of the agent",
            percent(agent / wall, 3) if wall > 0 else "-",
            f"{duration(agent / steps)} a step" if steps else "",
        ),
    ]


def _exposed_wait(finding: RunFinding) -> Tile:
    """The share that the verdict tells, of the same rank."""
    worst = finding.worst
    if worst is None:
        return Tile("Exposed wait", "not known" if finding.kind == run_verdict.UNKNOWN else "-")
    if worst.exposed_ratio is None:
        return Tile("Exposed wait", "not measured")
    starved = finding.kind == run_verdict.STARVED
    ratio, after = (worst.exposed_ratio, "") if starved else run_verdict.healthy_share(worst)
    return Tile("Exposed wait", percent(ratio), f"of the training loop{after}, worst rank ({worst.rank})")


def _attempts(number: int) -> str:
    return "1 attempt" if number == 1 else f"{number} attempts"


_FOLDER: Final = Path(__file__).parent
_NO_MARKUP: Final = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)
"""No character is left that could end a script element."""


@dataclass(frozen=True, slots=True)
class PageHead:
    """What the page says above its charts.

    Attributes:
        run: its name.
        state: in one or two words; ``kind``: `GOOD`, `BAD` or `UNKNOWN`.
        verdict: all of it.
        first, more: the advice that is shown at once, and the rest.
        facts: names and values on where and when it ran.
        notes: what is missing or damaged in the logs.
    """

    run: str
    state: str
    kind: str
    verdict: str
    first: list[AdviceCard]
    more: list[AdviceCard]
    tiles: list[Tile]
    facts: list[tuple[str, str]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A chart as the template needs it."""

    key: str
    kind: str
    title: str
    note: str
    legend: list[dict[str, Any]]
    sentences: list[str]
    metrics: list[dict[str, Any]]
    table: PageTable


def _page(head: PageHead, sections: Sequence[PageSection], axis: TimeAxis | None) -> str:
    """The whole page. ``axis``: of all charts over time; None without any."""
    marks = [
        mark for section in sections for chart in section.charts if isinstance(chart, MarkChart) for mark in chart.marks
    ]
    items: dict[str, Any] = {}
    shown = []
    for section in sections:
        for chart in section.charts:
            if axis is None and not isinstance(chart, BarChart):
                continue
            items[chart.key] = drawing.drawing(chart, axis or TimeAxis((0.0,), 1.0), marks) | _read_out(chart)
        shown.append((section, [_drawn(chart) for chart in section.charts if chart.key in items]))
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        head=head,
        sections=shown,
        width_ms=axis.width_seconds * 1e3 if axis else 0,
        heat_colours=drawing.heat_colours(),
        style=_own("page.css"),
        code=_own("page.js"),
        library=Markup(drawing.script().replace("</script", "<\\/script")),  # noqa: S704 - not of a log
        items=Markup(json.dumps(items, separators=(",", ":")).translate(_NO_MARKUP)),  # noqa: S704 - no markup is left
    )


def _own(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text("utf-8"))  # noqa: S704 - a file of this package


def _drawn(chart: Chart) -> _Drawn:
    kind = {TimeChart: "time", BarChart: "bars", HeatMap: "heat", MarkChart: "marks"}[type(chart)]
    curves = chart.curves if isinstance(chart, (TimeChart, BarChart)) else ()
    legend = [
        {"field": f"c{number}", "label": curve.label, "colour": curve.colour, "dash": curve.dash}
        for number, curve in enumerate(curves)
    ]
    if isinstance(chart, MarkChart):
        legend = [{"field": "", "label": kind, "colour": palette.MARKS[kind], "dash": "solid"} for kind in chart.kinds]
    note = " ".join(chart.notes) if isinstance(chart, MarkChart) else chart.note
    metrics = [{"key": m.key, "label": m.label} for m in chart.metrics] if isinstance(chart, HeatMap) else []
    sentences = list(chart.outliers) if isinstance(chart, HeatMap) else []
    return _Drawn(chart.key, kind, chart.title, note, legend, sentences, metrics, as_table(chart))


def _read_out(chart: Chart) -> dict[str, Any]:
    """What the page needs besides the drawing, to say what is at the cursor."""
    if isinstance(chart, BarChart):
        return {"labels": chart.labels, "fields": [[f"c{n}", c.label] for n, c in enumerate(chart.curves)]}
    if isinstance(chart, TimeChart):
        return {"fields": [[f"c{n}", c.label] for n, c in enumerate(chart.curves)]}
    if isinstance(chart, MarkChart):
        return {"marks": [asdict(mark) for mark in chart.marks], "kinds": chart.kinds}
    scaled = [(metric, *drawing.scale_of(metric.unit, metric.high)) for metric in chart.metrics]
    metrics = {
        m.key: {"low": m.low * factor, "high": m.high * factor, "more": m.capped, "unit": unit, "label": m.label}
        for m, factor, unit in scaled
    }
    return {"rows": chart.rows, "metrics": metrics, "bins": chart.metrics[0].cells.shape[1], "per": chart.bins_per_cell}


_BIN_INTERVALS: Final = 1.2
"""A bin is at least so many log intervals wide, or some would be empty; but a short run gets `_MIN_BINS` of them."""

_MIN_BINS: Final = 20


def html_page(found: Report, recorder: RunRecorder) -> str:
    """The report of a run as one HTML page. ``recorder``: has seen the lines of the logs."""
    values, processes = found.values, found.processes
    times = [time for process in processes if (time := unix(process.last_time)) is not None]
    recorder.finish()
    grid = recorder.grid
    grid.widen(_BIN_INTERVALS * max(map(log_interval, processes), default=0.0), _MIN_BINS)
    axis = TimeAxis(tuple(grid.begins()), grid.width_seconds) if grid.used else None
    state, kind = _state_of(values, found.verdict)
    cards = _advice_cards(found)
    head = PageHead(
        run=values["run"],
        state=state,
        kind=kind,
        verdict=values["verdict"],
        first=cards[:_MAX_ADVICE],
        more=cards[_MAX_ADVICE:],
        tiles=_tiles(found),
        facts=_facts(values, processes, axis),
        notes=[*filter(None, memory_lines(processes, found.over)), *found.notes, *_own_notes(recorder)],
    )
    return _page(head, sections(values, processes, recorder, max(times, default=0.0)), axis)


def _facts(summary: dict[str, Any], processes: Sequence[ProcessLog], axis: TimeAxis | None) -> list[tuple[str, str]]:
    job, newest = summary["job"], processes[-1]
    nodes = job["nodes"]
    shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    gpus = sorted({str(name) for process in processes if (name := process.environment.get("gpu"))})
    loader = ", ".join(f"{name}={value}" for name, value in newest.loader.items())
    versions = ", ".join(f"{name} {value}" for name, value in newest.environment.items() if name != "gpu")
    facts = [
        ("Started", str(min(process.started for process in processes))),
        ("Newest line", str(max(process.last_time for process in processes))),
        ("Ranks", str(job["ranks"])),
        ("Nodes", f"{len(nodes)}: {shown}"),
        ("GPU", ", ".join(gpus) or "none seen"),
        ("Loader", loader or "not known"),
        ("Environment", versions or "not known"),
        ("Written", datetime.now(tz=timezone.utc).isoformat(timespec="seconds")),
    ]
    return [*facts, ("Time bins", f"{plain_number(axis.width_seconds)} s")] if axis else facts


def _own_notes(recorder: RunRecorder) -> list[str]:
    notes = [
        "Of windows and samples, the charts show some in each time bin, if a bin has many. Sums are exact.",
    ]
    if recorder.cut:
        notes.append("The oldest log files are gone: what was before the first line that is left is spread evenly.")
    if recorder.ranks_left_out:
        notes.append("There are more ranks than the charts have room for; the tables and sums have all of them.")
    return notes
