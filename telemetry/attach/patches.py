"""Replace an attribute of somebody else's module or class, and put it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MISSING: Final = object()


class Patches:
    """Patches that can all be undone, in reverse order.

    What somebody else patched over ours is left alone: taking it away would undo theirs. Ours then stays underneath,
    passing straight through.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._removers: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``wrap(original)``."""
        original = vars(owner).get(name, _MISSING)
        if original is _MISSING:
            raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no {name} of its own to patch")
        # A function known under two names has one wrapper, or it could not be pickled by its name any more.
        same = [ours for _, _, theirs, ours in self._undo if theirs is original]
        replacement = same[0] if same else wrap(original)
        setattr(owner, name, replacement)
        self._undo.append((owner, name, original, replacement))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give ``owner`` an attribute, in the place of what it has under that name, if anything."""
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
        """Call ``remove`` when the patches are undone: for hooks that bring their own way out."""
        self._removers.append(remove)

    def undo(self) -> list[str]:
        """Put everything back. Returns the names of what was not ours any more and was left as it is."""
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
