"""The report as text."""

from __future__ import annotations

import os
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CATEGORIES, speedup_text
from telemetry.util.files import open_regular
from telemetry.util.text import duration, one_line, percent, shortened, table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from telemetry.report.process_log import ProcessLog
    from telemetry.report.summary import Report


from telemetry.report.attempts import unix
from telemetry.report.goodput import attempt_lines, cost_lines, energy_lines, throughput_lines
from telemetry.report.process_log import lost_of
from telemetry.report.summary import flops_of, grows, shown_by
from telemetry.util.text import named, rough_duration

_MAX_FILE_BYTES: Final = 1 << 22
_MAX_TEXT: Final = 60
_OF: Final = {
    "fetch": "of the time in fetches",
    "wait": "of the waits for batches",
    "sampler": "of the time in the sampler",
    "step": "of the time in steps",
    "checkpoint": "of the time in checkpoints",
}


def line_table(stall: dict[str, Any]) -> list[str]:
    """A heading, and a row for each line. Empty if no lines are known."""
    lines = stall["evidence"].get("lines")
    if not lines:
        return []
    rows = [
        [
            percent(line["share_ratio"]),
            f"{line['file'].rpartition(os.sep)[2]}:{line['line']}",
            str(line["function"] or "-"),
            str(line["calls"] or "-"),
            _source(line["file"], line["line"], stall["opened"]) or "-",
        ]
        for line in lines
    ]
    of = _OF.get(stall["evidence"].get("lines_of", ""), "of the time")
    shown = table([of, "line", "in", "calls"], [row[:4] for row in rows])
    texts = ["source", *(row[4] for row in rows)]  # aligned to the left, so it is no column of the table
    return [f"  {line}  {text}" for line, text in zip(shown, texts, strict=True)]


def _source(file: str, line: int, opened: str) -> str | None:
    """The text of a line; None if the file is not there or was changed after the stall had opened."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():
        return None
    try:
        if path.stat().st_mtime > datetime.fromisoformat(opened.replace("Z", "+00:00")).timestamp():
            return None
        found = open_regular(path)
        if found is None:
            return None
        with found:
            content = found.read(_MAX_FILE_BYTES)
    except (OSError, ValueError):
        return None
    lines = content.decode("utf-8", "replace").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return shortened(one_line(text), _MAX_TEXT) or None


_MAX_ROWS: Final = 64
_MIN_LOST_SECONDS: Final = 1.8
"""Half of the last digit of the hours that are shown."""

_MAX_FRAMES: Final = 4
_MAX_TRAINING_FRAMES: Final = 12
_HEADINGS: Final = {c: c.replace("_", " ") for c in CATEGORIES}


def as_text(found: Report) -> str:
    """The report as text."""
    values = found.values
    spent = [
        *throughput_lines(values["throughput"]),
        *energy_lines(values["gpu_energy_joules"]),
        *cost_lines(values["cost"]),
    ]
    sections = [*memory_lines(found.processes, found.over), *spent, *attempt_lines(found.goodput)]
    notes = ["", *found.notes] if found.notes else []
    return render(values, [*sections, *notes], found.lost_seconds)


def render(report: dict[str, Any], notes: Sequence[str] = (), lost: Mapping[str, float] | None = None) -> str:
    """The verdict, a table of steps and a ledger by rank, the stalls, the snapshots and the notes.

    Args:
        report: as `summarize` returns it.
        notes: lines on what is missing or damaged in the logs.
        lost: seconds lost in stalls, by cause, as `lost_by_cause` returns them. Without it, those of the stalls there.
    """
    ranks = report["ranks"]
    lines = [f"run {report['run']}", "", report["verdict"], ""]
    shown = _worst_first(ranks)[:_MAX_ROWS] if len(ranks) > _MAX_ROWS else ranks
    lines += table(_STEP_COLUMNS, [_step_row(rank) for rank in shown])
    lines.append("")
    lines += table(["rank", "wall", *_HEADINGS.values()], [_ledger_row(rank) for rank in shown])
    if len(shown) < len(ranks):
        lines += ["", f"the {len(shown)} of {len(ranks)} ranks that waited most; --json has all"]
    for stall in report["stalls"]:
        lines += ["", *stall_section(stall)]
    changes = change_lines(report["changes"], len({rank["rank"] for rank in ranks}))
    lines += ["", *changes] if changes else []
    of = lost_of(report["stalls"]) if lost is None else lost
    worst_first = sorted((item for item in of.items() if item[1] >= _MIN_LOST_SECONDS), key=lambda item: -item[1])
    if worst_first:
        shares = ", ".join(f"{cause} {seconds / 3600:.3f}" for cause, seconds in worst_first)
        lines += ["", f"GPU-hours lost in stalls, over all ranks: {shares}"]
    lines += _snapshots(report["snapshots"])
    if notes:
        lines += notes if not notes[0] else ["", *notes]
    return "\n".join(lines) + "\n"


_STEP_COLUMNS: Final = [
    "rank", "node", "pid", "steps", "step p50", "p95", "p99", "wait p50", "p95", "p99", "exposed",
    "agent/step", "agent cpu",
]  # fmt: skip


def stall_section(stall: dict[str, Any]) -> list[str]:
    """The lines on a stall, an entry of ``stalls``: its cause, advice, lines of code and stacks."""
    until = f"until {stall['closed']}" if stall["closed"] else "still open"
    evidence = stall["evidence"]
    also = [other for other in evidence.get("also", []) if "cause" in other]
    share = f" ({percent(evidence.get('share_ratio'), 0)} of the time)" if also else ""
    lines = [f"stall on rank {stall['rank']}: {stall['cause']}{share}, since {stall['opened']}, {until}"]
    lines += advice_lines(stall["advice"])
    for other in also:
        lines.append(f"  at the same time {other['cause']} ({percent(other.get('share_ratio'), 0)} of the time)")
        lines += advice_lines(other.get("advice", []))
    return [*lines, *line_table(stall), *_stacks(evidence.get("stacks", []))]


def advice_lines(advices: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each advice, indented."""
    lines = []
    for advice in advices:
        setting, gain = advice.get("setting"), speedup_text(advice)
        typed = "" if not setting else f"{setting}={advice['value']}: " if advice.get("value") else f"{setting}: "
        worth = f", predicted {gain} times the steps per second" if gain else ""
        lines.append(f"  {'try ' if typed else ''}{typed}{advice.get('action')}{worth} ({advice.get('because')})")
    return lines


def _stacks(stacks: Sequence[str]) -> list[str]:
    """The innermost frames of each stack of a stuck run. The training thread's stack is first and gets more frames."""
    lines: list[str] = []
    most = _MAX_TRAINING_FRAMES
    for stack in stacks:
        heading, *frames = stack.splitlines() or [""]
        lines += [f"  {line}" for line in (heading, *frames[:most])]
        if len(frames) > most:
            lines.append(f"    ... {len(frames) - most} more lines in the log")
        most = _MAX_FRAMES
    return lines


def _snapshots(snapshots: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each folder, with the traces of all ranks, and a line for each trace that was read."""
    folders: dict[str, list[dict[str, Any]]] = {}
    for snapshot in snapshots:
        folders.setdefault(str(snapshot["path"]).rpartition("/")[0], []).append(snapshot)
    lines = []
    for folder, traces in folders.items():
        steps = f"steps {traces[0]['first_step']} to {traces[0]['last_step']}"
        ranks = ", ".join(str(rank) for rank in sorted({trace["rank"] for trace in traces}))
        lines += ["", f"snapshot: {steps} of rank {ranks}, for {traces[0]['reason']}, in {folder}"]
        lines += [f"  rank {trace['rank']}: {shown}" for trace in traces if (shown := shown_by(trace))]
        flops: dict[str, list[str]] = {}
        for trace in traces:
            flops.setdefault(flops_of(trace), []).append(str(trace["rank"]))
        lines += [f"  FLOPs of rank {', '.join(of)}: {said}" for said, of in flops.items() if said]
    return lines


def _step_row(rank: dict[str, Any]) -> list[str]:
    steps, waits = rank["step_seconds"], rank["data_wait_seconds"]
    overhead, exposed = rank["overhead_seconds"], rank["exposed_wait_ratio"]
    return [
        str(rank["rank"]),
        str(rank["node"]),
        str(rank["pid"]),
        str(rank["steps"]),
        *(duration(steps[p]) for p in ("p50", "p95", "p99")),
        *(duration(waits[p]) for p in ("p50", "p95", "p99")),
        percent(exposed if rank["steps"] else None),  # a wait that has not ended is no share yet
        duration(overhead["training"] / rank["steps"]) if rank["steps"] else "-",
        percent(overhead["agent"] / rank["wall_seconds"], 2) if rank["wall_seconds"] else "-",
    ]


def _ledger_row(rank: dict[str, Any]) -> list[str]:
    wall = rank["wall_seconds"]
    cells = [f"{s:.1f} s {100 * s / wall:5.1f} %" if wall else "-" for s in rank["ledger"].values()]
    return [str(rank["rank"]), f"{wall:.1f} s", *cells]


def _worst_first(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(ranks, key=lambda rank: -(rank["exposed_wait_ratio"] or 0.0))


_TOGETHER_SECONDS: Final = 120.0
"""Changes of several ranks within this time are one. Each rank knows the moment to a block of 30 s."""


_WAITS: Final = "waiting_for_ranks_ratio"
"""Where this has grown, a rank is slower because it waits for another one."""


_TAKES: Final = {
    "data_wait_seconds": "waiting for data takes",
    "compute_seconds": "compute takes",
    "fetch_seconds": "fetches take",
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


def change_lines(changes: Sequence[dict[str, Any]], ranks: int) -> list[str]:
    """A sentence for each change; those of several ranks at the same time are one."""
    lines = []
    for _, group in groupby(_numbered(changes), key=lambda pair: pair[0]):
        together = [change for _, change in group]
        own = [change for change in together if not _waits_more(change)] or together
        shown = max(own, key=lambda change: abs(change["ratio"] - 1))
        lines.append(_sentence(shown, sorted({change["rank"] for change in own}), ranks))
    return lines


def _numbered(changes: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each change with the number of its group: in the same direction, and soon after the first of the group."""
    numbered: list[tuple[int, dict[str, Any]]] = []
    groups: list[tuple[float, bool]] = []
    for change in changes:
        at, slower = unix(change["at"]) or 0.0, change["ratio"] > 1
        if not groups or at - groups[-1][0] > _TOGETHER_SECONDS or groups[-1][1] != slower:
            groups.append((at, slower))
        numbered.append((len(groups), change))
    return numbered


def _waits_more(change: dict[str, Any]) -> bool:
    return any(each["what"] == _WAITS and each["after"] > each["before"] for each in change["with"])


def _sentence(change: dict[str, Any], slow: Sequence[int], ranks: int) -> str:
    ratio = change["ratio"]
    by = f"{percent(ratio - 1, 0)} slower" if ratio > 1 else f"{percent(1 - ratio, 0)} shorter"
    parts = [_companion(each) for each in change["with"] if each["what"] != _WAITS]
    if ranks > 1 and len(slow) < ranks:
        parts.append(f"only {named(slow)}")
    step = "" if change["step"] is None else f" (step {change['step']})"
    return f"since {change['at']}{step} steps are {by}{': ' if parts else ''}{', '.join(parts)}"


def _companion(each: dict[str, Any]) -> str:
    what, before, after = each["what"], each["before"], each["after"]
    if what in _TAKES:
        return f"{_TAKES[what]} {duration(abs(after - before))} {'longer' if after > before else 'less'}"
    return f"{_NAMES.get(what, what)} {_figure(what, before)} to {_figure(what, after)}"


def _figure(what: str, value: float) -> str:
    if what.endswith("_ratio"):
        return percent(value, 0)
    if what.endswith("_hertz"):
        return f"{value / 1e6:.0f} MHz"
    if what.endswith("_bytes_per_second"):
        return f"{value / 1e6:.1f} MB/s"
    return duration(value) if what.endswith("_seconds") else f"{value:.1f}"


_MAX_MEMORY_LINES: Final = 16


def memory_lines(processes: Sequence[ProcessLog], over: Collection[int]) -> list[str]:
    """A line for each process whose memory grows or grew, also of attempts that were replaced."""
    lines = []
    for process in processes:
        if not process.totals.get("memory", {}).get("growth_bytes_per_hour"):
            continue
        gone = id(process) in over
        left = process.totals["memory"].get("exhausted_in_seconds")
        until = "" if left is None else f", used up in about {rough_duration(left)}"
        at = f" (newest line {process.last_time})" if gone else ""
        lines.append(f"memory: {grows(process, past=gone)}{until}{at}")
    more = (
        [f"{len(lines) - _MAX_MEMORY_LINES} more processes grow; --json has all"]
        if len(lines) > _MAX_MEMORY_LINES
        else []
    )
    return ["", *lines[:_MAX_MEMORY_LINES], *more] if lines else []
