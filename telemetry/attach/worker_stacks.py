"""Inside a DataLoader worker: what is needed so that the agent can ask where it stands.

Two real-time signals and an anonymous file. The first is handled by Python: between two bytecodes, so it sees every
thread and hurts none, but a main thread that is inside a C call never gets there. The second is faulthandler's, whose
handler runs in C at once and writes the main thread's stack. It looks at frames as they are: of a thread in the middle
of running Python it may meet a half-made one and crash (Python 3.11: once in some 4,000 dumps of a busy loop; with all
threads, once in 300). So the agent sends it only when the first has shown that no Python runs.

Both restart the system call they interrupt (SA_RESTART), where the kernel restarts it at all.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from telemetry.files import memory_file
from telemetry.records import STACK_END, StackPort
from telemetry.stacks import own_stack, python_threads, stack_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FIRST: Final = signal.SIGRTMIN + 11
"""The signals next to SIGRTMIN and SIGRTMAX are those that others take first."""

_LAST: Final = signal.SIGRTMAX - 3
_MOST_THREADS: Final = 32
_MOST_BYTES: Final = 1 << 16


def offer_stacks() -> StackPort:
    """Register both signals of this process. To be called on its main thread.

    Raises:
        OSError: the kernel gives no such file.
        LookupError: every signal that could be used has a handler.
    """
    free = _unused_signals()
    try:
        ask, force = next(free), next(free)
    except StopIteration:
        raise LookupError("no real-time signal is left") from None
    file = memory_file("telemetry-stacks")
    # Every write goes to the end, also after the agent has emptied the file.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    signal.signal(ask, _answer(file))
    signal.siginterrupt(ask, False)
    faulthandler.register(force, file=file, all_threads=False, chain=False)
    return StackPort(ask, force, file, os.fstat(file).st_ino)


def _unused_signals() -> Iterator[int]:
    """Signals that neither Python nor a C library handles."""
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
            parts += [f"thread {thread.name}\n{stack_text(thread.stack)}" for thread in others[:_MOST_THREADS]]
            text = "".join(parts).encode("utf-8", "backslashreplace")[:_MOST_BYTES]
            os.write(file, text + STACK_END)
        except Exception:
            pass  # nowhere to tell it from here; the agent waits a little and goes on

    return answer
