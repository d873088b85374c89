"""The one line that the agent writes to stderr, and the run folder that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.core.stderr import say

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.core.identity import Identity


def say_start(identity: Identity, *, metrics_url: str | None, trouble: str, logs: str) -> bool:
    """Say where the metrics and the logs are. Returns whether stderr could be written.

    Args:
        identity: of this process.
        metrics_url: None where there is no endpoint.
        trouble: why there is none, as far as that is known.
        logs: where the logs are, or why there are none.
    """
    where = f"metrics at {metrics_url}" if metrics_url else "no metrics endpoint" + f" ({trouble})" * bool(trouble)
    return say(f"telemetry: run {identity.run}, rank {identity.rank}: {where}, {logs}")


def absolute(folder: Path) -> Path:
    """The folder, wherever the script changes to.

    Raises:
        OSError: it is relative, and there is no working folder.
    """
    try:
        return folder.absolute()
    except FileNotFoundError:
        text = f"the working folder has been removed, so there is no {folder}: set run_dir to an absolute path"
        raise OSError(text) from None
