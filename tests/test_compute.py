"""Where the compute goes: its parts by timed steps, on a host and on a stand-in device, and what is compiled."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent.compute import ComputeSplit
from telemetry.hooks import compute, device
from telemetry.hooks.compute import TIMED_PARTS, ComputeTimer
from telemetry.hooks.device import Captures, DeviceEvents, DeviceStream
from telemetry.hooks.ring import Ring
from telemetry.hooks.state import StepState
from telemetry.records import COMPUTE
from telemetry.report.logs import load
from telemetry.sources.compiles import Compilation, CompilationReader
from telemetry.totals import Totals
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers
from tests.report_logs import summarize
from tests.running_agent import scrape, wait_for

MS = 1_000_000
ENGINE = torch.autograd._engine_run_backward


class Host:
    """A host whose clock only goes on when work is done, and a model, an optimizer and their real hooks."""

    def __init__(self, monkeypatch) -> None:
        self.ns = 0
        monkeypatch.setattr(compute, "now_ns", lambda: self.ns)
        host = self

        class Work(torch.autograd.Function):
            @staticmethod
            def forward(context, value, forward_ms, backward_ms):
                context.backward_ms = backward_ms
                host.work(forward_ms)
                return value * 1

            @staticmethod
            def backward(context, gradient):
                host.work(context.backward_ms)
                return gradient, None, None

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                host.work(10)
                return super().step(closure)

        self.model = Work.apply
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = Optimizer([self.weight], lr=0.1)
        self.state = StepState(Ring())
        self.timer = ComputeTimer(self.state)
        self.timer.follow(self.optimizer)
        self.hook = register_optimizer_step_post_hook(lambda optimizer, *_: self.timer.stepped(optimizer))

    def work(self, milliseconds: int) -> None:
        self.ns += milliseconds * MS

    def loss(self, forward: int = 20, backward: int = 30) -> torch.Tensor:
        return self.model(self.weight, forward, backward).sum()

    @property
    def parts(self) -> dict[str, int]:
        parts = {part: ns // MS for part, ns in zip(TIMED_PARTS, self.timer.ns, strict=True)}
        assert parts.pop("copy") == 0  # only loops of frameworks show them
        return parts


@pytest.fixture
def host(monkeypatch):
    made = Host(monkeypatch)
    yield made
    made.timer.drop()
    made.hook.remove()
    assert torch.autograd._engine_run_backward is ENGINE
    assert not made.optimizer._optimizer_step_pre_hooks
    assert made.state.errors == 0, made.state.last_error


def plain(host: Host) -> None:
    host.loss().backward()
    host.work(5)  # clips the gradients
    host.optimizer.step()
    host.work(2)  # logs


def accumulated(host: Host) -> None:
    for _ in range(2):
        host.work(1)  # moves the batch
        host.loss(10, 15).backward()
    host.optimizer.step()


def two_networks(host: Host) -> None:
    for _ in range(2):
        (gradient,) = torch.autograd.grad(host.loss(), [host.weight])
        host.weight.grad = gradient
        host.optimizer.step()


def with_closure(host: Host) -> None:
    def closure():
        loss = host.loss()
        loss.backward()
        return loss

    host.optimizer.step(closure)


def inside_backward(host: Host) -> None:
    """The optimizer steps as soon as a gradient is there, as with `register_post_accumulate_grad_hook`."""
    handle = host.weight.register_post_accumulate_grad_hook(lambda _: host.optimizer.step())
    host.loss().backward()
    handle.remove()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plain, {"forward": 20, "backward": 30, "optimizer": 10, "other": 7}),
        (accumulated, {"forward": 22, "backward": 30, "optimizer": 10, "other": 0}),
        (two_networks, {"forward": 40, "backward": 60, "optimizer": 20, "other": 0}),
        (with_closure, {"forward": 0, "backward": 30, "optimizer": 30, "other": 0}),
        (inside_backward, {"forward": 20, "backward": 30, "optimizer": 10, "other": 0}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_is_split_where_torch_shows_it(host, step, expected):
    step(host)  # not timed
    for _ in range(3):
        host.timer.begin(host.ns)
        step(host)
        host.timer.end(host.ns)
        step(host)  # not timed either
    assert host.parts == {part: 3 * ms for part, ms in expected.items()}
    assert host.timer.steps == 3


def test_the_agent_s_own_code_is_in_no_part(host, monkeypatch):
    """Each look at the clock takes a millisecond here. A boundary has up to six, of which a part gets two."""

    def now() -> int:
        host.ns += MS
        return host.ns - MS

    monkeypatch.setattr(compute, "now_ns", now)
    host.timer.begin(host.ns)
    plain(host)
    host.timer.end(host.ns)
    parts = host.parts
    assert (parts["forward"], parts["backward"], parts["optimizer"]) == (22, 32, 12)


def test_a_wait_in_a_step_is_left_out(host):
    host.timer.begin(host.ns)
    loss = host.loss()
    host.timer.wait(host.ns)
    host.work(100)  # waits for the batch of another loader
    host.timer.go_on(host.ns)
    (loss + host.loss(4, 4)).backward()
    host.timer.end(host.ns)
    assert host.parts == {"forward": 24, "backward": 34, "optimizer": 0, "other": 0}


def test_a_step_that_raises_or_has_no_backward_pass_does_not_count(host):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value * 1

        @staticmethod
        def backward(context, gradient):
            raise KeyError("the script's own")

    host.timer.begin(host.ns)
    host.optimizer.step()
    host.timer.end(host.ns)
    host.timer.begin(host.ns)
    with pytest.raises(KeyError, match="the script's own"):
        Broken.apply(host.weight).sum().backward()
    host.timer.drop()
    assert (host.timer.steps, sum(host.timer.ns)) == (0, 0)
    host.timer.begin(host.ns)
    plain(host)
    host.timer.end(host.ns)
    assert host.timer.steps == 1


class Stream:
    """One stream of a device. Its events have the time at which it reaches them."""

    def __init__(self, host: Host) -> None:
        self.host, self.busy_until, self.place, self.made = host, 0, DeviceStream(0, 0), 0

    def begin(self):
        return self.place

    def end(self) -> None: ...

    def take_blocked(self) -> int:
        return 0

    def event(self):
        self.made += 1
        stream = self

        class Event:
            def query(self) -> bool:
                return self.at <= stream.host.ns

            def elapsed_time(self, later) -> float:
                return (later.at - self.at) / MS

        return Event()

    def record(self, event) -> None:
        event.device = getattr(event, "device", self.place.device)
        assert event.device == self.place.device, "torch raises this"
        event.at = max(self.busy_until, self.host.ns)


def test_on_a_device_the_parts_are_those_of_its_time(host):
    """The host queues a step in 67 ms, for which the device needs ten times as long."""
    device = Stream(host)
    host.timer.events = device
    host.work = lambda milliseconds: (
        setattr(host, "ns", host.ns + milliseconds * MS),
        setattr(device, "busy_until", max(device.busy_until, host.ns) + 10 * milliseconds * MS),
    )
    for _ in range(2):
        host.timer.begin(host.ns)
        plain(host)
        host.timer.end(host.ns)
        assert host.timer.steps == 0  # the device has not reached the end of the step
    made = device.made
    host.ns = device.busy_until
    host.timer.begin(host.ns)
    assert host.parts["backward"] == pytest.approx(2 * 300, rel=0.05)
    assert host.parts["optimizer"] == pytest.approx(2 * 100, rel=0.05)
    assert device.made == made == 12  # they are used again
    device.place = DeviceStream(0, 7)
    plain(host)
    host.timer.end(host.ns)
    assert host.timer.steps == 2, "a step on two streams"


def test_each_pass_of_accumulated_gradients_is_timed(host):
    """The host runs ahead, and waits for the device after each step of the optimizer, as a gradient scaler does."""
    device = Stream(host)
    host.timer.events = device
    host.work = lambda milliseconds: setattr(device, "busy_until", max(device.busy_until, host.ns) + milliseconds * MS)
    host.timer.wanted = 100
    for number in range(100):
        host.ns += MS
        host.timer.begin(host.ns)
        host.loss().backward()
        if number % 4 == 3:
            host.optimizer.step()
            host.ns = device.busy_until
        host.timer.end(host.ns)
    host.ns = device.busy_until
    host.timer.begin(host.ns)
    assert host.timer.steps > 90
    assert host.parts["optimizer"] / sum(host.parts.values()) == pytest.approx(10 / 210, rel=0.2)


def test_a_device_that_is_found_while_a_step_is_timed(host):
    host.timer.begin(host.ns)
    host.loss().backward()
    host.timer.events = Stream(host)  # by the agent thread
    host.optimizer.step()
    host.timer.end(host.ns)
    for _ in range(2):
        host.timer.begin(host.ns)
        plain(host)
        host.timer.end(host.ns)
    host.timer.begin(host.ns)
    assert not host.timer.failed
    assert host.timer.steps == 3


def test_events_of_one_device_are_not_recorded_on_another(host):
    """The device of the parameters may become known after another one was taken for it."""
    device = Stream(host)
    host.timer.events = device
    for index in (0, 3):
        device.place = DeviceStream(index, 0)
        for _ in range(3):
            host.timer.begin(host.ns)
            plain(host)
            host.timer.end(host.ns)
    assert not host.timer.failed


@pytest.mark.parametrize("call", ["first", "inside", "last", "read"])
def test_a_device_that_fails_is_not_used_again(host, call):
    class Failing(Stream):
        recorded = 0

        def record(self, event) -> None:
            self.recorded += 1
            if self.recorded == {"first": 1, "inside": 3, "last": 6}.get(call):
                raise RuntimeError("CUDA error")
            super().record(event)

        def event(self):
            event = super().event()
            if call == "read":
                event.elapsed_time = lambda _: 1 / 0
            return event

    host.timer.events = Failing(host)
    host.timer.wanted = 3
    for _ in range(3):
        if host.timer.wanted:
            host.timer.begin(host.ns)
        plain(host)
        host.timer.end(host.ns)
    assert host.timer.failed
    assert (host.state.errors, host.timer.wanted, host.timer.steps) == (1, 0, 0)
    host.state.errors = 0


@pytest.mark.parametrize(("call_ns", "at_most"), [(1_000, 8), (100_000, 2)])
def test_as_many_steps_are_timed_as_may_cost_a_thousandth(host, call_ns, at_most):
    """A tick has 100 steps of 10 ms, and a timed one has seven events."""

    class Slow(Stream):
        def record(self, event) -> None:
            super().record(event)
            self.host.ns += call_ns

    host.timer.events = Slow(host)
    tracker = SimpleNamespace(compute=host.timer, accelerator="cuda", gpu=object(), slow_path=lambda: None)
    split, passed = ComputeSplit(tracker), Totals()
    timed = []
    for _ in range(50):
        later = dataclasses.replace(
            passed, steps=passed.steps + 100, ledger_seconds={COMPUTE: passed.compute_seconds + 1.0}
        )
        split.ask(later, passed)
        passed = later
        timed.append(host.timer.wanted)
        while host.timer.wanted:
            host.timer.begin(host.ns)
            plain(host)
            host.timer.end(host.ns)
    assert max(timed) <= 8
    assert max(timed[1:]) <= at_most
    assert sum(timed[1:]) > 20
    assert host.timer.spent_ns < 1.1e-3 * 51e9


def test_a_call_that_waits_in_the_queue_of_launches_costs_nothing(monkeypatch):
    clock = iter([0, 2_000, 10_000, 12_000, 20_000, 420_000])
    monkeypatch.setattr(device, "now_ns", lambda: next(clock))
    events = DeviceEvents(torch, "cuda", Captures(), StepState(Ring()))
    for _ in range(3):
        events.record(SimpleNamespace(record=lambda _stream: None))
    assert events.take_blocked() == 400_000 - 8 * 2_000
    assert events.take_blocked() == 0


# -- in the loop ---------------------------------------------------------------------------------------------------------


def test_a_loop_times_what_is_asked_for_and_returns_to_the_fast_path(observed):
    timer, model = observed.tracker.compute, torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fast = []
    for number, batch in enumerate(DataLoader(Numbers(20), batch_size=1)):
        model(batch.float().view(-1, 1)).sum().backward()
        optimizer.step()
        fast.append(bool(observed.tracker.fast_path_iterator_id))
        if number == 9:
            assert timer.steps == 0
            timer.wanted = 3
            observed.tracker.slow_path()
    assert timer.steps == 3
    assert fast[5:10] == [True] * 5
    assert fast[10:13] == [False] * 3
    assert all(fast[14:])
    observed.check_sum()


def test_an_evaluation_in_a_step_ends_its_timing(observed):
    timer, model = observed.tracker.compute, torch.nn.Linear(1, 1)
    timer.wanted = 100
    for number, batch in enumerate(DataLoader(Numbers(8), batch_size=1)):
        model(batch.float().view(-1, 1)).sum().backward()
        if number == 4:
            observed.tracker.exit_phase("evaluation", observed.tracker.enter_phase("evaluation"), now_ns())
    assert timer.steps == 7
    observed.check_sum()


def test_parts_reach_metrics_log_and_report(tmp_path):
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=0.2, start_line=False)
    try:
        model, images = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]), torch.ones(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = iter(DataLoader(Numbers(100_000), batch_size=1))

        def split() -> dict:
            for _ in range(20):
                next(loader)
                model(images).sum().backward()
                optimizer.step()
            name = "training_compute_seconds_total"
            return {key[1]: value for key, value in scrape(agent).items() if key[0] == name}

        seen = wait_for(split)
        assert seen.keys() == {"forward", "backward", "optimizer", "compile", "other"}
        wait_for(lambda: split()["backward"] > seen["backward"])
    finally:
        telemetry.stop()
    report = summarize(load(tmp_path / "run"))
    (rank,) = report["ranks"]
    parts = rank["compute_seconds"]
    assert 0 < sum(parts.values()) <= rank["ledger"]["compute"] * 1.001
    assert parts["compile"] == 0
    assert parts["backward"] > parts["optimizer"] > 0


# -- what is compiled ------------------------------------------------------------------------------------------------------


def test_dynamo_s_records_are_read_once_and_say_what_was_compiled_again():
    reader = CompilationReader()

    def scaled(values):
        return values * 2

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    (first,) = reader.take()
    assert first.function.startswith("scaled at test_compute.py:")
    assert first.seconds > 0
    assert not first.again
    assert reader.take() == []
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    compiled(torch.ones(4))
    again = reader.take()
    assert [(each.function, each.again) for each in again] == [(first.function, True)] * 2
    assert "size mismatch" in again[0].reason
    assert CompilationReader().take() == [], "what was compiled before the start"


def test_compilations_are_a_part_of_their_own(monkeypatch):
    tracker = SimpleNamespace(compute=SimpleNamespace(ns=[0, 0, 0, 0, 0]))
    split = ComputeSplit(tracker)
    compiled: list[Compilation] = []
    monkeypatch.setattr(split._reader, "take", lambda: [compiled.pop() for _ in compiled[:]])
    split.update(2.0)
    assert split.seconds is None
    compiled.append(Compilation("f at m.py:1", 3.0, again=False, reason=""))
    split.update(4.0)  # three seconds of the four; nothing is known of the rest
    assert split.seconds == {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "compile": 3.0, "other": 0.0}
    tracker.compute.ns = [1, 2, 1, 0, 0]
    split.update(8.0)
    assert split.seconds == {"forward": 1.25, "backward": 2.5, "optimizer": 1.25, "compile": 3.0, "other": 0.0}
    compiled += [Compilation("g at m.py:9", 0.5, again=True, reason="L['x'] size mismatch")] * 2
    tracker.compute.ns = [100, 2, 1, 0, 0]  # the forward pass has compiled
    split.update(10.0)
    assert split.seconds["compile"] == 4.0
    assert split.seconds["backward"] == 3.0
    assert (split.compiles.again, split.compiles.again_seconds) == (2, {"g at m.py:9": 1.0})
    assert split.reason == "L['x'] size mismatch"
    tracker.compute.ns = [100, 2, 1, 4, 0]  # only the framework's copies: it is in the sums from now on
    split.update(12.0)
    assert list(split.seconds.items())[0] == ("copy", 2.0)
