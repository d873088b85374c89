"""Hooks sources that are no DataLoader: iterables that the script watches, and libraries that read ahead."""

from __future__ import annotations

import copy
import functools
import operator
from inspect import isgeneratorfunction, unwrap
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Final

from telemetry.seams import ring as r
from telemetry.seams.batches import iteration_begins
from telemetry.seams.dataloader import timed_iter, timed_next
from telemetry.seams.loaders import READ_AHEAD, WATCHED, BatchSource, Wrapper, unwrapped
from telemetry.seams.patching import WeakMap, unseen
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from telemetry.seams.patching import Patches
    from telemetry.seams.tracker import StepTracker

    Tracker = Callable[[], StepTracker | None]


# -- a wrapper around a watched iterable: it behaves like the object inside, and its waits are timed -------------------
# Python looks up special methods on the class. So for each class of watched objects a class of wrappers is made, with
# exactly the same special methods. ``getattr`` passes everything else to the object. Numpy makes an array of an object
# of an unknown class; functions of torch take no wrapper.

_NOT_PASSED_ON: Final = frozenset(dir(Wrapper)) - {
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__", "__getstate__"),
    *("__repr__", "__str__", "__format__", "__dir__"),
} | {
    *("__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__dict__", "__get__", "__set__", "__delete__"),
    *("__getattr__", "__iter__", "__next__", "__set_name__", "__instancecheck__"),
    *("__array_function__", "__array_ufunc__", "__torch_function__"),
}
"""Special methods that wrappers define themselves, or that Python uses when it makes a class."""


class Watched(Wrapper):
    """Base class of all wrappers, which `wrap` makes. While no agent runs, a wrapper only forwards."""

    __slots__ = ("_telemetry_bound", "_telemetry_next", "_telemetry_pull", "_telemetry_tracker")

    _telemetry_bound: StepTracker | None
    _telemetry_next: Callable[[Any], Any]
    _telemetry_pull: Callable[[Any], Any]
    _telemetry_tracker: Tracker

    @unseen
    def __iter__(self) -> Any:
        inside, tracker = self._telemetry_object, self._telemetry_tracker()
        if tracker is None or _is_its_own_iterator(inside):
            iterator = iter(inside)
        else:
            iterator = timed_iter(_begin, tracker)(self)
        if iterator is inside:
            _bind(self, tracker)
            return self
        if issubclass(type(iterator), Watched):
            return iterator
        source = self._telemetry_source
        try:
            wrapper = wrap(iterator, self._telemetry_tracker, self if source is None else source)
            _bind(wrapper, tracker)
        except Exception as error:  # a class for which no wrapper can be made
            if tracker is not None:
                tracker.fault(error)
            return iterator
        return wrapper

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_telemetry_"):
            raise AttributeError(name)
        return getattr(self._telemetry_object, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._telemetry_object, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._telemetry_object, name)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle the object inside, so that unpickling does not need this package."""
        return operator.itemgetter(0), ((self._telemetry_object,),)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self._telemetry_object), self._telemetry_tracker)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return wrap(copy.deepcopy(self._telemetry_object, memo), self._telemetry_tracker)


def wrap(
    inside: Any, tracker: Tracker, source: Watched | None = None, *, pull: Callable[[Any], Any] | None = None
) -> Any:
    """Make a wrapper that behaves like the iterable ``inside``.

    Args:
        inside: the iterable.
        tracker: returns the tracker of the running agent; None while no agent runs.
        source: the wrapper whose iterator ``inside`` is, if any.
        pull: takes the next item of the wrapper, if it is a prefetcher.
    """
    wrapper = object.__new__(_class_for(type(inside)))
    keep = object.__setattr__
    keep(wrapper, "_telemetry_object", inside)
    keep(wrapper, "_telemetry_tracker", tracker)
    keep(wrapper, "_telemetry_source", source)
    keep(wrapper, "_telemetry_batches", WATCHED if pull is None else READ_AHEAD)
    keep(wrapper, "_telemetry_pull", pull or _pull)
    keep(wrapper, "_telemetry_bound", None)
    keep(wrapper, "_telemetry_next", _first_pull)
    return wrapper


@unseen
def _begin(wrapper: Watched) -> Iterator[Any]:
    return iter(wrapper._telemetry_object)


@unseen
def _pull(wrapper: Watched) -> Any:
    return next(wrapper._telemetry_object)


@unseen
def _first_pull(wrapper: Watched) -> Any:
    """Take the next item of a wrapper whose ``iter`` was not called, or was called while no agent ran."""
    _bind(wrapper, wrapper._telemetry_tracker())
    pull = wrapper._telemetry_next
    return next(wrapper._telemetry_object) if pull is _first_pull else pull(wrapper)


def _bind(wrapper: Watched, tracker: StepTracker | None) -> None:
    if tracker is wrapper._telemetry_bound:
        return
    timed = _first_pull if tracker is None else timed_next(wrapper._telemetry_pull, tracker)
    object.__setattr__(wrapper, "_telemetry_next", timed)
    object.__setattr__(wrapper, "_telemetry_bound", tracker)


def _is_its_own_iterator(inside: object) -> bool:
    """Whether ``iter`` only returns the object itself, as for a generator or a list's iterator."""
    kind = type(inside)
    return hasattr(kind, "__next__") and isinstance(getattr(kind, "__iter__", None), WrapperDescriptorType)


# -- the class of wrappers for a class of objects ---------------------------------------------------------------------

_classes: WeakMap[type[Watched]] = WeakMap()


def _class_for(kind: type) -> type[Watched]:
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _make_class(kind)
    return made


def _make_class(kind: type) -> type[Watched]:
    special: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        special |= {name: value for name, value in vars(base).items() if _is_special(name)}
    members: dict[str, Any] = {
        name: _passed_on(name) if value is not None else None
        for name, value in special.items()
        if name not in _NOT_PASSED_ON and (value is None or callable(value))
    }
    if "__next__" in special:
        members["__next__"] = _next
    members |= {
        "__slots__": (),
        "__class__": property(lambda self: self._telemetry_object.__class__),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (Watched,), members)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@unseen
def _next(self: Watched) -> Any:
    return self._telemetry_next(self)


def _passed_on(name: str) -> Callable[..., Any]:
    """A special method that calls the object's own. If that returns the object itself, it returns the wrapper."""

    def method(self: Watched, *args: Any, **kwargs: Any) -> Any:
        inside = self._telemetry_object
        result = getattr(type(inside), name)(inside, *map(unwrapped, args), **kwargs)
        return self if result is inside else result

    method.__name__ = name
    return method


# -- prefetchers: the training thread waits for the queue of a library that reads ahead on its own threads -------------
# Each library is patched when it is imported, where the training thread takes its next batch. A request there is timed
# like one to a DataLoader, with the requests inside it on the same thread.

_DALI: Final = BatchSource("read_ahead", {"reader": "DALI"})
_AHEAD: Final = frozenset({"Prefetcher", "ParallelMapper", "PinMemory"})
_MAX_DEPTH: Final = 64


def patch_monai(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch MONAI: a thread iterates over the DataLoader, and a generator yields its batches."""
    for owner in (module.ThreadDataLoader, module.ThreadBuffer):
        patches.replace(owner, "__iter__", lambda original: watched_generator(original, tracker, numbered=True))


def patch_nodes(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch ``torchdata.nodes``: the loop asks the outermost node, which asks the others, here or on other threads."""
    tracker.loaders.known_iterators.append((module.BaseNode, _source_of_node))
    patches.replace(module.BaseNode, "__next__", lambda original: timed_next(original, tracker))


def patch_node_loader(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch ``torchdata.nodes.Loader``: ``__iter__`` starts the threads, and in a loaded state takes a batch."""
    patches.replace(module.Loader, "__iter__", lambda original: timed_iter(original, tracker))


def patch_dali(module: Any, tracker: StepTracker, patches: Patches) -> None:
    """Patch NVIDIA DALI, whose pipeline threads and GPU make the batches.

    A constructor already takes the first batch, long before the loop requests it. That does not count as a request.
    """

    def building(*_: Any, **__: Any) -> bool:
        outermost = tracker.here and not tracker.waiting_since
        if outermost:
            tracker.waiting_since = -now_ns()
        return outermost

    def built(outermost: bool | None, *_: Any, **__: Any) -> None:  # noqa: FBT001
        if outermost:
            tracker.waiting_since = 0

    for name in ("DALIGenericIterator", "DALIRaggedIterator"):
        iterator = getattr(module, name, None)
        if iterator is None:
            continue  # a newer version has it
        tracker.loaders.known_iterators.append((iterator, lambda _: _DALI))
        patches.around(iterator, "__init__", before=building, after=built, on_error=tracker.fault)
        patches.replace(iterator, "__next__", lambda original: timed_next(original, tracker))


PATCHES: Final[Mapping[str, Callable[[Any, StepTracker, Patches], None]]] = {
    "monai.data.thread_buffer": patch_monai,
    "torchdata.nodes.base_node": patch_nodes,
    "torchdata.nodes.loader": patch_node_loader,
    "nvidia.dali.plugin.pytorch": patch_dali,
}
"""The patch for each module, which is applied when the module is imported."""


def watch_class(cls: type, tracker: StepTracker, patches: Patches) -> bool:
    """Time the ``__iter__`` of a class of loaders, if it is a generator function.

    Returns:
        Whether iterations of its instances are timed from now on.
    """
    owner = next(base for base in cls.__mro__ if "__iter__" in vars(base))
    if not patches.hold(owner, "__iter__"):
        if not isgeneratorfunction(unwrap(vars(owner)["__iter__"])):
            return False
        patches.replace(owner, "__iter__", lambda original: watched_generator(original, tracker, numbered=False))
    return True


def watched_generator(
    original: Callable[[Any], Iterator[Any]], tracker: StepTracker, *, numbered: bool
) -> Callable[[Any], Iterator[Any]]:
    """Wrap a generator function, so that the training thread gets a watched generator.

    ``numbered``: whether its batches are those of the DataLoader inside, each once and in the same order.
    """
    begin = timed_iter(original, tracker)

    @functools.wraps(original)
    @unseen
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        iterator: Iterator[Any] = begin(self)
        try:
            if tracker.here and not tracker.waiting_since:  # not inside another one
                tracker.loaders.newest_begun = lambda: None
                pull = _prefetched(tracker, numbered=numbered and getattr(self, "repeats", 1) == 1)
                iterator = wrap(iterator, lambda: tracker if tracker.active else None, pull=pull)
        except Exception as error:
            tracker.fault(error)
        return iterator

    return __iter__


def _prefetched(tracker: StepTracker, *, numbered: bool) -> Callable[[Watched], Any]:
    """Take the next item of a prefetcher. An iteration with workers that its first request began is its source."""
    found = False

    @unseen
    def pull(wrapper: Watched) -> Any:
        nonlocal found
        batch = next(wrapper._telemetry_object)
        if not found and tracker.here:
            found = True
            try:
                handle = tracker.loaders.newest_begun()
                if handle is not None:
                    object.__setattr__(wrapper, "_telemetry_batches", handle)
                stamp = tracker.waiting_since  # the iteration began with the request
                if handle is not None and numbered and stamp > 0:
                    code = r.code(r.S_DATA_WAIT, r.S_DATA_WAIT, r.BEGINS)
                    tracker.ring.push(stamp, stamp, code, iteration_begins(handle))
            except Exception as error:
                tracker.note_error(error)
        return batch

    return pull


def _source_of_node(node: Any) -> BatchSource:
    """The source of a node that reads ahead on threads, or makes its batches on request."""
    for _ in range(_MAX_DEPTH):
        # A mapper without workers maps on the requesting thread.
        if type(node).__name__ in _AHEAD and getattr(node, "num_workers", None) != 0:
            return READ_AHEAD
        node = getattr(node, "root", None) or getattr(node, "source", None)
        if node is None:
            break
    return WATCHED
