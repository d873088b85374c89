"""How this process ends: by itself, by an exception or an exit status, or by executing another program."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from telemetry.log_lines import ABSENT, RunEndLine

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
    def finished(self) -> bool:
        """Whether its work is done, as far as we know."""
        return self._exception is None and not self._status and not self.replaced

    def line(self) -> RunEndLine:
        """What the last line of the log has of it. What is not known is absent."""
        status, error = self._status, self._exception
        self._exception = None
        return RunEndLine(
            exit_status=ABSENT if status is None else status,
            exception=ABSENT if error is None else type(error).__name__,
            lost_peer=ABSENT if error is None else _lost_peer(error),
            replaced=self.replaced or ABSENT,
        )


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
