"""The CUDA build of torch: what the agent calls there, and on which thread.

They need a GPU, or a stand-in for one below that build: see CONTRIBUTING.md. A CPU build has none of these functions.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers
from tests.quick_optimizers import QuickSGD
from tests.running_agent import log_lines, scrape, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU, or CUDA_STAND_IN=PYTHON make test-cuda (CONTRIBUTING.md)"
    ),
]


def train(steps: int, *, seconds: float = 0.0, device: str = "cuda") -> torch.nn.Module:
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    for _ in DataLoader(Numbers(steps, seconds), batch_size=1):
        model(torch.ones(8, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_an_allocation_that_fails_is_in_the_log(tmp_path):
    agent = telemetry.start(tmp_path / "run", port="off", interval_seconds=0.1, start_line=False, oom_snapshot="on")
    torch.cuda.init()
    wait_for(lambda: agent._collectors._failed_allocations._attached)
    model = train(20)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()
    telemetry.stop()
    (line,) = [line for line in log_lines(agent) if line["event"] == "gpu_out_of_memory"]
    assert (line["gpu"], line["tried_bytes"], line["allocated_bytes"]) == (
        torch.cuda.current_device(),
        1 << 50,
        allocated,
    )
    assert 0 < line["free_bytes"] <= line["total_bytes"] == torch.cuda.mem_get_info()[1]
    assert line["largest_free_bytes"] > 0
    assert (agent.run_dir / line["file"]).stat().st_size > 0
    assert "torch_memory" not in {each["source"] for each in log_lines(agent) if each["event"] == "error"}
    del model


def test_the_training_thread_reads_the_allocator(agent, monkeypatch):
    """While another thread waits for memory of the GPU, a reading waits with the GIL held."""
    threads, read = set(), torch._C._cuda_memoryStats

    def reading(device):
        threads.add(threading.get_ident())
        return read(device)

    monkeypatch.setattr(torch._C, "_cuda_memoryStats", reading)
    torch.cuda.init()
    model = train(100, seconds=0.01)
    wait_for(lambda: agent._collectors.samples.torch_memory)
    train(30, seconds=0.01)
    shown = wait_for(lambda: scrape(agent).get(("training_cuda_memory_allocated_bytes",)))
    assert shown >= sum(each.nbytes for each in model.parameters())
    assert threads == {threading.get_ident()}


def test_events_are_never_destroyed(agent, monkeypatch):
    """The end of an event waits for the driver, and after CUDA has failed it writes to stderr."""
    made, destroyed = [], []

    class Counted(torch.cuda.Event):
        def __init__(self, *args, **kwargs):
            made.append(id(self))

        def __del__(self):
            destroyed.append(id(self))

    monkeypatch.setattr(torch.cuda, "Event", Counted)
    train(30)  # the agent sees CUDA, and the device of the parameters
    wait_for(lambda: agent.tracker.gpu is not None)
    while not agent.tracker.gpu.pairs:
        train(20, seconds=0.005)
    telemetry.stop()
    gc.collect()
    assert made
    assert destroyed == []


def test_the_wait_of_a_starved_loop_is_exposed(agent):
    train(100)
    wait_for(lambda: agent.tracker.gpu is not None)
    train(150, seconds=0.02)
    telemetry.stop()
    (end,) = [line for line in log_lines(agent) if line["event"] == "run_end"]
    assert end["exposed_wait_total_seconds"] > 1
    assert agent.attachment.clock.pairs > 0


def test_a_device_that_is_not_known_yet_is_no_error(agent, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices: with one it is known")
    torch.cuda.init()
    readings, read = [], agent.tracker.allocator.read
    monkeypatch.setattr(agent.tracker.allocator, "read", lambda: readings.append(read()))
    wait_for(lambda: len(readings) > 2)
    telemetry.stop()
    assert "torch_memory" not in {line["source"] for line in log_lines(agent) if line["event"] == "error"}
