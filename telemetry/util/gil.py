"""Handles waits for the GIL, and the interval after which Python takes it from a thread for a waiting one.

A process has one interval, 5 ms by default. Threads that are sampled, and an agent thread that hardly gets the GIL,
need a shorter one for a while.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import Final

from telemetry.util.clock import NS, now_ns, sleep

SWITCH_SECONDS: Final = 0.0005
"""The short interval."""

_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it

_users: set[str] = set()
_before: float | None = None
_registered = False


def thread_waits() -> int:
    """How often this thread has waited so far: for a lock, the GIL, or the end of a sleep.

    Source: ``ru_nvcsw`` of getrusage. If the kernel does not count it, it stays 0, and no sample is late.
    """
    return resource.getrusage(_THREAD).ru_nvcsw if _THREAD is not None else 0


def let_others_run() -> None:
    """Give the GIL to a thread that waits for it. After a sleep of 0 this one has it back before the other is awake."""
    sleep(1e-5)


def shorten_switch_interval(user: str) -> None:
    """Shorten the interval of this process if it is longer. ``user``: the part of the agent that needs it."""
    global _before, _registered  # noqa: PLW0603
    _users.add(user)
    if sys.getswitchinterval() <= SWITCH_SECONDS:
        return
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_restore_in_child)
    _before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)


def restore_switch_interval(user: str) -> None:
    """Undo `shorten_switch_interval`, unless others still need it, or other code has changed the interval."""
    global _before
    _users.discard(user)
    if _users:
        return
    before, _before = _before, None
    if before is not None and abs(sys.getswitchinterval() - SWITCH_SECONDS) < SWITCH_SECONDS / 100:
        sys.setswitchinterval(before)


def _restore_in_child() -> None:
    for user in [*_users]:
        restore_switch_interval(user)


_LATE_NS: Final = NS // 2
_MIN_WAITS: Final = 50
"""A thread that waits for the GIL wakes at each switch interval: 100 times in half a second. A hung file system does
not wake it, and neither do cores that are all in use."""

_MAX_THREADS: Final = 3
"""The script's threads: the training thread, one that pins memory, and another one."""

_FIRST_NS: Final = 60 * NS
_MAX_NS: Final = 3600 * NS
"""The interval stays short for a minute. Each time it is needed again right after, it stays short twice as long."""


class GilTurns:
    """Makes sure that the agent thread gets the GIL from a training thread that keeps it. The agent thread uses it.

    A thread that waits for the GIL asks for it after the switch interval. If the training thread gives the GIL up
    earlier, the interval begins anew. Each operator of torch gives it up, often for a microsecond, and takes it back
    before the waiting thread is awake. So beside a loop of C calls of 4 ms and operators, a tick took 6 to 15 s and
    more. With a short switch interval the longest, which was the first, took 1.1 to 2.3 s (`benchmarks.gil_turns`).

    The interval is shortened only after the agent thread has waited long, and only while that helps. Long calls of C
    code also keep the GIL, and no interval is short enough for these. If many threads run Python, each waits for the
    others. They would take turns ten times as often, so for them the interval stays as it is.
    """

    _USER: Final = "agent"

    def __init__(self) -> None:
        self._since = 0
        self._waits = 0
        self._short = False
        self._until = 0  # the interval stays unchanged until then
        self._length = _FIRST_NS

    def begin(self, due_ns: int | None = None) -> None:
        """Expect that this thread's work takes short, from now on or from the stamp at which its sleep ends."""
        self._since = now_ns() if due_ns is None else due_ns
        self._waits = thread_waits()

    def check(self, *, goes_on: bool = False) -> None:
        """Shorten the interval if this thread has waited long for the GIL since `begin` or the last call.

        ``goes_on``: the work since then goes on, and its waits count together.
        """
        now, waits = now_ns(), thread_waits()
        self._since = self._since or now
        late = now - self._since > _LATE_NS and waits - self._waits >= _MIN_WAITS
        if late or not goes_on:
            self._since, self._waits = now, waits
        if self._short and late:
            self._restore(now + _MAX_NS)  # it does not help
        elif self._short and now >= self._until:
            self._restore(now)
        elif late and not self._short and now >= self._until and _threads_of_script() <= _MAX_THREADS:
            again = now - self._until < _FIRST_NS
            self._length = min(2 * self._length, _MAX_NS) if again and self._until else _FIRST_NS
            self._short, self._until = True, now + self._length
            shorten_switch_interval(self._USER)

    def end(self) -> None:
        """Restore the interval, because the agent stops."""
        if self._short:
            self._restore(now_ns())

    def _restore(self, until: int) -> None:
        self._short, self._until = False, until
        restore_switch_interval(self._USER)


def _threads_of_script() -> int:
    """The number of threads that Python counts, which are not ours. Takes no lock, unlike `threading.enumerate`."""
    return len(getattr(threading, "_active", ()))
