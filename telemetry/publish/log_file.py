"""The file of the log: one for each process, rotated by size and capped in number.

A file belongs to the process that made it: pids repeat, for example after a container's restart or on another node that
shares the folder. Where ``rank-0.7.jsonl`` already exists, the next process writes ``rank-0.7.2.jsonl``.

Each line is one ``write`` to the kernel, so a SIGKILL loses nothing that was logged and a reader sees at most one
torn line.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from telemetry.util.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_PROCESSES: Final = 10_000
"""Maximum number of processes with the same rank and pid that can log into one folder."""


class LogFile:
    """Appends lines to a file of its own; rotates ``NAME`` to ``NAME.1``, ``NAME.1`` to ``NAME.2`` and so on.

    Args:
        path: the newest file; where another process has made one of that name, a number goes before the ending.
        max_bytes: size at which it is rotated.
        max_files: files kept, the newest included.
        head: makes the first line of each file after the first.

    Attributes:
        path: the newest file.
        dropped: lines that could not be written, or were deleted by others.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int, head: Callable[[], bytes]) -> None:
        self.path = self._wanted = path
        self._made: tuple[int, int] | None = None  # what identifies the file that this one has made
        self._head = head
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: Descriptor | None = None
        self._size = 0
        self._lines = 0
        self.dropped = 0
        self.last_error: OSError | None = None

    def write(self, line: bytes) -> bool:
        """Append one line. Returns whether it is in the file; an error is kept, not raised."""
        try:
            if self._file is None or not self._file.is_ours():
                self._open()
            elif self._size + len(line) > self._max_bytes and self._size:
                self._rotate()
            self._append(line)
        except OSError as error:
            self.dropped += 1
            self.last_error = error
            self.forget()
            return False
        return True

    def _append(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101 - _open has raised otherwise
        written = os.write(self._file.number, line)
        self._size += written
        self._lines += 1
        if written < len(line):  # the disk is full; _open ends the torn line, so that the next one is whole
            raise OSError(errno.ENOSPC, "only a part of the line was written")

    def replace_if_removed(self) -> tuple[str, int] | None:
        """Begin a new file, with a head, if another process has removed or emptied this one.

        Returns:
            What happened, in words, and how many lines were lost; None if the file is unchanged.
        """
        if self._file is None or not self._file.is_ours():
            return None  # the next line opens it again
        size = links = 0
        try:
            status = os.fstat(self._file.number)
            size, links = status.st_size, status.st_nlink
            there = self.path.lstat()
            moved = (there.st_dev, there.st_ino) != self._file.identity
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
                return None  # the state of the file is unknown
            moved = True
        if not moved and size >= self._size:
            return None
        lost = self._lines if moved and not links else 0
        self.dropped += lost
        what = "emptied" if not moved else "renamed" if links else "deleted"
        self.forget()
        try:
            self._open()
            if not moved:  # a new file has begun with it
                self._lines = 0
                self._append(self._head())
        except OSError as error:
            self.last_error = error
            self.forget()
        return f"the log file was {what} by others: a new one begins", lost

    def forget(self) -> None:
        """Close the file; the next line opens it again. In a forked child, whose copy it is, there is no next line."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass

    def move(self, path: Path) -> None:
        """Rename the file, with its rotated parts.

        Raises:
            OSError: the file could not be renamed. It keeps its name.
        """
        if path == self._wanted:
            return
        self._wanted = path
        if self._made is None:
            self.path = path
            return
        if identity_at(self.path) != self._made:
            return  # removed or replaced: the next file gets the new name
        parts = [number for number in range(self._max_files) if self._numbered(number).exists()]
        reserved, new = self._reserve(taken_by_us=None)
        os.close(reserved)
        try:
            for number in parts:
                self._numbered(number).replace(_numbered(new, number))
        finally:
            if identity_at(new) == self._made:
                self.path = new

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._made is None or not self._reopen():
            lost = self._made is not None
            file, self.path = self._reserve(taken_by_us=self.path if lost else None)
            self._file, self._size, self._lines = Descriptor(file), 0, 0
            self._made = self._file.identity
            if lost:
                self._append(self._head())

    def _reopen(self) -> bool:
        """Open the file that was made before and end a torn line in it. Returns False if the file no longer exists."""
        try:
            file = opened(self.path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        self._file = Descriptor(file)
        if self._file.identity != self._made:
            self.forget()
            return False
        self._size = os.fstat(file).st_size
        if self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._size += os.write(file, b"\n")
        return True

    def _reserve(self, taken_by_us: Path | None) -> tuple[int, Path]:
        """Make a file under the first free name. Returns its descriptor and its name.

        Args:
            taken_by_us: the name whose rotated files are this one's own.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        name = self._wanted.name.removesuffix(".jsonl")
        for number in range(1, _MAX_PROCESSES):
            path = self._wanted if number == 1 else self._wanted.with_name(f"{name}.{number}.jsonl")
            try:
                file = opened(path, flags, 0o644)
            except FileExistsError:
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise
                continue
            if path == taken_by_us or not _numbered(path, 1).exists():
                return file, path
            os.close(file)  # its owner is in the middle of a rotation
            path.unlink()
        raise FileExistsError(errno.EEXIST, "too many processes have logged under this name", str(self._wanted))

    def _rotate(self) -> None:
        self.forget()
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number)
            if number == self._max_files - 1:
                older.unlink(missing_ok=True)
            newer = self._numbered(number - 1)
            if newer.exists():
                newer.replace(older)
        if self._max_files == 1:
            self.path.unlink(missing_ok=True)
        self._open()  # no file has that name now: a new one is made and begins with a head

    def _numbered(self, number: int) -> Path:
        return _numbered(self.path, number)


def identity_at(path: Path) -> tuple[int, int] | None:
    """What identifies the file at a path, as `Descriptor.identity`; None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")
