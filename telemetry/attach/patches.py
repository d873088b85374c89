"""Replaces attributes of modules and classes that are not ours, and restores them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.traceback_frames import forget_frame, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING: Final = object()


def _nothing(_owner: object) -> None:
    """Do nothing before the call."""


def around(
    original: Callable[..., Any],
    *,
    before: Callable[[Any], Any] = _nothing,
    after: Callable[[Any, Any, bool], object],
) -> Callable[..., Any]:
    """Wrap a method with a call before and a call after it. Its exceptions pass with their tracebacks unchanged.

    Args:
        original: the method.
        before: called with the object. If it raises, the caller gets the exception and the method is not called.
        after: called with the object, the result of ``before``, and whether the method has raised. It must not raise.
    """

    @functools.wraps(original)
    @unseen
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted = before(self)
        failed = True
        try:
            result = original(self, *args, **kwargs)
            failed = False
        except BaseException as error:
            forget_frame(error)
            raise
        finally:
            after(self, noted, failed)
        return result

    return wrapper


class Patches:
    """Patches that can all be undone, in reverse order.

    If other code has patched over one of our patches, that patch is not undone, because that would undo theirs, too. It
    stays underneath and passes straight through.
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
        # A function known under two names gets one wrapper. Otherwise it could not be pickled by its name.
        same = [ours for _, _, theirs, ours in self._undo if theirs is original]
        replacement = same[0] if same else wrap(original)
        setattr(owner, name, replacement)
        self._undo.append((owner, name, original, replacement))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of ``owner``. `undo` restores the previous attribute, if there was one."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def remove() -> None:
            if vars(owner).get(name) is not value:
                return
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self.on_undo(remove)

    def on_undo(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when the patches are undone: for hooks that are removed in another way."""
        self._removers.append(remove)

    def undo(self) -> list[str]:
        """Undo all patches. Returns the names of patches that stay, because other code has patched over them."""
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
