"""What the log tells of the surroundings of a run: versions, cores, and the settings of its DataLoader.

Much of it is unknown when the run starts: the script imports torch later, and makes its DataLoader later still. So the
head of a log file has what is known by then, and a window has what has become known or has changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_CPUINFO: Final = Path("/proc/cpuinfo")
_FIRST_CORE_BYTES: Final = 2048
"""The kernel writes this file core by core. The first core is enough, and a machine may have hundreds."""


class RunEnvironment:
    """Used by the agent thread.

    Args:
        loader: returns the settings of the loader in use; empty before the first batch.
        batch_size: returns the number of samples of its batches; None if unknown.
    """

    def __init__(self, loader: Callable[[], dict[str, Any]], batch_size: Callable[[], int | None]) -> None:
        self._loader = loader
        self._batch_size = batch_size
        self._fixed = {
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        }
        self._written: dict[str, Any] = {}

    def fields(self) -> dict[str, Any]:
        """All that is known: for the head of a file."""
        torch = sys.modules.get("torch")
        version = getattr(torch, "version", None)
        known = self._fixed | {
            "torch_version": getattr(version, "__version__", None),
            "cuda_version": getattr(version, "cuda", None),
        }
        fields: dict[str, Any] = {"environment": {name: value for name, value in known.items() if value}}
        loader = self._loader()
        if loader:
            size = self._batch_size()
            fields["loader"] = loader if size is None else {**loader, "batch_size": size}
        self._written = fields
        return fields

    def news(self) -> dict[str, Any]:
        """What is not as it was last written: for a window."""
        before, now = self._written, self.fields()
        return {name: value for name, value in now.items() if before.get(name) != value}


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The name of the processor; empty if the kernel does not tell."""
    try:
        with cpuinfo.open("rb") as file:
            text = file.read(_FIRST_CORE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")
