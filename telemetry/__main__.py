"""``python -m telemetry``: the command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command's entry point. The working folder may have modules with the names of those that we need."""
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
    sys.exit(command(sys.argv[1:]))


if __name__ == "__main__":
    main()
