"""Python stacks in faulthandler's words: file, line number, function. No source file is read.

`linecache` would read them, and a file system that hangs would hang whoever asks what hangs.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

MOST_FRAMES: Final = 100
"""Of one stack, innermost first; faulthandler's own limit."""

_MOST_TEXT: Final = 500
_LIBRARIES: Final = (os.path.dirname(os.__file__), os.path.dirname(__file__), "<")  # noqa: PTH120 - strings to compare
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(file: str) -> bool:
    """Whether a file is Python's, a package's or ours, and none of the user's own."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; None where there is none."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType) -> str:
    """Where a frame stands, as ``augment (train.py:41)``."""
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno})"


def stack_text(frame: FrameType | None) -> str:
    """One line for each frame, the innermost first."""
    lines: list[str] = []
    while frame is not None:
        if len(lines) == MOST_FRAMES:
            lines.append("  ...\n")
            break
        code = frame.f_code
        lines.append(f'  File "{code.co_filename[-_MOST_TEXT:]}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class PythonThread:
    """A thread and its innermost frame. ``native`` is its id for the kernel, None where Python did not start it."""

    ident: int
    name: str
    native: int | None
    frame: FrameType


def python_threads() -> list[PythonThread]:
    """Every thread of this process that runs Python. Takes no lock.

    The frames keep what is in them alive: to be let go of before the caller waits for anything.
    """
    # The dictionary itself: `threading.enumerate` takes a lock, and a signal handler must not wait for one.
    known = dict(getattr(threading, "_active", {}))
    return [
        PythonThread(ident, str(known[ident].name), known[ident].native_id, frame)
        if ident in known
        else PythonThread(ident, "unknown", None, frame)
        for ident, frame in sys._current_frames().items()
    ]
