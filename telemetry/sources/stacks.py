"""Describes where threads and workers stand: as text for a person, and in fields that ranks can compare."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.hooks.worker_block import STACK_REQUEST
from telemetry.sources.proc import is_worker_of_ours, read_schedule, read_stat, thread_state
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.files import raised
from telemetry.util.stacks import Stack, is_library, line_of, python_threads, stack_text, users_spot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.hooks.worker_block import StackPort
    from telemetry.sources.proc import Schedule

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


def all_stacks(training: int, workers: Sequence[tuple[int, int, float | None, StackPort | None]]) -> list[str]:
    """One text per stack: the training thread's, the workers' and the other threads' except the agent's.

    Stacks at the same place share one text.

    Args:
        training: ident of the training thread.
        workers: number, pid, seconds of the fetch in progress (None: unknown, 0: none) and port of each worker.
    """
    first, *others = _threads(training) or [("training thread, which has ended", "")]
    headings: dict[str, list[str]] = {}
    for heading, stack in [first, *_workers(workers), *others]:
        headings.setdefault(stack, []).append(heading)
    return _bounded([f"{', '.join(those)}\n{stack}" for stack, those in headings.items()])


def _threads(training: int) -> list[tuple[str, str]]:
    """Heading and stack of every thread except the agent's. The training thread comes first."""
    stacks = []
    for thread in sorted(python_threads(), key=lambda thread: thread.ident != training):
        kind = "training thread" if thread.ident == training else "thread"
        state = thread_state("self", thread.native) if thread.native is not None else ""
        stacks.append((f"{kind} {thread.name}{f' ({state})' if state else ''}", stack_text(thread.stack)))
    return stacks


def _workers(workers: Sequence[tuple[int, int, float | None, StackPort | None]]) -> list[tuple[str, str]]:
    """Heading and stack of every worker. The worker with the longest running fetch comes first."""
    oldest = sorted(workers, key=lambda worker: -(worker[2] or 0.0))
    answers = ask_workers([(pid, port) for _, pid, _, port in oldest])
    return [
        (_heading(number, pid, seconds, answer.state), answer.stack or f"  no stack: {answer.missing}\n")
        for (number, pid, seconds, _), answer in zip(oldest, answers, strict=True)
    ]


def _heading(number: int, pid: int, seconds: float | None, state: str) -> str:
    doing = "" if seconds is None else f"in a fetch for {seconds:.1f} s" if seconds else "in no fetch"
    return f"worker {number} ({', '.join(part for part in (f'pid {pid}', doing, state) if part)})"


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
_MAX_WORKERS: Final = 64


@dataclass(slots=True)
class WorkerStack:
    """The stack of one worker.

    Attributes:
        stack: its lines. The main thread's come first. If it is empty, ``missing`` is the reason.
        state: state of its main thread, in words; empty if unknown.
    """

    pid: int
    state: str = ""
    stack: str = ""
    missing: str = ""


def ask_workers(workers: Sequence[tuple[int, StackPort | None]]) -> list[WorkerStack]:
    """Ask all workers for their stacks at the same time. Takes at most 1.5 s.

    A thread of the worker is woken through a pipe, and answers in memory. No signal is sent: it would interrupt the
    worker's system calls, and C libraries take that for an error. The pipe is opened through /proc, which allows it for
    files of the same user's processes. ptrace is not needed.

    Args:
        workers: pid and port (None if the worker has none) of each. Only the first 64 workers are asked.

    Returns:
        One result per worker, in the same order.
    """
    answers, waiting = [], []
    for place, (pid, port) in enumerate(workers):
        answer = WorkerStack(pid)
        answers.append(answer)
        if place >= _MAX_WORKERS:
            answer.missing = f"only {_MAX_WORKERS} workers are asked"
        elif port is None:
            answer.missing = "it was started before the agent, or could not be made ready to be asked"
        else:
            before, number = _schedules(pid, port), now_ns()
            answer.missing = _silent(pid) or _wake(pid, port, number)
            if not answer.missing:
                waiting.append((answer, port, number, before))
    began, left = now_ns(), waiting
    while left and now_ns() - began < _ALL_SECONDS * NS:
        sleep(_POLL_SECONDS)
        for answer, port, number, _ in left:
            found = port.area.read()
            if found is not None and (found.session, found.pid) == (number, answer.pid):
                answer.stack = found.content.decode("utf-8", "replace")
        left = [each for each in left if not each[0].stack]
    for answer, port, number, before in left:
        answer.missing = _silent(answer.pid) or _late(answer.pid, port, number, before)
    for answer in answers:
        answer.state = thread_state(answer.pid, answer.pid)
    return answers


def _silent(pid: int) -> str:
    """Why no thread of this process can answer; empty if one can."""
    stat = read_stat(pid)
    if stat is None:
        return "it has ended"
    if not is_worker_of_ours(stat.parent):
        return "it has ended, and its pid is another process's"
    stopped = thread_state(pid, pid) in {"stopped", "traced"}
    return "it is stopped, by a signal or a debugger" if stopped else ""


def _wake(pid: int, port: StackPort, number: int) -> str:
    """Write the request into the worker's pipe. Returns why it was not written; empty if it was."""
    closed, path = "it has closed our pipe", f"/proc/{pid}/fd/{port.pipe}"
    try:
        # Look first, because opening another file may change something for its owner.
        if str(Path(path).readlink()) != f"pipe:[{port.inode}]":
            return closed
        # Open it for reading, too: without a reader, a write would send SIGPIPE.
        pipe = raised(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            if os.fstat(pipe).st_ino != port.inode:
                return closed
            os.write(pipe, STACK_REQUEST.pack(number))
        finally:
            os.close(pipe)
    except FileNotFoundError:
        return closed
    except OSError as error:  # also if the pipe is full
        return f"it cannot be asked ({error.strerror})"
    return ""


def _late(pid: int, port: StackPort, number: int, before: tuple[Schedule, Schedule] | None) -> str:
    """Why it did not answer in time, judging by the kernel's figures for its answering and its main thread."""
    after = _schedules(pid, port)
    if before is None or after is None:
        return "it did not answer in time"
    seconds = (now_ns() - number) / NS
    (answering, main), (answering_before, main_before) = after, before
    waited = (answering.runnable_ns - answering_before.runnable_ns) / NS
    if answering.run_ns == answering_before.run_ns or waited > seconds / 2:
        return f"it did not answer in {seconds:.1f} s: it got no core"
    return (
        f"it did not answer in {seconds:.1f} s: a call that holds the GIL runs. "
        f"Of this time its main thread was on a core for {(main.run_ns - main_before.run_ns) / NS:.1f} s"
    )


def _schedules(pid: int, port: StackPort) -> tuple[Schedule, Schedule] | None:
    """The figures of the answering and the main thread; None if the kernel does not report them."""
    answering, main = read_schedule(pid, port.thread), read_schedule(pid, pid)
    return (answering, main) if answering is not None and main is not None else None


# -- one place -------------------------------------------------------------------------------------------------------

_DISTRIBUTED: Final = f"{os.sep}torch{os.sep}distributed{os.sep}"
_NO_WAITING: Final = tuple(f"{_DISTRIBUTED}{part}{os.sep}" for part in ("checkpoint", "elastic", "rpc"))
_DDP: Final = f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py"
_BACKWARD: Final = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
_WRAPPERS: Final = frozenset({"wrapper", "inner", "_fn", "<lambda>"})

_WORKER: Final = re.compile(r"worker \d+ \(pid \d+, in a fetch for [0-9.]+ s(?:, ([^)]*))?\)")
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


def collective_in(stack: Stack) -> str | None:
    """The collective that a thread is in, by its innermost frames; empty for a backward pass or DDP, else None.

    A backward pass may also compute.
    """
    file = stack[0].file if stack else ""
    if file.endswith((_BACKWARD, _DDP)):
        return ""
    if _DISTRIBUTED not in file or any(part in file for part in _NO_WAITING):
        return None
    inner = [spot for spot in stack if _DISTRIBUTED in spot.file]
    return next((spot.function for spot in inner if spot.function not in _WRAPPERS), "")


def in_backward(stack: Stack) -> bool:
    """Whether the innermost frame is the backward pass, which may wait for other ranks or compute."""
    return bool(stack) and stack[0].file.endswith(_BACKWARD)


def fetch_in(texts: Sequence[str]) -> StuckPlace | None:
    """Where the worker with the longest fetch stands, from the stacks of a stuck run; None without a fetch."""
    for text in texts:
        heading, _, frames = text.partition("\n")
        worker = _WORKER.search(heading)
        if worker is None:
            continue
        found = _FRAME.findall(frames)
        own = next(((file, line) for file, line, _ in found if not is_library(file)), None)
        if own is not None:
            return StuckPlace(_line(*own), found[0][2], worker.group(1) or "")
        return StuckPlace(None, found[0][2] if found else None, worker.group(1) or "")
    return None


def _line(file: str, line: int | str) -> str:
    name = f"{os.path.basename(file)}:{line}"  # noqa: PTH119 - text
    return name.encode("utf-8", "backslashreplace").decode()


def stack_hash(stack: Stack) -> str:
    """A hash that all ranks at the same place of the same code share."""
    text = "\n".join(f"{os.path.basename(s.file)}:{s.line}:{s.function}" for s in stack)  # noqa: PTH119 - text
    return f"{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}"
