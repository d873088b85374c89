"""Requests stacks from DataLoader workers: a signal is sent, and the worker writes its stack into a file in memory.

A signal ends a process that does not handle it. So right before each signal three things are checked: the process is a
worker of this process, the file for the answer is the one that the worker opened, and the worker handles the signal.
ptrace is not needed, because files that a process of the same user has opened can be read through /proc.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.collect.procfs import is_worker_of_ours, read_schedule, read_signals, read_stat, thread_state
from telemetry.core.clock import NS, now_ns
from telemetry.core.worker_records import STACK_END, StackPort

if TYPE_CHECKING:
    from collections.abc import Sequence

_ASK_SECONDS: Final = 0.4
_ALL_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.01

_MAX_WORKERS: Final = 64
_MAX_BYTES: Final = 1 << 16

_IN_C_NS: Final = 50_000_000
"""A main thread that has run for this long without answering is in a C call, not in Python."""

_HEADING: Final = b"Stack (most recent call first):\n"


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
        self.missing = ""
        self._asked_run_ns: int | None = None
        self._forced = False
        self._path = f"/proc/{pid}/fd/{port.file}" if port is not None else ""

    @property
    def done(self) -> bool:
        return bool(self.stack or self.missing)

    def ask(self) -> None:
        """Send the signal that has a Python handler."""
        if self.port is None:
            self.missing = "it was started before the agent, or could not be made ready to be asked"
        elif self._send(self.port.ask):
            schedule = read_schedule(self.pid, self.pid)
            self._asked_run_ns = schedule.run_ns if schedule is not None else None

    def force(self) -> None:
        """Send the signal that has a C handler, if the worker is certainly inside a C call."""
        if self.done or self._forced or self.port is None:
            return
        signals = read_signals(self.pid)
        if signals is None:
            self.missing = "it has ended"
        elif not signals.pending >> (self.port.ask - 1) & 1 and (signals.state in "SD" or self._ran_on()):
            self._forced = self._send(self.port.force)

    def read_answer(self) -> None:
        """Take the answer if it is complete."""
        if self.done or self.port is None:
            return
        try:
            with open(self._path, "rb") as file:  # noqa: PTH123
                text = file.read(_MAX_BYTES + len(STACK_END))
        except OSError:
            self.missing = "it has ended"
            return
        if text.endswith(STACK_END):
            self._take(text)
        elif text and self._forced:
            signals, bit = read_signals(self.pid), 1 << (self.port.force - 1)
            if signals is not None and not (signals.pending | signals.blocked) & bit:  # the handler has returned
                self._take(text)

    def time_out(self) -> None:
        """Record that the worker did not answer in time."""
        if not self.done:
            self.missing = "it did not answer in time"

    def _send(self, signum: int) -> bool:
        self.missing = self._unsafe(signum)
        if self.missing:
            return False
        try:
            if not self._forced and self.port is not None and signum == self.port.ask:
                os.truncate(self._path, 0)
            os.kill(self.pid, signum)
        except OSError as error:
            self.missing = f"it cannot be asked ({error.strerror})"
        return not self.missing

    def _unsafe(self, signum: int) -> str:
        """The reason why the signal must not be sent; empty if it may be sent."""
        assert self.port is not None  # noqa: S101 - a worker without a port is not asked
        stat = read_stat(self.pid)
        signals = read_signals(self.pid)
        if stat is None or signals is None:
            return "it has ended"
        if not is_worker_of_ours(stat.parent):
            return "it has ended, and its pid is another process's"
        if signals.state in "Tt":
            return "it is stopped, by a signal or a debugger"
        bit = 1 << (signum - 1)
        if not signals.caught & bit or signals.blocked & bit:
            return "it does not take our signal any more: its handler is gone, or it blocks it"
        return "" if self._file_is_there() else "it has closed our file"

    def _file_is_there(self) -> bool:
        assert self.port is not None  # noqa: S101 - a worker without a port is not asked
        path = Path(self._path)
        try:
            return path.stat().st_ino == self.port.inode and "telemetry-stacks" in str(path.readlink())
        except OSError:
            return False

    def _ran_on(self) -> bool:
        schedule = read_schedule(self.pid, self.pid)
        return (
            schedule is not None and self._asked_run_ns is not None and schedule.run_ns - self._asked_run_ns >= _IN_C_NS
        )

    def _take(self, text: bytes) -> None:
        plain = text.replace(STACK_END, b"").replace(_HEADING, b"")
        self.stack = plain.decode("utf-8", "replace")


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
    for request in requests[:_MAX_WORKERS]:
        request.ask()
    while not all(request.done for request in requests):
        passed = (now_ns() - began) / NS
        if passed >= _ALL_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
        for request in requests:
            request.read_answer()
            if passed >= _ASK_SECONDS:
                request.force()
    for request in requests:
        request.time_out()
    return [WorkerStack(i.pid, thread_state(i.pid, i.pid), i.stack, i.missing) for i in requests]
