"""What the report says of runs that ended, go on, were killed, hang or left damaged logs; `test_goldens` has whole ones."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.diagnosis.verdict import judge
from telemetry.log.lines import RunStartLine, TotalsLine
from telemetry.log.process import ProcessLog, Progress, not_replaced
from telemetry.log.reader import NoRunError, load
from telemetry.model.records import CATEGORIES
from telemetry.report.report_command import report
from telemetry.report.summary import run_facts
from telemetry.util.clock import iso_time
from telemetry.util.sketch import Sketch
from tests.report_logs import START, line, summarize, text_of, totals, window, write

TRACE = Path(__file__).parent / "traces" / "v100_resnet50_workers0.json.gz"


def verdict(folder) -> str:
    return summarize(load(folder))["verdict"]


def test_the_json_is_that_of_the_contract(tmp_path):
    advice = [{"action": "x", "setting": None, "value": None, "predicted_speedup": None, "because": "y"}]
    write(
        tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 99 + [5.0], wait=5, compute=5, steps=100),
        line("stall_open", cause="checkpoint", opened="t1", advice=advice),
        line("run_end", **totals(wait=6, compute=6, steps=120)),
    )  # fmt: skip
    summary = summarize(load(tmp_path))
    assert set(summary) == {
        "run", "verdict", "ranks", "stalls", "findings", "advice", "hang", "changes", "snapshots", "job", "throughput", "gpu_energy_joules",
        "cost",
    }  # fmt: skip
    (rank,) = summary["ranks"]
    assert set(rank) == {
        "rank", "local_rank", "node", "pid", "steps", "wall_seconds", "ledger", "compute_seconds", "step_seconds", "data_wait_seconds",
        "exposed_wait_ratio", "overhead_seconds", "memory", "samples", "tokens", "gpu_energy_joules", "attempt",
        "step_lines", "epochs", "step_trend", "optimizer_steps",
    }  # fmt: skip
    assert set(rank["ledger"]) == set(CATEGORIES)
    assert sum(rank["ledger"].values()) == rank["wall_seconds"] == 13
    assert (rank["steps"], rank["exposed_wait_ratio"]) == (120, 0.5)
    assert rank["step_seconds"]["p50"] == pytest.approx(0.1, rel=0.01)
    assert rank["step_seconds"]["max"] == 5.0
    assert rank["data_wait_seconds"] == dict.fromkeys(("p50", "p95", "p99", "max"))
    assert rank["overhead_seconds"] == {"training": 1e-4, "agent": 0.01}
    assert summary["stalls"][0]["advice"] == [advice[0] | {"predicted_low": None}]


def test_each_rank_has_its_cores_and_memory_beside_its_waits(tmp_path):
    used = {"cpu_total_seconds": {"used": 15.0, "others": 1.0, "known": 10.0}}
    host = line("host", process_resident_memory_bytes=500_000_000, workers_bytes=100_000_000)
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=10) | used, host)
    write(tmp_path, 1, line("run_start", 1, **START), window(1, wait=1, compute=9, steps=10))
    text = text_of(load(tmp_path)).splitlines()
    at = next(at for at, each in enumerate(text) if each.startswith("rank  node"))
    assert "  cores  memory  " in text[at]
    assert "  10.0 %    1.5  600 MB  " in text[at + 1]
    assert "  10.0 %      -       -  " in text[at + 2]


# -- which logs are read -------------------------------------------------------------------------------------------


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


def test_the_newest_run_of_a_folder_with_all_processes_of_a_rank_the_newest_last(tmp_path):
    for pid, month, run in ((1, 1, "old"), (99, 3, "new"), (5, 2, "new")):
        write(tmp_path, 0, line("run_start", started=f"2026-0{month}-01T00:00:00.000Z") | {"run": run}, pid=pid)
    assert [p.pid for p in load(tmp_path)] == [5, 99]


def test_rotated_files_count_once_and_lost_ones_are_carried(tmp_path):
    lost = Sketch()
    lost.add([0.01] * 1000)
    head = line("run_start", **START, continued=True, step_sketch=lost.as_log_field(), step_max_seconds=0.01)
    so_far = Sketch()
    so_far.add([0.01] * 1000 + [0.1] * 10)
    later = line("run_start", **START, continued=True, step_sketch=so_far.as_log_field(), step_max_seconds=0.1)
    write(tmp_path, 0, head, window(seconds=[0.1] * 10, wait=1, compute=1, steps=1010), suffix=".1")
    write(tmp_path, 0, later, window(seconds=[0.1] * 10, wait=2, compute=2, steps=1020))
    (process,) = load(tmp_path)
    assert (process.step.total, process.step.largest, process.totals.steps_total) == (1020, 0.1, 1020)


def test_of_a_long_run_some_totals_are_kept_and_none_that_go_back():
    progress = Progress()
    for number in range(1, 5001):
        progress.add(TotalsLine(**totals(wait=number, compute=9 * number, steps=number)))
    steps = [point.steps for point in progress.points]
    assert 256 < len(steps) <= 512
    assert len({later - earlier for earlier, later in pairwise(steps)}) == 1
    damaged = Progress()
    for number in (1, 2, 1, 3):
        damaged.add(TotalsLine(**totals(wait=number, compute=9 * number, steps=number)))
    assert [point.loop_seconds for point in damaged.points] == [10, 20, 30]


MINUTES = st.integers(0, 20).map(lambda minute: f"2026-01-01T00:{minute:02d}:00.000Z")


@st.composite
def process_logs(draw):
    started, newest = sorted((draw(MINUTES), draw(MINUTES)))
    head = RunStartLine(started=started, world_size=draw(st.integers(0, 4)))
    return ProcessLog(rank=draw(st.integers(0, 4)), pid=1, head=head, last_time=newest)


def replaces(new, old):
    if new.started <= old.last_time:
        return False
    return new.rank == old.rank or 0 < new.head.world_size <= old.rank


@given(st.lists(process_logs(), max_size=12))
def test_a_process_counts_until_another_replaces_it(processes):
    """A later one of its rank does. So does any one of a later job that has fewer ranks."""
    expected = [old for old in processes if not any(replaces(new, old) for new in processes)]
    assert [id(each) for each in not_replaced(processes)] == [id(each) for each in expected]


# -- a run with little to say ---------------------------------------------------------------------------------------


def test_a_wait_that_has_not_ended_is_no_share_of_the_loop(tmp_path):
    write(tmp_path, 0, line("run_start", **START), window(wait=0.1, compute=0.0, steps=0))
    text = text_of(load(tmp_path))
    assert "Killed: rank 0 did not end by itself, before the first step." in text
    rows = [row.split() for row in text.splitlines() if row.startswith("   0 ")]
    assert rows[0][4:12] == ["-"] * 8, "steps, waits, exposed, the agent's cost of a step"


# -- stalls --------------------------------------------------------------------------------------------------------

CPU, IO = {"cause": "workers_cpu_bound", "opened": "t1"}, {"cause": "workers_io_bound", "opened": "t3"}
OPENED = line("stall_open", **CPU, first_step=5, evidence={"a": 1, "stuck_in": "compute"}, advice=[{"action": "x"}])
STALLS = {
    "whole": (
        [OPENED, line("stall_close", closed="t2", last_step=50, exposed_wait_ratio=0.4, evidence={"a": 2})],
        [("workers_cpu_bound", "t1", "t2", 5, 50, 0.4, {"a": 2, "stuck_in": "compute"}, ["x"])],
    ),
    "the first lines were rotated away": (
        [
            line("stall_lines", **CPU, first_step=5), line("stall_close", **CPU, closed="t2"),
            line("stall_lines", **IO), line("stall_lines", **IO, advice=[{"action": "x"}]),
        ],
        [("workers_cpu_bound", "t1", "t2", 5, None, None, {}, []), ("workers_io_bound", "t3", *[None] * 4, {}, ["x"])],
    ),
    "only the end is left": (
        [line("stall_close", **CPU, closed="t2")],
        [("workers_cpu_bound", "t1", "t2", None, None, None, {}, [])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STALLS)
def test_a_stall_is_made_of_its_lines(tmp_path, name):
    lines, expected = STALLS[name]
    write(tmp_path, 0, *lines)
    names = ("cause", "opened", "closed", "first_step", "last_step", "exposed_wait_ratio", "evidence")
    stalls = summarize(load(tmp_path))["stalls"]
    found = [(*(stall[name] for name in names), [each["action"] for each in stall["advice"]]) for stall in stalls]
    assert found == expected


def test_what_an_open_stall_has_cost_so_far_is_counted(tmp_path):
    """Its own line was written when it opened; the newest window knows the rest."""
    lost = {"workers_io_bound": 10.0}
    first = [line("stall_open", cause="workers_io_bound"), line("stall_close", evidence={"lost_seconds": lost})]
    again = line("stall_open", cause="workers_io_bound", evidence={"lost_seconds": {"workers_io_bound": 1.0}})
    newest = window(wait=9000.0, compute=1.0, steps=10) | {"stall_lost_total_seconds": {"workers_io_bound": 7210.0}}
    write(tmp_path, 0, *first, again, newest)
    costs = [stall["evidence"]["lost_seconds"] for stall in summarize(load(tmp_path))["stalls"]]
    assert costs == [lost, {"workers_io_bound": 7200.0}]


def test_of_two_predictions_that_may_be_equal_a_setting_comes_before_a_line(tmp_path):
    def advice(action, gain, value=None):
        return {"action": action, "setting": None, "value": value, "predicted_speedup": gain, "because": "y"}

    wanted = [
        advice("without the line", 3.9),
        advice("workers", 3.8, "4"),
        advice("faster", 1.6),
        advice("less", 1.2, "2"),
    ]
    write(tmp_path, 0, line("stall_open", cause="checkpoint", opened="t1", advice=wanted))
    ranked = [each["action"] for each in summarize(load(tmp_path))["advice"] if each["predicted_speedup"]]
    assert ranked == ["workers", "without the line", "faster", "less"]


def test_a_gain_that_is_a_range_ranks_by_its_low_end_unless_a_setting_brings_it(tmp_path):
    def advice(action, gain, low=None, value=None):
        return {
            "action": action, "setting": None, "value": value, "predicted_speedup": gain, "predicted_low": low, "because": "y",
        }  # fmt: skip

    wanted = [advice("without the line", 34.8, 7.2), advice("less", 11.8), advice("workers", 9.0, 1.5, "4")]
    write(tmp_path, 0, line("stall_open", cause="gc_pause", opened="t1", advice=wanted))
    assert [each["action"] for each in summarize(load(tmp_path))["advice"]][:3] == [
        "less",
        "workers",
        "without the line",
    ]


def stalled(folder, rank, *stalls, wait=0.1):
    """A rank whose stalls have cost some seconds each."""
    lines = [
        line("stall_open", rank, cause=cause, opened=f"t{at}", first_step=5, evidence={"lost_seconds": {cause: lost}},
             advice=[dict(action="look there", setting=None, value=None, predicted_speedup=1.4, because="it is busy")])
        for at, (cause, lost) in enumerate(stalls)
    ]  # fmt: skip
    end = line("run_end", rank, **totals(wait=wait, compute=200, steps=100))
    write(folder, rank, line("run_start", rank, **START), *lines, end)


def test_the_slow_rank_is_named_before_those_that_wait_for_it(tmp_path):
    stalled(tmp_path, 0, ("straggler", 40.0))
    said = "Not starved, but rank 0 stalled. Cause: straggler. Do: look there (it is busy). Expect: 1.4 times"
    assert said in verdict(tmp_path)
    stalled(tmp_path, 1, ("checkpoint", 39.0))
    assert "rank 1 stalled. Cause: checkpoint. Do: look there" in verdict(tmp_path)
    assert "lost in stalls, over all ranks: straggler 40 s (9.9 %), checkpoint 39 s (9.7 %)" in text_of(load(tmp_path))


# -- a rank that is stuck, and a job that hangs ---------------------------------------------------------------------


def hang(rank: int = 0, second: int = 20, **fields) -> dict:
    told = dict(
        since="2026-01-01T00:00:00.000Z", verdict="ranks 0, 2-3 have waited; rank 1 is in a fetch", kind="fetch",
        suspects=[{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}], suspects_total=1,
        waiting=[{"ranks": [[0, 0], [2, 3]], "collective": "all_reduce", "sequence": 7}], silent_ranks=0,
    )  # fmt: skip
    return line("hang", rank, **told | {"time": f"2026-01-01T00:00:{second}.000Z"} | fields)


OVER = line("hang", kind="fetch", over=True, time="2026-01-01T00:00:30.000Z")
HANGS = {
    "it hangs": ([hang()], "hangs", "fetch"),
    "it is over": ([hang(), OVER], "healthy", None),
    "again": ([hang(), OVER, hang(second=40, kind="rank_gone")], "hangs", "rank_gone"),
    "the line that knows all ranks counts": ([hang(second=30), hang(second=40, silent_ranks=2, kind="x")], "hangs", "fetch"),
    "until its end": ([hang(), line("run_end", **totals(wait=1, compute=9, steps=100))], "hung", "fetch"),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_why_the_job_hangs_is_the_verdict(tmp_path, name):
    lines, state, kind = HANGS[name]
    write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 100, wait=1, compute=9, steps=100), *lines)
    found = judge(run_facts(load(tmp_path)))
    told = summarize(load(tmp_path))["hang"]
    assert (found.kind.value, told and told["kind"]) == (state, kind)
    begins = {"hangs": "Hangs: ranks 0, 2-3 have", "hung": "Hung before its end: ranks 0, 2-3", "healthy": "Healthy"}
    assert found.text.startswith(begins[state])
    if told:
        assert told["waiting"] == [{"ranks": [0, 2, 3], "collective": "all_reduce", "sequence": 7}]
        assert told["suspects"] == [{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}]


# -- memory that grows ----------------------------------------------------------------------------------------------

GROWS = {
    "growth_bytes_per_hour": 1_200_000_000,
    "where": "workers",
    "exhausted_in_seconds": 10_800.0,
    "exhausted": "memory",
    "advice": "a list is copied on write",
}
USED = {"wait": 1.0, "compute": 9.0, "steps": 10}


def growing(folder, ago: float, event="window", pid=None, **changes):
    """The log of a rank that wrote its newest line some seconds ago."""
    memory = {name: value for name, value in (GROWS | changes).items() if value is not None}
    began, newest = iso_time(time.time() - ago - 60), iso_time(time.time() - ago)
    resumed = {} if pid is None else {"resumption": {"resumed_step": 9, "resumed_from": "optimizer"}}
    last = window(**USED) | {"event": event, "time": newest, "memory": memory} | resumed
    write(folder, 0, line("run_start", started=began, world_size=1) | {"time": began}, last, pid=pid)


@pytest.mark.parametrize(
    ("exhausted", "where", "said"),
    [
        ("memory", "workers", "Node n runs out of memory in about 3 h: the workers of rank 0 grow 1.2 GB/h; a list"),
        (
            "shared_memory",
            "shared_memory",
            "/dev/shm of node n is full in about 3 h: /dev/shm of rank 0 grows 1.2 GB/h",
        ),
        ("cuda", "cuda", "The GPU of rank 0 runs out of memory in about 3 h: the tensors on the GPU of rank 0 grow"),
        ("memory", None, "Node n runs out of memory in about 3 h: memory outside of this run's processes grows 1.2"),
    ],
)
def test_what_is_used_up_is_named(tmp_path, exhausted, where, said):
    growing(tmp_path, 1, exhausted=exhausted, where=where)
    assert said in verdict(tmp_path)


def test_a_dead_run_and_one_that_was_restarted_still_say_what_grew(tmp_path):
    growing(tmp_path, 9000, exhausted_in_seconds=12.0)
    assert "When its log ends, memory was to run out in about 12 s: the workers of rank 0 grew" in verdict(tmp_path)
    growing(tmp_path, 1, pid=11, **dict.fromkeys(GROWS))
    assert "memory" not in verdict(tmp_path)
    assert "memory: the workers of rank 0 grew 1.2 GB/h" in text_of(load(tmp_path))
    assert [rank["memory"]["where"] for rank in summarize(load(tmp_path))["ranks"]] == ["workers", None]


def test_a_run_that_has_finished_runs_out_of_nothing(tmp_path):
    growing(tmp_path, 1, event="run_end")
    assert "memory" not in verdict(tmp_path)
    assert "memory: the workers of rank 0 grew" in text_of(load(tmp_path)), "how it grew is still of interest"


# -- snapshots -----------------------------------------------------------------------------------------------------


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
    taken = line("snapshot", result="recorded", reason="workers_io_bound", first_step=5, last_step=9, path=path)
    write(tmp_path, 0, line("run_start", **START), taken, line("run_end", **totals(wait=1.0, compute=9.0, steps=9)))
    assert report(str(tmp_path), as_json=True) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["snapshots"][0]["breakdown"] == {}
    assert report(str(tmp_path), as_json=False) == 0
    assert why in capsys.readouterr().out


def test_where_the_compute_goes_is_told(tmp_path):
    """Of two ranks together, and in the change of their steps the part that changed most."""
    figures = [
        dict(what="compute_seconds", before=0.1, after=0.13),
        dict(what="optimizer_seconds", before=0.01, after=0.04),
    ]
    changed = line("change", at="2026-01-01T00:00:08.000Z", first_step=5, ratio=1.3, part="compute")
    for rank, parts in enumerate([{"copy": 1.0, "forward": 3.0, "backward": 6.0}, {"forward": 2.0, "backward": 7.0}]):
        split = window(rank, wait=0.0, compute=10.0, steps=100) | dict(compute_total_seconds=parts)
        write(tmp_path, rank, line("run_start", rank, **START), changed | {"rank": rank, "with": figures}, split)
    text = text_of(load(tmp_path))
    assert "compute: copy 5.0 %, forward 25 %, backward 65 %, rest 5.0 %" in text
    assert "the optimizer takes 30.0 ms longer" in text
