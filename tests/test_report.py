"""The report of runs that ended, go on, were killed or left damaged logs: what it says of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.records import CATEGORIES
from telemetry.report.command import report
from telemetry.report.logs import NoRunError, load
from telemetry.report.process_log import ProcessLog, not_replaced
from telemetry.report.summary import verdict_of
from telemetry.util.clock import iso_time
from telemetry.util.sketch import Sketch
from tests.report_logs import START, line, summarize, text_of, totals, window, write


def test_the_json_is_that_of_the_contract(tmp_path):
    write(
        tmp_path,
        0,
        line("run_start", **START),
        window(seconds=[0.1] * 99 + [5.0], wait=5, compute=5, steps=100),
        line("run_end", **totals(wait=6, compute=6, steps=120)),
    )
    summary = summarize(load(tmp_path))
    assert set(summary) == {
        "run", "verdict", "ranks", "stalls", "hang", "changes", "snapshots", "job", "throughput", "gpu_energy_joules",
        "cost",
    }  # fmt: skip
    assert summary["hang"] is None
    (rank,) = summary["ranks"]
    assert set(rank) == {
        "rank", "local_rank", "node", "pid", "steps", "wall_seconds", "ledger", "step_seconds", "data_wait_seconds",
        "exposed_wait_ratio", "overhead_seconds", "memory", "samples", "tokens", "gpu_energy_joules", "attempt",
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


VERDICTS = {
    "starved alone": ([dict(wait=8, compute=2)], "Starved: rank 0 spent 80 %", "5.0 times"),
    "one of four": (
        [dict(wait=1, compute=9)] * 3 + [dict(wait=6, compute=4)],
        "Starved: rank 3",
        "the other ranks wait for it",
    ),
    "all of them": (
        [dict(wait=6, compute=4), dict(wait=7, compute=3)],
        "every rank waits for data; the worst, rank 1",
        "",
    ),
    "healthy": ([dict(wait=0.3, compute=9.7)], "Healthy: no rank lost more than 3.0 %", ""),
    "not seen": ([dict(wait=0.0, compute=10)], "Not known whether this run waits for data", "telemetry.watch()"),
    "not measured": ([dict(wait=5, compute=5, exposed=None)], "Rank 0 spent 50 %", "was not measured"),
    "hidden": ([dict(wait=5, compute=5, exposed=0.1)], "Healthy", ""),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(tmp_path, name):
    ranks, *wanted = VERDICTS[name]
    for rank, spent in enumerate(ranks):
        write(tmp_path, rank, line("run_start", rank, **START), line("run_end", rank, **totals(steps=10, **spent)))
    verdict = summarize(load(tmp_path))["verdict"]
    assert all(part in verdict for part in wanted), verdict


KINDS = {
    "starved alone": "starved",
    "healthy": "healthy",
    "not seen": "unknown",
    "not measured": "unmeasured",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_verdict_has_its_kind(tmp_path, name):
    for rank, spent in enumerate(VERDICTS[name][0]):
        write(tmp_path, rank, line("run_start", rank, **START), line("run_end", rank, **totals(steps=10, **spent)))
    logs = load(tmp_path)
    found = verdict_of(logs)
    assert (found.kind, found.text) == (KINDS[name], summarize(logs)["verdict"])
    assert "kind" not in summarize(logs)  # not in the JSON contract


@pytest.mark.parametrize("ended", [False, True])
def test_a_hang_and_a_stuck_rank_have_their_kinds(tmp_path, ended):
    stuck = {"lost_seconds": {"straggler": 9.0}, "stuck_in": "compute"}
    opened = line("stall_open", cause="straggler", opened="t1", first_step=5, evidence=stuck)
    end = [line("run_end", stuck_for_seconds=60.0, **totals(wait=1, compute=9, steps=9))] if ended else []
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9), opened, *end)
    assert verdict_of(load(tmp_path)).kind == "stuck"
    hanging(tmp_path, hang(), ended=ended)
    assert verdict_of(load(tmp_path)).kind == ("hung" if ended else "hangs")


@pytest.mark.parametrize(
    ("category", "words"),
    [
        ("data_wait", "is waiting for a batch"),
        ("checkpoint", "is in a checkpoint"),
        ("evaluation", "is in an evaluation"),
    ],
)
def test_a_stuck_rank_says_in_what(tmp_path, category, words):
    evidence = {"lost_seconds": {"unknown": 9.0}, "stuck_in": category}
    opened = line("stall_open", cause="unknown", opened="t1", first_step=5, evidence=evidence)
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9), opened)
    assert verdict_of(load(tmp_path)).text.startswith(f"Stuck: rank 0 {words} and has not gone on since before t1.")


def test_a_stall_that_is_no_starvation_is_in_the_verdict(tmp_path):
    evidence = {"lost_seconds": {"checkpoint": 30.0}}
    advice = [
        {
            "action": "write checkpoints less often",
            "setting": None,
            "value": None,
            "predicted_speedup": 1.4,
            "because": "x",
        }
    ]
    opened = line("stall_open", cause="checkpoint", opened="t1", first_step=5, evidence=evidence, advice=advice)
    write(tmp_path, 0, line("run_start", **START), opened, line("run_end", **totals(wait=0.1, compute=10, steps=100)))
    verdict = summarize(load(tmp_path))["verdict"]
    assert verdict.startswith("Not starved, but rank 0 stalled. Cause: checkpoint; write checkpoints less often")
    assert "predicted 1.4 times" in verdict


def test_the_slow_rank_is_named_before_those_that_wait_for_it(tmp_path):
    def stalled(rank, cause, because):
        evidence = {"lost_seconds": {cause: 40.0 - rank}}
        advice = [
            {"action": "look there", "setting": None, "value": None, "predicted_speedup": 2.0, "because": because}
        ]
        return line("stall_open", rank, cause=cause, opened="t1", first_step=5, evidence=evidence, advice=advice)

    waits = stalled(0, "straggler", "rank 1 is busy outside of its steps")
    busy = stalled(1, "checkpoint", "checkpoints took 8 s of 10 s")
    end = line("run_end", **totals(wait=0.1, compute=10, steps=100))
    write(tmp_path, 0, line("run_start", **START), waits, end)
    alone = summarize(load(tmp_path))["verdict"]
    assert "rank 0 stalled. Cause: straggler; look there (rank 1 is busy outside of its steps)" in alone
    write(tmp_path, 1, line("run_start", 1, **START), busy, end | {"rank": 1})
    report = summarize(load(tmp_path))
    assert "rank 1 stalled. Cause: checkpoint" in report["verdict"]
    assert "GPU-hours lost in stalls, over all ranks: straggler 0.011, checkpoint 0.011" in text_of(load(tmp_path))


def test_a_stall_of_its_own_is_named_before_a_longer_wait_for_a_rank(tmp_path):
    def stalled(rank, cause, lost, opened="t1"):
        evidence = {"lost_seconds": {cause: lost}}
        return line("stall_open", rank, cause=cause, opened=opened, first_step=5, evidence=evidence, advice=[])

    end = totals(wait=0.1, compute=200, steps=100)
    both = stalled(0, "straggler", 100.0), stalled(0, "checkpoint", 30.0, opened="t2")
    write(tmp_path, 0, line("run_start", **START), *both, line("run_end", **end))
    write(tmp_path, 1, line("run_start", 1, **START), stalled(1, "gc_pause", 20.0), line("run_end", 1, **end))
    assert "rank 0 stalled. Cause: checkpoint" in summarize(load(tmp_path))["verdict"]


def test_the_wait_for_the_first_batch_is_not_starvation(tmp_path):
    end = line("run_end", **totals(wait=4.0, compute=10.0, steps=100)) | {"first_wait_seconds": 3.9}
    write(tmp_path, 0, line("run_start", **START), end)
    report = summarize(load(tmp_path))
    assert report["ranks"][0]["exposed_wait_ratio"] == pytest.approx(4 / 14)
    assert report["verdict"].startswith("Healthy")


# -- a job that hangs ---------------------------------------------------------------------------------------------


def hang(rank: int = 0, second: int = 20, **fields) -> dict:
    told = dict(
        since="2026-01-01T00:00:00.000Z",
        verdict="ranks 0, 2-3 have waited in all_reduce #7 since 00:00:00; rank 1 on n1 is in a fetch at data.py:88 (read)",
        kind="fetch",
        suspects=[{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}],
        suspects_total=1,
        waiting=[{"ranks": [[0, 0], [2, 3]], "collective": "all_reduce", "sequence": 7}],
        silent_ranks=0,
    )
    return line("hang", rank, **told | {"time": f"2026-01-01T00:00:{second}.000Z"} | fields)


def hanging(tmp_path, *lines, ended=False) -> dict:
    steps = dict(wait=1, compute=9, steps=100)
    end = [line("run_end", **totals(**steps))] if ended else []
    write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 100, **steps), *lines, *end)
    return summarize(load(tmp_path))


def test_a_job_that_hangs_is_the_verdict(tmp_path):
    report = hanging(tmp_path, hang())
    assert report["verdict"] == (
        "Hangs: ranks 0, 2-3 have waited in all_reduce #7 since 00:00:00; rank 1 on n1 is in a fetch at data.py:88 (read)."
    )
    assert report["hang"] == {
        "since": "2026-01-01T00:00:00.000Z",
        "verdict": report["verdict"].removeprefix("Hangs: ").removesuffix("."),
        "kind": "fetch",
        "suspects": [{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}],
        "waiting": [{"ranks": [0, 2, 3], "collective": "all_reduce", "sequence": 7}],
    }


def test_a_hang_that_is_over_is_none(tmp_path):
    report = hanging(tmp_path, hang(), line("hang", kind="fetch", over=True, time="2026-01-01T00:00:30.000Z"))
    assert report["hang"] is None
    assert report["verdict"].startswith("Healthy")


def test_a_hang_after_one_that_is_over(tmp_path):
    over = line("hang", kind="fetch", over=True, time="2026-01-01T00:00:30.000Z")
    assert hanging(tmp_path, hang(), over, hang(second=40, kind="rank_gone"))["hang"]["kind"] == "rank_gone"


def test_the_line_that_knows_all_ranks_counts(tmp_path):
    report = hanging(tmp_path, hang(second=30), hang(second=40, silent_ranks=2, kind="unknown", suspects=[]))
    assert report["hang"]["kind"] == "fetch"


def test_a_hang_that_was_the_end_of_the_run(tmp_path):
    assert hanging(tmp_path, hang(), ended=True)["verdict"].startswith("Hung before its end: ranks 0, 2-3 have waited")


MINUTES = st.integers(0, 20).map(lambda minute: f"2026-01-01T00:{minute:02d}:00.000Z")


@st.composite
def process_logs(draw):
    started, newest = sorted((draw(MINUTES), draw(MINUTES)))
    head = {"started": started, "world_size": draw(st.integers(0, 4))}
    return ProcessLog(rank=draw(st.integers(0, 4)), pid=1, head=head, last_time=newest)


def replaces(new, old):
    if new.started <= old.last_time:
        return False
    return new.rank == old.rank or 0 < new.head["world_size"] <= old.rank


@given(st.lists(process_logs(), max_size=12))
def test_a_process_counts_until_another_replaces_it(processes):
    """A later one of its rank does. So does any one of a later job that has fewer ranks."""
    expected = [old for old in processes if not any(replaces(new, old) for new in processes)]
    assert [id(each) for each in not_replaced(processes)] == [id(each) for each in expected]


GROWS = {
    "growth_bytes_per_hour": 1_200_000_000,
    "where": "workers",
    "exhausted_in_seconds": 10_800.0,
    "exhausted": "memory",
    "copied_on_write": True,
    "advice": "a list is copied on write",
}
USED = {"wait": 1.0, "compute": 9.0, "steps": 10}


def at(ago: float, a_line: dict) -> dict:
    return a_line | {"time": iso_time(time.time() - ago)}


def start(ago: float, rank: int = 0) -> dict:
    return at(ago, line("run_start", rank, started=iso_time(time.time() - ago), world_size=1))


def grown(ago: float, rank: int = 0, **changes) -> dict:
    field = {name: value for name, value in (GROWS | changes).items() if value is not None}
    return at(ago, window(rank, **USED) | {"memory": field})


def text_and_json(tmp_path, capsys):
    assert report(str(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert report(str(tmp_path), as_json=True) == 0
    return text, msgspec.json.decode(capsys.readouterr().out)


def test_a_run_that_goes_on_says_when_and_what(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1))
    text, as_json = text_and_json(tmp_path, capsys)
    said = "Node n runs out of memory in about 3 h: the workers of rank 0 grow 1.2 GB/h; a list is copied on write."
    assert said in text
    assert said in as_json["verdict"]
    assert as_json["ranks"][0]["memory"] == {
        "growth_bytes_per_hour": 1_200_000_000, "where": "workers", "exhausted_in_seconds": 10_800.0,
    }  # fmt: skip
    assert "memory: the workers of rank 0 grow 1.2 GB/h; a list is copied on write, used up in about 3 h\n" in text


@pytest.mark.parametrize(
    ("exhausted", "where", "said"),
    [
        (
            "shared_memory",
            "shared_memory",
            "/dev/shm of node n is full in about 3 h: /dev/shm of rank 0 grows 1.2 GB/h",
        ),
        ("cuda", "cuda", "The GPU of rank 0 runs out of memory in about 3 h: the tensors on the GPU of rank 0 grow"),
        (
            "memory",
            None,
            "Node n runs out of memory in about 3 h: memory outside of this run's processes grows 1.2 GB/h",
        ),
    ],
)
def test_what_is_used_up_is_named(tmp_path, capsys, exhausted, where, said):
    write(tmp_path, 0, start(60), grown(1, exhausted=exhausted, where=where))
    assert said in text_and_json(tmp_path, capsys)[1]["verdict"]


def test_a_dead_run_still_says_what_grew(tmp_path, capsys):
    write(tmp_path, 0, start(9060), grown(9000, exhausted_in_seconds=12.0))
    text, as_json = text_and_json(tmp_path, capsys)
    assert "When its log ends, memory was to run out in about 12 s: the workers of rank 0 grew" in as_json["verdict"]
    assert "memory: the workers of rank 0 grew 1.2 GB/h" in text
    assert as_json["ranks"][0]["memory"]["where"] == "workers"


def test_a_restarted_run_still_says_what_grew_before(tmp_path, capsys):
    write(tmp_path, 0, start(9060), grown(9000, exhausted_in_seconds=12.0), pid=10)
    write(tmp_path, 0, start(60), at(1, window(**USED)), pid=11)
    text, as_json = text_and_json(tmp_path, capsys)
    assert "memory" not in as_json["verdict"]
    assert "memory: the workers of rank 0 grew 1.2 GB/h" in text
    assert [rank["memory"]["where"] for rank in as_json["ranks"]] == ["workers", None]


def test_the_rank_that_fills_the_memory_is_named_before_one_that_sees_it(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1, where=None, advice=None, exhausted_in_seconds=10_000.0))
    write(tmp_path, 1, start(60, 1), grown(1, 1))
    assert "the workers of rank 1 grow" in text_and_json(tmp_path, capsys)[1]["verdict"]


def test_a_run_that_has_finished_and_one_that_does_not_grow_say_nothing(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(5), at(1, line("run_end", **totals(**USED)) | {"memory": GROWS}))
    write(tmp_path, 1, start(60, 1), at(1, window(1, **USED)))
    text, as_json = text_and_json(tmp_path, capsys)
    assert "memory" not in as_json["verdict"]
    assert as_json["ranks"][1]["memory"] == dict.fromkeys(("growth_bytes_per_hour", "where", "exhausted_in_seconds"))
    assert text.count("memory: ") == 1, "how it grew is still of interest"


def test_a_damaged_field_is_left_out(tmp_path, capsys):
    write(tmp_path, 0, start(60), grown(1, exhausted_in_seconds="soon", where=7))
    text, as_json = text_and_json(tmp_path, capsys)
    assert as_json["ranks"][0]["memory"]["where"] is None
    assert "2 field(s) of its log are of the wrong type" in text


TRACE = Path(__file__).parent / "traces" / "v100_resnet50_workers0.json.gz"


def snapshot(path: str) -> dict:
    return line("snapshot", result="recorded", reason="workers_io_bound", first_step=5, last_step=9, path=path)


def reported(tmp_path, capsys, *, as_json: bool) -> str:
    assert report(str(tmp_path), as_json=as_json) == 0
    return capsys.readouterr().out


def test_a_snapshot_is_read_for_the_report_and_its_verdict(tmp_path, capsys):
    folder = tmp_path / "snapshots" / "workers_io_bound-step5"
    folder.mkdir(parents=True)
    shutil.copy(TRACE, folder / "rank-0.node_10.1.pt.trace.json.gz")
    end = line("run_end", **totals(wait=4.0, compute=10.0, steps=100))
    taken = snapshot("snapshots/workers_io_bound-step5/rank-0.node_10.1.pt.trace.json.gz")
    write(tmp_path, 0, line("run_start", **START), taken, end)
    whole = json.loads(reported(tmp_path, capsys, as_json=True))
    (shown,) = whole["snapshots"]
    assert shown["breakdown"]["DataLoader"] == pytest.approx(0.34, abs=0.02)
    assert sum(shown["breakdown"].values()) == pytest.approx(1.0, abs=0.001)
    assert "The trace of steps 5 to 9 on rank 0 shows Kernel 5" in whole["verdict"]
    assert "  rank 0: Kernel 5" in reported(tmp_path, capsys, as_json=False)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../trace.json.gz", "lies outside of the run folder"),
        ("/etc/trace.json.gz", "lies outside of the run folder"),
        ("snapshots/gone.json.gz", "gone.json.gz"),
        ("snapshots/link.json.gz", "link.json.gz"),
    ],
)
def test_a_snapshot_that_cannot_be_read_is_listed_and_says_why(tmp_path, capsys, path, why):
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "link.json.gz").symlink_to(TRACE)
    write(
        tmp_path,
        0,
        line("run_start", **START),
        snapshot(path),
        line("run_end", **totals(wait=1.0, compute=9.0, steps=9)),
    )
    assert json.loads(reported(tmp_path, capsys, as_json=True))["snapshots"][0]["breakdown"] == {}
    assert why in reported(tmp_path, capsys, as_json=False)
