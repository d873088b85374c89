"""A saved trace is never larger than what was reserved for it, whatever was recorded."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import record_function

from telemetry.snapshot import snapshot_outcome
from telemetry.snapshot.session import Session
from tests.snapshot_recording import plan

WITHOUT_EVENTS = 1 << 16
"""Stands for the 4 MiB that the bounds have to spare, so that what they allow for an event decides."""


def operators() -> None:
    ones = torch.ones(4)
    for _ in range(3000):
        torch.add(ones, ones)


def a_network() -> None:
    layers, images = torch.nn.LSTM(4, 4, 2), torch.ones(1, 2, 8, 8)
    for _ in range(10):
        layers(torch.ones(3, 2, 4))[0].sum().backward()
        torch.nn.functional.interpolate(images, scale_factor=2, mode="bicubic")
        torch.nn.functional.conv2d(images, torch.ones(2, 2, 2, 2), torch.ones(2))


def long_lists() -> None:
    tensors = [torch.ones(2) for _ in range(300)]
    for _ in range(10):
        torch.stack(tensors)
        torch._foreach_add(tensors, 1.0)


def lists_with_all_shapes() -> None:
    tensors = [torch.ones(1, 1, 1, 1, 1, 1, 2) for _ in range(30)]
    for _ in range(300):
        torch.stack(tensors)


def ranges(name: str, arguments: str | None = None):
    def work() -> None:
        for _ in range(300):
            with record_function(name, arguments):
                pass

    return work


WORK = {
    "operators": operators,
    "a network": a_network,
    "lists of 300 tensors": long_lists,
    "lists of 30 tensors with seven dimensions": lists_with_all_shapes,
    "long names": ranges("x" * 5000),
    "quotes": ranges('"' * 500),
    "control characters": ranges("\x01\n\t" * 200),
    "other alphabets": ranges("é☃😀" * 200),
    "long arguments": ranges("a", '"\x01é' * 2000),
}


@pytest.mark.parametrize("shapes", [False, True], ids=["without shapes", "with shapes"])
@pytest.mark.parametrize("work", WORK)
def test_a_trace_is_within_its_bounds(tmp_path, monkeypatch, work, shapes):
    monkeypatch.setattr(snapshot_outcome, "_MAX_WITHOUT_EVENTS", WITHOUT_EVENTS)
    session = Session(plan(1, 2), {"run": "a run", "rank": 0, "world_size": 1}, shapes=shapes)
    session.prepare()
    session.start()
    WORK[work]()
    trace = session.stop()
    least, most, _ = trace.estimate()
    trace.save(tmp_path / "trace.json")
    size = (tmp_path / "trace.json").stat().st_size
    assert least <= size <= most
    assert size <= trace.max_bytes()
    assert size > WITHOUT_EVENTS, "otherwise it says nothing of the events"
