"""What tells one process from another with the same pid."""

from __future__ import annotations

from pathlib import Path

from telemetry.core.filesystem import read_small


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot. With the pid it identifies the process. None if it has ended."""
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[19])


def pid_namespace() -> int:
    """Id of this process's pid namespace, 0 if not known. It differs between containers that share a disk."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def process_name(pid: int) -> str:
    """A name of a process that no other process of this machine has ever had, whatever its clock says."""
    try:
        boot = read_small("/proc/sys/kernel/random/boot_id")[:8].decode("ascii", "replace")
    except OSError:
        boot = ""
    return f"{pid}/{boot}-{start_ticks(pid) or 0}"
