"""The training thread, as the thread sampler needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.collect.procfs import is_running

if TYPE_CHECKING:
    from telemetry.attach.step_tracker import StepTracker


class TrainingThread:
    """Reads the tracker's state of the training thread from another thread."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker

    def ident(self) -> int:
        """Its ident."""
        return self._tracker.thread

    def is_computing(self) -> bool:
        """Whether it is in a step and not waiting for a batch."""
        return self._tracker.stepping and not self._tracker.waiting_since

    def is_running(self) -> bool:
        """Whether it is on a core. Always False on a GPU: there a thread that waits for the device may use a core."""
        tracker = self._tracker
        return tracker.device is None and tracker.accelerator is None and is_running(tracker.native_thread)
