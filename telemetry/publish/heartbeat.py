"""A small file with the newest state of this process, which tells when it was killed and what it had done by then.

The log has a window every ten seconds. This file is written over in place once a tick: one system call, and no new
block on the disk. A process that ends by itself removes it: its log has everything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from telemetry.util.files import Descriptor, opened, remove_file

if TYPE_CHECKING:
    from pathlib import Path

SIZE: Final = 1024
"""Bytes. Each text is filled up to it, so that nothing of a longer one before is left behind it."""


class Heartbeat:
    """The file of this process.

    Args:
        path: unique to this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Descriptor | None = None

    def beat(self, content: bytes) -> None:
        """Write the newest state.

        Args:
            content: one JSON object of at most `SIZE` - 1 bytes.

        Raises:
            OSError: it cannot be written.
            ValueError: it is too long.
        """
        if len(content) >= SIZE:
            raise ValueError(f"a heartbeat has at most {SIZE - 1} bytes, not {len(content)}")
        if self._file is None or not self._file.is_in_place():
            self.forget()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = Descriptor(opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
        os.pwrite(self._file.number, content.rstrip().ljust(SIZE - 1) + b"\n", 0)

    def end(self) -> None:
        """The process ends by itself."""
        if self._file is not None:
            remove_file(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the file: in a forked child, whose copy it is."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass
