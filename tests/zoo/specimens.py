"""The specimens: scripts, their arguments, and their known problems.

A script is written as a person would write it. Its problem is in its own settings and data. A specimen states the true
cause, not the cause that the agent names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

from .healthy import CONTROLS
from .jobs import JOBS
from .specimen import Specimen
from .stalling import STALLS

ALL: Final = (*STALLS, *CONTROLS, *JOBS)


def chosen(names: Iterable[str]) -> tuple[Specimen, ...]:
    """The specimens whose names begin with one of ``names``; all of them without any.

    Raises:
        ValueError: no specimen has such a name.
    """
    wanted = tuple(names)
    for name in wanted:
        if not any(specimen.name.startswith(name) for specimen in ALL):
            raise ValueError(f"no specimen's name begins with {name!r}; they are {', '.join(s.name for s in ALL)}")
    return tuple(s for s in ALL if not wanted or s.name.startswith(wanted))
