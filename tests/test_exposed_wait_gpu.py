"""Exposed wait on a real GPU, against a torch.profiler trace of the same steps."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.hooks import gpu
from tests.data_sets import Numbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with its driver"),
]


def train(loader, matrix, rounds: int) -> None:
    for _ in loader:
        for _ in range(rounds):
            matrix = matrix @ matrix
            matrix = matrix / matrix.norm()


def rounds_for(milliseconds: float, matrix) -> int:
    """How many rounds of work keep this GPU busy for the given time."""
    train([0], matrix, 20)
    torch.cuda.synchronize()
    began = time.perf_counter()
    train([0], matrix, 100)
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


@pytest.mark.parametrize(("wait_ms", "work_ms"), [(30, 5), (20, 40), (30, 20)])
def test_exposed_wait_is_what_a_trace_shows(observed, monkeypatch, wait_ms, work_ms):
    monkeypatch.setattr(gpu, "BUDGET_RATIO", 1.0)  # time every step
    matrix = torch.randn(2048, 2048, device="cuda")
    rounds = rounds_for(work_ms, matrix)
    observed.attachment.watch_gpu()
    loader = DataLoader(Numbers(30, seconds=wait_ms / 1e3), batch_size=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        train(loader, matrix, rounds)
        torch.cuda.synchronize()
    clock = observed.tracker.gpu
    clock.epoch_boundary()  # reads what is left
    observed.tracker.gpu = None
    idle, waited = idle_in_waits(profile)
    measured = (clock.sampled_ns[0] + clock.boundary_ns[0]) / 1e9
    assert clock.pairs >= 25
    assert measured == pytest.approx(idle, abs=0.05 * waited + 0.01)


def test_a_capture_in_progress_is_not_disturbed(observed):
    matrix = torch.randn(256, 256, device="cuda")
    observed.attachment.watch_gpu()
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
