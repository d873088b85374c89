"""Our threads take no signal: each one is meant for the training.

A thread starts with the signals blocked that its maker has blocked. With none blocked it could be the one to take a
signal the training waits for with ``sigwait``, which would end the process; and a scraper that hangs up would end it
where the script has set SIGPIPE back to its default.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# A fault of the thread itself is not to be hidden from faulthandler.
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})


@contextmanager
def signals_blocked() -> Iterator[None]:
    """To start a thread in. The caller's own mask is as it was afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
