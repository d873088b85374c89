"""Finds the fetch in a stack: the frames between a DataLoader's fetcher and the innermost one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from telemetry.util.stacks import Spot, Stack

LOADER_CODE: Final = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
_FETCHER: Final = f"{LOADER_CODE}_utils{os.sep}fetch.py"


def is_fetcher(spot: Spot) -> bool:
    """Whether this is the frame in which a DataLoader makes a batch."""
    return spot.function == "fetch" and spot.file.endswith(_FETCHER)


def fetch_part(stack: Stack) -> Stack:
    """The frames of the fetch, the fetcher's own last; empty if the thread is in no fetch."""
    for number in range(len(stack) - 1, -1, -1):
        if is_fetcher(stack[number]):
            return stack[: number + 1]
    return ()
