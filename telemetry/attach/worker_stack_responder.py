"""Runs inside a DataLoader worker: a thread that answers the agent's requests for the worker's stacks.

The agent must not interrupt a worker: a signal makes system calls fail that C libraries do not repeat. So the thread
waits in a read of a pipe. The agent opens that pipe through /proc and writes the number of its request; the thread
writes the stacks into the shared block. While a call of another thread holds the GIL, it cannot answer.

A child that the user's code forks has the pipe, but no thread that reads it.
"""

from __future__ import annotations

import os
from threading import get_ident
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.core.worker_records import STACK_REQUEST
from telemetry.util import threads as fork_warning
from telemetry.util.clock import now_ns
from telemetry.util.files import Descriptor, raised
from telemetry.util.stacks import python_threads, stack_text
from telemetry.util.threads import OwnThread, rest, work

if TYPE_CHECKING:
    from telemetry.core.sample_area import SampleArea

_MAX_THREADS: Final = 32
_MAX_BYTES: Final = 4096


class Offer(NamedTuple):
    """What the agent needs to ask: the number and the inode of the pipe, and the thread that answers."""

    pipe: int
    inode: int
    thread: int


class _Responder:
    """Answers for the process that makes it. Made on its main thread."""

    def __init__(self, area: SampleArea) -> None:
        self.area = area
        self.pid = os.getpid()
        self.pipe = _own_pipe()
        self._main = get_ident()
        self._thread = OwnThread(self._run, name="telemetry-stacks")
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self.pipe.close()
            raise

    @property
    def offer(self) -> Offer:
        return Offer(self.pipe.number, self.pipe.identity[1], self._thread.native)

    def _run(self) -> None:
        while self.pipe.is_ours():
            try:
                rest()
                requests = os.read(self.pipe.number, _MAX_BYTES)
            except OSError:  # the worker's code has closed it at this moment
                return
            finally:
                work()
            try:
                (number,) = STACK_REQUEST.unpack(requests[-STACK_REQUEST.size :])
                # No call in here gives up the GIL, so one turn is enough beside a thread that hardly ever gives it up.
                self.area.write(number, self.pid, now_ns(), self._stacks())
            except Exception:
                pass  # it cannot be reported from here; the agent times out and goes on

    def _stacks(self) -> bytes:
        """The main thread's first, which has no heading."""
        threads = {thread.ident: thread for thread in python_threads()}
        main = threads.pop(self._main, None)
        parts = [stack_text(main.stack)] if main is not None else []
        parts += [f"thread {thread.name}\n{stack_text(thread.stack)}" for thread in [*threads.values()][:_MAX_THREADS]]
        return "".join(parts).encode("utf-8", "backslashreplace")


_responder: _Responder | None = None


def offer_stacks(area: SampleArea) -> Offer:
    """Answer requests from now on, into an area of the shared block. Must be called on the main thread of the worker.

    A process that is used for several workers, one after another, keeps its thread.

    Raises:
        OSError: the kernel gives no pipe.
        RuntimeError: no thread can be started.
    """
    global _responder  # noqa: PLW0603
    if _responder is None or _responder.pid != os.getpid() or not _responder.pipe.is_ours():
        fork_warning.register()
        fork_warning.begin()
        _responder = _Responder(area)
    _responder.area = area
    return _responder.offer


def _own_pipe() -> Descriptor:
    """A pipe as one descriptor for both of its ends: a read never sees the end of it, and there is one less to leak."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        return Descriptor(raised(os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_CLOEXEC)))
    finally:
        for end in ends:
            os.close(end)
