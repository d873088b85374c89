"""Requests stacks from DataLoader workers. A thread of the worker is woken through a pipe, and answers in memory.

No signal is sent: it would interrupt the worker's system calls, and C libraries take that for an error. The pipe is
opened through /proc, as files that a process of the same user has open can be. ptrace is not needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.core.worker_records import STACK_REQUEST, StackPort
from telemetry.sources.proc import is_worker_of_ours, read_schedule, read_stat, thread_state
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.files import raised

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.sources.proc import Schedule

_ALL_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.01

_MAX_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """The stack of one worker.

    Attributes:
        stack: its lines, the main thread's first. If it is empty, ``missing`` gives the reason.
        state: state of its main thread, in words; empty if it is unknown.
    """

    pid: int
    state: str
    stack: str
    missing: str


class _StackRequest:
    """The request for the stack of one worker."""

    def __init__(self, pid: int, port: StackPort | None) -> None:
        self.pid = pid
        self.port = port
        self.stack = ""
        self.missing = (
            "" if port is not None else "it was started before the agent, or could not be made ready to be asked"
        )
        self._number = now_ns()
        self._before: tuple[Schedule, Schedule] | None = None

    @property
    def done(self) -> bool:
        return bool(self.stack or self.missing)

    def ask(self) -> None:
        """Wake the worker's thread, if the process is still a worker of ours that can answer."""
        if self.port is None or self.done:
            return
        self._before = self._schedules(self.port)
        try:
            self.missing = self._silent() or self._wake(self.port)
        except FileNotFoundError:
            self.missing = "it has closed our pipe"
        except OSError as error:
            self.missing = f"it cannot be asked ({error.strerror})"

    def read_answer(self) -> None:
        """Take the answer if it is there."""
        if self.port is None or self.done:
            return
        answer = self.port.area.read()
        if answer is not None and (answer.session, answer.pid) == (self._number, self.pid):
            self.stack = answer.content.decode("utf-8", "replace")

    def time_out(self) -> None:
        """Record why the worker did not answer."""
        if self.port is not None and not self.done:
            self.missing = self._silent() or self._late(self.port)

    def _silent(self) -> str:
        """Why no thread of this process can answer; empty if one can."""
        stat = read_stat(self.pid)
        if stat is None:
            return "it has ended"
        if not is_worker_of_ours(stat.parent):
            return "it has ended, and its pid is another process's"
        stopped = thread_state(self.pid, self.pid) in {"stopped", "traced"}
        return "it is stopped, by a signal or a debugger" if stopped else ""

    def _wake(self, port: StackPort) -> str:
        """Write the request into the pipe. Returns why it was not written.

        Raises:
            OSError: the pipe cannot be opened, or is full.
        """
        path = f"/proc/{self.pid}/fd/{port.pipe}"
        # Looked at first: to open another file may change something for its owner.
        if str(Path(path).readlink()) != f"pipe:[{port.inode}]":
            return "it has closed our pipe"
        # For reading, too: without a reader, a write would send SIGPIPE.
        pipe = raised(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            if os.fstat(pipe).st_ino != port.inode:
                return "it has closed our pipe"
            os.write(pipe, STACK_REQUEST.pack(self._number))
        finally:
            os.close(pipe)
        return ""

    def _late(self, port: StackPort) -> str:
        """Why it did not answer in time, by what the kernel tells of the thread that answers and of the main thread."""
        after = self._schedules(port)
        if self._before is None or after is None:
            return "it did not answer in time"
        seconds = (now_ns() - self._number) / NS
        answering, main = (
            ((now.run_ns - then.run_ns) / NS, (now.runnable_ns - then.runnable_ns) / NS)
            for now, then in zip(after, self._before, strict=True)
        )
        if not answering[0] or answering[1] > seconds / 2:
            return f"it did not answer in {seconds:.1f} s: it got no core"
        return (
            f"it did not answer in {seconds:.1f} s: a call that holds the GIL runs. "
            f"Of this time its main thread was on a core for {main[0]:.1f} s"
        )

    def _schedules(self, port: StackPort) -> tuple[Schedule, Schedule] | None:
        """Of the thread that answers and of the main thread; None if the kernel does not report them."""
        answering, main = read_schedule(self.pid, port.thread), read_schedule(self.pid, self.pid)
        return (answering, main) if answering is not None and main is not None else None


def ask_workers(workers: Sequence[tuple[int, StackPort | None]]) -> list[WorkerStack]:
    """Ask all workers for their stacks at the same time. Takes at most 1.5 s.

    Args:
        workers: pid and port (None if the worker has none) of each. Workers beyond the first 64 are not asked.

    Returns:
        One result per worker, in the same order.
    """
    requests = [_StackRequest(pid, port) for pid, port in workers]
    for request in requests[_MAX_WORKERS:]:
        request.missing = f"only {_MAX_WORKERS} workers are asked"
    began = now_ns()
    for request in requests:
        request.ask()
    while not all(request.done for request in requests) and now_ns() - began < _ALL_SECONDS * NS:
        sleep(_POLL_SECONDS)
        for request in requests:
            request.read_answer()
    for request in requests:
        request.time_out()
    return [WorkerStack(i.pid, thread_state(i.pid, i.pid), i.stack, i.missing) for i in requests]
