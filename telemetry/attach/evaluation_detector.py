"""Distinguishes training batches from evaluation batches if the state of gradients does not.

Most evaluations request their batches with gradients off. But a loop may turn gradients off around the model only, as
transformers' Trainer does: ``for batch in loader: with torch.no_grad(): ...``. Such an evaluation shows in another way:
one loader gives many batches in a row and no optimizer steps.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from telemetry.attach.loader_types import is_loader, is_loader_iterator, origin

_MAX_WITHOUT_A_STEP: Final = 2
"""This many batches, times the batches per optimizer step so far, may come without an optimizer step before the loop
counts as an evaluation. Gradient accumulation may begin within a set, and accelerate's loaders read one batch ahead."""

_TRAINED_BEFORE: Final = 4
"""The limit is this many times higher for a loader that was used for training before."""


class EvaluationDetector:
    """Watches the newest batches of one iterator, and whether optimizers step meanwhile.

    A loader is recognised by its sampler, else by its data set. Neither is kept alive. Until a torch optimizer has
    stepped, all batches count as training.
    """

    __slots__ = ("_batches", "_evaluated", "_evaluating", "_iterator", "_max_batches", "_parts", "_since", "_trained")

    def __init__(self) -> None:
        self._evaluating = False
        self._iterator = 0
        self._since = 0  # optimizer steps when the first batch was requested
        self._batches = 0  # batches requested since then without an optimizer step
        self._max_batches = 0  # with more batches than this it is an evaluation
        self._parts: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._evaluated: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def known_to_evaluate(self, loader: object) -> bool:
        """Whether an iteration of this loader that begins now is an evaluation, judging by its earlier iterations."""
        return self._evaluates(_parts_of(loader))

    def requested(self, iterator: object, optimizer_steps: int, closed: int) -> bool:
        """A batch is about to be requested. Returns whether it is for an evaluation.

        Args:
            iterator: the iterator that gives it.
            optimizer_steps: optimizer steps so far.
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
        """Whether these batches are certainly used for training."""
        return not self._evaluating and (optimizer_steps > self._since or not optimizer_steps)

    def likely(self, optimizer_steps: int) -> bool:
        """Whether these batches are probably used for training. An iteration that has just begun may be either."""
        return self.settled(optimizer_steps) or self._in(self._trained, self._parts)

    def leave(self, optimizer_steps: int) -> None:
        """The iteration has ended, or another begins. The purpose of its batches is remembered for its loader."""
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
        """Whether the loader evaluates. Another loader, with another sampler, may train on the same data set."""
        return self._in(self._evaluated, parts) and not self._in(self._trained, parts[:1])

    @staticmethod
    def _in(known: weakref.WeakValueDictionary[int, Any], parts: list[weakref.ref[Any]]) -> bool:
        return any(part is not None and known.get(id(part)) is part for part in (reference() for reference in parts))


def _parts_of(loader: object) -> list[weakref.ref[Any]]:
    """The objects that a loader shares with its iterators: its sampler, which no other loader has, and its data set.

    For a watched object it is the object itself. Only attributes of torch's own classes are read.
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
    """An object that nothing refers to, so that a weak reference to it is dead."""


_NOBODY: Final[weakref.ref[Any]] = weakref.ref(_Gone())
