"""How this process ends: by itself, by an exception or by an exit status; and what torch's exceptions mean."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import Any, Final

from telemetry.log.lines import ABSENT, GpuMemoryFull, RunEndLine
from telemetry.model.records import FAILURES, GPU_MEMORY_FULL, SHARED_MEMORY_FULL
from telemetry.util.stacks import is_library

_MAX_TEXT: Final = 20_000
_MAX_CHAIN: Final = 8
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only its size is read

_SIZES: Final = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE: Final = r"(\d{1,9}(?:\.\d+)?) (bytes|[kmg]ib)"
_OUT_OF_MEMORY: Final = (
    f"tried to allocate {_SIZE}.*?total capacity of {_SIZE} of which {_SIZE} is free.*?of the allocated memory {_SIZE} "
    f"is allocated by pytorch.*?and {_SIZE} is reserved by pytorch but unallocated"
)
"""Matches the text of torch's exception, from torch 2.1 on."""

_PEER_LOST: Final = (
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat"
)
"""Matches the text of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = (
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)"
)
"""Gloo raises plain exceptions, also out of ``backward()``. Their text contains the line of gloo's source."""


class EndEvidence:
    """What is known of how this process ends: an uncaught exception or an exit status.

    Python prints an uncaught exception, keeps it in `sys`, and only then calls the functions of `atexit`. So it is read
    there, and we need neither a hook nor a handler. Nothing keeps the exit status of ``sys.exit``: ``telemetry run``
    sees it pass. A process that executes another program is gone at once, as after a kill.

    ``process_ends``: whether the interpreter ends. False: only the agent ends.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._exception: BaseException | None = None
        self._settled: RunEndLine | None = None
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
            shared_memory: Any = ABSENT
            gpu_memory = None if error is None or failure != GPU_MEMORY_FULL else _gpu_memory(error)
            if failure == SHARED_MEMORY_FULL:
                with suppress(OSError):
                    size = os.statvfs(_SHARED_MEMORY)
                    shared_memory = size.f_blocks * size.f_frsize
            self._settled = RunEndLine(
                exit_status=ABSENT if self._status is None else self._status,
                exception=ABSENT if error is None else type(error).__name__,
                exception_at=ABSENT if error is None else _users_line(error),
                failure=failure or ABSENT,
                shared_memory_bytes=shared_memory,
                gpu_memory=gpu_memory or ABSENT,
                lost_peer=ABSENT if error is None else _lost_peer(error),
            )
        return self._settled


def _users_line(error: BaseException) -> str | None:
    """The innermost line of the user's code in an exception; None if there is none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = f"{code.co_name} at {os.path.basename(code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119 - text
        trace = trace.tb_next
    return found


def failure_of(error: BaseException) -> str | None:
    """What an exception of torch means, see `FAILURES`. Its text is only matched, because it may hold anything."""
    texts = _texts(error)
    return next(
        (name for name, each in FAILURES.items() if any(re.search(each.told, text, re.DOTALL) for text in texts)), None
    )


def _texts(error: BaseException) -> list[str]:
    """The texts of an exception and of those that it follows, as far as they may be torch's."""
    texts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(texts) < _MAX_CHAIN:
        if isinstance(each, (RuntimeError, MemoryError, OSError)):
            texts.append(_text(each))
        each = each.__cause__ or each.__context__
    return texts


def _gpu_memory(error: BaseException) -> GpuMemoryFull | None:
    """The sizes in the text of torch's exception; None if it has no such text."""
    for text in _texts(error):
        found = re.search(_OUT_OF_MEMORY, text, re.DOTALL)
        if found is not None:
            sizes = zip(found.groups()[::2], found.groups()[1::2], strict=True)
            return GpuMemoryFull(*(round(float(number) * _SIZES[unit]) for number, unit in sizes))
    return None


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process of the job ended first.

    Only torch.distributed's exceptions are read: other ones may name any peer, such as a data set's server.
    """
    if type(error).__module__ == "torch.distributed":
        return bool(re.search(_PEER_LOST, _text(error)))
    return type(error) is RuntimeError and bool(re.search(_GLOO_PEER_LOST, _text(error), re.DOTALL))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_TEXT].lower()
    except Exception:  # the script's own class may raise anything
        return ""
