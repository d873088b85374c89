"""The log lines of phases, and the checkpoints from which a run can be resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.log_lines import ABSENT, PhaseLine
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, OTHER, PhaseSpan
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator, Sequence

    from telemetry.records import SavedCheckpoint
    from telemetry.util.clock import WallClock

WRITTEN: Final = "checkpoint_write"
"""The phase of a checkpoint that another thread has completed."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""A shorter phase is only in the ledger. For checkpoints, the newest complete one of a tick still has a line."""

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
        kept_seconds: seconds of the training loop before the newest of them.
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

    def lines(self, spans: Sequence[PhaseSpan], *, last: bool = False) -> Iterator[PhaseLine]:
        """Make the lines of phases that have ended. A checkpoint's line has its steps.

        Args:
            spans: phases from the ledger, and phases that the script has named.
            last: this is the last call.
        """
        pending = [*self._waiting]
        while self._saves:
            pending.append(self._saves.popleft())
        shortest = _SHORTEST_PHASE_SECONDS
        if len(spans) > _MAX_PHASE_LINES:
            shortest = max(shortest, sorted(span.seconds for span in spans)[-_MAX_PHASE_LINES])
        lines: list[PhaseLine] = []
        newest_short: int | None = None  # index in ``lines``
        for span in spans:
            save = None
            if span.category == CHECKPOINT and span.loop_seconds is not None:
                inside = (s for s in pending if not s.background and s.start_ns <= span.start_ns <= s.end_ns)
                save = next(inside, None)
            if save is not None:
                pending.remove(save)
            line = self._line(span) if save is None else self._line_of_save(span, save)
            if span.seconds >= shortest:
                lines.append(line)
            elif save is not None and save.complete:
                if newest_short is not None:
                    del lines[newest_short]
                newest_short = len(lines)
                lines.append(line)
        yield from lines
        self._waiting = []
        for save in pending:
            if not (save.background or last or save in self._before_last):
                self._waiting.append(save)  # its span is still in the ring
                continue
            span = PhaseSpan(WRITTEN, OTHER, save.start_ns, (save.end_ns - save.start_ns) / NS)
            yield self._line_of_save(span, save)
        self._before_last = self._waiting

    def _line(self, span: PhaseSpan) -> PhaseLine:
        return PhaseLine(
            name=span.name,
            category=span.category,
            started=self._wall.iso(span.start_ns),
            seconds=round(span.seconds, 6),
            complete=ABSENT,
            holds_optimizer=ABSENT,
            optimizer_steps_total=ABSENT,
            steps_total=ABSENT,
            loop_seconds=ABSENT,
        )

    def _line_of_save(self, span: PhaseSpan, save: SavedCheckpoint) -> PhaseLine:
        """Make the line of a checkpoint, and note the newest one that a run can resume from."""
        loop = span.loop_seconds
        loop_seconds = None if loop is None else sum(loop)
        if loop_seconds is not None and not save.complete:
            self._begun_at = {save.optimizer_steps: loop_seconds}
        if loop_seconds is None:
            loop_seconds = self._begun_at.get(save.optimizer_steps, self.kept_seconds)
        if save.complete and (save.holds_optimizer or not self._holds_optimizer):
            self._holds_optimizer |= save.holds_optimizer
            self.saves_completed += 1
            self.kept_seconds = max(self.kept_seconds, loop_seconds)
        return structs.replace(
            self._line(span),
            complete=save.complete,
            holds_optimizer=save.holds_optimizer,
            optimizer_steps_total=save.optimizer_steps,
            steps_total=save.steps,
            loop_seconds=ABSENT if loop is None else {DATA_WAIT: round(loop[0], 6), COMPUTE: round(loop[1], 6)},
        )
