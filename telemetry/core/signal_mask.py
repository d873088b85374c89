"""Blocks all signals in the agent's threads, because signals are meant for the training.

A new thread inherits the blocked signals of the thread that starts it. If no signal were blocked, the kernel could
deliver a signal to an agent thread although the training waits for it with ``sigwait``. That would end the process. If
the script has set SIGPIPE back to its default, a scraper that closes its connection would end the process, too.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Faults of the thread itself are not blocked, so that faulthandler can report them.
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
_BLOCKED: Final = signal.valid_signals() - _FAULTS


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start a thread inside this context. The caller's mask is restored afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
