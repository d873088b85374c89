"""A watched iterable: it can do what the object inside can, and its waits are timed.

Python looks up special methods on the class, so each class of objects that is watched has one of wrappers, with those
special methods that it has itself and no others. Everything else goes to the object by ``getattr``.
"""

from __future__ import annotations

import copy
import operator
import weakref
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.kinds import Wrapper, unwrapped
from telemetry.attach.loader import timed_iter, timed_next

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.attach.steps import StepTracker

    Tracker = Callable[[], StepTracker | None]

_NOT_PASSED_ON: Final = frozenset(dir(Wrapper)) - {"__lt__", "__le__", "__gt__", "__ge__", "__getstate__"} | {
    *("__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__dict__", "__get__", "__set__", "__delete__"),
    *("__getattr__", "__iter__", "__next__", "__set_name__", "__torch_function__", "__instancecheck__"),
}
"""Special methods that every wrapper has itself, or that are about its own making."""

_ARITHMETIC: Final = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_OPERATORS: Final = frozenset(f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "r", "i")) | {
    *("__lt__", "__le__", "__gt__", "__ge__")
}

_MISSING: Final = object()


class Watched(Wrapper):
    """What every wrapper has. `wrap` makes them. While no agent runs, it only passes on."""

    __slots__ = ("_telemetry_bound", "_telemetry_next", "_telemetry_tracker")

    _telemetry_bound: StepTracker | None
    _telemetry_next: Callable[[Any], Any]
    _telemetry_tracker: Tracker

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
        except Exception as error:  # a class that nothing can be learned from
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

    def __dir__(self) -> list[str]:
        return dir(self._telemetry_object)

    def __repr__(self) -> str:
        return repr(self._telemetry_object)

    def __str__(self) -> str:
        return str(self._telemetry_object)

    def __format__(self, form: str) -> str:
        return format(self._telemetry_object, form)

    def __eq__(self, other: object) -> Any:
        return self._telemetry_object == unwrapped(other)

    def __ne__(self, other: object) -> Any:
        return self._telemetry_object != unwrapped(other)

    def __hash__(self) -> int:
        return hash(self._telemetry_object)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """It pickles as the object inside, so that unpickling needs nothing of this package."""
        return operator.itemgetter(0), ((self._telemetry_object,),)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self._telemetry_object), self._telemetry_tracker)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return wrap(copy.deepcopy(self._telemetry_object, memo), self._telemetry_tracker)


def wrap(inside: Any, tracker: Tracker, source: Watched | None = None) -> Any:
    """Watch an object.

    Args:
        inside: what can be iterated over.
        tracker: gives that of the agent that runs, None while there is none.
        source: the wrapper whose iterator this is.
    """
    wrapper = object.__new__(_class_for(type(inside)))
    keep = object.__setattr__
    keep(wrapper, "_telemetry_object", inside)
    keep(wrapper, "_telemetry_tracker", tracker)
    keep(wrapper, "_telemetry_source", source)
    keep(wrapper, "_telemetry_bound", None)
    keep(wrapper, "_telemetry_next", _first_pull)
    return wrapper


def _begin(wrapper: Watched) -> Iterator[Any]:
    return iter(wrapper._telemetry_object)


def _pull(wrapper: Watched) -> Any:
    return next(wrapper._telemetry_object)


def _first_pull(wrapper: Watched) -> Any:
    """``next`` of one that was never asked for its iterator, or was while no agent ran."""
    _bind(wrapper, wrapper._telemetry_tracker())
    pull = wrapper._telemetry_next
    return next(wrapper._telemetry_object) if pull is _first_pull else pull(wrapper)


def _bind(wrapper: Watched, tracker: StepTracker | None) -> None:
    """Time the waits for the agent that runs now."""
    if tracker is wrapper._telemetry_bound:
        return
    timed = _first_pull if tracker is None else timed_next(_pull, tracker, tracker.gradients_on)
    object.__setattr__(wrapper, "_telemetry_next", timed)
    object.__setattr__(wrapper, "_telemetry_bound", tracker)


def _is_its_own_iterator(inside: object) -> bool:
    """Whether ``iter`` surely does no more than to return the object itself: a generator, a list's iterator."""
    kind = type(inside)
    return hasattr(kind, "__next__") and isinstance(getattr(kind, "__iter__", None), WrapperDescriptorType)


# -- the class of wrappers for a class of objects ---------------------------------------------------------------------

_classes: weakref.WeakKeyDictionary[type, type[Watched]] = weakref.WeakKeyDictionary()


def _class_for(kind: type) -> type[Watched]:
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _make_class(kind)
    return made


def _make_class(kind: type) -> type[Watched]:
    special: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        special |= {name: value for name, value in vars(base).items() if _is_special(name)}
    members: dict[str, Any] = {
        name: _passed_on(name) if value is not None else None
        for name, value in special.items()
        if name not in _NOT_PASSED_ON and (value is None or callable(value))
    }
    if "__add__" in members and "__radd__" not in members:
        members["__radd__"] = _added_to
    if "__next__" in special:
        members["__next__"] = _next
    members["__hash__"] = Watched.__hash__ if callable(kind.__hash__) else None
    members |= {
        "__slots__": (),
        "__class__": property(lambda self: self._telemetry_object.__class__),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (Watched,), members)


def _added_to(self: Watched, other: Any) -> Any:
    """``other + watched``: a tuple leaves that to the one on the right.

    So does a list, but for ``other += watched`` too. That extends the list in place and iterates, which is timed: so a
    list is not added here, at the price of ``[0] + watched`` being a TypeError.
    """
    return NotImplemented if hasattr(type(other), "__iadd__") else other + self._telemetry_object


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _next(self: Watched) -> Any:
    return self._telemetry_next(self)


def _passed_on(name: str) -> Callable[..., Any]:
    """A special method that calls the object's. An object that returns itself stays watched."""
    is_operator = name in _OPERATORS

    def method(self: Watched, *args: Any, **kwargs: Any) -> Any:
        inside = self._telemetry_object
        if is_operator:
            args = tuple(map(unwrapped, args))
        result = _bound(inside, name)(*args, **kwargs)
        return self if result is inside else result

    method.__name__ = name
    return method


def _bound(inside: Any, name: str) -> Callable[..., Any]:
    """A special method of an object, found as Python finds it: on the class."""
    kind = type(inside)
    for base in kind.__mro__:
        value = vars(base).get(name, _MISSING)
        if value is not _MISSING:
            bind = getattr(type(value), "__get__", None)
            return value if bind is None else bind(value, inside, kind)  # type: ignore[no-any-return]
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
