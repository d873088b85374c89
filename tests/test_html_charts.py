"""The charts of the page: of which run and ranks they are, and the figures in the heat map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from html_pages import Page, arrays_of, items_of, page_of
from report_logs import START, line, window, write

from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry.report.log_reader import load
from telemetry.util.clock import iso_time

pytest.importorskip("bokeh")

from telemetry.report.html.rank_charts import heat_map
from telemetry.report.html.run_recorder import RunRecorder


def two_runs(folder: Path, *, ranks: int) -> None:
    """An old job, and a newer one 19 days later with slower steps. Both left their logs in one folder."""
    for run, day, seconds, pid in (("old", 1, 0.1, 100), ("new", 20, 2.0, 200)):
        for rank in range(ranks):
            fields = dict(run=run, pid=pid + rank, time=f"2026-01-{day:02d}T00:00:40.000Z")
            head = line("run_start", rank, started=f"2026-01-{day:02d}T00:00:00.000Z") | fields
            steps = window(rank, wait=2, compute=38, steps=20, seconds=[seconds] * 20) | fields
            write(folder, rank, head, steps, pid=pid + rank)


def test_a_page_has_the_newest_run_only_and_all_its_ranks(tmp_path):
    two_runs(tmp_path, ranks=8)
    recorder = RunRecorder()
    processes = load(tmp_path, recorder)
    assert [(log.run, log.rank) for log in processes] == [("new", rank) for rank in range(8)]
    assert sorted(recorder.rows) == [("new", rank) for rank in range(8)] and not recorder.ranks_left_out
    recorder.finish()
    sketches = [sketch for sketch in recorder.grid.sketches("step") if sketch is not None]
    assert sum(sketch.total for sketch in sketches) == 8 * 20
    assert min(sketch.percentiles().p50 for sketch in sketches) > 1
    assert recorder.grid.used * recorder.grid.width_seconds < 86400


def test_the_newest_run_may_be_in_the_middle_of_a_file(tmp_path):
    two_runs(tmp_path, ranks=3)
    for rank in range(3):
        old, new = (tmp_path / "logs" / f"rank-{rank}.{pid + rank}.jsonl" for pid in (100, 200))
        old.write_bytes(old.read_bytes() + new.read_bytes())
        new.unlink()
    recorder = RunRecorder()
    assert {log.run for log in load(tmp_path, recorder)} == {"new"}
    assert sorted(recorder.rows) == [("new", rank) for rank in range(3)]


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory):
    """The logs of 300 ranks: more than the heat map has rows."""
    folder = tmp_path_factory.mktemp("many-ranks")
    write_run(folder, SimulatedRun(ranks=300, seconds=100))
    return folder


@pytest.mark.parametrize("ranks", [40, 300])
def test_one_slow_rank_among_many_is_named(tmp_path, request, ranks):
    if ranks == 40:
        write_run(tmp_path, SimulatedRun(ranks=ranks, seconds=600))
    text = page_of(tmp_path if ranks == 40 else request.getfixturevalue("many_ranks"))
    slow = ranks // 2
    assert re.search(
        rf"Rank {slow} on gpu-{slow // 8:03d}, in \d+ % of the time: GPU: SM clock 990 MHz; .* 1980 MHz",
        Page(text).text,
    )
    items = items_of(Page(text))
    assert "gpu" in next(iter(items["ranks"]["metrics"]))  # what shows it is shown first
    assert len(items["ranks"]["rows"]) <= 256
    assert len(text) < 2_000_000


def test_a_row_of_several_ranks_shows_the_odd_one(many_ranks):
    recorder = RunRecorder()
    load(many_ranks, recorder)
    ranks = {rank: row for (_, rank), row in recorder.rows.items()}
    shown = heat_map(recorder, ranks, dict.fromkeys(ranks, "node"))
    clock = next(metric for metric in shown.metrics if metric.key == "gpu.sm_clock_hertz")
    odd = (clock.cells < 1.9e9).any(axis=1)
    assert [label for label, is_odd in zip(shown.rows, odd, strict=True) if is_odd] == ["ranks 150-151 (node)"]


def test_the_heat_map_has_real_values_and_keeps_its_contrast(tmp_path):
    paces, spent, steps = [], 1.0, 0  # 10 s with steps of 0.1 s; once, for a while, steps of 10 s
    for number in range(200):
        seconds, pace = (50.0, 10.0) if number == 100 else (10.0, 0.1)
        spent, steps = spent + seconds, steps + round(seconds / pace)
        loop = spent - 1.0
        time = iso_time(1767225600.0 + spent)
        paces.append(window(wait=0.001 * loop, compute=0.999 * loop, steps=steps) | dict(time=time))
    write(tmp_path, 0, line("run_start", **START), *paces)
    items = items_of(Page(page_of(tmp_path)))
    wait, step = arrays_of(items["ranks"]["item"]["doc"])
    assert wait[wait == wait] == pytest.approx(0.1, rel=1e-3)  # % of the loop; none of them is 0
    assert step[step == step].min() == pytest.approx(100, rel=0.01)  # ms
    assert step[step == step].max() > 1000
    scale = items["ranks"]["metrics"]["step"]
    assert 100 <= scale["high"] < 300 and scale["more"] and scale["unit"] == "ms"
    assert not items["ranks"]["metrics"]["wait"]["more"]
