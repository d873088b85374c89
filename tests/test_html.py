"""``telemetry report --html``: the page, the figures in it, and what it does when it cannot."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from html_pages import Page, figures_of, main_of, page_of
from report_logs import START, line, window, write

import benchmarks.simulated_run as simulation
from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry.log import reader as logs
from telemetry.log.lines import GpuLine, WindowLine
from telemetry.log.reader import load
from telemetry.util.clock import iso_time

pytest.importorskip("bokeh")  # what draws the page

import numpy as np

from telemetry.log.process import ProcessLog
from telemetry.report.html import over_time
from telemetry.report.html.drawing import TimeAxis
from telemetry.report.html.heat_map import heat_map
from telemetry.report.html.over_time import STEP, RunRecorder

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>\"'`$$x$${{7*7}}\u2028"


def short_run(folder: Path, **fields) -> Path:
    stall = dict(
        cause="workers_io_bound", opened="2026-01-01T00:00:12.000Z", first_step=3, exposed_wait_ratio=0.5,
        evidence={"lost_seconds": {"workers_io_bound": 9.0}, "lines": [dict(file="/a/b.py", line=7, function="read", calls="open", share_ratio=0.8)]},
        advice=[dict(action="use more workers", setting="num_workers", value="8", predicted_speedup=1.9, because="they wait for storage")],
    )  # fmt: skip
    write(
        folder, 0,
        line("run_start", **START),
        window(wait=5, compute=5, steps=10, seconds=[1.0] * 10),
        line("stall_open", **stall | fields),
        window(wait=10, compute=10, steps=20, seconds=[1.0] * 10) | dict(time="2026-01-01T00:00:20.000Z"),
        line("run_end") | window(wait=10, compute=10, steps=20) | dict(event="run_end", time="2026-01-01T00:00:21.000Z"),
    )  # fmt: skip
    return folder


def test_tiles_and_advice_are_about_the_ranks_of_the_verdict(tmp_path):
    short_run(tmp_path)  # starved, with advice; replaced by a process that only waited for its first batch
    fields = dict(pid=77, time="2026-01-01T00:02:00.000Z")
    lost = dict(first_wait_seconds=9.0, stall_lost_total_seconds={"workers_io_bound": 3600.0})
    head = line("run_start", started="2026-01-01T00:01:00.000Z", pid=77)
    write(tmp_path, 0, head, window(wait=9.5, compute=10, steps=10) | fields | lost, pid=77)
    text = Page(page_of(tmp_path)).text
    assert "Until then no rank lost more than 4.8 % of its training loop waiting for data after the first batch" in text
    assert re.search(r"Exposed wait 4\.8 % of the training loop after the first batch, worst rank \(0\)", text)
    assert "num_workers=8" not in text
    assert "Lost in stalls 60 min" in text  # of all processes, also from logs that are gone


def test_one_rank_has_no_charts_of_ranks(tmp_path):
    text = page_of(short_run(tmp_path))
    assert not {"ranks", "ledger-ranks"} & figures_of(Page(text)).keys()
    assert "Every rank, over time" not in text
    assert "Figures of each process" in text


def test_hostile_text_stays_text(tmp_path):
    advice = [dict(action=HOSTILE, setting=HOSTILE, value=HOSTILE, predicted_speedup=2.0, because=HOSTILE)]
    evidence = {
        "lines": [dict(file=HOSTILE, line=1, function=HOSTILE, calls=HOSTILE, share_ratio=1.0)],
        "line_verdict": HOSTILE,
    }
    plain = Page(page_of(short_run(tmp_path)))
    other = tmp_path / "hostile"
    other.mkdir()
    short_run(other, advice=advice, evidence=evidence, cause=HOSTILE)
    path = next((other / "logs").iterdir())
    lines = [json.loads(each) | dict(run=HOSTILE, node=HOSTILE) for each in path.read_text().strip().split("\n")]
    lines.insert(
        3,
        line("phase", name=HOSTILE, category="evaluation", started="2026-01-01T00:00:11.000Z", seconds=1.0)
        | dict(run=HOSTILE, node=HOSTILE),
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    page = Page(page_of(other))
    assert page.elements.count("script") == plain.elements.count("script")
    assert page.elements.count("img") == 0
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search("[<>&]", next(text for text in page.scripts if text.startswith("{")))
    assert "window.hit=1" in page.text and "49" not in re.findall(r"\$\$x\$\$(.{0,4})", page.text)


def test_no_network_is_needed(tmp_path):
    text = page_of(short_run(tmp_path))
    page = Page(text)
    assert {"link", "iframe", "object", "base"} & set(page.elements) <= {"link"}
    references = [value for name, value in page.attributes if name in {"src", "href", "action", "data"}]
    assert all(value.startswith(("#", "data:")) for value in references)
    assert "default-src 'none'" in text


def test_a_missing_library_is_one_clear_line(tmp_path):
    short_run(tmp_path)
    code = "import sys; sys.modules['bokeh'] = None; from telemetry.cli import main; sys.exit(main(sys.argv[1:]))"
    told = subprocess.run(
        [sys.executable, "-c", code, "report", tmp_path, "--html", tmp_path / "x.html"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == "telemetry: --html needs bokeh: pip install 'torch-telemetry[html]'\n"
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("path", ["no/such/folder/x.html", "logs", "logs/\ud800.html", "a\0b"])
def test_a_path_that_cannot_be_written(tmp_path, capsys, path):
    short_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main_of("report", tmp_path, "--html", f"{tmp_path}/{path}") == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("telemetry: the page cannot be written to ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", ["fifo", "link to a fifo"])
def test_what_is_no_regular_file_is_left_alone(tmp_path, capsys, target):
    short_run(tmp_path)
    path, fifo = tmp_path / "page", tmp_path / "fifo"
    os.mkfifo(path if target == "fifo" else fifo)
    if target != "fifo":
        path.symlink_to(fifo)
    before = [(each.name, each.lstat().st_ino, each.lstat().st_mode) for each in sorted(tmp_path.iterdir())]
    assert main_of("report", tmp_path, "--html", path) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"telemetry: the page cannot be written to {path}: ")
    assert [(each.name, each.lstat().st_ino, each.lstat().st_mode) for each in sorted(tmp_path.iterdir())] == before


def test_a_page_that_is_there_is_replaced_whole_and_a_link_stays_a_link(tmp_path, capsys):
    short_run(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "page.html").write_text("old")
    (tmp_path / "report.html").symlink_to(other / "page.html")
    page_of(tmp_path)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/report.html (")
    assert (tmp_path / "report.html").is_symlink() and not (other / "page.html").is_symlink()
    assert (other / "page.html").read_text().startswith("<!doctype html>")
    assert (other / "page.html").stat().st_mode & 0o777 == 0o644
    assert [each.name for each in other.iterdir()] == ["page.html"]


def test_only_the_page_imports_the_library(tmp_path):
    short_run(tmp_path)
    code = (
        "import sys; from telemetry.cli import main; status = main(sys.argv[1:]);"
        "never = {'torch', 'structlog', 'prometheus_client', 'psutil'};"
        "print(status, *sorted({'bokeh', 'jinja2', 'numpy', *never} & set(sys.modules)))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code, "report", tmp_path, *options], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        ).stdout.splitlines()[-1]
        for options in ((), ("--html", str(tmp_path / "x.html")))
    ]  # fmt: skip
    assert told == ["0", "0 bokeh jinja2 numpy"]


def recorded(folder: Path):
    """The figures of a run over time, and its processes."""
    recorder = RunRecorder()
    processes = load(folder, recorder)
    return recorder.over_time(processes), processes


def test_lines_that_are_left_out_are_in_the_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "_MAX_BYTES", 400_000)
    monkeypatch.setattr(logs, "_THINNED_BYTES", 0)
    monkeypatch.setattr(over_time, "_MAX_BINS", 64)
    write_run(tmp_path, SimulatedRun(ranks=2, seconds=7000, interval_seconds=2))
    figures, sparse = recorded(tmp_path)
    for log, same in zip(sparse, load(tmp_path, all_windows=True), strict=True):
        # The head of the newest file has the sums of all that came before.
        assert log.step.total == same.step.total > 0
        assert log.wait.total == same.wait.total > 0
        assert (log.totals, log.last_time) == (same.totals, same.last_time)
    spent = figures.total("startup", "data_wait", "compute", "evaluation", "checkpoint")
    assert spent.sum() == pytest.approx(2 * 7000, rel=1e-3)
    assert figures.total("tokens").sum() == sum(log.totals.tokens_total for log in sparse)


def test_the_last_window_of_a_killed_process_counts(tmp_path):
    windows = [
        window(wait=n, compute=n, steps=n) | dict(time=f"2026-01-01T00:{n // 60:02d}:{n % 60:02d}.000Z")
        for n in range(1, 3003)
    ]
    write(tmp_path, 0, line("run_start", **START), *windows)
    figures, _ = recorded(tmp_path)
    assert figures.width_seconds > 1
    assert figures.total("compute").sum() == pytest.approx(3002)


def test_samples_and_tokens_that_are_not_known_are_not_0(tmp_path):
    """Of two ranks, one knows them only from its second window on."""
    known, unknown = dict(samples_total=40, tokens_total=400), dict(samples_total=None, tokens_total=None)
    for rank, first in enumerate((known, unknown)):
        lines = [
            window(rank, wait=20 * n, compute=20 * n, steps=20 * n) | counts | dict(time=f"2026-01-01T00:0{n}:40.000Z")
            for n, counts in ((1, first), (2, dict(samples_total=80, tokens_total=800)))
        ]
        write(tmp_path, rank, line("run_start", rank, **START), *lines)
    figures, _ = recorded(tmp_path)
    known, late = figures.added("samples")
    assert known.sum() == pytest.approx(80)
    assert np.isnan(late[figures.added("steps")[1] > 0]).all()


@pytest.mark.parametrize("seed", range(5))
def test_bins_that_merge_lose_nothing(seed, monkeypatch):
    monkeypatch.setattr(over_time, "_MAX_BINS", 16)
    monkeypatch.setattr(over_time, "_MIN_BINS", 16)
    draw, recorder, times = random.Random(seed), RunRecorder(), []
    recorder.begin(2)
    for _ in range(60):
        time = 1.7e9 + round(draw.uniform(-200, 400) * draw.choice([0.01, 1, 9]), 3)
        process = ProcessLog(1, 2)
        recorder.take(GpuLine(time=iso_time(time), power_watts=100.0), process)
        recorder.take(WindowLine(time=iso_time(time), step_sketch={1: 1}), process)
        times.append((time, process))  # so that each process has an id of its own
    counts = [sum(int(time // recorder.width_seconds) == at for time, _ in times) for at in recorder.bins]
    assert sum(counts) == 60 and len(counts) <= 16
    power = over_time.SAMPLED["gpu"].index("power_watts")
    cells = [recorder.samples.get(("gpu", at), np.zeros((2, power + 1, 1)))[:, power, 0] for at in recorder.bins]
    assert [list(each) for each in cells] == [[100.0 * count, count] for count in counts]
    assert recorder.sketches.keys() >= {(STEP, at) for at, count in zip(recorder.bins, counts, strict=True) if count}
    assert sum(sketch.total for sketch in recorder.sketches.values()) == 60


def test_damaged_logs_have_a_page(tmp_path):
    strange = [
        window(wait=1, compute=1, steps=1) | dict(time=time)
        for time in ("1970-01-01T00:00:00Z", "no time", "9999-12-31T23:59:59Z", "2026-01-01T00:00:30Z")
    ]
    samples = [
        line("gpu", power_watts="much", throttled=[1], sm_active_ratio=1e300),
        line("host", pressure_ratio={"cpu": "x"}),
        line("workers"),
    ]
    write(
        tmp_path, 0, line("run_start", **START), *strange, *samples, line("phase", category=7, started=[], seconds={})
    )
    path = next((tmp_path / "logs").iterdir())
    path.write_bytes(path.read_bytes() + b'{"time":"2026-01-01T00:00:40.000Z","event":"gpu","pow')
    assert Page(page_of(tmp_path)).text


def two_runs(folder: Path, *, ranks: int) -> None:
    """An old job, and a newer one 19 days later with slower steps. Both left their logs in one folder."""
    for run, day, seconds, pid in (("old", 1, 0.1, 100), ("new", 20, 2.0, 200)):
        for rank in range(ranks):
            fields = dict(run=run, pid=pid + rank, time=f"2026-01-{day:02d}T00:00:40.000Z")
            head = line("run_start", rank, started=f"2026-01-{day:02d}T00:00:00.000Z") | fields
            steps = window(rank, wait=2, compute=38, steps=20, seconds=[seconds] * 20) | fields
            write(folder, rank, head, steps, pid=pid + rank)


@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_page_has_the_newest_run_only_and_all_its_ranks(tmp_path, in_one_file):
    two_runs(tmp_path, ranks=8)
    for rank in range(8) if in_one_file else ():
        old, new = (tmp_path / "logs" / f"rank-{rank}.{pid + rank}.jsonl" for pid in (100, 200))
        old.write_bytes(old.read_bytes() + new.read_bytes())
        new.unlink()
    figures, processes = recorded(tmp_path)
    assert [(log.run, log.rank) for log in processes] == [("new", rank) for rank in range(8)]
    assert figures.ranks == [*range(8)]
    assert figures.edges[-1] - figures.edges[0] < 86400
    assert figures.total("steps").sum() == pytest.approx(8 * 20)
    assert np.nanmin(figures.percentiles(STEP, "p50")) > 1


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
    shown = [value for name, value in Page(text).attributes if name == "data-metric"]
    assert shown[0].startswith("gpu.")  # what shows it is shown first
    assert len(dict(figures_of(Page(text))["ranks"])["rank"]) <= 256
    assert len(text) < 2_000_000


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in the page: of times in which nothing was measured
def test_a_row_of_several_ranks_shows_the_odd_one(many_ranks):
    figures, _ = recorded(many_ranks)
    (chart,) = heat_map(TimeAxis(figures.edges), figures, dict.fromkeys(figures.ranks, "node"))
    clock = next(metric for metric in chart.metrics if metric.key == "gpu.sm_clock_hertz")
    odd = (clock.cells < 1.9e9).any(axis=1)
    labels = next(each.data_source.data["rank"] for each in chart.plot.renderers if "rank" in each.data_source.data)
    assert [label for label, is_odd in zip(labels, odd, strict=True) if is_odd] == ["ranks 150-151 (node)"]


def test_the_heat_map_has_real_values_and_keeps_its_contrast(tmp_path):
    paces, spent, steps = [], 1.0, 0  # 10 s with steps of 0.1 s; once, for a while, steps of 10 s
    for number in range(200):
        seconds, pace = (50.0, 10.0) if number == 100 else (10.0, 0.1)
        spent, steps = spent + seconds, steps + round(seconds / pace)
        loop = spent - 1.0
        time = iso_time(1767225600.0 + spent)
        paces.append(window(wait=0.001 * loop, compute=0.999 * loop, steps=steps) | dict(time=time))
    for rank in range(2):
        write(tmp_path, rank, line("run_start", rank, **START), *(pace | {"rank": rank} for pace in paces))
    page = Page(page_of(tmp_path))
    wait, step = (values for name, values in figures_of(page)["ranks"] if name == "image")
    assert wait[wait == wait] == pytest.approx(0.1, rel=1e-3)  # % of the loop; none of them is 0
    assert step[step == step].min() == pytest.approx(100, rel=0.01)  # ms
    assert step[step == step].max() > 1000
    assert re.search(r"Mean step 0\.0 % 5\.0 % 0 [12]\d\d\.\d ms or more", page.text)
