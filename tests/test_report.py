"""The report of runs that ended, go on, were killed or left damaged logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from telemetry.records import CATEGORIES
from telemetry.report.command import report
from telemetry.report.log_files import NoRunError
from telemetry.report.log_reader import load
from telemetry.report.summary import summarize
from telemetry.util.sketch import Sketch
from tests.report_logs import START, line, totals, window, write


def test_the_json_is_that_of_the_contract(tmp_path):
    write(
        tmp_path,
        0,
        line("run_start", **START),
        window(seconds=[0.1] * 99 + [5.0], wait=5, compute=5, steps=100),
        line("run_end", **totals(wait=6, compute=6, steps=120)),
    )
    summary = summarize(load(tmp_path))
    assert set(summary) == {"run", "verdict", "ranks", "stalls", "hang", "changes", "snapshots"}
    assert summary["hang"] is None
    (rank,) = summary["ranks"]
    assert set(rank) == {
        "rank", "local_rank", "node", "pid", "steps", "wall_seconds", "ledger", "step_seconds", "data_wait_seconds",
        "exposed_wait_ratio", "overhead_seconds", "memory", "samples", "tokens", "gpu_energy_joules",
    }  # fmt: skip
    assert set(rank["ledger"]) == set(CATEGORIES)
    assert sum(rank["ledger"].values()) == rank["wall_seconds"] == 13
    assert rank["steps"] == 120
    assert rank["exposed_wait_ratio"] == 0.5
    assert rank["step_seconds"]["p50"] == pytest.approx(0.1, rel=0.01)
    assert rank["step_seconds"]["max"] == 5.0
    assert rank["data_wait_seconds"] == dict.fromkeys(("p50", "p95", "p99", "max"))
    assert rank["overhead_seconds"] == {"training": 1e-4, "agent": 0.01}


def test_percentiles_are_of_the_whole_run(tmp_path):
    lines = [
        window(seconds=[0.1] * 100, wait=1, compute=1, steps=100),
        window(seconds=[1.0] * 10, wait=1, compute=1, steps=110),
    ]
    write(tmp_path, 0, line("run_start", **START), *lines)
    (rank,) = summarize(load(tmp_path))["ranks"]
    assert rank["step_seconds"]["p50"] == pytest.approx(0.1, rel=0.01)
    assert rank["step_seconds"]["p95"] == pytest.approx(1.0, rel=0.01)


def test_rotated_files_count_once_and_lost_ones_are_carried(tmp_path):
    lost = Sketch()
    for _ in range(1000):
        lost.add([0.01])
    head = line("run_start", **START, continued=True, step_sketch=lost.as_log_field(), step_max_seconds=0.01)
    later = line("run_start", **START, continued=True, step_sketch={"0": 10**6}, step_max_seconds=9.0)
    write(tmp_path, 0, head, window(seconds=[0.1] * 10, wait=1, compute=1, steps=1010), suffix=".1")
    write(tmp_path, 0, later, window(seconds=[0.1] * 10, wait=2, compute=2, steps=1020))
    (process,) = load(tmp_path)
    assert process.step.total == 1020
    assert process.step.largest == 0.1
    assert process.totals["steps_total"] == 1020


@pytest.mark.parametrize("torn", [b'{"event": "win', b"\xff\xfe garbage", b"[1, 2]", b"null", b"\0" * 100])
def test_a_torn_last_line_costs_only_itself(tmp_path, torn):
    path = write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1], wait=1, compute=3, steps=4))
    path.write_bytes(path.read_bytes() + torn)
    (rank,) = summarize(load(tmp_path))["ranks"]
    assert rank["steps"] == 4


def test_a_run_that_has_only_begun(tmp_path, capsys):
    write(tmp_path, 0, line("run_start", **START))
    assert report(str(tmp_path), as_json=False) == 0
    assert "No training step has ended yet" in capsys.readouterr().out


def test_fields_of_the_wrong_type_break_nothing(tmp_path, capsys):
    odd = line(
        "window",
        ledger_total_seconds=[1],
        steps_total="many",
        overhead_seconds=3,
        step_sketch={"a": 1},
        wall_seconds={},
    )
    opened = [
        line("stall_open", cause="of_a_newer_version", advice=advice)
        for advice in (None, ["more"], {"action": "more"}, 3, [{"action": {}}])
    ]
    write(tmp_path, 0, odd, line("stall_close"), *opened)
    for as_json in (True, False):
        assert report(str(tmp_path), as_json=as_json) == 0
    assert "of_a_newer_version" in capsys.readouterr().out


def test_the_newest_run_of_a_folder_is_reported(tmp_path):
    write(tmp_path, 0, line("run_start", started="2026-01-01T00:00:00.000Z") | {"run": "old"})
    write(tmp_path, 0, line("run_start", started="2026-02-01T00:00:00.000Z") | {"run": "new"}, pid=99)
    assert [p.pid for p in load(tmp_path)] == [99]


def test_a_restarted_rank_keeps_both_its_processes_the_newest_last(tmp_path):
    write(tmp_path, 0, line("run_start", started="2026-02-01T00:00:00.000Z"), pid=99)
    write(tmp_path, 0, line("run_start", started="2026-01-01T00:00:00.000Z"), pid=5)
    assert [p.pid for p in load(tmp_path)] == [5, 99]


def test_a_stall_has_its_close(tmp_path):
    opened = line(
        "stall_open", cause="workers_cpu_bound", opened="t1", first_step=5, evidence={"a": 1}, advice=[{"action": "x"}]
    )
    write(tmp_path, 0, opened, line("stall_close", closed="t2", last_step=50, exposed_wait_ratio=0.4))
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert (stall["opened"], stall["closed"], stall["first_step"], stall["last_step"]) == ("t1", "t2", 5, 50)
    assert (stall["cause"], stall["evidence"], stall["exposed_wait_ratio"]) == ("workers_cpu_bound", {"a": 1}, 0.4)


def test_stalls_whose_first_line_was_rotated_away_are_reported(tmp_path):
    first = {"cause": "workers_cpu_bound", "opened": "t1"}
    second = {"cause": "workers_io_bound", "opened": "t3"}
    write(
        tmp_path, 0, line("stall_lines", **first, first_step=5), line("stall_close", **first, closed="t2"),
        line("stall_lines", **second), line("stall_lines", **second, advice=[{"action": "x"}]),
    )  # fmt: skip
    found = [(stall["cause"], stall["opened"], stall["closed"]) for stall in summarize(load(tmp_path))["stalls"]]
    assert found == [("workers_cpu_bound", "t1", "t2"), ("workers_io_bound", "t3", None)]


def test_of_a_stall_only_the_end_is_left(tmp_path):
    write(tmp_path, 0, line("stall_close", cause="gc_pause", opened="t1", closed="t2"))
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert (stall["cause"], stall["opened"], stall["closed"]) == ("gc_pause", "t1", "t2")


def test_what_an_open_stall_has_cost_so_far_is_counted(tmp_path, capsys):
    """Its own line was written when it opened; the newest window knows the rest."""
    lost = {"workers_io_bound": 10.0}
    first = [line("stall_open", cause="workers_io_bound"), line("stall_close", evidence={"lost_seconds": lost})]
    again = line("stall_open", cause="workers_io_bound", evidence={"lost_seconds": {"workers_io_bound": 1.0}})
    newest = window(wait=9000.0, compute=1.0, steps=10) | {"stall_lost_total_seconds": {"workers_io_bound": 7210.0}}
    write(tmp_path, 0, *first, again, newest)
    costs = [stall["evidence"]["lost_seconds"] for stall in summarize(load(tmp_path))["stalls"]]
    assert costs == [lost, {"workers_io_bound": 7200.0}]
    assert report(str(tmp_path), as_json=False) == 0
    assert "workers_io_bound 2.003" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "empty", "no logs"])
def test_no_run_is_said_clearly(tmp_path, capsys, what):
    folder = tmp_path / "run"
    if what != "missing":
        (folder / "logs").mkdir(parents=True)
    if what == "no logs":
        (folder / "logs" / "notes.txt").write_text("x")
    assert report(str(folder), as_json=True) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("telemetry: ")
    with pytest.raises(NoRunError):
        load(folder)


def test_the_table_has_a_row_per_rank(tmp_path, capsys):
    for rank in range(3):
        done = line("run_end", rank, **totals(wait=rank, compute=10 - rank, steps=100))
        write(
            tmp_path,
            rank,
            line("run_start", rank, **START),
            window(rank, seconds=[0.1], wait=1, compute=9, steps=50),
            done,
        )
    assert report(str(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "run r"
    for wanted in ("step p50", "exposed", "agent/step", "data wait", "18.2 %", "1.0 us", " ms"):
        assert wanted in text


def test_the_report_never_imports_torch(tmp_path):
    write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1], wait=1, compute=9, steps=50))
    code = (
        "import sys; from telemetry.cli import main; main(['report', sys.argv[1], '--json']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'structlog', 'prometheus_client', 'psutil')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["run"] == "r"


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1], wait=1, compute=9, steps=50))
    done = subprocess.run(
        f"{sys.executable} -m telemetry report {tmp_path} | true", shell=True, capture_output=True, check=False
    )
    assert done.stderr == b""


def test_every_advice_has_all_fields_of_the_contract(tmp_path):
    advice = [{"action": "x", "setting": None, "value": None, "predicted_speedup": None, "because": "y"}]
    write(tmp_path, 0, line("run_start", **START), line("stall_open", cause="checkpoint", opened="t1", advice=advice))
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert stall["advice"] == [advice[0] | {"predicted_low": None}]
