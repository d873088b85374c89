"""The job as the live view shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from telemetry.core.rank_ranges import named
from telemetry.report.attempts import RUNNING
from telemetry.report.hang_report import hang_of
from telemetry.top.live_verdict import UNSURE, Verdict, verdict_now
from telemetry.top.rank_row import RankRow, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.run_verdict import JudgedRun
    from telemetry.top.rank_row import RankFacts


@dataclass(frozen=True, slots=True)
class JobView:
    """All that is shown.

    Attributes:
        verdict: the first line.
        run: name of the run.
        rows: the ranks, in no order.
        notes: what is missing or cannot be read.
        running: whether any rank runs.
        seen: Unix time of this state.
        overdue: Unix time from which a newer one is overdue; 0 if it is not known when the next one comes.
    """

    verdict: Verdict
    run: str = ""
    rows: tuple[RankRow, ...] = ()
    notes: tuple[str, ...] = ()
    running: bool = False
    seen: float = 0.0
    overdue: float = 0.0
    nodes: int = field(default=0)

    def newest_stall(self) -> tuple[RankRow, dict[str, Any]] | None:
        """The newest open stall, else the newest; of ranks that wait for another one only where there is no other."""
        found = [(row, row.stalls[-1]) for row in self.rows if row.stalls]
        return max(
            found,
            key=lambda each: (each[1]["closed"] is None, each[1]["cause"] != "straggler", str(each[1]["opened"])),
            default=None,
        )


def waiting(text: str, now: float, notes: Sequence[str] = ()) -> JobView:
    """A view without a rank: nothing is there yet."""
    return JobView(Verdict(text, UNSURE), notes=tuple(notes), seen=now)


def job_view(
    facts: Sequence[RankFacts], now: float, notes: Sequence[str] = (), whole: JudgedRun | None = None
) -> JobView:
    """The view of a job.

    Args:
        facts: of the processes that no later one has replaced, at least one.
        now: Unix time.
        notes: what cannot be read.
        whole: the report's verdict, if the run has ended and its logs can be read.
    """
    running = any(each.how == RUNNING for each in facts)
    hang = hang_of([each.log for each in facts]) if running else None
    suspects = {s["rank"]: str(s.get("doing") or "others wait") for s in hang["suspects"]} if hang else {}
    waits = frozenset(rank for group in hang["waiting"] for rank in group["ranks"]) if hang else frozenset()
    rows = tuple(row_of(each, now, suspects, waits) for each in facts)
    nodes = {row.node for row in rows}
    return JobView(
        verdict=verdict_now(facts, now, whole),
        run=facts[-1].log.run,
        rows=rows,
        notes=(*notes, *_missing(facts)) if running else tuple(notes),
        running=running,
        seen=now,
        nodes=len(nodes),
    )


def _missing(facts: Sequence[RankFacts]) -> list[str]:
    size = max((each.log.head.get("world_size") or 0 for each in facts), default=0)
    if size > 1 << 17:  # a damaged log
        return []
    ranks = set(range(size)) - {each.log.rank for each in facts}
    if not ranks:
        return []
    return [f"nothing is known of {named(ranks)}: the job has {size} ranks"]
