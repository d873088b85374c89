"""Figures in the documentation against the results in `benchmarks/results/` that they come from."""

from __future__ import annotations

import json
import re

import pytest

from telemetry.trace.peak_flops import PEAKS
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
    formats = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
    said = [[None if cell == "-" else float(cell) for cell in row[1:7]] for row in rows]
    assert said == [[peaks[f] / 1e12 if f in peaks else None for f in formats] for _, peaks in PEAKS]


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


def test_the_accuracy_page_has_the_comparisons_under_changing_load():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    lines, kinds = text_of(path.with_suffix(".md")).splitlines(), json.loads(text_of(path))["kinds"]
    rows = [line for line in lines if " | changing | " in line or " | calm" in line]
    later = [line for line in lines if line.startswith(("Equal pairs of runs recorded after", "Pairs of such runs"))]
    said = text_of(DOCS / "accuracy.md")
    assert len(rows) > 6
    assert [row for row in (*rows, *later) if row not in said] == []
    kinds = {name: kind for name, kind in kinds.items() if kind["changing"]["1.00"]["pairs"]}
    equal = [kind["changing"]["1.00"] for kind in kinds.values()]
    wrong = {name: sum(e[name]["slower"] + e[name]["faster"] for e in equal) for name in ("measured", "without others")}
    assert (
        f"{wrong['measured']} of {sum(e['pairs'] for e in equal)} equal pairs would be said to differ. None is" in said
    )
    assert wrong["without others"] == 0
    found = {name: kind["changing"]["1.10"] for name, kind in kinds.items()}
    share = {name: round(100 * each["without others"]["slower"] / each["pairs"]) for name, each in found.items()}
    said = " ".join(said.split())
    assert f"10 % is found in {share['thread']} % of the pairs if" in said
    assert f"and in {share['worker']} % if it is the workers'" in said
    fresh = {name: kind["later_slower"]["1.10"] for name, kind in kinds.items()}
    late = {name: round(100 * each["without others"]["slower"] / each["pairs"]) for name, each in fresh.items()}
    assert (
        f"is found in {late['thread']} %, not in {share['thread']} %, and one of the workers in {late['worker']} %"
        in said
    )


def test_the_accuracy_page_has_the_comparisons_on_a_calm_machine():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    kinds = json.loads(text_of(path))["kinds"]
    said = " ".join(text_of(DOCS / "accuracy.md").split())

    def counted(loads, pairs, *verdicts, of=("thread", "worker", "busy")):
        chosen = [kinds[kind][load][pairs] for kind in of for load in loads if kinds[kind][load][pairs]["pairs"]]
        found = sum(each["without others"][verdict] for each in chosen for verdict in verdicts)
        return found, sum(each["pairs"] for each in chosen)

    wrong, pairs = counted(("calm", "calm, long"), "1.00", "slower", "faster")
    assert f"Of {pairs} equal pairs {wrong} are said to differ ({100 * wrong / pairs:.0f} %)" in said
    assert wrong <= 0.05 * pairs
    found, pairs = counted(("calm", "calm, long"), "1.10", "slower", of=("thread", "worker"))
    assert f"10 % more work is found in all {pairs} pairs of thread and worker;" in said
    wide = kinds["busy"]["calm"]["1.00"]["without others"]["median_half"]
    assert f"it was not recorded of busy runs, whose interval is ± {100 * wide:.1f} %" in said
    assert found == pairs
    short, long, busy = (
        counted((load,), "1.05 longer", "slower", of=of)
        for load, of in (("calm", ("thread", "worker")), ("calm, long", ("thread", "worker")), ("calm", ("busy",)))
    )
    assert (
        f"5 % longer is found in {short[0]} of {short[1]} pairs of short runs, in {long[0]} of {long[1]} of long ones, "
        f"and in {busy[0]} of {busy[1]} of busy ones" in said
    )


def test_the_accuracy_page_has_the_runs_of_a_few_windows():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    said = " ".join(text_of(DOCS / "accuracy.md").split())
    few = [told for kind in json.loads(text_of(path))["kinds"].values() for told in kind["few"]]

    def counted(name, length, windows=range(2, 8)):
        chosen = [told for told in few if told["length"] == length and told["windows"] in windows]
        return sum(told[name] for told in chosen), sum(told["pairs"] for told in chosen)

    wrong, pairs = counted("differ", "5 s")
    assert f"With windows of about 5 s, {wrong} of {pairs} pairs are said to differ." in said
    assert wrong <= 0.05 * pairs
    (found, many), *rest = (counted("twice", "5 s", windows) for windows in (range(4, 8), (3,), (2,)))
    assert found == many
    of_three, of_two = (f"{found} of {pairs}" for found, pairs in rest)
    assert f"of all {many} pairs with four windows or more, of {of_three} with three, and of {of_two} with two" in said
    wrong, pairs = counted("differ", "0.8 s")
    worst = max(told["differ"] / told["pairs"] for told in few)
    assert f"0.8 s, {wrong} of {pairs} pairs are said to differ, and of one kind" in said
    assert f"of one kind and number of windows up to {100 * worst:.0f} %" in said


def test_the_accuracy_page_has_the_sets_of_several_pairs():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    kinds = json.loads(text_of(path))["kinds"]
    said = " ".join(text_of(DOCS / "accuracy.md").split())

    def counted(load, pairs, kind, *verdicts):
        of = ("busy",) if load == "busy" else ("thread", "worker")
        load = "calm" if load == "busy" else load
        found = [told for name in of if (told := kinds[name]["sets"][f"{load}; {pairs}"][kind]) is not None]
        return sum(each[verdict] for each in found for verdict in verdicts), sum(each["sets"] for each in found)

    short, long = ({n: counted(load, n, "1.05 longer", "slower") for n in (3, 5)} for load in ("calm", "calm, long"))
    assert (
        f"in {short[5][0]} of {short[5][1]} sets of short runs and in all {long[5][1]} of long ones; three pairs in "
        f"{short[3][0]} of {short[3][1]} and in all {long[3][1]}." in said
    )
    assert all(found == sets for found, sets in long.values())
    assert short[5][0] >= 0.95 * short[5][1]
    one = [kinds[name]["calm"]["1.05 longer"] for name in ("thread", "worker")]
    single = sum(each["without others"]["slower"] for each in one) / sum(each["pairs"] for each in one)
    three, five = (short[pairs][0] / short[pairs][1] for pairs in (3, 5))
    assert (
        f"in {100 * single:.0f} % of all cases, three pairs in {100 * three:.0f} %, and five in {100 * five:.0f} %."
        in " ".join(text_of(DOCS / "compare.md").split())
    )
    equal = [counted(load, pairs, "1.00", "slower", "faster") for load in ("calm", "calm, long") for pairs in (3, 5)]
    wrong, sets = (sum(each) for each in zip(*equal, strict=True))
    assert f"Of {sets} equal sets {wrong} are said to differ ({100 * wrong / sets:.0f} %), at most" in said
    assert wrong <= 0.05 * sets
    each_kind = [told["1.00"] for kind in kinds.values() for told in kind["sets"].values() if told["1.00"] is not None]
    worst = max((told["slower"] + told["faster"]) / told["sets"] for told in each_kind)
    assert f"at most {100 * worst:.0f} % of one kind" in said
    (found, sets), (of_three, threes), (of_five, fives) = (
        counted("busy", 5, "1.05 longer", "slower"),
        *(counted("busy", pairs, "1.00", "slower", "faster") for pairs in (3, 5)),
    )
    assert f"five pairs show it in {found} of {sets} sets, and {of_three + of_five} of {threes + fives} equal" in said


def test_the_docs_say_how_much_equal_runs_scatter():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    scatter = {True: [], False: []}
    for each in json.loads(text_of(path))["scatter"]:
        scatter[each["loader"] == "busy"].append(100 * each["scatter"])
    accuracy, compare = (" ".join(text_of(DOCS / name).split()) for name in ("accuracy.md", "compare.md"))
    (busy,), others = scatter[True], scatter[False]
    assert (
        f"Equal runs scatter by {min(others):.1f} to {max(others):.1f} %, and by {busy:.1f} % if they compute all"
        in accuracy
    )
    assert f"pace drifts by {min(others):.0f} to {max(others):.0f} %" in compare
    assert f"computes on the CPU all the time differs by {busy:.0f} % from run to run" in compare


def test_the_docs_say_how_wide_the_interval_of_compare_is():
    path = ROOT / "benchmarks" / "results" / "compare-loads-amd-epyc-2-cores.json"
    kinds = json.loads(text_of(path))["kinds"].values()
    loads, known = ("changing", "calm", "calm, long"), ("1.00", "1.05 longer")
    all_ = [told for kind in kinds for load in loads for name in known if (told := kind[load][name])["pairs"]]
    pairs = sum(told["pairs"] for told in all_)
    adjusted, measured = (sum(told[name]["covered"] for told in all_) for name in ("without others", "measured"))
    accuracy, compare = (" ".join(text_of(DOCS / name).split()) for name in ("accuracy.md", "compare.md"))
    assert (
        f"true ratio in it in {adjusted} of {pairs} pairs; that of the measured pace in {measured} "
        f"({100 * measured / pairs:.0f} %)" in accuracy
    )
    assert f"true ratio in it in {adjusted} of {pairs} pairs" in compare


def results_of(kind):
    """The results that the documentation links to."""
    page = {"overhead": "overhead.md", "zoo": "accuracy.md", "lines": "accuracy.md"}[kind]
    (name,) = re.findall(rf"benchmarks/results/({kind}-[\w-]+)\.md", text_of(DOCS / page))
    return ROOT / "benchmarks" / "results" / f"{name}.json"
