"""Reads what is added to a log file, through its rotation."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from telemetry.safety.files import open_regular

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

LAST_BYTES: Final = 1 << 16
"""Bytes at the end of a log that are read at first: the windows of about two minutes."""

FINDINGS_BYTES: Final = 1 << 20
"""Bytes at the end of a log in which the lines of stalls and hangs are read: about half an hour."""

_FINDING: Final = re.compile(rb'"event":"(?:stall_open|stall_lines|stall_close|hang)"')


class LogTail:
    """Follows one log file. Of a large one, only the last part is read, and then what is added.

    Args:
        path: path of the log; the newest rotated file has ``.1`` at its end.

    Attributes:
        from_start: whether all of the file was read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._at = 0
        self.from_start = False

    def read(self) -> list[bytes]:
        """The whole lines that were added; at first the first line and the last ones. Empty if there is no file."""
        lines: list[bytes] = []
        try:
            status = self._path.stat()
            first = self._inode is None
            if self._inode == status.st_ino and self._at == status.st_size:
                return []
            if not first and self._inode != status.st_ino:
                lines, self._at = self._end_of_rotated(), 0
            file = open_regular(self._path)
            if file is None:  # such as a FIFO or a device
                return lines
            with file:
                self._inode = status.st_ino
                return lines + (self._last(file) if first else self._added(file))
        except OSError:
            return lines

    def _end_of_rotated(self) -> list[bytes]:
        file = open_regular(self._path.with_name(f"{self._path.name}.1"))
        if file is None:
            return []
        with file:
            return self._added(file) if os.fstat(file.fileno()).st_ino == self._inode else []

    def _last(self, file: BinaryIO) -> list[bytes]:
        """The first line, the lines of stalls and hangs in a part before the end, and the last lines."""
        head = file.readline(LAST_BYTES)
        if not head.endswith(b"\n"):
            return []  # the first line is not whole yet
        size, self._at = os.fstat(file.fileno()).st_size, len(head)
        self.from_start = size - self._at <= LAST_BYTES
        if self.from_start:
            return [head, *self._added(file)]
        file.seek(max(len(head), size - FINDINGS_BYTES))
        content = file.read()
        newest = content.find(b"\n", max(0, len(content) - LAST_BYTES)) + 1
        self._at = file.tell() - len(content) + newest
        older = content[:newest]
        found = [at.span() for at in _FINDING.finditer(older)]
        lines = [older[older.rfind(b"\n", 0, begin) + 1 : older.find(b"\n", end)] for begin, end in found]
        return [head, *lines, *self._added(file)]

    def _added(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._at)
        content = file.read()
        end = content.rfind(b"\n") + 1  # a line without its end is still being written
        self._at += end
        return content[:end].splitlines()
