"""How the lines of the log reach the disk: as JSON, in a file that is rotated, and begun anew if others remove it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.safety.files import Descriptor, opened
from telemetry.safety.imports import private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_PROCESSES: Final = 10_000
"""So many processes with the same rank and pid can log into one folder."""


class LogFile:
    """Appends lines to its own file, and rotates ``NAME`` to ``NAME.1``, ``NAME.1`` to ``NAME.2`` and so on.

    Args:
        path: the newest file. If another process has made that name, this one puts a number before the ending.
        max_bytes: the file is rotated at this size.
        max_files: how many files are kept, including the newest.
        head: makes the first line of each later file.

    Attributes:
        path: the newest file.
        dropped: lines that could not be written, or that others have deleted.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int, head: Callable[[], bytes]) -> None:
        self.path = self._wanted = path
        self._made: tuple[int, int] | None = None  # the identity of the file that this object has made
        self._head = head
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: Descriptor | None = None
        self._size = 0
        self._lines = 0
        self.dropped = 0
        self.last_error: OSError | None = None

    def write(self, line: bytes) -> bool:
        """Append a line. Returns whether the file has it; keeps an error instead of raising it."""
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
        if written < len(line):  # the disk is full. _open ends the torn line, so that the next one is whole
            raise OSError(errno.ENOSPC, "only a part of the line was written")

    def replace_if_removed(self) -> tuple[str, int] | None:
        """Begin a new file, with a head, if another process has removed or emptied this one.

        Returns:
            What happened, in words, and how many lines were lost; None if nothing happened.
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
        self.forget()
        try:
            self._open()
            if not moved:  # otherwise _open has written the head
                self._lines = 0
                self._append(self._head())
        except OSError as error:
            self.last_error = error
            self.forget()
        what = "emptied" if not moved else "renamed" if links else "deleted"
        return f"the log file was {what} by others: a new one begins", lost

    def forget(self) -> None:
        """Close the file. The next line opens it again, except in a forked child, which writes none."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def move(self, path: Path) -> None:
        """Rename the file and its rotated parts.

        Raises:
            OSError: the file keeps its name, because it could not be renamed.
        """
        if path == self._wanted:
            return
        self._wanted = path
        if self._made is None:
            self.path = path
            return
        if _identity_at(self.path) != self._made:
            return  # removed or replaced: the next file gets the new name
        parts = [number for number in range(self._max_files) if _numbered(self.path, number).exists()]
        reserved, new = self._reserve(taken_by_us=None)
        os.close(reserved)
        try:
            for number in parts:
                _numbered(self.path, number).replace(_numbered(new, number))
        finally:
            if _identity_at(new) == self._made:
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
        """Open the file again and end a torn line in it. Returns False if the file is gone."""
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
        """Make a file under the first free name. Returns its descriptor and path.

        Args:
            taken_by_us: the name whose rotated files are our own.
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
            os.close(file)  # its owner is rotating right now
            path.unlink()
        raise FileExistsError(errno.EEXIST, "too many processes have logged under this name", str(self._wanted))

    def _rotate(self) -> None:
        self.forget()
        for number in range(self._max_files - 1, 0, -1):
            newer = _numbered(self.path, number - 1)
            if newer.exists():
                newer.replace(_numbered(self.path, number))
        if self._max_files == 1:
            self.path.unlink(missing_ok=True)
        self._open()  # no file has that name now, so this makes one with a head


def _identity_at(path: Path) -> tuple[int, int] | None:
    """The identity of the file at a path, as `Descriptor.identity` has it; None without a file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


# -- records as JSON, by structlog -------------------------------------------------------------------------------------

_FIRST: Final = ("time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step")
_MAX_TEXT: Final = 8192

_structlog: Final = private("structlog", without=("rich", "twisted", "better_exceptions", "colorama"))
"""Without the packages that it imports for its console, if they are installed (structlog 26.1: dev.py, twisted.py)."""


def json_logger() -> Any:
    """Make a logger of structlog. Its ``msg`` takes an event and fields, and returns them as JSON."""
    return _structlog.wrap_logger(
        _structlog.ReturnLogger(),
        processors=[_order, _structlog.processors.JSONRenderer(serializer=_dumps)],
        wrapper_class=_structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def _order(logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields that every line has first, in the order of the contract."""
    del logger, method
    return {name: fields[name] for name in _FIRST} | fields


def _dumps(fields: dict[str, Any], **kwargs: Any) -> bytes:
    del kwargs
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError):  # a lone surrogate, or a type that JSON does not have: write what can be written
        return msgspec.json.encode(_plain(fields), enc_hook=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
