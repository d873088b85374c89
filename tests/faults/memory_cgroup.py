"""A cgroup of our own with a memory limit, where this machine lets us make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")
LIMIT = 1 << 30


def own_group() -> tuple[Path, str] | None:
    """The memory cgroup of this process, and the name of the file with the limit; None without one."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return MOUNT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        if not controllers and (MOUNT / "cgroup.controllers").exists():
            return MOUNT / path.lstrip("/"), "memory.max"
    return None


@contextmanager
def limited_group(limit: int = LIMIT) -> Iterator[Path]:
    """A new cgroup below that of this process (version 1) or at the root (version 2). Skips the test without the right."""
    found = own_group()
    if found is None:
        pytest.skip("no memory cgroup is mounted at /sys/fs/cgroup")
    parent, limit_file = found
    folder = (parent if limit_file == "memory.limit_in_bytes" else MOUNT) / f"telemetry-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            (folder / limit_file).write_text(str(limit), encoding="ascii")
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        for _ in range(500):  # the kernel takes a moment to forget the last process
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.01)


def enter(folder: Path) -> None:
    """Move this process into a cgroup: for `preexec_fn`, or first thing in a script."""
    (folder / "cgroup.procs").write_text("0", encoding="ascii")
