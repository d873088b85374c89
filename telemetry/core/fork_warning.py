"""Hides Python's warning of a fork with several threads, if all the other threads are the agent's own.

From Python 3.12 on `os.fork` warns when the process has more than one thread. If the training has a second thread
itself, the warning is shown as without the agent. If all other threads are the agent's, the warning is hidden: they
hold no lock that a child needs, and the user did not start them. The decision is made when Python warns, because a
library may end its threads right before the fork (OpenBLAS does).
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

_OTHERS_CODE: Final = ("telemetry-sinks", "telemetry-on-stall")
"""Threads of the agent that run code of others, such as a logger's client. It may hold a lock that a child needs."""

_WARNING: Final = re.compile(
    r"This process \(pid=\d+\) is multi-threaded, use of \w+\(\) may lead to deadlocks in the child"
)


class _OursAlone:
    """Takes the place of the regular expression in a warning filter. Matches if all other threads are the agent's."""

    def match(self, text: str) -> bool:
        """Called by Python when it warns."""
        try:
            return _WARNING.match(text) is not None and _all_ours()
        except Exception:
            return False  # else `os.fork` would raise it

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an expression that matches nothing. Some libraries send the filters to other processes."""
        return re.compile, ("(?!)",)


_FILTER: Final[Any] = ("ignore", _OursAlone(), DeprecationWarning, None, 0)

WARNS: Final = sys.version_info >= (3, 12)
"""Whether this Python warns about a fork with several threads."""

_WARNS_LAST: Final = sys.version_info >= (3, 13)
"""Whether it warns after all fork handlers have run. Then the filter stays until the next fork, or `stop`."""

_registered = False
_changed: list[Any] = []
_noted: deque[int] = deque(maxlen=4)  # the newest ones only: the kernel may use a number again


def register() -> None:
    """Have the filter installed at each fork of this process, if this Python warns."""
    global _registered  # noqa: PLW0603
    if WARNS and not _registered:
        _registered = True
        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after)


def before() -> None:
    """Before a fork: install the filter in first place.

    Unlike `warnings.filterwarnings` this does not increase the filters' version, because then Python would repeat
    warnings that it has already shown.
    """
    after()
    try:
        filters: Any = warnings.filters
        filters.insert(0, _FILTER)
        _changed.append(filters)
    except Exception:
        pass  # Python would print it


def after_in_parent() -> None:
    """After the fork, in the parent."""
    if not _WARNS_LAST:
        after()


def after() -> None:
    """Remove the filter, if it is installed."""
    try:
        while _changed:
            # A `catch_warnings` that was entered or left meanwhile, on another thread, has put a copy in its place.
            changed: tuple[Any, Any] = (_changed.pop(), warnings.filters)
            for filters in changed:
                filters[:] = [entry for entry in filters if entry is not _FILTER]
    except Exception:
        pass


def ours() -> None:
    """Register the calling thread as the agent's. It stays known while it ends, when Python no longer lists it."""
    _noted.append(threading.get_native_id())


def _all_ours() -> bool:
    """Whether all other threads of the process are the agent's. Counts the kernel's threads, as Python does."""
    # The places are read in the order of a thread's life. A thread that moves on meanwhile is found in the next place.
    others = {int(number) for number in os.listdir("/proc/self/task")} - {threading.get_native_id()}  # noqa: PTH208
    starting = sum(map(_is_ours, list(getattr(threading, "_limbo", ()))))
    known = list(getattr(threading, "_active", {}).values())
    named = {thread.native_id for thread in known if _is_ours(thread)}
    return bool(others) and len(others - named.union(_noted)) <= starting  # those have no number yet


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OURS) and thread.name not in _OTHERS_CODE
