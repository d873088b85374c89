"""Exposed wait on devices other than CUDA, with stand-ins for their torch modules."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.hooks.device import device_in_use
from telemetry.report.logs import load
from tests.data_sets import Numbers
from tests.fakes.device import Device, Event
from tests.report_logs import summarize
from tests.running_agent import log_lines, wait_for

torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # imports what it needs before parts of torch are replaced


@pytest.fixture
def device(monkeypatch):
    """An XPU that is in use."""
    made = Device()
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch, "Event", Event)
    for name in ("is_initialized", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.xpu, name, getattr(made, name), raising=False)
    return made


def train(parameter, steps: int = 30) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in DataLoader(Numbers(steps, seconds=0.01), batch_size=1):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


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
    monkeypatch.setattr("telemetry.hooks.optimizer._device_of", lambda optimizer: "xla")
    train(torch.nn.Parameter(torch.ones(1)), steps=3)
    wait_until(agent, None)
    assert "(xla)" in agent.accounting.exposed_absent


def test_the_device_of_a_parameter_is_read_from_the_optimizer(agent):
    train(torch.nn.Parameter(torch.ones(1)), steps=3)
    assert agent.tracker.trained_on == "cpu"
    wait_until(agent, "host")


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


def test_an_accelerator_counts_once_memory_of_it_is_allocated(monkeypatch):
    allocated = False
    named = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type="mps"))
    monkeypatch.setattr(torch, "accelerator", named, raising=False)  # torch 2.4 has none
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: allocated, raising=False)
    assert device_in_use(None) is None
    allocated = True
    assert device_in_use(None) == "mps"


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
    assert clock.sampled_ns == (0, 0)
    assert clock.skipped >= 290
    wait_until(agent, None)
    assert "another stream" in agent.accounting.exposed_absent


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool=None) -> None:
        if pool == "bad":
            raise RuntimeError("bad pool")

    def capture_end(self) -> None:
        """Nothing to end."""


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph()


def test_nothing_is_touched_while_another_thread_captures_a_graph(graph, request, device, monkeypatch):
    agent = request.getfixturevalue("agent")
    wait_until(agent, "xpu_events")
    threading.Thread(target=graph.capture_begin).start()
    assert wait_for(lambda: agent.attachment.captures.under_way)
    for call in ("record", "query", "elapsed_time"):
        monkeypatch.setattr(Event, call, None)
    train(torch.nn.Parameter(torch.ones(1)), steps=5)
    monkeypatch.undo()
    assert agent.tracker.gpu is not None
    assert Event.made == 0
    graph.capture_end()
    assert not agent.attachment.captures.under_way


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
    assert not agent.attachment.captures.under_way


def test_a_capture_begins_after_the_device_call_in_progress(graph, request):
    captures = request.getfixturevalue("agent").attachment.captures
    order = []
    captures.touching = threading.get_ident()
    capturing = threading.Thread(target=lambda: (graph.capture_begin(), order.append("capture")))
    capturing.start()
    assert wait_for(lambda: captures.under_way)
    order.append("call")
    captures.touching = 0
    capturing.join()
    assert order == ["call", "capture"]
