"""A training thread whose stack is sampled by a thread of ours, every few milliseconds and without an agent."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from telemetry.safety.threads import OwnThread
from telemetry.seams.ring import S_COMPUTE, Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sources import sampler
from telemetry.sources.sampler import Sampler
from telemetry.util.clock import sleep

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

GAP_SECONDS = 0.004


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samplers of this process take a sample every few milliseconds, whatever that costs."""
    for name in ("_WAITS", "_RANKS", "_SLOW_RANK", "_STALL"):
        monkeypatch.setattr(sampler, name, GAP_SECONDS)
    monkeypatch.setattr(sampler, "_CALM", ((float("inf"), GAP_SECONDS),))
    monkeypatch.setattr(sampler, "_FIRST_SHARE", 1.0)
    monkeypatch.setattr(sampler, "_MAX_SHARE", 1.0)


def in_a_step(thread: threading.Thread | None = None, *, device: int | None = None) -> StepTracker:
    """A tracker of a thread, by default this one, that is in a step."""
    tracker, thread = StepTracker(Ring()), thread or threading.current_thread()
    tracker.thread, tracker.native_thread = thread.ident or 0, thread.native_id or 0
    tracker.category, tracker.device = S_COMPUTE, device
    return tracker


@contextmanager
def sampled(tracker: StepTracker) -> Iterator[Sampler]:
    """Sample a tracker's thread until the block ends."""
    made, over = Sampler(tracker, sleep), threading.Event()

    def run() -> None:
        while not over.is_set():
            made.wait(0.05)

    thread = OwnThread(run, name="telemetry-test")
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()
