"""Stacks of the training thread, its workers and the other threads, as text for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.sources.proc import thread_state
from telemetry.sources.workers import ask_workers
from telemetry.util.stacks import Stack, line_of, python_threads, stack_text, users_spot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.hooks.worker_block import StackPort

MAX_BYTES: Final = 1 << 16
"""Of all stacks together."""

Places = frozenset[tuple[str, str]]
"""Modules and functions."""

DEBUGGER: Final[Places] = frozenset(
    {("bdb", "trace_dispatch"), ("pdb", "_cmdloop"), ("pydevd", "do_wait_suspend"), ("pydevd", "_do_wait_suspend")}
)
"""On the stack of a thread that a debugger has paused."""

EPOCH_END: Final[Places] = frozenset({("torch.utils.data.dataloader", "_shutdown_workers")})
"""On the stack of a thread that waits for workers to end; for each up to five seconds (torch 2.13)."""


def inside(stack: Stack, places: Places) -> bool:
    """Whether one of these places is on the stack."""
    return any((spot.module, spot.function) in places for spot in stack)


def place(stack: Stack) -> str:
    """A stack in a few words: its innermost frame and the innermost frame of the user's own code.

    ``wait (threading.py:320) < ... < train (train.py:40)``
    """
    if not stack:
        return ""
    own = users_spot(stack)
    if own is None or own is stack[0]:
        return line_of(stack[0])
    return f"{line_of(stack[0])} < {'' if own is stack[1] else '... < '}{line_of(own)}"


def all_stacks(training: int, workers: Sequence[tuple[int, int, float | None, StackPort | None]]) -> list[str]:
    """One text per stack: of the training thread, the workers and the other threads except the agent's.

    Stacks at the same place share one text.

    Args:
        training: ident of the training thread.
        workers: number, pid, seconds of the fetch in progress (None: unknown, 0: none) and port of each worker.
    """
    first, *others = _threads(training) or [("training thread, which has ended", "")]
    return _bounded(_grouped([first, *_workers(workers), *others]))


def _threads(training: int) -> list[tuple[str, str]]:
    """Heading and stack of every thread except the agent's, the training thread first."""
    threads = sorted(python_threads(), key=lambda thread: thread.ident != training)
    stacks = []
    for thread in threads:
        kind = "training thread" if thread.ident == training else "thread"
        stacks.append((f"{kind} {thread.name}{_state('self', thread.native)}", stack_text(thread.stack)))
    return stacks


def _state(process: str, native: int | None) -> str:
    state = thread_state(process, native) if native is not None else ""
    return f" ({state})" if state else ""


def _workers(workers: Sequence[tuple[int, int, float | None, StackPort | None]]) -> list[tuple[str, str]]:
    """Heading and stack of every worker, the one with the longest running fetch first."""
    oldest = sorted(workers, key=lambda worker: -(worker[2] or 0.0))
    answers = ask_workers([(pid, port) for _, pid, _, port in oldest])
    return [
        (_heading(number, pid, seconds, answer.state), answer.stack or f"  no stack: {answer.missing}\n")
        for (number, pid, seconds, _), answer in zip(oldest, answers, strict=True)
    ]


def _heading(number: int, pid: int, seconds: float | None, state: str) -> str:
    doing = "" if seconds is None else f"in a fetch for {seconds:.1f} s" if seconds else "in no fetch"
    return f"worker {number} ({', '.join(part for part in (f'pid {pid}', doing, state) if part)})"


def _grouped(stacks: Sequence[tuple[str, str]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for heading, stack in stacks:
        groups.setdefault(stack, []).append(heading)
    return [f"{', '.join(headings)}\n{stack}" for stack, headings in groups.items()]


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
