"""Times garbage collections that stop the training thread."""

from __future__ import annotations

import gc
from threading import get_ident
from typing import TYPE_CHECKING, Any

from telemetry.core.clock import clock_gettime_ns, now_ns, thread_time_ns

if TYPE_CHECKING:
    from telemetry.attach.patches import Patches
    from telemetry.attach.step_tracker import StepTracker


def time_garbage(tracker: StepTracker, patches: Patches) -> None:
    """Add a callback to ``gc.callbacks``. It costs two stamps a collection.

    A collection on another thread holds the GIL, so it stops the training thread, too. Time is not counted if the
    training thread ran meanwhile (code that does not need the GIL), or waited for a batch of its workers.

    Args:
        tracker: gets the sums.
        patches: remove the callback.
    """
    began = ran = 0
    in_wait = False

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal began, ran, in_wait
        del info
        elsewhere = get_ident() != tracker.thread
        if not elsewhere:
            tracker.collecting = phase == "start"
        counts = tracker.active and (tracker.stepping or (tracker.asking and not elsewhere))
        if not counts or (elsewhere and _waits_for_workers(tracker)):
            began = 0  # during startup or an evaluation no step loses time
            return
        try:
            if phase == "start":
                ran = _cpu_ns(tracker.native_thread) if elsewhere else thread_time_ns()
                in_wait = tracker.asking
                began = now_ns()
            elif began:
                lost = now_ns() - began
                if elsewhere:
                    lost -= _cpu_ns(tracker.native_thread) - ran
                lost = max(0, lost)
                tracker.garbage_ns += lost
                if in_wait:
                    tracker.sampler_timer.collected(lost, 0 if elsewhere else thread_time_ns() - ran)
                began = 0
        except OSError:
            began = 0  # the training thread has ended

    def remove() -> None:
        if collected in gc.callbacks:
            gc.callbacks.remove(collected)

    gc.callbacks.append(collected)
    patches.on_undo(remove)


def _waits_for_workers(tracker: StepTracker) -> bool:
    source = tracker.sources.newest()
    return tracker.waiting_since != 0 and source is not None and source.kind == "workers"


def _cpu_ns(native_thread: int) -> int:
    """CPU time of a thread of this process. The clock's number is computed as pthread_getcpuclockid does.

    Raises:
        OSError: there is no such thread.
    """
    return clock_gettime_ns(~native_thread << 3 | 6)
