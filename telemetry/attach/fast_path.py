"""The fast path of the hooks, and the one place that switches it on and off.

On the fast path a step costs two stamps and two stores. It handles only ordinary batches of one iterator, and notifies
no other part of the agent. Everything else takes the slow path, which notifies every part and decides anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.attach.step_tracker import StepTracker

LOOP_CHANGED: Final = "loop_changed"
STOPPED: Final = "stopped"
GPU_CLOCK: Final = "gpu_clock"
SNAPSHOT: Final = "snapshot"
NVTX: Final = "nvtx"
TIMED_BATCH: Final = "timed_batch"
BATCHES_UNSEEN: Final = "batches_unseen"

_LOOP_IS_OVER: Final = frozenset({LOOP_CHANGED, STOPPED})


class FastPath:
    """Owns ``state.fast_path_iterator_id``; nothing else writes it.

    The fast path is enabled once an iterator has given two training batches in a row and no reason below holds. Every
    batch on the slow path checks this again. So the fast path is back one batch after the last reason has ended.

    ================  ======================================================  ==========================================
    reason            set by, and why                                         until
    ================  ======================================================  ==========================================
    `LOOP_CHANGED`    `StepTracker`, `Scopes`: iteration, evaluation, phase   an iterator gives two training batches in
                      or ``step()`` begins or ends, or another loader gives   a row; or the phase ends, and the loop
                      a batch to the open step                                that it interrupted goes on
    `STOPPED`         `StepTracker.detach`: ``stop()``, or a forked child     never enabled again
    `GPU_CLOCK`       `Attachment.watch_gpu`: the GPU's clock times waits     the clock fails or is detached
    `SNAPSHOT`        `Capture.hold`: a snapshot needs each step boundary     the snapshot has ended
    `NVTX`            setting ``nvtx``: each step is a range                  never enabled again
    `TIMED_BATCH`     `StepTracker.time_next_batch`, and where an epoch       `SamplerTimer.wanted` batches were timed
                      begins: parts of the next waits are timed
    `BATCHES_UNSEEN`  `StepTracker.follow_optimizer`: each optimizer step is  batches are requested here again
                      a step
    ================  ======================================================  ==========================================

    The agent thread may disable it at the moment when the training thread is about to enable it. So a lasting reason is
    also a fact that `enable` checks (`_blocked`), and the agent thread disables the fast path again at every tick.

    Args:
        state: state of the training thread.

    Attributes:
        steady_iterator_id: ``id()`` of the iterator that gives ordinary batches, 0 for none. It stays if the fast path
            is off for another reason than the loop. Training thread only.
        disabled_by: the newest reason; None if the fast path is enabled. For debugging.
    """

    __slots__ = ("_state", "disabled_by", "steady_iterator_id")

    def __init__(self, state: StepTracker) -> None:
        self._state = state
        self.steady_iterator_id = 0
        self.disabled_by: str | None = LOOP_CHANGED

    def enable(self, iterator_id: int) -> None:
        """Expect ordinary batches from this iterator. On the training thread."""
        self.steady_iterator_id = iterator_id
        self.disabled_by = self._blocked()
        self._state.fast_path_iterator_id = 0 if self.disabled_by else iterator_id

    def disable(self, reason: str) -> None:
        """Send the next batch to the slow path. If the loop changes, only on the training thread.

        Args:
            reason: a reason of the table.
        """
        self.disabled_by = reason
        self._state.fast_path_iterator_id = 0
        if reason in _LOOP_IS_OVER:
            self.steady_iterator_id = 0

    def _blocked(self) -> str | None:
        """A reason that holds independently of the loop; None for none."""
        state = self._state
        if state.gpu is not None:
            return GPU_CLOCK
        if state.recorder is not None:
            return SNAPSHOT
        if state.profiler_ranges.nvtx:
            return NVTX
        return TIMED_BATCH if state.sampler_timer.wanted else None
