"""A part of the shared block into which a worker writes, and from which the agent reads: its profile, or its stacks.

It has two halves. The worker writes into the half that is not in use, and then the head, which names that half from
then on. If the head has changed while the agent read, the agent drops what it has read and reads again a second later.
The kernel gives memory for these pages only when they are written. They outlive the worker.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mmap import mmap

AREA_BYTES: Final = 1 << 16
"""Size of an area: 64 KiB per worker."""

_HEAD: Final = struct.Struct("=5q")
_VERSION: Final = struct.Struct("=q")
_HEAD_BYTES: Final = 64
HALF_BYTES: Final = (AREA_BYTES - _HEAD_BYTES) // 2
"""Maximum size of the content."""


class SampledFetches(NamedTuple):
    """What a worker has written.

    Attributes:
        session: the stamp of the request. A later stall is another session.
        pid: the worker's pid. ``began_ns``: when its sampling began.
        content: the profile of the session so far, see `StackProfile.packed`; or the stacks, as text.
    """

    session: int
    pid: int
    began_ns: int
    content: bytes


class SampleArea:
    """The area of one worker.

    Args:
        memory: the shared block.
        start: offset of the area.
    """

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    def write(self, session: int, pid: int, began_ns: int, content: bytes) -> None:
        """Replace the content. Used by one worker at a time."""
        content = content[:HALF_BYTES]
        (version,) = _VERSION.unpack_from(self._memory, self._start)
        at = self._half(version + 1)
        self._memory[at : at + len(content)] = content
        _HEAD.pack_into(self._memory, self._start, version + 1, session, pid, began_ns, len(content))

    def read(self) -> SampledFetches | None:
        """The newest content; None before the first, or if it changed meanwhile."""
        head = self._memory[self._start : self._start + _HEAD.size]
        version, session, pid, began, length = _HEAD.unpack(head)
        if not version or not 0 < length <= HALF_BYTES:
            return None
        at = self._half(version)
        content = self._memory[at : at + length]
        if self._memory[self._start : self._start + _HEAD.size] != head:
            return None
        return SampledFetches(session, pid, began, content)

    def _half(self, version: int) -> int:
        return self._start + _HEAD_BYTES + (version % 2) * HALF_BYTES
