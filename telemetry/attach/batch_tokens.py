"""Counts the tokens of a batch: the positions of its ``input_ids``.

Only shapes and types are read, never values, and none of the user's code is called. So only mappings and tensors of
known classes are looked into, and what an object's own ``__dict__`` holds.
"""

from __future__ import annotations

import sys
from collections import UserDict
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, cast

_NAME: Final = "input_ids"
_MAX_PARTS: Final = 16
_BUILT_IN: Final = frozenset({GetSetDescriptorType, MemberDescriptorType})
"""What a ``__dict__`` is that no class computes."""

_PLAIN: Final = frozenset({int, float, bool, str, bytes, type(None)})


def tokens_in(batch: object) -> int | None:
    """How many tokens a batch has.

    Args:
        batch: a mapping or an object with a tensor of integers as ``input_ids``; or a list, tuple or mapping of such
            ones. It is not looked for any deeper.

    Returns:
        All positions of ``input_ids``, padding included; 0 without any. None if that is not known: the batch is
        of an unknown class, or its ``input_ids`` are no tensor of integers.
    """
    fields = _fields_of(batch)
    if fields is not None and _NAME in fields:
        return _size(fields[_NAME])
    parts = _parts_of(batch) if fields is None else list(fields.values())[:_MAX_PARTS]
    if parts is None:
        return None
    tokens = 0
    for part in parts:
        inside = _fields_of(part)
        if inside is not None and _NAME in inside:
            size = _size(inside[_NAME])
            if size is None:
                return None
            tokens += size
    return tokens


def _fields_of(batch: object) -> dict[Any, Any] | None:
    """The dictionary of a mapping, or of an object; None for anything else."""
    kind = type(batch)
    if kind is dict:
        return batch  # type: ignore[return-value]
    if kind in _PLAIN or kind is _tensor() or issubclass(kind, (list, tuple)):
        return None
    if issubclass(kind, dict):
        return dict(dict.items(batch))  # type: ignore[arg-type]  # not its own methods
    own = _own_dict(batch)
    if own is not None and UserDict in kind.__mro__:
        inside = own.get("data")
        return inside if type(inside) is dict else None
    return own if own is not None and _NAME in own else None


def _parts_of(batch: object) -> list[object] | None:
    """The items of a list or tuple; none for a tensor or a plain value; None for an object of another class."""
    kind, items = type(batch), cast("Any", batch)
    if issubclass(kind, (list, tuple)):
        own = tuple if issubclass(kind, tuple) else list  # not the methods of its class
        return list(own.__getitem__(items, slice(_MAX_PARTS)))
    return [] if kind in _PLAIN or kind in {_tensor(), _array()} else None


def _own_dict(candidate: object) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, found without the attributes that its class computes."""
    for kind in type(candidate).__mro__:
        found = vars(kind).get("__dict__")
        if found is not None:
            own = found.__get__(candidate) if type(found) in _BUILT_IN else None
            return own if type(own) is dict else None
    return None


def _size(ids: object) -> int | None:
    """The positions of a tensor or an array of integers; None for anything else."""
    known: Any = ids
    if type(ids) is _tensor():
        kind = known.dtype
        torch = sys.modules["torch"]
        integers = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
        return int(known.numel()) if integers else None
    if type(ids) is _array():
        return int(known.size) if known.dtype.kind in "iu" else None
    return None


def _tensor() -> Any:
    return getattr(sys.modules.get("torch"), "Tensor", _tensor)


def _array() -> Any:
    return getattr(sys.modules.get("numpy"), "ndarray", _array)
