"""Separates evaluation batches from training batches, by the state of gradients and the steps of optimizers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.safety.errors import let_pass
from telemetry.seams.loaders import is_tensor, origin, own_value, unwrapped
from telemetry.seams.patching import WeakMap

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_WITHOUT_A_STEP: Final = 8
"""So many batches, times the batches per optimizer step so far, may come without a step of an optimizer before they are
an evaluation's for good: gradients may be accumulated longer than before, and a gradient scaler may skip steps."""

Place = tuple[str, int, int]
"""Where an iteration is begun: file and line of the user's code, and the line that has called that function."""


class EvaluationDetector:
    """Watches the newest batches of one iterator, and whether an optimizer steps meanwhile.

    Without a step, batches that are requested with gradients off are an evaluation's at once. With gradients on, what
    the batches of a new iteration are for is known if its loader was iterated at the same place before; until a torch
    optimizer has stepped, they count as training; otherwise only the next optimizer step, or the end of the iteration,
    decides. A loader is recognised by its data set, which is not kept alive. If it has trained with gradients off, as
    an evolution strategy does, they say nothing about it.
    """

    def __init__(self) -> None:
        self._evaluates: bool | None = False  # None: nothing has decided it yet
        self._iterator = 0
        self._data: Callable[[], Any] = _nothing  # what identifies the loader of the iteration
        self._place: Place | None = None
        self._since = 0  # optimizer steps when the first batch was requested
        self._batches = 0  # batches requested since then without a step
        self._max_batches = 0  # more batches than this are an evaluation
        self._gradients = True  # whether they were on when the newest batch was requested
        self._begun: WeakMap[Place] = WeakMap()  # the place of the newest iteration
        self._trained: WeakMap[dict[Place | None, bool]] = WeakMap()  # by place: with gradients off, too?
        self._evaluated: WeakMap[set[Place | None]] = WeakMap()
        self._undecided: list[tuple[Callable[[], Any], Place | None]] = []  # iterations that were left so

    def begins(self, loader: object, place: Place, optimizer_steps: int, *, gradients: bool) -> bool | None:
        """Note that an iteration of this loader begins at a place. Returns the same as `requested`."""
        data = _data_of(loader)
        if self._begun.get(data) != place:
            try:
                self._begun[data] = place
            except TypeError as error:  # it takes no weak references, as a list does not
                let_pass(error)
        return self._judge(data, place, optimizer_steps, gradients=gradients)

    def requested(
        self, iterator: object, optimizer_steps: int, closed: int, *, gradients: bool, resumed: bool
    ) -> bool | None:
        """Note that a batch is about to be requested.

        Args:
            iterator: what is asked for it.
            optimizer_steps: steps of optimizers so far.
            closed: training steps that have ended so far.
            gradients: whether they are on.
            resumed: whether the iterator has given a batch to the step that is open.

        Returns:
            Whether the batch is for an evaluation; None if only what follows decides that.
        """
        self._gradients = gradients
        if id(iterator) != self._iterator:
            self.leave(optimizer_steps)
            data = _data_of(iterator)
            self._iterator, self._data = id(iterator), _reference(data)
            self._place = None if resumed else self._begun.get(data)
            self._since, self._batches = optimizer_steps, 0
            self._max_batches = _MAX_WITHOUT_A_STEP * max(1, round(closed / max(1, optimizer_steps)))
            # Of loaders that are asked in turn, the optimizer steps while the last one is the newest.
            known = resumed and gradients
            self._evaluates = not known and self._judge(data, self._place, optimizer_steps, gradients=gradients)
        elif optimizer_steps > self._since:
            self._evaluates = False
        elif not gradients and not any((self._trained.get(self._data()) or {}).values()):
            self._evaluates = True
        elif optimizer_steps:
            self._batches += 1
            self._evaluates = self._evaluates if self._batches <= self._max_batches else True
        return self._evaluates

    def settle(self, *, evaluates: bool) -> None:
        """Take the iterations that nothing has decided yet for evaluations, or for training."""
        for reference, place in self._undecided:
            self._learn(reference(), place, evaluates=evaluates)
        self._undecided.clear()
        if self._evaluates is None:
            self._evaluates = evaluates

    def settled(self, optimizer_steps: int) -> bool:
        """Whether these batches are certainly used for training."""
        return self.likely and (optimizer_steps > self._since or not optimizer_steps)

    @property
    def likely(self) -> bool:
        """Whether these batches are probably used for training."""
        return self._evaluates is False

    def leave(self, optimizer_steps: int) -> None:
        """End an iteration, and remember for its loader what its batches were for."""
        reference, self._data = self._data, _nothing
        if optimizer_steps > self._since:
            self._learn(reference(), self._place, evaluates=False)
        elif self._evaluates and optimizer_steps:
            self._learn(reference(), self._place, evaluates=True)
        elif self._evaluates is None:
            self._undecided.append((reference, self._place))
        self._iterator, self._evaluates = 0, False

    def _learn(self, data: object, place: Place | None, *, evaluates: bool) -> None:
        if data is None:
            return
        trained, evaluated = self._trained.get(data) or {}, self._evaluated.get(data) or set()
        if not evaluates:
            self._trained[data] = trained | {place: not self._gradients}
            evaluated.discard(place)
        elif place not in trained:
            self._evaluated[data] = evaluated | {place}

    def _judge(self, data: object, place: Place | None, optimizer_steps: int, *, gradients: bool) -> bool | None:
        trained = self._trained.get(data)
        if trained and (place is None or place in trained):
            return not gradients and not trained.get(place, any(trained.values()))
        if not gradients or place in (self._evaluated.get(data) or ()):
            return True
        return None if optimizer_steps else False


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
