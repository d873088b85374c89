"""Follows a log file that grows."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from telemetry.log.reader import decoded
from telemetry.safety.files import open_regular

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from telemetry.log.lines import Line

LAST_BYTES: Final = 1 << 16
"""Bytes at the end of a log that are read at first: the windows of about two minutes."""

_FINDINGS_BYTES: Final = 1 << 20
"""Bytes at the end of a log in which the lines of stalls and hangs are read: about half an hour."""

_FINDING: Final = re.compile(rb'"event":"(?:stall_open|stall_lines|stall_close|hang)"')


class LogTail:
    """Follows one log file, through its rotation. Of a large one, only the last part is read, and then what is added.

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

    def read(self) -> list[Line | None]:
        """The whole lines that were added; at first the first line and the last ones. None for a damaged line."""
        return [*map(decoded, self._raw())]

    def _raw(self) -> list[bytes]:
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
        """The first line, the last lines, and between them the lines of stalls and hangs in a part before the end."""
        head = file.readline(LAST_BYTES)
        if not head.endswith(b"\n"):
            return []  # the first line is not whole yet
        size = os.fstat(file.fileno()).st_size
        self._at = max(len(head), size - _FINDINGS_BYTES)
        self.from_start = size - len(head) <= LAST_BYTES
        kept, after = [], size - self._at
        for number, line in enumerate(self._added(file)):
            after -= len(line) + 1
            is_cut = number == 0 and size - len(head) > _FINDINGS_BYTES
            if not is_cut and (after < LAST_BYTES - len(line) or _FINDING.search(line)):
                kept.append(line)
        return [head, *kept]

    def _added(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._at)
        content = file.read()
        end = content.rfind(b"\n") + 1  # a line without its end is still being written
        self._at += end
        return content[:end].splitlines()
