"""The interval after which Python takes the GIL from a thread for a waiting one, and waits for the GIL."""

from __future__ import annotations

import os
import resource
import sys
from typing import Final

from telemetry.util.clock import NS, now_ns, sleep

_SHORT_SECONDS: Final = 0.000023
"""The short interval: an odd number, which no script chooses. Each operator of torch gives the GIL up for a
microsecond, and with that the interval begins anew. With 0.5 ms, all samples of `rows_one_by_one` of `tests.reports`
showed the one long operator of each batch. With 23 us, 45 % show its many short ones, which take half of the time."""

_THREAD: Final[int | None] = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it


def thread_waits() -> int:
    """How often this thread has waited so far: for a lock, the GIL, or the end of a sleep.

    Source: ``ru_nvcsw`` of getrusage. If the kernel does not count it, it stays 0.
    """
    return resource.getrusage(_THREAD).ru_nvcsw if _THREAD is not None else 0


def let_others_run() -> None:
    """Give the GIL to a thread that waits for it. After a sleep of 0 this one has it back before the other is awake."""
    sleep(1e-5)


class SwitchInterval:
    """Shortens the switch interval of this process for a burst, by one thread of ours.

    A script that reads the interval during a burst, and sets it again later, sets ours. So an interval of just this
    length is never the script's own: `restore` sets its last one, also outside of a burst.

    Attributes:
        usual: the script's interval in seconds, as last seen.
        short: whether a burst goes on.
    """

    def __init__(self) -> None:
        self.usual = 0.005
        self.short = False
        self._registered = False

    def shorten(self) -> None:
        """Begin a burst, if none goes on."""
        now = sys.getswitchinterval()
        if self.short or (now < _SHORT_SECONDS and not _is_short(now)):
            return
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self.restore)
        if not _is_short(now):
            self.usual = now
        self.short = True
        sys.setswitchinterval(_SHORT_SECONDS)

    def restore(self) -> None:
        """End a burst, if one goes on. An interval that the script has set meanwhile stays."""
        self.short = False
        if _is_short(sys.getswitchinterval()):
            sys.setswitchinterval(self.usual)


def _is_short(seconds: float) -> bool:
    return abs(seconds - _SHORT_SECONDS) < 1e-6


switch_interval: Final = SwitchInterval()
"""That of this process."""


_LATE_NS: Final = NS // 2
_MIN_WAITS: Final = 50
"""A thread that waits for the GIL wakes at each switch interval: 100 times in half a second. A hung file system does
not wake it, and neither do cores that are all in use."""


class GilTurns:
    """Makes sure that the agent thread gets the GIL from a training thread that keeps it. The agent thread uses it.

    A thread that waits for the GIL asks for it after the switch interval. If the training thread gives the GIL up
    earlier, the interval begins anew. Each operator of torch gives it up, often for a microsecond, and takes it back
    before the waiting thread is awake. So beside a loop of C calls of 4 ms and operators, a tick took 6 to 15 s and
    more. With a short switch interval the longest, which was the first, took 1.1 to 2.3 s (`benchmarks.gil_turns`).

    The interval is short from the moment at which the agent thread has waited long until the end of its tick, and from
    the begin of each later tick while that tick needs it, too.
    """

    def __init__(self) -> None:
        self._since = 0
        self._waits = 0
        self._needed = False

    def begin(self, due_ns: int | None = None) -> None:
        """Expect that this thread's work takes short, from now on or from the stamp at which its sleep ends."""
        self._since = now_ns() if due_ns is None else due_ns
        self._waits = thread_waits()

    def check(self) -> None:
        """Shorten the interval if this thread has waited long for the GIL since `begin`."""
        if now_ns() - self._since > _LATE_NS and thread_waits() - self._waits >= _MIN_WAITS:
            self._needed = True
            switch_interval.shorten()

    def tick_begins(self) -> None:
        """Begin a tick with a short interval if the one before has needed it."""
        if self._needed:
            switch_interval.shorten()

    def tick_ends(self) -> None:
        """End the tick, with the script's interval."""
        self._needed = switch_interval.short and thread_waits() - self._waits >= _MIN_WAITS
        switch_interval.restore()
