"""What the demo prints: lines, and commands as a person would type them here."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from pathlib import Path

from telemetry.util.text import show


def say(*lines: str) -> None:
    """Print lines on the standard output."""
    for line in lines:
        show(f"{line}\n")


def command_line(*arguments: object) -> str:
    """A telemetry command as a person would type it in this folder. Paths are shortened."""
    found = shutil.which("telemetry")
    on_path = found is not None and Path(found).parent == Path(sys.executable).parent
    program = ["telemetry"] if on_path else [_relative(Path(sys.executable)), "-m", "telemetry"]
    return shlex.join([*program, *(_relative(a) if isinstance(a, Path) else str(a) for a in arguments)])


def _relative(path: Path) -> str:
    """A path below the current folder relative to it; any other as it is."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
