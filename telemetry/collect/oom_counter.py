"""How many processes the OOM killer has killed in the cgroup of this process.

A killed process cannot tell. But the kernel counts, and the other ranks, the next attempt and the report can read the
counter of the same group after the kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telemetry.collect.pressure import cgroup_folders
from telemetry.core.memory_groups import EVENTS, group_id, oom_kills


class OomCounter:
    """The counter of one group, found at the start.

    In version 2 a group counts for those below it, too. So the group is the nearest one with a limit, which all tasks
    of a job share. In version 1 each group counts for itself alone, and the group is that of the process.

    Args:
        proc: where /proc is mounted.
        cgroups: where the cgroup hierarchies are mounted.

    Attributes:
        group: which group it is; None if there is no counter.
        path: of the file.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self.group: str | None = None
        self.path: str | None = None
        folder, name = _counting(cgroup_folders(proc, cgroups).get("memory", ()))
        if folder is None:
            return
        try:
            self.group, self.path = group_id(folder, proc), str(folder / name)
        except OSError:
            pass  # the group has been removed

    def count(self) -> int | None:
        """How many so far; None where the kernel does not tell."""
        return None if self.path is None else oom_kills(self.path)

    def head_fields(self) -> dict[str, Any]:
        """For the first line of a log: where the counter is, for those who read it later."""
        return {} if self.path is None else {"memory_group": self.group, "memory_events": self.path}


def _counting(folders: tuple[Path, ...]) -> tuple[Path | None, str]:
    """The folder whose counter is to be read, and the name of its file. ``folders``: innermost first."""
    version_2, version_1 = EVENTS
    own = next((folder for folder in folders if oom_kills(folder / version_2) is not None), None)
    if own is not None:
        limited = (folder for folder in folders if _is_limited(folder) and (folder / version_2).is_file())
        return next(limited, own), version_2
    return next((folder for folder in folders if oom_kills(folder / version_1) is not None), None), version_1


def _is_limited(folder: Path) -> bool:
    try:
        return (folder / "memory.max").read_text(encoding="ascii").strip().isdigit()
    except (OSError, UnicodeDecodeError):
        return False
