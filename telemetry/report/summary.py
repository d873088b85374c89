"""Makes the report of a run from its logs: the values of ``report --json``, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.diagnosis.hangs import HANG_KINDS
from telemetry.diagnosis.hangs import UNKNOWN as UNKNOWN_HANG
from telemetry.diagnosis.verdict import (
    STARVED_RATIO,
    GpuHours,
    GrowingMemory,
    RankClaim,
    RankWaits,
    RunFacts,
    ShownTrace,
    Verdict,
    judge,
    trace_shows,
)
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT, LOST
from telemetry.report.attempts import FAILED, KILLED, MISSED_WINDOWS, RUNNING, log_interval
from telemetry.report.contract import (
    Change,
    ChangedFigure,
    Durations,
    Growth,
    Hang,
    Rank,
    ReportValues,
    Snapshot,
    Suspect,
    Waiting,
)
from telemetry.report.goodput import PRODUCTIVE, cost_of, energy_of, goodput_of, job_of, throughput_of
from telemetry.report.process_log import (
    findings_of,
    lost_by_cause,
    not_replaced,
    stalls_of,
    take_lines_of_slow_ranks,
    unix,
)
from telemetry.trace.files import TraceError
from telemetry.trace.reader import read_trace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog
    from telemetry.util.sketch import Sketch

_MAX_RANKS: Final = 1 << 17


@dataclass(frozen=True)
class Report:
    """The contents of the report. The text, ``--json`` and the page render it.

    Attributes:
        values: contents of ``--json``.
        verdict: verdict on the processes that no later one has replaced: ``now``.
        processes: all processes of the run, by rank and start.
        goodput: where the wall clock of the run went.
        lost_seconds: time lost in stalls, by cause, over all processes.
        over: ids of the processes that have ended, by themselves or not.
        notes: a line for each thing that is missing or damaged in the logs.
    """

    values: ReportValues
    verdict: Verdict
    now: Sequence[ProcessLog]
    processes: Sequence[ProcessLog]
    goodput: Goodput
    lost_seconds: dict[str, float]
    over: set[int]
    notes: list[str]


def report_of(run_dir: Path, processes: Sequence[ProcessLog], now: float) -> Report:
    """Make the report of a run from its processes, as `load` returns them. ``now``: Unix time."""
    current = not_replaced(processes)
    goodput = goodput_of(processes, now)
    lives = [(course.attempt.number, life) for course in goodput.courses for life in course.attempt.lives]
    attempt_of = {id(life.log): number for number, life in lives}
    ranks = [_rank(process, attempt_of.get(id(process))) for process in processes]
    stalls = [stall for process in processes for stall in stalls_of(process)]
    take_lines_of_slow_ranks(stalls, processes)
    snapshots, problems = _snapshots(run_dir, processes)
    over = {id(life.log) for _, life in lives if life.how != RUNNING}
    facts = replace(
        _facts(current),
        same_rank=_same_ranks(current),
        trace=_newest(snapshots),
        gpu_hours=_gpu_hours(goodput),
        killed_by_oom=_killed_by_oom(goodput),
        memory=_memory_that_ends(current, over),
    )
    verdict = judge(facts)
    values = ReportValues(
        run=processes[-1].run,
        verdict=verdict.text,
        ranks=ranks,
        stalls=stalls,
        findings=findings_of(processes),
        hang=hang_of(current),
        changes=_changes(processes),
        snapshots=snapshots,
        job=job_of(processes, goodput),
        throughput=throughput_of(ranks),
        gpu_energy_joules=energy_of(ranks, processes),
        cost=cost_of(ranks, processes, goodput),
    )
    notes = [*_notes(processes, goodput, now), *problems]
    return Report(values, verdict, current, processes, goodput, lost_by_cause(processes), over, notes)


def _rank(process: ProcessLog, attempt: int | None) -> Rank:
    totals, overhead = process.totals, process.totals.get("overhead_seconds", {})
    ledger = {c: float(process.ledger.get(c, 0.0)) for c in CATEGORIES}
    loop, exposed = ledger[DATA_WAIT] + ledger[COMPUTE], totals.get("exposed_wait_total_seconds")
    return Rank(
        rank=process.rank,
        local_rank=process.head.get("local_rank"),
        node=process.head.get("node"),
        pid=process.pid,
        steps=totals.get("steps_total", 0),
        samples=totals.get("samples_total"),
        tokens=totals.get("tokens_total"),
        gpu_energy_joules=totals.get("gpu_energy_total_joules"),
        wall_seconds=float(totals.get("wall_seconds", 0.0)),
        ledger=ledger,
        step_seconds=_durations(process.step),
        data_wait_seconds=_durations(process.wait),
        exposed_wait_ratio=exposed / loop if exposed is not None and loop > 0 else None,
        overhead_seconds={name: overhead.get(name, 0.0) for name in ("training", "agent")},
        memory=msgspec.convert(totals.get("memory", {}), Growth),
        attempt=attempt,
    )


def _durations(sketch: Sketch) -> Durations:
    values = sketch.percentiles()
    return Durations() if values is None else Durations(*(round(value, 6) for value in asdict(values).values()))


def _changes(processes: Sequence[ProcessLog]) -> list[Change]:
    """The changes of all ranks, the oldest first. Damaged ones are left out."""
    changes = [
        Change(
            line["at"],
            line.get("first_step"),
            process.rank,
            line["ratio"],
            line.get("part"),
            [ChangedFigure(**each) for each in line.get("with", []) if each.keys() >= {"what", "before", "after"}],
        )
        for process in processes
        for line in process.changes
        if line.get("ratio", 0) > 0 and unix(str(line.get("at"))) is not None
    ]
    return sorted(changes, key=lambda change: (change.at, change.rank))


# -- the traces of snapshots ---------------------------------------------------------------------------------------


def _snapshots(run_dir: Path, processes: Sequence[ProcessLog]) -> tuple[list[Snapshot], list[str]]:
    """The snapshots with the contents of their traces, and the reason for each trace that could not be read."""
    snapshots, problems = [], []
    for process in processes:
        for line in process.snapshots:
            if not line.get("path"):
                continue
            snapshot = Snapshot(
                rank=process.rank,
                first_step=line.get("first_step"),
                last_step=line.get("last_step"),
                path=line["path"] or "",
                reason=line.get("reason"),
                breakdown=line.get("breakdown") or {},
            )
            snapshots.append(snapshot)
            path = PurePosixPath(snapshot.path)
            if path.is_absolute() or ".." in path.parts or path.parts[:1] != ("snapshots",):
                problems.append(f"snapshot {path}: it lies outside of the run folder and was not read")
                continue
            try:
                trace = read_trace(run_dir / path, follow=False)
            except TraceError as error:
                problems.append(f"snapshot: {error}")
                continue
            snapshot.breakdown = {name: round(ratio, 4) for name, ratio in trace.average.categories.items()}
            snapshot.flops, snapshot.advice = trace.flops, [*trace.advice]
    return snapshots, problems


def _newest(snapshots: Sequence[Snapshot]) -> ShownTrace | None:
    """The newest trace that was read."""
    read = [snapshot for snapshot in snapshots if snapshot.breakdown]
    if not read:
        return None
    newest = max(read, key=lambda snapshot: (snapshot.last_step or 0, -snapshot.rank))
    shown = trace_shows(newest.breakdown, newest.suggestions)
    return ShownTrace(newest.rank, newest.first_step, newest.last_step, shown)


# -- the verdict ---------------------------------------------------------------------------------------------------


def verdict_of(processes: Sequence[ProcessLog]) -> Verdict:
    """The verdict on processes that no later one has replaced, by their logs alone."""
    return judge(_facts(processes))


def _facts(processes: Sequence[ProcessLog]) -> RunFacts:
    hang = hang_of(processes)
    ledger: Counter[str] = Counter()
    for process in processes:
        ledger.update(process.ledger)
    stalls = [(process, stalls_of(process)) for process in processes]
    return RunFacts(
        ranks=[_waits(process) for process in processes],
        stalls=[stall for _, own in stalls for stall in own],
        findings=findings_of(processes),
        hang=hang.verdict if hang is not None and hang.waiting else "",
        stuck=[
            (stall, process.ended)
            for process, own in stalls
            for stall in own[-1:]
            if stall.stuck_in is not None and (stall.closed is None or "stuck_for_seconds" in process.end)
        ],
        ended=all(process.ended for process in processes),
        ledger=ledger,
        children=sum(process.totals.get("child_processes", 0) for process in processes),
        step_lines={process.rank: process.step_lines for process in processes if process.step_lines},
    )


def hang_of(processes: Sequence[ProcessLog]) -> Hang | None:
    """Why the job hangs; None if it does not, or goes on.

    Each node logs why the job hangs. The line with the fewest silent ranks counts, of several the newest.
    """
    lines = [line for process in processes for line in process.hangs]
    over = max((line.get("time", "") for line in lines if line.get("over")), default="")
    open_lines = [line for line in lines if line.get("time", "") > over and line.get("verdict")]
    if not open_lines:
        return None
    best = max(open_lines, key=lambda line: (-line.get("silent_ranks", 0), line.get("time", "")))
    kind = best.get("kind")
    return Hang(
        best.get("since"),
        best["verdict"],
        kind if kind in HANG_KINDS else UNKNOWN_HANG,
        msgspec.convert(best.get("suspects", []), list[Suspect]),
        [
            Waiting(_expanded(each.get("ranks", [])), each.get("collective"), each.get("sequence"))
            for each in best.get("waiting", [])
        ],
    )


def _expanded(spans: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of some ranges, at most `_MAX_RANKS`: a damaged log may name more than fit into the memory."""
    ranks: list[int] = []
    for first, last in spans:
        ranks += range(first, min(last + 1, first + _MAX_RANKS - len(ranks)))
    return ranks


def _waits(process: ProcessLog) -> RankWaits:
    totals = process.totals
    return RankWaits(
        rank=process.rank,
        steps=totals.get("steps_total", 0),
        wait_seconds=float(process.ledger.get(DATA_WAIT, 0.0)),
        compute_seconds=float(process.ledger.get(COMPUTE, 0.0)),
        first_wait_seconds=totals.get("first_wait_seconds", 0.0),
        exposed_seconds=totals.get("exposed_wait_total_seconds"),
        unseen_steps=totals.get("unseen_steps_total", 0),
        starved_ratio=process.setting("stall_enter_ratio", STARVED_RATIO),
        unmeasured=totals.get("exposed_wait_absent", ""),
    )


def _same_ranks(processes: Sequence[ProcessLog]) -> dict[int, list[RankClaim]]:
    """Training processes that claim one rank at the same time, by that rank."""
    by_rank: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.get("steps_total"):
            by_rank.setdefault(process.head.get("claimed_rank", process.rank), []).append(process)
    found = {}
    for rank, same in sorted(by_rank.items()):
        claims = [
            RankClaim(one.pid, one.head.get("node"), one.rank if one.rank != rank else None)
            for one in same
            if any(o is not one and one.started <= o.last_time and o.started <= one.last_time for o in same)
        ]
        if claims:
            found[rank] = claims
    return found


def _gpu_hours(goodput: Goodput) -> GpuHours | None:
    total, ends = sum(goodput.rank_seconds.values()), [course.attempt.how for course in goodput.courses]
    if len(ends) < 2 or total <= 0:
        return None
    productive, lost = goodput.rank_seconds[PRODUCTIVE], {c: goodput.rank_seconds[c] for c in LOST}
    return GpuHours(total, productive, lost, ends.count(KILLED), ends.count(FAILED))


def _killed_by_oom(goodput: Goodput) -> str:
    attempt = goodput.courses[-1].attempt if goodput.courses else None
    return "" if attempt is None or attempt.oom is None or not attempt.broke_off else attempt.oom.text


def growing_memory(process: ProcessLog, *, over: bool) -> GrowingMemory | None:
    """The memory of a process that grows, or that will run out; None if there is none. ``over``: it has ended."""
    said = process.totals.get("memory", {})
    if not said.get("growth_bytes_per_hour") and "exhausted_in_seconds" not in said:
        return None
    return GrowingMemory(
        rank=process.rank,
        node=process.head.get("node"),
        where=said.get("where"),
        bytes_per_hour=said.get("growth_bytes_per_hour", 0),
        advice=said.get("advice", ""),
        exhausted_in_seconds=said.get("exhausted_in_seconds"),
        exhausted=said.get("exhausted", ""),
        over=over,
    )


def _memory_that_ends(processes: Sequence[ProcessLog], over: Collection[int]) -> GrowingMemory | None:
    """The memory that runs out first; None if none is about to, or if the run has finished."""
    told = [
        growing_memory(process, over=id(process) in over)
        for process in processes
        if not (process.ended and not process.end.get("exception") and not process.end.get("exit_status"))
    ]
    ends = [
        (memory.where is None, memory.exhausted_in_seconds, memory)
        for memory in told
        if memory is not None and memory.exhausted_in_seconds is not None
    ]
    # A rank also reports that another rank fills the memory. Name the one that fills it.
    return min(ends, key=lambda end: end[:2])[2] if ends else None


def _notes(processes: Sequence[ProcessLog], goodput: Goodput, now: float) -> list[str]:
    notes: list[str] = []
    lives = {id(life.log): (course.attempt, life) for course in goodput.courses for life in course.attempt.lives}
    for process in processes:
        who, (attempt, life) = f"rank {process.rank} (pid {process.pid})", lives.get(id(process), (None, None))
        if not process.ended and not (life and life.replaced):
            newest, killed = unix(process.last_time), life is not None and life.how == KILLED
            oom = attempt.oom if attempt and killed else None
            if oom is not None and oom.all_ranks and oom.sure and process.rank in oom.ranks:
                how = "was killed by the OOM killer"
            elif killed or newest is None or now - newest > MISSED_WINDOWS * log_interval(process):
                how = "did not end by itself"
            else:
                how = "is running"
            notes.append(f"{who} {how}; newest line {process.last_time}")
        if process.torn_lines:
            notes.append(f"{who}: {process.torn_lines} line(s) of its log are torn and were skipped")
        if process.wrong_fields:
            notes.append(f"{who}: {process.wrong_fields} field(s) of its log are of the wrong type and were left out")
        notes += [f"{name} is no regular file and was not read" for name in process.skipped]
        failures = [line for line in process.errors if line.get("errors_total")]
        if failures:
            text = failures[-1].get("message")
            notes.append(f"{who}: {len(failures)} failure(s) of the agent's own parts, the newest: {text}")
    return notes
