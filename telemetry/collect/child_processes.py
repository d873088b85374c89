"""Counts child processes that the script has started with multiprocessing and that may train."""

from __future__ import annotations

import sys
from typing import Any


def started() -> int:
    """The number of child processes that may train.

    DataLoader workers and pool workers are not counted, because they are daemons. Managers are not counted, because
    they only serve objects. Reads a table of multiprocessing and does not poll the children: polling would reap them.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    children = tuple(getattr(process, "_children", ()))
    return sum(1 for child in children if not child.daemon and "Manager" not in child.name)
