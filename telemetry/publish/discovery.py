"""A target file for Prometheus's ``file_sd_configs``: where this node's endpoint of this run is."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from telemetry.identity import slug


class TargetFile:
    """One file per run and node; written by the rank that serves, removed by the last rank that leaves.

    Args:
        folder: may be shared by many runs and nodes: the file's name tells them apart. Prometheus watches
            ``folder/*.json``.
        run: what names the run for sure: two may bear the same name. The board's name does.
        node: this machine's name.
    """

    def __init__(self, folder: Path, run: str, node: str) -> None:
        self.path = folder / f"{slug(run)}.{slug(node)}.json"
        self._labels = {"node": node}

    def write(self, host: str, port: int) -> None:
        """Name the endpoint, replacing the file whole.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        content = json.dumps([{"targets": [target], "labels": self._labels}], indent=2)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content + "\n")
            Path(temporary).chmod(0o644)  # Prometheus runs as a user of its own
            Path(temporary).replace(self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Take the file away."""
        self.path.unlink(missing_ok=True)
