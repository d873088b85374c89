"""The report as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CATEGORIES
from telemetry.report.traces import shown_by

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_ROWS: Final = 64
_WORTH_A_WORD: Final = 1.8
"""Seconds: half of the last digit of the hours that are shown."""

_MOST_FRAMES: Final = 4
_MOST_TRAINING_FRAMES: Final = 12
_HEADINGS: Final = {c: c.replace("_", " ") for c in CATEGORIES}


def render(report: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """Verdict, a table per rank, and where the seconds went."""
    ranks = report["ranks"]
    lines = [f"run {report['run']}", "", report["verdict"], ""]
    shown = _worst_first(ranks)[:_MOST_ROWS] if len(ranks) > _MOST_ROWS else ranks
    lines += _table(_STEP_COLUMNS, [_step_row(rank) for rank in shown])
    lines.append("")
    lines += _table(["rank", "wall", *_HEADINGS.values()], [_ledger_row(rank) for rank in shown])
    if len(shown) < len(ranks):
        lines += ["", f"the {len(shown)} of {len(ranks)} that waited most; --json has all"]
    for stall in report["stalls"]:
        lines += ["", *_stall(stall)]
    lost = _lost_by_cause(report["stalls"])
    if lost:
        shares = ", ".join(f"{cause} {seconds / 3600:.3f}" for cause, seconds in lost)
        lines += ["", f"GPU-hours lost in stalls, over all ranks: {shares}"]
    lines += _snapshots(report["snapshots"])
    if notes:
        lines += ["", *notes]
    return "\n".join(lines) + "\n"


_STEP_COLUMNS: Final = [
    "rank", "node", "pid", "steps", "step p50", "p95", "p99", "wait p50", "p95", "p99", "exposed",
    "agent/step", "agent cpu",
]  # fmt: skip


def _stall(stall: dict[str, Any]) -> list[str]:
    until = f"until {stall['closed']}" if stall["closed"] else "still open"
    lines = [f"stall on rank {stall['rank']}: {stall['cause']}, since {stall['opened']}, {until}"]
    for advice in stall["advice"]:
        setting, gain = advice.get("setting"), advice.get("predicted_speedup")
        typed = "" if not setting else f"{setting}={advice['value']}: " if advice.get("value") else f"{setting}: "
        worth = f", predicted {gain:g} times the steps per second" if gain is not None else ""
        lines.append(f"  {'try ' if typed else ''}{typed}{advice.get('action')}{worth} ({advice.get('because')})")
    return [*lines, *_stacks(stall["evidence"].get("stacks", []))]


def _stacks(stacks: Sequence[str]) -> list[str]:
    """The innermost frames of every stack of a stuck run, more of the training thread's, which comes first."""
    lines: list[str] = []
    most = _MOST_TRAINING_FRAMES
    for stack in stacks:
        heading, *frames = stack.splitlines() or [""]
        lines += [f"  {line}" for line in (heading, *frames[:most])]
        if len(frames) > most:
            lines.append(f"    ... {len(frames) - most} more lines in the log")
        most = _MOST_FRAMES
    return lines


def _lost_by_cause(stalls: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Seconds by cause, the most expensive first."""
    total: dict[str, float] = {}
    for stall in stalls:
        for cause, seconds in stall["evidence"].get("lost_seconds", {}).items():
            total[cause] = total.get(cause, 0.0) + seconds
    worst_first = sorted(total.items(), key=lambda item: -item[1])
    return [(cause, seconds) for cause, seconds in worst_first if seconds >= _WORTH_A_WORD]


def _snapshots(snapshots: Sequence[dict[str, Any]]) -> list[str]:
    """One line for the traces of all ranks that lie in one folder."""
    folders: dict[str, list[dict[str, Any]]] = {}
    for snapshot in snapshots:
        folders.setdefault(str(snapshot["path"]).rpartition("/")[0], []).append(snapshot)
    lines = []
    for folder, traces in folders.items():
        steps = f"steps {traces[0]['first_step']} to {traces[0]['last_step']}"
        ranks = ", ".join(str(rank) for rank in sorted({trace["rank"] for trace in traces}))
        lines += ["", f"snapshot: {steps} of rank {ranks}, for {traces[0]['reason']}, in {folder}"]
        lines += [f"  rank {trace['rank']}: {shown}" for trace in traces if (shown := shown_by(trace))]
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
        "-" if exposed is None else f"{100 * exposed:.1f} %",
        duration(overhead["training"] / rank["steps"]) if rank["steps"] else "-",
        f"{100 * overhead['agent'] / rank['wall_seconds']:.2f} %" if rank["wall_seconds"] else "-",
    ]


def _ledger_row(rank: dict[str, Any]) -> list[str]:
    wall = rank["wall_seconds"]
    cells = [f"{s:.1f} s {100 * s / wall:5.1f} %" if wall else "-" for s in rank["ledger"].values()]
    return [str(rank["rank"]), f"{wall:.1f} s", *cells]


def duration(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s"


def _worst_first(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(ranks, key=lambda rank: -(rank["exposed_wait_ratio"] or 0.0))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows)]
