"""Stands in for ``torch.cuda`` where there is no GPU: a device that is in use, with slow timing events."""

from __future__ import annotations

from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Final

_CALL_NS: Final = 100_000
"""A call of an event takes so long, several times as long as a real one: so that few waits are timed, and the median
step is one whose wait is not."""


class Event:
    """A timing event of a device that is always idle."""

    def __init__(self, *, enable_timing: bool) -> None:
        self._timing = enable_timing

    def record(self, stream: Any) -> None:
        del stream
        _take()

    def query(self) -> bool:
        _take()
        return True

    def elapsed_time(self, after: Event) -> float:
        del after
        return 0.0


def _take() -> None:
    end = perf_counter_ns() + _CALL_NS
    while perf_counter_ns() < end:
        pass


def install(torch: Any) -> None:
    """Make ``torch.cuda`` report that it is in use."""
    stream = SimpleNamespace(device_index=0, stream_id=0)
    base = getattr(torch, "_streambase", None)
    if base is not None:  # torch 2.4 checks that its events are of this class
        base._EventBase.register(Event)
    torch.cuda.Event = Event
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda _index=None: stream
    torch.cuda.is_current_stream_capturing = lambda: False
