"""The agent's last line on stderr: rank 0's verdict on the run when it ends."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from telemetry.diagnosis.verdict import RankWaits, RunFacts
from telemetry.model.records import COMPUTE, DATA_WAIT, StallRecord

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.diagnosis.verdict import Verdict
    from telemetry.model.records import RankPace
    from telemetry.model.totals import Totals


def with_peers(facts: RunFacts, peers: Sequence[RankPace]) -> RunFacts:
    """The facts of this rank with those that the last paces of other ranks tell, also of ended ones.

    The pace of a running rank is a few seconds old.
    """
    starved_ratio = facts.ranks[0].starved_ratio
    waits = [
        RankWaits(
            rank=peer.rank,
            steps=peer.last_step,
            wait_seconds=peer.run_wait_seconds,
            compute_seconds=peer.run_loop_seconds - peer.run_wait_seconds,
            first_wait_seconds=peer.run_first_wait_seconds,
            exposed_seconds=peer.run_exposed_seconds,
            starved_ratio=starved_ratio,
        )
        for peer in peers
        if peer.run_exposed_seconds is not None
    ]
    stalls = [
        StallRecord(rank=peer.rank, cause=cause, evidence={"lost_seconds": {cause: peer.run_lost_seconds}})
        for peer in peers
        if (cause := peer.run_cause)
    ]
    return replace(facts, ranks=[*facts.ranks, *waits], stalls=[*facts.stalls, *stalls])


def own_waits(totals: Totals, rank: int, starved_ratio: float, unmeasured: str | None) -> RankWaits:
    """The waits of this rank. ``unmeasured``: why its exposed wait is not measured."""
    return RankWaits(
        rank=rank,
        steps=totals.steps,
        wait_seconds=totals.ledger_seconds.get(DATA_WAIT, 0.0),
        compute_seconds=totals.ledger_seconds.get(COMPUTE, 0.0),
        first_wait_seconds=totals.first_wait_seconds,
        exposed_seconds=totals.exposed_wait_seconds,
        unseen_steps=totals.unseen_steps,
        starved_ratio=starved_ratio,
        unmeasured=unmeasured or "",
    )


def end_line(verdict: Verdict, run_dir: Path | None) -> str:
    """The line, without its line break. ``run_dir``: None if the run has no log."""
    see = "" if run_dir is None else f"; see: telemetry report {shlex.quote(str(run_dir))}"
    return f"telemetry: {verdict.text.removesuffix('.')}{see}"
