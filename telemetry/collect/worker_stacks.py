"""Ask DataLoader workers where they stand: one signal, an answer in memory, and never a worker that is hurt.

A signal that a process does not handle ends it. Right before each one the process is looked at: that it is a worker of
ours, that the answer's file is the one it has opened for it, and that it handles the signal. No ptrace: as the same
user, what a process has opened can be read through /proc.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.clock import NS, now_ns
from telemetry.collect.proc import is_worker_of_ours, read_schedule, read_signals, read_stat, thread_state
from telemetry.records import STACK_END, StackPort

if TYPE_CHECKING:
    from collections.abc import Sequence

_ASK_SECONDS: Final = 0.4
_ALL_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.01

_MOST_WORKERS: Final = 64
_MOST_BYTES: Final = 1 << 16

_IN_C_NS: Final = 50_000_000
"""A main thread that has been on a core for so long without answering is in a C call, not in Python."""

_HEADING: Final = b"Stack (most recent call first):\n"


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """Where one worker stands.

    Attributes:
        stack: its lines, the main thread's first; empty where there is none, and ``missing`` says why.
        state: of its main thread, in words; empty where it is not told.
    """

    pid: int
    state: str
    stack: str
    missing: str


class _Inquiry:
    """One worker that is being asked."""

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
        """Send the signal that Python handles."""
        if self.port is None:
            self.missing = "it was started before the agent, or could not be made ready to be asked"
        elif self._send(self.port.ask):
            schedule = read_schedule(self.pid, self.pid)
            self._asked_run_ns = schedule.run_ns if schedule is not None else None

    def force(self) -> None:
        """Send the signal that C handles, to a worker that is certain to be inside a C call."""
        if self.done or self._forced or self.port is None:
            return
        signals = read_signals(self.pid)
        if signals is None:
            self.missing = "it has ended"
        elif not signals.pending >> (self.port.ask - 1) & 1 and (signals.state in "SD" or self._ran_on()):
            self._forced = self._send(self.port.force)

    def look(self) -> None:
        """Take the answer, if it is all there."""
        if self.done or self.port is None:
            return
        try:
            with open(self._path, "rb") as file:  # noqa: PTH123
                text = file.read(_MOST_BYTES + len(STACK_END))
        except OSError:
            self.missing = "it has ended"
            return
        if text.endswith(STACK_END):
            self._take(text)
        elif text and self._forced:
            signals, bit = read_signals(self.pid), 1 << (self.port.force - 1)
            if signals is not None and not (signals.pending | signals.blocked) & bit:  # the handler has returned
                self._take(text)

    def give_up(self) -> None:
        """The time is over."""
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
        """Why the signal must not be sent; empty if it may."""
        assert self.port is not None  # noqa: S101 - who has no port is not asked
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
        assert self.port is not None  # noqa: S101 - who has no port is not asked
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
    """Ask workers, all at once. Takes a second and a half at most, whatever they do.

    Args:
        workers: pid and port (None where the worker has none) of each; those beyond the first 64 are not asked.

    Returns:
        One for each that was given, in the same order.
    """
    inquiries = [_Inquiry(pid, port) for pid, port in workers]
    for inquiry in inquiries[_MOST_WORKERS:]:
        inquiry.missing = f"only {_MOST_WORKERS} workers are asked"
    began = now_ns()
    for inquiry in inquiries[:_MOST_WORKERS]:
        inquiry.ask()
    while not all(inquiry.done for inquiry in inquiries):
        passed = (now_ns() - began) / NS
        if passed >= _ALL_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
        for inquiry in inquiries:
            inquiry.look()
            if passed >= _ASK_SECONDS:
                inquiry.force()
    for inquiry in inquiries:
        inquiry.give_up()
    return [WorkerStack(i.pid, thread_state(i.pid, i.pid), i.stack, i.missing) for i in inquiries]
