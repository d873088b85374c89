"""Environments of their own for the tools that telemetry is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import child

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INSTALL_SECONDS: Final = 900.0


class ToolError(RuntimeError):
    """The tool cannot be used; the text gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class ToolEnvironment:
    """A virtual environment with one tool in it.

    Attributes:
        tool: name of the tool, for messages.
        package: its package, as pip names it. ``version``: the version that is compared.
        variable: environment variable with the path of an interpreter to use instead.
        folder: name of the environment's folder in the repository.
        packages: returns what to install.
    """

    tool: str
    package: str
    version: str
    variable: str
    folder: str
    packages: Callable[[], Sequence[str]]

    def python(self, *, install: bool) -> Path:
        """The interpreter of the environment.

        Args:
            install: whether to make the environment if it is missing.

        Raises:
            ToolError: the environment is missing, and cannot or must not be made.
        """
        named = os.environ.get(self.variable)
        interpreter = Path(named) if named else child.ROOT / self.folder / "bin" / "python"
        if not named and install and self._installed(interpreter) is None:
            self._make(interpreter)
        found = self._installed(interpreter)
        if found != self.version:
            other = f" ({found} is there)" if found else ""
            raise ToolError(f"no environment with {self.tool} {self.version}{other}")
        return interpreter

    def _installed(self, interpreter: Path) -> str | None:
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        try:
            done = subprocess.run([interpreter, "-c", code], capture_output=True, timeout=60, check=False, text=True)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def _make(self, interpreter: Path) -> None:
        print(f"making {self.folder} with {self.tool} {self.version} (minutes; once)", flush=True)
        commands = (
            [sys.executable, "-m", "venv", str(child.ROOT / self.folder)],
            [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", *self.packages()],
        )
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_SECONDS)
            except (OSError, subprocess.SubprocessError) as error:
                raise ToolError(f"its environment cannot be made ({type(error).__name__})") from None
