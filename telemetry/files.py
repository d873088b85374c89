"""Files: small ones, read whole in three calls, and descriptors that are kept open.

`open` and its buffers take 1.5 times as long for a file of /proc and twice as long for one in memory, `Path.read_text`
three to five times.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import BinaryIO

_MOST: Final = 8192


def read_small(path: str | os.PathLike[str], most: int = _MOST) -> bytes:
    """The first ``most`` bytes, of what the kernel or another rank hands over in one piece.

    Raises:
        OSError: it is not there, may not be read, or is a symbolic link.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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


def identity_of(number: int) -> tuple[int, int]:
    """What a descriptor is open for: device and inode.

    Raises:
        OSError: it is not open.
    """
    status = os.fstat(number)
    return status.st_dev, status.st_ino
