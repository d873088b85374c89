"""Keeps Kineto, the library under torch's profiler, from writing to stderr on our account.

It has no call for that. Its level of severity is a variable in the library, which it reads before each line, so it is
changed there for as long as ours is at work, and then put back: the script's own profilers write what they always do.
Setting ``KINETO_LOG_LEVEL`` would not do: it is read once, holds for the whole process, and a change of the environment
can crash a thread that reads it in C.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE: Final = "KINETO_LOG_LEVEL"
_LEVEL: Final = "_ZN9libkineto6Logger14severityLevel_E"
_SILENT: Final = 99
_HIGHEST: Final = 16
"""Levels are small numbers; anything else is not the variable that it was taken for."""


@contextmanager
def quiet() -> Iterator[None]:
    """In which Kineto writes nothing, unless the user has set what it is to write."""
    level = None if _VARIABLE in os.environ else _level()
    if level is None or not 0 <= level.value <= _HIGHEST:
        yield
        return
    before, level.value = level.value, _SILENT
    try:
        yield
    finally:
        if level.value == _SILENT:  # else Kineto has begun meanwhile, and has chosen its own
            level.value = before


@cache
def _level() -> ctypes.c_int | None:
    """The variable, None where this torch does not show it: then Kineto's lines stay."""
    torch: Any = sys.modules.get("torch._C")
    try:
        library = ctypes.CDLL(torch.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.c_int.in_dll(library, _LEVEL)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
