"""Disk space for an export: what the file system has free, and what other exports have reserved of it.

torch writes a whole trace before its size is known, and many ranks export at the same moment. So an export first
reserves the most space that it can need, and starts only if all reservations together leave `MIN_FREE_BYTES`.

A reservation is a file. Its name tells the bytes, the device and the owner. It is in two places: beside the snapshots,
where the ranks of all nodes see it, and in a folder of this machine, where the user's other runs see it. There it
contains the path of the snapshots, so that other runs can remove what a killed export has left (`leftovers`).
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.snapshot.private_folder import Folder, open_folder
from telemetry.util.clock import NS, now_ns, sleep, unix_time
from telemetry.util.files import file_system_of, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESERVATION: Final = ".claim-"
"""How the name of a reservation begins. Earlier versions write the same: processes of both may share a folder."""

MIN_FREE_BYTES: Final = 1 << 30
"""What an export leaves free: for checkpoints, for other programs, and for an estimate that was too low."""

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_WAIT_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.2
_CGROUPS: Final = Path("/sys/fs/cgroup")


class NoSpaceError(Exception):
    """There is not enough space; the text says how much is needed and how much is free."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the name of a reservation tells: how many bytes, on which device (``st_dev``), and whose."""

    size: int
    device: int
    owner: str

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{RESERVATION}{self.size}-{self.device}-{self.owner}"

    @classmethod
    def parse(cls, name: str) -> Reservation | None:
        """A reservation by the name of its file; None for any other file."""
        parts = name.removeprefix(RESERVATION).split("-", 2)
        if not name.startswith(RESERVATION) or len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
            return None
        return cls(int(parts[0]), int(parts[1]), parts[2])


@dataclass(frozen=True, slots=True)
class ExportSpace:
    """Reserves disk space for the exports of one process.

    Attributes:
        snapshots: the folder that is written to.
        shared: a folder that all runs of this user on this machine share; None without one.
        owner: name of this process, see `export_owner`.
        is_gone: whether the process of an owner has ended, given the seconds since it wrote its file.
    """

    snapshots: Path
    shared: Path | None
    owner: str
    is_gone: Callable[[str, float], bool]

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """The context in which ``size`` bytes are reserved. Waits for other exports if these block it.

        Raises:
            NoSpaceError: fewer bytes than ``size`` and `MIN_FREE_BYTES` are free, or waiting for the others timed out.
            OSError: the folder cannot be read or written.
        """
        deadline = now_ns() + int(_WAIT_SECONDS * NS)
        name = Reservation(size, self.snapshots.stat().st_dev, self.owner).name
        ours = random.Random()  # noqa: S311 - of our own, so that the training's numbers stay the same
        try:
            while True:
                self._write(name)  # before the others' are read: of two processes at once, one sees both
                free, others = free_bytes(self.snapshots), self._reserved_by_others()
                if size + MIN_FREE_BYTES <= free - others:
                    break
                # The others may have written what they have reserved. It is free again when they have finished.
                if size + MIN_FREE_BYTES > free + others or now_ns() > deadline:
                    raise NoSpaceError(_no_space(size, free, others))
                self._remove(name)
                sleep(_PAUSE_SECONDS * (0.5 + ours.random()))  # so that two do not collide again
            yield
        finally:
            self._remove(name)

    def _write(self, name: str) -> None:
        with open_folder(self.snapshots) as folder:
            _touch(folder, name)
        if self.shared is not None:
            try:
                with open_folder(self.shared, make=True) as folder:
                    _touch(folder, name, os.fsencode(self.snapshots.absolute()))
            except OSError:
                pass  # it is full or not ours: the ranks of this run still see each other

    def _remove(self, name: str) -> None:
        for place in filter(None, (self.snapshots, self.shared)):
            try:
                with open_folder(place) as folder:
                    folder.remove(name)
            except OSError:
                pass  # the next agent removes it

    def _reserved_by_others(self) -> int:
        """Bytes that other exports have reserved on this file system."""
        found: dict[str, int] = {}
        device = self.snapshots.stat().st_dev
        for place in filter(None, (self.snapshots, self.shared)):
            try:
                with open_folder(place) as folder:
                    for name in folder.names():
                        other = Reservation.parse(name)
                        # On another node, the device of a shared folder has another number.
                        if other is None or (place == self.shared and other.device != device):
                            continue
                        if other.owner != self.owner and not self.is_gone(other.owner, age_seconds(folder.fd, name)):
                            found[other.owner] = other.size
            except OSError:
                if place == self.snapshots:
                    raise
        return sum(found.values())


def _touch(folder: Folder, name: str, content: bytes = b"") -> None:
    folder.remove(name)  # our own, if it could not be removed before
    file = folder.create(name)
    try:
        os.write(file, content)
    finally:
        folder.close(file)


def destination(folder: Folder, name: str) -> Path | None:
    """The folder that a reservation names; None if it names none, as those of earlier versions."""
    try:
        content = folder.read(name)
    except OSError:
        return None
    return Path(os.fsdecode(content)) if content.startswith(b"/") and b"\0" not in content else None


def age_seconds(dir_fd: int, name: str) -> float:
    """Seconds since a file was last written; 0 if it is gone."""
    try:
        return max(0.0, unix_time() - os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mtime)
    except OSError:
        return 0.0


def free_bytes(path: Path) -> int:
    """Bytes that can still be written to a folder's file system. If that is in memory, free memory limits it too.

    Raises:
        OSError: the folder does not exist.
    """
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    return min([free, *free_memory()]) if in_memory(path) else free


def in_memory(path: Path) -> bool:
    """Whether a folder is on a file system in memory."""
    return file_system_of(path) in _IN_MEMORY


def free_memory() -> Iterator[int]:
    """Bytes of memory that are available on the machine, and in each control group that this process is in."""
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
            try:  # the kernel drops cached file pages first, so they count as free
                cached = [s.split() for s in read_small(folder / "memory.stat").splitlines()]
                spare = sum(int(value) for name, value in cached if name in {b"inactive_file", b"total_inactive_file"})
                yield int(read_small(folder / most)) - int(read_small(folder / used)) + spare
            except (OSError, ValueError):
                continue  # no limit, or no such group in this container


def _no_space(size: int, free: int, others: int) -> str:
    text = f"no room: it may take {size >> 20} MiB, {MIN_FREE_BYTES >> 20} MiB must stay free"
    return f"{text}, and {free >> 20} MiB are free" + (f", {others >> 20} of them reserved by others" if others else "")
