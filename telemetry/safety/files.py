"""Reads and replaces small files as a whole, and keeps descriptors open."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import BinaryIO


# The functions here use descriptors directly because that is faster. The built-in `open` takes 1.5 times as long for a
# file of /proc and twice as long for one in memory. `Path.read_text` takes three to five times as long.

MOUNTS: Final = Path("/proc/self/mountinfo")

_CACHING: Final = ("nfs", "cifs", "smb", "9p", "fuse")
"""Prefixes of the names of file systems that may show an outdated state of a folder."""

_MAX_BYTES: Final = 8192
_AT_ONCE: Final = 1 << 16
"""Python allocates what a read may return. A larger block is mapped anew each time, which takes 15 us."""
LOWEST: Final = 3
"""Lower numbers are stdin, stdout and stderr."""

_MAX_NAME: Final = 120  # of the 255 that a file system allows; the rest makes a temporary name unique


def file_system_of(path: Path) -> str | None:
    """The type of a path's file system, such as ``ext4``, if known.

    Raises:
        OSError: the path does not exist.
    """
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == number and "-" in fields:
            return fields[fields.index("-") + 1]
    return None


def caches_folders(path: Path) -> bool:
    """Whether a folder is on a file system whose state another node may see up to a minute late."""
    try:
        return (file_system_of(path) or "").startswith(_CACHING)
    except OSError:
        return False


def raised(number: int) -> int:
    """Move a descriptor that was just opened above those of stdin, stdout and stderr.

    If one of these is closed, the kernel gives its number to the next file that is opened. The script's output would
    then go into a file of the agent.

    Raises:
        OSError: no descriptor is left. The given one is closed.
    """
    if number >= LOWEST:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    finally:
        os.close(number)


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Call `os.open`: never through a symbolic link, closed on exec, and never as stdin, stdout or stderr.

    Raises:
        OSError: as `os.open`.
    """
    return raised(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd))


def read_small(path: str | os.PathLike[str], most: int = _MAX_BYTES) -> bytes:
    """Read the first ``most`` bytes of a file that one ``read`` returns whole: from the kernel or from another rank.

    It does not wait for a FIFO under that name, which has no content or cannot be read.

    Raises:
        OSError: the file does not exist, may not be read, or is a symbolic link.
    """
    file = opened(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content = os.read(file, min(most, _AT_ONCE))
        return content if len(content) < _AT_ONCE else content + os.read(file, most - _AT_ONCE)
    finally:
        os.close(file)


def open_regular(path: str | os.PathLike[str], *, buffer_bytes: int = -1) -> BinaryIO | None:
    """Open a regular file for reading. Returns None for a FIFO, a device or a folder, and never blocks on one.

    Raises:
        OSError: the file does not exist, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb", buffering=buffer_bytes)


def temporary_name(name: str) -> str:
    """A unique name for writing a file before it is renamed to its final name.

    It begins with a dot and ends with ``.tmp``. The pid alone is not unique: in a folder that several nodes share, two
    processes may have the same pid.
    """
    node = re.sub(r"[^A-Za-z0-9-]", "-", os.uname().nodename)[:40]
    return f".{name[:_MAX_NAME]}.{node}.{os.getpid()}.{os.urandom(6).hex()}.tmp"


def replace_file(
    path: str | os.PathLike[str],
    content: bytes,
    mode: int = 0o600,
    *,
    for_everyone: bool = False,
    dir_fd: int | None = None,
    first: bool = False,
) -> bool:
    """Replace a file atomically. No reader sees a partly written file.

    Args:
        path: path of the file.
        content: the whole content.
        mode: mode of the file, before the umask.
        for_everyone: whether everyone may read it despite the umask, because another user's program needs it.
        dir_fd: the folder of a relative path.
        first: write only if the file does not exist yet. The result is False if it was not written.

    Raises:
        OSError: the file cannot be written, or there is not enough space.
    """
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, temporary_name(name))  # noqa: PTH118 - at every publication
    file = opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=dir_fd)
    placed = False
    try:
        try:
            if os.write(file, content) < len(content):
                raise OSError(errno.ENOSPC, "no room for all of it", os.fspath(path))
            if for_everyone:
                os.fchmod(file, 0o644)
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
    """A descriptor that stays open until `close`.

    Other code in the process may close all descriptors, as a daemon does. The number then belongs to the next file
    that is opened, perhaps a checkpoint. The agent must neither write to that file nor close it.

    Args:
        number: what `os.open` returned.

    Attributes:
        identity: identity of the file, see `identity_of`.

    Raises:
        OSError: the descriptor is not open.
    """

    __slots__ = ("identity", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.identity = identity_of(number)

    def is_ours(self) -> bool:
        """Whether the descriptor still refers to the file that it was opened for."""
        try:
            return identity_of(self.number) == self.identity
        except OSError:
            return False

    def is_in_place(self) -> bool:
        """Whether it `is_ours`, and the file still has a name: neither it nor its folder was deleted."""
        try:
            status = os.fstat(self.number)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity and status.st_nlink > 0

    def close(self) -> None:
        """Close the descriptor, unless its number belongs to another file by now."""
        if self.is_ours():
            os.close(self.number)


class StandardStreams:
    """Reserves the numbers of stdin, stdout and stderr if they are closed, so that no other file gets them.

    `raised` moves the agent's own files, but only after they have had the number for a moment. Files that libraries
    open on the agent's threads cannot be moved at all. So an ``O_PATH`` descriptor occupies the number: reading and
    writing fail with EBADF, as on a closed descriptor. It is closed on exec, so a subprocess sees no difference.
    Only numbers that are closed at the start are reserved. A script that closes one later does so on purpose.
    """

    def __init__(self) -> None:
        self._kept: list[Descriptor] = []

    def keep(self) -> None:
        """Reserve those of the three numbers that are free now.

        Raises:
            OSError: no descriptor is left.
        """
        if all(_is_open(number) for number in range(LOWEST)):
            return
        while True:
            number = os.open("/", os.O_PATH | os.O_CLOEXEC)
            if number >= LOWEST:
                os.close(number)
                return
            self._kept.append(Descriptor(number))

    def release(self) -> None:
        """Close the reserved numbers. A forked child calls this too, for its copies."""
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
    """Device and inode of the file that a descriptor refers to.

    Raises:
        OSError: the descriptor is not open.
    """
    status = os.fstat(number)
    return status.st_dev, status.st_ino
