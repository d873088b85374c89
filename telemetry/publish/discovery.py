"""A target file for Prometheus's ``file_sd_configs``, with the address of this node's metrics for this run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from telemetry.util.files import read_small, replace_file
from telemetry.util.processes import slug

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class TargetFile:
    """One file per run and node. A serving rank writes it, and the last rank that leaves removes it.

    Args:
        folder: the folder. Many runs and nodes may share it: the file's name distinguishes them. Prometheus watches
            ``folder/*.json``.
        run: identifies the run. It is the board's name, because two runs may have the same name.
        node: this machine's name.
    """

    def __init__(self, folder: Path, run: str, node: str) -> None:
        self.path = folder / f"{slug(run)}.{slug(node)}.json"
        self._labels = {"node": node}

    def write(self, host: str, ports: Iterable[int]) -> None:
        """Replace the file by one with the current endpoints. It is left unchanged if it already has them.

        Args:
            host: host name of all endpoints.
            ports: one for each endpoint. There is a second one if the rank at the first is stopped.

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
        replace_file(self.path, f"{content}\n".encode(), for_everyone=True)  # Prometheus runs as another user

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
