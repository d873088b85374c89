"""Runs inside a DataLoader worker: answers the agent's requests for its stacks.

It uses two real-time signals and an anonymous file. Python handles the first between two bytecodes: its handler sees
all threads safely, but does not run while the main thread is inside a C call. faulthandler handles the second: its
handler runs in C at once and writes the main thread's stack. It reads frames as they are. While the thread runs Python,
a frame may be incomplete and the handler may crash (Python 3.11: once in some 4,000 dumps of a busy loop; with all
threads, once in 300). So the agent sends the second only after the first has shown that no Python runs.

Both restart the system call they interrupt (SA_RESTART), if the kernel restarts it at all.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.filesystem import memory_file
from telemetry.core.stacks import own_stack, python_threads, stack_text
from telemetry.core.worker_records import STACK_END, StackPort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FIRST: Final = signal.SIGRTMIN + 11
"""Other libraries mostly use the signals next to SIGRTMIN and SIGRTMAX first."""

_LAST: Final = signal.SIGRTMAX - 3
_MAX_THREADS: Final = 32
_MAX_BYTES: Final = 1 << 16


def offer_stacks() -> StackPort:
    """Register both signals of this process. Must be called on its main thread.

    Returns:
        The signals' numbers and the file, for the agent.

    Raises:
        OSError: the kernel gives no such file.
        LookupError: every usable signal has a handler.
    """
    free = _unused_signals()
    try:
        ask, force = next(free), next(free)
    except StopIteration:
        raise LookupError("no real-time signal is left") from None
    file = memory_file("telemetry-stacks")
    # Every write goes to the end of the file, even after the agent has truncated it.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    signal.signal(ask, _answer(file))
    signal.siginterrupt(ask, False)
    faulthandler.register(force, file=file, all_threads=False, chain=False)
    return StackPort(ask, force, file, os.fstat(file).st_ino)


def _unused_signals() -> Iterator[int]:
    """Signals that neither Python nor a C library handles, ignores or blocks."""
    taken = 0
    with open("/proc/self/status", "rb") as status:  # noqa: PTH123
        for line in status:
            if line.startswith((b"SigCgt:", b"SigIgn:", b"SigBlk:")):
                taken |= int(line.split()[1], 16)
    for number in range(_FIRST, _LAST):
        if not taken >> (number - 1) & 1 and signal.getsignal(number) is signal.SIG_DFL:
            yield number


def _answer(file: int) -> Callable[[int, Any], None]:
    """A signal handler that writes all stacks, the main thread's first. Takes no lock."""

    def answer(signum: int, frame: Any) -> None:
        del signum
        try:
            parts = [stack_text(own_stack(frame))]
            others = [thread for thread in python_threads() if thread.ident != threading.get_ident()]
            parts += [f"thread {thread.name}\n{stack_text(thread.stack)}" for thread in others[:_MAX_THREADS]]
            text = "".join(parts).encode("utf-8", "backslashreplace")[:_MAX_BYTES]
            os.write(file, text + STACK_END)
        except Exception:
            pass  # it cannot be reported from here; the agent times out and goes on

    return answer
