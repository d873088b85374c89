"""Separates evaluation batches from training batches where the state of gradients does not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.hooks.loaders import is_loader, is_loader_iterator, origin
from telemetry.hooks.patching import WeakMap
from telemetry.util.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_MAX_WITHOUT_A_STEP: Final = 2
"""So many batches, times the batches per optimizer step so far, may come without a sign of training before the loop
counts as an evaluation. Gradient accumulation may begin within a set, and accelerate's loaders read one batch ahead."""

_TRAINED_BEFORE: Final = 4
"""The limit is this many times higher for a loader that has trained before."""

_MAX_PARAMETERS: Final = 64


def _nobody() -> None:
    """Return None, as a weak reference to an object that is gone."""


class TrainingSigns:
    """Looks for signs that the training thread trains, besides optimizers that step.

    It only reads, between two batches and off the fast path: a hook on a parameter or a patched ``backward`` would be
    part of the user's graph and of what is compiled.
    """

    def __init__(self) -> None:
        self._torch: Any = None
        self._graph_nodes: Callable[[], int] = lambda: 0
        self._optimizer: Callable[[], Any] = _nobody
        self._place = 0  # index of the parameter that is read
        self._nodes = 0
        self._parameter: tuple[int, ...] | None = None

    def use_torch(self, torch: ModuleType) -> None:
        """Use torch, which is now imported."""
        self._torch = torch
        # Torch numbers the nodes of its autograd graphs on each thread: one more for each operation with gradients on.
        self._graph_nodes = getattr(torch._C._autograd, "_get_sequence_nr", self._graph_nodes)

    def follow(self, optimizer: Any) -> None:
        """Read a parameter of an optimizer from now on. Called after it has stepped, off the fast path."""
        if self._optimizer() is optimizer:
            return
        self._optimizer, self._place = weakref.ref(optimizer), 0
        try:
            with self._torch._C.DisableTorchFunction():
                found = enumerate(_parameters(optimizer)[:_MAX_PARAMETERS])
                self._place = next((place for place, each in found if each.is_leaf and each.grad is not None), 0)
        except Exception as error:  # an optimizer of another kind
            let_pass(error)

    def look(self) -> tuple[bool, bool | None]:
        """Whether the model ran with gradients on since the last look, and whether gradients or parameters changed.

        The second is None if no parameter shows it: FSDP keeps its own gradients elsewhere meanwhile.
        """
        nodes, parameter = self._nodes, self._parameter
        self._nodes, self._parameter = self._graph_nodes(), self._read()
        known = self._parameter is not None and parameter is not None
        return self._nodes != nodes, self._parameter != parameter if known else None

    def _read(self) -> tuple[int, ...] | None:
        """The versions of the parameter and of its gradient. Every change in place raises them."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        try:
            with self._torch._C.DisableTorchFunction():  # a mode's code must not run
                parameter = _parameters(optimizer)[self._place]
                if not parameter.is_leaf or type(parameter) not in {self._torch.nn.Parameter, self._torch.Tensor}:
                    return None  # reading the gradient of a tensor that is no leaf would warn
                gradient = parameter.grad
                return parameter._version, id(gradient), 0 if gradient is None else gradient._version
        except Exception as error:  # the parameters were replaced, or have no versions
            let_pass(error)
            return None


def _parameters(optimizer: Any) -> list[Any]:
    """The first group of an optimizer's parameters, without calling a property of a subclass."""
    parameters: list[Any] = vars(optimizer)["param_groups"][0]["params"]
    return parameters


class EvaluationDetector:
    """Watches the newest batches of one iterator, and whether anything is trained meanwhile.

    Batches without any sign of training are an evaluation's. If the model runs with gradients on but without a backward
    pass, that holds only if another loader trains: the optimizer may have copies of the model's parameters. A loader
    is recognised by its sampler, else by its data set. Neither is kept alive. Until a torch optimizer has stepped, all
    batches count as training.

    Attributes:
        signs: the signs of training.
    """

    def __init__(self) -> None:
        self.signs = TrainingSigns()
        self._evaluating = False
        self._trains = False  # whether gradients or parameters changed since the first batch
        self._iterator = 0
        self._since = 0  # optimizer steps when the first batch was requested
        self._batches = 0  # batches requested since then without a sign of training
        self._max_batches = 0  # more batches than this are an evaluation
        self._parts: list[Callable[[], Any]] = []
        self._trained: WeakMap[None] = WeakMap()
        self._evaluated: WeakMap[None] = WeakMap()

    def known_to_evaluate(self, loader: object) -> bool:
        """Whether an iteration of this loader would be an evaluation, judging by its earlier iterations."""
        return self._evaluates(_parts_of(loader))

    def requested(self, iterator: object, optimizer_steps: int, closed: int) -> bool:
        """Note that a batch is about to be requested. Returns whether it is for an evaluation.

        ``closed``: training steps that have ended so far.
        """
        if id(iterator) != self._iterator:
            self.leave(optimizer_steps)
            self._iterator, self._since, self._batches = id(iterator), optimizer_steps, 0
            self._parts = _parts_of(iterator)
            self._max_batches = _MAX_WITHOUT_A_STEP * max(1, round(closed / max(1, optimizer_steps)))
            self._max_batches *= _TRAINED_BEFORE if self._in(self._trained, self._parts[:1]) else 1
            self._evaluating = self._evaluates(self._parts)
            self.signs.look()
        elif optimizer_steps > self._since or self._trains:
            self._evaluating = False
        elif optimizer_steps:
            self._judge(*self.signs.look())
        return self._evaluating

    def _judge(self, run_with_gradients: bool, changed: bool | None) -> None:  # noqa: FBT001
        self._trains = bool(changed)
        if changed:
            self._evaluating = False
        elif not self._evaluating and (not run_with_gradients or (changed is False and self._another_trains())):
            self._batches += 1
            self._evaluating = self._batches > self._max_batches

    def _another_trains(self) -> bool:
        """Whether some other loader has trained, with other data than this one's."""
        return len(self._trained) > 0 and not self._in(self._trained, self._parts)

    def settled(self, optimizer_steps: int) -> bool:
        """Whether these batches are certainly used for training."""
        return not self._evaluating and (optimizer_steps > self._since or self._trains or not optimizer_steps)

    def likely(self, optimizer_steps: int) -> bool:
        """Whether these batches are probably used for training. An iteration that has just begun may be either."""
        return self.settled(optimizer_steps) or self._in(self._trained, self._parts)

    def leave(self, optimizer_steps: int) -> None:
        """End an iteration, and remember for its loader what its batches were for."""
        if not self._iterator:
            return
        parts = [part for reference in self._parts if (part := reference()) is not None]
        if optimizer_steps > self._since or self._trains:
            for part in parts:
                self._trained[part] = None
                self._evaluated.discard(part)
        elif self._evaluating:
            for part in parts:
                if part not in self._trained:
                    self._evaluated[part] = None
        self._iterator, self._parts, self._evaluating, self._trains = 0, [], False, False

    def _evaluates(self, parts: list[Callable[[], Any]]) -> bool:
        """Whether the loader evaluates. Another loader with another sampler may train on the same data set."""
        return self._in(self._evaluated, parts) and not self._in(self._trained, parts[:1])

    @staticmethod
    def _in(known: WeakMap[None], parts: list[Callable[[], Any]]) -> bool:
        return any(part is not None and part in known for part in (reference() for reference in parts))


def _parts_of(loader: object) -> list[Callable[[], Any]]:
    """The objects that a loader shares with its iterators: its sampler, which no other loader has, and its data set.

    A watched object stands for itself. Only attributes of torch's own classes are read.
    """
    watched = origin(loader)
    if watched is not None:
        loader = watched()
    if is_loader(loader) or is_loader_iterator(loader):
        return [_reference(loader, "_index_sampler"), _reference(loader, "_dataset", "dataset")]
    return [watched or _nobody, _nobody]


def _reference(loader: object, *names: str) -> Callable[[], Any]:
    try:  # a subclass may raise, and not every object takes weak references
        return weakref.ref(next(part for name in names if (part := getattr(loader, name, None)) is not None))
    except Exception as error:
        let_pass(error)
        return _nobody
