"""Reads what ``torch.compile`` has compiled, from the records that Dynamo keeps of its newest 64 compilations.

Nothing is hooked, and Dynamo is never imported. Source: ``torch._dynamo.utils.get_compilation_metrics``, torch 2.4 and
later.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Final, NamedTuple

from telemetry.safety.errors import let_pass
from telemetry.util.clock import unix_time

_BEFORE: Final = re.compile(r"^\d+/\d+: ")
_MAX_REASON: Final = 160


class Compilation(NamedTuple):
    """One compilation of a function, or of the rest of one after a graph break.

    Attributes:
        function: such as ``forward at model.py:12``.
        again: whether the function has compiled code already, which does not fit the new arguments.
        reason: the check that failed, in torch's words; empty if torch does not say.
    """

    function: str
    seconds: float
    again: bool
    reason: str


class CompilationReader:
    """Takes the compilations since the last call.

    Attributes:
        reason: the check that failed in the newest compilation of a function that had code; None before the first.
    """

    def __init__(self) -> None:
        self._since = unix_time()
        self._newest: object = None
        self.reason: str | None = None

    def take(self) -> list[Compilation]:
        """The compilations that have ended since the last call, oldest first."""
        read = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
        if read is None:
            return []
        new: list[Any] = []
        try:
            for record in reversed(read()):
                if record is self._newest or (getattr(record, "start_time", None) or 0.0) < self._since:
                    break
                new.append(record)
            new.reverse()
            self._newest = new[-1] if new else self._newest
            found = [compilation for record in new if (compilation := _compilation(record)) is not None]
        except Exception as error:
            let_pass(error)  # torch's records have changed
            return []
        self.reason = next((one.reason for one in reversed(found) if one.again and one.reason), self.reason)
        return found


def _compilation(record: Any) -> Compilation | None:
    seconds = getattr(record, "entire_frame_compile_time_s", None)
    if seconds is None:
        seconds = (getattr(record, "duration_us", None) or 0) / 1e6
    name, file, line = record.co_name, record.co_filename, record.co_firstlineno
    if name is None or file is None:
        return Compilation("", seconds, again=False, reason="")
    again = bool(getattr(record, "cache_size", None))
    place = f"{name} at {os.path.basename(file)}:{line}"  # noqa: PTH119 - text
    return Compilation(place, seconds, again, _check(getattr(record, "recompile_reason", None) or ""))


def _check(reason: str) -> str:
    """The first check that failed, without the number of its code and the source line behind it."""
    lines = _BEFORE.sub("", reason.strip()).splitlines()
    return " ".join(lines[0].partition(" # ")[0].split())[:_MAX_REASON] if lines else ""
