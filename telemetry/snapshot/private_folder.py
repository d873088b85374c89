"""A folder that belongs to this user alone. All work in it goes through its descriptor, so planted links are harmless.

No symbolic link is followed below the folder, and a name must be one component of a path. So neither ``../`` nor a link
can redirect a write or a removal.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from telemetry.util.files import identity_of, opened, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OPEN: Final[dict[int, tuple[int, int]]] = {}
"""The descriptors that this module has open, each with device and inode. See `close_in_child`."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_MAX_FILE_BYTES: Final = 1 << 20


class Folder:
    """An open folder, made by `open_folder` or `sub`.

    Attributes:
        path: the path by which it was opened, for messages and for libraries that need a path.
        fd: its descriptor.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def names(self) -> list[str]:
        """The names of its entries, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - pathlib cannot list a descriptor

    @contextmanager
    def sub(self, name: str, *, make: bool = False) -> Iterator[Folder]:
        """The context in which a folder inside this one is open.

        Raises:
            OSError: it does not exist, is not a folder (nor is a link to one), or does not belong to this user alone.
        """
        with _opened(self.path / checked(name), name, self.fd, make=make) as folder:
            yield folder

    def read(self, name: str) -> bytes:
        """The content of a small file.

        Raises:
            OSError: it cannot be read, is not a regular file, belongs to another user, or is larger than 1 MiB.
        """
        fd = opened(checked(name), os.O_RDONLY | os.O_NONBLOCK, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size > _MAX_FILE_BYTES:
                raise OSError(errno.EPERM, "not a small regular file of this user", name)
            return os.read(fd, _MAX_FILE_BYTES)
        finally:
            os.close(fd)

    def create(self, name: str) -> int:
        """Make a new file and open it for reading and writing. Returns its descriptor; `close` closes it."""
        return _registered(opened(checked(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=self.fd))

    def reopen(self, name: str) -> int:
        """Open a file that a library has written, for reading and writing. Returns as `create`."""
        return _registered(opened(checked(name), os.O_RDWR, dir_fd=self.fd))

    @staticmethod
    def close(fd: int, *, discard: bool = False) -> None:
        """Close a file. ``discard`` truncates it first, which frees its space even if another process has it open."""
        try:
            if discard:
                os.ftruncate(fd, 0)
        finally:
            _OPEN.pop(fd, None)
            os.close(fd)

    def write(self, name: str, content: bytes, *, first: bool = False) -> bool:
        """Replace a file as a whole; with ``first`` only if it does not exist. Returns whether it was written."""
        return replace_file(checked(name), content, dir_fd=self.fd, first=first)

    def remove(self, name: str) -> None:
        """Remove a file, a link (not its target) or a whole folder. It is no error if it does not exist."""
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
        """Bytes of a file, or of all files in a folder, and its modification time (Unix time)."""
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
        """Sync the folder, so that a file that was renamed into it survives a crash of the machine."""
        os.fsync(self.fd)


@contextmanager
def open_folder(path: Path, *, make: bool = False) -> Iterator[Folder]:
    """The context in which a folder of this user alone is open.

    Args:
        path: the folder. Links are allowed in what leads to it.
        make: whether to make it (mode 0700) and its parents if it does not exist.

    Raises:
        OSError: it does not exist, is not a folder (nor is a link to one), or does not belong to this user alone.
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
    fd = _registered(opened(name, _DIRECTORY, dir_fd=dir_fd))
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, "not a folder of this user alone (mode 0700)", str(path))
        yield Folder(path, fd)
    finally:
        Folder.close(fd)


def close_in_child() -> None:
    """Close a forked child's copies. Otherwise files that the parent removes would keep their space. Takes no lock."""
    for fd, identity in list(_OPEN.items()):
        _OPEN.pop(fd)
        try:
            if identity_of(fd) == identity:  # the number may belong to another file by now
                os.close(fd)
        except OSError:
            continue


def _registered(fd: int) -> int:
    _OPEN[fd] = identity_of(fd)
    return fd


def checked(name: str) -> str:
    """The name, if it is one component of a path.

    Raises:
        OSError: it is not.
    """
    if not name or name in {".", ".."} or "/" in name or "\0" in name or len(name) > 255:
        raise OSError(errno.EINVAL, "not the name of a file", name)
    return name
