"""File systems for one test only: small ones, in a private mount namespace."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REQUIRED = os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1"
_NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@functools.cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = [*_NAMESPACE, "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def small_disk(sizes: dict[str, str], script: Path, *arguments: object) -> list[str]:
    """A command line that runs Python where each folder of ``sizes`` is a private file system of that size.

    Skips the test if mounting is not permitted; fails it if the environment says that no test may be skipped.
    """
    if not _can_mount():
        (pytest.fail if REQUIRED else pytest.skip)("a file system of one's own needs mount namespaces")
    mounts = [f'mount -t tmpfs -o size={size},mode=1777 none "{folder}"' for folder, size in sizes.items()]
    line = " && ".join([*mounts, 'exec "$0" "$@"'])
    return [*_NAMESPACE, "sh", "-c", line, sys.executable, *map(str, (script, *arguments))]
