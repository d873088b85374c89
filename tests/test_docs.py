"""The documentation against the code: links, names, thresholds, and what is generated from the code."""

from __future__ import annotations

import dataclasses
import re

import pytest

from telemetry.agent import agent
from telemetry.agent.hangs import Hang
from telemetry.agent.lines import LineFindings
from telemetry.config import Config
from telemetry.diagnosis import hangs
from telemetry.diagnosis.causes import THRESHOLDS, Thresholds
from telemetry.records import CAUSES
from tests.doc_pages import DOCS, ROOT, load_tool, table, text_of

OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/zoo/README.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE_DOCS), *sorted(DOCS.glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages about the package as it is now. The changelog may name what is gone."""

NO_METRICS = {"training_thread", "training_workers"}
"""A value and a field of the log."""


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


@pytest.mark.parametrize("name", ["METRICS.md", "settings.md", "integrations.md", "output.md", "overhead.md"])
def test_the_reference_is_up_to_date(name):
    assert text_of(DOCS / name) == load_tool("reference").page(name), "run `make docs-reference`"


OF_SOME_STALLS = Hang("opened", "unknown", "compute", 1.0, "").evidence() | LineFindings((), "", 0, "", ()).evidence()


def test_every_field_of_the_evidence_is_documented(monkeypatch):
    tool = load_tool("reference")
    documented = set(re.findall(r"^\| `(\w+)`", text_of(DOCS / "output.md"), flags=re.MULTILINE))
    evidence = tool.written_evidence()
    written = {*evidence, *evidence["paces"][0], *OF_SOME_STALLS, *tool.written_workers()}
    assert len(written) > 90
    assert written - documented == set()
    monkeypatch.delitem(tool.EVIDENCE, "edges")
    with pytest.raises(ValueError, match="edges"):
        tool.page("output.md")


def test_a_name_in_the_log_means_one_figure_and_is_that_of_its_metric():
    tool = load_tool("reference")
    assert tool.written_evidence().keys() & OF_SOME_STALLS.keys() == set(), "one would replace the other in the log"
    meanings = {}
    for fields in (tool.EVIDENCE, tool.STALL, tool.WORKERS):
        for name, meaning in fields.items():
            assert meanings.setdefault(name, meaning) == meaning, name
    thresholds, settings = ({field.name for field in dataclasses.fields(kind)} for kind in (Thresholds, Config))
    assert (meanings.keys() | thresholds) & settings == set()
    metrics = {row[0] for row in table(text_of(DOCS / "METRICS.md"), "## The DataLoader and its workers")}
    waits = {name.removeprefix("training_loader_") for name in metrics if name.endswith("_seconds_total")}
    assert len(waits) == 3
    assert waits <= tool.WORKERS.keys()
    assert {name.removesuffix("_total") for name in waits} <= tool.EVIDENCE.keys()


def test_the_glossary_says_how_many_ticks_are_skipped():
    glossary = " ".join(text_of(DOCS / "concepts.md").split())
    assert f"after {agent._LONG_CALM} calm ticks, {agent._MAX_SKIPPED} of {agent._MAX_SKIPPED + 1}" in glossary
    assert f"more than {agent._MIN_INTERVAL_SECONDS:g} s and at most {agent._MAX_INTERVAL_SECONDS:g} s" in glossary


def test_the_documented_thresholds_are_those_of_the_code():
    text = text_of(DOCS / "causes.md")
    stuck = {re.search(r"\(`(\w+)", row)[1]: float(value) for row, value in table(text, "### When a run is stuck")}
    assert stuck == {name: getattr(hangs, name) for name in stuck}
    assert f"over {THRESHOLDS.stuck_fetch_seconds:g} s and over {THRESHOLDS.stuck_fetches:g} times" in text


def test_every_cause_has_a_section():
    sections = re.split(r"^## (\w+)$", text_of(DOCS / "causes.md"), flags=re.MULTILINE)
    written = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert [name for name in written if name in CAUSES] == list(CAUSES)
    assert all("**Symptom.**" in written[cause] and "**Fix.**" in written[cause] for cause in CAUSES)
