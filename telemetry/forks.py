"""Python's warning of forks in a process with several threads, where the only other threads are ours.

From Python 3.12 on `os.fork` warns when it finds more than one thread in the process. With a second thread of the
training's own it would do so without us too, and that is left alone. Where all the others are ours, the warning would
tell the user of threads that are not theirs: it is kept from them, decided anew at every fork, and nothing else is.
Our threads hold no lock that a child needs.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections import deque
from typing import Any, Final

_OURS: Final = "telemetry-"

_FILTER: Final[Any] = (
    "ignore",
    re.compile(r"This process \(pid=\d+\) is multi-threaded, use of \w+\(\) may lead to deadlocks in the child"),
    DeprecationWarning,
    None,
    0,
)

WARNS: Final = sys.version_info >= (3, 12)
"""Whether this Python warns of it."""

_WARNS_LAST: Final = sys.version_info >= (3, 13)
"""Whether it does so when everybody has been told of the fork. The filter then stays until the next fork, or `stop`."""

_changed: list[Any] = []
_noted: deque[int] = deque(maxlen=4)  # of the newest: the kernel may give a number again


def before() -> None:
    """A fork is about to come: put the filter in front if only our threads are beside this one.

    The filters' version is not raised, as `warnings.filterwarnings` does: what has been shown once would come again.
    """
    after()
    try:
        if _all_ours():
            filters: Any = warnings.filters
            filters.insert(0, _FILTER)
            _changed.append(filters)
    except Exception:
        pass  # Python would print it


def after_in_parent() -> None:
    """The fork is over, in the parent."""
    if not _WARNS_LAST:
        after()


def after() -> None:
    """Take the filter away, if it is there."""
    try:
        while _changed:
            # A `catch_warnings` that was entered or left meanwhile, on another thread, has put a copy in its place.
            changed: tuple[Any, Any] = (_changed.pop(), warnings.filters)
            for filters in changed:
                filters[:] = [entry for entry in filters if entry is not _FILTER]
    except Exception:
        pass


def ours() -> None:
    """The calling thread is one of ours: known also while it ends, when Python does not know it any more."""
    _noted.append(threading.get_native_id())


def _all_ours() -> bool:
    """Whether this is the only thread of the process but for ours. Python counts the kernel's threads, so do we."""
    # In the order of a thread's life: one that goes on meanwhile is found in the next place.
    others = {int(number) for number in os.listdir("/proc/self/task")} - {threading.get_native_id()}  # noqa: PTH208
    starting = sum(thread.name.startswith(_OURS) for thread in list(getattr(threading, "_limbo", ())))
    known = list(getattr(threading, "_active", {}).values())
    named = {thread.native_id for thread in known if thread.name.startswith(_OURS)}
    return bool(others) and len(others - named.union(_noted)) <= starting  # those have no number yet
