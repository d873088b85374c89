"""The benchmarks' parts run and give what the report needs. Nothing here judges a time."""

import json
import sys
from array import array

import pytest

from benchmarks import (
    agent_cpu,
    compare_loads,
    compare_sets,
    instruments,
    loops,
    machine,
    memory,
    overhead,
    recorded_runs,
    report,
    scrape,
    sink_cost,
    spread,
    tail,
    worker_fetch,
)
from benchmarks.effort import QUICK
from telemetry.compare.pace_interval import PaceBlock
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


@pytest.mark.parametrize(("options", "burners"), [(["--beside", "0"], []), (["--beside", "0.5"], [0.5])])
def test_comparisons_are_recorded_beside_the_load_that_is_asked_for(tmp_path, monkeypatch, options, burners):
    started = []
    nothing = [sys.executable, "-c", ""]
    monkeypatch.setattr(recorded_runs, "burner", lambda share, _: (started.append(share), nothing)[1])
    monkeypatch.setattr(recorded_runs, "command", lambda *_: nothing)
    monkeypatch.setattr(recorded_runs, "recorded_run", lambda *run: {"beside": run[-1]})
    file = tmp_path / "runs.json"
    monkeypatch.setattr(sys, "argv", ["", "--record", str(file), "--minutes", "0.01", "--together", "1", *options])
    compare_loads.main()
    assert set(started) == set(burners)
    assert {run["beside"] for run in json.loads(file.read_text())["runs"]} == {float(options[1])}


def test_pairs_of_runs_are_told_apart_by_their_load_and_length():
    def run(seconds, held_up):
        return (PaceBlock(10.0, seconds / 2, held_up=held_up), PaceBlock(10.0, seconds / 2, held_up=0.0))

    short, long, disturbed = run(40.0, 1.0), run(180.0, 1.0), run(180.0, 30.0)
    assert recorded_runs.load_of(short, short) == recorded_runs.load_of(short, long) == "calm"
    assert recorded_runs.load_of(long, long) == "calm, long"
    assert recorded_runs.load_of(long, disturbed) == "changing"


def recorded(paces, slower=1.0, held_up=0.0):
    """Runs of 30 s without scatter, one of each pace."""
    return [
        {"loader": "thread", "slower": slower, "blocks": [[pace, 1.0, 0.0, held_up, 0.0] for _ in range(30)]}
        for pace in paces
    ]


def test_sets_are_of_calm_runs_in_the_order_of_recording():
    runs = recorded([100, 101, 102, 103, 104, 105]) + recorded([50], held_up=0.5)
    (only,) = compare_sets.sets_of(runs, "thread", 1.0, 3)
    first_paces = [[run[0].steps for run in pair] for pair in only]
    assert first_paces == [[100, 101], [103, 102], [104, 105]]  # which of a pair runs first changes
    assert compare_sets.sets_of(runs[:5], "thread", 1.0, 3) == []
    more = compare_sets.sets_of([*runs, *recorded([90, 91, 92], slower=1.05)], "thread", 1.05, 3)
    assert len(more) == 20  # three of six runs of A
    assert all([b[0].steps for _, b in each] == [90, 91, 92] for each in more)


def test_of_many_runs_sets_are_drawn(monkeypatch):
    monkeypatch.setattr(compare_sets, "MOST_SETS", 50)
    runs = recorded(range(100, 112))
    drawn = compare_sets.sets_of(runs, "thread", 1.0, 3)
    paces = [tuple(sorted(run[0].steps for pair in each for run in pair)) for each in drawn]
    assert len(set(paces)) == len(paces) == 50
    assert all(len(set(each)) == 6 for each in paces)
    more = compare_sets.sets_of([*runs, *recorded(range(90, 95), slower=1.05)], "thread", 1.05, 3)
    assert len(more) == 50
    assert {a[0].steps for each in more for a, _ in each} == set(range(100, 112))
    assert all(len({run[0].steps for pair in each for run in pair}) == 6 for each in more)


def test_a_slow_down_is_found_in_sets():
    told = compare_sets.figures_of_sets([recorded([100.0] * 7)], "thread")
    equal, longer = told["calm; 3"]["1.00"], told["calm; 3"]["1.05 longer"]
    assert (equal["sets"], equal["slower"], equal["faster"], equal["covered"]) == (7, 0, 0, 7)
    assert (longer["sets"], longer["slower"], longer["covered"]) == (7, 7, 7)
    assert all(set(told[none].values()) == {None} for none in ("calm; 5", "calm, long; 3", "calm, long; 5"))
    rows = compare_sets.rows_of_sets({"thread": told})
    assert [row for row in rows if row.startswith("| thread")] == [
        f"| thread | calm; 3 | {name} | 7 | {found} | 0 | ± {100 * each['median_half']:.1f} % | 7 |"
        for name, found, each in (("equal", 0, equal), ("5 % longer", 7, longer))
    ]
