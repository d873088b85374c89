"""Objects that own a resource of a device, and that a forked child must never release.

A child inherits a copy of them. The destructor of a CUDA event calls the driver, which does not work in a forked
child: at best it fails, at worst it ends the process. References go away in many ways: dropped by hand, with the
object that holds them, by the garbage collector, or when the interpreter ends and clears every module. So what is
kept here also has a reference that Python does not know of, and only `release`, in the process that made the object,
gives it up.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_KEPT: Final[dict[int, Any]] = {}
# One reference that nobody ever drops: the dictionary and what is in it outlive the interpreter, in the parent too.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


def keep(owner: Any) -> None:
    """Keep an object alive, with all that it refers to: until `release`, and in every forked child for ever."""
    _KEPT[id(owner)] = owner


def release(owner: Any) -> None:
    """Release an object. Never in a forked child, for an object that its parent has kept."""
    _KEPT.pop(id(owner), None)
