"""Makes the report of a run from its logs: the values of ``report --json``, and the verdict."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hangs import HANG_KINDS, UNKNOWN_HANG
from telemetry.diagnosis.verdict import (
    MemoryEnd,
    RankClaim,
    RankWaits,
    RunFacts,
    TraceShares,
    Verdict,
    judge,
)
from telemetry.log.process import (
    findings_of,
    lost_by_cause,
    not_replaced,
    stalls_of,
    take_lines_of_slow_ranks,
    unix,
)
from telemetry.log.reader import load
from telemetry.model.records import CATEGORIES, COMPUTE, DATA_WAIT, REDONE, REPLAY, RankedAdvice
from telemetry.report.attempt_list import FAILED, KILLED, MISSED_WINDOWS, RUNNING, log_interval
from telemetry.report.contract import (
    Change,
    Durations,
    Growth,
    HangRecord,
    Rank,
    ReportValues,
    Snapshot,
    Waiting,
)
from telemetry.report.course import newest_run
from telemetry.report.goodput import cost_of, energy_of, goodput_of, job_of, throughput_of
from telemetry.trace.events import TraceError
from telemetry.trace.trace_advice import LoadingSuggestion
from telemetry.trace.trace_file import read_trace
from telemetry.util.clock import iso_time
from telemetry.util.words import percent, plain_number, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from telemetry.log.lines import TotalsLine
    from telemetry.log.process import ProcessLog
    from telemetry.report.course import Course
    from telemetry.report.goodput import Goodput
    from telemetry.report.html.over_time import RunRecorder
    from telemetry.util.sketch import Sketch

MAX_RANKS: Final = 1 << 17
"""A damaged log may name more ranks than fit into the memory."""


@dataclass(frozen=True)
class Report:
    """The contents of the report. The text, ``--json`` and the page render it.

    Attributes:
        values: contents of ``--json``.
        verdict: verdict on the processes that no later one has replaced: ``now``.
        processes: all processes of the run, by rank and start.
        lost_seconds: time lost in stalls, by cause, over all processes.
        on_gpus: whether a GPU was seen.
        over: ids of the processes that have ended, by themselves or not.
        notes: a line for each thing that is missing or damaged in the logs.
    """

    values: ReportValues
    verdict: Verdict
    now: Sequence[ProcessLog]
    processes: Sequence[ProcessLog]
    lost_seconds: dict[str, float]
    on_gpus: bool
    over: set[int]
    notes: list[str]

    def of_all_ranks(self, seconds: float) -> str:
        """A loss as a share of the time of all ranks, in all attempts, such as ``3.2 %``; ``-`` without any time."""
        spent = sum(process.totals.wall_seconds for process in self.processes)
        return percent(seconds / spent) if spent > 0 else "-"


def read_report(
    run_dir: Path, recorder: RunRecorder | None = None, *, all_windows: bool = False, traces: bool = True
) -> Report:
    """Read the logs of the newest run in a folder, and make its report.

    Args:
        run_dir: the run folder.
        recorder: takes the lines of that run.
        all_windows: whether no window of a large file is left out.
        traces: whether the traces of snapshots are read, which takes seconds for each.

    Raises:
        NoRunError: the folder has no run.
    """
    return report_of(run_dir, load(run_dir, recorder, all_windows=all_windows), time.time(), traces=traces)


def report_of(run_dir: Path, processes: Sequence[ProcessLog], now: float, *, traces: bool = True) -> Report:
    """Make the report of a run from its processes, as `load` returns them. ``now``: Unix time."""
    goodput, before = goodput_of(processes, now), ""
    first = newest_run(goodput.courses)
    if first:
        before = _run_before(goodput.courses[first - 1])
        kept = {id(life.log) for course in goodput.courses[first:] for life in course.attempt.lives}
        processes = [process for process in processes if id(process) in kept]
        goodput = goodput_of(processes, now)
    current = not_replaced(processes)
    lives = [(course.attempt.number, life) for course in goodput.courses for life in course.attempt.lives]
    attempt_of = {id(life.log): number for number, life in lives}
    ranks = [_rank(process, attempt_of.get(id(process))) for process in processes]
    stalls = [stall for process in processes for stall in stalls_of(process)]
    take_lines_of_slow_ranks(stalls, processes)
    snapshots, problems = _snapshots(run_dir, processes, traces=traces)
    over = {id(life.log) for _, life in lives if life.how != RUNNING}
    end = goodput.courses[-1].attempt.run_end if goodput.courses else None
    ends = [course.attempt.how for course in goodput.courses]
    gpus = any(process.on_gpu or process.environment.get("gpu") for process in processes)
    facts = replace(
        run_facts(current),
        broke_off=end is not None,
        end=end,
        claims=_claims(current),
        trace=_newest_trace(snapshots),
        attempt_seconds={} if len(ends) < 2 else goodput.rank_seconds if gpus else goodput.seconds,
        on_gpus=gpus,
        killed=ends.count(KILLED),
        failed=ends.count(FAILED),
        memory_ends=_memory_ends(current, over),
        advice=[*_on_attempts(goodput), *_from_traces(snapshots)],
        run_before=before,
    )
    verdict = judge(facts)
    values = ReportValues(
        run=processes[-1].run,
        verdict=verdict.text,
        ranks=ranks,
        stalls=stalls,
        findings=findings_of(processes),
        advice=[*verdict.advice],
        hang=hang_of(current),
        changes=_changes(processes),
        snapshots=snapshots,
        job=job_of(processes, goodput),
        throughput=throughput_of(ranks),
        gpu_energy_joules=energy_of(ranks, processes),
        cost=cost_of(ranks, processes, goodput),
    )
    notes = [*_notes(processes, goodput, now), *problems]
    return Report(values, verdict, current, processes, lost_by_cause(processes), gpus, over, notes)


def _rank(process: ProcessLog, attempt: int | None) -> Rank:
    totals, overhead = process.totals, process.totals.overhead_seconds
    ledger = {c: float(process.ledger.get(c, 0.0)) for c in CATEGORIES}
    loop, exposed = ledger[DATA_WAIT] + ledger[COMPUTE], totals.exposed_wait_total_seconds
    memory, unseen, about = totals.memory, totals.waits_unseen, _rounded_steps(totals.estimated_steps_total)
    return Rank(
        rank=process.rank,
        local_rank=process.head.local_rank,
        node=process.head.node,
        pid=process.pid,
        steps=totals.steps_total or (None if unseen else 0),
        optimizer_steps=totals.optimizer_steps_total or None,
        samples=totals.samples_total,
        tokens=totals.tokens_total,
        epochs=totals.epochs,
        step_trend=process.end.step_trend,
        gpu_energy_joules=totals.gpu_energy_total_joules,
        wall_seconds=float(totals.wall_seconds),
        ledger=ledger,
        compute_seconds=dict(totals.compute_total_seconds),
        step_seconds=_durations(process.step),
        data_wait_seconds=Durations() if unseen else _durations(process.wait),
        exposed_wait_ratio=exposed / loop if exposed is not None and loop > 0 else None,
        overhead_seconds={name: overhead.get(name, 0.0) for name in ("training", "agent")},
        memory=Growth(memory.growth_bytes_per_hour, memory.where, memory.exhausted_in_seconds),
        attempt=attempt,
        step_lines=process.step_lines,
        estimated_steps=UNSET if about is None else about,
    )


def _rounded_steps(estimate: int | None) -> int | None:
    """An estimate with the two digits that it is good for."""
    return None if estimate is None else int(float(f"{estimate:.2g}"))


def _durations(sketch: Sketch) -> Durations:
    values = sketch.percentiles()
    return Durations() if values is None else Durations(*(round(value, 6) for value in asdict(values).values()))


def _changes(processes: Sequence[ProcessLog]) -> list[Change]:
    """The changes of all ranks, the oldest first. Damaged ones are left out."""
    changes = [
        Change(line.at, line.first_step, process.rank, line.ratio, line.part, line.figures)
        for process in processes
        for line in process.changes
        if line.ratio > 0 and unix(line.at) is not None
    ]
    return sorted(changes, key=lambda change: (change.at, change.rank))


# -- the traces of snapshots ---------------------------------------------------------------------------------------


def _snapshots(run_dir: Path, processes: Sequence[ProcessLog], *, traces: bool) -> tuple[list[Snapshot], list[str]]:
    """The snapshots with the contents of their traces, and the reason for each trace that could not be read."""
    snapshots, problems = [], []
    for process in processes:
        # The advice of a stall is about the loader, too, and better: the cause of a stall is known.
        advised = any(line.stall.cause in CAUSES and CAUSES[line.stall.cause].is_wait for line in process.stalls)
        for line in process.snapshots:
            if not line.path:
                continue
            snapshot = Snapshot(
                rank=process.rank,
                first_step=line.first_step,
                last_step=line.last_step,
                path=line.path,
                reason=line.reason,
                breakdown=line.breakdown,
            )
            snapshots.append(snapshot)
            if not traces:
                continue
            path = run_dir / snapshot.path
            if not os.path.realpath(path).startswith(os.path.realpath(run_dir / "snapshots") + os.sep):
                problems.append(f"snapshot {snapshot.path}: it lies outside of the run folder and was not read")
                continue
            try:
                trace = read_trace(path)
            except TraceError as error:
                problems.append(f"snapshot: {error}")
                continue
            snapshot.breakdown = {name: round(ratio, 4) for name, ratio in trace.average.categories.items()}
            snapshot.advice = [each for each in trace.advice if not advised or not isinstance(each, LoadingSuggestion)]
    return snapshots, problems


def _run_before(course: Course) -> str:
    """How the run before this one in the folder ended."""
    attempt = course.attempt
    reason = f" ({attempt.reason})" if attempt.reason else ""
    return f"{attempt.how}{reason} at {iso_time(attempt.end)}, after {course.steps} steps"


# -- advice on restarts, and from the traces of snapshots --------------------------------------------------------------

_WORTH: Final = 0.01
"""What would save a smaller share of the wall clock is not advised."""

_MIN_REDONE_SECONDS: Final = 600.0
"""A failure that costs less, such as one in the first minutes, is no reason to write checkpoints more often."""


def _from_traces(snapshots: Iterable[Snapshot]) -> list[RankedAdvice]:
    """The best advice of each trace."""
    found = []
    for each in (best for snapshot in snapshots for best in snapshot.suggestions[:1]):
        share = f" (up to {percent(each.share_ratio, 0)} of the step)" if each.share_ratio else ""
        found.append(RankedAdvice(each.action, because=f"{each.because}{share}", about="from a trace"))
    return found


def _on_attempts(goodput: Goodput) -> list[RankedAdvice]:
    """Advice on checkpoints and replays, with the predicted gain."""
    found, known, replay = [], goodput.experience, goodput.seconds[REPLAY]
    costly = goodput.seconds[REDONE] >= _MIN_REDONE_SECONDS
    advised = known.advised() if costly else None
    if advised is not None and known.gain(advised) >= _WORTH:
        found.append(
            f"write a checkpoint every {_rounded(advised.best_interval_seconds)} instead of every "
            f"{_rounded(advised.interval_seconds)}: predicted effective training time "
            f"{rounded_percent(advised.predicted_ettr_ratio)}; a checkpoint stops the training for "
            f"{_rounded(known.checkpoint_seconds)}, and the run fails once in {_rounded(advised.failure_seconds)}"
        )
    elif known.failures and not known.checkpoints and costly:
        found.append("write checkpoints: the run has written none, so each restart begins from nothing")
    if goodput.wall_seconds > 0 and replay / goodput.wall_seconds >= _WORTH:
        found.append(
            "resume the data without drawing batches again: a stateful loader (torchdata's StatefulDataLoader), or a "
            f"sampler that skips; {_rounded(replay)} went into batches that were thrown away"
        )
    split = (text.partition(": ") for text in found)
    return [RankedAdvice(action, because=because, about="for restarts") for action, _, because in split]


def _rounded(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{plain_number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# -- the verdict ---------------------------------------------------------------------------------------------------


def run_facts(processes: Sequence[ProcessLog]) -> RunFacts:
    """The facts for a verdict on processes that no later one has replaced, by each of their logs alone."""
    hang = hang_of(processes)
    ledger: Counter[str] = Counter()
    for process in processes:
        ledger.update(process.ledger)
    stalls = [(process, stalls_of(process)) for process in processes]
    return RunFacts(
        ranks=[waits_of(process, process.totals) for process in processes],
        stalls=[stall for _, own in stalls for stall in own],
        findings=findings_of(processes),
        hang=hang.verdict if hang is not None and hang.waiting else "",
        stuck=[
            (stall, process.ended)
            for process, own in stalls
            for stall in own[-1:]
            if stall.details.stuck_in is not None
            and (stall.closed is None or process.end.stuck_for_seconds is not None)
        ],
        ended=all(process.ended for process in processes),
        ledger=ledger,
        children=sum(process.totals.child_processes for process in processes),
        step_lines={process.rank: process.step_lines for process in processes if process.step_lines},
    )


def hang_of(processes: Sequence[ProcessLog]) -> HangRecord | None:
    """Why the job hangs; None if it does not, or goes on.

    Each node logs why the job hangs. The line with the fewest silent ranks counts, of several the newest.
    """
    lines = [line for process in processes for line in process.hangs]
    over = max((line.time for line in lines if line.over), default="")
    open_lines = [line for line in lines if line.time > over and line.verdict]
    if not open_lines:
        return None
    best = max(open_lines, key=lambda line: (-line.silent_ranks, line.time))
    return HangRecord(
        best.since,
        best.verdict or "",
        best.kind if best.kind in HANG_KINDS else UNKNOWN_HANG,
        best.suspects,
        [Waiting(_expanded(each.ranks), each.collective, each.sequence) for each in best.waiting],
    )


def _expanded(spans: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of some ranges, at most `MAX_RANKS`."""
    ranks: list[int] = []
    for first, last in spans:
        ranks += range(first, min(last + 1, first + MAX_RANKS - len(ranks)))
    return ranks


def waits_of(process: ProcessLog, totals: TotalsLine) -> RankWaits:
    """The waits of a rank. ``totals``: its totals of the whole run, or of a part of it."""
    return RankWaits(
        rank=process.rank,
        steps=totals.steps_total or 0,
        estimated_steps=_rounded_steps(totals.estimated_steps_total),
        wait_seconds=float(totals.ledger_total_seconds.get(DATA_WAIT, 0.0)),
        compute_seconds=float(totals.ledger_total_seconds.get(COMPUTE, 0.0)),
        first_wait_seconds=totals.first_wait_seconds,
        exposed_seconds=totals.exposed_wait_total_seconds,
        unseen_steps=totals.unseen_steps_total,
        starved_ratio=process.head.settings.stall_enter_ratio,
        unmeasured=totals.exposed_wait_absent or "",
    )


# -- what a verdict has beyond the largest loss ------------------------------------------------------------------------


def _claims(processes: Sequence[ProcessLog]) -> dict[int, list[RankClaim]]:
    """The training processes that claim one rank at the same time, by rank."""
    by_rank: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.steps_total:
            claimed = process.head.claimed_rank
            by_rank.setdefault(process.rank if claimed is None else claimed, []).append(process)
    claims = {
        rank: [
            RankClaim(one.pid, one.head.node, one.rank)
            for one in same
            if any(o is not one and one.started <= o.last_time and o.started <= one.last_time for o in same)
        ]
        for rank, same in sorted(by_rank.items())
    }
    return {rank: found for rank, found in claims.items() if found}


def _newest_trace(snapshots: Sequence[Snapshot]) -> TraceShares | None:
    read = [snapshot for snapshot in snapshots if snapshot.breakdown]
    if not read:
        return None
    newest = max(read, key=lambda snapshot: (snapshot.last_step or 0, -snapshot.rank))
    return TraceShares(newest.rank, newest.first_step, newest.last_step, newest.breakdown, newest.suggestions)


def _memory_ends(processes: Sequence[ProcessLog], over: Collection[int]) -> list[MemoryEnd]:
    """The processes whose memory runs out, without those whose work is done."""
    return [
        MemoryEnd(process.rank, process.head.node, process.totals.memory, id(process) in over)
        for process in processes
        if process.totals.memory.exhausted_in_seconds is not None and (not process.ended or process.end.failed)
    ]


# -- notes on the logs -------------------------------------------------------------------------------------------------


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
        if process.damaged_lines:
            notes.append(f"{who}: {process.damaged_lines} line(s) of its log are damaged and were skipped")
        failures = [line for line in process.errors if line.errors_total]
        if failures:
            text = failures[-1].message
            notes.append(f"{who}: {len(failures)} failure(s) of the agent's own parts, the newest: {text}")
    return notes
