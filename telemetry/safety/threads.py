"""The agent's own threads, which the training does not notice."""

from __future__ import annotations

import os
import signal
import threading
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from _thread import TIMEOUT_MAX, RLock, allocate_lock, get_ident, get_native_id, start_new_thread
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable


# -- the agent's own threads -------------------------------------------------------------------------------------------
# * `threading` does not list them. A script may join every thread that `threading.enumerate` returns, or wait until
#   `threading.active_count` is 1.
# * They block all signals, because signals are meant for the training. If the training waits for a signal with
#   ``sigwait``, the kernel could deliver it to a thread of ours, which would end the process. So would a scraper that
#   closes its connection, if the script has set SIGPIPE back to its default.

# Faults of the thread itself are not blocked, so that faulthandler can report them.
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
_BLOCKED: Final = signal.valid_signals() - _FAULTS

_running: Final[dict[int, OwnThread]] = {}

no_fork: Final = RLock()
"""A fork waits while a thread of ours holds this: a child would have half of what is done under it."""


def running() -> list[str]:
    """The names of our threads."""
    return [thread.name for thread in [*_running.values()]]


def natives() -> set[int]:
    """The kernel's numbers of our threads."""
    return {thread.native for thread in [*_running.values()]}


def named(ident: int) -> str | None:
    """The name of our thread with this ident; None for any other thread."""
    thread = _running.get(ident)
    return None if thread is None else thread.name


class OwnThread:
    """A thread of ours.

    Args:
        target: runs on the thread. It must not raise, because that would be printed.
        args: its arguments.
        name: shown by ``top -H`` and in the stacks of a hang; it begins with ``telemetry-``.

    Attributes:
        ident: as `threading.get_ident` returns it; None before the start.
        native: the kernel's number of the thread.
    """

    __slots__ = ("_args", "_ended", "_started", "_target", "ident", "name", "native")

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        self._target = target
        self._args = args
        self.name = name
        self.ident: int | None = None
        self.native = 0
        self._started = allocate_lock()
        self._ended = allocate_lock()

    def start(self) -> None:
        """Start the thread, once.

        Raises:
            RuntimeError: no thread can be started: at the limit, or while the interpreter exits.
        """
        self._started.acquire()
        self._ended.acquire()
        if not _after_fork_registered:
            _register()
        # A new thread inherits the blocked signals of the thread that starts it. A handler of the script may raise at
        # any moment here, because other threads still take signals. So the mask is known before it is changed, and
        # a C function restores it: Python runs handlers when a function of `signal` begins.
        before = pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
            start_new_thread(self._main, ())
        except BaseException:
            self._ended.release()
            raise
        finally:
            pthread_sigmask(signal.SIG_SETMASK, before)
        self._started.acquire()

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.ident is not None and self._ended.locked()

    def join(self, seconds: float = -1) -> bool:
        """Wait for the thread's end, at most this many seconds; by default forever. Returns whether it has ended."""
        if self.ident is None:
            return True
        if not self._ended.acquire(True, -1 if seconds == -1 else max(0.0, seconds)):
            return False
        self._ended.release()
        return True

    def _main(self) -> None:
        self.ident, self.native = get_ident(), get_native_id()
        _running[self.ident] = self
        self._started.release()
        try:
            _name_for_kernel(self.name)
            self._target(*self._args)
        finally:
            del self._target, self._args
            _forget_in_threading()
            del _running[self.ident]
            self._ended.release()


class Wake:
    """A flag for which a thread of ours waits. It stays set until cleared. Any thread or signal handler may set it."""

    __slots__ = ("_gate", "_is_set")

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._gate.acquire()
        self._is_set = False

    def set(self) -> None:
        """End all waits."""
        self._is_set = True
        self._open()

    def clear(self) -> None:
        """Let later waits wait again. Only the one thread that waits may call it."""
        self._is_set = False
        self._gate.acquire(False)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def wait(self, seconds: float = TIMEOUT_MAX) -> bool:
        """Wait until it is set, at most this many seconds. Returns whether it is set."""
        if self._is_set or seconds <= 0:
            return self._is_set
        if get_ident() in _running:
            _forget_in_threading()
        if self._gate.acquire(True, seconds):
            self._open()  # for other waiting threads
        return self._is_set

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            pass  # it is open


def listed_threads() -> dict[int, threading.Thread]:
    """The threads that `threading` lists, by ident. Takes no lock: a thread that hangs may hold that of `threading`."""
    return dict(threading._active)  # type: ignore[attr-defined]


def _forget_in_threading() -> None:
    """Remove the object that `threading.current_thread` has added for this thread when a library called it."""
    threading._active.pop(get_ident(), None)  # type: ignore[attr-defined]


def _name_for_kernel(name: str) -> None:
    try:
        comm = os.open(f"/proc/self/task/{get_native_id()}/comm", os.O_WRONLY)
    except Exception:
        return  # no /proc, no descriptor is left, or an audit hook of the script forbids it
    try:
        os.write(comm, name.encode())
    except OSError:
        pass
    finally:
        os.close(comm)


_after_fork_registered = False


def _register() -> None:
    global _after_fork_registered  # noqa: PLW0603
    # C functions: Python drops what a handler of the script raises in a function that is called by a fork.
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
    os.register_at_fork(after_in_child=_after_fork_in_child)
    _after_fork_registered = True


def _after_fork_in_child() -> None:
    """Forget the threads, which the child does not have."""
    for thread in _running.values():
        thread._ended = allocate_lock()
    _running.clear()
