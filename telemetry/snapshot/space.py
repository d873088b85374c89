"""Room for an export: what a file system has free, and what other exports have already claimed of it.

torch writes a whole trace before anyone can see its size, and many ranks export at the same moment. So an export first
claims the most it can need, and begins only if all claims together leave a large reserve. A claim is an empty file; its
name says how many bytes, on which device, and whose. It lies in two places: beside the snapshots, where the ranks of
all nodes see it, and in a folder of this machine, where the user's other runs see it.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.clock import NS, now_ns
from telemetry.files import read_small
from telemetry.snapshot.folder import Folder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLAIM: Final = ".claim-"
RESERVE_BYTES: Final = 1 << 30
"""What an export leaves free: for checkpoints, for other programs, and for an estimate that was too low."""

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_WAIT_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.2
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MOUNTS: Final = Path("/proc/self/mountinfo")


class NoRoomError(Exception):
    """There is not enough room; the text says how much is needed and how much there is."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one process for its exports.

    Attributes:
        snapshots: the folder that is written to.
        shared: a folder that all runs of this user on this machine have in common; None without one.
        owner: names this process.
        is_gone: whether the process of an owner runs no more, given the seconds since it left its mark.
    """

    snapshots: Path
    shared: Path | None
    owner: str
    is_gone: Callable[[str, float], bool]

    @contextmanager
    def claimed(self, wanted: int) -> Iterator[None]:
        """Hold so many bytes. Waits for other exports to end where their claims are what is in the way.

        Raises:
            NoRoomError: less than ``wanted`` and the reserve are free, or the other exports did not end in time.
            OSError: the folder cannot be read or written.
        """
        deadline = now_ns() + int(_WAIT_SECONDS * NS)
        name = f"{CLAIM}{wanted}-{self.snapshots.stat().st_dev}-{self.owner}"
        try:
            while True:
                self._mark(name)  # before looking at the others' claims, so that of two at once one sees both
                free, others = free_bytes(self.snapshots), self._others()
                if wanted + RESERVE_BYTES <= free - others:
                    break
                # What the others have claimed, they may have written by now: it comes back when they are done.
                if wanted + RESERVE_BYTES > free + others or now_ns() > deadline:
                    raise NoRoomError(_told(wanted, free, others))
                self._unmark(name)
                time.sleep(_PAUSE_SECONDS * (0.5 + random.random()))  # noqa: S311 - so that two do not meet again
            yield
        finally:
            self._unmark(name)

    def _mark(self, name: str) -> None:
        with open_folder(self.snapshots) as folder:
            _touch(folder, name)
        if self.shared is not None:
            try:
                with open_folder(self.shared, make=True) as folder:
                    _touch(folder, name)
            except OSError:
                pass  # full or not ours: the ranks of this run still see one another

    def _unmark(self, name: str) -> None:
        for place in filter(None, (self.snapshots, self.shared)):
            try:
                with open_folder(place) as folder:
                    folder.remove(name)
            except OSError:
                pass  # it is swept by the next agent

    def _others(self) -> int:
        """Bytes that other exports have claimed of this file system."""
        found: dict[str, int] = {}
        device = self.snapshots.stat().st_dev
        for place in filter(None, (self.snapshots, self.shared)):
            try:
                with open_folder(place) as folder:
                    for name in folder.names():
                        claim = parse(name)
                        # Another node has its own number for the device of a shared folder.
                        if claim is None or (place == self.shared and claim[1] != device):
                            continue
                        if claim[2] != self.owner and not self.is_gone(claim[2], age(folder.fd, name)):
                            found[claim[2]] = claim[0]
            except OSError:
                if place == self.snapshots:
                    raise
        return sum(found.values())


def _touch(folder: Folder, name: str) -> None:
    folder.remove(name)  # one of ours that could not be removed
    folder.close(folder.create(name))


def parse(name: str) -> tuple[int, int, str] | None:
    """Bytes, device and owner of a claim by its file name, None of any other file."""
    parts = name.removeprefix(CLAIM).split("-", 2)
    if not name.startswith(CLAIM) or len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1]), parts[2]


def age(dir_fd: int, name: str) -> float:
    """Seconds since a file was last written; 0 if it is gone."""
    try:
        return max(0.0, time.time() - os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mtime)
    except OSError:
        return 0.0


def free_bytes(path: Path) -> int:
    """What may still be written to a folder's file system. One in memory has no more than the machine has to give.

    Raises:
        OSError: the folder is not there.
    """
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    return min([free, *_free_memory()]) if in_memory(path) else free


def in_memory(path: Path) -> bool:
    """Whether a folder lies in memory."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == number and "-" in fields:
            return fields[fields.index("-") + 1] in _IN_MEMORY
    return False


def _free_memory() -> Iterator[int]:
    """Bytes of memory that the machine has, and that each control group above this process may still use."""
    try:
        for entry in read_small("/proc/meminfo").splitlines():
            if entry.startswith(b"MemAvailable:"):
                yield int(entry.split()[1]) << 10
        lines = read_small("/proc/self/cgroup").decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = v1 if controllers else ("memory.max", "memory.current")
        group = root / path.strip("/")
        for folder in {root, *(each for each in (group, *group.parents) if each.is_relative_to(root))}:
            try:  # what files have in the cache is given up first
                cached = [s.split() for s in read_small(folder / "memory.stat").splitlines()]
                spare = sum(int(value) for name, value in cached if name in {b"inactive_file", b"total_inactive_file"})
                yield int(read_small(folder / most)) - int(read_small(folder / used)) + spare
            except (OSError, ValueError):
                continue  # no limit, or no such group in this container


def _told(wanted: int, free: int, others: int) -> str:
    text = f"no room: it may take {wanted >> 20} MiB, {RESERVE_BYTES >> 20} MiB must stay free"
    return f"{text}, and {free >> 20} MiB are free" + (f", {others >> 20} of them claimed by others" if others else "")
