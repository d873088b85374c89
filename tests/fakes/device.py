"""A fake asynchronous device below the agent: torch's module for it, with events and streams."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any


class Event:
    """An event with timing. Its destructor reports the process it runs in, as one line to ``Event.report``."""

    report = -1  # a descriptor
    made = 0

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        assert enable_timing, "asked for without timing"
        Event.made += 1
        self.owner = os.getpid()

    def record(self, stream: Any = None) -> None:
        assert os.getpid() == self.owner, "recorded in a child"
        assert stream is not None, "recorded in the stream of the current device"

    def query(self) -> bool:
        assert os.getpid() == self.owner, "queried in a child"
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0

    def __del__(self, write=os.write, getpid=os.getpid) -> None:
        if type(self).report >= 0:  # globals may be gone when the interpreter exits
            write(type(self).report, f"{getpid()}\n".encode())


class Device:
    """The common part of ``torch.cuda`` and the modules of other devices. In use from the start.

    Attributes:
        current: the current device. ``stream``: a stream of the device that computes. Calls to any other device fail.
    """

    def __init__(self) -> None:
        self.initialised = True
        self.current = 0
        self.capturing = False
        self.stream = SimpleNamespace(device_index=0, stream_id=0)

    def is_initialized(self) -> bool:
        return self.initialised

    def current_stream(self, device: int | None = None) -> Any:
        assert device == self.stream.device_index, f"asked for the stream of device {device}"
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        assert self.current == self.stream.device_index, "asked about the stream of the current device"
        return self.capturing

    def current_device(self) -> int:
        return self.current


def install_cuda(torch: Any, report: int = -1) -> Device:
    """Make ``torch.cuda`` report that it is in use. Its events report their destruction to a descriptor."""
    device = Device()
    Event.report = report
    torch.cuda.Event = Event
    base = getattr(sys.modules.get("torch._streambase"), "_EventBase", None)
    if base is not None:  # torch 2.4 checks that its events are of this class
        base.register(Event)
    for name in ("is_initialized", "current_stream", "is_current_stream_capturing", "current_device"):
        setattr(torch.cuda, name, getattr(device, name))
    return device
