"""The documentation against the code and the results of the benchmarks: links, names, thresholds, figures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from telemetry.agent import stuck_monitor as stuck
from telemetry.config import Config
from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.costs import THRESHOLDS, Thresholds
from telemetry.loop import tick_pace as ticks
from telemetry.model.records import StallDetails
from tests.lines.__main__ import Outcome
from tests.lines.__main__ import table as planted

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/zoo/README.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE_DOCS), *sorted(DOCS.glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages about the package as it is now. The changelog may name what is gone."""

NO_METRICS = {"training_thread", "training_workers"}
"""A value and a field of the log."""


def text_of(path):
    return path.read_text(encoding="utf-8")


def of_page(path):
    return str(path.relative_to(ROOT))


def without_code(path):
    return re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text_of(page)):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_every_table_has_a_header_row(page):
    """Without one its rows are shown as raw text: an empty line in a table ends it."""
    lines = ["", *without_code(page).splitlines(), ""]
    firsts = [at for at, line in enumerate(lines) if line.startswith("|") and not lines[at - 1].startswith("|")]
    assert [lines[at] for at in firsts if not re.fullmatch(r"\|(\s*:?-{3,}:?\s*\|)+", lines[at + 1])] == []


@pytest.mark.parametrize("page", WRITTEN, ids=of_page)
def test_the_files_and_metrics_that_a_page_names_exist(page):
    files = re.findall(r"`((?:telemetry|tests|benchmarks|grafana|deploy|docs)/[\w./*-]*)`", text_of(page))
    assert [name for name in files if not any(ROOT.glob(name.rstrip("/")))] == []
    known = set(re.findall(r"^\| `(\w+)`", text_of(DOCS / "METRICS.md"), flags=re.MULTILINE))
    named = set(re.findall(r"`((?:training|telemetry)_[a-z_]+)", text_of(page)))
    assert page.name == "METRICS.md" or named - known - NO_METRICS == set()


def test_the_readme_is_short_and_shows_findings_and_the_start_of_a_report():
    text = text_of(ROOT / "README.md")
    findings = text.split("## What it finds\n", 1)[1].split("\n## ", 1)[0]
    (report,) = re.findall(r"^```console\n(run demo-1\n.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 700
    assert len(re.findall(r"^- \*\*", findings, flags=re.MULTILINE)) == 5
    assert len(report.splitlines()) <= 12


# -- what the code says ----------------------------------------------------------------------------------------


def table(text, heading):
    """The cells of the table below a heading, row by row, without its first two lines."""
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows[2:]]


def load_tool(name):
    """A script of docs/tools as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["METRICS.md", "settings.md", "integrations.md", "output.md", "overhead.md"])
def test_the_reference_is_up_to_date(name):
    assert text_of(DOCS / name) == load_tool("reference").page(name), "run `make docs-reference`"


def test_every_field_of_the_evidence_is_documented(monkeypatch):
    tool = load_tool("reference")
    documented = set(re.findall(r"^- `(\w+)`", text_of(DOCS / "output.md"), flags=re.MULTILINE))
    evidence = tool.written_evidence()
    written = {*evidence, *evidence["paces"][0], *StallDetails.__struct_fields__, *tool.written_workers()}
    assert len(written) > 90
    assert written - documented == set()
    monkeypatch.delitem(tool.EVIDENCE, "edges")
    with pytest.raises(ValueError, match="edges"):
        tool.page("output.md")


def test_a_name_in_the_log_means_one_figure_and_is_that_of_its_metric():
    tool = load_tool("reference")
    assert tool.written_evidence().keys() & {*StallDetails.__struct_fields__} == set(), (
        "one would replace the other in the log"
    )
    meanings = {}
    for fields in (tool.EVIDENCE, tool.STALL, tool.WORKERS):
        for name, meaning in fields.items():
            assert meanings.setdefault(name, meaning) == meaning, name
    thresholds = {field.name for field in dataclasses.fields(Thresholds)}
    assert (meanings.keys() | thresholds) & {*Config.__struct_fields__} == set()
    metrics = {row[0] for row in table(text_of(DOCS / "METRICS.md"), "## The DataLoader and its workers")}
    waits = {name.removeprefix("training_loader_") for name in metrics if name.endswith("_seconds_total")}
    assert len(waits) == 3
    assert waits <= tool.WORKERS.keys()
    assert {name.removesuffix("_total") for name in waits} <= tool.EVIDENCE.keys()


def test_the_glossary_says_how_many_ticks_are_skipped():
    glossary = " ".join(text_of(DOCS / "concepts.md").split())
    skipped = f"{ticks._MAX_SKIPPED} of {ticks._MAX_SKIPPED + 1} ticks are skipped"
    assert f"{skipped}, with intervals of at most {ticks._MAX_INTERVAL_SECONDS:g} s" in glossary


def test_the_documented_thresholds_are_those_of_the_code():
    text = text_of(DOCS / "causes.md")
    limits = {re.search(r"\(`(\w+)", row)[1]: float(value) for row, value in table(text, "### When a run is stuck")}
    assert limits == {name: getattr(stuck, name) for name in limits}
    assert f"over {THRESHOLDS.stuck_fetch_seconds:g} s and over {THRESHOLDS.stuck_fetches:g} times" in text


def test_every_cause_has_a_section():
    sections = re.split(r"^## (\w+)$", text_of(DOCS / "causes.md"), flags=re.MULTILINE)
    written = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert [name for name in written if name in CAUSES] == list(CAUSES)
    assert all("**Symptom.**" in written[cause] and "**Fix.**" in written[cause] for cause in CAUSES)


# -- what was measured -------------------------------------------------------------------------------------------------


def said(page):
    """The words of a page, on one line."""
    return " ".join(text_of(ROOT / page).split())


def result(kind):
    """The only results of a kind, as JSON. The page on accuracy or overhead links to them."""
    (path,) = RESULTS.glob(f"{kind}-*.json")
    assert any(f"benchmarks/results/{path.stem}.md" in said(f"docs/{page}.md") for page in ("accuracy", "overhead"))
    return json.loads(text_of(path))


def rows(name, start):
    """The cells of the rows of a page of results that start in some way."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text_of(RESULTS / f"{name}.md").splitlines()
        if line.startswith(start)
    ]


def overhead():
    measured = result("overhead-amd")["rows"]

    def median(section, name):
        return next(r["median"] for r in measured if r["section"].startswith(section) and r["name"].startswith(name))

    hot, cold = (median(f"Per step on the training thread, {how}", "telemetry adds") for how in ("hot", "cold"))
    yield "README.md", f"takes {hot:.2f} µs longer in a tight loop, and {cold:.1f} µs inside a real training step"
    yield "README.md", f"threads take {median('The agent', 'CPU with 8'):.2f} % of a core"
    ((*_, note),) = rows("overhead-amd-epyc-2-cores", "| GET /metrics |")
    yield "docs/production.md", f"{int(note.split()[0]):,} series for 8 ranks"


def zoo():
    published = result("zoo")
    _, accused, named, predicted = (goal["reached"] for goal in published["goals"])
    yield "README.md", f"On {len(published['specimens'])} scripts"
    yield "README.md", f"named in {named},"
    yield "README.md", f"{accused.removesuffix(' accused').replace(' runs', ' healthy runs')} were accused"
    yield "README.md", f"On {predicted.split(' specimens')[0]} scripts whose advice could be followed"
    for goal in published["goals"]:
        yield "docs/accuracy.md", f" {goal['reached']} |"
    starving, healthy = (
        [s["rival"] for s in published["specimens"] if bool(s["causes"]) is starves] for starves in (True, False)
    )
    bound, computes, wrong = (
        sum(rival.startswith(status) for rival in rivals)
        for status, rivals in (("INPUT-BOUND:", starving), ("COMPUTE-BOUND:", starving), ("INPUT-BOUND:", healthy))
    )
    yield "docs/accuracy.md", f"`INPUT-BOUND` for {bound} of the {len(starving)} that starve"
    yield "docs/accuracy.md", f"`COMPUTE-BOUND` for the other {computes}:"
    yield "docs/accuracy.md", f"`INPUT-BOUND` for {wrong} of the {len(healthy)} healthy"


def jobs():
    page = text_of(DOCS / "accuracy.md")
    hangs, stragglers = result("hang-campaign"), result("straggler-campaign")
    for found, begin in ((hangs, f"`{hangs['command']}`"), (stragglers, "30 jobs with a slow rank or node")):
        (row,) = re.findall(rf"\| {re.escape(begin)}.*", page)
        assert row.endswith(f"| {found['right']} of {found['of']} |")
    runs = [run for specimen in result("jobs-zoo")["specimens"] for run in specimen["runs"]]
    right = sum(bool(run["right"]) or run["accused"] is False for run in runs)
    yield "docs/accuracy.md", f"| {right} of {len(runs)} |"


def restarts():
    runs = [
        [float(figure) for figure in re.findall(r"[\d.]+", cell)]
        for row in rows("restarts-amd-epyc-2-cores", ("| typed again, ", "| torchrun, ", "| elastic, "))
        for cell in row[4:]
    ]
    exact, off, ettr = (runs[column::3] for column in range(3))
    of_ettr = f"and `ettr_ratio` by at most {max(ettr)[0]} %"
    yield "docs/accuracy.md", f"at most {max(off)[0]} % of the wall clock, {of_ettr}"
    yield "docs/accuracy.md", f"{sum(e[0] for e in exact):.0f} of {sum(e[1] for e in exact):.0f} attempts"


def lines():
    first, share, gain = planted({}, [Outcome(**outcome) for outcome in result("lines")["outcomes"]]).goals
    yield "docs/accuracy.md", f"the planted one in {first.told}"
    yield "docs/accuracy.md", f"the script's own timers in {share.reached} of {share.of}."
    yield "docs/accuracy.md", f"the predicted range, in {gain.reached} of {gain.of}."


def memory_and_tune():
    memory, tune = (text_of(RESULTS / f"{name}-amd-epyc-2-cores.md") for name in ("memory", "tune"))
    yield "docs/accuracy.md", re.search(r"^\d+ of .* parts named rightly.*$", memory, re.MULTILINE)[0]
    best = r"the grid's best: (\d+) of (\d+) scripts, in at most (\d+) trials"
    reached, scripts, trials = re.search(best, tune).groups()
    yield "docs/accuracy.md", f"on {reached} of {scripts} scripts, after at most {trials} trials"


def comparisons():
    """How often the interval of a pair has the truth, and is below 1 if each window is longer."""
    for kind in ("thread", "worker", "busy"):
        (row,) = rows("compare-amd-epyc-2-cores", f"| {kind} | 5 % longer |")
        yield "docs/accuracy.md", f"| {row[3]} | {100 * int(row[4]) / int(row[2]):.0f} % |"


def changes():
    (steady,) = rows("changes", "| compute 12 % longer |")
    (crowded,) = rows("changes", "| compute 12 % longer, others come and go |")
    assert steady[1] == "100 %"
    yield "docs/accuracy.md", f"after {steady[2].split(',')[0]} minutes in the median"
    yield "docs/accuracy.md", f"it took {crowded[2].split(',')[0]} minutes, and {crowded[1]} were found"


def snapshots():
    (_, memory, without, taken, pauses, _), (*_, one, _), (_, most, _, _, dropped, _) = (
        rows("snapshot-budget-amd-epyc-2-cores", f"| {operators} |")[0] for operators in (6000, 60000, 1000000)
    )
    cost = f"took {taken} each instead of {without}, {memory[1:]} more memory and pauses of {pauses}"
    yield "docs/snapshots.md", cost
    yield "docs/snapshots.md", f"one step of 60,000, pauses of {one}"
    yield "docs/snapshots.md", f"which was dropped, {most[1:]} and {dropped} ("


def html_report():
    (path,) = RESULTS.glob("html-report-*.json")
    week = [row for row in json.loads(text_of(path))["rows"] if row["section"] == "a week of 64 ranks"]
    assert all(row["met"] for row in (week[1], *week[3:7]))
    logs, seconds, cpu, memory, page = (row["median"] for row in week[:5])
    size = f"which is {logs:.1f} GB of logs, the command takes {seconds:.0f} s on two cores"
    yield "docs/views.md", f"{size}, {cpu:.0f} s of CPU time and {memory:.0f} MB of memory."
    yield "docs/views.md", f"The page has {page:.1f} MB"


FIGURES = (overhead, zoo, jobs, restarts, lines, memory_and_tune, comparisons, changes, snapshots, html_report)


@pytest.mark.parametrize("figures", FIGURES, ids=lambda figures: figures.__name__)
def test_the_pages_say_what_was_measured(figures):
    for page, sentence in figures():
        assert sentence in said(page), page
