"""What is true of a script of a campaign, and how it is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

LOADER_SETTINGS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
"""The options that every script of the zoo has, by the names of DataLoader's arguments."""

MARK: Final = "# <- slow"
"""Ends the line of a script that must be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """One training run with a known fault, or with none.

    Attributes:
        name: a unique name. ``about``: the kind of script, in a few words, or the public reports that it is after.
        script: its file. ``arguments``, ``variables``: its own.
        causes: the causes of stalls or kinds of findings that are right, if one of them is named first. Empty for a
            healthy control.
        both: whether all of them cost about as much, and all have to be named.
        line: whether a marked line of the script must be named.
        advice: the right first advice, a regular expression for its setting and action (``num_workers: use more
            workers``). Empty: any, or none. ``harmful``: advice that must not be given at all.
        end: how the run ends, if that is its fault. Then the verdict must match ``end_said`` instead of naming a cause.
        hang: kind of the hang that ends a job, with ``slow_rank`` as the suspect; empty without a hang.
        ranks: with more than one, it runs under torchrun. Then the peers of ``slow_rank`` must name it as straggler.
        nodes: emulated nodes on which these ranks are. With more than one, its peers must also name its node, and give
            a reason with ``reason`` in it. Which rank is slow changes with each repetition.
        whole_node: whether all ranks of that node are slow. Then each of them may be named.
        fixed: further arguments that mend the fault, of a script that takes the number of workers from a variable. Of
            others ``remedies`` has by cause the arguments that follow advice other than a loader's setting, or a
            function that makes them from its value.
        takes_settings: whether the script's command line has a loader's settings.
        seconds: length of the training. ``cores``: how many cores the run may use; None for all.
        shared_memory: size of /dev/shm; empty for that of the machine. ``needs``: a package that the script imports.
        silent: whether a finding is an alarm, too. Of the zoo's controls hints are allowed.
    """

    name: str
    script: Path
    about: str = ""
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    both: bool = False
    line: bool = False
    advice: str = ""
    harmful: str = ""
    end: str = ""
    end_said: str = ""
    hang: str = ""
    ranks: int = 1
    nodes: int = 1
    slow_rank: int | None = None
    whole_node: bool = False
    reason: str = ""
    fixed: tuple[str, ...] = ()
    remedies: Mapping[str, tuple[str, ...] | Callable[[int], tuple[str, ...]]] = field(default_factory=dict)
    takes_settings: bool = True
    seconds: float = 22.0
    cores: int | None = None
    shared_memory: str = ""
    needs: str = ""
    silent: bool = False

    @property
    def healthy(self) -> bool:
        """Whether it has no fault."""
        return not self.causes and not self.fails

    @property
    def fails(self) -> bool:
        """Whether its fault is how it ends, with another exit status than 0."""
        return bool(self.end or self.hang)

    @property
    def truth(self) -> str:
        """What is true of it, for a table."""
        return " or ".join(self.causes) or self.end or (f"hang: {self.hang}" if self.hang else "healthy")

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

    @property
    def marked(self) -> frozenset[str]:
        """The marked lines, such as ``one_shard.py:17``."""
        text = self.script.read_text(encoding="utf-8").splitlines()
        return frozenset(f"{self.script.name}:{number}" for number, line in enumerate(text, 1) if line.endswith(MARK))

    def repeated(self, repetition: int) -> Specimen:
        """How it is run in a repetition: in a job of several nodes another rank is slow each time."""
        if self.nodes == 1 or self.slow_rank is None:
            return self
        return replace(self, slow_rank=(self.slow_rank + repetition) % self.ranks)

    def with_advice(self, cause: str, advice: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]] | None:
        """The arguments and variables that follow advice of a report, after its own; None if that is not possible here."""
        setting, value = advice.get("setting"), advice.get("value")
        if self.fixed:
            workers = re.search(r"num_workers=(\d+)", f"{setting}={value} {advice['action']}")
            variables = {} if workers is None else {"WORKERS": workers[1]}
            return () if setting == "num_workers" else self.fixed, variables
        added: tuple[str, ...] | None
        if setting in LOADER_SETTINGS:
            added = (f"--{setting.replace('_', '-')}", value) if self.takes_settings and value is not None else None
        else:
            remedy = self.remedies.get(cause)
            added = remedy(int(value or 0)) if callable(remedy) else remedy
        return None if added is None else (added, {})
