"""A recording in a real loop: the right steps, whatever goes on in them, and nobody else's profiler harmed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader

import telemetry
from telemetry.records import FAILED, OTHER, RECORDED, REFUSED, SKIPPED
from telemetry.snapshot import plan as p
from telemetry.snapshot.capture import Capture
from tests.test_attach_loaders import Numbers

CPU = [ProfilerActivity.CPU]


def plan(first: int, last: int) -> p.Plan:
    request = p.Request("1700000000000-a", p.API, p.REQUEST, None, last - first + 1, "a test")
    return p.Plan(request, None, first, last, (0,), f"request-step{first}", 1)


class Taken:
    """A capture on the real hooks, armed for some steps."""

    def __init__(self, observed, tmp_path) -> None:
        self.observed = observed
        self.path = tmp_path / "trace.json"
        profilers = observed.attachment.profilers
        self.capture = Capture(
            observed.tracker,
            profilers=profilers,
            most_seconds=30,
            about={"run": "a run", "rank": 3, "world_size": 4},
        )
        profilers.before_theirs = self.capture.give_way

    def arm(self, first: int, last: int) -> None:
        self.capture.arm(plan(first, last))

    def outcome(self):
        outcome = self.capture.take()
        self.observed.read()
        return outcome

    def events(self, outcome) -> list[dict]:
        if not self.path.exists():
            outcome.trace.save(self.path)
        self.trace = json.loads(self.path.read_text())
        return self.trace["traceEvents"]

    def steps(self, outcome) -> list[int]:
        names = [event["name"] for event in self.events(outcome)]
        return sorted(int(n.removeprefix("ProfilerStep#")) for n in names if n.startswith("ProfilerStep#"))


@pytest.fixture
def taken(observed, tmp_path):
    return Taken(observed, tmp_path)


def mark(step: int) -> None:
    """What a trace shows of a step's work."""
    with record_function(f"work {step}"):
        torch.ones(4).sum()


def marks(events: list[dict]) -> list[int]:
    names = {event["name"] for event in events if event.get("ph") == "X"}
    return sorted(int(name.removeprefix("work ")) for name in names if name.startswith("work "))


def train(length: int, start: int = 0, loader=None) -> None:
    for step, _ in enumerate(loader or DataLoader(Numbers(length)), start + 1):
        mark(step)


def test_exactly_the_agreed_steps_are_recorded(taken):
    taken.arm(5, 7)
    train(12)
    outcome = taken.outcome()
    assert (outcome.result, outcome.why, outcome.first_step, outcome.last_step) == (RECORDED, None, 5, 7)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [5, 6, 7]
    assert outcome.pauses.keys() == {"prepare", "start", "stop"}
    assert outcome.thread == threading.get_native_id()
    assert taken.trace["distributedInfo"]["rank"] == 3
    assert taken.trace["telemetry"]["first_step"] == 5


def test_the_pauses_are_in_the_ledger_and_in_no_step(taken, observed):
    taken.arm(5, 7)
    train(12)
    outcome = taken.outcome()
    paused = sum(outcome.pauses.values())
    assert observed.ledger.ns[OTHER] / 1e9 >= paused
    assert observed.tracker.overhead_ns / 1e9 >= paused
    assert len(observed.steps) == 12


def test_the_short_path_is_back_afterwards(taken, observed):
    iterator = iter(DataLoader(Numbers(20)))
    next(iterator), next(iterator), next(iterator)
    assert observed.tracker.key == id(iterator)
    taken.arm(6, 7)
    assert observed.tracker.key == 0
    for _ in range(6):
        next(iterator)
    assert taken.outcome().result == RECORDED
    assert observed.tracker.key == id(iterator)
    assert observed.tracker.recorder is None


def test_an_epoch_that_ends_in_the_window(taken):
    taken.arm(4, 9)
    for epoch in range(3):
        train(5, 5 * epoch)
    outcome = taken.outcome()
    assert (outcome.first_step, outcome.last_step) == (4, 9)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_left_with_break(taken, workers):
    taken.arm(3, 5)
    step = 0
    loader = DataLoader(Numbers(9), num_workers=workers, multiprocessing_context="fork" if workers else None)
    for _ in range(3):
        for _ in loader:
            step += 1
            mark(step)
            if step % 3 == 0:
                break
    outcome = taken.outcome()
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [3, 4, 5]


def test_explicit_steps(taken):
    taken.arm(3, 4)
    for step, _ in enumerate(DataLoader(Numbers(8)), 1):
        with telemetry_step(taken):
            mark(step)
    outcome = taken.outcome()
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [3, 4]


@contextlib.contextmanager
def telemetry_step(taken):
    taken.observed.tracker.enter_step()
    yield
    taken.observed.tracker.exit_step()


def test_a_loop_without_a_loader_counts_by_its_optimizer(taken):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    taken.arm(3, 4)
    for _ in range(8):
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 3, 4)
    assert taken.steps(outcome) == [3, 4]


@pytest.mark.parametrize("how", ["gradients off", "phase"])
def test_an_evaluation_ends_the_recording_and_keeps_what_there_is(taken, how):
    taken.arm(4, 20)
    train(6)
    if how == "phase":
        before = taken.observed.tracker.enter_phase("evaluation")
        train(3, 100)
        taken.observed.tracker.exit_phase("evaluation", before, 0)
    else:
        with torch.no_grad():
            train(3, 100)
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 4, 6)
    assert "evaluation" in outcome.why
    assert marks(taken.events(outcome)) == [4, 5, 6]


def test_a_checkpoint_is_carried(taken, tmp_path):
    taken.arm(2, 4)
    for step, _ in enumerate(DataLoader(Numbers(6)), 1):
        mark(step)
        if step == 3:
            torch.save({}, tmp_path / "checkpoint")
    assert marks(taken.events(taken.outcome())) == [2, 3, 4]


def test_a_recording_that_takes_too_long_is_cut_at_the_next_boundary(taken):
    taken.capture._most_ns = 0
    taken.arm(3, 9)
    train(12)
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 3, 3)
    assert "cut short" in outcome.why
    assert marks(taken.events(outcome)) == [3]


def test_a_rank_that_is_past_the_step_skips_it(taken):
    loader = iter(DataLoader(Numbers(12)))
    for _ in range(6):
        next(loader)
    taken.arm(5, 7)
    next(loader)
    assert taken.outcome().result == SKIPPED
    assert not autograd_profiler._is_profiler_enabled


def test_the_end_of_the_run_keeps_what_was_recorded(taken):
    taken.arm(3, 50)
    train(6)
    taken.observed.tracker.interrupt("the end of the run")
    outcome = taken.outcome()
    assert (outcome.result, outcome.last_step) == (RECORDED, 6)


# -- the user's own profiler -----------------------------------------------------------------------------------


def user_marks(prof) -> list[str]:
    return sorted({e.name for e in prof.events() if e.name.startswith("work ")})


def wanted(*steps: int) -> list[str]:
    return sorted(f"work {step}" for step in steps)


def test_ours_is_refused_while_theirs_records(taken):
    taken.arm(4, 5)
    with profile(activities=CPU) as theirs:
        train(9)
    outcome = taken.outcome()
    assert outcome.result == REFUSED
    assert "profiler" in outcome.why
    assert user_marks(theirs) == wanted(*range(1, 10))


def test_ours_is_refused_while_theirs_warms_up(taken):
    taken.arm(4, 5)
    with profile(activities=CPU, schedule=schedule(wait=1, warmup=4, active=4, repeat=1)) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(9)), 1):
            mark(step)
            theirs.step()
    assert taken.outcome().result == REFUSED
    assert user_marks(theirs) == wanted(6, 7, 8, 9)


def test_ours_may_record_while_theirs_waits(taken):
    traces = []
    taken.arm(2, 3)
    with profile(activities=CPU, schedule=schedule(wait=6, warmup=1, active=2), on_trace_ready=traces.append) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(12)), 1):
            mark(step)
            theirs.step()
            if traces:
                break
    outcome = taken.outcome()
    assert marks(taken.events(outcome)) == [2, 3]
    assert user_marks(theirs) == wanted(8, 9)


def begin_torch():
    return profile(activities=CPU)


def begin_autograd():
    return autograd_profiler.profile(use_kineto=True)


def begin_low_level():
    return LowLevel(activities=CPU)


class LowLevel(torch.profiler._KinetoProfile):
    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.mark.parametrize("begin", [begin_torch, begin_autograd, begin_low_level])
@pytest.mark.parametrize("state", ["armed", "prepared", "recording"])
def test_theirs_that_begins_is_whole_and_ours_is_over_before(taken, begin, state):
    taken.arm({"armed": 9, "prepared": 4, "recording": 2}[state], 12)
    iterator = iter(DataLoader(Numbers(12)))
    for step in (1, 2, 3):
        next(iterator)
        mark(step)
    with begin() as theirs:
        for step in range(4, 11):
            mark(step)
            next(iterator)
    events = theirs.function_events if isinstance(theirs, autograd_profiler.profile) else theirs.events()
    assert sorted({e.name for e in events if e.name.startswith("work ")}) == wanted(*range(4, 11))
    outcome = taken.outcome()
    if state == "recording":
        assert (outcome.result, outcome.last_step) == (RECORDED, 2)
        assert "script's own" in outcome.why
        assert marks(taken.events(outcome)) == [2, 3]  # the step that was open is in it, too
    else:
        assert outcome.result == REFUSED


@pytest.mark.parametrize("state", ["prepared", "recording"])
def test_theirs_on_another_thread_waits_for_the_training_thread_to_end_ours(taken, state):
    """Two sessions on two threads end the process, whoever stops last."""
    taken.arm(4 if state == "prepared" else 3, 12)
    iterator = iter(DataLoader(Numbers(12)))
    for step in (1, 2, 3):
        next(iterator)
        mark(step)
    found: list[str] = []

    def theirs() -> None:
        with profile(activities=CPU) as prof:
            mark(100)
        found.extend(user_marks(prof))

    thread = threading.Thread(target=theirs)
    thread.start()
    while taken.capture._asked is None:
        thread.join(0.01)
    next(iterator)
    thread.join(30)
    assert found == wanted(100)
    assert taken.outcome().result == (REFUSED if state == "prepared" else RECORDED)
    train(3)  # and nothing is broken for the next


def test_off_the_main_thread_ours_is_refused(taken):
    def run() -> None:
        taken.observed.tracker.thread = threading.get_ident()
        taken.arm(3, 4)
        train(8)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    outcome = taken.outcome()
    assert (outcome.result, "main thread" in outcome.why) == (REFUSED, True)


def test_nothing_begins_where_a_daemon_profiles(taken, monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    taken.arm(3, 4)
    train(8)
    outcome = taken.outcome()
    assert (outcome.result, "KINETO_USE_DAEMON" in outcome.why) == (REFUSED, True)


# -- what may go wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_prepare_trace", "_start_trace", "__exit__"])
@pytest.mark.parametrize("error", [RuntimeError("kineto"), KeyboardInterrupt()])
def test_a_profiler_that_fails_is_not_the_training_s(taken, monkeypatch, where, error):
    original = getattr(autograd_profiler.profile, where)

    def fail(self, *args):
        original(self, *args)
        raise error

    monkeypatch.setattr(autograd_profiler.profile, where, fail)
    taken.arm(3, 4)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            train(8)
    else:
        train(8)
    assert taken.outcome().result == FAILED
    assert not torch.autograd._profiler_enabled()
    monkeypatch.undo()
    with profile(activities=CPU) as theirs:
        mark(1)
    assert user_marks(theirs) == wanted(1)


def test_a_worker_forked_in_the_middle_gathers_nothing(taken, capfd):
    taken.arm(2, 20)
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
    taken.observed.tracker.interrupt("the end")
    assert taken.outcome().result == RECORDED


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


@pytest.mark.parametrize("arguments", [dict(steps=0), dict(steps=51), dict(rank=-1)])
def test_a_request_out_of_range(arguments):
    with pytest.raises(ValueError, match="snapshot"):
        telemetry.request_snapshot(**arguments)


def test_a_request_of_another_kind():
    with pytest.raises(TypeError, match="steps"):
        telemetry.request_snapshot(steps="5")
    assert telemetry.request_snapshot() is False, "no agent runs"
