"""Describes where threads and workers stand: as text for a person, and in fields that ranks can compare."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.safety.files import raised
from telemetry.seams.worker_block import STACK_REQUEST
from telemetry.sources.proc import thread_state
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.stacks import Stack, is_library, line_of, python_threads, stack_text, users_spot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.seams.loaders import LoaderRegistry
    from telemetry.seams.worker_block import SharedArea, WorkerCounters

MAX_BYTES: Final = 1 << 16
"""All stacks together have at most this many bytes."""

Places = frozenset[tuple[str, str]]
"""Pairs of a module and a function."""

DEBUGGER: Final[Places] = frozenset(
    {("bdb", "trace_dispatch"), ("pdb", "_cmdloop"), ("pydevd", "do_wait_suspend"), ("pydevd", "_do_wait_suspend")}
)
"""One of these is on the stack of a thread that a debugger has paused."""

EPOCH_END: Final[Places] = frozenset({("torch.utils.data.dataloader", "_shutdown_workers")})
"""This is on the stack of a thread that waits for workers to end; up to five seconds for each (torch 2.13)."""


def inside(stack: Stack, places: Places) -> bool:
    """Whether one of these places is on the stack."""
    return any((spot.module, spot.function) in places for spot in stack)


def place(stack: Stack) -> str:
    """Describe a stack in a few words: its innermost frame and the innermost frame of the user's own code.

    ``wait (threading.py:320) < ... < train (train.py:40)``
    """
    if not stack:
        return ""
    own = users_spot(stack)
    if own is None or own is stack[0]:
        return line_of(stack[0])
    return f"{line_of(stack[0])} < {'' if own is stack[1] else '... < '}{line_of(own)}"


# -- all stacks of a process and its workers ---------------------------------------------------------------------------


def all_stacks(training: int, workers: Sequence[WorkerStack]) -> list[str]:
    """One text per stack: the training thread's, the workers' and the other threads' except the agent's.

    Stacks at the same place share one text.

    Args:
        training: ident of the training thread.
        workers: they are asked now.
    """
    stacks = []
    for thread in sorted(python_threads(), key=lambda thread: thread.ident != training):
        kind = "training thread" if thread.ident == training else "thread"
        state = thread_state("self", thread.native) if thread.native is not None else ""
        stacks.append((f"{kind} {thread.name}{f' ({state})' if state else ''}", stack_text(thread.stack)))
    first, *others = stacks or [("training thread, which has ended", "")]
    oldest = sorted(workers, key=lambda worker: -(worker.seconds or 0.0))
    ask_workers(oldest)
    of_workers = [(worker.heading, worker.stack or f"  no stack: {worker.missing}\n") for worker in oldest]
    headings: dict[str, list[str]] = {}
    for heading, stack in [first, *of_workers, *others]:
        headings.setdefault(stack, []).append(heading)
    return _bounded([f"{', '.join(those)}\n{stack}" for stack, those in headings.items()])


def _bounded(texts: Sequence[str]) -> list[str]:
    kept: list[str] = []
    left = MAX_BYTES
    for number, text in enumerate(texts):
        if left <= 0:
            kept.append(f"{len(texts) - number} more are left out")
            break
        clean = text.encode("utf-8", "backslashreplace")[:left]
        left -= len(clean)
        kept.append(clean.decode("utf-8", "ignore").rstrip("\n"))
    return kept


# -- asks the workers ------------------------------------------------------------------------------------------------

_ALL_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.01


@dataclass(slots=True)
class WorkerStack:
    """A worker and, once it was asked, its stack.

    Attributes:
        number: its number in its loader.
        counters: what it has recorded; None if nothing.
        area: gets its answer.
        seconds: how long its fetch has taken; 0.0: it is in none, None: unknown.
        stack: its lines. The main thread's come first. If it is empty, ``missing`` is the reason.
        state: state of its main thread, in words; empty if unknown.
    """

    number: int
    pid: int
    counters: WorkerCounters | None
    area: SharedArea | None
    seconds: float | None = None
    state: str = ""
    stack: str = ""
    missing: str = ""

    @property
    def heading(self) -> str:
        """Such as ``worker 3 (pid 77, in a fetch for 61.2 s, sleeping)``."""
        seconds = self.seconds
        doing = "" if seconds is None else f"in a fetch for {seconds:.1f} s" if seconds else "in no fetch"
        return f"worker {self.number} ({', '.join(part for part in (f'pid {self.pid}', doing, self.state) if part)})"


def live_workers(loaders: LoaderRegistry) -> list[WorkerStack]:
    """The workers of all live iterators, those of training loaders first."""
    found = []
    for loader in sorted(loaders.live(), key=lambda handle: not handle.training):
        known = {worker.pid: worker for worker in loader.block.read()} if loader.block is not None else {}
        for number, pid in enumerate(loader.pids):
            worker = WorkerStack(number, pid, known.get(pid), None)
            if worker.counters is not None and loader.block is not None:
                since = worker.counters.fetching_since_ns
                worker.area = loader.block.stack_area(worker.counters.worker)
                worker.seconds = (now_ns() - since) / NS if since else 0.0
            found.append(worker)
    return found


def ask_workers(workers: Sequence[WorkerStack]) -> None:
    """Ask all workers for their stacks at the same time. Takes at most 1.5 s.

    A thread of the worker is woken through a pipe, and answers in memory. No signal is sent: it would interrupt the
    worker's system calls, and C libraries take that for an error. The pipe is opened through /proc, which allows it for
    files of the same user's processes. ptrace is not needed.
    """
    number = now_ns()
    left: list[tuple[WorkerStack, SharedArea]] = []
    for worker in workers:
        worker.state = thread_state(worker.pid, worker.pid)
        if worker.counters is None or worker.area is None or not worker.counters.stack_pipe:
            worker.missing = "it was started before the agent, or could not be made ready to be asked"
        elif _wake(worker.pid, worker.counters, number):
            left.append((worker, worker.area))
        else:
            worker.missing = "it has ended, or has closed our pipe"
    while left and now_ns() - number < _ALL_SECONDS * NS:
        sleep(_POLL_SECONDS)
        for worker, area in left:
            found = area.read()
            if found is not None and (found.session, found.pid) == (number, worker.pid):
                worker.stack = found.content.decode("utf-8", "replace")
        left = [each for each in left if not each[0].stack]
    for worker, _ in left:
        worker.missing = f"it did not answer in {_ALL_SECONDS} s: it is stopped, has no core, or a call holds the GIL"


def _wake(pid: int, counters: WorkerCounters, number: int) -> bool:
    """Write the request into the worker's pipe. Returns whether it has one."""
    path = f"/proc/{pid}/fd/{counters.stack_pipe}"
    try:
        # Look first, because opening another file may change something for its owner.
        if str(Path(path).readlink()) != f"pipe:[{counters.stack_inode}]":
            return False
        # Open it for reading, too: without a reader, a write would send SIGPIPE.
        pipe = raised(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            os.write(pipe, STACK_REQUEST.pack(number))
        finally:
            os.close(pipe)
    except OSError:  # also if the pipe is full
        return False
    return True


# -- one place -------------------------------------------------------------------------------------------------------

_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StuckPlace:
    """The innermost line of the user's own code (``data.py:88``), the function called there, and the thread's state.

    The texts are valid UTF-8 even if a file's name is not, because other nodes read them.
    """

    where: str | None
    call: str | None
    state: str = ""


def place_of(stack: Stack) -> StuckPlace:
    """Where a thread of this process stands."""
    own = users_spot(stack)
    if own is None:
        return StuckPlace(None, stack[0].function if stack else None)
    return StuckPlace(_line(own.file, own.line), stack[0].function)


def fetch_in(workers: Sequence[WorkerStack]) -> StuckPlace | None:
    """Where the worker with the longest fetch stands, once it was asked; None without a fetch."""
    worker = max(workers, key=lambda worker: worker.seconds or 0.0, default=None)
    if worker is None or not worker.seconds:
        return None
    found = _FRAME.findall(worker.stack)
    own = next((_line(file, line) for file, line, _ in found if not is_library(file)), None)
    return StuckPlace(own, found[0][2] if found else None, worker.state)


def _line(file: str, line: int | str) -> str:
    name = f"{os.path.basename(file)}:{line}"  # noqa: PTH119 - text
    return name.encode("utf-8", "backslashreplace").decode()


def stack_hash(stack: Stack) -> str:
    """A hash that all ranks at the same place of the same code share."""
    text = "\n".join(f"{os.path.basename(s.file)}:{s.line}:{s.function}" for s in stack)  # noqa: PTH119 - text
    return f"{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"
