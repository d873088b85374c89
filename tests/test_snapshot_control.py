"""When a snapshot is taken, when no more are, and snapshots of whole runs."""

from __future__ import annotations

import gzip
import json

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.records import RECORDED
from telemetry.snapshot import agree, control
from telemetry.snapshot.control import StepWatch, Trigger
from tests.data_sets import Numbers
from tests.snapshot_recording import mark, marks

CAUSE = "uneven_batches"


def trigger(settle: float = 10, cooldown: float = 100, most: int = 3) -> Trigger:
    return Trigger(settle_seconds=settle, cooldown_seconds=cooldown, max_snapshots=most)


def fired(one: Trigger, until: int, cause: str | None = CAUSE, since: int = 0) -> list[int]:
    """The seconds at which it fires, asked once a second, each taken."""
    found = []
    for now in range(since, until):
        if one.stalled(now, cause):
            found.append(now)
            one.took(now)
    return found


def test_a_stall_fires_once_when_it_has_held():
    assert fired(trigger(), 300) == [10]


def test_a_stall_that_closes_before_it_has_settled_does_not():
    one = trigger()
    assert fired(one, 9) == []
    assert fired(one, 10, cause=None, since=9) == []
    assert fired(one, 19, since=10) == []


def test_a_straggler_is_let_speak_first():
    assert fired(trigger(), 300, cause="straggler") == [20]


def test_steps_are_not_recorded_for_what_checkpoints_cost():
    assert fired(trigger(), 300, cause="checkpoint") == []


def test_a_stall_that_another_s_snapshot_shows_does_not_ask_again():
    one = trigger()
    one.stalled(0, CAUSE)
    one.took(5)
    assert fired(one, 1000, since=6) == []


def test_the_next_stall_waits_for_the_cooldown():
    one = trigger()
    assert fired(one, 12) == [10]
    one.stalled(12, None)
    assert fired(one, 300, since=13) == [110]


def test_a_person_does_not_wait_for_the_cooldown_but_for_the_others():
    one = trigger(most=2)
    one.took(0)
    assert "cooldown" in one.refuses(1, agree.STALL)
    assert one.refuses(1, agree.COMMAND) is None
    one.took(1)
    for kind in (agree.STALL, agree.API, agree.COMMAND):
        assert "max_snapshots = 2" in one.refuses(1000, kind)


def test_none_at_all():
    assert fired(trigger(most=0), 100) == []


def test_switched_off():
    one = trigger()
    one.off = "slower"
    assert fired(one, 100) == []
    assert one.refuses(0, agree.COMMAND) == "slower"


def compared(before: float, after: list[float], count: int = 400):
    watch = StepWatch()
    assert watch.add([before] * 100) is None
    watch.add([before * 3] * 5)
    watch.compare(101, 105)
    for seconds in after:
        found = watch.add([seconds] * count)
        if found:
            return found
    return None


def test_steps_as_fast_as_before():
    found = compared(0.1, [0.1])
    assert (found.slower, found.before, found.after) == (False, 0.1, 0.1)


def test_steps_that_stay_slower():
    found = compared(0.1, [0.115])
    assert (found.slower, found.after) == (True, 0.115)


def test_steps_that_are_slower_for_a_while():
    assert compared(0.1, [0.15, 0.1], count=100).slower is False


def test_a_few_slow_steps_among_many_are_nothing():
    watch = StepWatch()
    watch.add([0.1] * 100)
    watch.compare(101, 105)
    found = watch.add(([0.1] * 9 + [5.0]) * 10)
    assert found.slower is False


def test_only_the_steps_before_the_snapshot_are_what_it_was_like():
    watch = StepWatch()
    watch.add([0.05] * 5000)
    watch.add([0.2] * 60)  # the snapshot
    watch.compare(5001, 5060)
    found = watch.add([0.2] * 400)
    assert (found.before, found.slower) == (0.05, True)


def test_nothing_to_compare_with():
    watch = StepWatch()
    watch.add([0.1] * 5)
    watch.compare(6, 10)
    assert watch.add([9.0] * 1000) is None


def test_short_steps_are_compared_over_seconds():
    watch = StepWatch()
    watch.add([0.001] * 5000)
    watch.compare(5001, 5005)
    assert watch.add([0.002] * 900) is None, "three windows of fifty steps, but not of two seconds"
    assert watch.add([0.002] * 3000).slower


def test_the_pace_is_the_quickest_of_late_and_no_single_step():
    watch = StepWatch()
    assert watch.step_seconds is None
    watch.add([0.3])
    assert watch.step_seconds is None
    watch.add([0.3, 0.3, 0.001])
    assert watch.step_seconds == sum([0.3, 0.3, 0.001]) / 3
    watch.add([0.1] * 4)
    watch.add([0.5] * 4)
    assert round(watch.step_seconds, 6) == 0.1
    for _ in range(5):
        watch.add([0.5] * 4)
    assert watch.step_seconds == 0.5


# -- whole runs ---------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(control, "on_gpu", lambda: gpu)
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
