"""A specimen: one training script with its arguments, and what has to be found in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOADER_SETTINGS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
"""What every script takes on its command line, by the names of DataLoader's arguments."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """One training run whose trouble is known.

    Attributes:
        name: unique.
        script: in ``scripts/``, without its suffix; ``arguments`` are its own.
        causes: what may be named as the cause; more than one where the closed set has two words for it. Empty for a
            healthy control.
        remedies: by cause, the arguments that follow an advice that is no setting of a loader, or a function that
            makes them of its value.
        takes_settings: whether the script has a use for a loader's settings.
        seconds: of training.
        ranks: more than one runs under torchrun; then the peers of ``slow_rank`` have to say that they wait for it.
        cores: how many the run may use; None for all.
        about: the style, in a few words.
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

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.causes

    def with_advice(self, cause: str, setting: str | None, value: str | None) -> tuple[str, ...] | None:
        """The arguments that follow an advice, after the script's own; None where it cannot be followed here."""
        if setting not in LOADER_SETTINGS:
            remedy = self.remedies.get(cause)
            return remedy(int(value or 0)) if callable(remedy) else remedy
        return (f"--{setting.replace('_', '-')}", value) if self.takes_settings and value is not None else None


def words(text: str) -> tuple[str, ...]:
    """The arguments of a command line without quotes."""
    return tuple(text.split())
