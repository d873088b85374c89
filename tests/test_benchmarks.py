"""The benchmarks' parts run and give what the report needs. Nothing here judges a time."""

import json
from array import array

import pytest

from benchmarks import (
    agent_cpu,
    compare,
    instruments,
    loops,
    machine,
    memory,
    overhead,
    report,
    scrape,
    sink_cost,
    spread,
    tail,
    worker_fetch,
)
from benchmarks.effort import QUICK
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


def test_hooks_are_put_back():
    from torch.optim import optimizer as torch_optimizer

    before = dict(torch_optimizer._global_optimizer_post_hooks)
    instrument = loops.Instrument("x", iter(()), post_hooks=[lambda *_: None])
    with loops.installed(instrument, loops.HookStamps()):
        assert len(torch_optimizer._global_optimizer_post_hooks) == 3
    assert dict(torch_optimizer._global_optimizer_post_hooks) == before


def test_the_agents_threads():
    answer = agent_cpu.measure(slices=2, workers=1, slice_seconds=0.3)
    assert answer["steps"] > 0
    assert [set(reading) for reading in answer["slices"]] == [{"telemetry-agent", "telemetry-endpoint"}] * 2
    assert all(share >= 0 for reading in answer["slices"] for share in reading.values())
    assert answer["training_us"] >= 0


def test_the_threads_of_a_node():
    answer = agent_cpu.measure_node(ranks=2, workers=1, slices=1, slice_seconds=0.3)
    assert [len(reading) for reading in answer["slices"]] == [2]


def test_the_longest_of_many_short_steps():
    answer = tail.measure(pairs=1, segment_seconds=0.2)
    for kind in ("bare", "agent"):
        (segment,) = answer[kind]
        assert segment["max"] >= segment["p99.99"] >= segment["p99.9"] >= segment["p50"] > 0


def test_long_steps_are_summed_up():
    summed = tail.summary(array("q", [10, 2_000_000, 40, 1_500_000]), [5, 7], seconds=2.0)
    assert (summed["steps"], summed["max"], summed["long"]) == (4, 2_000_000, 1_750_000)
    assert (summed["gil"], summed["gil_max"]) == (6, 7)


@pytest.mark.parametrize("agent", [True, False])
def test_growth_of_memory(agent):
    answer = memory.measure(agent=agent, steps=1000, warm_up=500)
    assert "growth" in answer
    assert answer["dropped"] == 0


def test_a_scraped_node():
    answer = scrape.measure(pairs=1, segment_seconds=1.0, hertz=10.0)
    assert answer["latencies"]
    assert answer["failed"] == 0
    assert answer["samples"] > 8 * 20
    assert answer["quiet"][0]
    assert answer["met"][0]["during"]


def test_a_full_view_shows_every_family():
    names = [line.split()[2] for line in page(scrape.full_view()).splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert "training_gpu_sm_active_ratio" in names
    assert "training_loader_workers" in names


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


def test_what_cannot_be_measured_says_why():
    pool = overhead.Pool()
    pool.add(lambda: (_ for _ in ()).throw(overhead.child.ChildError("no such machine")))
    rows = overhead._loop_rows("hot", "hot", pool, pool, limit=0.8)
    assert all(row.figure is None for row in rows)
    assert any(row.note == "no such machine" for row in rows)


def test_sinks_that_are_not_installed_are_not_measured(monkeypatch):
    """A target whose row is missing would look as if there were none."""
    monkeypatch.setenv("SINKS_PYTHON", "/nowhere/python")
    rows = sink_cost.sinks(QUICK)
    assert all(row.figure is None and "no environment with the sinks" in row.note for row in rows)
    assert [row.unit for row in rows if row.target is not None] == ["% of a core", "us"]


def test_sinks_are_compared_with_the_run_beside():
    """What slows both down together adds nothing to the difference."""
    assert sink_cost._more([5.0, 105.0], [4.0, 104.0]) == spread.Spread(1.0, 1.0, 1.0, 2)
    assert sink_cost._more([5.0, 6.0], [4.0]) is None


def test_a_fetch_in_a_worker():
    answer = worker_fetch.measure(hot_rounds=2, cold_rounds=2)
    assert answer["fetches"] == 2 * 500 + 2 * 5
    assert [len(readings) for kind in ("hot", "cold") for readings in answer[kind].values()] == [2] * 8


def test_comparisons_of_recorded_runs():
    runs = [{"loader": "thread", "slower": 1.0, "blocks": [[100.0, 1.0]] * 30} for _ in range(7)]
    for pairs, sets in ((1, 21), (3, 500), (5, 0)):
        equal, longer = (compare.recorded([{"runs": runs}], pairs, longer=longer)["thread"] for longer in (False, True))
        assert (equal.pairs, equal.covered, equal.slower, equal.faster) == (sets, sets, 0, 0)
        assert (longer.pairs, longer.covered, longer.slower) == (sets, sets, sets)
