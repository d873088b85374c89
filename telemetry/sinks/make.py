"""Makes the sinks that the settings name."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from telemetry.util.errors import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from telemetry.sinks.thread import Sink


def make_sinks(names: Iterable[str], run_dir: Path) -> tuple[list[Sink], dict[str, str]]:
    """Make sinks. Called on the training thread at the start, because the agent's threads must not import anything.

    Args:
        names: names of the libraries in the order of writing, see the setting ``sinks``.
        run_dir: the run folder.

    Returns:
        The sinks, and for each name without one the reason.
    """
    sinks: list[Sink] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            if not _is_installed(name):
                missing[name] = "the package is not installed"
            elif name == "tensorboard":
                from telemetry.sinks.tensorboard import TensorBoardSink

                sinks.append(TensorBoardSink(run_dir / "tensorboard"))
            else:
                from telemetry.sinks.trackers import TRACKERS

                sinks.append(TRACKERS[name]())
        except Exception as error:  # the package is broken
            missing[name] = kind_of(error)
    return sinks, missing


def _is_installed(name: str) -> bool:
    """Whether the package is there. A folder of its name is no package: ``wandb`` makes one in the working folder."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
