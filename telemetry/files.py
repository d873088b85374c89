"""Files: small ones, read or replaced whole, and descriptors that are kept open.

`open` and its buffers take 1.5 times as long for a file of /proc and twice as long for one in memory, `Path.read_text`
three to five times.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import BinaryIO

_MOST: Final = 8192
_LOWEST: Final = 3
"""Lower numbers are stdin, stdout and stderr."""

_MOST_NAME: Final = 120  # of 255 that a file system allows: the rest is for what makes a temporary name unique


def raised(number: int) -> int:
    """A descriptor that was just opened, moved above those of stdin, stdout and stderr.

    Where one of these is closed, the kernel gives its number to whatever is opened next, and what the script prints
    would end up in a file of ours.

    Raises:
        OSError: no descriptor is left; the one given is closed.
    """
    if number >= _LOWEST:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
    finally:
        os.close(number)


def raised_socket(opened: socket.socket) -> socket.socket:
    """The same for a socket."""
    if opened.fileno() >= _LOWEST:
        return opened
    timeout = opened.gettimeout()
    moved = socket.socket(opened.family, opened.type, opened.proto, fileno=raised(opened.detach()))
    moved.settimeout(timeout)
    return moved


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """`os.open`, never through a symbolic link, closed on exec, and never as stdin, stdout or stderr.

    Raises:
        OSError: as `os.open`.
    """
    return raised(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd))


def memory_file(name: str) -> int:
    """A new anonymous file in memory.

    Raises:
        OSError: the kernel gives none.
    """
    return raised(os.memfd_create(name, os.MFD_CLOEXEC))


def read_small(path: str | os.PathLike[str], most: int = _MOST) -> bytes:
    """The first ``most`` bytes, of what the kernel or another rank hands over in one piece.

    Raises:
        OSError: it is not there, may not be read, or is a symbolic link.
    """
    file = opened(path, os.O_RDONLY)
    try:
        return os.read(file, most)
    finally:
        os.close(file)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO | None:
    """Open a regular file for reading, without ever waiting for it. None for a FIFO, a device or a folder.

    Raises:
        OSError: it is not there, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def temporary_name(name: str) -> str:
    """A name beside a file, to write it under before it is put in place: no process of any node takes the same.

    It begins with a dot and ends with ``.tmp``. A pid alone would not do: on a folder that several nodes share, two
    processes may have the same.
    """
    node = re.sub(r"[^A-Za-z0-9-]", "-", os.uname().nodename)[:40]
    return f".{name[:_MOST_NAME]}.{node}.{os.getpid()}.{os.urandom(6).hex()}.tmp"


def replace_file(
    path: str | os.PathLike[str], content: bytes, mode: int = 0o600, *, dir_fd: int | None = None, first: bool = False
) -> bool:
    """Put a whole file in place, or leave what is there: no reader ever sees half of it.

    Args:
        path: of the file.
        content: all of it.
        mode: of the file, whatever the umask.
        dir_fd: the folder that a relative path is in.
        first: only if there is none yet.

    Returns:
        Whether the file is now this one; False only with ``first``.

    Raises:
        OSError: it cannot be written, or there is no room for all of it.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, temporary_name(name))  # noqa: PTH118 - at every publication
    file = opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd)
    placed = False
    try:
        try:
            if os.write(file, content) < len(content):
                raise OSError(errno.ENOSPC, "no room for all of it", os.fspath(path))
            if mode != 0o600:
                os.fchmod(file, mode)
        finally:
            os.close(file)
        if first:
            try:
                os.link(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            except FileExistsError:
                return False
            return True
        os.rename(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        placed = True
        return True
    finally:
        if not placed:
            remove_file(temporary, dir_fd=dir_fd)


def remove_file(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Remove a file if that is possible."""
    try:
        os.unlink(path, dir_fd=dir_fd)
    except OSError:
        pass


class Descriptor:
    """A descriptor that is kept open, and closed when it is no more needed.

    Others of the process may close all descriptors, as a daemon does. The number is then that of whatever is opened
    next, perhaps a checkpoint: nothing of ours may be written to it, and it is not for us to close.

    Args:
        number: as `os.open` returned it.

    Attributes:
        identity: of the file, see `identity_of`.

    Raises:
        OSError: it is not open.
    """

    __slots__ = ("identity", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.identity = identity_of(number)

    def is_ours(self) -> bool:
        """Whether it is still open for what it was opened for."""
        try:
            return identity_of(self.number) == self.identity
        except OSError:
            return False

    def close(self) -> None:
        """Close it, unless it is another's by now."""
        if self.is_ours():
            os.close(self.number)


class StandardStreams:
    """Keeps the numbers of stdin, stdout and stderr from whatever is opened in this process, where they are closed.

    `raised` moves what we keep open, but for a moment the number is taken, and libraries open files on our threads
    that we cannot move. A descriptor for nothing but a path (``O_PATH``) keeps the number, and reading and writing
    fail with EBADF as they do on a closed one. It is closed on exec: a subprocess finds what it would find without us.
    Only what is closed at the start is kept: a script that closes one of them later means to give the number away.
    """

    def __init__(self) -> None:
        self._kept: list[Descriptor] = []

    def keep(self) -> None:
        """Take the numbers that are free now.

        Raises:
            OSError: no descriptor is left.
        """
        if all(_is_open(number) for number in range(_LOWEST)):
            return
        while True:
            number = os.open("/", os.O_PATH | os.O_CLOEXEC)
            if number >= _LOWEST:
                os.close(number)
                return
            self._kept.append(Descriptor(number))

    def release(self) -> None:
        """Give them back; also in a forked child, whose copies they are."""
        kept, self._kept = self._kept, []
        for each in kept:
            each.close()


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def identity_of(number: int) -> tuple[int, int]:
    """What a descriptor is open for: device and inode.

    Raises:
        OSError: it is not open.
    """
    status = os.fstat(number)
    return status.st_dev, status.st_ino
