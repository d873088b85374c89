"""Makes the report of a run from its logs: the values of ``report --json``, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.diagnosis.hangs import HANG_KINDS
from telemetry.diagnosis.hangs import UNKNOWN as UNKNOWN_HANG
from telemetry.diagnosis.verdict import STARVED_RATIO, RankWaits, Verdict, judge
from telemetry.records import (
    CATEGORIES,
    COMPUTE,
    CUDA,
    DATA_WAIT,
    DOWN,
    LOST,
    REDONE,
    REPLAY,
    RESTORE,
    SHARED_MEMORY,
    STARTUP,
    STUCK,
    TRAINING,
    WORKERS,
)
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
from telemetry.util.text import byte_size, percent, plain_number, rough_duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog
    from telemetry.util.sketch import Sketch

_MAX_RANKS: Final = 1 << 17
_MAX_NAMED: Final = 8

_MIN_SHARE: Final = 0.05
"""A sentence leaves out categories with a smaller share of a step."""

_MIN_HOURS_RATIO: Final = 0.005
"""A category with a smaller share of the GPU-hours is not mentioned."""


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
    verdict, goodput = verdict_of(current), goodput_of(processes, now)
    lives = [(course.attempt.number, life) for course in goodput.courses for life in course.attempt.lives]
    attempt_of = {id(life.log): number for number, life in lives}
    ranks = [_rank(process, attempt_of.get(id(process))) for process in processes]
    stalls = [stall for process in processes for stall in stalls_of(process)]
    take_lines_of_slow_ranks(stalls, processes)
    snapshots, problems = _snapshots(run_dir, processes)
    over = {id(life.log) for _, life in lives if life.how != RUNNING}
    sentences = (_books(goodput), _ended_by_oom(goodput), _memory_verdict(current, over))
    values = ReportValues(
        run=processes[-1].run,
        verdict=verdict.text
        + _duplicate_ranks(current)
        + _shown_by_newest(snapshots)
        + "".join(f" {each}" for each in sentences if each),
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


def shown_by(snapshot: Snapshot) -> str:
    """The contents of a snapshot as part of a sentence; empty if its trace was not read."""
    parts = sorted(snapshot.breakdown.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent(ratio, 0)}" for name, ratio in parts if ratio >= _MIN_SHARE)
    worth = [each for each in snapshot.suggestions if each.share_ratio >= _MIN_SHARE]
    if text and worth:
        text += f"; {worth[0].action} (up to {percent(worth[0].share_ratio, 0)} of the step)"
    return text


def _shown_by_newest(snapshots: Sequence[Snapshot]) -> str:
    """A sentence for the verdict about the newest trace that was read; empty without one."""
    read = [snapshot for snapshot in snapshots if snapshot.breakdown]
    if not read:
        return ""
    newest = max(read, key=lambda snapshot: (snapshot.last_step or 0, -snapshot.rank))
    steps = f"steps {newest.first_step} to {newest.last_step}"
    return f" The trace of {steps} on rank {newest.rank} shows {shown_by(newest)}."


# -- the verdict ---------------------------------------------------------------------------------------------------


def verdict_of(processes: Sequence[ProcessLog]) -> Verdict:
    """The verdict on processes that no later one has replaced: all right, or else the costliest cause and its rank."""
    hang = hang_of(processes)
    ledger: Counter[str] = Counter()
    for process in processes:
        ledger.update(process.ledger)
    stalls = [(process, [*map(msgspec.to_builtins, stalls_of(process))]) for process in processes]
    return judge(
        [_waits(process) for process in processes],
        [stall for _, own in stalls for stall in own],
        findings=findings_of(processes),
        hang=hang.verdict if hang is not None and hang.waiting else "",
        stuck=[
            (stall, process.ended)
            for process, own in stalls
            for stall in own[-1:]
            if "stuck_in" in stall["evidence"] and (stall["closed"] is None or "stuck_for_seconds" in process.end)
        ],
        ended=all(process.ended for process in processes),
        ledger=ledger,
        children=sum(process.totals.get("child_processes", 0) for process in processes),
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


# -- additions to the verdict --------------------------------------------------------------------------------------


def _duplicate_ranks(processes: Sequence[ProcessLog]) -> str:
    """A warning and advice if several training processes have one rank at the same time; otherwise empty."""
    by_rank: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.get("steps_total"):
            by_rank.setdefault(process.head.get("claimed_rank", process.rank), []).append(process)
    text = ""
    for rank, same in sorted(by_rank.items()):
        together = [
            one
            for one in same
            if any(o is not one and one.started <= o.last_time and o.started <= one.last_time for o in same)
        ]
        if not together:
            continue
        named = [
            f"pid {one.pid} on {one.head.get('node')}{f', shown as rank {one.rank}' if one.rank != rank else ''}"
            for one in together[:_MAX_NAMED]
        ]
        more = f" and {len(together) - _MAX_NAMED} more" if len(together) > _MAX_NAMED else ""
        text += (
            f" {len(together)} processes claim rank {rank} at the same time ({', '.join(named)}{more}); each is "
            "counted separately. Tell each process its rank: set RANK and WORLD_SIZE, or call "
            "torch.distributed.init_process_group. If they are separate jobs, give each its own run folder."
        )
    return text


_WORDS: Final = {
    REDONE: "redone",
    DOWN: "down",
    STUCK: "stuck",
    RESTORE: "restoring",
    REPLAY: "replaying",
    STARTUP: "starting up",
}


def _books(goodput: Goodput) -> str:
    """A sentence about the GPU-hours of a run with several attempts; empty for one attempt."""
    total = sum(goodput.rank_seconds.values())
    if len(goodput.courses) < 2 or total <= 0:
        return ""
    ends = [course.attempt.how for course in goodput.courses]
    kinds = ((ends.count(KILLED), "kill"), (ends.count(FAILED), "failure"))
    after = " and ".join(f"{number} {word}{'s' * (number != 1)}" for number, word in kinds if number)
    parts = []
    for seconds, category in sorted(((goodput.rank_seconds[c], c) for c in LOST), reverse=True):
        if seconds / total >= _MIN_HOURS_RATIO:
            parts.append(
                f"{_hours(seconds)} {_WORDS[category]}{f' after {after}' if after and category == REDONE else ''}"
            )
    productive = goodput.rank_seconds[PRODUCTIVE]
    kept = f"{_hours(productive)} were productive ({rounded_percent(productive / total)})"
    return f"Of {_hours(total)} GPU-hours, {kept}{': ' if parts else ''}{', '.join(parts)}."


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}" if hours >= 0.995 else plain_number(hours, 2)


def _ended_by_oom(goodput: Goodput) -> str:
    """A sentence about a run that the OOM killer has ended; empty for others."""
    attempt = goodput.courses[-1].attempt if goodput.courses else None
    if attempt is None or attempt.oom is None or not attempt.broke_off:
        return ""
    return (
        f"The run has ended: {attempt.oom.text}. Raise the memory limit of its cgroup, or use less: fewer DataLoader "
        "workers, or a smaller prefetch_factor."
    )


_SHM: Final = "/dev/shm"  # noqa: S108 - only its name
_PARTS: Final = {
    TRAINING: ("the training process", "grows"),
    WORKERS: ("the workers", "grow"),
    SHARED_MEMORY: (_SHM, "grows"),
    CUDA: ("the tensors on the GPU", "grow"),
}


def grows(process: ProcessLog, *, past: bool) -> str:
    """The end of a sentence: which memory of a process grows, and how fast."""
    said = process.totals["memory"]
    what, now = _PARTS.get(said.get("where", ""), ("memory outside of this run's processes", "grows"))
    of_rank = f" of rank {process.rank}" if "where" in said else ""
    rate = f"{byte_size(said.get('growth_bytes_per_hour', 0))}/h"
    advice = f"; {said['advice']}" if said.get("advice") else ""
    return f"{what}{of_rank} {'grew' if past else now} {rate}{advice}"


def _memory_verdict(processes: Sequence[ProcessLog], over: Collection[int]) -> str:
    """A sentence about the rank whose memory runs out first; empty if none is about to, or if the run has finished."""
    ends = [
        (said.get("where") is None, said["exhausted_in_seconds"], process)
        for process in processes
        if "exhausted_in_seconds" in (said := process.totals.get("memory", {}))
        and not (process.ended and not process.end.get("exception") and not process.end.get("exit_status"))
    ]
    if not ends:
        return ""
    # A rank also reports that another rank fills the memory. Name the one that fills it.
    _, seconds, process = min(ends, key=lambda end: end[:2])
    left, node = rough_duration(seconds), process.head.get("node")
    if id(process) in over:
        return f"When its log ends, memory was to run out in about {left}: {grows(process, past=True)}."
    what = {
        SHARED_MEMORY: f"{_SHM} of node {node} is full",
        CUDA: f"The GPU of rank {process.rank} runs out of memory",
    }.get(process.totals["memory"].get("exhausted", ""), f"Node {node} runs out of memory")
    return f"{what} in about {left}: {grows(process, past=False)}."


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
