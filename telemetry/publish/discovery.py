"""A target file for Prometheus's ``file_sd_configs``: where this node's metrics of this run are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from telemetry.core.filesystem import read_small, replace_file
from telemetry.core.identity import slug

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class TargetFile:
    """One file per run and node; written by a rank that serves, removed by the last rank that leaves.

    Args:
        folder: may be shared by many runs and nodes: the file's name tells them apart. Prometheus watches
            ``folder/*.json``.
        run: identifies the run, because two runs may have the same name; the board's name does.
        node: this machine's name.
    """

    def __init__(self, folder: Path, run: str, node: str) -> None:
        self.path = folder / f"{slug(run)}.{slug(node)}.json"
        self._labels = {"node": node}

    def write(self, host: str, ports: Iterable[int]) -> None:
        """Replace the file by one that names the endpoints. A file that already does is left unchanged.

        Args:
            host: of all of them.
            ports: one for each endpoint; there is a second if the rank at the first is stopped.

        Raises:
            OSError: the folder cannot be written.
        """
        name = f"[{host}]" if ":" in host else host
        targets = [f"{name}:{port}" for port in ports]
        content = json.dumps([{"targets": targets, "labels": self._labels}], indent=2)
        try:
            if read_small(self.path) == f"{content}\n".encode():
                return
        except OSError:
            pass
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, f"{content}\n".encode(), 0o644)  # Prometheus runs as a user of its own

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
