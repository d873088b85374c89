"""Snapshots of whole runs: forked workers, compiled steps, the fetches of the workers, and requests."""

from __future__ import annotations

import gzip
import json
import os

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent import snapshot_control
from telemetry.records import RECORDED, SKIPPED
from tests.data_sets import Numbers
from tests.snapshot_recording import mark, marks


@pytest.mark.parametrize("first", [2, 5])
def test_a_worker_forked_during_a_recording_or_a_count_collects_nothing(taken, capfd, first):
    taken.arm(first, 20)
    taken.observed.attachment.profilers.before_theirs = taken.capture.give_way
    iterator = iter(DataLoader(Numbers(30)))
    for _ in range(4):
        next(iterator)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        taken.capture.after_fork_in_child()
        for _ in range(2):  # the first time around the allocator grows, profiler or not
            before = resident()
            for _ in range(30_000):
                torch.ones(1)
        os.write(writable, str(resident() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    grown = int(os.read(readable, 100))
    os.close(readable), os.close(writable)
    assert grown < 1 << 20, "30,000 operations recorded take 18 MB"
    assert capfd.readouterr() == ("", "")
    taken.observed.tracker.boundaries.interrupt("the end")
    assert taken.outcome().result == (RECORDED if first == 2 else SKIPPED)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_compiled_steps_are_recorded_and_compiled_once(taken):
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager")
    counts = torch._dynamo.utils.counters["stats"]
    taken.arm(4, 6)
    for step, _ in enumerate(DataLoader(Numbers(10)), 1):
        mark(step)
        compiled(torch.ones(8))
    outcome = taken.outcome()
    assert marks(taken.events(outcome)) == [4, 5, 6]
    assert counts["unique_graphs"] == 1


def test_a_whole_run_takes_one_when_it_is_asked(tmp_path, capfd):
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)
    for step, _ in enumerate(DataLoader(Numbers(100_000)), 1):
        mark(step)
        if step == 10:
            assert telemetry.request_snapshot(steps=2)
        if sum(agent.snapshots.counts.values()):
            break
    telemetry.stop()
    assert agent.snapshots.counts[RECORDED] == 1
    (path,) = agent.run_dir.glob("snapshots/request-step*/rank-0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    first = int(path.parent.name.removeprefix("request-step"))
    assert marks(events) == [first, first + 1]
    assert capfd.readouterr() == ("", "")


def test_the_fetches_of_the_workers_stand_in_the_trace(tmp_path):
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)
    pids = []
    iterator = iter(DataLoader(Numbers(100_000, seconds=0.02), num_workers=2, prefetch_factor=1))
    for step, _ in enumerate(iterator, 1):
        if step == 10:
            pids = [worker.pid for worker in iterator._workers]
            assert telemetry.request_snapshot(steps=6)
        if sum(agent.snapshots.counts.values()):
            break
    telemetry.stop()
    (path,) = agent.run_dir.glob("snapshots/request-step*/rank-0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] in pids}
    assert named == dict(zip(pids, ["DataLoader worker 0", "DataLoader worker 1"], strict=True))
    fetches = [e for e in events if e.get("cat") == "dataloader_worker"]
    assert {e["pid"] for e in fetches} == set(pids)
    assert all(e["dur"] >= 20_000 for e in fetches)
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    for fetch in fetches:  # on the trace's own clock: those in progress at some time of the recording
        assert begin - 1e6 < fetch["ts"] + fetch["dur"]
        assert fetch["ts"] < end + 1e6


@pytest.mark.parametrize(
    ("setting", "gpu", "asked"), [("auto", False, 1), ("auto", True, 0), ("on", True, 1), ("off", False, 0)]
)
def test_a_stall_asks_for_none_on_a_gpu_unless_it_is_told_to(tmp_path, monkeypatch, setting, gpu, asked):
    monkeypatch.setattr(snapshot_control, "on_gpu", lambda: gpu)
    agent = telemetry.start(
        tmp_path,
        port="off",
        interval_seconds=30,
        start_line=False,
        snapshot_settle_seconds=0,
        snapshot_on_stall=setting,
    )
    agent.snapshots.tick("uneven_batches", lambda: None)
    telemetry.stop()
    assert len(list(tmp_path.glob("snapshots/.meeting/*.request.json"))) == asked


@pytest.mark.parametrize("arguments", [dict(steps=0), dict(steps=51), dict(rank=-1)])
def test_a_request_out_of_range(arguments):
    with pytest.raises(ValueError, match="snapshot"):
        telemetry.request_snapshot(**arguments)


def test_a_request_of_another_kind():
    with pytest.raises(TypeError, match="steps"):
        telemetry.request_snapshot(steps="5")
    assert telemetry.request_snapshot() is False, "no agent runs"
