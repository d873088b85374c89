"""How much is measured, and the readings of several processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child
from benchmarks.instruments import BARE
from benchmarks.spread import Spread, differences, spread
from benchmarks.tool_environment import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable

US: Final = 1e-3
"""Nanoseconds to microseconds."""

MS: Final = 1e-6
"""Nanoseconds to milliseconds."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        life_processes: in how many processes the first minute and the calm state are read.
        first_seconds, calm_seconds: how long a run is young, and how long it is then let alone. After five minutes
            telemetry samples the steps as seldom as in runs of days.
        scrape_seconds: time between two scrapes when it is calm. Many have 15 s in Prometheus.
    """

    name: str
    processes: int
    hot_rounds: int
    hot_steps: int
    cold_rounds: int
    cold_steps: int
    cpu_processes: int
    cpu_slices: int
    life_processes: int
    first_seconds: float
    calm_seconds: float
    scrape_seconds: float
    tail_pairs: int
    memory_pairs: int
    growth_warm_up: int
    growth_steps: int
    growth_pairs: int
    scrape_pairs: int
    segment_seconds: float
    install_traceml: bool

    def loops(self) -> dict[str, Any]:
        """The part that concerns the loops."""
        return {key: getattr(self, key) for key in ("hot_rounds", "hot_steps", "cold_rounds", "cold_steps")}


FULL: Final = Effort(
    name="full",
    processes=3,
    hot_rounds=60,
    hot_steps=240,
    cold_rounds=50,
    cold_steps=12,
    cpu_processes=3,
    cpu_slices=5,
    life_processes=2,
    first_seconds=60.0,
    calm_seconds=250.0,
    scrape_seconds=15.0,
    tail_pairs=8,
    memory_pairs=3,
    growth_warm_up=100_000,
    growth_steps=1_000_000,
    growth_pairs=1,
    scrape_pairs=5,
    segment_seconds=5.0,
    install_traceml=True,
)

QUICK: Final = Effort(
    name="quick: a smoke test, too short for its figures to be quoted",
    processes=1,
    hot_rounds=10,
    hot_steps=80,
    cold_rounds=4,
    cold_steps=6,
    cpu_processes=1,
    cpu_slices=2,
    life_processes=1,
    first_seconds=2.0,
    calm_seconds=0.0,
    scrape_seconds=2.0,
    tail_pairs=1,
    memory_pairs=1,
    growth_warm_up=20_000,
    growth_steps=20_000,
    growth_pairs=1,
    scrape_pairs=1,
    segment_seconds=1.5,
    install_traceml=False,
)


@dataclass
class Pool:
    """Readings of several processes. If all failed, ``missing`` gives the reason."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    missing: str = ""

    def add(self, measure: Callable[[], dict[str, Any]]) -> None:
        """Run a measurement and keep its readings, or the reason why it failed."""
        try:
            self.answers.append(measure())
        except (child.ChildError, ToolError) as error:
            self.missing = str(error)

    def values(self, loop: str, name: str, site: str = "cost") -> list[float]:
        """All readings of an instrument at a site, in the order in which they were taken."""
        return [reading[site] for answer in self.answers for reading in answer[loop][name]]

    def added(self, loop: str, name: str, site: str = "cost") -> Spread | None:
        """What an instrument adds to the bare loop that ran next to it, in microseconds."""
        added = self.differences(loop, name, site)
        return spread(added).scaled(US) if added else None

    def differences(self, loop: str, name: str, site: str = "cost") -> list[float]:
        """The difference of each reading to the bare loop, in nanoseconds."""
        return differences(self.values(loop, name, site), self.values(loop, BARE, site))

    def plain(self, loop: str, name: str, site: str = "cost") -> Spread | None:
        """The duration of a loop, in microseconds."""
        return spread(self.values(loop, name, site)).scaled(US) if self.answers else None
