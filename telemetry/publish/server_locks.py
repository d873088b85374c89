"""Decides which rank serves the node: the ranks of a run use lock files on the board, and never wait for each other.

There is a row of locks, and the holder of the first one serves. Each is a POSIX record lock: the kernel releases it
when its holder dies, and a forked DataLoader worker does not inherit it. A process that is stopped, by SIGSTOP or in a
debugger, keeps its lock and does not answer. So the holder of a lock also gives a sign of life: the modification time
of its lock file. Once that has not changed for `STILL_SECONDS`, another rank takes the next lock and serves too, until
the time changes again.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from telemetry.core.clock import NS, now_ns
from telemetry.core.filesystem import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOCK_COUNT: Final = 8
"""With this many locks, one fewer ranks of a node can be stopped at the same time while the others are still served."""

STILL_SECONDS: Final = 4.0
"""A sign of life comes once a second. A rank without one for this long is treated as stopped or hung."""


class ServerLocks:
    """The server locks of one board.

    Args:
        folder: the board's.
        mono_ns: the clock that times the signs of life.
    """

    def __init__(self, folder: Path, mono_ns: Callable[[], int] = now_ns) -> None:
        self._folder = folder
        self._now = mono_ns
        self._locks: dict[int, Descriptor] = {}
        self._taken_ns = mono_ns()
        self._signs: dict[int, tuple[int, int]] = {}  # by place: the newest sign, and when it was first seen

    def take(self) -> int | None:
        """Take or keep the first lock such that all ranks with earlier locks give no sign of life. Never blocks.

        Releases later locks.

        Returns:
            Its place in the row, 0 for the first; None if the holder of an earlier lock is alive, or no lock is left.

        Raises:
            OSError: the lock files cannot be made.
        """
        now = self._now()
        if now - self._taken_ns > STILL_SECONDS * NS:
            self._signs.clear()  # this process itself was stopped, and perhaps the others, too
        self._taken_ns = now
        for place in range(LOCK_COUNT):
            mine = self._lock(place)
            if mine or not self._is_still(place, now):
                for behind in [other for other in self._locks if other > place]:
                    self._release(behind)
                return place if mine else None
        return None

    def beat(self, place: int) -> None:
        """Give a sign of life; the holder of a lock calls this about once a second."""
        lock = self._locks.get(place)
        if lock is not None and lock.is_ours():
            stamp = self._now()
            os.utime(lock.number, ns=(stamp, stamp))

    def close(self) -> None:
        """Close the lock files, which releases every lock. A forked child has copies: the parent keeps its locks."""
        for place in list(self._locks):
            self._locks.pop(place).close()

    def _lock(self, place: int) -> bool:
        lock = self._locks.get(place)
        if lock is None or not lock.is_ours():
            number = opened(self._folder / lock_name(place), os.O_RDWR | os.O_CREAT)
            lock = self._locks[place] = Descriptor(number)
        try:
            fcntl.lockf(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._signs.pop(place, None)
        return True

    def _is_still(self, place: int, now: int) -> bool:
        """Whether the holder of a lock has given no sign of life for `STILL_SECONDS`."""
        sign = os.fstat(self._locks[place].number).st_mtime_ns
        before = self._signs.get(place)
        if before is None or before[0] != sign:
            before = self._signs[place] = (sign, now)
        return now - before[1] > STILL_SECONDS * NS

    def _release(self, place: int) -> None:
        """Close the lock file, which releases the lock if this process holds it."""
        self._signs.pop(place, None)
        self._locks.pop(place).close()


def lock_name(place: int) -> str:
    """The lock file on the board, by its place in the row."""
    return "endpoint.lock" if place == 0 else f"endpoint-{place}.lock"
