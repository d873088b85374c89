"""The report reads what it can of logs that are damaged or hostile, and large logs quickly."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tracemalloc
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest

import telemetry
from benchmarks.simulated_run import SimulatedRun, write_run
from telemetry.config import Config
from telemetry.log import reader as logs
from telemetry.log.lines import KINDS, GpuLine, HostLine, WorkersLine
from telemetry.log.process import ProcessLog
from telemetry.log.reader import load
from telemetry.model.records import CATEGORIES
from telemetry.report.as_text import as_text
from telemetry.util.sketch import Sketch
from telemetry.util.words import show
from tests.report_logs import START, line, reported, summarize, text_of, window, write

JUNK = [None, True, -1, 1e300, 2.5, "", "\x1b]0;x\x07", [], [1], {}, {"a": "b"}, [[{}]], [None], {"p50": []}]
JUNK += ["0001-01-01T00:00:00", "9999-12-31T23:59:59.999Z", 1e15]

COMMON = dict(run="r", rank=0, local_rank=0, node="n", pid=10, tid=11, step=3, time="2026-01-01T00:00:10.000Z")
TOTALS = dict(
    steps_total=100, wall_seconds=11.0, exposed_wait_total_seconds=5.0, first_wait_seconds=0.5,
    ledger_total_seconds=dict.fromkeys(CATEGORIES, 0.0) | dict(startup=1.0, data_wait=5.0, compute=5.0),
    overhead_seconds=dict(training=1e-4, agent=0.01), stall_lost_total_seconds=dict(workers_cpu_bound=4.0),
)  # fmt: skip
STALL = dict(
    cause="workers_cpu_bound", opened="2026-01-01T00:00:05.000Z", first_step=5, last_step=20, exposed_wait_ratio=0.5,
    evidence=dict(lost_seconds=dict(workers_cpu_bound=2.0), worker_cpu_ratio=0.9, stuck_in="compute", stacks=["a\n b"]),
    advice=[dict(action="more", setting="num_workers", value="4", predicted_speedup=1.5, because="busy")],
)  # fmt: skip
SKETCHES = dict(
    step_sketch={"-100": 90, "-50": 10}, step_seconds=dict(p50=0.1, p95=0.2, p99=0.3, max=0.4),
    data_wait_sketch={"-110": 100}, data_wait_seconds=dict(p50=0.1, p95=0.2, p99=0.3, max=0.4),
)  # fmt: skip
RESUMPTION = dict(
    optimizers=1, restore_seconds=0.2, resumed_step=40, resumed_from="optimizer", resumed_at_optimizer_steps=0,
    replayed_batches=3, replay_seconds=0.3, replay_wait_seconds=0.1,
)  # fmt: skip
LINES = [
    dict(
        event="run_start", started="2026-01-01T00:00:00.000Z", settings=Config().as_log_fields(), life="ab", world_size=2,
        process_started="2025-12-31T23:59:58.000Z", launcher="torchrun", launch="x", restarts=0,
    ),
    dict(event="window") | TOTALS | SKETCHES,
    dict(event="stall_open") | STALL,
    dict(event="stall_close", closed="2026-01-01T00:00:09.000Z") | STALL,
    dict(event="stall_open") | STALL,
    dict(event="snapshot", path="snapshots/a/b", first_step=1, last_step=5, reason="stall"),
    dict(event="error", source="jsonl", message="no room", errors_total=2),
    dict(
        event="hang", since="2026-01-01T00:00:08.000Z", verdict="rank 1 is gone", kind="rank_gone", silent_ranks=1,
        suspects=[dict(rank=1, node="n", where="a.py:3", doing="compute")],
        waiting=[dict(ranks=[[0, 0], [2, 7]], collective="all_reduce", sequence=5)],
    ),
    dict(
        event="change", at="2026-01-01T00:00:08.000Z", first_step=5, ratio=1.5, part="compute",
        **{"with": [dict(what="compute_seconds", before=1.0, after=2.0)]},
    ),
    dict(
        event="phase", name="checkpoint", seconds=0.1, complete=True, holds_optimizer=True, optimizer_steps_total=90,
        steps_total=90, loop_seconds=dict(data_wait=4.0, compute=4.5),
    ),
    dict(event="window", optimizer_steps_total=100, resumption=RESUMPTION) | TOTALS | SKETCHES,
    dict(event="run_end", exception="ValueError", exit_status=3, lost_peer=False)
    | dict(resumption=RESUMPTION)
    | TOTALS,
]  # fmt: skip
BEAT = TOTALS | dict(
    life="ab", unix_seconds=1767225612.5, optimizer_steps_total=120, seconds_before=2.0, kept_seconds=8.5,
    saves_completed=1, wall_seconds=13.5, resumption=dict(optimizers=1, resumed_step=40),
)  # fmt: skip


def places(value, path=()):
    """Every place in a JSON value, as the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(value, path, junk):
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return changed


def write_lines(folder: Path, lines, rank: int = 0) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "logs" / f"rank-{rank}.{10 + rank}.jsonl").write_bytes(
        b"".join(msgspec.json.encode(COMMON | each) + b"\n" for each in lines)
    )


def whole_ranks(folder: Path, capsys) -> list[dict]:
    """The ranks of ``--json``, from a report that can be printed in both forms."""
    found = reported(load(folder))
    assert show(as_text(found)) == 0
    assert "\x1b" not in capsys.readouterr().out
    values = json.loads(msgspec.json.encode(found.values), parse_constant=lambda name: pytest.fail(name))
    return values["ranks"]


ALONE = {"run", "rank", "pid", "life"}
"""These fields decide which process a line belongs to. Of the others, each junk has a rank in one run."""


# Of the two windows and of the two stalls that open the later has what the earlier has.
@pytest.mark.parametrize(
    "number", [n for n in range(len(LINES)) if n not in {1, 2}], ids=lambda number: LINES[number]["event"]
)
def test_no_field_of_a_log_can_break_the_report(tmp_path, capsys, number):
    whole, alone, job = COMMON | LINES[number], tmp_path / "alone", tmp_path / "job"
    for path in places(whole):
        for at, junk in enumerate(JUNK):
            lines = [*LINES[:number], replaced(whole, path, junk), *LINES[number + 1 :]]
            if path[0] in ALONE:
                write_lines(alone, lines)
                whole_ranks(alone, capsys)
            else:
                lines = [each | {"rank": at, "pid": 10 + at} for each in lines]
                write_lines(job, [lines[0] | {"life": f"ab{at}"}, *lines[1:]], at)
        if path[0] in ALONE:
            continue
        ranks = whole_ranks(job, capsys)
        assert {rank["rank"] for rank in ranks} == {*range(len(JUNK))}, path
        for rank in ranks:
            assert abs(sum(rank["ledger"].values()) - rank["wall_seconds"]) <= 0.01 * rank["wall_seconds"] or (
                path[0] in {"wall_seconds", "ledger_total_seconds"}
            ), (path, rank)


def test_no_field_of_a_heartbeat_can_break_the_report(tmp_path, capsys):
    (tmp_path / "attempts").mkdir()
    beats = [replaced(BEAT, path, junk) for path in places(BEAT) for junk in [*JUNK, float("inf"), float("nan")]]
    contents = [json.dumps(beat).encode() for beat in (BEAT, *beats)]
    contents += [b"", b"[" * 100_000, b'{"life": "ab", "unix_seconds": 1' + b"0" * 5000 + b"}", b"\xff\x00" * 500]
    for rank, content in enumerate(contents):
        own = {"rank": rank, "pid": 10 + rank}
        write_lines(tmp_path, [LINES[0] | {"life": f"ab{rank}"} | own, *(each | own for each in LINES[1:-1])], rank)
        (tmp_path / "attempts" / f"ab{rank}.beat").write_bytes(content.replace(b'"ab"', f'"ab{rank}"'.encode()))
    ranks = whole_ranks(tmp_path, capsys)
    assert len(ranks) == len(contents)
    assert ranks[0]["steps"] == 100


def test_a_damaged_line_is_skipped_whole_and_counted(tmp_path):
    damaged = [
        LINES[-1] | {"ledger_total_seconds": {"data_wait": "much"}},
        dict(event="stall_open") | STALL | {"cause": "unknown", "evidence": {"lines": [{"file": 7}]}},
    ]
    write_lines(tmp_path, [*LINES[:-1], *damaged, dict(event="of_a_newer_version", cause=7)])
    report = summarize(load(tmp_path))
    assert report["ranks"][0]["ledger"]["data_wait"] == 5.0
    assert {stall["cause"] for stall in report["stalls"]} == {"workers_cpu_bound"}
    assert "2 line(s) of its log are damaged and were skipped" in text_of(load(tmp_path))


def test_what_the_agent_writes_is_of_the_types_of_the_records(agent):
    """A field that is renamed, or changes its type, must not vanish from the report."""
    import torch

    for _ in torch.utils.data.DataLoader(range(8), batch_size=2):
        pass
    run_dir = agent.run_dir
    telemetry.stop()
    (process,) = load(run_dir)
    assert process.damaged_lines == 0
    (log,) = (run_dir / "logs").iterdir()
    lines = [json.loads(raw) for raw in log.read_text().splitlines()]
    for each in lines:
        names = {*KINDS[each["event"]].__struct_encode_fields__, "event"}
        assert each.keys() <= names or each["event"] in {"gpu", "host", "workers"}, each["event"]
    assert {"run_start", "window", "run_end"} <= {each["event"] for each in lines}
    may_be_absent = {"memory", "resumption", "exit_status", "exception", "lost_peer", "stuck_for_seconds"}
    may_be_absent |= {
        "compute_total_seconds",
        "stuck_total_seconds",
        "environment",
        "loader",
        "step_trend",
        "estimated_steps_total",
        "exception_at",
        "failure",
        "shared_memory_bytes",
        "gpu_memory",
    }
    assert {*KINDS["run_end"].__struct_fields__} - lines[-1].keys() <= may_be_absent


def test_the_fields_of_samples_that_are_read_are_written(tmp_path):
    write_run(tmp_path, SimulatedRun(ranks=1, seconds=20))  # its lines have the fields of real ones, see test_log.py
    (log,) = (tmp_path / "logs").iterdir()
    lines = {each["event"]: each for each in map(json.loads, log.read_text().splitlines())}
    for kind in (GpuLine, HostLine, WorkersLine):
        of_several = {"wait_measured"}
        assert {*kind.__struct_fields__} - of_several <= lines[kind.__struct_config__.tag].keys()


@pytest.mark.parametrize("name", ["logs/rank-1.11.jsonl", "attempts/ab.beat"])
def test_a_link_to_a_device_without_an_end_is_not_read(tmp_path, name):
    write_lines(tmp_path, LINES[:-1])
    (tmp_path / "attempts").mkdir()
    (tmp_path / name).symlink_to("/dev/zero")
    limited = 'ulimit -v 1000000; exec "$0" -m telemetry report "$1"'
    done = subprocess.run(
        ["sh", "-c", limited, sys.executable, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("ratio", "starved"), [(0.6, False), (0.4, True), (None, True)])
def test_the_verdict_uses_the_threshold_of_the_run(tmp_path, ratio, starved):
    settings = {} if ratio is None else dict(settings=dict(stall_enter_ratio=ratio))
    write_lines(tmp_path, [LINES[0] | {"settings": None} | settings, LINES[1], LINES[-1]])
    assert ("Starved: rank 0" in summarize(load(tmp_path))["verdict"]) is starved


def test_a_rotated_log_still_knows_its_threshold(tmp_path):
    agent = telemetry.start(
        tmp_path, port=None, stall_enter_ratio=0.35, log_max_bytes=65536, log_max_files=1, start_line=False
    )
    for _ in range(100):
        agent.event_log.emit("error", {"source": "test", "message": "x" * 1000})
    telemetry.stop()
    (process,) = load(tmp_path)
    assert process.head.continued
    assert process.head.settings.stall_enter_ratio == 0.35


def test_a_sparse_file_without_a_line_break_is_not_read_into_memory(tmp_path):
    log = write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9))
    os.truncate(log, 128 << 20)
    tracemalloc.start()
    try:
        (process,) = load(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (process.damaged_lines, process.totals.steps_total) == (1, 9)
    assert peak < 64 << 20


# -- large logs --------------------------------------------------------------------------------------------------------

FILES, WINDOWS = 3, 60


def time_at(seconds: float) -> str:
    stamp = datetime.fromtimestamp(1_767_225_600 + seconds, tz=timezone.utc)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@pytest.fixture
def rotated_log(tmp_path, monkeypatch):
    """Three files of one process, which count as large. Each window has one step, each head the sums before it."""
    monkeypatch.setattr(logs, "_THINNED_BYTES", 0)
    sums, number = Sketch(), 0
    for file in range(FILES):
        head = line("run_start", started=time_at(0), life="a", continued=file > 0) | {"time": time_at(10 * number)}
        if file:
            head |= {"step_sketch": sums.as_log_field(), "step_max_seconds": sums.largest}
        lines = [head]
        for _ in range(WINDOWS):
            number += 1
            seconds = 0.1 + number / 1000
            sums.add([seconds])
            lines.append(window(seconds=(seconds,), wait=1.0 * number, compute=9.0 * number, steps=number))
            lines[-1] |= {"time": time_at(10 * number)}
            if number in {30, 90, 150}:
                lines.append(line("stall_open", cause="unknown") | {"time": time_at(10 * number)})
        write(tmp_path, 0, *lines, suffix=f".{FILES - 1 - file}" if file < FILES - 1 else "")
    return tmp_path


def told(process: ProcessLog) -> dict:
    sums = {"step": process.step.as_log_field(), "largest": process.step.largest, "totals": process.totals}
    return sums | {"stalls": process.stalls, "last": process.last_time, "head": process.head}


def windows_read(monkeypatch) -> list[bytes]:
    seen: list[bytes] = []
    decode = logs.decoded

    def noting(raw: bytes):
        seen.append(raw)
        return decode(raw)

    monkeypatch.setattr(logs, "decoded", noting)
    return seen


def test_of_large_files_that_were_rotated_away_some_windows_are_read_and_nothing_is_lost(rotated_log, monkeypatch):
    (whole,) = load(rotated_log, all_windows=True)
    seen = windows_read(monkeypatch)
    (thinned,) = load(rotated_log)
    assert told(thinned) == told(whole)
    assert len(thinned.stalls) == 3
    assert sum(b'"window"' in raw for raw in seen) == WINDOWS + 2 * (WINDOWS // 8 + 1)


def test_the_last_window_before_a_rotation_counts(rotated_log):
    """The process may have been killed, or the report may come, before there is a window in the new file."""
    newest = rotated_log / "logs" / "rank-0.10.jsonl"
    newest.write_text(newest.read_text().splitlines(keepends=True)[0])
    (whole,) = load(rotated_log, all_windows=True)
    (thinned,) = load(rotated_log)
    assert told(thinned) == told(whole)
    assert thinned.totals.steps_total == 2 * WINDOWS
