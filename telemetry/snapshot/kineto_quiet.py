"""Keeps Kineto, the library under torch's profiler, from writing to stderr while our profiler starts or stops.

Kineto has no function for that. It reads its log level from a variable in the library before each line. So we change
that variable while our profiler is busy, and restore it afterwards: the script's own profilers write what they always
do. Setting ``KINETO_LOG_LEVEL`` is not an option. Kineto reads it once, with the first profiler, for the whole process;
and changing the environment can crash a thread that reads it in C.
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
"""Levels are small numbers. With any other value it is not the variable that we expect."""


@contextmanager
def quiet() -> Iterator[None]:
    """The context in which Kineto writes nothing, unless the user has set its log level."""
    level = None if _VARIABLE in os.environ else _level()
    if level is None or not 0 <= level.value <= _HIGHEST:
        yield
        return
    before, level.value = level.value, _SILENT
    try:
        yield
    finally:
        if level.value == _SILENT:  # otherwise Kineto was initialised meanwhile and has set its own level
            level.value = before


@cache
def _level() -> ctypes.c_int | None:
    """Kineto's log level; None if this torch does not export the symbol. Then Kineto's lines stay."""
    torch: Any = sys.modules.get("torch._C")
    try:
        library = ctypes.CDLL(torch.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.c_int.in_dll(library, _LEVEL)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
