"""``python -m telemetry``: the command."""

from __future__ import annotations

import sys


def main() -> None:
    """The command's entry point."""
    from telemetry.cli import main as command

    sys.exit(command(sys.argv[1:]))


if __name__ == "__main__":
    main()
