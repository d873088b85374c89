"""Exposed wait on a device's own clock: a simulated GPU, stand-ins for other devices, a real GPU; and forks beside it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.log.reader import load
from telemetry.loop.ledger import ExposedWait
from telemetry.seams import dataloader, ring, state, tracker
from telemetry.seams import device as gpu_clock
from telemetry.seams.device import BUDGET_RATIO, DeviceStream, GpuClock, device_in_use
from tests.data_sets import Numbers
from tests.fakes.device import Device, Event
from tests.report_logs import summarize
from tests.running_agent import log_lines, wait_for

# -- exposed wait by event pairs, with events that follow a simulated GPU ----------------------------------------------


MS = 1_000_000


class Gpu:
    """A GPU with one stream and a simulated host clock. Work is queued and runs in order."""

    def __init__(self, monkeypatch) -> None:
        self.host_ns = 1_000 * MS
        self.busy_until_ns = 0
        self.events = 0
        self.call_ns = 0
        self.place = DeviceStream(0, 0)
        self.state = SimpleNamespace(ring=SimpleNamespace(head=0), overhead_ns=0)
        for module in (gpu_clock, dataloader, tracker, state):
            monkeypatch.setattr(module, "now_ns", self.now)

    def now(self) -> int:
        return self.host_ns

    def work(self, milliseconds: float) -> None:
        """Queue a kernel. The host does not wait for it."""
        self.busy_until_ns = max(self.busy_until_ns, self.host_ns) + int(milliseconds * MS)

    def sleep(self, milliseconds: float) -> None:
        self.host_ns += int(milliseconds * MS)

    def stored(self) -> None:
        """The ring gets the span of a wait."""
        self.state.ring.head += ring.STRIDE

    def begin(self) -> DeviceStream | None:
        return self.place

    def end(self) -> None:
        pass

    def take_blocked(self) -> int:
        return 0

    def record(self, event) -> None:
        event.record()

    def event(self):
        gpu = self
        gpu.events += 1

        class Event:
            at_ns = device = None

            def record(self) -> None:
                assert self.device in {None, gpu.place.device}, "recorded on another device"
                self.device = gpu.place.device
                gpu.host_ns += gpu.call_ns
                self.at_ns = max(gpu.busy_until_ns, gpu.host_ns)

            def query(self) -> bool:
                return self.at_ns <= gpu.host_ns

            def elapsed_time(self, other) -> float:
                assert self.query() and other.query()
                assert self.device == other.device, "events of two devices"
                return (other.at_ns - self.at_ns) / MS

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def run(gpu: Gpu, clock: GpuClock, steps: int, *, work: float, wait: float, host: float = 0.0) -> None:
    """Training steps: wait for a batch, queue work for the GPU, do something on the host."""
    for _ in range(steps):
        clock.step_ended(gpu.now())
        start = gpu.now()
        gpu.sleep(wait)
        gpu.stored()
        clock.batch_arrived(start, gpu.now())
        gpu.work(work)
        gpu.sleep(host)


def sums(clock: GpuClock, of: str = "sampled") -> tuple[int, int]:
    """Exposed wait and host wait of ordinary steps (``sampled``) or ``at_boundary``, in ns."""
    read = getattr(clock, of).values()
    return sum(exposed for exposed, _ in read), sum(waited for _, waited in read)


@pytest.mark.parametrize(
    ("loop", "exposed"),
    [
        pytest.param({"work": 30, "wait": 10}, 0.0, id="the GPU works through it"),
        pytest.param({"work": 5, "wait": 30, "host": 10}, 1.0, id="the GPU is idle"),
        pytest.param({"work": 10, "wait": 30}, 20 / 30, id="from the moment on at which the GPU is done"),
    ],
)
def test_which_part_of_a_wait_is_exposed(gpu, loop, exposed):
    clock = GpuClock(gpu, gpu.state)
    gpu.work(loop["work"])
    run(gpu, clock, 50, **loop)
    gpu.sleep(10_000)
    clock.epoch_boundary(gpu.now())  # reads what is left
    assert clock.pairs > 5
    assert clock.distrusted == 0
    waited_for, waited = sums(clock)
    assert waited_for / waited == pytest.approx(exposed, abs=0.02)


def test_what_the_events_cost_is_reported(gpu):
    gpu.call_ns = 5_000
    clock = GpuClock(gpu, gpu.state)
    run(gpu, clock, 100, work=1, wait=200)
    assert gpu.state.overhead_ns == 2 * gpu.call_ns * (clock.pairs + 1)


@pytest.mark.parametrize(("step_ms", "at_most_us"), [(1, 1), (5, 5), (20, 10), (60, 10), (1000, 10)])
def test_timed_waits_cost_little_on_average(gpu, step_ms, at_most_us):
    gpu.call_ns = 40_000
    clock = GpuClock(gpu, gpu.state)
    run(gpu, clock, 5000, work=0.1, wait=step_ms)
    assert clock.pairs > 50
    assert gpu.state.overhead_ns / 5000 <= 1.5 * at_most_us * 1000


def test_steps_that_become_longer_are_timed_within_a_second(gpu):
    """After quick ones the next wait to time is hundreds of steps away."""
    gpu.call_ns = 100_000
    clock = GpuClock(gpu, gpu.state)
    run(gpu, clock, 100, work=0.1, wait=1)
    pairs = clock.pairs
    gpu.sleep(999)
    clock._begun_ns = gpu.now()
    assert not clock.is_overdue()
    gpu.sleep(1000)
    assert clock.is_overdue()
    run(gpu, clock, 1, work=0.1, wait=1000)
    clock.epoch_boundary(gpu.now())  # reads it
    assert clock.pairs > pairs


def test_waits_that_cannot_be_timed_cost_no_more(gpu, observed):
    """The device is not known yet, or another thread captures a graph. Between the attempts the fast path is on."""
    tracker, gpu.place = observed.tracker, None
    tracker.gpu = GpuClock(gpu, tracker)
    fast = 0
    for _ in DataLoader(Numbers(200, seconds=0.0001), batch_size=1):
        gpu.sleep(1)
        fast += bool(tracker.fast_path_iterator_id)
    tracker.gpu = None
    assert fast > 100


def test_very_short_epochs_are_thinned_out(gpu):
    """As in a loop of ``next(iter(loader))``."""
    gpu.call_ns = 50_000
    clock, exposed = GpuClock(gpu, gpu.state), ExposedWait()
    spans = []
    for _ in range(5000):
        clock.requested(None, gpu.now())
        clock.batch_arrived(gpu.now(), gpu.now())
        gpu.stored()
        clock.requested(id(object()), gpu.now())
        start = gpu.now()
        gpu.sleep(1)
        gpu.stored()
        spans.append((start, gpu.now(), ring.STEP, None))
        clock.batch_arrived(start, gpu.now())
    exposed.count(spans)
    exposed.gpu(5.0, clock.sampled, clock.at_boundary)
    spent = clock.pairs * 2 * gpu.call_ns
    assert 0 < spent <= 2.5 * BUDGET_RATIO * (gpu.now() - 1_000 * MS)
    assert exposed.seconds == pytest.approx(5.0, rel=0.03)


@pytest.mark.parametrize("loop", ["plain", "marked steps", "two loaders"])
def test_waits_are_thinned_out_in_every_kind_of_loop(observed, gpu, loop):
    gpu.call_ns = 50_000
    tracker = observed.tracker
    clock = tracker.gpu = GpuClock(gpu, tracker)

    class Data(Numbers):
        def __getitem__(self, index):
            gpu.sleep(1)
            return index

    iterators = [iter(DataLoader(Data(3000), batch_size=1)) for _ in range(2 if loop == "two loaders" else 1)]
    slow, spans, began = 0, [], gpu.now()
    for _ in range(3000):
        for iterator in iterators:
            next(iterator)
        slow += not tracker.fast_path_iterator_id
        if loop == "marked steps":
            tracker.enter_step()
        gpu.work(0.5)
        if loop == "marked steps":
            tracker.exit_step()
        spans += tracker.ring.drain(1 << 20)
    tracker.gpu = None
    assert clock.pairs >= 10
    assert 2 * gpu.call_ns * clock.pairs <= 3 * BUDGET_RATIO * (gpu.now() - began)
    if loop == "plain":
        assert slow <= 3 * clock.pairs, "between the timed waits the fast path is on"
    assert sum(bool(code & (ring.BATCH | ring.JOINS)) for _, _, code, _ in spans) == 3000 * len(iterators)


@pytest.mark.parametrize(("workers", "work_ms"), [(4, 5), (8, 3), (2, 5), (3, 1), (16, 2), (5, 5)])
def test_waits_that_repeat_with_the_workers_are_measured(gpu, workers, work_ms):
    """All workers finish at about the same time: one long wait, then batches that are ready, and so on.

    The calls are so slow that one of as many steps is timed as there are workers.
    """
    gpu.call_ns = workers * work_ms * 1000
    clock, exposed, truth, waited = GpuClock(gpu, gpu.state), ExposedWait(), 0, 0
    for step in range(500 * (240 // work_ms)):
        clock.step_ended(gpu.now())
        asked, busy_until = gpu.now(), gpu.busy_until_ns
        gpu.sleep(2 * work_ms * workers if step % workers == 0 else 0.02)
        came = gpu.now()
        gpu.stored()
        clock.batch_arrived(asked, came)
        gpu.work(work_ms)
        exposed.count([(asked, came, ring.STEP, None)])
        waited += came - asked
        truth += max(0, came - max(asked, busy_until))
        if step % 500 == 499:
            exposed.gpu(waited / 1e9, clock.sampled.copy(), clock.at_boundary.copy())
    assert exposed.seconds == pytest.approx(truth / 1e9, rel=0.03)


def test_a_pair_that_contradicts_the_host_clock_is_dropped(gpu):
    clock = GpuClock(gpu, gpu.state)
    for _ in range(20):
        clock.step_ended(gpu.now())
        start = gpu.now()
        gpu.sleep(50)
        gpu.stored()
        clock.batch_arrived(start, start + 10 * MS)  # the host says 10 ms, the GPU 50
    assert clock.pairs == 0
    assert clock.distrusted > 0
    assert not clock.sampled


def test_a_gpu_far_behind_does_not_pile_up_events(gpu):
    clock = GpuClock(gpu, gpu.state)
    run(gpu, clock, 500, work=500, wait=100)
    assert gpu.events <= 2 * 10


def test_the_start_of_an_epoch_is_timed_each_time(gpu):
    clock = GpuClock(gpu, gpu.state)
    for _ in range(3):
        clock.epoch_boundary(gpu.now())
        start = gpu.now()
        gpu.sleep(500)
        clock.batch_arrived(start, gpu.now())
        gpu.work(1)
        run(gpu, clock, 3, work=1, wait=2)
    clock.epoch_boundary(gpu.now())  # reads what is left
    assert sums(clock, "at_boundary")[1] == 3 * 500 * MS
    assert sums(clock, "at_boundary")[0] == pytest.approx(3 * 500 * MS, rel=0.01)


# -- exposed wait on devices other than CUDA, with stand-ins for their torch modules -----------------------------------


torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # imports what it needs before parts of torch are replaced


@pytest.fixture
def device(monkeypatch):
    """An XPU that is in use."""
    made = Device()
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch, "Event", Event)
    for name in ("is_initialized", "current_device", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.xpu, name, getattr(made, name), raising=False)
    return made


def train(*parameters, steps: int = 30) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    for _ in DataLoader(Numbers(steps, seconds=0.01), batch_size=1):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def wait_until(agent, source: str | None) -> None:
    assert wait_for(lambda: agent.accounting.exposed_source == source)


def finished(agent):
    """The last line of the log, and the verdict."""
    telemetry.stop()
    (end,) = [line for line in log_lines(agent) if line["event"] == "run_end"]
    return end, summarize(load(agent.run_dir))["verdict"]


def test_a_device_with_timing_events_is_timed_as_cuda_is(agent, device):
    wait_until(agent, "xpu_events")
    train(torch.nn.Parameter(torch.ones(1)))
    assert agent.tracker.gpu.pairs > 0
    end, _ = finished(agent)
    assert end["exposed_wait_total_seconds"] is not None


class OnXpu(torch.nn.Parameter):
    """A parameter that seems to be on the second device. The current device stays the first."""

    device = property(lambda self: torch.device("xpu", 1))


def test_events_are_never_destroyed(agent, device, monkeypatch):
    """The end of an event waits for the driver, and after CUDA has failed it writes to stderr."""
    destroyed = []
    monkeypatch.setattr(Event, "__del__", lambda _self: destroyed.append(1))
    wait_until(agent, "xpu_events")
    train(torch.nn.Parameter(torch.ones(1)))
    assert Event.made > 0
    telemetry.stop()
    agent.attachment.clock = None
    gc.collect()
    assert destroyed == []


def test_the_device_of_the_parameters_is_used_and_no_other(agent, device):
    device.stream = SimpleNamespace(device_index=1, stream_id=0)
    wait_until(agent, "xpu_events")
    train(OnXpu(torch.ones(1)))
    assert agent.tracker.device == 1
    assert agent.tracker.gpu.pairs > 0  # after a call to the other device there would be no clock any more


class OnThird(torch.nn.Parameter):
    device = property(lambda self: torch.device("xpu", 2))


def test_the_devices_of_several_optimizers_are_known_without_a_loader(agent, device):
    """The optimizer of an embedding that stays on the host, and those of two networks."""
    device.stream, tracker = SimpleNamespace(device_index=1, stream_id=0), agent.tracker
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1, foreach=False)
        for parameters in (
            [torch.ones(1)],
            [torch.ones(1), OnXpu(torch.ones(1))],
            [OnThird(torch.ones(1))],
            [torch.ones(1)],
        )
    ]
    for optimizer in optimizers:
        optimizer.step()
    wait_for(lambda: [str(each) for each in tracker.devices] == ["xpu:1", "xpu:2"])
    assert (tracker.trained_on, tracker.device) == ("xpu", 1)


@pytest.mark.parametrize("has_context", [True, False, None])
def test_a_current_device_that_nothing_has_used_is_not_the_training_s(observed, monkeypatch, has_context):
    """With ``model.to("cuda:3")`` alone it stays device 0, and many batches may come before the optimizer steps."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if has_context is not None:
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _index: has_context, raising=False)
    for _ in DataLoader(Numbers(40), batch_size=1):
        observed.tracker.slow_path()
    assert observed.tracker.device == (None if has_context is False else 0)


def test_a_step_in_the_backward_pass_does_not_give_the_training_thread_away(observed, monkeypatch):
    """A trial run before the first batch, with an optimizer that steps in the backward pass, on autograd's thread."""
    optimizer = torch.optim.SGD([OnXpu(torch.ones(1))], lr=0.1, foreach=False)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    autograd = threading.Thread(target=optimizer.step)
    autograd.start()
    autograd.join()
    observed.read()
    assert observed.tracker.here
    assert observed.tracker.device == 1, "the device is known all the same"
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)
    training = threading.Thread(target=optimizer.step)
    training.start()
    training.join()
    assert not observed.tracker.here, "another thread of the script trains"


def test_parameters_on_several_devices_are_told_once(agent, device):
    """Layers of one model on several devices. The log says on which of them the wait is measured."""
    wait_until(agent, "xpu_events")
    second, third, on_host = OnXpu(torch.ones(1)), OnThird(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    device.stream = SimpleNamespace(device_index=1, stream_id=0)
    train(on_host, second, third)
    assert agent.tracker.device == 1
    telemetry.stop()
    told = [line["message"] for line in log_lines(agent) if line["event"] == "error" and line["source"] == "gpu"]
    assert told == ["the parameters are on xpu:1 and on xpu:2; the exposed wait is measured on xpu:1 alone"]


def test_a_rank_is_on_an_accelerator_without_a_reading_of_it(agent, device):
    """Else a rank that blocks in `loss.item()` would be judged like one that computes on the CPU."""
    wait_until(agent, "xpu_events")
    assert agent._collectors.samples.gpu is None
    assert agent._builder.tick().conditions.on_gpu


def test_without_an_optimizer_the_current_device_is_used_some_steps_later(agent, device):
    wait_until(agent, "xpu_events")
    for step, _ in enumerate(DataLoader(Numbers(40, seconds=0.001), batch_size=1)):
        assert step > 12 or agent.tracker.device is None
    assert agent.tracker.device == 0
    assert agent.tracker.gpu.pairs > 0


@pytest.mark.parametrize("name", ["hpu", "npu", "mtia"])
def test_a_device_without_them_has_no_exposed_wait(agent, monkeypatch, name):
    module = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch, name, module, raising=False)
    monkeypatch.delattr(torch, "accelerator", raising=False)  # as in torch 2.4
    wait_until(agent, None)
    train(torch.nn.Parameter(torch.ones(1)))
    end, verdict = finished(agent)
    assert end["exposed_wait_total_seconds"] is None
    assert f"no events that time the work of this device ({name})" in end["exposed_wait_absent"]
    assert f"was not measured: {end['exposed_wait_absent']}" in verdict


def test_a_device_of_an_extension_is_known(agent, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "abacus")
    monkeypatch.setattr(torch, "abacus", SimpleNamespace(is_initialized=lambda: True), raising=False)
    monkeypatch.delattr(torch, "Event", raising=False)
    wait_until(agent, None)


def test_the_parameters_of_the_optimizer_name_the_device(agent, monkeypatch):
    monkeypatch.setattr("telemetry.seams.optimizer._devices_of", lambda optimizer: [torch.device("xla", 0)])
    _optimizer = train(torch.nn.Parameter(torch.ones(1)), steps=3)
    wait_until(agent, None)
    assert "(xla)" in agent.accounting.exposed_absent


def test_a_device_that_is_there_but_not_in_use_does_not_count(agent, device):
    device.initialised = False
    train(torch.nn.Parameter(torch.ones(1)))
    end, _ = finished(agent)
    assert end["exposed_wait_absent"] is None
    assert end["exposed_wait_total_seconds"] > 0.25
    assert Event.made == 0


def test_xla_counts_once_its_runtime_is_initialised(monkeypatch):
    module = ModuleType("torch_xla")
    monkeypatch.setitem(sys.modules, "torch_xla", module)
    assert device_in_use(None) is None
    module._XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: True)
    assert device_in_use(None) == "xla"
    assert device_in_use("cpu") is None


def test_events_that_fail_leave_the_reason_in_the_verdict(agent, device, monkeypatch):
    def fails(*_):
        raise NotImplementedError("no timing")

    monkeypatch.setattr(Event, "elapsed_time", fails)
    wait_until(agent, "xpu_events")
    train(torch.nn.Parameter(torch.ones(1)))
    wait_until(agent, None)
    _, verdict = finished(agent)
    assert "the timing events of this device (xpu) failed" in verdict


def test_waits_in_a_side_stream_are_not_measured(agent, device):
    wait_until(agent, "xpu_events")
    work, side = device.stream, SimpleNamespace(device_index=0, stream_id=9)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loader = DataLoader(Numbers(400, seconds=0.001), batch_size=1)
    clock = agent.tracker.gpu
    batches = iter(loader)
    for _ in range(300):
        device.stream = side
        next(batches)
        device.stream = work
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        clock._cost_ns = 0.0  # time every step
    assert not clock.sampled
    assert clock.skipped >= 20
    wait_until(agent, None)
    assert agent.tracker.gpu is None, "no more waits are timed"
    assert "another stream" in agent.accounting.exposed_absent


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool=None) -> None:
        if pool == "bad":
            raise RuntimeError("bad pool")

    def capture_end(self) -> None:
        """Nothing to end."""


@pytest.fixture(params=["torch.cuda.CUDAGraph", "torch.accelerator.Graph"])
def graph(monkeypatch, request):
    if request.param == "torch.accelerator.Graph" and not hasattr(torch, "accelerator"):
        pytest.skip("torch 2.4 has no torch.accelerator")
    monkeypatch.setattr(request.param, Graph, raising=False)
    return Graph()


def test_nothing_is_touched_while_another_thread_captures_a_graph(graph, request, device, monkeypatch):
    agent = request.getfixturevalue("agent")
    wait_until(agent, "xpu_events")
    threading.Thread(target=graph.capture_begin).start()
    assert wait_for(lambda: agent.tracker.captures.under_way)
    for call in ("record", "query", "elapsed_time"):
        monkeypatch.setattr(Event, call, None)
    train(torch.nn.Parameter(torch.ones(1)), steps=5)
    monkeypatch.undo()
    assert agent.tracker.gpu is not None
    assert Event.made == 0
    graph.capture_end()
    assert not agent.tracker.captures.under_way


def test_nothing_is_touched_during_a_capture_that_was_not_announced(device, request, monkeypatch):
    """It began before the agent, or in C++. Only torch's own question about this thread's stream tells of it."""
    agent = request.getfixturevalue("agent")
    wait_until(agent, "xpu_events")
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    train(torch.nn.Parameter(torch.ones(1)), steps=5)
    assert agent.tracker.gpu is not None
    assert Event.made == 0


def test_a_capture_that_fails_to_begin_does_not_count(graph, request):
    agent = request.getfixturevalue("agent")
    with pytest.raises(RuntimeError, match="bad pool"):
        graph.capture_begin(pool="bad")
    assert not agent.tracker.captures.under_way


def test_a_capture_begins_after_the_device_call_in_progress(graph, request):
    captures = request.getfixturevalue("agent").tracker.captures
    order = []
    captures.touching = threading.get_ident()
    capturing = threading.Thread(target=lambda: (graph.capture_begin(), order.append("capture")))
    capturing.start()
    assert wait_for(lambda: captures.under_way)
    order.append("call")
    captures.touching = 0
    capturing.join()
    assert order == ["call", "capture"]


# -- exposed wait on a real GPU, against a torch.profiler trace of the same steps --------------------------------------


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with its driver")


def multiply(loader, matrix, rounds: int) -> None:
    for _ in loader:
        for _ in range(rounds):
            matrix = matrix @ matrix
            matrix = matrix / matrix.norm()


def rounds_for(milliseconds: float, matrix) -> int:
    """How many rounds of work keep this GPU busy for the given time."""
    multiply([0], matrix, 20)
    torch.cuda.synchronize()
    began = time.perf_counter()
    multiply([0], matrix, 100)
    torch.cuda.synchronize()
    return max(1, round(100 * milliseconds / 1e3 / (time.perf_counter() - began)))


def idle_in_waits(profile) -> tuple[float, float]:
    """Seconds of the loader's ranges in which no kernel ran, and their length, from the trace."""
    kernels, waits = [], []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append(span)
        elif "DataLoader" in event.name and "__next__" in event.name:
            waits.append(span)
    kernels.sort()
    idle = total = 0.0
    for start, end in sorted(waits)[:-1]:  # the last one brings no batch
        total += end - start
        at = start
        for first, last in kernels:
            if last <= at or first >= end:
                continue
            idle += max(0.0, first - at)
            at = max(at, last)
        idle += max(0.0, end - at)
    return idle / 1e6, total / 1e6


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize(("wait_ms", "work_ms"), [(30, 5), (20, 40), (30, 20)])
def test_exposed_wait_is_what_a_trace_shows(observed, monkeypatch, wait_ms, work_ms):
    monkeypatch.setattr(gpu_clock, "BUDGET_RATIO", 1.0)  # time every step
    monkeypatch.setattr(gpu_clock, "_BUDGET_NS", 10**12)
    matrix = torch.randn(2048, 2048, device="cuda")
    rounds = rounds_for(work_ms, matrix)
    observed.attachment.watch_gpu()
    observed.tracker.device = torch.cuda.current_device()  # no optimizer steps
    loader = DataLoader(Numbers(30, seconds=wait_ms / 1e3), batch_size=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        multiply(loader, matrix, rounds)
        torch.cuda.synchronize()
    clock = observed.tracker.gpu
    clock.epoch_boundary(time.monotonic_ns())  # reads what is left
    observed.tracker.gpu = None
    idle, waited = idle_in_waits(profile)
    measured = (sums(clock)[0] + sums(clock, "at_boundary")[0]) / 1e9
    assert clock.pairs >= 25
    assert measured == pytest.approx(idle, abs=0.05 * waited + 0.01)


@pytest.mark.gpu
@ON_A_GPU
def test_a_capture_in_progress_is_not_disturbed(observed):
    matrix = torch.randn(256, 256, device="cuda")
    observed.attachment.watch_gpu()
    observed.tracker.device = torch.cuda.current_device()  # no optimizer steps
    iterator = iter(DataLoader(Numbers(20), batch_size=1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            next(iterator)
            result = matrix @ matrix
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        next(iterator)
        result = matrix @ matrix
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(result, matrix @ matrix, rtol=1e-2, atol=1e-2)
    observed.check_sum()


# -- a forked child never releases what it has inherited of a device ---------------------------------------------------


ROOT = Path(__file__).parents[1]

TRAINING = """
import gc, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import telemetry
from tests.quick_optimizers import QuickSGD
from tests.fakes.device import Event, install_cuda

report, folder = int(sys.argv[1]), sys.argv[2]
install_cuda(torch, report)
parent = os.getpid()
agent = telemetry.start(folder, port="off", interval_seconds=0.1, start_line=False)
agent.canary = Event(enable_timing=True)  # stands for anything else of a device that the agent may hold
model = torch.nn.Linear(2, 2)
optimizer = QuickSGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.rand(16, 2))


def train(loader):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        while agent.tracker.gpu is None or agent.tracker.trained_on is None:  # the agent has looked at both
            time.sleep(0.01)


def ends(loader):
    workers = []
    iterator = iter(loader)
    workers += iterator._workers
    yield from iterator
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0, worker.exitcode


train(DataLoader(data, batch_size=4))
"""

EPOCHS = """
for epoch in range(3):
    train(ends(DataLoader(data, batch_size=4, num_workers=2)))
    with torch.no_grad():
        for _ in ends(DataLoader(data, batch_size=4, num_workers=2)):
            pass
"""

FORKS = """
for end in ("_exit", "exit", "agent", "hooks"):
    child = os.fork()
    if child == 0:
        if end == "agent":
            second = telemetry.start(folder, port="off", start_line=False)
            telemetry.stop()
            del second
        if end == "hooks":
            for _ in DataLoader(data, batch_size=4):
                optimizer.zero_grad()  # no gradient is left: on a device, any work in a child fails
                optimizer.step()
        del agent
        gc.collect()
        if end == "_exit":
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, end
"""

LAST = """
assert agent.tracker.gpu.pairs > 0
assert Event.made >= 3
telemetry.stop()
"""


# Python 3.12 warns of a fork beside any threads, so also beside those of CUDA's driver.
CUDA_THREADS = ("-W", "ignore:This process:DeprecationWarning")


def fork_beside_a_device(
    tmp_path, *parts: str, script: str = TRAINING, options: tuple[str, ...] = ()
) -> tuple[set[int], int, str]:
    """The pids in which an event was destroyed, the pid of the training, and its stderr."""
    report, write = os.pipe()
    code = "\n".join((script, *parts))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, *options, "-c", code, str(write), str(tmp_path / "run")]
    process = subprocess.Popen(
        arguments, pass_fds=(write,), env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    os.close(write)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    with os.fdopen(report) as lines:
        destroyed = {int(line) for line in lines}
    assert process.returncode == 0, errors
    return destroyed, process.pid, errors


@pytest.mark.parametrize("children", [EPOCHS, FORKS], ids=["workers", "plain forks"])
def test_children_destroy_no_event_of_the_training(children, tmp_path):
    destroyed, training, errors = fork_beside_a_device(tmp_path, children, LAST)
    assert destroyed <= {training}
    assert errors == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with its driver")
def test_children_end_well_beside_real_events(tmp_path):
    real = TRAINING.replace("install_cuda(torch, report)\n", "").replace(
        "model = torch.nn.Linear(2, 2)", "model = torch.nn.Linear(2, 2).cuda()"
    )
    real = real.replace(
        "agent.canary = Event(enable_timing=True)",
        "agent.canary = torch.cuda.Event(enable_timing=True); agent.canary.record()",
    )
    real = real.replace("model(batch)", "model(batch.cuda())")
    last = LAST.replace("assert Event.made >= 3\n", "")
    assert fork_beside_a_device(tmp_path, EPOCHS, FORKS, last, script=real, options=CUDA_THREADS)[2] == ""
