"""Makes the report of a run from its logs: the values of ``report --json``, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.run_verdict import (
    NO_STEPS,
    STARVED,
    STARVED_RATIO,
    STUCK,
    UNKNOWN,
    UNMEASURED,
    JudgedRun,
    RankStall,
    RankWaits,
    costliest,
    find,
    healthy_share,
    lost_seconds,
    other_cause,
    recommended,
)
from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, STARTUP, stuck_in_words
from telemetry.report import rank_processes
from telemetry.report.hang_report import hang_of, job_hang_verdict
from telemetry.report.memory_report import memory_of
from telemetry.report.stall_lines import lines_of_slow_ranks, with_whole_lines
from telemetry.report.step_change_report import changes_of
from telemetry.util.text import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.run_verdict import RunFinding
    from telemetry.report.process_log import ProcessLog
    from telemetry.util.sketch import Sketch

_ADVICE_FIELDS: Final = ("action", "setting", "value", "predicted_speedup", "predicted_low", "because")
"""All of them are in the report. A field that the log does not have is null."""

_WATCH: Final = "Put telemetry.watch() around what the training loop takes its batches from."

_NOTHING_SEEN: Final = (
    f" The training thread requested no batch of a DataLoader or a watched iterable; batches that come another way are "
    f"not seen, and waiting for them is counted as compute. {_WATCH}"
)

_MIN_MENTIONED_RATIO: Final = 0.20
"""A category outside of the training loop is mentioned from this share of the wall clock on."""


def summarize(processes: Sequence[ProcessLog]) -> dict[str, Any]:
    """The report of a run, as ``report --json`` prints it.

    A rank that was restarted has an entry for each of its processes, the newest last.
    """
    ranks = [_rank(process) for process in processes]
    stalls = lines_of_slow_ranks([stall for process in processes for stall in stalls_of(process)], processes)
    now = rank_processes.not_replaced(processes)
    hang = hang_of(now)
    return {
        "run": str(processes[-1].run) if processes else "",
        "verdict": verdict_of(now) + rank_processes.duplicate_ranks(now),
        "ranks": ranks,
        "stalls": stalls,
        "hang": hang,
        "changes": changes_of(processes),
        "snapshots": [
            _snapshot(process.rank, line) for process in processes for line in process.snapshots if line.get("path")
        ],
    }


def verdict_of(processes: Sequence[ProcessLog]) -> str:
    """Whether the run is all right, and else what it loses most to, on which rank.

    Args:
        processes: those that no later one has replaced.
    """
    return judged(processes).text


def judged(processes: Sequence[ProcessLog]) -> JudgedRun:
    """The verdict with its kind, so that nobody has to read the kind from the words.

    Args:
        processes: those that no later one has replaced.
    """
    hung = job_hang_verdict(hang_of(processes), processes)
    if hung is not None:
        return hung
    stuck = _hang_verdict(processes)
    return JudgedRun(STUCK, stuck) if stuck else _verdict(processes)


def finding_of(processes: Sequence[ProcessLog]) -> RunFinding:
    """What these ranks lost most to, without hangs: the decision behind the verdict.

    Args:
        processes: those that no later one has replaced.
    """
    stalls = [stall for process in processes for stall in stalls_of(process)]
    return find(
        [_waits(process) for process in processes],
        [RankStall(stall["rank"], stall["cause"], lost_seconds(stall)) for stall in stalls],
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


def _verdict(processes: Sequence[ProcessLog]) -> JudgedRun:
    """Without hangs: one sentence on what this run lost most to.

    Args:
        processes: those that no later one has replaced.
    """
    ranks = [_rank(process) for process in processes]
    stalls = [stall for process in processes for stall in stalls_of(process)]
    finding = finding_of(processes)
    return JudgedRun(finding.kind, _found_text(finding, ranks, stalls, processes))


def _found_text(
    finding: RunFinding,
    ranks: Sequence[dict[str, Any]],
    stalls: Sequence[dict[str, Any]],
    processes: Sequence[ProcessLog],
) -> str:
    unseen, worst = _unseen(finding.unseen), finding.worst
    if finding.kind == NO_STEPS:
        return _no_steps(processes)
    if finding.kind == UNKNOWN:
        return _unknown_verdict(ranks, stalls, unseen or _NOTHING_SEEN, finding)
    assert worst is not None  # noqa: S101 - only the two above have none
    if finding.kind == UNMEASURED:
        why = worst.unmeasured
        return (
            f"Rank {worst.rank} spent {rounded_percent(worst.wait_ratio)} of its training loop waiting for data; "
            f"how much of that the GPU felt was not measured{why and f': {why}'}."
        )
    if finding.kind == STARVED:
        return _starved(worst, finding) + _why(worst.rank, stalls) + unseen
    if finding.stalled is not None:
        return f"Not starved, but rank {finding.stalled.rank} stalled.{_why(finding.stalled.rank, stalls)}"
    ratio, after = healthy_share(worst)
    lost = f"{rounded_percent(ratio)} of its training loop waiting for data{after}"
    return f"Healthy: no rank lost more than {lost}.{_other_time(ranks)}"


def _no_steps(processes: Sequence[ProcessLog]) -> str:
    children = rank_processes.child_processes(processes)
    others = "another process" if children == 1 else f"{children} processes"
    return "No training step has ended yet." + (
        f" The script has started {others} with multiprocessing; if the training runs there, it is not seen: call "
        "telemetry.start() in the function that is spawned."
        if children
        else ""
    )


def _unseen(rank: RankWaits | None) -> str:
    """A sentence on steps whose batches were not seen; empty if these are few."""
    if rank is None:
        return ""
    return (
        f" The batches of {min(rank.steps, rank.unseen_steps)} of {rank.steps} steps of rank {rank.rank} reached the "
        f"training thread in a way that is not seen, and waiting for them is counted as compute. {_WATCH}"
    )


def _unknown_verdict(
    ranks: Sequence[dict[str, Any]], stalls: Sequence[dict[str, Any]], unseen: str, finding: RunFinding
) -> str:
    """The verdict of a run that may be starved, because its batches are not seen."""
    stall = finding.stalled
    other = "" if stall is None else f" Rank {stall.rank} stalled.{_why(stall.rank, stalls)}"
    return f"Not known whether this run waits for data.{unseen}{other}{_other_time(ranks)}"


def _hang_verdict(processes: Sequence[ProcessLog]) -> str:
    """The verdict of a run that is stuck, or was until it ended; empty for others."""
    newest = [
        (stall, process.ended)
        for process in processes
        for stall in stalls_of(process)[-1:]
        if "stuck_in" in stall["evidence"] and (stall["closed"] is None or "stuck_for_seconds" in process.end)
    ]
    if not newest:
        return ""
    # Ranks in compute mostly wait for a rank that is not, and ranks in a collective for one that has not reached it.
    stall, ended = min(
        newest, key=lambda pair: (pair[0]["cause"] == "straggler", pair[0]["evidence"]["stuck_in"] == COMPUTE)
    )
    others = {other["rank"] for other, _ in newest} - {stall["rank"]}
    doing = f"{'was' if ended else 'is'} {stuck_in_words(stall['evidence']['stuck_in'])}"
    more = f" So {'are' if len(others) > 1 else 'is'} {len(others)} more." if others else ""
    at, stands = stall["evidence"].get("stuck_at"), "stood" if ended else "stands"
    return (
        f"Stuck{' before its end' if ended else ''}: rank {stall['rank']} {doing} and {'had' if ended else 'has'} not "
        f"gone on since before {stall['opened']}. Cause: {stall['cause']}{f'; it {stands} at {at}' if at else ''}."
        f"{more if not ended else ''}"
    )


def _starved(worst: RankWaits, finding: RunFinding) -> str:
    ratio, measured = worst.exposed_ratio or 0.0, finding.measured
    lost = f"{rounded_percent(ratio)} of its training loop waiting for data"
    bound = 1 / (1 - ratio) if ratio < 0.99 else None
    gain = f"; without that wait its steps would be up to {bound:.1f} times faster" if bound else ""
    if measured == 1:
        return f"Starved: rank {worst.rank} spent {lost}{gain}."
    if finding.starving == measured:
        return f"Starved: every rank waits for data; the worst, rank {worst.rank}, spent {lost}{gain}."
    others = "the other ranks wait for it inside their compute" if finding.starving == 1 else "the rest wait for them"
    return f"Starved: rank {worst.rank} spent {lost}{gain}; {others}."


def costliest_of(rank: int, stalls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The stall of a rank that has cost most time; None without one."""
    return costliest([stall for stall in stalls if stall["rank"] == rank])


def _why(rank: int, stalls: Sequence[dict[str, Any]]) -> str:
    """The cause of a rank's costliest stall, and its first advice."""
    stall = costliest_of(rank, stalls)
    if stall is None:
        return ""
    text = f" Cause: {stall['cause']}"
    for advice in stall["advice"][:1]:
        change = recommended(advice)
        text += f"; try {change.typed}" if change.typed else f"; {advice.get('action')}"
        text += f" ({advice.get('because')})" if stall["cause"] == "straggler" else ""
        text += f", predicted {change.gain} times the steps per second" if change.gain else ""
    other = other_cause(stall)
    if other is not None:
        text += (
            f". At the same time {other['cause']} takes {rounded_percent(other.get('share_ratio', 0.0))} of the time"
        )
    line = stall["evidence"].get("line_verdict")
    return f"{text}. {line[:1].upper()}{line[1:]}." if line else f"{text}."


def _other_time(ranks: Sequence[dict[str, Any]]) -> str:
    """What else took a large share of the wall clock of all ranks."""
    wall = sum(rank["wall_seconds"] for rank in ranks)
    words = {STARTUP: "starting up", EVALUATION: "evaluating", CHECKPOINT: "writing checkpoints"}
    shares = {c: sum(rank["ledger"][c] for rank in ranks) / wall for c in words} if wall > 0 else {}
    large = [f"{rounded_percent(share)} {words[c]}" for c, share in shares.items() if share >= _MIN_MENTIONED_RATIO]
    return f" Of its wall clock the run spent {' and '.join(large)}." if large else ""


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


def stalls_of(process: ProcessLog) -> list[dict[str, Any]]:
    """The stalls of a process, each with what its later lines added.

    Of one that was open for long, the first line may be in a log that was rotated away. A later one tells most of it.
    """
    stalls: list[dict[str, Any]] = []
    for line in process.stalls:
        if line.get("event") == "stall_open" or (line.get("opened") and (not stalls or _is_older(stalls[-1], line))):
            stalls.append(_stall(process.rank, {"cause": "unknown"} | line))
        elif stalls and stalls[-1]["closed"] is None:
            said = {k: v for k, v in _stall(process.rank, line).items() if v not in (None, {}, [])}
            # The stacks of a stuck run are only in the line that opens its stall.
            evidence = stalls[-1]["evidence"] | said.get("evidence", {})
            stalls[-1] |= said | {"opened": stalls[-1]["opened"], "evidence": evidence}
        if stalls and stalls[-1]["closed"] is None and line.get("event") not in {"stall_open", "stall_lines"}:
            stalls[-1]["closed"] = line.get("closed") or line.get("time")
    if stalls and stalls[-1]["closed"] is None:
        stalls[-1]["evidence"] |= _lost_so_far(process, stalls[:-1])
    return stalls


def _is_older(stall: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether a stall was over before that of the line had begun."""
    return stall["closed"] is not None and stall["opened"] != line["opened"]


def _lost_so_far(process: ProcessLog, closed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the open stall has cost so far. Its own line does not tell, because it was written when the stall opened."""
    total = process.totals.get("stall_lost_total_seconds")
    if total is None:
        return {}
    told = [stall["evidence"].get("lost_seconds", {}) for stall in closed]
    before = {cause: sum(lost.get(cause, 0.0) for lost in told) for cause in total}
    lost = {cause: round(seconds - before[cause], 3) for cause, seconds in total.items()}
    return {"lost_seconds": {cause: seconds for cause, seconds in lost.items() if seconds > 0}}


def _stall(rank: int, line: dict[str, Any]) -> dict[str, Any]:
    names = ("cause", "opened", "first_step", "last_step", "exposed_wait_ratio")
    stall: dict[str, Any] = {"rank": rank} | {name: line.get(name) for name in names}
    stall["closed"] = None
    stall["opened"] = line.get("opened") or line.get("time")
    stall["evidence"] = with_whole_lines(line.get("evidence", {}))
    stall["advice"] = [{name: each.get(name) for name in _ADVICE_FIELDS} for each in line.get("advice", [])]
    return stall


def _snapshot(rank: int, line: dict[str, Any]) -> dict[str, Any]:
    names = ("first_step", "last_step", "path", "reason")
    return {"rank": rank} | {name: line.get(name) for name in names} | {"breakdown": line.get("breakdown") or {}}
