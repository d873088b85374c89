"""How the hooks get into code that is not ours: replaced attributes, hidden frames."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from telemetry.safety.errors import let_pass

if TYPE_CHECKING:
    from collections.abc import Callable


# -- keeps our frames out of tracebacks, and out of the places that warnings name --------------------------------------

F = TypeVar("F", bound="Callable[..., Any]")

_SKIPPED: Final = os.path.join(os.path.dirname(__file__), "importlib._bootstrap")  # noqa: PTH118, PTH120 - a text


def unseen(function: F) -> F:
    """Make a function around torch's or the script's invisible for ``warnings.warn(…, stacklevel=…)``.

    A warning with a stack level names the file and line of a caller, and warning filters go by these. Python skips the
    frames of its import system, which it recognises by the name of their file (bpo-24305). So the function gets such a
    name, in our folder.
    """
    code: Any = function
    code.__code__ = code.__code__.replace(co_filename=_SKIPPED)
    return function


def forget_frame(error: BaseException) -> None:
    """Drop the first frame, the caller's own, from the traceback of the exception it has just caught.

    A bare ``raise`` must follow. From Python 3.11 on, it restores the traceback as it is now and adds nothing. On 3.10
    the frame stays, because a bare ``raise`` restores the traceback as it was caught.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next


# -- maps objects to values without keeping the objects alive, and runs no Python when an object is freed --------------
# The dictionaries and sets of `weakref` have Python callbacks. A signal that arrives while an object is freed is
# handled at the first bytecode of such a callback, and Python drops what a callback raises: Ctrl-C would be lost.

V = TypeVar("V")


class WeakMap(Generic[V]):
    """Compares objects by identity; they must take weak references. A value is freed with its object."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, key: object, value: V) -> None:
        number = id(key)
        # The callback gets the reference as the default of `pop`, which is not used.
        self._entries[number] = weakref.ref(key, partial(self._entries.pop, number)), value

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> V | None:
        """The value of an object, if it has one."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def discard(self, key: object) -> None:
        """Forget an object, if it has a value."""
        self._entries.pop(id(key), None)

    def objects(self) -> list[Any]:
        """The objects that are alive. The result keeps them alive."""
        return [key for reference, _ in [*self._entries.values()] if (key := reference()) is not None]

    def clear(self) -> None:
        """Forget all objects."""
        self._entries.clear()


# -- replaces attributes of modules and classes that are not ours, and restores them -----------------------------------

_MISSING: Final = object()

FAILED: Final = object()
"""Stands for the result of a call that has raised."""


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing before or after the call."""


def around(
    original: Callable[..., Any],
    *,
    before: Callable[..., Any] = _nothing,
    after: Callable[..., object] = _nothing,
    on_error: Callable[[BaseException], None] = let_pass,
) -> Callable[..., Any]:
    """Wrap a function with a call before and a call after it. Its exceptions pass with their tracebacks unchanged.

    Args:
        original: the function.
        before: called with the arguments.
        after: called with what ``before`` has returned (None if it has raised), the result or `FAILED`, and the
            arguments.
        on_error: gets what ``before`` and ``after`` raise. It must raise what comes from the script.
    """

    @functools.wraps(original)
    @unseen
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        noted, result = None, FAILED
        try:
            noted = before(*args, **kwargs)
        except BaseException as error:
            on_error(error)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            try:
                after(noted, result, *args, **kwargs)
            except BaseException as error:
                on_error(error)
        return result

    return wrapper


class Patches:
    """Patches that can all be undone, in reverse order.

    If other code has patched over one of them, that patch is not undone, because that would undo theirs, too. It stays
    underneath and passes straight through.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._removers: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``wrap(original)``.

        Raises:
            AttributeError: the owner itself has no such attribute. An inherited attribute does not count.
        """
        original = vars(owner).get(name, _MISSING)
        if original is _MISSING:
            raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no {name} of its own to patch")
        # A function with two names gets one wrapper. Otherwise it could not be pickled by its name.
        same = [ours for _, _, theirs, ours in self._undo if theirs is original]
        replacement = same[0] if same else wrap(original)
        setattr(owner, name, replacement)
        self._undo.append((owner, name, original, replacement))

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] = _nothing,
        after: Callable[..., object] = _nothing,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Replace ``owner.name`` by the same with a call `around` it."""
        self.replace(owner, name, lambda original: around(original, before=before, after=after, on_error=on_error))

    def hold(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` is one of these patches."""
        return any(each is owner and named == name for each, named, _, _ in self._undo)

    def on_undo(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when the patches are undone, for hooks with another way to remove them."""
        self._removers.append(remove)

    def undo(self) -> list[str]:
        """Undo all patches. Returns the names of patches that must stay, because other code has patched over them."""
        left: list[str] = []
        for owner, name, original, replacement in reversed(self._undo):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
            else:
                left.append(f"{getattr(owner, '__name__', owner)}.{name}")
        self._undo.clear()
        for remove in reversed(self._removers):
            remove()
        self._removers.clear()
        return left


def is_imported(name: str) -> bool:
    """Whether a module has been imported, and its code has run to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


# -- keeps objects with a resource of a device from being destroyed ----------------------------------------------------
# A child inherits a copy of such objects. The destructor of a CUDA event calls the driver, which does not work in a
# forked child: the call fails, or ends the process. In any process it waits for a driver that hangs, and it writes to
# stderr after CUDA has failed. Many things can drop the last reference: code, the garbage collector, or the interpreter
# when it exits and clears every module. So what is kept here is never destroyed.

_KEPT: Final[list[Any]] = []
# Nobody ever drops this reference: the list and its contents outlive the interpreter.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


def keep(owner: Any) -> None:
    """Keep an object, and everything that it refers to, alive for ever, also in forked children."""
    _KEPT.append(owner)
