"""Requests a snapshot by running ``telemetry snapshot``, whose last line is shown. Nothing else of it is seen."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

from telemetry.util.text import one_line

if TYPE_CHECKING:
    from pathlib import Path

_MAX_TEXT: Final = 4096


class SnapshotRequest:
    """The requests of this screen, one at a time.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._child: subprocess.Popen[str] | None = None
        self._said = ""
        self._lock = threading.Lock()

    def begin(self, rank: str) -> str:
        """Request a snapshot. Returns what to tell the person.

        Args:
            rank: its number, or ``all``.
        """
        if self._child is not None and self._child.poll() is None:
            return "another snapshot is being taken"
        command = [sys.executable, "-m", "telemetry", "snapshot", str(self._run_dir), "--rank", rank]
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C here is not for it
            )
        except OSError as error:
            return f"a snapshot cannot be requested: {error}"
        self._said = ""
        threading.Thread(target=self._listen, args=(self._child,), name="telemetry-top-snapshot", daemon=True).start()
        return f"snapshot of {'all ranks' if rank == 'all' else f'rank {rank}'} requested; waiting for an answer"

    def news(self) -> str:
        """What the command has said since the last call; empty for nothing new."""
        with self._lock:
            said, self._said = self._said, ""
        return said

    def close(self) -> None:
        """The screen ends. A request that no rank has answered yet is withdrawn, as Ctrl-C does."""
        if self._child is not None and self._child.poll() is None:
            import signal

            self._child.send_signal(signal.SIGINT)

    def _listen(self, child: subprocess.Popen[str]) -> None:
        if child.stdout is None:
            return
        with child.stdout:
            while line := child.stdout.readline(_MAX_TEXT):
                text = one_line(line.strip()).replace(f"{self._run_dir}/", "")
                with self._lock:
                    self._said = f"snapshot: {text.removeprefix('telemetry: ')}" if text else self._said
        child.wait()
