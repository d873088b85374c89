"""A memory cgroup: which one it is, and how many of its processes the kernel's OOM killer has killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.core.filesystem import read_small

if TYPE_CHECKING:
    from pathlib import Path

EVENTS: Final = ("memory.events", "memory.oom_control")
"""The file that counts, in cgroup version 2 and in version 1."""

_BOOT_CHARACTERS: Final = 8


def group_id(folder: Path, proc: Path) -> str:
    """Tells a cgroup from all others, also from one of the same name after it was removed, and on other machines.

    Raises:
        OSError: the folder does not exist.
    """
    boot = read_small(proc / "sys/kernel/random/boot_id").decode("ascii", "replace")
    return f"{boot[:_BOOT_CHARACTERS]}-{folder.stat().st_ino:x}"


def oom_kills(path: str | Path) -> int | None:
    """How many processes of the group the OOM killer has killed so far; None where the kernel does not tell.

    Args:
        path: of the file of `EVENTS`.
    """
    try:
        text = read_small(path).decode("ascii", "replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None
