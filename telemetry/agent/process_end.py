"""How this process ends: by itself, by an exception or an exit status, or by executing another program."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import Any, Final

from telemetry.log_lines import ABSENT, RunEndLine
from telemetry.records import GPU_MEMORY_FULL, LOADER_TIMEOUT, SHARED_MEMORY_FULL, WORKER_ENDED, WORKER_KILLED
from telemetry.util.stacks import is_library

_PEER_LOST: Final = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat",
    re.IGNORECASE,
)
"""Matches the text of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = re.compile(
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)",
    re.IGNORECASE | re.DOTALL,
)
"""Gloo raises plain exceptions, also out of ``backward()``. Their text contains the line of gloo's source."""

_MAX_TEXT: Final = 20_000


class EndEvidence:
    """What is known of how this process ends: an uncaught exception, an exit status, or another program.

    Python prints an uncaught exception, keeps it in `sys`, and only then calls the functions of `atexit`. So it is read
    there, and we need neither a hook nor a handler. Nothing keeps the exit status of ``sys.exit``: ``telemetry run``
    sees it pass.

    A process that executes another program, such as its own script anew, leaves no trace: it keeps its pid and its
    start, `atexit` is not called, and the agent is gone at once, as after a kill. So the agent hooks the functions of
    ``os`` that do it, and ends before.

    Attributes:
        process_ends: whether the interpreter ends. False: only the agent ends.
        replaced: whether this process is about to execute another program.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._exception: BaseException | None = None
        self._settled: RunEndLine | None = None
        self.replaced = False
        self.process_ends = False

    def leaving(self, code: object) -> None:
        """Take the argument of ``sys.exit`` with which the script ends."""
        # The kernel keeps the lowest byte: `sys.exit(256)` is a success.
        self._status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1

    def at_exit(self) -> None:
        """Take the uncaught exception. Only `atexit` may call this: before that, `sys` may hold an older exception."""
        self.process_ends = True
        if not hasattr(sys, "ps1"):
            last: Any = getattr(sys, "last_value", None)
            self._exception = last if isinstance(last, BaseException) else None

    @property
    def settled(self) -> RunEndLine:
        """What the last line of the log has of it. Forgets the exception, whose frames keep objects of the script."""
        if self._settled is None:
            error, self._exception = self._exception, None
            failure = None if error is None else failure_of(error)
            self._settled = RunEndLine(
                exit_status=ABSENT if self._status is None else self._status,
                exception=ABSENT if error is None else type(error).__name__,
                exception_at=ABSENT if error is None else _users_line(error),
                failure=ABSENT if failure is None else failure,
                shared_memory_bytes=_size_of_shared_memory() if failure == SHARED_MEMORY_FULL else ABSENT,
                lost_peer=ABSENT if error is None else _lost_peer(error),
                replaced=self.replaced or ABSENT,
            )
        return self._settled


def _size_of_shared_memory() -> Any:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return ABSENT
    return found.f_blocks * found.f_frsize


def _users_line(error: BaseException) -> str | None:
    """The innermost line of the user's code in an exception; None if there is none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = f"{code.co_name} at {os.path.basename(code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119 - text
        trace = trace.tb_next
    return found


_FAILURES: Final = (
    (SHARED_MEMORY_FULL, r"killed by signal: bus error|(shared memory|/torch_\d+).*no space left on device"),
    (LOADER_TIMEOUT, r"dataloader timed out after"),
    (WORKER_KILLED, r"dataloader worker \(pid.*killed by signal: killed"),
    (WORKER_ENDED, r"dataloader worker \(pid.*(exited unexpectedly|killed by signal)"),
    (GPU_MEMORY_FULL, r"cuda out of memory"),
)
_MAX_CHAIN: Final = 8
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only its size is read


def failure_of(error: BaseException) -> str | None:
    """What an exception of torch means, see `FAILURES`. Its text is only matched, because it may hold anything."""
    texts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(texts) < _MAX_CHAIN:
        if isinstance(each, (RuntimeError, MemoryError, OSError)):
            with suppress(Exception):
                texts.append(str(each)[:_MAX_TEXT].lower())
        each = each.__cause__ or each.__context__
    return next((kind for kind, told in _FAILURES if any(re.search(told, text, re.DOTALL) for text in texts)), None)


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process of the job ended first.

    Only torch.distributed's exceptions are read: other ones may name any peer, such as a data set's server.
    """
    kind = type(error)
    try:
        if kind.__module__ == "torch.distributed":
            return bool(_PEER_LOST.search(str(error)[:_MAX_TEXT]))
        return kind is RuntimeError and bool(_GLOO_PEER_LOST.search(str(error)[:_MAX_TEXT]))
    except Exception:
        return False
