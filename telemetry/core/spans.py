"""The results of reading the ring: steps, phases and dropped spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """One closed training step. A tuple, because one is made for each step of the run.

    Attributes:
        seconds: wait + compute. Evaluation and checkpoints in the step are not counted.
        wait_seconds: the part of ``seconds`` that was the wait for the batch.
        checkpoint: whether a checkpoint was written in the step.
    """

    seconds: float
    wait_seconds: float
    checkpoint: bool = False


class DroppedSpans(NamedTuple):
    """The sum of one stretch of spans that did not fit into the ring, from its first span to its newest.

    Stamps are monotonic nanoseconds; categories are indices into `CATEGORIES`.

    Attributes:
        stretch: number of the stretch in this run, from 1. Between the spans of one stretch no span was kept.
        start_ns, end_ns: start of its first span, end of its newest.
        ns: time by category. The sum is ``end_ns - start_ns``.
        first, category: category of the training thread during the first span, and after the newest.
        entered_ns: when it entered ``category``; 0 if it has been in it since the start.
        steps, batches: steps that ended, and training batches that came.
        last_step_ns: when the newest of those steps ended; 0 for none.
        open: whether a step is open after the newest span. ``opened``: whether a step was opened in this stretch.
        wait_ns, compute_ns, checkpoint: for the newest step: wait and compute in this stretch, and whether it has a
            checkpoint in this stretch.
    """

    stretch: int
    start_ns: int
    end_ns: int
    ns: tuple[int, ...]
    first: int
    category: int
    entered_ns: int
    steps: int
    batches: int
    last_step_ns: int
    open: bool
    opened: bool
    wait_ns: int
    compute_ns: int
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One closed evaluation, checkpoint or named phase, with its start on the monotonic clock."""

    name: str
    category: str
    start_ns: int
    seconds: float
    loop_seconds: tuple[float, float] | None = None
    """Data wait and compute of the process so far, when the phase ended; None where the ledger has not made it."""


class SavedCheckpoint(NamedTuple):
    """One checkpoint that was written.

    Attributes:
        start_ns, end_ns: monotonic stamps. Of an asynchronous one, ``end_ns`` is when it was complete.
        optimizer_steps, steps: of this process when the checkpoint began; a step that is open counts.
        complete: whether everything is written: not if the saving function raised, or still writes in the background.
        holds_optimizer: whether it contains an optimizer's state, without which no training is resumed.
        background: whether it was completed on another thread.
    """

    start_ns: int
    end_ns: int
    optimizer_steps: int
    steps: int
    complete: bool
    holds_optimizer: bool
    background: bool = False
