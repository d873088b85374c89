"""The agent's last words on stderr: rank 0's verdict on the run when it ends, and where its steps spent their time."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.verdict import RankWaits, RunFacts, whole_ledger
from telemetry.model.records import BACKWARD, COMPUTE, COPY, DATA_WAIT, FORWARD, OPTIMIZER, StallRecord
from telemetry.util.words import byte_size, duration, percent, rounded_percent, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.diagnosis.verdict import Verdict
    from telemetry.log.lines import HostLine
    from telemetry.model.records import RankPace, Samples
    from telemetry.model.totals import Tick, Totals


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
        estimated_steps=totals.estimated_steps,
        wait_seconds=totals.ledger_seconds.get(DATA_WAIT, 0.0),
        compute_seconds=totals.ledger_seconds.get(COMPUTE, 0.0),
        first_wait_seconds=totals.first_wait_seconds,
        exposed_seconds=totals.exposed_wait_seconds,
        unseen_steps=totals.unseen_steps,
        starved_ratio=starved_ratio,
        unmeasured=unmeasured or "",
    )


_MOST_LINES: Final = 15


def end_lines(verdict: Verdict, shown: Sequence[str], run_dir: Path | None, *, short: bool = False) -> list[str]:
    """The lines, without their line breaks.

    Args:
        verdict: the verdict.
        shown: the table.
        run_dir: None if the run has no log.
        short: whether all is to be in one line.
    """
    see = "" if run_dir is None else f"; see: telemetry report {shlex.quote(str(run_dir))}"
    first, *others = [verdict.text] if short else verdict.lines_within(_MOST_LINES - len(shown))
    return [f"telemetry: {first.removesuffix('.')}{see}", *others, *shown]


_MIN_LOOP_SECONDS: Final = 1.0
"""A table of a shorter training loop would be about its first steps alone."""

_ROWS: Final = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer", COPY: "copies"}


def end_table(waits: RankWaits, tick: Tick, samples: Samples, host: HostLine, *, several: bool = False) -> list[str]:
    """Where the time of the mean step went, and what it used; at most 11 lines. Empty for a loop of a moment.

    The shares are those of the verdict: it leaves out a long wait for the first batch. What was not measured is absent,
    or a dash.

    Args:
        waits: of this rank.
        tick: the newest.
        samples: the newest.
        host: the newest line of the log, because the report has its memory, too.
        several: whether there are other ranks.
    """
    totals, first = tick.totals, waits.first_wait_seconds if waits.starved_at_first else 0.0
    loop, steps = waits.loop_seconds - first, totals.steps or totals.estimated_steps
    if not steps or loop < _MIN_LOOP_SECONDS:
        return []
    split = totals.compute_parts or {}
    parts = {name: split[part] for part, name in _ROWS.items() if split.get(part)}
    seconds: dict[str, float | None] = {"wait": None if totals.waits_unseen else waits.wait_seconds - first, **parts}
    seconds["rest" if parts else "compute"] = max(0.0, totals.compute_seconds - sum(parts.values()))
    rows = [
        [name, "-", "-"] if spent is None else [name, duration(spent / steps), rounded_percent(spent / loop)]
        for name, spent in seconds.items()
    ]
    heading, about = f"a step of rank {waits.rank}" if several else "a step", "" if totals.steps else "about "
    heading += " after the first batch" * (first > 0) + ", on the host" * tick.conditions.on_gpu
    lines = table([heading, "mean", "share"], rows, names_first=True)
    used = {"CPU": _cpu(tick), "memory": _memory(host), "GPU": _gpu(totals, samples)}
    width = max(map(len, (heading, *seconds)))
    lines += [f"{name.ljust(width)}  {text}" for name, text in used.items() if text]
    return [f"  {line}" for line in (about + whole_ledger(steps, totals.measured_seconds), *lines)]


def _cpu(tick: Tick) -> str:
    cpu = tick.totals.sampled.cpu
    if cpu.used_cores.mean is None:
        return ""
    others = cpu.other_cores.mean
    more = "" if others is None else f"; other programs {others:.1f}"
    return f"{cpu.used_cores.mean:.1f} of {tick.conditions.cores:g} cores{more}"


def _memory(host: HostLine) -> str:
    workers = f", of that workers {byte_size(host.workers_bytes)}" if host.workers_bytes else ""
    return "" if host.rank_bytes is None else f"{byte_size(host.rank_bytes)}{workers}"


def _gpu(totals: Totals, samples: Samples) -> str:
    gpu, busy = samples.gpu, totals.sampled.gpu.utilization_ratio.mean
    if gpu is None:
        return ""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    memory = "" if used is None or total is None else f"{byte_size(used)} of {byte_size(total)}"
    return "; ".join(filter(None, [f"busy {percent(busy, 0)}" if busy is not None else "", memory]))
