"""Python stacks in the format of faulthandler: file, line number, function. No source file is read."""

from __future__ import annotations

import gc
import os
import re
import sys
from ast import literal_eval
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, repeat, takewhile, tee
from operator import attrgetter, is_not, methodcaller
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.safety.threads import listed_threads, named

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

MAX_FRAMES: Final = 100
"""A stack has at most this many frames, innermost first. This is faulthandler's own limit."""

_MAX_TEXT: Final = 500
_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - strings to compare
_SEAMS: Final = os.path.join(_PACKAGE, "seams") + os.sep  # noqa: PTH118
STANDARD_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
LOADER_CODE: Final = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_FETCHER: Final = f"{LOADER_CODE}_utils{os.sep}fetch.py"
_LOADER: Final = f"{LOADER_CODE}dataloader.py"
_LIBRARIES: Final = (STANDARD_LIBRARY, _PACKAGE + os.sep, "<")
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_FRAME: Final = re.compile(r", file (.*), line (-?\d+), code (.*)>", re.DOTALL)
_GLOBALS: Final = attrgetter("f_globals")
_CODE: Final = attrgetter("f_code")
_NAME: Final = methodcaller("get", "__name__", "")


class Spot(NamedTuple):
    """The place of a frame. ``module`` is the module of its globals."""

    file: str
    line: int
    function: str
    module: str


Stack = tuple[Spot, ...]
"""The places of the frames, innermost first, with one more than `MAX_FRAMES` if there are more."""


def stack_of(ident: int, until: dict[str, Any] | None = None) -> Stack:
    """The stack of a thread; empty if it runs no Python.

    Args:
        ident: the thread's ident.
        until: the globals of a module. Its frames, and their callers, are left out.
    """
    # In one call of C functions, in which no other thread gets the GIL. So no frame is held while it ends.
    read = list(_described(ident, until))
    return tuple(_spot(text[text.find(",") :], str(module)) for module, text in read)


def code_of(ident: int, file: str, function: str, line: int) -> CodeType | None:
    """The code of a function that a thread is in now; None if it has gone on, and is not in it any more."""
    codes: list[CodeType] = list(map(_CODE, _frames(ident)))
    for code in codes:
        if (code.co_filename, code.co_name) == (file, function) and _has_line(code, line):
            return code
    return None


def _described(ident: int, until: dict[str, Any] | None) -> Iterator[tuple[object, str]]:
    """For each frame of a thread: the module in its globals, and its ``repr``."""
    frames, same = tee(_frames(ident))
    inside = takewhile(partial(is_not, until), map(_GLOBALS, same))
    return zip(map(_NAME, inside), map(repr, frames), strict=False)


@lru_cache(maxsize=2048)
def _spot(text: str, module: str) -> Spot:
    """The place of a frame, from its ``repr`` without the address. The same places are read again and again."""
    match = _FRAME.fullmatch(text)
    if match is None:
        return Spot("?", 0, "?", module)
    file, line, function = match.groups()
    return Spot(str(literal_eval(file)) if "\\" in file else file[1:-1], int(line), function, module)


def _frames(ident: int) -> Iterator[Any]:
    """The frames of a thread, one by one along ``f_back``."""
    newest = map(methodcaller("get", ident), _of_all_threads())
    return takewhile(partial(is_not, None), accumulate(chain(newest, repeat("f_back", MAX_FRAMES)), getattr))


def _of_all_threads() -> Iterator[dict[int, Any]]:
    """The newest frame of each thread, in one dictionary.

    It is read at the first ``next``, without a garbage collection: before Python 3.11.9 and 3.12.3 the process hangs
    for ever if one begins in there and frees a ``threading.local`` (gh-106883).
    """
    calls = (gc.disable, sys._current_frames, gc.enable) if gc.isenabled() else (sys._current_frames,)
    return filter(None, chain.from_iterable(map(list, [map(methodcaller("__call__"), calls)])))


@lru_cache(maxsize=2048)
def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to telemetry, and not to the user."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def is_python(file: str) -> bool:
    """Whether a file belongs to Python or to telemetry: neither the user's nor of an installed package."""
    installed = any(part in file for part in _PACKAGES)
    return file.startswith(_PACKAGE + os.sep) or (file.startswith(_LIBRARIES) and not installed)


def in_seams(spot: Spot) -> bool:
    """Whether a place is in a wrapper of ours. The command that runs a script is ours, too, and calls all of it."""
    return spot.file.startswith(_SEAMS)


def in_sampler(stack: Stack) -> bool:
    """Whether the sampler of a DataLoader runs: it draws indices, or begins to."""
    for spot, called in zip(stack, (None, *stack), strict=False):
        if spot.file.endswith(_LOADER):
            begins = called is not None and called.function == "__iter__" and not called.file.endswith(_LOADER)
            if begins or spot.function in {"_next_index", "_reset"}:
                return True
    return False


def is_fetcher(spot: Spot) -> bool:
    """Whether a DataLoader makes a batch in this frame."""
    return spot.function == "fetch" and spot.file.endswith(_FETCHER)


def fetch_part(stack: Stack) -> Stack:
    """The frames of the fetch, the fetcher's own last; empty if the thread is in no fetch."""
    for number in range(len(stack) - 1, -1, -1):
        if is_fetcher(stack[number]):
            return stack[: number + 1]
    return ()


def class_of(spot: Spot) -> str | None:
    """The name of the class whose method a place is in; None if its module has no such class."""
    module = sys.modules.get(spot.module)
    for found in list(vars(module).values()) if type(module) is ModuleType else ():
        if issubclass(type(found), type):
            code = getattr(vars(found).get(spot.function), "__code__", None)
            if code is not None and code.co_filename == spot.file and _has_line(code, spot.line):
                return str(found.__name__)
    return None


def _has_line(code: CodeType, line: int) -> bool:
    return any(line == number for _, _, number in code.co_lines())


def users_spot(stack: Stack) -> Spot | None:
    """The innermost place in the user's own code, if any."""
    return next((spot for spot in stack if not is_library(spot.file)), None)


def line_of(spot: Spot) -> str:
    """A place as ``augment (train.py:41)``. Valid UTF-8, also if the file's name is not: other processes read it."""
    text = f"{spot.function} ({spot.file.rpartition(os.sep)[2]}:{spot.line})"
    return text.encode("utf-8", "backslashreplace").decode()


def stack_text(stack: Stack) -> str:
    """One line for each frame, the innermost first."""
    lines = [f'  File "{at.file[-_MAX_TEXT:]}", line {at.line} in {at.function}\n' for at in stack[:MAX_FRAMES]]
    return "".join((*lines, "  ...\n") if len(stack) > MAX_FRAMES else lines)


@dataclass(frozen=True, slots=True)
class PythonThread:
    """A thread and its stack. ``native``: its id for the kernel; None if Python did not start it."""

    ident: int
    name: str
    native: int | None
    stack: Stack


def python_threads() -> list[PythonThread]:
    """Every thread of this process that runs Python, except our own. Takes no lock."""
    known = listed_threads()
    (idents,) = list(map(list, _of_all_threads()))
    return [
        PythonThread(ident, str(known[ident].name), known[ident].native_id, stack)
        if ident in known
        else PythonThread(ident, "unknown", None, stack)
        for ident in idents
        if named(ident) is None and (stack := stack_of(ident))
    ]
