"""Figures in the documentation against the results in `benchmarks/results/` that they come from."""

from __future__ import annotations

import json
import re

import pytest

from telemetry.trace.flops import PEAKS
from tests.doc_pages import DOCS, ROOT, table, text_of


def test_the_readme_says_what_the_benchmark_measured():
    rows = json.loads(text_of(results_of("overhead")))["rows"]

    def median(section, name):
        return next(r["median"] for r in rows if r["section"].startswith(section) and r["name"].startswith(name))

    said = " ".join(text_of(ROOT / "README.md").split())
    hot = median("Per step on the training thread, hot", "telemetry adds")
    cold = median("Per step on the training thread, cold", "telemetry adds")
    assert f"takes {hot:.2f} µs longer in a tight loop, and {cold:.1f} µs inside a real training step" in said
    assert f"threads take {median('The agent', 'CPU at 1 Hz'):.2f} % of a core" in said


def test_the_readme_says_what_the_zoo_found():
    published = json.loads(text_of(results_of("zoo")))
    found, accused, named, predicted = published["goals"]
    del found
    said = " ".join(text_of(ROOT / "README.md").split())
    assert f"On {len(published['specimens'])} scripts" in said
    assert f"named in {named['reached']}," in said
    assert f"{accused['reached'].removesuffix(' accused').replace(' runs', ' healthy runs')} were accused" in said
    assert f"On {predicted['reached'].split(' specimens')[0]} scripts whose advice could be followed" in said


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("hang-campaign", "hangs.md"),
        ("hang-campaign", "accuracy.md"),
        ("straggler-campaign", "nodes.md"),
        ("straggler-campaign", "accuracy.md"),
    ],
)
def test_the_pages_say_what_the_campaigns_found(kind, page):
    (path,) = (ROOT / "benchmarks" / "results").glob(f"{kind}-*.json")
    found, said = json.loads(text_of(path)), " ".join(text_of(DOCS / page).split())
    assert f"{found['right']} of {found['of']}" in said
    assert f"benchmarks/results/{path.stem}.md" in said
    if page == "accuracy.md":
        assert f"`{found['command']}`" in said


def test_the_page_says_what_the_jobs_of_the_zoo_found():
    (path,) = (ROOT / "benchmarks" / "results").glob("jobs-zoo-*.json")
    runs = [run for specimen in json.loads(text_of(path))["specimens"] for run in specimen["runs"]]
    right = sum(bool(run["right"]) or run["accused"] is False for run in runs)
    assert f"| {right} of {len(runs)} |" in text_of(DOCS / "accuracy.md")


def test_the_page_on_accuracy_says_what_the_restarts_found():
    results = text_of(ROOT / "benchmarks" / "results" / "restarts-amd-epyc-2-cores.md")
    runs = [re.findall(r"[\d.]+", row) for row in results.splitlines() if re.match(r"\| [a-z ]+, \d", row)]
    rows = table(text_of(DOCS / "accuracy.md"), "## Goodput of runs that are restarted")
    assert len(rows) == len(runs) == 3
    for (_, number, worst, ettr, exact), run in zip(rows, runs, strict=True):
        said = [*re.findall(r"\d+", number), *re.findall(r"\d+", exact), *re.findall(r"[\d.]+", worst)[:1]]
        assert [*said, ettr.split()[0]] == [run[0], run[1], run[5], run[6], run[8], run[9]]


def test_the_accuracy_page_says_what_the_planted_lines_showed():
    summary = json.loads(text_of(results_of("lines")))["summary"]
    rows = [row[1] for row in table(text_of(DOCS / "accuracy.md"), "## Lines")]
    goals = ("first_line_right", "share_within_5_points", "gain_within_20_percent")
    wholes = ("runs", "runs", "predictions")
    assert rows == [f"{summary[goal]} of {summary[whole]} runs" for goal, whole in zip(goals, wholes, strict=True)]


def test_the_accuracy_page_has_the_forecasts_of_memory_that_were_measured():
    lines = text_of(ROOT / "benchmarks" / "results" / "memory-amd-epyc-2-cores.md").splitlines()
    rows = [line for line in lines if line.startswith("| `") or " parts named rightly" in line]
    assert len(rows) > 1
    assert [row for row in rows if row not in text_of(DOCS / "accuracy.md")] == []


def test_the_page_on_snapshots_has_what_shapes_cost():
    results = text_of(ROOT / "benchmarks" / "results" / "snapshot-shapes-amd-epyc-2-cores.md")
    rows = [row for row in results.splitlines() if row.startswith("| ")]
    assert len(rows) == 6
    assert [row for row in rows if row not in text_of(DOCS / "snapshots.md")] == []


def test_the_page_on_traces_has_the_peaks_that_are_known():
    (lines,) = re.findall(r"\| device \| float64 .*\n\| --- .*\n((?:\| .*\n)+)", text_of(DOCS / "TRACE.md"))
    rows = [row.strip("| ").split(" | ") for row in lines.splitlines()]
    said = [[None if cell == "-" else float(cell) for cell in row[1:7]] for row in rows]
    assert said == [list(peaks) for peaks in PEAKS.values()]


def test_the_page_on_the_html_report_says_what_the_benchmark_measured():
    (path,) = (ROOT / "benchmarks" / "results").glob("html-report-*.json")
    rows = [row for row in json.loads(text_of(path))["rows"] if row["section"] == "a week of 64 ranks"]
    logs, seconds, cpu, memory, page = (row["median"] for row in rows[:5])
    text = " ".join(text_of(DOCS / "html-report.md").split())
    assert (
        f"which is {logs:.1f} GB of logs, the command takes {seconds:.0f} s on two cores, {cpu:.0f} s of CPU time and "
        f"{memory:.0f} MB of memory." in text
    )
    assert f"The page has {page:.1f} MB." in text
    assert all(row["met"] for row in (rows[1], *rows[3:7]))


def results_of(kind):
    """The results that the documentation links to."""
    page = {"overhead": "overhead.md", "zoo": "accuracy.md", "lines": "accuracy.md"}[kind]
    (name,) = re.findall(rf"benchmarks/results/({kind}-[\w-]+)\.md", text_of(DOCS / page))
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def test_the_accuracy_page_has_the_comparisons():
    lines = text_of(ROOT / "benchmarks" / "results" / "compare-amd-epyc-2-cores.md").splitlines()
    said = text_of(DOCS / "accuracy.md")
    rows = [line for line in lines if line.startswith(("| thread", "| worker", "| busy", "| 0."))]
    assert len(rows) > 40
    assert [row for row in rows if row not in said] == []
