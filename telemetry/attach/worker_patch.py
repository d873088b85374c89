"""Installs the probe: the workers of every new DataLoader iterator are timed from their first fetch on.

The constructor of an iterator takes ``worker_init_fn`` from its loader, keeps it as ``_worker_init_fn`` and passes that
to each worker that it starts. While a constructor runs, the descriptor `_InitFunction` returns a probe instead. Nothing
is set on the loader or kept in the iterator: loaders are shared between threads, copied, pickled and sealed, and their
iterators are made inside one another.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.batch_sizes import counted_in_fetch
from telemetry.attach.batch_table import WANTED
from telemetry.attach.worker_block import MAX_WORKERS, WorkerBlock
from telemetry.attach.worker_probe import WorkerProbe
from telemetry.hooks.patching import WeakMap, forget_frame, unseen
from telemetry.hooks.profilers import MarkedWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.hooks.patching import Patches
    from telemetry.hooks.tracker import StepTracker

_NAME: Final = "_worker_init_fn"


def patch_workers(iterators: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch a class of iterators with workers: its constructor starts them.

    Args:
        iterators: the class.
        tracker: its sources get each iterator.
        patches: undo it.

    Raises:
        AttributeError: the class itself has a ``_worker_init_fn``, so this version of torch is unknown.
    """
    for kind in iterators.__mro__:
        if not isinstance(vars(kind).get(_NAME), _InitFunction | None):  # after a fork the parent's may still be there
            raise AttributeError(f"{kind.__name__} has {_NAME} already")  # noqa: TRY004
    init_function = _InitFunction(tracker)
    patches.put(iterators, _NAME, init_function)
    patches.replace(iterators, "__init__", lambda original: _probed(original, init_function, tracker))


def _probed(original: Callable[..., None], init_function: _InitFunction, tracker: StepTracker) -> Callable[..., None]:
    begun: WeakMap[None] = WeakMap()  # loaders

    @functools.wraps(original)
    @unseen
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if tracker.active:
            init_function.making[id(self)] = _Making()
        try:
            original(self, loader, *args, **kwargs)
        except BaseException as error:
            init_function.making.pop(id(self), None)
            forget_frame(error)
            _forget_notes(error)
            raise
        making = init_function.making.pop(id(self), None)
        if making is None or not tracker.active:
            return
        try:
            tracker.sources.register(self, making.block, again=loader in begun)
            begun[loader] = None
        except Exception as error:
            tracker.fault(error)

    return __init__


def _forget_notes(error: BaseException) -> None:
    """Drop the probe from what Python 3.14 notes of a function of the user's that cannot be pickled for a worker.

    From the inside out, each note names an object that holds the one before it; two of them are a probe's state and the
    probe. The note before its state says which part of that state it was.
    """
    kept: list[str] = []
    for note in getattr(error, "__notes__", ()):
        if not str(note).startswith("when serializing telemetry.attach."):
            kept.append(note)
        elif str(note).endswith(" state"):
            del kept[-1:]
    if kept:
        error.__notes__ = kept  # type: ignore[attr-defined]


class _Making:
    """An iterator whose constructor runs."""

    __slots__ = ("block", "failed")

    def __init__(self) -> None:
        self.block: WorkerBlock | None = None
        self.failed = False


class _InitFunction:
    """``_worker_init_fn`` of a class of iterators: the user's function, with a probe around it in the constructor.

    Attributes:
        making: the iterators whose constructors run, on any thread, by id.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self.making: dict[int, _Making] = {}
        self._tracker = tracker

    def __get__(self, iterator: Any, kind: type) -> Any:
        if iterator is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {_NAME!r}")
        try:
            user = vars(iterator)[_NAME]
        except KeyError:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {_NAME!r}") from None
        making = self.making.get(id(iterator))
        return user if making is None else self._around(user, making, iterator)

    def __set__(self, iterator: Any, value: Any) -> None:
        vars(iterator)[_NAME] = _without_probe(value)

    def __delete__(self, iterator: Any) -> None:
        del vars(iterator)[_NAME]

    def _around(self, user: Any, making: _Making, iterator: Any) -> Any:
        try:
            if making.block is None and not making.failed:
                making.failed = True  # stays set if no block can be made, so that it is tried only once
                if not 0 < iterator._num_workers <= MAX_WORKERS:
                    return user
                making.block = WorkerBlock(iterator._num_workers)
                if counted_in_fetch(iterator):
                    making.block.batches.set(WANTED)
                session, until = self._tracker.sources.sampling
                if until:
                    making.block.ask_samples(session, until)
            if making.block is None:
                return user
            return WorkerProbe(MarkedWorker(user) if self._tracker.profiler_ranges.nvtx else user, making.block)
        except Exception as error:
            self._tracker.fault(error)
            return user


def _without_probe(value: Any) -> Any:
    """The user's function. For a data pipe the constructor reads the probe and keeps it in a ``partial``."""
    if type(value) is functools.partial and any(isinstance(argument, WorkerProbe) for argument in value.args):
        return functools.partial(value.func, *map(_without_probe, value.args), **value.keywords)
    if isinstance(value, WorkerProbe):
        value = value.user
    return value.user if isinstance(value, MarkedWorker) else value
