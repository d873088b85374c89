"""The report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.core.recommendation import speedup_text
from telemetry.records import CATEGORIES
from telemetry.report.line_table import line_table
from telemetry.report.snapshot_traces import flops_of, shown_by
from telemetry.report.stall_losses import lost_of
from telemetry.report.step_change_report import change_lines
from telemetry.util.text import duration, percent, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_ROWS: Final = 64
_MIN_LOST_SECONDS: Final = 1.8
"""Half of the last digit of the hours that are shown."""

_MAX_FRAMES: Final = 4
_MAX_TRAINING_FRAMES: Final = 12
_HEADINGS: Final = {c: c.replace("_", " ") for c in CATEGORIES}


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
