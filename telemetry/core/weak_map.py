"""Values by object, which does not keep the objects alive and runs no Python when one of them is freed.

The dictionaries and sets of `weakref` have Python callbacks. A signal that arrives while an object is freed is handled
at the first bytecode of such a callback, and Python drops what a callback raises: Ctrl-C would be lost.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakMap(Generic[V]):
    """Objects are compared by identity, and must take weak references. A value is freed with its object."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, key: object, value: V) -> None:
        number = id(key)
        # The callback gets the reference, which is the default of `pop` and not used.
        self._entries[number] = weakref.ref(key, partial(self._entries.pop, number)), value

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> V | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def discard(self, key: object) -> None:
        """Forget an object, if it has a value."""
        self._entries.pop(id(key), None)

    def objects(self) -> list[Any]:
        """The objects that are alive. While the caller has them, it keeps them alive."""
        return [key for reference, _ in [*self._entries.values()] if (key := reference()) is not None]

    def clear(self) -> None:
        """Forget all objects."""
        self._entries.clear()
