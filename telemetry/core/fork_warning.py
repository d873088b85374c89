"""Hides Python's warning of a fork with several threads, if all the other threads are the agent's own.

From Python 3.12 on `os.fork` warns when the process has more than one thread. If the training has a second thread
itself, the warning is shown as without the agent. If all other threads are the agent's, the warning is hidden: they
hold no lock that a child needs, and the user did not start them. The decision is made when Python warns, because a
library may end its threads right before the fork (OpenBLAS does).

What runs during a fork consists of C functions. Python drops an exception that is raised there, and a signal handler of
the script runs at the first bytecode after its signal.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import warnings
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Final

from telemetry.core import own_threads

WARNS: Final = sys.version_info >= (3, 12)
"""Whether this Python warns about a fork with several threads."""

_WARNS_LAST: Final = sys.version_info >= (3, 13)
"""Whether it warns after all fork handlers have run. Then the filter stays until the next fork, or `end`."""

_MESSAGE: Final = re.compile(
    r"This process \(pid=\d+\) is multi-threaded, use of \w+\(\) may lead to deadlocks in the child"
)


class _OursAlone:
    """Takes the place of the regular expression for modules in a warning filter.

    Attributes:
        match: called by Python when it warns; whether all threads but one are the agent's. The number of threads is the
            number of links of the folder less 2, which needs no descriptor. Ours are counted first: one that ends
            meanwhile must not look like the user's.
    """

    def __init__(self) -> None:
        tasks = map(map, repeat(attrgetter("task")), repeat(own_threads.harmless))
        ours = map(sum, map(map, repeat(os.access), tasks, repeat(repeat(os.F_OK))))
        links = map(attrgetter("st_nlink"), map(os.stat, repeat("/proc/self/task")))
        self.match = partial(next, map(operator.ge, map(operator.add, ours, repeat(1 + 2)), links))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an expression that matches nothing. Some libraries send the filters to other processes."""
        return re.compile, ("(?!)",)


_FILTER: Final[Any] = ("ignore", _MESSAGE, DeprecationWarning, _OursAlone(), 0)
_wanted: Final[list[Any]] = []
_registered = False


def _filters() -> map[Any]:
    return map(attrgetter("filters"), repeat(warnings))


# The list is changed in place, and not with `warnings.filterwarnings`: that increases the version of the filters, and
# then Python repeats warnings that it has already shown.
_without_ours: Final = map(partial(filter, partial(is_not, _FILTER)), _filters())
_remove: Final = map(operator.setitem, _filters(), repeat(slice(None)), _without_ours)
_insert: Final = map(operator.setitem, _filters(), repeat(slice(0, 0)), repeat(_wanted))


def register() -> None:
    """Let each fork of this process install the filter in first place, if Python warns."""
    global _registered  # noqa: PLW0603
    if WARNS and not _registered:
        _registered = True
        os.register_at_fork(before=partial(next, zip(_remove, _insert, strict=False)))
        os.register_at_fork(after_in_child=partial(next, zip(_remove, iter(_wanted.clear, _FILTER), strict=False)))
        if not _WARNS_LAST:
            os.register_at_fork(after_in_parent=partial(next, _remove))


def begin() -> None:
    """The agent runs."""
    _wanted[:] = [_FILTER]


def end() -> None:
    """The agent has stopped: remove the filter."""
    _wanted.clear()
    next(_remove)
