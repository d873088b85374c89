"""How this process ends, as far as it tells: an exception that nobody caught, an exit status, or another program.

Python prints an exception that nobody catches, keeps it in `sys`, and only then calls the functions of `atexit`. So it
is read there, and neither a hook nor a handler of ours is involved. The exit status of ``sys.exit`` is kept nowhere:
``telemetry run`` sees it pass.

Nor does anything tell afterwards that the process has executed another program, such as its own script anew: it keeps
its pid and its start, `atexit` is not called, and the agent is gone at once, as if it were killed. So the agent hooks
the functions of ``os`` that do it, and ends before.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

_PEER_LOST: Final = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat",
    re.IGNORECASE,
)
"""In the text of one of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = re.compile(
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)",
    re.IGNORECASE | re.DOTALL,
)
"""Gloo's are plain ones, which also come out of ``backward()``. Their text names the line of gloo's source."""

_MAX_TEXT: Final = 20_000


class EndEvidence:
    """Filled in before the last line of the log is written.

    Attributes:
        process_ends: whether the interpreter ends, and not only the agent.
        replaced: whether this process is about to execute another program.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._exception: BaseException | None = None
        self.replaced = False
        self.process_ends = False

    def leaving(self, code: object) -> None:
        """The script ends with this argument of ``sys.exit``."""
        # The kernel keeps the lowest byte: `sys.exit(256)` is a success.
        self._status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1

    def at_exit(self) -> None:
        """The interpreter ends. To be called by `atexit`, and nowhere else: before, an older exception may be kept."""
        self.process_ends = True
        if not hasattr(sys, "ps1"):
            last: Any = getattr(sys, "last_value", None)
            self._exception = last if isinstance(last, BaseException) else None

    @property
    def finished(self) -> bool:
        """Whether nothing tells that its work is not done."""
        return self._exception is None and not self._status and not self.replaced

    def fields(self) -> dict[str, Any]:
        """Of the last line of the log. What is not known is absent."""
        found: dict[str, Any] = {}
        if self._status is not None:
            found["exit_status"] = self._status
        if self._exception is not None:
            found["exception"] = type(self._exception).__name__
            found["lost_peer"] = _lost_peer(self._exception)
        if self.replaced:
            found["replaced"] = True
        self._exception = None
        return found


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception tells that another process of the job is gone, which then ended first.

    Only torch.distributed's exceptions tell that: the words of others are about anything, such as a data set's server.
    """
    kind = type(error)
    try:
        if kind.__module__ == "torch.distributed":
            return bool(_PEER_LOST.search(str(error)[:_MAX_TEXT]))
        return kind is RuntimeError and bool(_GLOO_PEER_LOST.search(str(error)[:_MAX_TEXT]))
    except Exception:
        return False
