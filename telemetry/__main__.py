"""``python -m telemetry``: the command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command's entry point. The working folder may have modules with the names of those that we need."""
    from telemetry.util import imports

    imports.begin(*sys.path[:1], os.curdir)
    from telemetry.cli import main as command

    sys.exit(command(sys.argv[1:]))


if __name__ == "__main__":
    main()
