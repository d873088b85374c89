"""Keeps objects that own a resource of a device from being destroyed in a forked child.

A child inherits a copy of such objects. The destructor of a CUDA event calls the driver, which does not work in a
forked child: the call fails, or ends the process. Many things can drop the last reference: code, the garbage collector,
or the interpreter when it exits and clears every module. So an object that is kept here has one more reference, which
Python does not know of. Only `release` drops it, in the process that made the object.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_KEPT: Final[dict[int, Any]] = {}
# This reference is never dropped: the dictionary and its contents outlive the interpreter, in the parent, too.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))


def keep(owner: Any) -> None:
    """Keep an object, and everything that it refers to, alive until `release`; in a forked child forever."""
    _KEPT[id(owner)] = owner


def release(owner: Any) -> None:
    """Release an object. Must not be called in a forked child for an object of its parent."""
    _KEPT.pop(id(owner), None)
