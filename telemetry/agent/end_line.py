"""The agent's last line on stderr: rank 0's verdict on the run when it ends."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from telemetry.diagnosis.verdict import RankWaits, RunEnd, RunFacts, judge
from telemetry.model.records import COMPUTE, DATA_WAIT, StallRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from telemetry.diagnosis.findings import Finding
    from telemetry.diagnosis.verdict import GpuFault, Verdict
    from telemetry.log.lines import RunEndLine
    from telemetry.model.records import HotLine, RankPace
    from telemetry.model.totals import Totals


def verdict_at_end(
    own: RankWaits,
    ledger: Mapping[str, float],
    *,
    stall: StallRecord | None = None,
    findings: Sequence[Finding] = (),
    peers: Sequence[RankPace] = (),
    world_size: int = 1,
    stuck: StallRecord | None = None,
    job_hang: str = "",
    children: int = 0,
    step_lines: Sequence[HotLine] = (),
    end: RunEndLine | None = None,
    gpu_fault: GpuFault | None = None,
) -> Verdict:
    """Judge the run from this rank.

    Args:
        own: the waits of this rank.
        ledger: its seconds by category.
        stall: its costliest stall; None without one.
        findings: the findings of this rank, the most important first.
        peers: the last paces of other ranks, also of ended ones. A running rank's is a few seconds old.
        world_size: number of ranks in the job.
        stuck: the stall in which this rank was stuck until the end; None if it was not.
        job_hang: why the whole job was stuck, if that is known.
        children: processes that the script has started with multiprocessing.
        step_lines: the lines of code in which its steps spend their time.
        end: how this process ends; None if only its agent does.
        gpu_fault: what its GPU reported shortly before; None if nothing.
    """
    stalls = [
        *([] if stall is None else [stall]),
        *(_stall_of(peer, peer.run_cause) for peer in peers if peer.run_cause),
    ]
    return judge(
        RunFacts(
            ranks=[own, *(found for peer in peers if (found := _waits_of(peer, own.starved_ratio)))],
            stalls=stalls,
            findings=findings,
            world_size=world_size,
            hang=job_hang if stuck is not None else "",
            stuck=[] if stuck is None else [(stuck, True)],
            ended=True,
            broke_off=end is not None and end.failed,
            end=RunEnd((own.rank,), end, gpu_fault=gpu_fault) if end is not None and end.failed else None,
            ledger=ledger,
            ledger_in_full=True,
            children=children,
            step_lines={own.rank: step_lines},
        )
    )


def _waits_of(peer: RankPace, starved_ratio: float) -> RankWaits | None:
    """The waits of another rank over the run; None if its exposed wait is unknown."""
    if peer.run_exposed_seconds is None:
        return None
    return RankWaits(
        rank=peer.rank,
        steps=peer.last_step,
        wait_seconds=peer.run_wait_seconds,
        compute_seconds=peer.run_loop_seconds - peer.run_wait_seconds,
        first_wait_seconds=peer.run_first_wait_seconds,
        exposed_seconds=peer.run_exposed_seconds,
        starved_ratio=starved_ratio,
    )


def _stall_of(peer: RankPace, cause: str) -> StallRecord:
    return StallRecord(rank=peer.rank, cause=cause, evidence={"lost_seconds": {cause: peer.run_lost_seconds}})


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
