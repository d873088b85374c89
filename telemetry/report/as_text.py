"""The report as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from telemetry.diagnosis.verdict import growth_text, trace_text
from telemetry.log.process import unix
from telemetry.model.records import (
    CATEGORIES,
    COMPUTE,
    COMPUTE_PARTS,
    DATA_WAIT,
    FASTER,
    GROWS,
    SLOWER,
    STEADY,
    UNCLEAR,
    RankedAdvice,
)
from telemetry.report.course import ASSUMED
from telemetry.safety.files import open_regular
from telemetry.util.words import (
    byte_size,
    duration,
    named,
    one_line,
    percent,
    plain_number,
    rough_duration,
    rounded_percent,
    shortened,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.diagnosis.findings import Finding
    from telemetry.log.lines import ChangedFigure
    from telemetry.log.process import ProcessLog
    from telemetry.model.records import Advice, HotLine, StallRecord
    from telemetry.report.contract import Change, Job, JobAttempt, Rank, ReportValues, Snapshot
    from telemetry.report.summary import Report

KWH: Final = 3.6e6
"""Joules per kilowatt-hour."""

MAX_ROWS: Final = 64
"""The most rows of a table."""

_MAX_STEP_LINES: Final = 4
_MAX_ATTEMPTS: Final = 20
_MAX_MEMORY_LINES: Final = 16
_MIN_PART: Final = 0.005
"""A smaller part of the compute is left out."""

_MAX_FRAMES: Final = 4
_MAX_TRAINING_FRAMES: Final = 12
_MAX_FILE_BYTES: Final = 1 << 22
_MAX_CODE_TEXT: Final = 60

_MIN_LOST_SECONDS: Final = 1.0
_TOGETHER_SECONDS: Final = 120.0
"""Changes of several ranks within this time are one. A rank measures the moment to a block of 30 s."""


def as_text(found: Report) -> str:
    """The verdict, a table of steps and a ledger by rank, the stalls, the changes, the snapshots, and the notes."""
    values, ranks = found.values, found.values.ranks
    shown = list(zip(ranks, found.processes, strict=True))
    if len(ranks) > MAX_ROWS:
        shown = sorted(shown, key=lambda pair: -(pair[0].exposed_wait_ratio or 0.0))[:MAX_ROWS]
    lines = [f"run {values.run}", "", *found.verdict.lines, ""]
    if values.advice:
        lines.append("what to do, the largest predicted gain first:")
        lines += advice_lines(values.advice)
        lines.append("")
    lines += [*table(_STEP_COLUMNS, [_step_row(rank, process) for rank, process in shown])]
    headings = ["rank", "wall", *(c.replace("_", " ") for c in CATEGORIES)]
    lines += ["", *table(headings, [_ledger_row(rank) for rank, _ in shown])]
    if len(shown) < len(ranks):
        lines += ["", f"the {len(shown)} of {len(ranks)} ranks that waited most; --json has all"]
    for stall in values.stalls:
        lines += ["", *stall_section(stall, with_advice=False)]
    for finding in values.findings:
        lines += ["", *_finding(finding)]
    for process in found.now[:_MAX_STEP_LINES]:
        if process.step_lines:
            what = "step" if all(line.part is UNSET for line in process.step_lines) else "loop"
            lines += ["", f"the {what}{'s' * (what == 'step')} of rank {process.rank}"]
            lines += _lines_of_code(process.step_lines, what, process.started)
    changes = _changes(values.changes, len({rank.rank for rank in ranks}))
    lines += ["", *changes] if changes else []
    lost = sorted(found.lost_seconds.items(), key=lambda item: -item[1])
    shares = [
        f"{cause} {rough_duration(seconds)} ({found.of_all_ranks(seconds)})"
        for cause, seconds in lost
        if seconds >= _MIN_LOST_SECONDS
    ]
    if shares:
        lines += ["", f"lost in stalls, over all ranks: {', '.join(shares)}"]
    lines += _snapshots(values.snapshots)
    memory = memory_lines(found)
    lines += ["", *memory] if memory else []
    for text in sum_lines(values):
        lines += ["", text]
    lines += _attempts(values.job)
    lines += ["", *found.notes] if found.notes else []
    return "\n".join(lines) + "\n"


# -- tables --------------------------------------------------------------------------------------------------------

_STEP_COLUMNS: Final = [
    "rank", "node", "pid", "steps", "step p50", "p95", "p99", "wait p50", "p95", "p99", "waiting",
    "cores", "memory", "agent per step", "agent cpu",
]  # fmt: skip


def _step_row(rank: Rank, process: ProcessLog) -> list[str]:
    """Figures of the whole run; the memory is its newest. Cores and memory are those of the process and its workers.

    The agent's cost: time on the training thread for each step, and the share of a core that its own threads took.
    """
    steps, waits, overhead = rank.step_seconds, rank.data_wait_seconds, rank.overhead_seconds
    cpu, memory = process.totals.cpu_total_seconds or {}, process.host.rank_bytes
    return [
        str(rank.rank),
        str(rank.node),
        str(rank.pid),
        rank.steps_text,
        *map(duration, (steps.p50, steps.p95, steps.p99, waits.p50, waits.p95, waits.p99)),
        percent(rank.exposed_wait_ratio if rank.steps else None),  # a wait that has not ended is not a share yet
        f"{cpu['used'] / cpu['known']:.1f}" if "used" in cpu and cpu.get("known") else "-",
        "-" if memory is None else byte_size(memory),
        duration(overhead["training"] / rank.steps) if rank.steps else "-",
        percent(overhead["agent"] / rank.wall_seconds, 2) if rank.wall_seconds else "-",
    ]


def _ledger_row(rank: Rank) -> list[str]:
    wall = rank.wall_seconds
    cells = [f"{s:.1f} s {100 * s / wall:5.1f} %" if wall and s is not None else "-" for s in rank.measured.values()]
    return [str(rank.rank), f"{wall:.1f} s", *cells]


# -- stalls --------------------------------------------------------------------------------------------------------


def stall_section(stall: StallRecord, *, with_advice: bool = True) -> list[str]:
    """The lines on a stall: its cause, its lines of code and stacks, and its advice unless that is in another place."""
    details = stall.details
    until = "when the run ended" if stall.closed == stall.opened else f"until {stall.closed}"
    until = until if stall.closed else "still open"
    share = f" ({percent(details.share_ratio, 0)} of the time)" if details.also else ""
    lines = [f"stall on rank {stall.rank}: {stall.cause}{share}, since {stall.opened}, {until}"]
    lines += advice_lines(stall.advice) if with_advice else []
    for other in details.also:
        lines.append(f"  at the same time {other.cause} ({percent(other.share_ratio, 0)} of the time)")
        lines += advice_lines(other.advice) if with_advice else []
    lines += _lines_of_code(details.lines, details.lines_of, stall.opened or "")
    most = _MAX_TRAINING_FRAMES  # the first stack is that of the training thread
    for stack in details.stacks:
        heading, *frames = stack.splitlines() or [""]
        lines += [f"  {line}" for line in (heading, *frames[:most])]
        if len(frames) > most:
            lines.append(f"    ... {len(frames) - most} more lines in the log")
        most = _MAX_FRAMES
    return lines


def advice_lines(advices: Sequence[Advice]) -> list[str]:
    """An indented line for each advice."""
    lines = []
    for advice in advices:
        typed = f"try {advice.typed}: " if advice.typed else ""
        worth = f", predicted {advice.gain} times the steps per second" if advice.gain else ""
        about = f", {advice.about}" if isinstance(advice, RankedAdvice) else ""
        because = f" ({advice.because})" if advice.because else ""
        lines.append(f"  {typed}{advice.action}{worth}{about}{because}")
    return lines


def _finding(finding: Finding) -> list[str]:
    share = "" if finding.share_ratio is None else f" ({percent(finding.share_ratio, 0)} of the time)"
    lines = [f"found on rank {finding.rank}: {finding.kind}{share}", f"  {finding.text}"]
    return lines + [f"  {percent(line.share_ratio, 0)} in {line.named}" for line in finding.lines]


_OF: Final = {
    "fetch": "of the time in fetches",
    "wait": "of the waits for batches",
    "sampler": "of the time in the sampler",
    "step": "of the time in steps",
    "loop": "of the whole loop",
    "checkpoint": "of the time in checkpoints",
}


def _lines_of_code(lines: Sequence[HotLine], of: str, since: str) -> list[str]:
    """The lines of code as a table with their shares of the time; empty without lines."""
    if not lines:
        return []
    rows = [
        [
            percent(line.share_ratio),
            f"{line.file.rpartition(os.sep)[2]}:{line.line}",
            line.function or "-",
            line.calls or "-",
        ]
        for line in lines
    ]
    shown = table([_OF.get(of, "of the time"), "line", "in", "calls"], rows)
    # These texts are aligned to the left, so they are not a column of the table.
    texts = ["source", *(_code_text(line.file, line.line, since) for line in lines)]
    return [f"  {line}  {text}" for line, text in zip(shown, texts, strict=True)]


def _code_text(file: str, line: int, opened: str) -> str:
    """The text of a line of code; a dash if the file is missing or was changed after the stall had opened."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():
        return "-"
    try:
        if path.stat().st_mtime > (unix(opened) or 0.0) or (found := open_regular(path)) is None:
            return "-"
        with found:
            content = found.read(_MAX_FILE_BYTES)
    except (OSError, ValueError):
        return "-"
    lines = content.decode("utf-8", "replace").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return shortened(one_line(text), _MAX_CODE_TEXT) or "-"


def _snapshots(snapshots: Sequence[Snapshot]) -> list[str]:
    """A line for each folder, with the traces of all ranks, and a line for each trace that was read."""
    folders: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        folders.setdefault(snapshot.path.rpartition("/")[0], []).append(snapshot)
    lines = []
    for folder, traces in folders.items():
        first = traces[0]
        ranks = ", ".join(str(rank) for rank in sorted({trace.rank for trace in traces}))
        lines.append("")
        lines.append(
            f"snapshot: steps {first.first_step} to {first.last_step} of rank {ranks}, for {first.reason}, in {folder}"
        )
        texts = ((trace.rank, trace_text(trace.breakdown, trace.suggestions)) for trace in traces)
        lines += [f"  rank {rank}: {text}" for rank, text in texts if text]
    return lines


# -- changes of the steps ------------------------------------------------------------------------------------------

_WAITS: Final = "waiting_for_ranks_ratio"
"""If this share has grown, the rank is slower because it waits for another rank."""

_TAKES: Final = {
    "data_wait_seconds": "waiting for data takes",
    "compute_seconds": "compute takes",
    "fetch_seconds": "fetches take",
    "copy_seconds": "copies to the device take",
    "forward_seconds": "the forward pass takes",
    "backward_seconds": "the backward pass takes",
    "optimizer_seconds": "the optimizer takes",
    "compile_seconds": "compilation takes",
    "other_seconds": "the rest of the compute takes",
}
_NAMES: Final = {
    "gpu_clock_hertz": "GPU clock",
    "gpu_temperature_celsius": "GPU temperature",
    "read_bytes_per_second": "reads of the workers",
    "other_cores": "cores used by other processes",
    "cpu_throttled_ratio": "CPU quota throttling",
    "cpu_pressure_ratio": "CPU pressure",
    "io_pressure_ratio": "I/O pressure",
    "memory_pressure_ratio": "memory pressure",
    "garbage_ratio": "garbage collection",
    _WAITS: "waiting for other ranks",
}


def _changes(changes: Sequence[Change], ranks: int) -> list[str]:
    """A sentence for each change; changes of several ranks at the same time, in the same direction, share one."""
    groups: list[list[Change]] = []
    for change in changes:
        first = groups[-1][0] if groups else change
        apart = (unix(change.at) or 0.0) - (unix(first.at) or 0.0)
        if not groups or apart > _TOGETHER_SECONDS or (change.ratio > 1) != (first.ratio > 1):
            groups.append([])
        groups[-1].append(change)
    lines = []
    for group in groups:
        own = [change for change in group if not any(e.what == _WAITS and e.after > e.before for e in change.figures)]
        lines.append(_change(own or group, ranks))
    return lines


def _change(changes: Sequence[Change], ranks: int) -> str:
    shown = max(changes, key=lambda change: abs(change.ratio - 1))
    slow = {change.rank for change in changes}
    by = f"{percent(abs(shown.ratio - 1), 0)} {'slower' if shown.ratio > 1 else 'shorter'}"
    parts = [_companion(each) for each in shown.figures if each.what != _WAITS]
    if ranks > 1 and len(slow) < ranks:
        parts.append(f"only {named(slow)}")
    step = "" if shown.step is None else f" (step {shown.step})"
    return f"since {shown.at}{step} steps are {by}{': ' if parts else ''}{', '.join(parts)}"


def _companion(each: ChangedFigure) -> str:
    if each.what in _TAKES:
        apart = each.after - each.before
        return f"{_TAKES[each.what]} {duration(abs(apart))} {'longer' if apart > 0 else 'less'}"
    return f"{_NAMES.get(each.what, each.what)} {_figure(each.what, each.before)} to {_figure(each.what, each.after)}"


def _figure(what: str, value: float) -> str:
    if what.endswith("_ratio"):
        return percent(value, 0)
    if what.endswith("_hertz"):
        return f"{value / 1e6:.0f} MHz"
    if what.endswith("_bytes_per_second"):
        return f"{value / 1e6:.1f} MB/s"
    return duration(value) if what.endswith("_seconds") else f"{value:.1f}"


# -- sums: memory, throughput, energy, money, attempts -------------------------------------------------------------


def memory_lines(found: Report) -> list[str]:
    """A line for each process whose memory grows or grew, also of attempts that were replaced."""
    texts = (memory_line(process, over=id(process) in found.over) for process in found.processes)
    lines = [text for text in texts if text]
    more = len(lines) - _MAX_MEMORY_LINES
    return lines[:_MAX_MEMORY_LINES] + ([f"{more} more processes grow; --json has all"] if more > 0 else [])


def memory_line(process: ProcessLog, *, over: bool) -> str:
    """How the memory of a process grows, or grew if it is over; empty if it does not."""
    memory = process.totals.memory
    if not memory.growth_bytes_per_hour:
        return ""
    left = memory.exhausted_in_seconds
    until = "" if left is None else f", used up in about {rough_duration(left)}"
    at = f" (newest line {process.last_time})" if over else ""
    return f"memory: {growth_text(memory, process.rank, over=over)}{until}{at}"


def sum_lines(values: ReportValues) -> list[str]:
    """A line each for samples and tokens, for the energy of the GPUs, and for money, if they are known."""
    lines, throughput, energy, cost = [], values.throughput, values.gpu_energy_joules or {}, values.cost
    sums = (("samples", throughput.samples, throughput.samples_per_second),
            ("tokens", throughput.tokens, throughput.tokens_per_second))  # fmt: skip
    parts = [
        f"{total} {name}" + (f", {plain_number(rate, 4)} per second of the training loop" if rate else "")
        for name, total, rate in sums
        if total is not None
    ]
    if parts:
        lines.append(f"throughput: {'; '.join(parts)}")
    lines += [_compute(values.ranks), _epochs(values.ranks), _step_trend(values.ranks)]
    total = sum(energy.values())
    if total > 0:
        kwh, share = plain_number(energy[DATA_WAIT] / KWH), rounded_percent(energy[DATA_WAIT] / total)
        lines.append(
            f"energy: {kwh} of {plain_number(total / KWH)} kWh went into waits for data ({share}); of the whole GPUs, "
            "split by time"
        )
    if cost is not None:
        waiting = [] if cost.waiting is None else [f"{cost.waiting:.2f} waiting"]
        of_that = ", ".join([*waiting, f"{cost.stalls:.2f} stalls", f"{cost.restarts:.2f} restarts"])
        lines.append(f"cost: {cost.total:.2f} for {plain_number(cost.gpu_hours)} GPU-hours; of that {of_that}")
    return [line for line in lines if line]


def _compute(ranks: Sequence[Rank]) -> str:
    """Where the compute went, over all ranks; empty if no step was timed."""
    split = [rank for rank in ranks if sum(rank.compute_seconds.values()) > 0]
    parts = {part: sum(rank.compute_seconds.get(part, 0.0) for rank in split) for part in COMPUTE_PARTS}
    if not split:
        return ""
    return f"{compute_shares(parts, sum(rank.ledger[COMPUTE] for rank in split))}; from samples of the stack"


def compute_shares(parts: Mapping[str, float], total: float) -> str:
    """The shares of the parts, in seconds, of the compute. ``total``: its seconds."""
    split = [(part, parts.get(part, 0.0)) for part in COMPUTE_PARTS]
    split.append(("rest", total - sum(seconds for _, seconds in split)))
    shares = [f"{part} {rounded_percent(each / total)}" for part, each in split if each > _MIN_PART * total]
    return f"compute: {', '.join(shares)}"


def _epochs(ranks: Sequence[Rank]) -> str:
    """How long an epoch takes, on the rank with the longest; empty before the end of the first."""
    epochs = max(
        (rank.epochs for rank in ranks if rank.epochs is not None), key=lambda each: each.seconds, default=None
    )
    if epochs is None:
        return ""
    return f"epochs: {epochs.count} of {duration(epochs.seconds)}{' each' if epochs.count > 1 else ''}"


_TRENDS: Final = {
    STEADY: "kept their pace",
    GROWS: "became slower and slower",
    SLOWER: "became slower",
    FASTER: "became faster",
    UNCLEAR: "had no clear trend",
}


def _step_trend(ranks: Sequence[Rank]) -> str:
    """How the steps of a short run have changed, on the rank that became slowest; empty for other runs."""
    trends = [rank.step_trend for rank in ranks if rank.step_trend is not None and rank.step_trend.kind in _TRENDS]
    trend = max(trends, key=lambda each: each.after_seconds / max(each.before_seconds, 1e-9), default=None)
    if trend is None:
        return ""
    ends = f"{duration(trend.before_seconds)} at first, {duration(trend.after_seconds)} at last"
    return f"steps: they {_TRENDS[trend.kind]} in {rough_duration(trend.loop_seconds)} of training: {ends}"


def _attempts(job: Job) -> list[str]:
    attempts = job.attempts
    if len(attempts) < 2 or job.goodput.wall_seconds <= 0:
        return []
    shown = attempts[-_MAX_ATTEMPTS:]
    lines = ["", "attempts:"]
    if len(shown) < len(attempts):
        lines.append(f"the newest {len(shown)} of {len(attempts)} attempts; --json has all")
    return [*lines, *map(_attempt, shown)]


def _attempt(attempt: JobAttempt) -> str:
    ranks = f"{attempt.ranks} rank{'s' * (attempt.ranks > 1)}"
    text = f"  attempt {attempt.attempt}: {attempt.end}, {attempt.steps} steps on {ranks}"
    if attempt.resumed_from_step is not None:
        assumed = " (assumed: the newest complete checkpoint)" if attempt.resumed_from == ASSUMED else ""
        text += f", resumed at step {attempt.resumed_from_step}{assumed}"
    if attempt.lost_steps:
        text += f", {attempt.lost_steps} steps lost"
    return text if attempt.reason is None else f"{text} ({attempt.reason})"
