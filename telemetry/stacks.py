"""Python stacks in faulthandler's words: file, line number, function. No source file is read.

`linecache` would read them, and a file system that hangs would hang whoever asks what hangs.

A frame keeps what is in it alive. Who holds one of another thread when the function returns becomes the one that frees
its variables: a batch, or an iterator whose end waits for its workers. So no frame is held while another thread may
run. A stack is read in one call of C functions, in which the interpreter does not change threads, and only text and
numbers come out of it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, repeat, takewhile
from operator import attrgetter, is_not, methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

MOST_FRAMES: Final = 100
"""Of one stack, innermost first; faulthandler's own limit."""

_MOST_TEXT: Final = 500
_LIBRARIES: Final = (os.path.dirname(os.__file__), os.path.dirname(__file__), "<")  # noqa: PTH120 - strings to compare
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_CALL: Final = methodcaller("__call__")
_PLACE: Final = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
_GLOBALS: Final = attrgetter("f_globals")
_NAME: Final = methodcaller("get", "__name__", "")


class Spot(NamedTuple):
    """Where a frame stands. ``module`` is that of its globals."""

    file: str
    line: int
    function: str
    module: str


Stack = tuple[Spot, ...]
"""Innermost first; one more than `MOST_FRAMES` where there are more."""


def stack_of(ident: int) -> Stack:
    """The stack of a thread; empty if it runs no Python."""
    read = _at_once(lambda: zip(map(_PLACE, _frames(ident)), map(_NAME, map(_GLOBALS, _frames(ident))), strict=False))
    return tuple(Spot(file, line, function, str(module)) for (file, line, function), module in read)


def own_stack(frame: FrameType | None) -> Stack:
    """The stack from a frame of the calling thread on."""
    spots: list[Spot] = []
    while frame is not None and len(spots) <= MOST_FRAMES:
        spots.append(Spot(*_PLACE(frame), str(_NAME(frame.f_globals))))
        frame = frame.f_back
    return tuple(spots)


def _frames(ident: int) -> Iterator[Any]:
    """The frames of a thread, one by one: ``f_back`` of the one before, until that is None. Holds one at a time."""
    newest = map(methodcaller("get", ident), islice(iter(sys._current_frames, None), 1))
    return takewhile(partial(is_not, None), accumulate(chain(newest, repeat("f_back", MOST_FRAMES)), getattr))


def _at_once(make: Any) -> list[Any]:
    """What an iterator of C functions gives, read in one call. It is referred to by that call alone."""
    if sys.version_info >= (3, 12):
        return list(make())
    # Here an allocation may begin a garbage collection, whose finalizers are Python. Not in the middle of this.
    enabled: list[bool] = []
    try:
        ((_, _, read, _),) = list(
            zip(
                map(enabled.append, map(_CALL, repeat(gc.isenabled, 1))),
                map(_CALL, repeat(gc.disable, 1)),
                map(list, (make(),)),
                map(_CALL, map((gc.disable, gc.enable).__getitem__, iter(enabled.pop, None))),
                strict=False,
            )
        )
    except BaseException:
        if enabled and enabled.pop():
            gc.enable()
        raise
    return read


def is_library(file: str) -> bool:
    """Whether a file is Python's, a package's or ours, and none of the user's own."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def users_spot(stack: Stack) -> Spot | None:
    """The innermost place in the user's own code; None where there is none."""
    return next((spot for spot in stack if not is_library(spot.file)), None)


def line_of(spot: Spot) -> str:
    """A place, as ``augment (train.py:41)``."""
    return f"{spot.function} ({spot.file.rpartition(os.sep)[2]}:{spot.line})"


def stack_text(stack: Stack) -> str:
    """One line for each frame, the innermost first."""
    lines = [f'  File "{at.file[-_MOST_TEXT:]}", line {at.line} in {at.function}\n' for at in stack[:MOST_FRAMES]]
    return "".join((*lines, "  ...\n") if len(stack) > MOST_FRAMES else lines)


@dataclass(frozen=True, slots=True)
class PythonThread:
    """A thread and its stack. ``native`` is its id for the kernel, None where Python did not start it."""

    ident: int
    name: str
    native: int | None
    stack: Stack


def python_threads() -> list[PythonThread]:
    """Every thread of this process that runs Python. Takes no lock."""
    # The dictionary itself: `threading.enumerate` takes a lock, and a signal handler must not wait for one.
    known = dict(getattr(threading, "_active", {}))
    (idents,) = _at_once(lambda: map(list, islice(iter(sys._current_frames, None), 1)))
    return [
        PythonThread(ident, str(known[ident].name), known[ident].native_id, stack)
        if ident in known
        else PythonThread(ident, "unknown", None, stack)
        for ident in idents
        if (stack := stack_of(ident))
    ]
