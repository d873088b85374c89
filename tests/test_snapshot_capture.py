"""A recording in a real loop has the right steps, and harms neither the script's own profilers nor the training."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

from telemetry.model.records import FAILED, OTHER, RECORDED, REFUSED
from telemetry.seams.profilers import Session
from telemetry.seams.profilers import on_gpu as on_a_gpu
from tests.data_sets import Numbers
from tests.fakes.device import Device
from tests.snapshot_recording import ME, mark, marks, plan, train

CPU = [ProfilerActivity.CPU]


def test_exactly_the_agreed_steps_are_recorded(taken, observed):
    taken.arm(5, 7)
    train(12)
    outcome = taken.outcome()
    assert (outcome.result, outcome.why, outcome.first_step, outcome.last_step) == (RECORDED, None, 5, 7)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [5, 6, 7]
    assert outcome.pauses.keys() == {"prepare", "start", "stop"}
    assert taken.trace["distributedInfo"]["rank"] == 3
    assert taken.trace["telemetry"]["first_step"] == 5
    paused = sum(outcome.pauses.values())  # these are in the ledger, and in no step
    assert observed.ledger.ns[OTHER] / 1e9 >= paused
    assert observed.tracker.overhead_ns / 1e9 >= paused
    assert len(observed.steps) == 12


def test_the_fast_path_is_back_afterwards(taken, observed):
    iterator = iter(DataLoader(Numbers(20)))
    next(iterator), next(iterator), next(iterator)
    assert observed.tracker.fast_path_iterator_id == id(iterator)
    taken.arm(6, 7)
    assert observed.tracker.fast_path_iterator_id == 0
    for _ in range(6):
        next(iterator)
    assert taken.outcome().result == RECORDED
    assert observed.tracker.fast_path_iterator_id == id(iterator)
    assert observed.tracker.recorder is None


def epochs_in_full(taken, tmp_path):
    for epoch in range(3):
        train(5, 5 * epoch)


def epochs_left_with_break(taken, tmp_path, **workers):
    loader = DataLoader(Numbers(9), **workers)
    for epoch in range(3):
        for step, _ in enumerate(loader, 3 * epoch + 1):
            mark(step)
            if step % 3 == 0:
                break


def epochs_of_workers_left_with_break(taken, tmp_path):
    epochs_left_with_break(taken, tmp_path, num_workers=1, multiprocessing_context="fork")


def explicit_steps(taken, tmp_path):
    for step, _ in enumerate(DataLoader(Numbers(9)), 1):
        taken.observed.tracker.enter_step()
        mark(step)
        taken.observed.tracker.exit_step()


def no_loader_but_an_optimizer(taken, tmp_path):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(9):  # the first call of the optimizer begins step 1
        mark(step)
        layer(torch.ones(2)).sum().backward()
        optimizer.step()


def a_checkpoint_in_the_window(taken, tmp_path):
    for step, _ in enumerate(DataLoader(Numbers(9)), 1):
        mark(step)
        if step == 5:
            torch.save({}, tmp_path / "checkpoint")


def compiled_once(taken, tmp_path):
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager")
    for step, _ in enumerate(DataLoader(Numbers(9)), 1):
        mark(step)
        compiled(torch.ones(8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize(
    "loop",
    [epochs_in_full, epochs_left_with_break, epochs_of_workers_left_with_break, explicit_steps,
     no_loader_but_an_optimizer, a_checkpoint_in_the_window, compiled_once],
)  # fmt: skip
def test_the_steps_of_any_loop(taken, tmp_path, loop):
    taken.arm(4, 7)
    loop(taken, tmp_path)
    outcome = taken.outcome()
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 4, 7)
    assert taken.steps(outcome) == marks(taken.events(outcome)) == [4, 5, 6, 7]
    assert not any("Input Dims" in event.get("args", {}) for event in taken.trace["traceEvents"])  # not asked for


@pytest.mark.parametrize("how", ["gradients off", "phase", "end of the run", "takes too long"])
def test_what_ends_a_recording_keeps_what_there_is(taken, how):
    if how == "takes too long":
        taken.capture._most_ns = 0
    taken.arm(4, 20)
    train(6)
    if how == "phase":
        before = taken.observed.tracker.enter_phase("evaluation")
        train(3, 100)
        taken.observed.tracker.exit_phase("evaluation", before, 0)
    elif how == "gradients off":
        with torch.no_grad():
            train(3, 100)
    elif how == "end of the run":
        taken.observed.tracker.interrupt("the end of the run")
    outcome = taken.outcome()
    last = 4 if how == "takes too long" else 6
    assert (outcome.result, outcome.first_step, outcome.last_step) == (RECORDED, 4, last)
    assert outcome.why.startswith("cut short")
    assert marks(taken.events(outcome)) == [*range(4, last + 1)]


def test_a_worker_forked_during_a_recording_collects_nothing(taken, capfd):
    taken.arm(3, 20)
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


def test_an_accelerator_in_use_is_recorded(monkeypatch):
    asked = []
    assert not on_a_gpu()
    monkeypatch.setattr(
        autograd_profiler, "profile", lambda **named: asked.append(named["use_device"]) or nn.Identity()
    )
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "is_initialized", lambda: True)
        assert on_a_gpu()
        Session(plan(1, 2), ME)
        monkeypatch.setattr(module, "is_initialized", lambda: False)
    assert asked == ["cuda", "xpu"]


# -- beside the user's own profilers ------------------------------------------------------------------------------


def user_marks(theirs) -> list[str]:
    events = theirs.events() if hasattr(theirs, "events") else theirs
    return sorted({e.name for e in events if e.name.startswith("work ")})


def wanted(*steps: int) -> list[str]:
    return sorted(f"work {step}" for step in steps)


@pytest.mark.parametrize(
    ("waits", "sees"), [(None, range(1, 10)), (schedule(wait=1, warmup=4, active=4, repeat=1), range(6, 10))]
)
def test_ours_is_refused_while_theirs_records_or_warms_up(taken, waits, sees):
    taken.arm(4, 5)
    with profile(activities=CPU, schedule=waits) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(9)), 1):
            mark(step)
            theirs.step()
    outcome = taken.outcome()
    assert (outcome.result, "profiler" in outcome.why) == (REFUSED, True)
    assert user_marks(theirs) == wanted(*sees)


def test_ours_may_record_while_theirs_waits(taken):
    traces = []
    taken.arm(3, 4)
    with profile(activities=CPU, schedule=schedule(wait=6, warmup=1, active=2), on_trace_ready=traces.append) as theirs:
        for step, _ in enumerate(DataLoader(Numbers(12)), 1):
            mark(step)
            theirs.step()
            if traces:
                break
    outcome = taken.outcome()
    assert marks(taken.events(outcome)) == [3, 4]
    assert user_marks(theirs) == wanted(8, 9)


class LowLevel(torch.profiler._KinetoProfile):
    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


BEGIN = {
    "torch": lambda: profile(activities=CPU),
    "autograd": lambda: autograd_profiler.profile(use_kineto=True),
    "low level": lambda: LowLevel(activities=CPU),
}


@pytest.mark.parametrize("begin", BEGIN)
@pytest.mark.parametrize("state", ["armed", "prepared", "recording"])
def test_theirs_that_begins_is_whole_and_ours_is_over_before(taken, begin, state):
    taken.arm({"armed": 10, "prepared": 5, "recording": 3}[state], 12)
    iterator = iter(DataLoader(Numbers(12)))
    for step in (1, 2, 3, 4):
        next(iterator)
        mark(step)
    with BEGIN[begin]() as theirs:
        for step in range(5, 12):
            mark(step)
            next(iterator)
    events = theirs.function_events if isinstance(theirs, autograd_profiler.profile) else theirs.events()
    assert user_marks(events) == wanted(*range(5, 12))
    outcome = taken.outcome()
    if state == "recording":
        assert (outcome.result, outcome.last_step) == (RECORDED, 3)
        assert "script's own" in outcome.why
        assert marks(taken.events(outcome)) == [3, 4]  # the step that was open is in it, too
    else:
        assert outcome.result == REFUSED


@pytest.mark.parametrize("state", ["prepared", "recording"])
def test_theirs_on_another_thread_waits_until_ours_has_ended(taken, state):
    """Two sessions on two threads crash the process, whichever stops last."""
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


def test_nothing_begins_where_a_daemon_profiles(taken, monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    taken.arm(3, 4)
    train(8)
    outcome = taken.outcome()
    assert (outcome.result, "KINETO_USE_DAEMON" in outcome.why) == (REFUSED, True)


def test_nothing_begins_while_a_graph_is_captured_on_any_thread(taken, observed):
    graph = nn.Identity()  # stands for a graph
    observed.tracker.captures.graphs[graph] = None
    taken.arm(3, 4)
    train(8)
    outcome = taken.outcome()
    assert (outcome.result, outcome.why) == (REFUSED, "a CUDA graph is being captured")


def test_only_the_device_of_the_training_is_asked_whether_it_captures(taken, observed, monkeypatch):
    device = Device()
    device.stream = SimpleNamespace(device_index=1, stream_id=0)
    for name in ("is_initialized", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    observed.tracker.device = 1
    device.capturing = True
    assert not taken.capture._capturing(), "the stream of the current device, which is another one, was asked"
    device.current = 1
    assert taken.capture._capturing()


@pytest.mark.parametrize("where", ["_prepare_trace", "_start_trace", "__exit__"])
@pytest.mark.parametrize("error", [RuntimeError("kineto"), KeyboardInterrupt()])
def test_a_profiler_that_fails_does_not_fail_the_training(taken, monkeypatch, where, error):
    original = getattr(autograd_profiler.profile, where)

    def fail(self, *args):
        monkeypatch.setattr(autograd_profiler.profile, where, original)  # the clean-up does not fail too
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
    with profile(activities=CPU) as theirs:
        mark(1)
    assert user_marks(theirs) == wanted(1)


def test_the_stop_makes_no_python_object_of_each_event(taken, monkeypatch):
    """Torch 2.4 would make them at once, on the training thread."""
    made = []
    monkeypatch.setattr(autograd_profiler.profile, "_parse_kineto_results", made.append)
    taken.arm(3, 4)
    train(8)
    assert taken.outcome().result == RECORDED
    assert not made


# -- on a GPU -----------------------------------------------------------------------------------------------------


def on_gpu(test):
    absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(absent, reason="needs an NVIDIA GPU and a torch built for it")(test))


@on_gpu
def test_kernels_are_in_the_trace_and_a_captured_graph_is_replayed_before_during_and_after(taken):
    static = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    (static * 2).sum()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = (static * 2).sum()
    taken.arm(4, 6)
    for step, _ in enumerate(DataLoader(Numbers(12)), 1):
        static.fill_(step)
        graph.replay()
        assert out.item() == 128 * step
    outcome = taken.outcome()
    assert outcome.result == RECORDED
    assert any(event.get("cat") == "kernel" for event in taken.events(outcome))


@pytest.mark.parametrize("at", [2, 4, 5, 6, 7])
@on_gpu
def test_a_capture_over_a_boundary_stays_valid(taken, at):
    """Batches requested while a graph is being captured: ours neither begins nor ends in there."""
    iterator = iter(DataLoader(Numbers(20)))
    torch.ones(1, device="cuda")
    taken.arm(5, 6)
    for step in range(1, 16):
        if step == at:
            graph = torch.cuda.CUDAGraph()
            static = torch.ones(8, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                next(iterator)
                out = static * 3
            graph.replay()
            assert out.sum().item() == 24
        else:
            next(iterator)
    assert taken.outcome().result in {RECORDED, REFUSED}
