"""`telemetry top` reads a run folder: only what is new, through rotation and damage, and never writes."""

from __future__ import annotations

import os

import pytest
from top_runs import NOW, Run, dumped, iso, log_line, stall, start, window

from telemetry.log.lines import RunStartLine
from telemetry.log.tail import LAST_BYTES, LogTail
from telemetry.report.summary import read_report
from telemetry.top import run_folder
from telemetry.top.run_folder import RunFolder
from telemetry.top.view import State


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


@pytest.mark.parametrize(("delay", "told"), [(40.0, True), (5.0, False)])
def test_cores_that_are_missing_now_are_told_first(run, delay, told):
    """An hour ago it was calm."""
    cpu = dict(used=3600.0, others=100.0, known=3600.0, thread=3600.0, thread_delay=10.0)
    crowded = {name: seconds + 60.0 for name, seconds in cpu.items()} | {"thread_delay": 10.0 + delay}
    run.add(start(NOW - 3660), window(NOW - 61, 3600, steps=3600, wait=1.0, cpu_total_seconds=cpu))
    run.add(window(NOW - 1, 3660, steps=3620, wait=1.0, cpu_total_seconds=crowded))
    view = run.view()
    lacks = "the training thread is ready to run and has no core for 67 % of the time: other processes use 1.0 core"
    assert (lacks in view.verdict, view.verdict.startswith("Healthy")) == (told, not told)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    view = RunFolder(tmp_path / "none").poll()
    assert "Waiting for the run to begin" in view.verdict
    assert not view.rows
    assert not (tmp_path / "none").exists()


def test_a_healthy_rank(run):
    run.add(start(NOW - 100), *(window(NOW - 100 + s, s, steps=s, wait=0.01 * s) for s in range(10, 31, 10)))
    run.add(window(NOW - 1, 100, steps=300, wait=2.0))
    row = run.row()
    assert (row.state, row.node, row.totals.steps_total) == (State.OK, "n1", 300)
    assert run.view().verdict.startswith("Healthy")
    assert row.per_second("steps") == pytest.approx(270 / 70)


def test_the_verdict_is_of_the_last_minute(run):
    """A run that starved yesterday and is all right now is all right."""
    run.add(start(NOW - 1000), *(window(NOW - 1000 + s, s, steps=s, wait=min(800.0, s)) for s in range(800, 1000, 10)))
    assert run.view().verdict.startswith("Healthy")


def test_a_stall_names_rank_node_cause_and_advice(run):
    for rank, node, wait in ((0, "n1", 0.5), (1, "n2", 60.0)):
        run.add(
            start(NOW - 100, rank, node, world_size=2), window(NOW - 1, 99, rank, node, steps=99, wait=wait), rank=rank
        )
    run.add(stall(NOW - 30, "workers_cpu_bound", 1, "n2"), rank=1)
    view = run.view()
    assert view.verdict.startswith("Starved: rank 1 spent 61 % of its training loop waiting for data")
    assert "  do:     set num_workers=8: use more workers\n  expect: 1.9 times" in view.verdict
    assert view.level == "bad"
    assert {row.rank: row.finding for row in view.rows} == {0: "ok", 1: "workers_cpu_bound"}
    run.add(log_line("stall_close", NOW, 1, "n2"), rank=1)
    assert run.row(1).finding == "waits for data"
    assert run.row(1).stalls[-1].closed == iso(run.now)


def test_of_a_long_log_the_head_and_the_end_are_read(tmp_path):
    path = tmp_path / "rank-0.10.jsonl"
    path.write_bytes(dumped(start(NOW), *(window(NOW + s, s, steps=s) for s in range(2000))))
    assert path.stat().st_size > 5 * LAST_BYTES
    tail = LogTail(path)
    first, *lines = tail.read()
    assert isinstance(first, RunStartLine)
    assert lines[-1].steps_total == 1999
    assert len(lines) < 2000 * 2 * LAST_BYTES / path.stat().st_size
    assert not tail.from_start


def losing(s: float, filler: int = 500) -> dict:
    """A window of a run that lost half of its time since ``NOW - 2999``."""
    lost = {"stall_lost_total_seconds": {"workers_io_bound": 0.5 * s}, "filler": "x" * filler}
    return window(NOW - 2999 + s, s + 1, steps=s, wait=0.5 * s, **lost)


@pytest.mark.parametrize("cut", [-1, 0, 1, 100, "all"])
def test_an_open_stall_that_the_part_read_first_cuts_is_found(run, cut):
    """``cut``: so many bytes of its line are before that part; for -1 a byte of the line before is in it."""
    opened = dumped(stall(NOW - 2999, "workers_io_bound"))
    after = dumped(*(losing(s) for s in range(0, 600, 10)))
    cut = len(opened) if cut == "all" else cut
    rest = LAST_BYTES - (len(opened) - cut) - len(after) - len(dumped(losing(600, 0)))
    run.add(start(NOW - 3000), *(window(NOW - 2999, 1, steps=0, filler="x" * 500) for _ in range(9)))
    run.log().write_bytes(run.log().read_bytes() + opened + after + dumped(losing(600, rest)))
    run.now = NOW - 2999 + 601
    assert run.row().finding == "workers_io_bound"


def test_an_open_stall_whose_lines_of_code_alone_were_read_is_found(run):
    run.add(start(NOW - 3000), stall(NOW - 2999, "workers_io_bound"), *map(losing, range(0, 2900, 10)))
    lines = stall(NOW - 2999, "workers_io_bound") | {"event": "stall_lines"}
    run.add({name: lines[name] for name in lines if name != "advice"}, losing(2990))
    assert run.row().finding == "workers_io_bound"
    assert run.row().stalls[-1].advice[0].value == "8"


def test_a_stall_that_has_been_open_for_hours_is_found(run):
    """Its first line is too far back to be looked for, or is one of too many that were read."""
    run.add(start(NOW - 3000), stall(NOW - 2999, "workers_io_bound"))
    lines = stall(NOW - 2999, "workers_io_bound") | {"event": "stall_lines", "opened": iso(NOW - 2999)}
    for s in range(0, 2990, 60):
        run.add(losing(s, 70_000), lines)
    run.add(losing(2990))
    assert run.log().stat().st_size > 3 << 20
    assert run.row().finding == "workers_io_bound"
    assert run.row().stalls[-1].opened == iso(NOW - 2999)
    assert "workers_io_bound" in run.view().verdict
    for _ in range(50):
        run.add(lines)
    assert run.row().finding == "workers_io_bound"
    assert len(run.row().life.log.stalls) == 40


def test_a_torn_last_line_waits_for_its_end(run):
    whole = dumped(window(NOW, 110, steps=11))
    run.add(start(NOW - 100), window(NOW - 1, 99, steps=9))
    with open(run.log(), "ab") as file:
        file.write(whole[:40])
    assert run.row().totals.steps_total == 9
    with open(run.log(), "ab") as file:
        file.write(whole[40:])
    assert run.row().totals.steps_total == 11


def test_a_rotated_log_is_followed_without_a_gap(run):
    run.add(start(NOW - 100), window(NOW - 1, 99, steps=9))
    run.view()
    run.add(stall(NOW, "gc_pause"))  # not read before the rotation
    os.rename(run.log(), f"{run.log()}.1")
    run.add(start(NOW - 100, continued=True), window(NOW + 9, 109, steps=19))
    row = run.row()
    assert (row.totals.steps_total, row.finding) == (19, "gc_pause")


def test_a_log_that_disappears_keeps_what_was_read(run):
    run.add(start(NOW - 100), window(NOW - 1, 99, steps=9))
    run.view()
    run.log().unlink()
    assert run.row().totals.steps_total == 9


def test_a_fifo_and_damaged_lines_do_no_harm(run):
    os.mkfifo(run.log(7))
    run.add(start(NOW - 100), window(NOW - 1, 99, steps=9))
    with open(run.log(), "ab") as file:
        file.write(b'\xff\x00{"event": 5}\n[1]\n{"event":"window","wall_seconds":"x","steps_total":1e300}\n')
    assert run.row().totals.steps_total == 9


def test_a_heartbeat_is_newer_than_the_log(run):
    run.add(start(NOW - 100), window(NOW - 9, 91, steps=91))
    run.beat("a0", unix_seconds=NOW - 1, wall_seconds=99.0, steps_total=99, ledger_total_seconds={"compute": 99.0})
    assert run.row().totals.steps_total == 99
    run.beat("a0", unix_seconds=NOW, wall_seconds=100.0, steps_total=99,
             ledger_total_seconds={"compute": 99.0, "checkpoint": 1.0})  # fmt: skip
    assert run.row().now_in == "checkpoint"


def test_a_rank_without_a_sign_of_life(run):
    run.add(start(NOW - 100, world_size=2), window(NOW - 20, 80, steps=80))
    run.add(start(NOW - 100, 1, world_size=2), window(NOW - 1, 99, 1, steps=99), rank=1)
    assert run.row().finding == "silent for 20 s"
    run.now += 60
    run.add(window(NOW + 59, 159, 1, steps=159), rank=1)
    view = run.view()
    rows = {row.rank: row for row in view.rows}
    assert (rows[0].state, rows[0].since, rows[1].state) == (State.GONE, NOW - 20, State.OK)
    assert view.verdict.startswith("Killed: rank 0 did not end by itself.")


def test_the_stall_of_a_rank_that_was_killed_is_over(run):
    run.add_rank(0, stall(NOW - 150, "worker_stuck", evidence={"stuck_in": "data_wait"}), ago=120)
    run.add_rank(1)
    assert run.view().verdict.startswith("Killed: rank 0 did not end by itself.")


def test_a_minute_of_long_steps_without_a_wait_is_measured(run):
    run.add(start(NOW - 2000), *(window(NOW - 2000 + s, s, steps=s // 30, wait=5.0) for s in range(30, 2001, 10)))
    run.now = NOW
    assert run.view().verdict.startswith("Healthy")


def test_a_clock_that_is_behind_makes_no_rank_gone(run):
    """Its stamps are five minutes old, but its files change."""
    run.add(start(NOW - 400), window(NOW - 310, 90, steps=90))
    run.view()
    run.now += 1
    run.add(window(NOW - 299, 101, steps=101))
    assert run.row().state == State.OK


def ended(run, *found: dict, exit_status: int = 0):
    """A rank of a long run: what is found at its begin, so many windows that only their end is followed, and its end."""
    totals = {"steps_total": 1000, "exposed_wait_total_seconds": 1.0, "wall_seconds": 3000.0,
              "ledger_total_seconds": {"data_wait": 1.0, "compute": 2990.0}}  # fmt: skip
    windows = [window(NOW - 3000 + s, s, steps=s, filler="x" * 500) for s in range(10, 2900, 10)]
    run.add(start(NOW - 3000), *found, *windows, log_line("run_end", NOW - 50, exit_status=exit_status, **totals))
    assert run.log().stat().st_size > 2 * LAST_BYTES


def test_the_verdict_on_an_ended_run_is_the_reports(run):
    over = log_line("stall_close", NOW - 2800, cause="gc_pause", opened=iso(NOW - 2900), closed=iso(NOW - 2800),
                    evidence={"lost_seconds": {"gc_pause": 90.0}}, advice=[])  # fmt: skip
    ended(run, stall(NOW - 2900, "gc_pause"), over)
    said = "\n".join(read_report(run.path).verdict.lines)
    assert "rank 0 stalled" in said
    assert run.view().verdict.endswith(said)
    assert run.view().level == "bad"


def test_a_run_whose_waits_were_not_measured_is_not_good(run):
    totals = {"steps_total": 9, "wall_seconds": 99.0, "ledger_total_seconds": {"data_wait": 1.0, "compute": 90.0}}
    run.add(start(NOW - 100), log_line("run_end", NOW - 50, **totals))
    view = run.view()
    assert not view.running
    assert view.verdict.startswith("The run has ended: the rank has finished, at")
    assert "was not measured" in view.verdict
    assert view.level == "unknown"


def test_the_whole_logs_of_an_ended_run_are_read_once(run, monkeypatch):
    ended(run)
    read = []
    monkeypatch.setattr(run_folder, "read_report", lambda path, **how: read.append(path) or read_report(path, **how))
    for _ in range(3):
        assert run.view(6.0).level == "good"
    assert len(read) == 1


def test_a_rank_that_failed_is_named_before_those_that_lost_it(run):
    for rank, ago, end in ((0, 48, {"lost_peer": True}), (1, 50, {"lost_peer": False})):
        run.add(start(NOW - 100, rank), window(NOW - 60, 40, rank, steps=40),
                log_line("run_end", NOW - ago, rank, exception=f"Error{rank}", **end), rank=rank)  # fmt: skip
    assert run.view().verdict.startswith("The run has ended. Failed on rank 1: Error1.")


def test_a_later_attempt_replaces_the_one_before(run):
    run.add(start(NOW - 1000), window(NOW - 900, 100, steps=100), pid=77)
    run.add(start(NOW - 100) | {"life": "b0"}, window(NOW - 1, 99, steps=9))
    assert [row.totals.steps_total for row in run.view().rows] == [9]


def test_a_hang_blames_the_rank_that_is_waited_for(run):
    for rank in range(2):
        run.add(start(NOW - 100, rank), window(NOW - 1, 99, rank, steps=9), rank=rank)
    run.add(log_line("hang", NOW - 1, verdict="rank 1 on n1 is in a fetch; rank 0 waits", kind="fetch", silent_ranks=0,
                     suspects=[{"rank": 1, "node": "n1", "doing": "in a fetch"}],
                     waiting=[{"ranks": [[0, 0]], "collective": "all_reduce", "sequence": 7}]))  # fmt: skip
    view = run.view()
    assert view.verdict == "Hangs: rank 1 on n1 is in a fetch; rank 0 waits."
    assert {row.rank: row.finding for row in view.rows} == {0: "waits for others", 1: "held up: in a fetch"}


def test_ranks_without_a_log_are_named(run):
    run.add(start(NOW - 100, world_size=4), window(NOW - 1, 99, steps=9))
    assert run.view().note == "nothing is known of ranks 1-3: the job has 4 ranks"


def test_nothing_is_written_to_the_run_folder(run):
    run.add(start(NOW - 100), window(NOW - 1, 99, steps=9))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    for _ in range(3):
        run.view(6.0)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


def test_the_memory_of_the_machine_is_not_that_of_the_gpu(run):
    run.add(
        start(NOW - 3),
        log_line("gpu", NOW - 2, memory_used_bytes=1, memory_total_bytes=2, wait_measured=True),
        log_line("gpu", NOW - 2, memory_used_bytes=7, memory_total_bytes=8, wait_measured=False),
        log_line("host", NOW - 1, memory_used_bytes=30, memory_total_bytes=40, process_resident_memory_bytes=5),
    )
    row = run.row()
    assert (row.gpu.memory_used_bytes, row.gpu.memory_total_bytes) == (1, 2)
    assert row.host.process_resident_memory_bytes == 5
