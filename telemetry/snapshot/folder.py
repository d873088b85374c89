"""A folder of this user alone, worked in by descriptor: what is planted in it leads nowhere.

No symbolic link is followed below the folder, and a name is one component or an error: neither ``../`` nor a link
makes a removal or a write land elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from telemetry.files import identity_of, opened, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPEN: Final[dict[int, tuple[int, int]]] = {}
"""What this module has open in this process: device and inode by descriptor. See `close_in_child`."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_MAX_FILE_BYTES: Final = 1 << 20


class Folder:
    """An open folder. `open_folder` and `sub` are the ways to one.

    Attributes:
        path: as it was opened, for messages and for those who open by path.
        fd: its descriptor.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def names(self) -> list[str]:
        """What is in it, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - there is no other by descriptor

    @contextmanager
    def sub(self, name: str, *, make: bool = False) -> Iterator[Folder]:
        """A folder in it.

        Raises:
            OSError: it is not there, is no folder (a link to one is none), or is not this user's alone.
        """
        with _opened(self.path / checked(name), name, self.fd, make=make) as folder:
            yield folder

    def read(self, name: str) -> bytes:
        """A small file of this user's.

        Raises:
            OSError: it cannot be read, is no plain file, another user's, or too large.
        """
        fd = opened(checked(name), os.O_RDONLY | os.O_NONBLOCK, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size > _MAX_FILE_BYTES:
                raise OSError(errno.EPERM, "no small plain file of this user", name)
            return os.read(fd, _MAX_FILE_BYTES)
        finally:
            os.close(fd)

    def create(self, name: str) -> int:
        """Make a new file, open for writing and reading. Returns its descriptor, which `close` closes."""
        return _noted(opened(checked(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=self.fd))

    def reopen(self, name: str) -> int:
        """Open a file that another library has written, for writing and reading. Returns as `create`."""
        return _noted(opened(checked(name), os.O_RDWR, dir_fd=self.fd))

    @staticmethod
    def close(fd: int, *, discard: bool = False) -> None:
        """Close a file; with ``discard`` its content is given up first, even where another process has it open too."""
        try:
            if discard:
                os.ftruncate(fd, 0)
        finally:
            _OPEN.pop(fd, None)
            os.close(fd)

    def write(self, name: str, content: bytes, *, first: bool = False) -> bool:
        """Put a whole file in place; with ``first`` only if there is none yet. Returns whether it is this one."""
        return replace_file(checked(name), content, dir_fd=self.fd, first=first)

    def remove(self, name: str) -> None:
        """Remove a file, a link (not what it points to) or a whole folder. What is not there is no error."""
        try:
            os.unlink(checked(name), dir_fd=self.fd)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            self._remove_folder(name)

    def _remove_folder(self, name: str) -> None:
        fd = opened(name, _DIRECTORY, dir_fd=self.fd)
        try:
            inner = Folder(self.path / name, fd)
            for entry in inner.names():
                inner.remove(entry)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=self.fd)

    def size(self, name: str) -> tuple[int, float]:
        """Bytes of a file, or of all files in a folder, and when it was last changed (Unix time)."""
        status = os.stat(checked(name), dir_fd=self.fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size, status.st_mtime
        fd = opened(name, _DIRECTORY, dir_fd=self.fd)
        try:
            inner = Folder(self.path / name, fd)
            return sum(inner.size(entry)[0] for entry in inner.names()), status.st_mtime
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make what was renamed into it last."""
        os.fsync(self.fd)


@contextmanager
def open_folder(path: Path, *, make: bool = False) -> Iterator[Folder]:
    """Open a folder of this user alone.

    Args:
        path: of the folder; what leads to it may be anything.
        make: make it (mode 0700) where it is not there; what leads to it is made too.

    Raises:
        OSError: it is not there, is no folder (a link to one is none), or is not this user's alone.
    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, str(path), None, make=make) as folder:
        yield folder


@contextmanager
def _opened(path: Path, name: str, dir_fd: int | None, *, make: bool) -> Iterator[Folder]:
    if make:
        try:
            os.mkdir(name, 0o700, dir_fd=dir_fd)
        except FileExistsError:
            pass
    fd = _noted(opened(name, _DIRECTORY, dir_fd=dir_fd))
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, "not a folder of this user alone (mode 0700)", str(path))
        yield Folder(path, fd)
    finally:
        Folder.close(fd)


def close_in_child() -> None:
    """Close a forked child's copies: they would keep the disk space of what its parent removes. Takes no lock."""
    for fd, identity in list(_OPEN.items()):
        _OPEN.pop(fd)
        try:
            if identity_of(fd) == identity:  # the number may be another's by now
                os.close(fd)
        except OSError:
            continue


def _noted(fd: int) -> int:
    _OPEN[fd] = identity_of(fd)
    return fd


def checked(name: str) -> str:
    """A name that is one component of a path.

    Raises:
        OSError: it is not.
    """
    if not name or name in {".", ".."} or "/" in name or "\0" in name or len(name) > 255:
        raise OSError(errno.EINVAL, "not the name of a file", name)
    return name
