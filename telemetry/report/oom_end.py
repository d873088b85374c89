"""How the OOM killer ended an attempt, and how the report says it."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.core.rank_ranges import named


@dataclass(frozen=True, slots=True)
class OomEnd:
    """What the OOM killer has to do with the end of an attempt.

    Attributes:
        ranks: those that may have been killed by it, or whose process has failed after it has killed another.
        kills: how many processes it has killed.
        killed: whether the ranks were killed. Otherwise they failed: it killed a process that they needed.
        sure: whether the counter was read soon after.
    """

    ranks: tuple[int, ...]
    kills: int
    killed: bool
    sure: bool

    @property
    def all_ranks(self) -> bool:
        """Whether it has killed each of the ranks."""
        return self.killed and self.kills >= len(self.ranks)

    @property
    def text(self) -> str:
        """As it is said in the report."""
        probably = "" if self.sure else "probably "
        ranks = named(self.ranks)
        if self.all_ranks:
            return f"{ranks} {probably}killed by the OOM killer"
        of = f"{self.kills} of {ranks}" if self.killed else f"a process of {ranks}"
        return f"the OOM killer {probably}killed {of}"
