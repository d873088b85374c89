"""Tells from a stack of the training thread what it does: which part of the compute, the sampler, a wait for ranks.

Frames of libraries name the part. A line of the user's own code has no such frame: it is forward if the next part that
is seen further down in the same function is a backward pass, and other if not (clipping, logging, the learning rate).
So a loop, or a closure that an optimizer calls, is split by the lines of its own calls. Of the lines before a backward
pass, those are other that belong to no forward pass: lines before the last call of a layer that call none, such as one
that gets a batch or steps an environment; lines whose result the step does not use; and a call after which another call
does a whole step, as PPO's rollouts.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from telemetry.model.records import BACKWARD, COMPILE, COPY, FORWARD, OPTIMIZER, OTHER
from telemetry.sources.code_lines import draws_ahead
from telemetry.util.stacks import code_of

if TYPE_CHECKING:
    from telemetry.util.stacks import Spot, Stack

_MOVES: Final = "batch_to_device|convert_tensor|move_data_to_device|send_to_device|to_device"
"""Functions by which accelerate, fastai, ignite and Lightning move a batch to the device."""

_PATTERNS: Final = (
    (COMPILE, re.compile(r"torch\._dynamo\.convert_frame:|torch\._inductor\.compile_fx:")),
    (BACKWARD, re.compile(r"torch\.autograd(\.graph)?:(backward|grad|_engine_run_backward)$|torch\._tensor:backward$")),
    (COPY, re.compile(rf"(accelerate|fastai|ignite|lightning|lightning_fabric|pytorch_lightning)\b.*:({_MOVES})$")),
    (FORWARD, re.compile(r"torch\.nn\.(functional|modules)\b")),
    (OTHER, re.compile(r"torch\.(optim\.(lr_scheduler|swa_utils)|nn\.utils)\b|torch\.optim\.optimizer:zero_grad$")),
    (OPTIMIZER, re.compile(r"torch\.optim\b")),
)
"""The part of a frame, by its module and function; the first that matches."""

_WHOLE: Final = (COMPILE, BACKWARD, COPY)
"""Parts that include what they call, the first before the others. A checkpointed layer is computed again in the
backward pass; but a closure that an optimizer calls has a forward and a backward pass of its own."""

_NOT_LINES: Final = re.compile(r"(torch|telemetry)\b")
_MIN_STACKS: Final = 20
"""So many stacks are kept before the first is named: the lines of the backward pass have to be seen first."""


@lru_cache(maxsize=4096)
def part_of_frame(spot: Spot) -> str | None:
    """The part of the compute that a library's frame alone tells; None for others."""
    named = f"{spot.module}:{spot.function}"
    return next((part for part, pattern in _PATTERNS if pattern.match(named)), None)


def _parts_of(stack: Stack) -> list[tuple[Spot, str | None]]:
    """The part of each frame. The ``step`` of an optimizer that is none of torch's is called by torch's hooks."""
    frames: list[tuple[Spot, str | None]] = []
    by_hook = False
    for spot in reversed(stack):
        part = part_of_frame(spot)
        if part is None and by_hook and not _NOT_LINES.match(spot.module):
            part, by_hook = OPTIMIZER if spot.function == "step" else None, False
        else:
            by_hook = by_hook or part == OPTIMIZER
        frames.append((spot, part))
    frames.reverse()
    return frames


class PartReader:
    """Names the part of the compute that a stack is in. It learns the lines that call a backward pass and optimizers.

    Attributes:
        known: whether a backward pass has been seen. Until then nothing can be named.
    """

    def __init__(self) -> None:
        self.known = False
        self._early: list[tuple[Stack, int]] | None = []
        self._calls: dict[tuple[str, str], dict[int, str]] = {}  # by file and function: the part of a line
        self._layers: dict[tuple[str, str], set[int]] = {}  # the lines that call layers
        self._ahead: dict[tuple[Spot, int], bool] = {}  # whether a line draws a batch for the next step
        self._thread = 0

    def take(self, stack: Stack, wall_ns: int, thread: int = 0) -> list[tuple[str, int]]:
        """The part of a sample of this stack, with the time that it stands for.

        The first samples are kept, and are named together with a later one. ``thread``: the ident, if it still runs.
        """
        self._thread = thread
        frames = _parts_of(stack)
        self._learn(frames)
        if self._early is None:
            return [(self._part(frames), wall_ns)]
        self._early.append((stack, wall_ns))
        if not self.known or len(self._early) < _MIN_STACKS:
            del self._early[: -10 * _MIN_STACKS]
            return []
        early, self._early = self._early, None
        return [(self.part_of(each), ns) for each, ns in early]

    def part_of(self, stack: Stack) -> str:
        """The part of the compute that a stack is in, by all that is known now."""
        return self._part(_parts_of(stack))

    def _learn(self, frames: list[tuple[Spot, str | None]]) -> None:
        inside: str | None = None
        for spot, part in frames:
            if part in {BACKWARD, OPTIMIZER}:
                inside = part
                self.known = self.known or part == BACKWARD
            elif part == FORWARD:
                inside = inside or FORWARD
            elif inside is not None and part is None and not _NOT_LINES.match(spot.module):
                if inside == FORWARD:
                    self._layers.setdefault((spot.file, spot.function), set()).add(spot.line)
                else:
                    calls = self._calls.setdefault((spot.file, spot.function), {})
                    if calls.get(spot.line) != BACKWARD:  # a call of a whole step is seen in both
                        calls[spot.line] = inside

    def _part(self, frames: list[tuple[Spot, str | None]]) -> str:
        found = {part for _, part in frames}
        for whole in _WHOLE:
            if whole in found:
                return whole
        layer = False
        for spot, part in frames:
            if part == FORWARD:
                layer = True
            elif part is not None and not layer:
                return part
            calls = self._calls.get((spot.file, spot.function)) if part is None else None
            if calls is not None and calls.get(spot.line) != BACKWARD:  # through that line a framework calls all parts
                return self._before_backward(spot, calls, layer=layer)
        return FORWARD

    def _before_backward(self, spot: Spot, calls: dict[int, str], *, layer: bool) -> str:
        """Forward or other, for a line of a function that calls backward passes or optimizers (``calls``).

        ``layer``: whether the line has called a layer now.
        """
        layers = self._layers.get((spot.file, spot.function), set())
        later = min((line for line in calls if line >= spot.line), default=None)
        if later is None or calls[later] != BACKWARD:
            return FORWARD if layer else OTHER
        if later != spot.line and later in layers:  # a whole step in one call
            return OTHER
        last = max((line for line in layers if line <= later), default=0)
        if layer or spot.line in layers:
            return FORWARD
        return OTHER if spot.line < last or self._draws_ahead(spot, later) else FORWARD

    def _draws_ahead(self, spot: Spot, later: int) -> bool:
        """Whether a line between the forward and the backward pass (``later``) does nothing for this step."""
        known = self._ahead.get((spot, later))
        if known is None and self._thread:
            code = code_of(self._thread, spot.file, spot.function, spot.line)
            if code is not None:
                known = self._ahead[spot, later] = draws_ahead(code, spot.line, later)
        return bool(known)
