"""The report reads what it can of logs that are damaged, hostile or no files at all."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import orjson
import pytest

import telemetry
from telemetry.config import Config
from telemetry.records import CATEGORIES
from telemetry.report.command import report
from telemetry.report.log_reader import load
from telemetry.report.log_schema import FIELDS
from telemetry.report.summary import summarize
from tests.report_logs import START, line, window
from tests.report_logs import write as write_log

JUNK = [None, True, -1, 1e300, 2.5, "", "\x1b]0;x\x07", [], [1], {}, {"a": "b"}, [[{}]], [None], {"p50": []}]
JUNK += ["0001-01-01T00:00:00", "9999-12-31T23:59:59.999Z", 1e15]

COMMON = dict(run="r", rank=0, local_rank=0, node="n", pid=10, tid=11, step=3, time="2026-01-01T00:00:10.000Z")
TOTALS = dict(
    steps_total=100,
    wall_seconds=11.0,
    ledger_total_seconds=dict.fromkeys(CATEGORIES, 0.0) | dict(startup=1.0, data_wait=5.0, compute=5.0),
    exposed_wait_total_seconds=5.0,
    first_wait_seconds=0.5,
    overhead_seconds=dict(training=1e-4, agent=0.01),
    stall_lost_total_seconds=dict(workers_cpu_bound=4.0),
)
STALL = dict(
    cause="workers_cpu_bound",
    opened="2026-01-01T00:00:05.000Z",
    first_step=5,
    last_step=20,
    exposed_wait_ratio=0.5,
    evidence=dict(lost_seconds=dict(workers_cpu_bound=2.0), worker_cpu_ratio=0.9, stuck_in="compute", stacks=["a\n b"]),
    advice=[dict(action="more", setting="num_workers", value=4, predicted_speedup=1.5, because="busy")],
)
SKETCHES = dict(
    step_sketch={"-100": 90, "-50": 10}, step_seconds=dict(p50=0.1, p95=0.2, p99=0.3, max=0.4),
    data_wait_sketch={"-110": 100}, data_wait_seconds=dict(p50=0.1, p95=0.2, p99=0.3, max=0.4),
)  # fmt: skip
RESUMPTION = dict(
    optimizers=1,
    restore_seconds=0.2,
    resumed_step=40,
    resumed_from="optimizer",
    resumed_at_optimizer_steps=0,
    replayed_batches=3,
    replay_seconds=0.3,
    replay_wait_seconds=0.1,
)
LINES = [
    dict(
        event="run_start",
        started="2026-01-01T00:00:00.000Z",
        settings=Config().as_log_fields(),
        life="ab",
        world_size=2,
        process_started="2025-12-31T23:59:58.000Z",
        launcher="torchrun",
        launch="x",
        restarts=0,
    ),
    dict(event="window") | TOTALS | SKETCHES,
    dict(event="stall_open") | STALL,
    dict(event="stall_close", closed="2026-01-01T00:00:09.000Z") | STALL,
    dict(event="stall_open") | STALL,
    dict(event="snapshot", path="snapshots/a/b", first_step=1, last_step=5, reason="stall", breakdown=dict(Kernel=0.5)),
    dict(event="error", source="jsonl", message="no room", errors_total=2),
    dict(
        event="hang",
        since="2026-01-01T00:00:08.000Z",
        verdict="rank 1 is gone",
        kind="rank_gone",
        silent_ranks=1,
        suspects=[dict(rank=1, node="n", where="a.py:3", doing="compute")],
        waiting=[dict(ranks=[[0, 0], [2, 7]], collective="all_reduce", sequence=5)],
    ),
    dict(
        event="phase",
        name="checkpoint",
        seconds=0.1,
        complete=True,
        holds_optimizer=True,
        optimizer_steps_total=90,
        steps_total=90,
        loop_seconds=dict(data_wait=4.0, compute=4.5),
    ),
    dict(event="window", optimizer_steps_total=100, resumption=RESUMPTION) | TOTALS | SKETCHES,
    dict(event="run_end", exception="ValueError", exit_status=3, lost_peer=False, replaced=True)
    | dict(resumption=RESUMPTION)
    | TOTALS,
]
BEAT = (
    dict(
        life="ab",
        unix_seconds=1767225612.5,
        optimizer_steps_total=120,
        seconds_before=2.0,
        kept_seconds=8.5,
        saves_completed=1,
        resumption=dict(optimizers=1, resumed_step=40),
    )
    | TOTALS
    | dict(wall_seconds=13.5)
)


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


def write(folder: Path, lines) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank-0.10.jsonl").write_bytes(b"".join(orjson.dumps(COMMON | each) + b"\n" for each in lines))


@pytest.mark.parametrize("number", range(len(LINES)), ids=lambda number: f"{number}-{LINES[number]['event']}")
def test_no_field_of_a_log_can_break_the_report(tmp_path, capsys, number):
    whole = COMMON | LINES[number]
    for path in places(whole):
        for junk in JUNK:
            lines = [*LINES[:number], replaced(whole, path, junk), *LINES[number + 1 :]]
            write(tmp_path, lines)
            assert report(str(tmp_path), as_json=True) == 0, (path, junk)
            found = json.loads(capsys.readouterr().out)
            for rank in found["ranks"]:
                assert abs(sum(rank["ledger"].values()) - rank["wall_seconds"]) <= 0.01 * rank["wall_seconds"] or (
                    path[0] in {"wall_seconds", "ledger_total_seconds"}
                ), (path, junk)
            assert report(str(tmp_path), as_json=False) == 0, (path, junk)
            assert "\x1b" not in capsys.readouterr().out


def test_no_field_of_a_heartbeat_can_break_the_report(tmp_path, capsys):
    write(tmp_path, LINES[:-1])  # it was killed
    folder = tmp_path / "attempts"
    folder.mkdir()
    beats = [replaced(BEAT, path, junk) for path in places(BEAT) for junk in [*JUNK, float("inf"), float("nan")]]
    contents = [json.dumps(beat).encode() for beat in (BEAT, *beats)]
    contents += [b"", b"[" * 100_000, b'{"life": "ab", "unix_seconds": 1' + b"0" * 5000 + b"}", b"\xff\x00" * 500]
    for number, content in enumerate(contents):
        (folder / "ab.beat").write_bytes(content)
        assert report(str(tmp_path), as_json=True) == 0, content[:300]
        found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
        assert number or found["ranks"][0]["steps"] == 100
        assert report(str(tmp_path), as_json=False) == 0, content[:300]
        assert "\x1b" not in capsys.readouterr().out


def test_a_damaged_line_leaves_the_totals_before_it(tmp_path, capsys):
    write(tmp_path, [*LINES[:-1], LINES[-1] | {"ledger_total_seconds": {"data_wait": "much"}}])
    assert summarize(load(tmp_path))["ranks"][0]["ledger"]["data_wait"] == 5.0
    report(str(tmp_path), as_json=False)
    assert "1 field(s) of its log are of the wrong type" in capsys.readouterr().out


def test_what_the_agent_writes_is_all_of_the_right_type(agent):
    """A field that is renamed, or changes its type, must not vanish from the report."""
    import torch

    for _ in torch.utils.data.DataLoader(range(8), batch_size=2):
        pass
    log = agent.run_dir
    telemetry.stop()
    (process,) = load(log)
    assert process.wrong_fields == 0
    may_be_absent = {"exposed_wait_total_seconds", "exposed_wait_absent"}
    may_be_absent |= {"resumption", "exception", "exit_status", "lost_peer", "replaced", "stuck_for_seconds", "memory"}
    may_be_absent |= {"tokens_total", "gpu_energy_total_joules", "gpu_uuid"}
    assert set(FIELDS["run_end"]) - set(process.totals) <= may_be_absent


def test_a_fifo_named_like_a_log_is_not_waited_for(tmp_path):
    write(tmp_path, LINES)
    os.mkfifo(tmp_path / "logs" / "rank-1.11.jsonl")
    (tmp_path / "logs" / "rank-2.12.jsonl").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rank-1.11.jsonl is no regular file" in done.stdout
    asked = subprocess.run(
        [sys.executable, "-m", "telemetry", "snapshot", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 1
    assert asked.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["logs/rank-1.11.jsonl", "attempts/ab.beat"])
def test_a_link_to_a_device_without_an_end_is_not_read(tmp_path, name):
    write(tmp_path, LINES[:-1])
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
    write(tmp_path, [LINES[0] | {"settings": None} | settings, LINES[1], LINES[-1]])
    assert summarize(load(tmp_path))["verdict"].startswith("Starved") is starved


def test_a_rotated_log_still_knows_its_threshold(tmp_path):
    agent = telemetry.start(
        tmp_path, port=None, stall_enter_ratio=0.35, log_max_bytes=65536, log_max_files=1, start_line=False
    )
    for _ in range(100):
        agent.event_log.emit("error", {"source": "test", "message": "x" * 1000})
    telemetry.stop()
    (process,) = load(tmp_path)
    assert process.head["continued"]
    assert process.head["settings"]["stall_enter_ratio"] == 0.35


def test_a_sparse_file_without_a_line_break_is_not_read_into_memory(tmp_path):
    log = write_log(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9))
    os.truncate(log, 128 << 20)
    tracemalloc.start()
    try:
        (process,) = load(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (process.torn_lines, process.totals["steps_total"]) == (1, 9)
    assert peak < 64 << 20


def test_a_line_of_code_in_an_open_stall_may_lack_fields(tmp_path, capsys):
    evidence = {"lines": [dict(file="/a/b.py", line=7, share_ratio=0.8), dict(file="/a/c.py")], "lines_of": "fetch"}
    write_log(
        tmp_path, 0,
        line("run_start", **START),
        window(wait=5, compute=5, steps=9),
        line("stall_open", cause="workers_io_bound", opened="2026-01-01T00:00:05.000Z", evidence=evidence),
    )  # fmt: skip
    assert report(str(tmp_path), as_json=False) == 0
    assert "b.py:7" in capsys.readouterr().out
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert [each["calls"] for each in stall["evidence"]["lines"]] == [None]
