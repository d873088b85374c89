"""Whether batches are trained on or evaluated with, where gradients do not say it.

Most evaluations ask for their batches with gradients off. But a loop may turn them off around the model alone, as
transformers' Trainer does: ``for batch in loader: with torch.no_grad(): ...``. What tells it from training then is that
one loader gives batch after batch and no optimizer steps.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from telemetry.attach.kinds import is_loader, is_loader_iterator, origin

_WITHOUT_A_STEP: Final = 2
"""So many times the batches that an optimizer step has taken so far may come without one and are no evaluation yet.
Loops that accumulate gradients do not always begin with a full set, and accelerate's loaders read one batch ahead."""

_TRAINED_BEFORE: Final = 4
"""So many times as many again from a loader that has been trained with."""


class Judged:
    """The newest batches that came from one iterator, and whether optimizers have stepped meanwhile.

    A loader is known again by its sampler, or else by its data set, neither of which is kept alive. Where no optimizer
    of torch's has stepped yet, nothing is judged.
    """

    __slots__ = ("_batches", "_evaluated", "_evaluating", "_iterator", "_most", "_parts", "_since", "_trained")

    def __init__(self) -> None:
        self._evaluating = False
        self._iterator = 0
        self._since = 0  # optimizer steps when the first of them was asked for
        self._batches = 0  # asked for since
        self._most = 0  # of which may come without an optimizer step
        self._parts: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._evaluated: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def known_to_evaluate(self, loader: object) -> bool:
        """Whether an iteration of this loader, which begins now, is an evaluation by what is known of it."""
        return self._evaluates(_parts_of(loader))

    def requested(self, iterator: object, optimizer_steps: int, closed: int) -> bool:
        """A batch is about to be asked for. Returns whether it is for an evaluation.

        Args:
            iterator: whose batch.
            optimizer_steps: so far.
            closed: training steps so far.
        """
        if id(iterator) != self._iterator:
            self.leave(optimizer_steps)
            self._iterator, self._since, self._batches = id(iterator), optimizer_steps, 0
            self._parts = _parts_of(iterator)
            self._most = _WITHOUT_A_STEP * max(1, round(closed / max(1, optimizer_steps)))
            self._most *= _TRAINED_BEFORE if self._in(self._trained, self._parts[:1]) else 1
            self._evaluating = self._evaluates(self._parts)
        elif optimizer_steps > self._since:
            self._evaluating = False
        elif optimizer_steps and not self._evaluating:
            self._batches += 1
            self._evaluating = self._batches > self._most
        return self._evaluating

    def settled(self, optimizer_steps: int) -> bool:
        """Whether nothing is left to judge of them: it is training."""
        return not self._evaluating and (optimizer_steps > self._since or not optimizer_steps)

    def likely(self, optimizer_steps: int) -> bool:
        """Whether they are trained on, as far as is known: one that has just begun may be either."""
        return self.settled(optimizer_steps) or self._in(self._trained, self._parts)

    def leave(self, optimizer_steps: int) -> None:
        """No more of them: their iteration has ended, or another begins. What was seen of their loader is kept."""
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
        """A data set that is evaluated with may be trained with too, by another loader: that has another sampler."""
        return self._in(self._evaluated, parts) and not self._in(self._trained, parts[:1])

    @staticmethod
    def _in(known: weakref.WeakValueDictionary[int, Any], parts: list[weakref.ref[Any]]) -> bool:
        return any(part is not None and known.get(id(part)) is part for part in (reference() for reference in parts))


def _parts_of(loader: object) -> list[weakref.ref[Any]]:
    """What a loader and its iterators have in common: its sampler, which is its own, and its data set.

    Of a watched object it is the object itself. Attributes count in torch's own classes alone.
    """
    watched = origin(loader)
    if watched is not None:
        loader = watched()
    if is_loader(loader) or is_loader_iterator(loader):
        return [_reference(loader, "_index_sampler"), _reference(loader, "_dataset", "dataset")]
    return [watched or _NOBODY, _NOBODY]


def _reference(loader: object, *names: str) -> weakref.ref[Any]:
    try:  # a class made from torch's may raise, and not everything can be referred to
        return weakref.ref(next(part for name in names if (part := getattr(loader, name, None)) is not None))
    except Exception:
        return _NOBODY


class _Gone:
    """Nothing refers to it."""


_NOBODY: Final[weakref.ref[Any]] = weakref.ref(_Gone())
