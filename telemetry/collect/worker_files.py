"""Keeps the /proc files of the DataLoader workers open.

Opening and closing a file of /proc takes four times as long as reading it. An open file also stays bound to its
process: after the process has ended, reading fails, even if another process gets the same pid.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from telemetry.sources.proc import (
    Io,
    Schedule,
    Stat,
    is_worker_of_ours,
    parsed_io,
    parsed_schedule,
    parsed_stat,
    read_io,
    read_schedule,
    read_stat,
)
from telemetry.util.files import Descriptor, opened

if TYPE_CHECKING:
    from collections.abc import Container

MAX_WORKERS: Final = 16
"""The files of this many workers are kept open, four each. Those of further workers are opened at every reading. By
default a process may have 1024 descriptors, and a DataLoader needs some of them."""

_MAX_BYTES: Final = 1024


class WorkerFiles:
    """Reads the /proc files of one worker.

    Args:
        pid: pid of the worker.
        keep: whether to keep its files open.

    Attributes:
        kept: whether its files are kept open.
    """

    def __init__(self, pid: int, *, keep: bool) -> None:
        self.pid = pid
        self.kept = keep
        self._files: dict[str, Descriptor] = {}

    def stat(self) -> Stat | None:
        """CPU time, memory and start; None if the process has ended, or is not a worker of this process."""
        if not self.kept:
            stat = read_stat(self.pid)
            return stat if stat is not None and is_worker_of_ours(stat.parent) else None
        if "stat" in self._files:
            try:
                content = self._read("stat")
                if content.startswith(b"%d (" % self.pid):
                    return parsed_stat(content, self._read("statm"))
            except OSError:
                pass
            self.close()  # the process has ended, or other code has closed all descriptors
        try:
            stat = parsed_stat(self._read("stat"), self._read("statm"))
        except OSError:
            stat = None
        if stat is None or not is_worker_of_ours(stat.parent):
            self.close()
            return None
        return stat

    def schedule(self, tid: int) -> Schedule | None:
        """The schedule of one of its threads; None if the thread has ended or the kernel keeps no such figures."""
        if not self.kept:
            return read_schedule(self.pid, tid)
        try:
            return parsed_schedule(self._read(f"task/{tid}/schedstat"))
        except OSError:
            return None

    def io(self) -> Io | None:
        """Bytes that it has read and written; None if they cannot be read."""
        if not self.kept:
            return read_io(self.pid)
        try:
            return parsed_io(self._read("io"))
        except OSError:
            return None

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _read(self, name: str) -> bytes:
        """Read a file from its start.

        Raises:
            OSError: the file does not exist, or the process has ended.
        """
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = Descriptor(opened(f"/proc/{self.pid}/{name}", os.O_RDONLY))
        return os.pread(file.number, _MAX_BYTES, 0)


class FilesOfWorkers:
    """The files of all workers, by pid."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerFiles] = {}

    def of(self, pid: int) -> WorkerFiles:
        """The files of one worker."""
        files = self._workers.get(pid)
        if files is None:
            keep = sum(1 for others in self._workers.values() if others.kept) < MAX_WORKERS
            files = self._workers[pid] = WorkerFiles(pid, keep=keep)
        return files

    def close(self, but: Container[int] = ()) -> None:
        """Close the files of all workers except those in ``but``."""
        for pid in [pid for pid in self._workers if pid not in but]:
            self._workers.pop(pid).close()
