"""Snapshots on a GPU: CUDA graphs stay valid, kernels are in the trace, and what a finished profile leaves behind."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.records import RECORDED, REFUSED
from tests.data_sets import Numbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for it"),
]


def test_kernels_are_in_the_trace(taken):
    matrix = torch.randn(256, 256, device="cuda")
    taken.arm(4, 6)
    for _ in DataLoader(Numbers(12)):
        matrix = (matrix @ matrix).tanh()
    outcome = taken.outcome()
    assert outcome.result == RECORDED
    assert any(event.get("cat") == "kernel" for event in taken.events(outcome))


def test_a_captured_graph_is_replayed_before_during_and_after(taken):
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
    assert taken.outcome().result == RECORDED


@pytest.mark.parametrize("at", [2, 4, 5, 6, 7])
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


def test_what_a_finished_profile_leaves_behind(taken, record_property):
    """Launch-bound steps before and after ten snapshots: measured, and told; the policy switches off above 10 %."""
    tensor = torch.ones(16, device="cuda")

    def steps(count: int) -> float:
        times = []
        for _ in DataLoader(Numbers(count)):
            start = time.perf_counter()
            for _ in range(200):
                tensor.add_(1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    steps(50)
    before = steps(200)
    for _ in range(10):
        first = taken.observed.tracker.ring.closed + 4
        taken.arm(first, first + 4)
        steps(12)
        assert taken.outcome().result == RECORDED
    after = steps(200)
    record_property("slowdown_ratio", after / before)
    print(f"steps of {1e3 * before:.3f} ms before, {1e3 * after:.3f} ms after ten snapshots")
    assert after < 2 * before
