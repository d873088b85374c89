"""Where a thread or a worker stands that does not go on, as a few fields that can be compared between ranks."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.util.stacks import is_library, users_spot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.util.stacks import Stack

_DISTRIBUTED: Final = f"{os.sep}torch{os.sep}distributed{os.sep}"
_NO_WAITING: Final = tuple(f"{_DISTRIBUTED}{part}{os.sep}" for part in ("checkpoint", "elastic", "rpc"))
_DDP: Final = f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py"
_BACKWARD: Final = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
_WRAPPERS: Final = frozenset({"wrapper", "inner", "_fn", "<lambda>"})

_WORKER: Final = re.compile(r"worker \d+ \(pid \d+, in a fetch for [0-9.]+ s(?:, ([^)]*))?\)")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StuckPlace:
    """The innermost line of the user's own code (``data.py:88``), the function called there, and the thread's state."""

    where: str | None
    call: str | None
    state: str = ""


def place_of(stack: Stack) -> StuckPlace:
    """Where a thread of this process stands."""
    own = users_spot(stack)
    if own is None:
        return StuckPlace(None, stack[0].function if stack else None)
    return StuckPlace(f"{os.path.basename(own.file)}:{own.line}", stack[0].function)  # noqa: PTH119 - text


def collective_in(stack: Stack) -> str | None:
    """The name of the collective that a thread is in, by its innermost frames; empty for a backward pass or DDP.

    None where it is in neither. A backward pass may also compute.
    """
    file = stack[0].file if stack else ""
    if file.endswith((_BACKWARD, _DDP)):
        return ""
    if _DISTRIBUTED not in file or any(part in file for part in _NO_WAITING):
        return None
    inner = [spot for spot in stack if _DISTRIBUTED in spot.file]
    return next((spot.function for spot in inner if spot.function not in _WRAPPERS), "")


def in_backward(stack: Stack) -> bool:
    """Whether the innermost frame is the backward pass, which may wait for other ranks or compute."""
    return bool(stack) and stack[0].file.endswith(_BACKWARD)


def fetch_in(texts: Sequence[str]) -> StuckPlace | None:
    """Where the worker stands that has been in a fetch for longest, by the stacks of a stuck run; None without one."""
    for text in texts:
        heading, _, frames = text.partition("\n")
        worker = _WORKER.search(heading)
        if worker is None:
            continue
        found = _FRAME.findall(frames)
        own = next(((file, line) for file, line, _ in found if not is_library(file)), None)
        if own is not None:
            where = f"{os.path.basename(own[0])}:{own[1]}"  # noqa: PTH119 - text
            return StuckPlace(where, found[0][2], worker.group(1) or "")
        return StuckPlace(None, found[0][2] if found else None, worker.group(1) or "")
    return None


def stack_hash(stack: Stack) -> str:
    """The same on all ranks that are at the same place of the same code."""
    text = "\n".join(f"{os.path.basename(s.file)}:{s.line}:{s.function}" for s in stack)  # noqa: PTH119 - text
    return f"{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"
