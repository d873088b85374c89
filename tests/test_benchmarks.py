"""The benchmarks' parts run and give what the report needs. Nothing here judges a time."""

import gzip
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack.jobs import ROOT, must_have

from benchmarks import (
    child,
    compare,
    fleet_prometheus,
    instruments,
    machine,
    report,
    scrape,
    sink_cost,
    spread,
)
from benchmarks import fleet as fleet_benchmark
from benchmarks import trace as trace_benchmark
from benchmarks.effort import QUICK
from benchmarks.fleet_prometheus import inlined
from benchmarks.fleet_ranks import Node, fleet
from telemetry.trace.trace_file import read_trace
from tests.full_views import page

TINY = {"hot_rounds": 1, "hot_steps": 40, "cold_rounds": 1, "cold_steps": 2}


def test_side_by_side_loops():
    answer = instruments.measure(**TINY)
    names = {instruments.BARE, instruments.FLOOR, instruments.FLOOR_LIST, instruments.TELEMETRY, instruments.PROMETHEUS}
    assert set(answer["hot"]) == names | {instruments.NEXT_ONLY}
    assert set(answer["cold"]) == names
    for samples in answer["cold"].values():
        assert set(samples[0]) >= {"next", "optimizer", "whole", "cost", "peak"}
    assert answer["running"]
    assert answer["hook_errors"] == 0


def test_a_step_whose_wait_is_not_timed_on_a_gpu():
    answer = child.run("benchmarks.instruments", {**TINY, "hot_rounds": 0, "device": instruments.STAND_IN})
    assert set(answer["cold"]) == {instruments.BARE, instruments.TELEMETRY}
    assert answer["running"]
    assert (answer["hook_errors"], answer["gpu_pairs"] is None) == (0, False)


def test_a_spread_is_what_it_says():
    values = [float(value) for value in range(101)]
    assert spread.spread(values) == spread.Spread(50.0, 10.0, 90.0, 101)
    assert spread.paired([3.0, 4.0], [1.0, 1.0]).median == 2.5
    assert spread.ratio_of_medians([60.0] * 5, [2.0] * 5).median == 30.0


def test_a_miss_is_shown_as_a_miss(tmp_path):
    figure = spread.Spread(1.2, 1.0, 1.4, 9)
    rows = [
        report.Row("s", "missed", "us", figure, report.Target(report.AT_MOST, 0.8)),
        report.Row("s", "met", "us", figure, report.Target(report.AT_MOST, 2.0)),
        report.Row("s", "absent", "us", None, report.Target(report.AT_MOST, 2.0), "no such thing here"),
    ]
    about = machine.describe()
    assert [row.met for row in rows] == [False, True, None]
    for text in (report.text(about, rows), report.markdown(about, rows)):
        assert "1 met, 1 not met, 1 not measured" in text
        assert "NOT MET" in text
        assert "no such thing here" in text
    as_json, as_markdown = report.write(tmp_path, machine.slug(about), about, rows)
    assert [row["met"] for row in json.loads(as_json.read_text())["rows"]] == [False, True, None]
    assert as_markdown.exists()


def test_sinks_that_are_not_installed_are_not_measured(monkeypatch):
    """A target whose row is missing would look as if there were none."""
    monkeypatch.setenv("SINKS_PYTHON", "/nowhere/python")
    rows = sink_cost.sinks(QUICK)
    assert all(row.figure is None and "no environment with the sinks" in row.note for row in rows)
    assert [row.unit for row in rows if row.target is not None] == ["% of a core", "us"]


def test_comparisons_of_recorded_runs():
    runs = [{"loader": "thread", "slower": 1.0, "blocks": [[100.0, 1.0]] * 30} for _ in range(7)]
    equal, longer = (compare.recorded([{"runs": runs}], longer=longer)["thread"] for longer in (False, True))
    assert (equal.pairs, equal.covered, equal.slower, equal.faster) == (21, 21, 0, 0)
    assert (longer.pairs, longer.covered, longer.slower) == (21, 21, 21)


# -- traces -------------------------------------------------------------------------------------------------------------


def test_repeated_events_are_a_trace_with_the_same_steps_many_times(tmp_path):
    target = tmp_path / "t.json.gz"
    count = trace_benchmark.write_trace(trace_benchmark.EVENTS, target, 6_000_000)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert len(events) == count
    once, often = read_trace(trace_benchmark.EVENTS), read_trace(target)
    assert len(often.steps) % len(once.steps) == 0
    assert len(often.steps) > len(once.steps)
    assert len({step.step for step in often.steps}) == len(often.steps)
    assert often.average.categories == pytest.approx(once.average.categories, abs=1e-6)


# -- the fleet: its ranks show what real ones do, and its queries ask what the dashboards do ----------------------------

BEGAN = 1_000_000.0


def samples(node, now):
    text = node.expose(rank.view(now) for rank in node.ranks).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_simulated_rank_shows_every_family_that_there_is():
    (ranks,) = fleet(8, 8, BEGAN)
    views = [rank.view(BEGAN + 100) for rank in ranks]
    shown, full = (
        {line for line in page(*each).splitlines() if line.startswith("# TYPE")}
        for each in (views, [scrape.full_view()])
    )
    assert full - shown == set()


def test_values_move_and_counters_do_not_go_back():
    node = Node(fleet(8, 8, BEGAN)[0])
    before, after = samples(node, BEGAN + 100), samples(node, BEGAN + 115)

    assert before.keys() == after.keys()
    moved = {name for (name, labels), value in after.items() if value != before[name, labels]}
    assert len(moved) > 25
    for (name, labels), value in after.items():
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert value >= before[name, labels], name
    ledger = [value for (name, _), value in after.items() if name == "training_time_seconds_total"]
    assert sum(ledger) == pytest.approx(8 * 115)


def test_the_shipped_rules_can_all_be_written_out():
    small = {"run:x:sum": 'sum by (run) (rate(x_total{a="1"}[5m]))', "run:y:max": "max by (run) (run:x:sum / y)"}
    whole = 'max_over_time((max by (run) ((sum by (run) (rate(x_total{a="1", run="r"}[5m]))) / y{run="r"}))[5m:15s])'
    assert inlined('max_over_time(run:y:max{run="r"}[5m])', small, {"x_total", "y"}, "15s") == whole
    rules = fleet_prometheus.recording_rules()
    remember = {name for name, expression in rules.items() if name in expression}
    metrics = {name for name, _ in samples(Node(fleet(8, 8, BEGAN)[0]), BEGAN + 100)}

    for name in rules.keys() - remember:
        raw = inlined(f'{name}{{run="r"}}', rules, metrics, "15s")
        assert not any(other in raw for other in rules.keys() - remember)
        assert 'run="r"' in raw or name.startswith("uuid:")  # another exporter's, which know of no run


@pytest.mark.stack
def test_a_small_fleet_is_measured():
    must_have("prometheus")
    rows = {(row.section, row.name): row for row in fleet_benchmark.measure(16, 8, 32, 1)}

    series = rows["One Prometheus, 16 ranks", "series of a rank"].figure.median
    assert series > 150
    assert rows["One Prometheus, 16 ranks", "resident memory"].figure.median > 0
    assert rows["What that means for 10000 GPUs", "series in memory"].figure.median > 10_000 * series
    asked = [row for (section, _), row in rows.items() if section == "Each query, slowest first"]
    assert all(row.figure is not None for row in asked), [row.note for row in asked if row.figure is None]


def test_figures_of_the_document_are_those_of_the_result():
    text = (ROOT / "docs" / "scale.md").read_text().replace(",", "")
    (result,) = fleet_benchmark.RESULTS.glob("fleet-*.md")
    measured = result.read_text()
    figures = re.findall(r"\d+\.\d+(?= (?:cores|GiB|s\b|times))|\d{5,}", text)
    assert len(figures) > 14
    assert [figure for figure in figures if f"{figure} " not in measured] == []
