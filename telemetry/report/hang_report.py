"""The hang of a run: the newest that the logs say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.core.run_verdict import HANGS, HUNG, JudgedRun
from telemetry.diagnosis.hangs import HANG_KINDS, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.process_log import ProcessLog

_MAX_RANKS: Final = 1 << 17


def hang_of(processes: Sequence[ProcessLog]) -> dict[str, Any] | None:
    """The ``hang`` of ``report --json``; None where the job does not hang, or goes on.

    Each node says why the job hangs. Of their lines the newest counts that says most: one that knows all ranks.

    Args:
        processes: those that no later one has replaced.
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
        "kind": kind if kind in HANG_KINDS else UNKNOWN,
        "suspects": [
            {name: s.get(name) for name in ("rank", "node", "where", "doing")} for s in best.get("suspects", [])
        ],
        "waiting": [
            {"ranks": _expanded(w.get("ranks", [])), "collective": w.get("collective"), "sequence": w.get("sequence")}
            for w in best.get("waiting", [])
        ],
    }


def job_hang_verdict(hang: dict[str, Any] | None, processes: Sequence[ProcessLog]) -> JudgedRun | None:
    """For the verdict of the report; None where there is no hang, or no rank waits for another."""
    if hang is None or not hang["waiting"]:
        return None
    if all(process.ended for process in processes):
        return JudgedRun(HUNG, f"Hung before its end: {hang['verdict']}.")
    return JudgedRun(HANGS, f"Hangs: {hang['verdict']}.")


def _expanded(spans: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of some ranges, at most `_MAX_RANKS`: a damaged log may name more than fit into the memory."""
    ranks: list[int] = []
    for first, last in spans:
        ranks += range(first, min(last + 1, first + _MAX_RANKS - len(ranks)))
    return ranks
