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
        nodes: emulated nodes on which these ranks are. With more than one, its peers must also name its node, and give
            a reason with ``reason`` in it.
        whole_node: whether all ranks of that node are slow. Then each of them may be named.
        hang: kind of the hang that ends the job, with ``slow_rank`` as the suspect; empty without a hang.
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
    nodes: int = 1
    slow_rank: int | None = None
    whole_node: bool = False
    reason: str = ""
    hang: str = ""
    cores: int | None = None
    takes_settings: bool = True
    both: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the specimen has no problem."""
        return not self.causes and not self.hang

    @property
    def truth(self) -> str:
        """What is true of it, for a table."""
        return " or ".join(self.causes) or (f"hang: {self.hang}" if self.hang else "healthy")

    @property
    def slow_node(self) -> str:
        """The name of the node of ``slow_rank``."""
        return self._node_of(self.slow_rank or 0)

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """The ranks of which each may be named."""
        if not self.whole_node:
            return () if self.slow_rank is None else (self.slow_rank,)
        return tuple(rank for rank in range(self.ranks) if self._node_of(rank) == self.slow_node)

    def _node_of(self, rank: int) -> str:
        return f"n{rank * self.nodes // self.ranks + 1}"

    def with_advice(self, cause: str, setting: str | None, value: str | None) -> tuple[str, ...] | None:
        """The arguments that follow advice, after the script's own; None if it cannot be followed here."""
        if setting not in LOADER_SETTINGS:
            remedy = self.remedies.get(cause)
            return remedy(int(value or 0)) if callable(remedy) else remedy
        return (f"--{setting.replace('_', '-')}", value) if self.takes_settings and value is not None else None


def words(text: str) -> tuple[str, ...]:
    """The arguments of a command line without quotes."""
    return tuple(text.split())
