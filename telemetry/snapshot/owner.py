"""Whose a half-done export is: a name that no other process has, and whether that process is gone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_STALE_SECONDS: Final = 3600.0
"""What another machine or container has not touched for this long is left over: an export takes seconds."""

_NAME: Final = re.compile(r"(?P<host>.+?)-(?P<pid>\d+)-(?P<ticks>\d+|None)(-ns(?P<namespace>\d+))?")


@dataclass(frozen=True, slots=True)
class Here:
    """Where this process runs.

    Attributes:
        host: name of the node.
        namespace: of process ids; two containers on a node may both have a process 7.
        ticks: when a process began, given its pid; None if it runs no more.
    """

    host: str
    namespace: int
    ticks: Callable[[int], int | None]

    def name(self, pid: int) -> str:
        """The name of a process that runs here."""
        return f"{self.host}-{pid}-{self.ticks(pid)}-ns{self.namespace}"

    def is_gone(self, owner: str, age: float) -> bool:
        """Whether a process certainly runs no more.

        Args:
            owner: its `name`; earlier versions left the namespace out.
            age: seconds since it wrote to what is left of it.
        """
        found = _NAME.fullmatch(owner)
        if found is None or found["host"] != self.host or found["namespace"] not in {None, str(self.namespace)}:
            return age > _STALE_SECONDS
        return str(self.ticks(int(found["pid"]))) != found["ticks"]


def pid_namespace() -> int:
    """Tells containers apart that share a disk or /dev/shm, but not their process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
