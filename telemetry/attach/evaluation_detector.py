"""Tells training batches from evaluation batches where gradients do not.

Most evaluations ask for their batches with gradients off. But a loop may turn them off around the model alone, as
transformers' Trainer does: ``for batch in loader: with torch.no_grad(): ...``. Then an evaluation shows in that one
loader gives batch after batch and no optimizer steps.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from telemetry.attach.loader_types import is_loader, is_loader_iterator, origin

_MAX_WITHOUT_A_STEP: Final = 2
"""Batches that may come without an optimizer step and are no evaluation yet, as a multiple of the batches per optimizer
step so far. Gradient accumulation may begin with a part of a set, and accelerate's loaders read one batch ahead."""

_TRAINED_BEFORE: Final = 4
"""That limit is so many times higher for a loader that has been trained with."""


class EvaluationDetector:
    """Watches the newest batches of one iterator, and whether optimizers step meanwhile.

    A loader is recognised by its sampler, or else by its data set; neither is kept alive. Until an optimizer of torch's
    has stepped, all batches count as training.
    """

    __slots__ = ("_batches", "_evaluated", "_evaluating", "_iterator", "_max_batches", "_parts", "_since", "_trained")

    def __init__(self) -> None:
        self._evaluating = False
        self._iterator = 0
        self._since = 0  # optimizer steps when the first batch was asked for
        self._batches = 0  # asked for since without an optimizer step
        self._max_batches = 0  # so many of them are no evaluation yet
        self._parts: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._evaluated: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def known_to_evaluate(self, loader: object) -> bool:
        """Whether an iteration of this loader that begins now is an evaluation, from its earlier iterations."""
        return self._evaluates(_parts_of(loader))

    def requested(self, iterator: object, optimizer_steps: int, closed: int) -> bool:
        """A batch is about to be requested. Returns whether it is for an evaluation.

        Args:
            iterator: that gives it.
            optimizer_steps: so far.
            closed: training steps that have ended so far.
        """
        if id(iterator) != self._iterator:
            self.leave(optimizer_steps)
            self._iterator, self._since, self._batches = id(iterator), optimizer_steps, 0
            self._parts = _parts_of(iterator)
            self._max_batches = _MAX_WITHOUT_A_STEP * max(1, round(closed / max(1, optimizer_steps)))
            self._max_batches *= _TRAINED_BEFORE if self._in(self._trained, self._parts[:1]) else 1
            self._evaluating = self._evaluates(self._parts)
        elif optimizer_steps > self._since:
            self._evaluating = False
        elif optimizer_steps and not self._evaluating:
            self._batches += 1
            self._evaluating = self._batches > self._max_batches
        return self._evaluating

    def settled(self, optimizer_steps: int) -> bool:
        """Whether these batches are certainly trained on."""
        return not self._evaluating and (optimizer_steps > self._since or not optimizer_steps)

    def likely(self, optimizer_steps: int) -> bool:
        """Whether these batches are probably trained on. An iteration that has just begun may be either."""
        return self.settled(optimizer_steps) or self._in(self._trained, self._parts)

    def leave(self, optimizer_steps: int) -> None:
        """The iteration has ended, or another begins. What its batches were for is remembered for its loader."""
        if not self._iterator:
            return
        parts = [part for reference in self._parts if (part := reference()) is not None]
        if optimizer_steps > self._since:
            for part in parts:
                self._trained[id(part)] = part
                self._evaluated.pop(id(part), None)
        elif self._evaluating:
            for part in parts:
                if self._trained.get(id(part)) is not part:
                    self._evaluated[id(part)] = part
        self._iterator, self._parts, self._evaluating = 0, [], False

    def _evaluates(self, parts: list[weakref.ref[Any]]) -> bool:
        """The same data set may be trained with by another loader, which has another sampler."""
        return self._in(self._evaluated, parts) and not self._in(self._trained, parts[:1])

    @staticmethod
    def _in(known: weakref.WeakValueDictionary[int, Any], parts: list[weakref.ref[Any]]) -> bool:
        return any(part is not None and known.get(id(part)) is part for part in (reference() for reference in parts))


def _parts_of(loader: object) -> list[weakref.ref[Any]]:
    """What a loader shares with its iterators: its sampler, which no other loader has, and its data set.

    For a watched object it is the object itself. Attributes are read of torch's own classes only.
    """
    watched = origin(loader)
    if watched is not None:
        loader = watched()
    if is_loader(loader) or is_loader_iterator(loader):
        return [_reference(loader, "_index_sampler"), _reference(loader, "_dataset", "dataset")]
    return [watched or _NOBODY, _NOBODY]


def _reference(loader: object, *names: str) -> weakref.ref[Any]:
    try:  # a subclass may raise, and not every object takes weak references
        return weakref.ref(next(part for name in names if (part := getattr(loader, name, None)) is not None))
    except Exception:
        return _NOBODY


class _Gone:
    """Nothing refers to it."""


_NOBODY: Final[weakref.ref[Any]] = weakref.ref(_Gone())
