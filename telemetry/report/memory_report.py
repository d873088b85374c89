"""Memory that grows: an entry for each rank, and a sentence of the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.records import CUDA, SHARED_MEMORY, TRAINING, WORKERS
from telemetry.util.text import byte_size, rough_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from telemetry.report.process_log import ProcessLog

_SHM: Final = "/dev/shm"  # noqa: S108 - only its name
_PARTS: Final = {
    TRAINING: ("the training process", "grows", "grew"),
    WORKERS: ("the workers", "grow", "grew"),
    SHARED_MEMORY: (_SHM, "grows", "grew"),
    CUDA: ("the tensors on the GPU", "grow", "grew"),
}
_OTHERS: Final = ("memory outside of this run's processes", "grows", "grew")
_MAX_LINES: Final = 16


def memory_of(process: ProcessLog) -> dict[str, Any]:
    """How the memory of a rank grew when its newest line was written, as ``report --json`` has it."""
    said = process.totals.get("memory", {})
    return {name: said.get(name) for name in ("growth_bytes_per_hour", "where", "exhausted_in_seconds")}


def memory_verdict(processes: Sequence[ProcessLog], over: Collection[int]) -> str:
    """A sentence on the rank whose memory runs out first; empty if none is about to, or if the run has finished.

    Args:
        processes: those that no later one has replaced.
        over: ids of the processes that have ended, by themselves or not.
    """
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
        return f"When its log ends, memory was to run out in about {left}: {_grows(process, past=True)}."
    what = {
        SHARED_MEMORY: f"{_SHM} of node {node} is full",
        CUDA: f"The GPU of rank {process.rank} runs out of memory",
    }.get(said.get("exhausted", ""), f"Node {node} runs out of memory")
    return f"{what} in about {left}: {_grows(process, past=False)}."


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
        lines.append(f"memory: {_grows(process, past=gone)}{until}{at}")
    more = [f"{len(lines) - _MAX_LINES} more processes grow; --json has all"] if len(lines) > _MAX_LINES else []
    return ["", *lines[:_MAX_LINES], *more] if lines else []


def _grows(process: ProcessLog, *, past: bool) -> str:
    said = process.totals["memory"]
    what, now, then = _PARTS.get(said.get("where", ""), _OTHERS)
    of_rank = f" of rank {process.rank}" if "where" in said else ""
    rate = f"{byte_size(said.get('growth_bytes_per_hour', 0))}/h"
    advice = f"; {said['advice']}" if said.get("advice") else ""
    return f"{what}{of_rank} {then if past else now} {rate}{advice}"


def _finished(process: ProcessLog) -> bool:
    return process.ended and not process.end.get("exception") and not process.end.get("exit_status")
