"""The log lines of phases, and the checkpoints from which the run can be resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.log.lines import ABSENT, PhaseLine, stuck_in_loop
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, OTHER, PhaseSpan
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator, Sequence

    from telemetry.model.records import SavedCheckpoint
    from telemetry.util.clock import WallClock

_WRITTEN: Final = "checkpoint_write"
"""The phase of a checkpoint that another thread has completed."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""A shorter phase is only in the ledger. Of shorter checkpoints, the newest complete one of a tick still has a line."""

_MAX_PHASE_LINES: Final = 20
"""If more phases end between two ticks, only the longest have lines. Each line is a write, after which the agent thread
waits for the GIL. With 250 phases a second whose C calls held the GIL, the agent had no time for a tick."""


class PhaseLog:
    """Makes the lines of phases, and follows the checkpoints.

    Args:
        saves: checkpoints that the hooks have seen; this empties it.
        wall: dates the phases.

    Attributes:
        saves_completed: checkpoints that a run can resume from.
        kept_seconds: seconds of the training loop before the newest of them, without those in which it was stuck.
    """

    def __init__(self, saves: deque[SavedCheckpoint], wall: WallClock) -> None:
        self._saves = saves
        self._wall = wall
        self._waiting: list[SavedCheckpoint] = []  # the ledger has not yet returned their phases
        self._before_last: Sequence[SavedCheckpoint] = ()
        self.saves_completed = 0
        self.kept_seconds = 0.0
        self._holds_optimizer = False  # once a checkpoint holds an optimizer, a run does not resume from others
        self._begun_at: dict[int, float] = {}  # loop seconds when an asynchronous checkpoint began, by optimizer steps

    def lines(self, spans: Sequence[PhaseSpan], stuck: dict[str, float], *, last: bool = False) -> Iterator[PhaseLine]:
        """Make the lines of phases that have ended. A checkpoint's line has its steps.

        Args:
            spans: phases from the ledger, and phases that the script has named.
            stuck: seconds without progress so far, by place.
            last: this is the last call.
        """
        pending = [*self._waiting]
        while self._saves:
            pending.append(self._saves.popleft())
        found = [(span, _taken_from(pending, span)) for span in spans]
        shortest = _SHORTEST_PHASE_SECONDS
        if len(spans) > _MAX_PHASE_LINES:
            shortest = max(shortest, sorted(span.seconds for span in spans)[-_MAX_PHASE_LINES])
        short = [span for span, save in found if save is not None and save.complete and span.seconds < shortest]
        for span, save in found:
            line = self._line(span, save, stuck)
            if span.seconds >= shortest or (short and span is short[-1]):
                yield line
        self._waiting = []
        for save in pending:
            if not (save.background or last or save in self._before_last):
                self._waiting.append(save)  # its span is still in the ring
                continue
            span = PhaseSpan(_WRITTEN, OTHER, save.start_ns, (save.end_ns - save.start_ns) / NS)
            yield self._line(span, save, stuck)
        self._before_last = self._waiting

    def _line(self, span: PhaseSpan, save: SavedCheckpoint | None, stuck: dict[str, float]) -> PhaseLine:
        """Make the line of a phase. With a checkpoint, note the newest one that a run can resume from."""
        line = PhaseLine(
            name=span.name,
            category=span.category,
            started=self._wall.iso(span.start_ns),
            seconds=round(span.seconds, 6),
            complete=ABSENT,
            holds_optimizer=ABSENT,
            optimizer_steps_total=ABSENT,
            steps_total=ABSENT,
            loop_seconds=ABSENT,
            stuck_total_seconds=ABSENT,
        )
        if save is None:
            return line
        loop = span.loop_seconds
        if loop is None:
            before = self._begun_at.get(save.optimizer_steps, self.kept_seconds)
        else:
            before = sum(loop) - stuck_in_loop(stuck)
            if not save.complete:
                self._begun_at = {save.optimizer_steps: before}
        if save.complete and (save.holds_optimizer or not self._holds_optimizer):
            self._holds_optimizer |= save.holds_optimizer
            self.saves_completed += 1
            self.kept_seconds = max(self.kept_seconds, before)
        return structs.replace(
            line,
            complete=save.complete,
            holds_optimizer=save.holds_optimizer,
            optimizer_steps_total=save.optimizer_steps,
            steps_total=save.steps,
            loop_seconds=ABSENT if loop is None else {DATA_WAIT: round(loop[0], 6), COMPUTE: round(loop[1], 6)},
            stuck_total_seconds=stuck or ABSENT,
        )


def _taken_from(pending: list[SavedCheckpoint], span: PhaseSpan) -> SavedCheckpoint | None:
    """Remove the checkpoint that was written in this phase; None if there is none."""
    if span.category == CHECKPOINT and span.loop_seconds is not None:
        for save in pending:
            if not save.background and save.start_ns <= span.start_ns <= save.end_ns:
                pending.remove(save)
                return save
    return None
