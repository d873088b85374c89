"""The log: one JSON object a line, one file per life of a process, through structlog.

A file belongs to the process that made it: pids repeat, as after a container's restart or on another node that shares
the folder. Where ``rank-0.7.jsonl`` is there already, the next life writes ``rank-0.7.2.jsonl``.

Each line is one ``write`` to the kernel, so a SIGKILL loses nothing that was logged and a reader sees at most one
torn line. Files are rotated by size and capped in number.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from telemetry.records import Identity

_HEAVY: Final = ("rich", "twisted", "better_exceptions", "colorama")
_MAX_TEXT: Final = 8192
_MOST_LIVES: Final = 10_000
"""So many processes of one rank and pid can log into one folder."""


class _Absent(MetaPathFinder):
    """Packages that are not there, for the thread that made this: another one may be importing them right now."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname.partition(".")[0] in _HEAVY and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _structlog() -> ModuleType:
    """Import structlog without what it would pull into the training process for its console.

    It imports rich and twisted where they are installed (structlog 26.1: dev.py, twisted.py). The copy made here is
    taken out of ``sys.modules`` again, so that a script which uses structlog itself gets a complete one.
    """
    loaded = sys.modules.get("structlog")
    if loaded is not None:
        return loaded
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        import structlog
    finally:
        sys.meta_path.remove(absent)
        for name in [n for n in sys.modules if n == "structlog" or n.startswith("structlog.")]:
            del sys.modules[name]
    return structlog


class LogFile:
    """Appends lines to a file of its own; rotates ``NAME`` to ``NAME.1``, ``NAME.1`` to ``NAME.2`` and so on.

    Args:
        path: the newest file; where another process has made one of that name, a number goes before the ending.
        max_bytes: size at which it is rotated.
        max_files: files kept, the newest included.
        head: makes the line that a file begins with which is not the first.

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

    def look_after(self) -> tuple[str, int] | None:
        """Begin a new file where others have taken this one away, with the line that a rotated one begins with.

        Returns:
            What has happened, in words, and how many lines were lost; None where the file is as it was left.
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
                return None  # it cannot be told
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
        """Go on under another name, with all that has been written.

        Raises:
            OSError: it could not be renamed, and goes on under the name that it has.
        """
        if path == self._wanted:
            return
        self._wanted = path
        if self._made is None:
            self.path = path
            return
        if identity_at(self.path) != self._made:
            return  # removed, or another's: the next file that is made has the new name
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
        """Open the file that was made before; False if it is there no more. A torn line in it is ended."""
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
        for number in range(1, _MOST_LIVES):
            path = self._wanted if number == 1 else self._wanted.with_name(f"{name}.{number}.jsonl")
            try:
                file = opened(path, flags, 0o644)
            except FileExistsError:
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise
                continue
            if path == taken_by_us or not _numbered(path, 1).exists():
                return file, path
            os.close(file)  # its owner is between the two halves of a rotation
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
        self._open()  # there is no file of that name any more: a new one is made, and begins with a head

    def _numbered(self, number: int) -> Path:
        return _numbered(self.path, number)


def identity_at(path: Path) -> tuple[int, int] | None:
    """What identifies the file of a name, as `Descriptor.identity`; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.{number}")


class JsonLog:
    """The log of this process.

    Args:
        folder: ``RUN_DIR/logs``.
        identity: stands in every line.
        timestamp: the time of a line, ISO-8601 in UTC.
        step: the number of steps ended, which stands in every line.
        head: fields of the ``run_start`` that a rotated file begins with, so that each file can be read by itself.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        *,
        timestamp: Callable[[], str],
        step: Callable[[], int],
        head: Callable[[], dict[str, Any]],
        max_bytes: int,
        max_files: int,
    ) -> None:
        structlog = _structlog()
        self._folder = folder
        self.file = LogFile(self._path_of(identity), max_bytes, max_files, self._head_line)
        self._heading = False
        self._timestamp = timestamp
        self._step = step
        self._head = head
        self._logger: Any = structlog.wrap_logger(
            self,
            processors=[self._stamp, _order, structlog.processors.JSONRenderer(serializer=_dumps)],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=True,
            run=identity.run,
            rank=identity.rank,
            local_rank=identity.local_rank,
            node=identity.node,
            pid=identity.pid,
        )

    def adopt(self, identity: Identity) -> None:
        """The rank of this process is another one than was known so far: it stands in the lines from now on.

        Raises:
            OSError: the file could not be renamed after it.
        """
        self._logger = self._logger.bind(rank=identity.rank, local_rank=identity.local_rank)
        self.file.move(self._path_of(identity))

    def _path_of(self, identity: Identity) -> Path:
        return self._folder / f"rank-{identity.rank}.{identity.pid}.jsonl"

    def emit(self, event: str, fields: dict[str, Any]) -> bool:
        """Write one line. Returns whether it is in the file."""
        written: bool = self._logger.msg(event, **fields)
        return written

    def msg(self, line: bytes) -> bytes | bool:
        """Structlog's way out: into the file, or back to `_head_line`, which asked for it."""
        return line + b"\n" if self._heading else self.file.write(line + b"\n")

    def _head_line(self) -> bytes:
        self._heading = True
        try:
            line: bytes = self._logger.msg("run_start", **self._head(), continued=True)
        finally:
            self._heading = False
        return line

    def _stamp(self, logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
        del logger, method
        fields.setdefault("time", self._timestamp())
        fields.setdefault("tid", threading.get_native_id())
        fields.setdefault("step", self._step())
        return fields


_FIRST: Final = ("time", "event", "run", "rank", "local_rank", "node", "pid", "tid", "step")


def _order(logger: Any, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields every line has first, in the order of the contract."""
    del logger, method
    return {name: fields[name] for name in _FIRST} | fields


def _dumps(fields: dict[str, Any], **kwargs: Any) -> bytes:
    del kwargs
    try:
        return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a lone surrogate, or a type orjson does not know: say what can be said
        return orjson.dumps(_plain(fields), option=orjson.OPT_NON_STR_KEYS, default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
