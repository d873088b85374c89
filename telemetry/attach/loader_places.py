"""Tells DataLoaders apart by the place in the code where they are made."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.trial_records import LoaderFacts
from telemetry.util.stacks import is_library, own_stack

if TYPE_CHECKING:
    from types import FrameType

    from telemetry.util.stacks import Stack

_CALLERS: Final = 3
"""A function that makes several loaders has one line for them. So its callers belong to the place."""

_TORCH: Final = ("torch.utils.data", "torchdata.stateful_dataloader")
"""Modules that a constructor of a subclass may pass through."""


class LoaderPlaces:
    """The places of one process, in the order in which they were seen first.

    Attributes:
        all: facts by place.
    """

    def __init__(self) -> None:
        self.all: dict[str, LoaderFacts] = {}
        self._of_dataset: dict[int, tuple[weakref.ref[Any], LoaderFacts]] = {}

    def facts_of(self, frame: FrameType | None, dataset: object) -> LoaderFacts:
        """The facts of the place where a loader is being made.

        A library such as accelerate makes a new loader from the script's own. That one belongs to the script's place.

        Args:
            frame: the frame that calls the constructor.
            dataset: the loader's data set.
        """
        stack = own_stack(frame)
        library = _library(stack)
        known = self._of_dataset.get(id(dataset))
        if library is not None and known is not None and known[0]() is dataset:
            return known[1]
        users = [spot for spot in stack if not is_library(spot.file)][: 1 + _CALLERS] or list(stack[:1])
        names = [f"{os.path.abspath(spot.file)}:{spot.line}" for spot in users]  # noqa: PTH100 - text
        place = " from ".join(names)
        facts = self.all.get(place)
        if facts is None:
            facts = self.all[place] = LoaderFacts(place, users[0].file if users else "", users[0].line if users else 0)
            facts.library = library
        try:
            self._of_dataset[id(dataset)] = weakref.ref(dataset), facts
        except TypeError:  # a list, for example
            pass
        return facts


def _library(stack: Stack) -> str | None:
    """The package that calls the constructor; None if it is the user's code."""
    for spot in stack:
        if spot.module.startswith(_TORCH):
            continue
        return spot.module.partition(".")[0] if is_library(spot.file) else None
    return None
