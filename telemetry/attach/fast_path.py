"""The fast path of the hooks, and the one place that switches it on and off.

On the fast path a step costs two stamps and two stores: nothing but an ordinary batch of one iterator is expected, and
no other part of the agent is told of it. Any other case takes the slow path, which tells every part and decides anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.attach.step_state import StepState

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

    The fast path is enabled once an iterator has given two training batches in a row and no reason of the table holds.
    Every batch of the slow path checks this anew, so the fast path is back one batch after the last reason has gone.

    ================  ======================================================  ==========================================
    reason            who says so, and why                                    until
    ================  ======================================================  ==========================================
    `LOOP_CHANGED`    `StepTracker`, `Scopes`: iteration, evaluation, phase   an iterator gives two training batches in
                      or ``step()`` begins or ends, or another loader gives   a row; or the phase ends, and the loop
                      a batch to the open step                                that it interrupted goes on
    `STOPPED`         `StepTracker.detach`: ``stop()``, or a forked child     never enabled again
    `GPU_CLOCK`       `Attachment.watch_gpu`: the GPU's clock times waits     the clock fails or is detached
    `SNAPSHOT`        `Capture.hold`: a snapshot is told of each boundary     the snapshot has ended
    `NVTX`            setting ``nvtx``: each step is a range                  never enabled again
    `TIMED_BATCH`     `StepTracker.time_next_batch`, and where an epoch       `NextTimer.wanted` batches have been timed
                      begins: parts of the next waits are timed
    `BATCHES_UNSEEN`  `StepTracker.follow_optimizer`: each optimizer step is  batches are requested here again
                      a step
    ================  ======================================================  ==========================================

    The agent thread may disable it too, at a moment when the training thread is about to enable it. So a reason that
    lasts is also a fact that `enable` looks up (`_blocked`), and the agent thread repeats it at every tick.

    Args:
        state: of the training thread.

    Attributes:
        steady_iterator_id: ``id()`` of the iterator whose batches are ordinary ones, 0 for none. It stays where another
            reason than the loop keeps the fast path off. Training thread only.
        disabled_by: the newest reason; None where it is enabled. For debugging.
    """

    __slots__ = ("_state", "disabled_by", "steady_iterator_id")

    def __init__(self, state: StepState) -> None:
        self._state = state
        self.steady_iterator_id = 0
        self.disabled_by: str | None = LOOP_CHANGED

    def enable(self, iterator_id: int) -> None:
        """The next batches are ordinary ones if this iterator gives them. On the training thread."""
        self.steady_iterator_id = iterator_id
        self.disabled_by = self._blocked()
        self._state.fast_path_iterator_id = 0 if self.disabled_by else iterator_id

    def disable(self, reason: str) -> None:
        """The next batch takes the slow path. On any thread, but on the training thread alone where the loop changes.

        Args:
            reason: one of the table.
        """
        self.disabled_by = reason
        self._state.fast_path_iterator_id = 0
        if reason in _LOOP_IS_OVER:
            self.steady_iterator_id = 0

    def _blocked(self) -> str | None:
        """A reason that holds whatever the loop does; None for none."""
        state = self._state
        if state.gpu is not None:
            return GPU_CLOCK
        if state.recorder is not None:
            return SNAPSHOT
        if state.profiler_ranges.nvtx:
            return NVTX
        return TIMED_BATCH if state.next_timer.wanted else None
