"""Separates evaluation batches from training batches, by the state of gradients and the steps of optimizers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.safety.errors import let_pass
from telemetry.seams.loaders import is_tensor, origin, own_value, unwrapped
from telemetry.seams.patching import WeakMap

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_WITHOUT_A_STEP: Final = 2
"""So many batches, times the batches per optimizer step so far, may come without a step of an optimizer before the loop
counts as an evaluation. Gradient accumulation may begin within a set, and accelerate's loaders read one batch ahead."""

_TRAINED_BEFORE: Final = 4
"""The limit is this many times higher for a data set that has trained before."""


class EvaluationDetector:
    """Watches the newest batches of one iterator, and whether an optimizer steps meanwhile.

    Without a step, batches that are requested with gradients off are an evaluation's at once, and others after some of
    them. Until a torch optimizer has stepped, batches with gradients on count as training. A loader is recognised by
    its data set, which is not kept alive. If it has trained with gradients off, as an evolution strategy does, they say
    nothing about it.
    """

    def __init__(self) -> None:
        self._evaluating = False
        self._iterator = 0
        self._data: Callable[[], Any] = _nothing  # what identifies the loader of the iteration
        self._since = 0  # optimizer steps when the first batch was requested
        self._batches = 0  # batches requested since then without a step
        self._max_batches = 0  # more batches than this are an evaluation
        self._gradients = True  # whether they were on when the newest batch was requested
        self._trained: WeakMap[bool] = WeakMap()  # with gradients off, too?
        self._evaluated: WeakMap[None] = WeakMap()

    def would_evaluate(self, loader: object, *, gradients: bool) -> bool:
        """Whether an iteration of this loader would begin as an evaluation. ``gradients``: whether they are on."""
        return self._evaluates(_data_of(loader), gradients=gradients)

    def requested(self, iterator: object, optimizer_steps: int, closed: int, *, gradients: bool) -> bool:
        """Note that a batch is about to be requested. Returns whether it is for an evaluation.

        ``closed``: training steps that have ended so far. ``gradients``: whether they are on.
        """
        self._gradients = gradients
        if id(iterator) != self._iterator:
            self.leave(optimizer_steps)
            data = _data_of(iterator)
            self._iterator, self._data = id(iterator), _reference(data)
            self._since, self._batches = optimizer_steps, 0
            self._max_batches = _MAX_WITHOUT_A_STEP * max(1, round(closed / max(1, optimizer_steps)))
            self._max_batches *= _TRAINED_BEFORE if data in self._trained else 1
            self._evaluating = self._evaluates(data, gradients=gradients)
        elif optimizer_steps > self._since:
            self._evaluating = False
        elif not gradients and not self._trained.get(self._data()):
            self._evaluating = True
        elif optimizer_steps:
            self._batches += 1
            self._evaluating = self._evaluating or self._batches > self._max_batches
        return self._evaluating

    def settled(self, optimizer_steps: int) -> bool:
        """Whether these batches are certainly used for training."""
        return not self._evaluating and (optimizer_steps > self._since or not optimizer_steps)

    def likely(self, optimizer_steps: int) -> bool:
        """Whether these batches are probably used for training. An iteration that has just begun may be either."""
        return self.settled(optimizer_steps) or self._data() in self._trained

    def leave(self, optimizer_steps: int) -> None:
        """End an iteration, and remember for its loader what its batches were for."""
        data, self._data = self._data(), _nothing
        if data is not None:
            if optimizer_steps > self._since:
                self._trained[data] = not self._gradients
                self._evaluated.discard(data)
            elif self._evaluating and optimizer_steps and data not in self._trained:
                self._evaluated[data] = None
        self._iterator, self._evaluating = 0, False

    def _evaluates(self, data: object, *, gradients: bool) -> bool:
        off_in_training = self._trained.get(data)
        if off_in_training is None:
            return not gradients or data in self._evaluated
        return not gradients and not off_in_training


def _nothing() -> None:
    """Return None, as a weak reference to an object that is gone."""


def _reference(data: object) -> Callable[[], Any]:
    try:
        return weakref.ref(data)
    except TypeError as error:  # it takes no weak references, as a list does not
        let_pass(error)
        return _nothing


def _data_of(loader: object) -> object:
    """What a loader shares with its iterators: its data set, unless it is a tensor. Of a watched object, itself."""
    watched = origin(loader)
    if watched is not None:
        return watched()
    inside = unwrapped(loader)
    data = own_value(inside, "_dataset")
    data = own_value(inside, "dataset", inside) if data is None else data
    return None if is_tensor(data) else data
