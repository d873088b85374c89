"""The traces of a run's snapshots, read for the report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from telemetry.trace.flops_usage import FlopsUsage, sentence
from telemetry.trace.read_limits import TraceError
from telemetry.trace.reader import read_trace
from telemetry.util.text import percent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
        snapshot["flops"] = asdict(trace.flops)
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
    return sentence(FlopsUsage(**snapshot["flops"])) if "flops" in snapshot else ""


def verdict_of(snapshots: Sequence[dict[str, Any]]) -> str:
    """What the newest trace that was read adds to the verdict; empty without one."""
    read = [snapshot for snapshot in snapshots if snapshot["breakdown"]]
    if not read:
        return ""
    newest = max(read, key=lambda snapshot: (snapshot["last_step"] or 0, -snapshot["rank"]))
    steps = f"steps {newest['first_step']} to {newest['last_step']}"
    return f" The trace of {steps} on rank {newest['rank']} shows {shown_by(newest)}."
