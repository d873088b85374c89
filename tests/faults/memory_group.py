"""A cgroup of our own with a memory limit, where this machine lets us make one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT = 1 << 30
_MOUNT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A memory cgroup with a limit: below that of this process (version 1), or at the root (version 2).

    Raises:
        OSError: not allowed here.
    """

    def __init__(self, limit_bytes: int) -> None:
        parent, limit, self._kills = _MOUNT, "memory.max", "memory.events"
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                parent = _MOUNT / "memory" / path.lstrip("/")
                limit, self._kills = "memory.limit_in_bytes", "memory.oom_control"
        self.folder = parent / f"telemetry-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        try:
            (self.folder / limit).write_text(str(limit_bytes))
        except OSError:
            self.folder.rmdir()
            raise

    def enter(self) -> None:
        """Move this process into the group: for `preexec_fn`."""
        enter(self.folder)

    def kills(self) -> int:
        """How many of its processes the OOM killer has killed."""
        fields = dict(line.split() for line in (self.folder / self._kills).read_text().splitlines())
        return int(fields["oom_kill"])

    def close(self) -> None:
        """Kill what is left in it, and remove it. The kernel takes a moment to forget the last process."""
        for _ in range(500):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.02)


def enter(folder: str | Path) -> None:
    """Move this process into a cgroup: first thing in a script."""
    (Path(folder) / "cgroup.procs").write_text("0")


@contextlib.contextmanager
def limited_group(limit: int = LIMIT) -> Iterator[MemoryGroup]:
    """A group for a test, which is skipped without the right to make one."""
    try:
        group = MemoryGroup(limit)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.close()
