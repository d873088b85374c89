"""The parts of the fleet benchmark: its ranks show what real ones do, and its queries ask what the dashboards do."""

import re
import shutil

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack.jobs import ROOT, must_have

from benchmarks import fleet as benchmark
from benchmarks import fleet_prometheus, scrape
from benchmarks.fleet_ranks import Node, fleet
from benchmarks.inlining import inlined
from tests.full_views import page

BEGAN = 1_000_000.0
RULES = {
    "run:x:sum": 'sum by (run) (rate(x_total{a="1"}[5m]))',
    "run:y:max": "max by (run) (run:x:sum / y)",
    "run:z:last": "z or run:z:last",
}  # fmt: skip


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
    for rank in range(8):
        ledger = [
            v
            for (name, labels), v in after.items()
            if name == "training_time_seconds_total" and ("rank", str(rank)) in labels
        ]
        assert sum(ledger) == pytest.approx(115)


@pytest.mark.parametrize(("ranks", "nodes"), [(2000, 250), (8, 1), (20, 3), (1, 1)])
def test_a_fleet_is_nodes_of_runs(ranks, nodes):
    made = fleet(ranks, 8, BEGAN)
    every = [rank for node in made for rank in node]

    assert (len(every), len(made)) == (ranks, nodes)
    assert len({(rank.run, rank.rank) for rank in every}) == ranks
    assert all(len({(rank.run, rank.node) for rank in node}) == 1 for node in made)
    assert len({node[0].node for node in made}) == nodes
    assert [target["labels"]["node"] for target in benchmark.targets(ranks, 8, 1)] == [node[0].node for node in made]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sum(x_total)", "sum(x_total)"),
        ('run:x:sum{run=~"(a|b)"}', '(sum by (run) (rate(x_total{a="1", run=~"(a|b)"}[5m])))'),
        ("run:x:sum > 0", '(sum by (run) (rate(x_total{a="1"}[5m]))) > 0'),
        (
            'max_over_time(run:y:max{run="r"}[5m])',
            'max_over_time((max by (run) ((sum by (run) (rate(x_total{a="1", run="r"}[5m]))) / y{run="r"}))[5m:15s])',
        ),
        ("sum_over_time(run:x:sum[1h:1m])", 'sum_over_time((sum by (run) (rate(x_total{a="1"}[5m])))[1h:1m])'),
        ("run:z:last", "run:z:last"),
        ('label_replace(y, "run:x:sum", "", "", "")', 'label_replace(y, "run:x:sum", "", "", "")'),
    ],
)
def test_recorded_names_become_what_they_stand_for(expression, expected):
    assert inlined(expression, RULES, {"x_total", "y", "z"}, "15s") == expected


def test_the_shipped_rules_can_all_be_written_out():
    rules = fleet_prometheus.recording_rules()
    remember = {name for name, expression in rules.items() if name in expression}
    metrics = {name for name, _ in samples(Node(fleet(8, 8, BEGAN)[0]), BEGAN + 100)}

    for name in rules.keys() - remember:
        raw = inlined(f'{name}{{run="r"}}', rules, metrics, "15s")
        assert not any(other in raw for other in rules.keys() - remember)
        assert 'run="r"' in raw or name.startswith("uuid:")  # another exporter's, which know of no run


def test_without_prometheus_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shutil, "which", lambda _: None)

    assert benchmark.main(["--ranks", "1", "--minutes", "0", "--output", str(tmp_path)]) == 1
    assert "Debian's package prometheus" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_a_small_fleet_is_measured():
    must_have("prometheus")
    rows = {(row.section, row.name): row for row in benchmark.measure(16, 8, 32, 1)}

    series = rows["One Prometheus, 16 ranks", "series of a rank"].figure.median
    assert series > 150
    assert rows["One Prometheus, 16 ranks", "resident memory"].figure.median > 0
    assert rows["What that means for 10000 GPUs", "series in memory"].figure.median > 10_000 * series
    asked = [row for (section, _), row in rows.items() if section == "Each query, slowest first"]
    assert all(row.figure is not None for row in asked), [row.note for row in asked if row.figure is None]


def test_figures_of_the_document_are_those_of_the_result():
    text = (ROOT / "docs" / "scale.md").read_text().replace(",", "")
    (result,) = benchmark.RESULTS.glob("fleet-*.md")
    measured = result.read_text()
    figures = re.findall(r"\d+\.\d+(?= (?:cores|GiB|s\b|times))|\d{5,}", text)
    assert len(figures) > 14
    assert [figure for figure in figures if f"{figure} " not in measured] == []
