"""The line that the agent writes to stderr at the start, and the path of the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.util.errors import say

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.util.processes import Identity


def say_start(identity: Identity, *, metrics_url: str | None, trouble: str, logs: str) -> bool:
    """Print where the metrics and the logs are. Returns whether stderr could be written.

    Args:
        identity: the identity of this process.
        metrics_url: the URL of the metrics; None without an endpoint.
        trouble: why there is no endpoint; empty if that is unknown.
        logs: where the logs are, or why there are no logs.
    """
    where = f"metrics at {metrics_url}" if metrics_url else "no metrics endpoint" + f" ({trouble})" * bool(trouble)
    return say(f"telemetry: run {identity.run}, rank {identity.rank}: {where}, {logs}")


def absolute(folder: Path) -> Path:
    """The absolute path of a folder, so that the script may change its working folder.

    Raises:
        OSError: the path is relative, and the working folder no longer exists.
    """
    try:
        return folder.absolute()
    except FileNotFoundError:
        text = f"the working folder has been removed, so there is no {folder}: set run_dir to an absolute path"
        raise OSError(text) from None
