"""The profiles of stalls: folded stacks in the run folder, one file per stall and rank."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from telemetry.util.files import remove_file, replace_file

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 1 << 18
"""Maximum size of a file."""

MAX_FILES: Final = 20
"""Maximum number of files of a rank, over all attempts of the run. The oldest are removed."""


class ProfileFolder:
    """Writes the profiles of one process.

    Args:
        path: the folder; made with the first profile.
        pid: pid of the process.
    """

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self._pid = pid

    def write(self, rank: int, number: int, cause: str, content: bytes) -> None:
        """Write the profile of a stall over the one before. ``number``: of the stall in this process.

        Raises:
            OSError: it cannot be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        replace_file(self._path / f"rank-{rank}.{self._pid}.stall-{number}.{cause}.folded", content[:MAX_BYTES], 0o644)
        self._remove_oldest(rank)

    def _remove_oldest(self, rank: int) -> None:
        name = re.compile(rf"rank-{rank}\.\d+\.stall-\d+\.\w+\.folded")
        own = [entry for entry in os.scandir(self._path) if name.fullmatch(entry.name)]
        if len(own) > MAX_FILES:
            for entry in sorted(own, key=lambda entry: entry.stat().st_mtime_ns)[:-MAX_FILES]:
                remove_file(entry.path)
