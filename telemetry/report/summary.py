"""Makes the report of a run from its logs: the values of ``report --json``, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.diagnosis.hangs import HANG_KINDS
from telemetry.diagnosis.hangs import UNKNOWN as UNKNOWN_HANG
from telemetry.diagnosis.verdict import STARVED_RATIO, RankWaits, Verdict, judge
from telemetry.records import (
    CATEGORIES,
    COMPUTE,
    CUDA,
    DATA_WAIT,
    SHARED_MEMORY,
    TRAINING,
    WORKERS,
)
from telemetry.report.attempts import KILLED, MISSED_WINDOWS, RUNNING, log_interval, unix
from telemetry.report.goodput import as_job, books_sentence, cost_of, ended_by_oom, energy_of, goodput_of, throughput_of
from telemetry.report.process_log import (
    child_processes,
    duplicate_ranks,
    lines_of_slow_ranks,
    lost_by_cause,
    not_replaced,
    stalls_of,
)
from telemetry.trace.files import TraceError
from telemetry.trace.reader import read_trace
from telemetry.trace.records import FlopsUsage
from telemetry.util.text import byte_size, percent, rough_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog
    from telemetry.util.sketch import Sketch

_MAX_RANKS: Final = 1 << 17


def hang_of(processes: Sequence[ProcessLog]) -> dict[str, Any] | None:
    """The ``hang`` of ``report --json``; None where the job does not hang, or goes on.

    Each node says why the job hangs. Of their lines the newest counts that says most: one that knows all ranks.
    """
    lines = [line for process in processes for line in process.hangs]
    over = max((line.get("time", "") for line in lines if line.get("over")), default="")
    open_lines = [line for line in lines if line.get("time", "") > over and line.get("verdict")]
    if not open_lines:
        return None
    best = max(open_lines, key=lambda line: (-line.get("silent_ranks", 0), line.get("time", "")))
    kind = best.get("kind")
    return {
        "since": best.get("since"),
        "verdict": best["verdict"],
        "kind": kind if kind in HANG_KINDS else UNKNOWN_HANG,
        "suspects": [
            {name: s.get(name) for name in ("rank", "node", "where", "doing")} for s in best.get("suspects", [])
        ],
        "waiting": [
            {"ranks": _expanded(w.get("ranks", [])), "collective": w.get("collective"), "sequence": w.get("sequence")}
            for w in best.get("waiting", [])
        ],
    }


def _expanded(spans: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of some ranges, at most `_MAX_RANKS`: a damaged log may name more than fit into the memory."""
    ranks: list[int] = []
    for first, last in spans:
        ranks += range(first, min(last + 1, first + _MAX_RANKS - len(ranks)))
    return ranks


_SHM: Final = "/dev/shm"  # noqa: S108 - only its name
_PARTS: Final = {
    TRAINING: ("the training process", "grows", "grew"),
    WORKERS: ("the workers", "grow", "grew"),
    SHARED_MEMORY: (_SHM, "grows", "grew"),
    CUDA: ("the tensors on the GPU", "grow", "grew"),
}
_OTHERS: Final = ("memory outside of this run's processes", "grows", "grew")


def memory_of(process: ProcessLog) -> dict[str, Any]:
    """How the memory of a rank grew when its newest line was written, as ``report --json`` has it."""
    said = process.totals.get("memory", {})
    return {name: said.get(name) for name in ("growth_bytes_per_hour", "where", "exhausted_in_seconds")}


def memory_verdict(processes: Sequence[ProcessLog], over: Collection[int]) -> str:
    """A sentence on the rank whose memory runs out first; empty if none is about to, or if the run has finished."""
    ends = [
        (said["exhausted_in_seconds"], said.get("where") is None, process)
        for process in processes
        if "exhausted_in_seconds" in (said := process.totals.get("memory", {})) and not _finished(process)
    ]
    if not ends:
        return ""
    # A rank that sees another one fill the memory says so, too. Name the one that fills it.
    _, _, process = min(ends, key=lambda end: (end[1], end[0]))
    said = process.totals["memory"]
    left, node = rough_duration(said["exhausted_in_seconds"]), process.head.get("node")
    if id(process) in over:
        return f"When its log ends, memory was to run out in about {left}: {grows(process, past=True)}."
    what = {
        SHARED_MEMORY: f"{_SHM} of node {node} is full",
        CUDA: f"The GPU of rank {process.rank} runs out of memory",
    }.get(said.get("exhausted", ""), f"Node {node} runs out of memory")
    return f"{what} in about {left}: {grows(process, past=False)}."


def grows(process: ProcessLog, *, past: bool) -> str:
    """What of a process grows, and how fast: the end of a sentence."""
    said = process.totals["memory"]
    what, now, then = _PARTS.get(said.get("where", ""), _OTHERS)
    of_rank = f" of rank {process.rank}" if "where" in said else ""
    rate = f"{byte_size(said.get('growth_bytes_per_hour', 0))}/h"
    advice = f"; {said['advice']}" if said.get("advice") else ""
    return f"{what}{of_rank} {then if past else now} {rate}{advice}"


def _finished(process: ProcessLog) -> bool:
    return process.ended and not process.end.get("exception") and not process.end.get("exit_status")


def changes_of(processes: Sequence[ProcessLog]) -> list[dict[str, Any]]:
    """The changes of all ranks, oldest first, as ``report --json`` has them. Damaged ones are left out."""
    changes = [
        {
            "at": line["at"],
            "step": line.get("first_step"),
            "rank": process.rank,
            "ratio": line["ratio"],
            "part": line.get("part"),
            "with": [each for each in line.get("with", []) if each.keys() >= {"what", "before", "after"}],
        }
        for process in processes
        for line in process.changes
        if line.get("ratio", 0) > 0 and unix(str(line.get("at"))) is not None
    ]
    return sorted(changes, key=lambda change: (change["at"], change["rank"]))


_MIN_SHARE: Final = 0.05
"""Categories with a smaller share of a step are left out of a sentence."""


def read_snapshots(run_dir: Path, snapshots: Sequence[dict[str, Any]]) -> list[str]:
    """Read the traces of snapshots. Add ``breakdown`` (shares of the average step), ``flops`` and ``advice`` to each.

    Args:
        run_dir: the run folder.
        snapshots: entries of the report, changed in place.

    Returns:
        For each trace that could not be read, why.
    """
    problems = []
    for snapshot in snapshots:
        path = PurePosixPath(str(snapshot["path"]))
        if path.is_absolute() or ".." in path.parts or path.parts[:1] != ("snapshots",):
            problems.append(f"snapshot {path}: it lies outside of the run folder and was not read")
            continue
        try:
            trace = read_trace(run_dir / path, follow=False)
        except TraceError as error:
            problems.append(f"snapshot: {error}")
            continue
        snapshot["breakdown"] = {name: round(ratio, 4) for name, ratio in trace.average.categories.items()}
        snapshot["flops"] = msgspec.structs.asdict(trace.flops)
        snapshot["advice"] = [
            {"action": a.action, "because": a.because, "share_ratio": a.share_ratio} for a in trace.advice
        ]
    return problems


def shown_by(snapshot: dict[str, Any]) -> str:
    """What a snapshot shows, as part of a sentence; empty if its trace was not read."""
    parts = sorted(snapshot["breakdown"].items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent(ratio, 0)}" for name, ratio in parts if ratio >= _MIN_SHARE)
    worth = [a for a in snapshot.get("advice", ()) if (a["share_ratio"] or 0.0) >= _MIN_SHARE]
    if text and worth:
        text += f"; {worth[0]['action']} (up to {percent(worth[0]['share_ratio'], 0)} of the step)"
    return text


def flops_of(snapshot: dict[str, Any]) -> str:
    """Floating-point operations of a step and MFU in words, or why they are not known; empty if it was not read."""
    return str(FlopsUsage(**snapshot["flops"])) if "flops" in snapshot else ""


def verdict_of_snapshots(snapshots: Sequence[dict[str, Any]]) -> str:
    """What the newest trace that was read adds to the verdict; empty without one."""
    read = [snapshot for snapshot in snapshots if snapshot["breakdown"]]
    if not read:
        return ""
    newest = max(read, key=lambda snapshot: (snapshot["last_step"] or 0, -snapshot["rank"]))
    steps = f"steps {newest['first_step']} to {newest['last_step']}"
    return f" The trace of {steps} on rank {newest['rank']} shows {shown_by(newest)}."


@dataclass(frozen=True, slots=True)
class Report:
    """All that is said of a run. It is made once; the text, ``--json`` and the page render it.

    Attributes:
        values: what ``--json`` prints.
        verdict: on the processes that no later one has replaced: ``now``.
        processes: all of the run, by rank and start.
        goodput: where the wall clock of the run went.
        lost_seconds: in stalls, by cause, over all processes.
        over: ids of the processes that have ended, by themselves or not.
        notes: what is missing or damaged in the logs, a line each.
    """

    values: dict[str, Any]
    verdict: Verdict
    now: Sequence[ProcessLog]
    processes: Sequence[ProcessLog]
    goodput: Goodput
    lost_seconds: dict[str, float]
    over: set[int]
    notes: list[str]


def report_of(run_dir: Path, processes: Sequence[ProcessLog], now: float) -> Report:
    """The report of a run.

    Args:
        run_dir: its folder, with the traces of its snapshots.
        processes: as `load` returns them.
        now: Unix time.
    """
    values, verdict = _values(processes)
    goodput = goodput_of(processes, now)
    ranks, snapshots = values["ranks"], values["snapshots"]
    lives = [(course.attempt.number, life) for course in goodput.courses for life in course.attempt.lives]
    attempt_of = {id(life.log): number for number, life in lives}
    for rank, process in zip(ranks, processes, strict=True):
        rank["attempt"] = attempt_of.get(id(process))
    values |= {
        "job": as_job(processes, goodput),
        "throughput": throughput_of(ranks),
        "gpu_energy_joules": energy_of(ranks, processes),
        "cost": cost_of(ranks, processes, goodput),
    }
    problems = read_snapshots(run_dir, snapshots)
    current = not_replaced(processes)
    over = {id(life.log) for _, life in lives if life.how != RUNNING}
    sentences = (books_sentence(goodput), ended_by_oom(goodput), memory_verdict(current, over))
    values["verdict"] += verdict_of_snapshots(snapshots) + "".join(f" {each}" for each in sentences if each)
    notes = [*_notes(processes, goodput, now), *problems]
    return Report(values, verdict, current, processes, goodput, lost_by_cause(processes), over, notes)


def summarize(processes: Sequence[ProcessLog]) -> dict[str, Any]:
    """What the logs alone say, as ``report --json`` prints it.

    A rank that was restarted has an entry for each of its processes, the newest last.
    """
    return _values(processes)[0]


def _notes(processes: Sequence[ProcessLog], goodput: Goodput, now: float) -> list[str]:
    """What is missing or damaged in the logs, a line each."""
    notes: list[str] = []
    lives = [life for course in goodput.courses for life in course.attempt.lives]
    killed = {id(life.log) for life in lives if life.how == KILLED}
    replaced = {id(life.log) for life in lives if life.replaced}
    by_oom = {
        id(life.log)
        for course in goodput.courses
        if (oom := course.attempt.oom) is not None and oom.all_ranks and oom.sure
        for life in course.attempt.lives
        if life.how == KILLED and life.rank in oom.ranks
    }
    for process in processes:
        who = f"rank {process.rank} (pid {process.pid})"
        if not process.ended and id(process) not in replaced:
            newest = unix(process.last_time)
            old = newest is None or now - newest > MISSED_WINDOWS * log_interval(process)
            gone = old or id(process) in killed
            how = "was killed by the OOM killer" if id(process) in by_oom else "did not end by itself"
            notes.append(f"{who} {how if gone else 'is running'}; newest line {process.last_time}")
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


def _values(processes: Sequence[ProcessLog]) -> tuple[dict[str, Any], Verdict]:
    current = not_replaced(processes)
    verdict = verdict_of(current)
    stalls = [stall for process in processes for stall in stalls_of(process)]
    values = {
        "run": str(processes[-1].run) if processes else "",
        "verdict": verdict.text + duplicate_ranks(current),
        "ranks": [_rank(process) for process in processes],
        "stalls": lines_of_slow_ranks(stalls, processes),
        "hang": hang_of(current),
        "changes": changes_of(processes),
        "snapshots": [
            _snapshot(process.rank, line) for process in processes for line in process.snapshots if line.get("path")
        ],
    }
    return values, verdict


def verdict_of(processes: Sequence[ProcessLog]) -> Verdict:
    """Whether the run is all right, and else what it loses most to, on which rank.

    Args:
        processes: those that no later one has replaced.
    """
    hang = hang_of(processes)
    ledger: Counter[str] = Counter()
    for process in processes:
        ledger.update(process.totals.get("ledger_total_seconds", {}))
    return judge(
        [_waits(process) for process in processes],
        [stall for process in processes for stall in stalls_of(process)],
        hang=hang["verdict"] if hang is not None and hang["waiting"] else "",
        stuck=[
            (stall, process.ended)
            for process in processes
            for stall in stalls_of(process)[-1:]
            if "stuck_in" in stall["evidence"] and (stall["closed"] is None or "stuck_for_seconds" in process.end)
        ],
        ended=all(process.ended for process in processes),
        ledger=ledger,
        children=child_processes(processes),
    )


def _waits(process: ProcessLog) -> RankWaits:
    settings, totals = process.head.get("settings", {}), process.totals
    spent = totals.get("ledger_total_seconds", {})
    return RankWaits(
        rank=process.rank,
        steps=totals.get("steps_total", 0),
        wait_seconds=float(spent.get(DATA_WAIT, 0.0)),
        compute_seconds=float(spent.get(COMPUTE, 0.0)),
        first_wait_seconds=totals.get("first_wait_seconds", 0.0),
        exposed_seconds=totals.get("exposed_wait_total_seconds"),
        unseen_steps=totals.get("unseen_steps_total", 0),
        starved_ratio=settings.get("stall_enter_ratio", STARVED_RATIO),
        unmeasured=totals.get("exposed_wait_absent", ""),
    )


def _rank(process: ProcessLog) -> dict[str, Any]:
    totals = process.totals
    spent, overhead = totals.get("ledger_total_seconds", {}), totals.get("overhead_seconds", {})
    ledger = {c: float(spent.get(c, 0.0)) for c in CATEGORIES}
    loop = ledger[DATA_WAIT] + ledger[COMPUTE]
    exposed = totals.get("exposed_wait_total_seconds")
    return {
        "rank": process.rank,
        "local_rank": process.head.get("local_rank"),
        "node": process.head.get("node"),
        "pid": process.pid,
        "steps": totals.get("steps_total", 0),
        "samples": totals.get("samples_total"),
        "tokens": totals.get("tokens_total"),
        "gpu_energy_joules": totals.get("gpu_energy_total_joules"),
        "wall_seconds": float(totals.get("wall_seconds", 0.0)),
        "ledger": ledger,
        "step_seconds": _percentiles(process.step),
        "data_wait_seconds": _percentiles(process.wait),
        "exposed_wait_ratio": exposed / loop if exposed is not None and loop > 0 else None,
        "overhead_seconds": {name: overhead.get(name, 0.0) for name in ("training", "agent")},
        "memory": memory_of(process),
    }


def _percentiles(sketch: Sketch) -> dict[str, float | None]:
    values = sketch.percentiles()
    if values is None:
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    return {name: round(value, 6) for name, value in asdict(values).items()}


def _snapshot(rank: int, line: dict[str, Any]) -> dict[str, Any]:
    names = ("first_step", "last_step", "path", "reason")
    return {"rank": rank} | {name: line.get(name) for name in names} | {"breakdown": line.get("breakdown") or {}}
