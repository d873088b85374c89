"""The settings of an exhaustive grid, from the command line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.trial_records import LOADER_SETTINGS, SHARING
from telemetry.tune.trial_result import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS: Final = {"num_workers": 0, "prefetch_factor": 1}
"""Settings that are numbers, and their smallest values."""

_SWITCHES: Final = frozenset({"persistent_workers", "pin_memory", "in_order"})
_CHOICES: Final = {
    "multiprocessing_context": ("fork", "spawn", "forkserver"),
    SHARING: ("file_descriptor", "file_system"),
}
_MAX_TRIALS: Final = 200


class GridError(ValueError):
    """A grid cannot be understood; the text says why."""


def is_grid(text: str) -> bool:
    """Whether an argument is a part of a grid, such as ``num_workers=0,2``."""
    return text.partition("=")[0] in {*LOADER_SETTINGS, SHARING} and "=" in text


def settings_grid(parts: Sequence[str]) -> list[Settings]:
    """All combinations of ``NAME=VALUE,VALUE`` parts, without those that differ in nothing.

    Raises:
        GridError: a name is unknown, a value is not allowed, or there are too many combinations.
    """
    names, values = [], []
    for part in parts:
        name, _, text = part.partition("=")
        if name in names:
            raise GridError(f"{name} is in the grid twice")
        names.append(name)
        values.append([_value(name, one) for one in text.split(",")])
    found: dict[tuple[object, ...], Settings] = {}
    for combination in itertools.product(*values):
        loader = dict(zip(names, combination, strict=True))
        sharing = loader.pop(SHARING, None)
        if loader.get("num_workers") == 0:  # the others mean nothing without workers
            loader = {name: value for name, value in loader.items() if name in {"num_workers", "pin_memory"}}
        settings = Settings(loader, sharing)
        found.setdefault(settings.key(), settings)
    if len(found) > _MAX_TRIALS:
        raise GridError(f"the grid has {len(found)} trials; at most {_MAX_TRIALS} are run")
    return list(found.values())


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        if not text.isdigit() or int(text) < _NUMBERS[name]:
            raise GridError(f"{name} is a whole number from {_NUMBERS[name]} on, not {text!r}")
        return int(text)
    if name in _SWITCHES:
        if text not in {"True", "False"}:
            raise GridError(f"{name} is True or False, not {text!r}")
        return text == "True"
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise GridError(f"{name} is one of {', '.join(_CHOICES[name])}, not {text!r}")
        return text
    raise GridError(
        f"{name!r} is no setting of a DataLoader that can be tuned: {', '.join((*LOADER_SETTINGS, SHARING))}"
    )
