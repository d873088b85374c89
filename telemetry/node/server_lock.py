"""The lock that decides which rank serves its node."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from telemetry.util.clock import NS, now_ns
from telemetry.util.files import Descriptor, opened, remove_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STILL_SECONDS: Final = 4.0
"""A sign of life comes once a second. A rank without one for this long is treated as stopped or hung."""


class ServerLock:
    """The lock of the rank that serves. The ranks of a run share its file, and never wait for each other.

    It is a POSIX record lock: the kernel releases it when its holder dies, and a forked DataLoader worker does not
    inherit it. A process that is stopped, by SIGSTOP or in a debugger, keeps its lock and does not answer. So the
    holder also gives a sign of life: the modification time of the file. If that has not changed for `STILL_SECONDS`,
    another rank removes the file and locks a new one in its place. Only the lock on the file that is in place counts.
    So a process loses the lock if its file is removed, by another rank or with the whole board.

    Args:
        path: the lock file.
        mono_ns: the clock that times the signs of life.
    """

    def __init__(self, path: Path, mono_ns: Callable[[], int] = now_ns) -> None:
        self._path = path
        self._now = mono_ns
        self._file: Descriptor | None = None
        self._held = False
        self._looked_ns = mono_ns()
        self._sign = 0  # the holder's newest sign of life
        self._sign_ns = 0  # when it was first seen
        self._left_until_ns = 0  # until then, the lock is left to the rank that held it

    def take(self) -> bool:
        """Take or keep the lock if it is free, or if its holder gives no sign of life. Never blocks.

        Raises:
            OSError: the lock file cannot be made.
        """
        now = self._now()
        if now - self._looked_ns > STILL_SECONDS * NS:
            self._sign_ns = now  # this process itself was stopped, and perhaps the holder, too
        self._looked_ns = now
        if not self._in_place():
            # Removing the board ends no rank: the serving rank keeps its port if the others let it be first.
            left = self._file is not None and not self._held
            self._left_until_ns = now + int(STILL_SECONDS * NS) if left else 0
            self._open(now)
        self._held = now >= self._left_until_ns and self._lock()
        if not self._held and self._is_still(now):
            remove_file(self._path)
            self._open(now)
            self._held = self._lock()
        return self._held

    def beat(self) -> None:
        """Give a sign of life, if possible. The holder calls this about once a second, on any thread."""
        file, stamp = self._file, self._now()
        try:
            if file is not None and file.is_ours():
                os.utime(file.number, ns=(stamp, stamp))
        except OSError:
            pass

    def close(self) -> None:
        """Close the file, which releases the lock. In a forked child, the parent keeps its lock."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, now: int) -> None:
        file = Descriptor(opened(self._path, os.O_RDWR | os.O_CREAT))
        self.close()
        self._file, self._sign_ns = file, now

    def _in_place(self) -> bool:
        """Whether the open file is the one that has its name now.

        It is not opened again for this: closing any descriptor of a file releases the process's locks on it.
        """
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return False
        file = self._file
        return file is not None and file.is_ours() and file.identity == (status.st_dev, status.st_ino)

    def _lock(self) -> bool:
        assert self._file is not None  # noqa: S101 - opened by the caller
        try:
            fcntl.lockf(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return self._in_place()  # another rank may have replaced it meanwhile

    def _is_still(self, now: int) -> bool:
        """Whether the holder has given no sign of life for `STILL_SECONDS`."""
        assert self._file is not None  # noqa: S101 - opened by the caller
        sign = os.fstat(self._file.number).st_mtime_ns
        if sign != self._sign:
            self._sign, self._sign_ns = sign, now
        return now - self._sign_ns > STILL_SECONDS * NS
