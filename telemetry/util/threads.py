"""The agent's own threads, which the training does not notice."""

from __future__ import annotations

import functools
import gc
import operator
import os
import re
import signal
import sys
import threading
import warnings
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from _thread import RLock, allocate_lock, get_ident, get_native_id, start_new_thread
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable


# -- the agent's own threads -------------------------------------------------------------------------------------------
# * `threading` does not list them. A script may join every thread that `threading.enumerate` returns, or wait until
#   `threading.active_count` is 1.
# * They block all signals, because signals are meant for the training. If the training waits for a signal with
#   ``sigwait``, the kernel could deliver it to a thread of ours, which would end the process. So would a scraper that
#   closes its connection, if the script has set SIGPIPE back to its default.
# * No garbage collection starts on them. Python collects on the thread whose allocation exceeds the threshold, and then
#   runs the finalizers of the script there: a connection of sqlite3 that is closed on a thread of ours raises. So while
#   a thread of ours works, the threshold is higher by `_ROOM` objects, which it does not allocate. A collection that
#   has become due starts at the next allocation of the script, at most milliseconds later. If a thread of ours hangs (a
#   file system that does not answer), the script still collects, but less often. `gc.get_threshold` meanwhile returns
#   the script's threshold, because a script that computes with it, or restores it later, must not use ours.
#
# A thread of ours waits with `Wake` or between `rest` and `work`. Anywhere else it counts as working.

# Faults of the thread itself are not blocked, so that faulthandler can report them.
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})

_ROOM: Final = 20_011
"""A tick allocates and keeps less: 1,000 to 3,000 objects at its peak. An odd number, which no script chooses."""

_MAX_THRESHOLD: Final = 2**31 - 1

_TASKS: Final = "/proc/self/task"

_running: Final[dict[int, OwnThread]] = {}

harmless: Final[list[OwnThread]] = []
"""Our threads that run no code of others. Such code, as a logger's client, may hold a lock that a forked child needs. A
thread is in the list from before it starts until the next one starts after its end."""

no_fork: Final = RLock()
"""A fork waits while a thread of ours holds this: a child would have half of what is done under it."""

_guard = allocate_lock()
_at_work = 0
_threshold = 0  # the script's
_raised = 0  # ours, which replaces the script's while a thread of ours works
_get_threshold: Final = gc.get_threshold


@functools.wraps(gc.get_threshold)
def _threshold_of_script() -> tuple[int, int, int]:
    script, ours = _threshold, _raised
    now, old, older = _get_threshold()
    return script if now == ours else now, old, older


def work() -> None:
    """Note that this thread of ours begins to work."""
    global _at_work, _threshold, _raised  # noqa: PLW0603
    _guard.acquire()
    _at_work += 1
    if _at_work == 1:
        now = _get_threshold()[0]
        if now == _raised:  # the script has read ours under another name, and set it again later
            now = _threshold
        if now:  # with 0 nothing is collected
            _threshold, _raised = now, min(max(now, gc.get_count()[0]) + _ROOM, _MAX_THRESHOLD)
            gc.get_threshold = _threshold_of_script
            gc.set_threshold(_raised)
    _guard.release()


def rest() -> None:
    """Note that this thread of ours is about to wait."""
    global _at_work  # noqa: PLW0603
    _guard.acquire()
    _at_work -= 1
    if not _at_work:
        _restore_threshold()
    _guard.release()


def _restore_threshold() -> None:
    if _raised and _get_threshold()[0] == _raised:  # otherwise the script has set its own meanwhile
        gc.set_threshold(_threshold)
    if gc.get_threshold is _threshold_of_script:
        gc.get_threshold = _get_threshold


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
        others_code: whether it runs code of others.

    Attributes:
        ident: as `threading.get_ident` returns it; None before the start.
        native: the kernel's number of the thread.
        task: a path that exists while the kernel counts the thread, which it does for a moment after the end.
    """

    __slots__ = ("_args", "_ended", "_others_code", "_started", "_target", "ident", "name", "native", "task")

    def __init__(self, target: Callable[..., object], *args: Any, name: str, others_code: bool = False) -> None:
        self._target = target
        self._others_code = others_code
        self._args = args
        self.name = name
        self.ident: int | None = None
        self.native = 0
        self.task = _TASKS  # until the number is known
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
        _forget_ended()
        if not self._others_code:
            harmless.append(self)
        # A new thread inherits the blocked signals of the thread that starts it. A handler of the script may raise at
        # any moment here, because other threads still take signals. So the mask is known before it is changed, and
        # a C function restores it: Python runs handlers when a function of `signal` begins.
        before = pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
            start_new_thread(self._main, ())
        except BaseException:
            self.task = ""
            self._ended.release()
            _forget_ended()
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
        work()
        self.ident, self.native = get_ident(), get_native_id()
        self.task = f"{_TASKS}/{self.native}"
        _running[self.ident] = self
        _name_for_kernel(self.task, self.name)
        self._started.release()
        try:
            self._target(*self._args)
        finally:
            del self._target, self._args
            _forget_in_threading()
            del _running[self.ident]
            rest()
            self._ended.release()


class Wake:
    """A flag for which a thread of ours waits. It stays set until cleared. Any thread or signal handler may set it.

    `threading.Event` would allocate a lock for each wait, which may start a collection.
    """

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

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most this many seconds. Returns whether it is set."""
        if self._is_set or seconds <= 0:
            return self._is_set
        ours = get_ident() in _running
        if ours:
            _forget_in_threading()
            rest()
        if self._gate.acquire(True, seconds):
            self._open()  # for other waiting threads
        if ours:
            work()
        return self._is_set

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            pass  # it is open


def _forget_in_threading() -> None:
    """Remove the object that `threading.current_thread` has added for this thread when a library called it."""
    threading._active.pop(get_ident(), None)  # type: ignore[attr-defined]


def _forget_ended() -> None:
    for thread in [*harmless]:
        if not os.access(thread.task, os.F_OK):
            try:
                harmless.remove(thread)
            except ValueError:
                pass  # another thread has removed it


def _name_for_kernel(task: str, name: str) -> None:
    try:
        comm = os.open(f"{task}/comm", os.O_WRONLY)
    except OSError:
        return  # no /proc, or no descriptor is left
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
    """Forget the threads, which the child does not have. They may have been at work during the fork."""
    global _guard, _at_work
    _guard, _at_work = allocate_lock(), 0
    _restore_threshold()
    for thread in _running.values():
        thread._ended = allocate_lock()
    _running.clear()
    harmless.clear()


# -- hides Python's warning of a fork with several threads, if all the other threads are the agent's own ---------------
# From Python 3.12 on `os.fork` warns when the process has more than one thread. If the training has a second thread
# itself, the warning is shown as without the agent. If all other threads are the agent's, the warning is hidden: they
# hold no lock that a child needs, and the user did not start them. The decision is made when Python warns, because a
# library may end its threads right before the fork (OpenBLAS does).
#
# Everything that runs during a fork is a C function. Python drops an exception that is raised there, and a signal
# handler of the script runs at the first bytecode after its signal.

WARNS: Final = sys.version_info >= (3, 12)
"""Whether this Python warns about a fork with several threads."""

_WARNS_LAST: Final = sys.version_info >= (3, 13)
"""Whether it warns after all fork handlers have run. Then the filter stays until the next fork, or `end`."""

_MESSAGE: Final = re.compile(
    r"This process \(pid=\d+\) is multi-threaded, use of \w+\(\) may lead to deadlocks in the child"
)


class _OursAlone:
    """Replaces the regular expression for modules in a warning filter.

    Attributes:
        match: returns whether all threads but one are the agent's. Python calls it when it warns. The number of threads
            is the folder's number of links less 2, which needs no descriptor. Ours are counted first: one that ends
            meanwhile must not look like the user's.
    """

    def __init__(self) -> None:
        tasks = map(map, repeat(attrgetter("task")), repeat(harmless))
        ours = map(sum, map(map, repeat(os.access), tasks, repeat(repeat(os.F_OK))))
        links = map(attrgetter("st_nlink"), map(os.stat, repeat("/proc/self/task")))
        self.match = partial(next, map(operator.ge, map(operator.add, ours, repeat(1 + 2)), links))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an expression that matches nothing, because some libraries send filters to other processes."""
        return re.compile, ("(?!)",)


_FILTER: Final[Any] = ("ignore", _MESSAGE, DeprecationWarning, _OursAlone(), 0)
_wanted: Final[list[Any]] = []
_registered = False


def _filters() -> map[Any]:
    return map(attrgetter("filters"), repeat(warnings))


# The list is changed in place: `warnings.filterwarnings` would increase the version of the filters, and Python would
# then repeat warnings that it has already shown.
_without_ours: Final = map(partial(filter, partial(is_not, _FILTER)), _filters())
_remove: Final = map(operator.setitem, _filters(), repeat(slice(None)), _without_ours)
_insert: Final = map(operator.setitem, _filters(), repeat(slice(0, 0)), repeat(_wanted))


def register() -> None:
    """Let each fork of this process install the filter in first place, if Python warns."""
    global _registered  # noqa: PLW0603
    if WARNS and not _registered:
        _registered = True
        os.register_at_fork(before=partial(next, zip(_remove, _insert, strict=False)))
        os.register_at_fork(after_in_child=partial(next, zip(_remove, iter(_wanted.clear, _FILTER), strict=False)))
        if not _WARNS_LAST:
            os.register_at_fork(after_in_parent=partial(next, _remove))


def begin() -> None:
    """Want the filter, because the agent runs."""
    _wanted[:] = [_FILTER]


def end() -> None:
    """Remove the filter, because the agent has stopped."""
    _wanted.clear()
    next(_remove)
