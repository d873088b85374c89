"""Who serves the node: the ranks of a run agree through lock files on the board, without ever waiting.

There is a row of seats. The holder of the first one serves. A seat is a POSIX record lock: the kernel frees it when its
holder dies, and a forked DataLoader worker does not inherit it. A process that is stopped, by SIGSTOP or in a
debugger, keeps its lock and does not answer. So the holder of a seat also gives a sign of life, the time of last change
of its lock file: once it has not moved for `STILL_SECONDS`, another rank takes the next seat and serves too, until the
sign moves again.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from telemetry.clock import NS, now_ns
from telemetry.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEATS: Final = 8
"""So many ranks of a node can be stopped at the same time, less one, and the others are still served."""

STILL_SECONDS: Final = 4.0
"""A sign of life comes twice a second; after so long without one its rank is taken to be stopped or hung."""


class Seats:
    """The seats of one board.

    Args:
        folder: the board's.
        mono_ns: the clock by which a sign stands still.
    """

    def __init__(self, folder: Path, mono_ns: Callable[[], int] = now_ns) -> None:
        self._folder = folder
        self._now = mono_ns
        self._locks: dict[int, Descriptor] = {}
        self._looked_ns = mono_ns()
        self._signs: dict[int, tuple[int, int]] = {}  # by seat: the newest sign, and when it was first seen

    def take(self) -> int | None:
        """Take, or keep, the first seat before which everybody who has one is still. Never blocks.

        Any seat behind it is given up.

        Returns:
            Its number, 0 for the first; None if somebody before it is alive, or no seat is left.

        Raises:
            OSError: the lock files cannot be made.
        """
        now = self._now()
        if now - self._looked_ns > STILL_SECONDS * NS:
            self._signs.clear()  # it was this process that stood still, and perhaps the others with it
        self._looked_ns = now
        for seat in range(SEATS):
            mine = self._lock(seat)
            if mine or not self._is_still(seat, now):
                for behind in [other for other in self._locks if other > seat]:
                    self._leave(behind)
                return seat if mine else None
        return None

    def beat(self, seat: int) -> None:
        """Give a sign of life; the holder of a seat calls this about twice a second."""
        lock = self._locks.get(seat)
        if lock is not None and lock.is_ours():
            stamp = self._now()
            os.utime(lock.number, ns=(stamp, stamp))

    def close(self) -> None:
        """Close the lock files, which gives up every seat; in a forked child they are copies, and the parent's stay."""
        for seat in list(self._locks):
            self._locks.pop(seat).close()

    def _lock(self, seat: int) -> bool:
        lock = self._locks.get(seat)
        if lock is None or not lock.is_ours():
            number = opened(self._folder / lock_name(seat), os.O_RDWR | os.O_CREAT)
            lock = self._locks[seat] = Descriptor(number)
        try:
            fcntl.lockf(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._signs.pop(seat, None)
        return True

    def _is_still(self, seat: int, now: int) -> bool:
        """Whether the holder of a seat has given no sign of life for long."""
        sign = os.fstat(self._locks[seat].number).st_mtime_ns
        before = self._signs.get(seat)
        if before is None or before[0] != sign:
            before = self._signs[seat] = (sign, now)
        return now - before[1] > STILL_SECONDS * NS

    def _leave(self, seat: int) -> None:
        """Close the lock file: that frees the lock, if there is one."""
        self._signs.pop(seat, None)
        self._locks.pop(seat).close()


def lock_name(seat: int) -> str:
    """The file of a seat on the board."""
    return "endpoint.lock" if seat == 0 else f"endpoint-{seat}.lock"
