"""Two runs that are compared, and what their logs tell of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from telemetry.compare.pace_interval import ratio_interval
from telemetry.compare.run_facts import facts_of
from telemetry.compare.run_pace import pace_of
from telemetry.compare.same_load import without_others
from telemetry.report.process_log import not_replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.compare.pace_interval import RatioInterval
    from telemetry.compare.run_pace import RunPace
    from telemetry.compare.same_load import SameLoad
    from telemetry.report.process_log import ProcessLog


@dataclass(frozen=True, slots=True)
class Run:
    """One of the runs that are compared.

    Attributes:
        logs: all processes in its folder. ``processes``: those that no later one has replaced.
        pace, facts: of these.
    """

    logs: Sequence[ProcessLog]
    processes: Sequence[ProcessLog]
    pace: RunPace
    facts: dict[str, Any]

    @classmethod
    def of(cls, logs: Sequence[ProcessLog]) -> Run:
        """From all processes in the folder of a run."""
        processes = not_replaced(logs)
        return cls(logs, processes, pace_of(processes), facts_of(processes))

    @property
    def name(self) -> str:
        """The run's name; empty if it has no process."""
        return self.processes[-1].run if self.processes else ""

    @property
    def started(self) -> str:
        """When its first process started, as ISO 8601; empty if it has none."""
        return min((process.started for process in self.processes), default="")


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of A and one of B that can be compared.

    Attributes:
        a, b: the two runs.
        measured: the ratio as measured.
        same_load: without the time in which other programs held the runs up; None if that is not known.
    """

    a: Run
    b: Run
    measured: RatioInterval
    same_load: SameLoad | None

    @classmethod
    def of(cls, a: Run, b: Run) -> Pair:
        """Compare two runs that are long enough."""
        measured = ratio_interval(a.pace.blocks, b.pace.blocks, a.pace.ranks)
        return cls(a, b, measured, without_others(a.pace.blocks, b.pace.blocks, a.pace.ranks))


def turns_of(pairs: Sequence[tuple[Run, Run]]) -> int:
    """How often a run of one side started next after a run of the other: 1 if all of A ran before all of B.

    What takes many minutes to pass cannot be told from a difference between the versions more often than this.
    """
    in_order = sorted(((run.started, side) for pair in pairs for side, run in enumerate(pair)), key=itemgetter(0))
    return sum(before != after for (_, before), (_, after) in pairwise(in_order))
