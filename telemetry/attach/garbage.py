"""Garbage collection on the training thread, timed."""

from __future__ import annotations

import gc
from threading import get_ident
from typing import TYPE_CHECKING, Any

from telemetry.clock import now_ns

if TYPE_CHECKING:
    from telemetry.attach.patches import Patches
    from telemetry.attach.steps import StepTracker


def time_garbage(tracker: StepTracker, patches: Patches) -> None:
    """Add a callback to ``gc.callbacks``. Two stamps a collection."""
    began = 0

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal began
        del info
        if get_ident() != tracker.thread or not tracker.stepping:
            began = 0  # what it costs the start-up or an evaluation is no step's loss
            return
        if phase == "start":
            began = now_ns()
        elif began:
            tracker.garbage_ns += now_ns() - began
            began = 0

    def remove() -> None:
        if collected in gc.callbacks:
            gc.callbacks.remove(collected)

    gc.callbacks.append(collected)
    patches.on_undo(remove)
