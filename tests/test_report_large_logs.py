"""A report of large logs skips windows whose sums come later, and reads with several processes. It says the same."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry.records import CATEGORIES
from telemetry.report import log_reader, parallel_reading
from telemetry.report.log_reader import load
from telemetry.report.process_log import ProcessLog
from telemetry.util.sketch import Sketch
from tests.report_logs import line, window, write

pytest.importorskip("bokeh")  # what draws the page

from telemetry.report.html import run_recorder
from telemetry.report.html.run_recorder import RunRecorder

FILES, WINDOWS = 3, 60


def time_at(seconds: float) -> str:
    stamp = datetime.fromtimestamp(1_767_225_600 + seconds, tz=timezone.utc)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rotated_log(folder, rank: int, life: str, *, pid: int | None = None) -> None:
    """Three files of one process. Each window has one step of its own length; the heads have the sums before them."""
    sums, number = Sketch(), 0
    for file in range(FILES):
        head = line("run_start", rank, started=time_at(0), life=life, continued=file > 0) | {
            "time": time_at(10 * number)
        }
        if file:
            sketch = {"step_sketch": sums.as_log_field(), "step_max_seconds": sums.largest}
            head |= sketch | {"data_wait_sketch": {}, "data_wait_max_seconds": 0.0}
        lines = [head]
        for _ in range(WINDOWS):
            number += 1
            seconds = 0.1 + number / 1000 + rank
            sums.add([seconds])
            lines.append(window(rank, seconds=(seconds,), wait=1.0 * number, compute=9.0 * number, steps=number))
            lines[-1] |= {"time": time_at(10 * number), "life": life}
            if number in {30, 90, 150}:
                lines.append(line("stall_open", rank, cause="unknown", life=life) | {"time": time_at(10 * number)})
        suffix = f".{FILES - 1 - file}" if file < FILES - 1 else ""
        write(folder, rank, *lines, pid=pid, suffix=suffix)


def told(process: ProcessLog) -> dict:
    sums = {"step": process.step.as_log_field(), "largest": process.step.largest, "totals": process.totals}
    return sums | {"stalls": process.stalls, "last": process.last_time, "rank": process.rank, "head": process.head}


def parsed_lines(monkeypatch) -> list[dict]:
    seen: list[dict] = []
    parse = log_reader.read_one_by_one.__globals__["read_log"].__globals__["parsed"]

    def noting(raw: bytes):
        found = parse(raw)
        seen.append(found[0])
        return found

    monkeypatch.setattr("telemetry.report.line_selection.parsed", noting)
    return seen


def test_windows_of_rotated_files_are_skipped_and_nothing_is_lost(tmp_path, monkeypatch):
    rotated_log(tmp_path, 0, "a")
    (whole,) = load(tmp_path, all_windows=True)
    seen = parsed_lines(monkeypatch)
    (thinned,) = load(tmp_path)
    assert told(thinned) == told(whole)
    assert len(thinned.stalls) == 3
    windows = sum(each["event"] == "window" for each in seen)
    assert WINDOWS < windows < WINDOWS + 10, "those of the newest file, and a few of the older ones"


def test_the_last_window_before_a_rotation_counts(tmp_path):
    """The process may have been killed, or the report may come, before there is a window in the new file."""
    rotated_log(tmp_path, 0, "a")
    newest = tmp_path / "logs" / "rank-0.10.jsonl"
    newest.write_text(newest.read_text().splitlines(keepends=True)[0])
    (whole,) = load(tmp_path, all_windows=True)
    (thinned,) = load(tmp_path)
    assert told(thinned) == told(whole)


@pytest.fixture
def side_by_side(monkeypatch):
    """However small the logs are; the processes that read."""
    used: list[int] = []
    pool = parallel_reading.ProcessPoolExecutor

    def noting(workers, context):
        used.append(workers)
        return pool(workers, context)

    monkeypatch.setattr(parallel_reading, "_MIN_BYTES", 0)
    monkeypatch.setattr(parallel_reading.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(parallel_reading, "ProcessPoolExecutor", noting)
    return used


def test_several_processes_read_the_same(tmp_path, side_by_side):
    for rank in range(5):
        rotated_log(tmp_path, rank, f"life{rank}")
    alone = load(tmp_path)
    assert not side_by_side
    assert [told(each) for each in load(tmp_path, side_by_side=True)] == [told(each) for each in alone]
    assert side_by_side == [3]


def test_a_process_that_got_another_rank_stays_one(tmp_path, side_by_side):
    for rank in range(3):
        rotated_log(tmp_path, rank, f"life{rank}")
    before = dict(started=time_at(0), life="life2", claimed_rank=0)
    early = window(7, seconds=(9.0,), wait=0.1, compute=0.9, steps=0) | {"time": time_at(1), "life": "life2"}
    write(tmp_path, 7, line("run_start", 7, **before), early, pid=12)
    alone, together = load(tmp_path), load(tmp_path, side_by_side=True)
    assert side_by_side == [3]
    assert len(together) == 3
    assert sorted(map(str, map(told, together))) == sorted(map(str, map(told, alone)))


def test_a_life_that_the_heads_do_not_tell_is_read_once_more(tmp_path, side_by_side):
    start = line("run_start", 0, started=time_at(0), life="x")
    other = line("run_start", 1, started=time_at(5), life="y")
    again = line("run_start", 1, started=time_at(0), life="x", continued=True)
    write(tmp_path, 0, start, window(0, seconds=(1.0,), wait=1.0, compute=1.0, steps=1))
    write(tmp_path, 1, other, again, window(1, seconds=(2.0,), wait=2.0, compute=2.0, steps=2))
    assert [told(p) for p in load(tmp_path, side_by_side=True)] == [told(p) for p in load(tmp_path)]
    assert side_by_side == [2]


def test_small_logs_are_read_by_one_process(tmp_path, monkeypatch):
    for rank in range(2):
        rotated_log(tmp_path, rank, f"life{rank}")
    monkeypatch.setattr(parallel_reading, "ProcessPoolExecutor", None)
    assert len(load(tmp_path, side_by_side=True)) == 2


def test_where_no_process_can_be_started_it_reads_alone(tmp_path, side_by_side, monkeypatch):
    for rank in range(2):
        rotated_log(tmp_path, rank, f"life{rank}")

    def refused(*_args):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(parallel_reading, "ProcessPoolExecutor", refused)
    assert len(load(tmp_path, side_by_side=True)) == 2


def recorded(recorder: RunRecorder) -> tuple[dict, dict]:
    """What a recorder has for the page: sums by name, rank and time bin; and all else."""
    recorder.finish()
    grid = recorder.grid
    sums = {
        (name, rank, at): value
        for name in sorted(grid._arrays)
        for (_, rank), row in recorder.rows.items()
        for at, value in zip(grid.begins(), grid.sums(name)[row], strict=True)
    }
    sketches = {name: [s and s.as_log_field() for s in grid.sketches(name)] for name in ("step", "wait")}
    phases = {kind: [*phases] for kind, phases in recorder.phases.items()}
    return sums, {"sketches": sketches, "phases": phases, "seen": recorder.phases_seen, "cut": recorder.cut}


def test_several_processes_see_the_same_figures_for_the_page(tmp_path, side_by_side):
    write_run(tmp_path, SimulatedRun(ranks=5, seconds=3000))
    alone, together = RunRecorder(), RunRecorder()
    load(tmp_path, alone)
    assert not side_by_side
    load(tmp_path, together, side_by_side=True)
    assert side_by_side == [3]
    (sums, rest), (expected_sums, expected) = recorded(together), recorded(alone)
    assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-3)
    assert len(sums) > 5 * 200
    assert rest == expected


def test_nothing_is_lost_where_several_processes_leave_windows_out(tmp_path, side_by_side, monkeypatch):
    monkeypatch.setattr(run_recorder, "_MAX_BINS", 64)
    write_run(tmp_path, SimulatedRun(ranks=5, seconds=9000))
    for path in (tmp_path / "logs").iterdir():  # killed: no later line has the sums of a window that is left out
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    together = RunRecorder()
    load(tmp_path, together, side_by_side=True)
    assert side_by_side == [3]
    sums, rest = recorded(together)
    assert together.grid.width_seconds > 10
    for rank in range(5):
        ledger = [sums[key] for key in sums if key[1] == rank and key[0] in CATEGORIES]
        assert sum(ledger) == pytest.approx(9000, rel=1e-3)
    assert {phase.name for kind in rest["phases"].values() for phase in kind} == {"evaluation", "checkpoint"}


def test_the_evaluations_of_both_attempts_of_a_rank_are_marked(tmp_path, side_by_side):
    for attempt, pid in enumerate((12, 11)):
        phases = [
            line("phase", 0, category="evaluation", started=time_at(100 * attempt + at), seconds=1.0) for at in range(3)
        ]
        write(
            tmp_path, 0, line("run_start", 0, started=time_at(100 * attempt), life=f"life{attempt}"), *phases, pid=pid
        )
    write(tmp_path, 1, line("run_start", 1, started=time_at(0), life="other"), phases[0] | {"rank": 1})
    recorder = RunRecorder()
    load(tmp_path, recorder, side_by_side=True)
    assert side_by_side == [3]
    begins = [phase.begin - 1_767_225_600 for phase in recorder.phases["evaluation"]]
    assert begins == [0, 1, 2, 100, 101, 102]
    assert recorder.phases_seen == {"evaluation": 6}


def test_the_page_is_made_where_no_process_can_be_started(tmp_path, side_by_side, monkeypatch):
    for rank in range(2):
        rotated_log(tmp_path, rank, f"life{rank}")
    monkeypatch.setattr(parallel_reading, "ProcessPoolExecutor", None)
    monkeypatch.setattr(parallel_reading, "_MIN_BYTES", 1 << 40)
    expected = RunRecorder()
    load(tmp_path, expected)

    def refused(*_args):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(parallel_reading, "ProcessPoolExecutor", refused)
    monkeypatch.setattr(parallel_reading, "_MIN_BYTES", 0)
    recorder = RunRecorder()
    load(tmp_path, recorder, side_by_side=True)
    assert recorded(recorder) == recorded(expected)
