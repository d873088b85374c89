"""Keeps objects that own a resource of a device from being destroyed in a forked child.

A child inherits a copy of them. The destructor of a CUDA event calls the driver, which does not work in a forked
child: at best it fails, at worst it ends the process. A reference may be dropped by hand, with the object that holds
it, by the garbage collector, or when the interpreter ends and clears every module. So objects that are kept here also
have a reference that Python does not know of. Only `release`, in the process that made the object, drops it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_KEPT: Final[dict[int, Any]] = {}
# This reference is never dropped: the dictionary and its contents outlive the interpreter, also in the parent.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


def keep(owner: Any) -> None:
    """Keep an object alive, and all that it refers to, until `release`; in every forked child for ever."""
    _KEPT[id(owner)] = owner


def release(owner: Any) -> None:
    """Release an object. Must not be called in a forked child for an object that its parent keeps."""
    _KEPT.pop(id(owner), None)
