"""Figures in the documentation against the results in `benchmarks/results/` that they come from."""

from __future__ import annotations

import json
import re

import pytest

from tests.doc_pages import DOCS, ROOT, text_of

RESULTS = ROOT / "benchmarks" / "results"


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


def test_the_readme_says_what_the_benchmark_measured():
    measured = result("overhead")["rows"]

    def median(section, name):
        return next(r["median"] for r in measured if r["section"].startswith(section) and r["name"].startswith(name))

    hot = median("Per step on the training thread, hot", "telemetry adds")
    cold = median("Per step on the training thread, cold", "telemetry adds")
    readme = said("README.md")
    assert f"takes {hot:.2f} µs longer in a tight loop, and {cold:.1f} µs inside a real training step" in readme
    assert f"threads take {median('The agent', 'CPU at 1 Hz'):.2f} % of a core" in readme


def test_the_readme_says_what_the_zoo_found():
    published = result("zoo")
    _, accused, named, predicted = (goal["reached"] for goal in published["goals"])
    readme = said("README.md")
    assert f"On {len(published['specimens'])} scripts" in readme
    assert f"named in {named}," in readme
    assert f"{accused.removesuffix(' accused').replace(' runs', ' healthy runs')} were accused" in readme
    assert f"On {predicted.split(' specimens')[0]} scripts whose advice could be followed" in readme


@pytest.mark.parametrize("kind", ["hang-campaign", "straggler-campaign"])
def test_accuracy_of_the_campaigns(kind):
    found = result(kind)
    (row,) = re.findall(rf"\| `{re.escape(found['command'])}`.*", text_of(DOCS / "accuracy.md"))
    assert row.endswith(f"| {found['right']} of {found['of']} |")


def test_accuracy_of_whole_jobs():
    runs = [run for specimen in result("jobs-zoo")["specimens"] for run in specimen["runs"]]
    right = sum(bool(run["right"]) or run["accused"] is False for run in runs)
    assert f"| {right} of {len(runs)} |" in said("docs/accuracy.md")


def test_accuracy_of_restarts():
    runs = [
        [float(figure) for figure in re.findall(r"[\d.]+", cell)]
        for row in rows("restarts-amd-epyc-2-cores", ("| typed again, ", "| torchrun, ", "| elastic, "))
        for cell in row[4:]
    ]
    exact, off, ettr = (runs[column::3] for column in range(3))
    page = said("docs/accuracy.md")
    assert f"at most {max(off)[0]} % of the wall clock, and `ettr_ratio` by at most {max(ettr)[0]} %" in page
    assert f"{sum(e[0] for e in exact):.0f} of {sum(e[1] for e in exact):.0f} attempts" in page


def test_accuracy_of_lines():
    found = result("lines")["summary"]
    runs, page = found["runs"], said("docs/accuracy.md")
    assert f"the planted one in {found['first_line_right']} of {runs} runs" in page
    assert f"the script's own timers in {found['share_within_5_points']} of {runs}." in page
    assert f"the predicted range, in {found['gain_within_20_percent']} of {found['predictions']}." in page


def test_accuracy_of_memory():
    (sentence,) = re.findall(
        r"^\d+ of .* parts named rightly.*$", text_of(RESULTS / "memory-amd-epyc-2-cores.md"), re.MULTILINE
    )
    assert sentence in said("docs/accuracy.md")


def test_accuracy_of_tune():
    reached, scripts, trials = re.search(
        r"the grid's best: (\d+) of (\d+) scripts, in at most (\d+) trials",
        text_of(RESULTS / "tune-amd-epyc-2-cores.md"),
    ).groups()
    assert f"on {reached} of {scripts} scripts, after at most {trials} trials" in said("docs/accuracy.md")


@pytest.mark.parametrize("kind", ["thread", "worker", "busy"])
def test_accuracy_of_comparisons(kind):
    """Of one pair: how often its interval has the truth, and is below 1 if each window is longer. Of three: the latter."""
    one, three = (rows("compare-amd-epyc-2-cores", f"| {kind} | 5 % longer | {pairs} ")[0] for pairs in (1, 3))
    found = [f"{100 * int(row[5]) / int(row[3]):.0f} %" for row in (one, three)]
    assert f"| {one[4]} | {found[0]} | {found[1]} |" in said("docs/accuracy.md")


def test_accuracy_of_changes():
    (steady,) = rows("changes", "| compute 12 % longer |")
    (crowded,) = rows("changes", "| compute 12 % longer, others come and go |")
    page = said("docs/accuracy.md")
    assert steady[1] == "100 %"
    assert f"after {steady[2].split(',')[0]} minutes in the median" in page
    assert f"it took {crowded[2].split(',')[0]} minutes, and {crowded[1]} were found" in page


def test_the_cost_of_snapshots():
    page = said("docs/snapshots.md")
    ((_, memory, without, taken, pauses, _), (*_, longer, _)) = (
        rows("snapshot-budget-amd-epyc-2-cores", f"| {operators} |")[0] for operators in (6000, 60000)
    )
    assert f"took {taken} each instead of {without}, {memory[1:]} more memory and pauses of {pauses}" in page
    assert f"of 60,000 operators, {longer} (" in page
    ((_, _, recorded, shapes),) = rows("snapshot-shapes-amd-epyc-2-cores", "| a step")
    assert f"takes {shapes.split()[0]} instead of {recorded.split(' (')[0]}" in page


def test_the_cost_of_the_html_report():
    (path,) = RESULTS.glob("html-report-*.json")
    week = [row for row in json.loads(text_of(path))["rows"] if row["section"] == "a week of 64 ranks"]
    logs, seconds, cpu, memory, page = (row["median"] for row in week[:5])
    text = said("docs/views.md")
    assert (
        f"which is {logs:.1f} GB of logs, the command takes {seconds:.0f} s on two cores, {cpu:.0f} s of CPU time and "
        f"{memory:.0f} MB of memory." in text
    )
    assert f"The page has {page:.1f} MB" in text
    assert all(row["met"] for row in (week[1], *week[3:7]))
