"""The owner of an unfinished export: a name that no other process has, and whether that process has ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_STALE_SECONDS: Final = 3600.0
"""A file of another machine or container that is older than this was left behind: an export takes seconds."""

_NAME: Final = re.compile(r"(?P<host>.+?)-(?P<pid>\d+)-(?P<ticks>\d+|None)(-ns(?P<namespace>\d+))?")


@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """The processes of this machine or container.

    Attributes:
        host: name of the node.
        namespace: id of the pid namespace. Two containers on a node may both have a process 7.
        start_ticks: when a process started, in clock ticks since boot, given its pid; None if it has ended.
    """

    host: str
    namespace: int
    start_ticks: Callable[[int], int | None]

    def owner_name(self, pid: int) -> str:
        """The name of a process of this machine, which no other process ever has."""
        return f"{self.host}-{pid}-{self.start_ticks(pid)}-ns{self.namespace}"

    def is_gone(self, owner: str, age_seconds: float) -> bool:
        """Whether a process has certainly ended.

        Args:
            owner: its `owner_name`; earlier versions left the namespace out.
            age_seconds: time since it last wrote to its file.
        """
        found = _NAME.fullmatch(owner)
        if found is None or found["host"] != self.host or found["namespace"] not in {None, str(self.namespace)}:
            return age_seconds > _STALE_SECONDS
        return str(self.start_ticks(int(found["pid"]))) != found["ticks"]
