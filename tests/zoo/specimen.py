"""A specimen: one training script with its arguments, and what the agent must find in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOADER_SETTINGS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
"""The options that every script has, by the names of DataLoader's arguments."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """One training run with a known problem.

    Attributes:
        name: a unique name.
        script: file in ``scripts/``, without its suffix. ``arguments``: its own arguments.
        causes: the causes that are right; more than one if two causes of the closed set apply. Empty for a healthy
            control.
        both: whether all of them cost about as much, and all have to be named.
        remedies: by cause, the arguments that follow advice other than a loader's setting, or a function that makes
            them from its value.
        takes_settings: whether the script uses a loader's settings.
        seconds: length of the training.
        ranks: with more than one, it runs under torchrun. Then the peers of ``slow_rank`` must name it as straggler.
        cores: how many cores the run may use; None for all.
        about: the kind of script, in a few words.
    """

    name: str
    script: str
    causes: tuple[str, ...]
    about: str
    arguments: tuple[str, ...] = ()
    remedies: Mapping[str, tuple[str, ...] | Callable[[int], tuple[str, ...]]] = field(default_factory=dict)
    seconds: float = 22.0
    ranks: int = 1
    slow_rank: int | None = None
    cores: int | None = None
    takes_settings: bool = True
    both: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the specimen has no problem."""
        return not self.causes

    def with_advice(self, cause: str, setting: str | None, value: str | None) -> tuple[str, ...] | None:
        """The arguments that follow advice, after the script's own; None if it cannot be followed here."""
        if setting not in LOADER_SETTINGS:
            remedy = self.remedies.get(cause)
            return remedy(int(value or 0)) if callable(remedy) else remedy
        return (f"--{setting.replace('_', '-')}", value) if self.takes_settings and value is not None else None


def words(text: str) -> tuple[str, ...]:
    """The arguments of a command line without quotes."""
    return tuple(text.split())
