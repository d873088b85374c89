"""The documentation against the code: links, figures, names, and what is generated from the code."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import tokenize

import pytest

from telemetry.agent import agent
from telemetry.agent.hangs import Hang
from telemetry.agent.lines import LineFindings
from telemetry.config import Config
from telemetry.diagnosis import hangs, stalls, stragglers
from telemetry.diagnosis.causes import Thresholds
from telemetry.records import CAUSES
from tests.doc_pages import DOCS, ROOT, table, text_of

MAX_README_WORDS = 700
MAX_REPORT_LINES = 12

OUTSIDE_DOCS = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/zoo/README.md", "examples/README.md")
]
PAGES = [*OUTSIDE_DOCS, *sorted(DOCS.glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages about the package as it is now. The changelog may name what is gone."""


def of_page(path):
    return str(path.relative_to(ROOT))


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").split()) <= MAX_README_WORDS


def test_the_readme_shows_five_findings_and_the_start_of_a_report():
    text = text_of(ROOT / "README.md")
    findings = text.split("## What it finds\n", 1)[1].split("\n## ", 1)[0]
    (report,) = re.findall(r"^```console\n(run demo-1\n.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert [len(re.findall(r"\*\*", line)) for line in findings.splitlines() if line.startswith("- ")] == [2] * 5
    assert len(report.splitlines()) <= MAX_REPORT_LINES


# -- links -----------------------------------------------------------------------------------------------------


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text_of(page)):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", WRITTEN, ids=of_page)
def test_the_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:telemetry|tests|benchmarks|grafana|deploy|docs)/[\w./*-]*)`", text_of(page))
    missing = [name for name in named if not any(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_every_table_has_a_header_row(page):
    """Without one its rows are shown as raw text: an empty line in a table ends it."""
    lines = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE).splitlines()
    broken = [
        line
        for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        if line.startswith("|") and not before.startswith("|") and not re.fullmatch(r"\|(\s*:?-{3,}:?\s*\|)+", after)
    ]
    assert broken == []


# -- what the code says ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["METRICS.md", "settings.md", "integrations.md", "output.md"])
def test_the_reference_is_up_to_date(name):
    assert text_of(DOCS / name) == load_tool("reference").page(name), "run `make docs-reference`"


def test_the_examples_of_advice_are_up_to_date():
    generator = load_tool("generate_examples")
    assert text_of(generator.PAGE) == generator.page(), "run `make docs-reference`"


def test_every_field_of_the_evidence_is_documented():
    tool = load_tool("reference")
    pages = text_of(DOCS / "output.md").split("## Fields of the evidence", 1)[1]
    documented = set(re.findall(r"^\| `(\w+)`", pages, flags=re.MULTILINE))
    evidence = tool.written_evidence()
    of_some = Hang("opened", "unknown", "compute", 1.0, "").evidence() | LineFindings((), "", 0, "", ()).evidence()
    written = {*evidence, *evidence["paces"][0], *of_some, *tool.written_workers()}
    assert len(written) > 90
    assert written - documented == set()


def test_a_name_in_the_log_means_one_figure_and_is_that_of_its_metric():
    tool = load_tool("reference")
    of_some = Hang("opened", "unknown", "compute", 1.0, "").evidence() | LineFindings((), "", 0, "", ()).evidence()
    assert tool.written_evidence().keys() & of_some.keys() == set(), "one would replace the other in the log"
    told = {}
    for fields in (tool.EVIDENCE, tool.STALL, tool.WORKERS):
        for name, meaning in fields.items():
            assert told.setdefault(name, meaning) == meaning, name
    thresholds, settings = ({field.name for field in dataclasses.fields(kind)} for kind in (Thresholds, Config))
    assert (told.keys() | thresholds) & settings == set()
    metrics = {row[0] for row in table(text_of(DOCS / "METRICS.md"), "## The DataLoader and its workers")}
    waits = {name.removeprefix("training_loader_") for name in metrics if name.endswith("_seconds_total")}
    assert len(waits) == 3
    assert waits <= tool.WORKERS.keys()
    assert {name.removesuffix("_total") for name in waits} <= tool.EVIDENCE.keys()


def test_a_field_of_the_evidence_without_a_meaning_is_refused(monkeypatch):
    tool = load_tool("reference")
    monkeypatch.delitem(tool.EVIDENCE, "edges")
    with pytest.raises(ValueError, match="edges"):
        tool.page("output.md")


@pytest.mark.parametrize("document", ["docs/overhead.md", "docs/production.md"])
def test_tables_of_costs_say_what_was_measured(document):
    """Every figure is that of the published results, rounded once, and so is the spread that stands behind it."""
    text = text_of(ROOT / document)
    assert load_tool("fill_benchmark_figures").filled(document, text) == text, "run `make docs-reference`"


def test_another_figure_in_a_table_is_put_right():
    text = text_of(DOCS / "production.md")
    wrong = re.sub(r"(resident memory, at the start \| )\d+", r"\g<1>470", text)
    assert wrong != text
    assert load_tool("fill_benchmark_figures").filled("docs/production.md", wrong) == text


def test_a_table_of_costs_without_its_row_is_refused():
    with pytest.raises(ValueError, match="0 rows start with"):
        load_tool("fill_benchmark_figures").filled("docs/production.md", "| something else | 1 ms |\n")


def test_the_glossary_tells_how_many_ticks_are_skipped():
    (row,) = (line for line in text_of(DOCS / "concepts.md").splitlines() if line.startswith("| **tick**"))
    assert f"after {agent._LONG_CALM} calm ticks, {agent._MAX_SKIPPED} of {agent._MAX_SKIPPED + 1}" in row
    assert f"more than {agent._MIN_INTERVAL_SECONDS:g} s and at most {agent._MAX_INTERVAL_SECONDS:g} s" in row


def test_every_threshold_of_the_causes_is_documented():
    written = {name: float(value) for name, value, _ in table(text_of(DOCS / "causes.md"), "### Of the causes")}
    assert written == dataclasses.asdict(Thresholds())


@pytest.mark.parametrize(("heading", "module"), [("### Of a stall", stalls), ("### Of a straggler", stragglers)])
def test_the_documented_thresholds_are_those_of_the_code(heading, module):
    rows = table(text_of(DOCS / "causes.md"), heading)
    assert {name: float(value) for name, value, _ in rows} == {name: getattr(module, name) for name, *_ in rows}


def test_the_documented_thresholds_of_a_stuck_run_are_those_of_the_code():
    rows = table(text_of(DOCS / "hangs.md"), "## When a run is stuck")[1:]
    for _, value, where in rows:
        name = where.split("`")[0]
        assert float(value.removesuffix(" s")) == getattr(hangs, name), name


def test_every_cause_has_a_section():
    sections = re.split(r"^## ", text_of(DOCS / "causes.md"), flags=re.MULTILINE)
    written = {section.split("\n", 1)[0]: section for section in sections}
    assert [name for name in written if name in CAUSES] == list(CAUSES)
    for cause in CAUSES:
        parts = ("**Symptom.**", "**Fix.**") if cause == "unknown" else ("**Symptom.**", "**Fix.**", "**Example.**")
        assert all(part in written[cause] for part in parts), cause


NO_METRICS = {"training_thread", "training_workers"}
"""A value and a field of the log."""


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.name != "METRICS.md"], ids=of_page)
def test_the_metrics_that_a_page_names_exist(page):
    known = set(re.findall(r"^\| `(\w+)`", text_of(DOCS / "METRICS.md"), flags=re.MULTILINE))
    named = set(re.findall(r"`((?:training|telemetry)_[a-z_]+)", text_of(page)))
    assert named - known - NO_METRICS == set()


SECOND_WORDS = {
    r"interpreter's lock": "GIL",
    r"\b(pack|packs|packed|packing)\b": "pickling",
    r"\bedges? of (an |the )?epochs?\b": "epoch boundary",
    r"\bgave up\b": "timed out",
    r"\blet\s+go\s+of\b": "released",
    r"\b(who(ever)|as\s+it\s+were|for\s+so\s+long|it\s+is\s+to\s+be)\b": "plain words",
    r"\b(is|are)\s+none\b": "plain words: no ..., else None, is missing",
    r"\bdoes\s+no\s+harm\b": "harmless",
}
"""Words that the documentation and the comments must not use, with the word to use instead."""

PACKED_BYTES = {"events.py", "store.py"}
"""These pack bytes, which is not pickling."""


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.parent == DOCS or page.parent == ROOT], ids=of_page)
def test_a_page_uses_the_words_of_the_glossary(page):
    text = text_of(page)
    assert {found: word for second, word in SECOND_WORDS.items() for found in re.findall(f"(?i){second}", text)} == {}


def prose_of(path):
    """Docstrings, comments and string literals of a file without names in backticks, with the number of their line."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or tokenize.tok_name[token.type] in {"STRING", "FSTRING_MIDDLE"}:
                yield token.start[0], re.sub(r"`[^`]*`", "", token.string)


def second_words(path):
    """Line and word. ``None`` in code is Python's own."""
    for line, text in prose_of(path):
        for second in SECOND_WORDS:
            for found in re.finditer(f"(?i){second}", text):
                packs_bytes = path.name in PACKED_BYTES and "pack" in found[0]
                if not found[0].endswith("None") and not packs_bytes:
                    yield line, found[0]


CODE = [*sorted((ROOT / "telemetry").rglob("*.py")), *sorted((ROOT / "grafana").glob("*.py"))]


def test_the_code_uses_the_words_of_the_glossary():
    assert len(CODE) > 100
    assert {of_page(path): found for path in CODE if (found := list(second_words(path)))} == {}
