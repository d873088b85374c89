"""Follows one log file: of a large one it reads only the last part, and then what is added."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from telemetry.util.files import open_regular

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

FIRST_BYTES: Final = 1 << 16
"""Of the end of a file, read at first: the windows of about two minutes."""

MAX_BYTES: Final = 1 << 20
"""Read at once. Where more was added, the older part is left out."""

BACK_BYTES: Final = 1 << 21
"""Searched backwards for an older line."""

_FINDING: Final = re.compile(rb'"event": ?"(stall_open|stall_lines|stall_close|hang)"')


class LogTail:
    """One file.

    Args:
        path: of the log; the file that was rotated away last has ``.1`` at its end.

    Attributes:
        from_start: whether all of the file was read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rotated = path.with_name(f"{path.name}.1")
        self._inode: int | None = None
        self._at = 0
        self._tail_begins = 0
        self.from_start = False

    def read(self) -> list[bytes]:
        """The whole lines that were added; at first the first line and the last ones. Empty if there is no file."""
        try:
            status = self._path.stat()
            if self._inode == status.st_ino and self._at == status.st_size:
                return []
            lines: list[bytes] = []
            if self._inode is not None and status.st_ino != self._inode:
                lines = self._rest_of_rotated()
                self._at = 0
            first, self._inode = self._inode is None, status.st_ino
            file = open_regular(self._path)
        except OSError:
            return []
        if file is None:  # a FIFO, a device
            return []
        with file:
            return lines + (self._first(file) if first else self._added(file))

    def older_findings(self) -> list[bytes]:
        """Lines of stalls and hangs from before the part that was read first: from the newest opened stall on."""
        found: list[bytes] = []
        try:
            file = open_regular(self._path)
            if file is None:
                return []
            with file:
                begin = max(0, self._tail_begins - BACK_BYTES)
                file.seek(begin)
                content = file.read(self._tail_begins - begin)
        except OSError:
            return []
        for match in reversed(list(_FINDING.finditer(content))):
            start, end = content.rfind(b"\n", 0, match.start()) + 1, content.find(b"\n", match.end())
            found.append(content[start : end if end >= 0 else len(content)])
            if match[1] == b"stall_open":
                break
        return found[::-1]

    def _first(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        head = file.readline(FIRST_BYTES)
        if not head.endswith(b"\n"):
            return []  # the first line is not whole yet
        self._at = len(head)
        if size - self._at <= FIRST_BYTES:
            self.from_start = True
            return [head, *self._added(file)]
        self._at = size - FIRST_BYTES
        file.seek(self._at)
        self._at += len(file.readline(FIRST_BYTES))  # the rest of a line
        self._tail_begins = self._at
        return [head, *self._added(file)]

    def _added(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._at:
            self._at = 0  # it was cut
        skipped = size - self._at > MAX_BYTES
        if skipped:
            self._at = size - MAX_BYTES
        file.seek(self._at)
        content = file.read(size - self._at)
        end = content.rfind(b"\n") + 1  # a line without its end is still being written
        self._at += end
        lines = content[:end].splitlines()
        return lines[1:] if skipped else lines

    def _rest_of_rotated(self) -> list[bytes]:
        try:
            file = open_regular(self._rotated)
        except OSError:
            return []
        if file is None:
            return []
        with file:
            return self._added(file) if os.fstat(file.fileno()).st_ino == self._inode else []
