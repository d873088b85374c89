"""Processes that the script has started with multiprocessing, and that may train."""

from __future__ import annotations

import sys
from typing import Any


def started() -> int:
    """How many such children this process has now.

    DataLoader workers and the workers of a pool are daemons, and a manager serves: none of them trains. Reads a table
    of multiprocessing's and asks no child: that would reap it.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    children = tuple(getattr(process, "_children", ()))
    return sum(1 for child in children if not child.daemon and "Manager" not in child.name)
