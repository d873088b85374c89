"""``python -m telemetry``: the command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telemetry.launch import Program


def _program() -> Program:
    """Do the command and exit; after ``run``, return the program that is to be run.

    The working folder may have modules with the names of those that we need.
    """
    from telemetry._version import __version__
    from telemetry.safety import imports

    if sys.argv[1:] == ["--version"]:  # also where a package is missing
        print(f"telemetry {__version__}")
        sys.exit()
    imports.begin(*sys.path[:1], os.curdir)
    try:
        from telemetry.cli import main as command
    except ModuleNotFoundError as error:
        sys.exit(f"telemetry: the package {error.name} is not installed; pip install torch-telemetry brings it")
    outcome = command(sys.argv[1:])
    if isinstance(outcome, int):
        sys.exit(outcome)
    return outcome


def main() -> None:
    """The command's entry point."""
    program = _program()
    with program as names:
        exec(program.code, names)  # noqa: S102 - this is what the command is for


if __name__ == "__main__":  # without a function, which would be one more frame below the script
    program = _program()
    with program as names:
        exec(program.code, names)  # noqa: S102
