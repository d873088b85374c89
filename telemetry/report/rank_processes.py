"""Several processes in one run folder: which of them the verdict is about, and which use one rank at the same time."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.process_log import ProcessLog

_MAX_NAMED: Final = 8


def not_replaced(processes: Sequence[ProcessLog]) -> list[ProcessLog]:
    """The processes that no later process has replaced.

    A process is replaced if one of the same rank started after its newest line. It is also replaced if one of a job
    without that rank did, as after an elastic restart with fewer ranks.
    """
    newest: dict[int, str] = {}
    for process in processes:
        newest[process.rank] = max(newest.get(process.rank, ""), process.started)
    began = sorted((process.started, process.head.get("world_size") or math.inf) for process in processes)
    # For each start: the smallest world size of a process that started then or later.
    fewest = list(accumulate((world_size for _, world_size in reversed(began)), min))[::-1]

    def replaced(process: ProcessLog) -> bool:
        later = bisect_right(began, (process.last_time, math.inf))
        return newest[process.rank] > process.last_time or (later < len(began) and fewest[later] <= process.rank)

    return [process for process in processes if not replaced(process)]


def duplicate_ranks(processes: Sequence[ProcessLog]) -> str:
    """A warning if several training processes have one rank at the same time, and what to do; otherwise empty."""
    by_rank: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.get("steps_total"):
            by_rank.setdefault(process.head.get("claimed_rank", process.rank), []).append(process)
    text = ""
    for rank, same in sorted(by_rank.items()):
        together = [one for one in same if any(_overlap(one, other) for other in same if other is not one)]
        if not together:
            continue
        named = [f"pid {one.pid} on {one.head.get('node')}{_shown_as(one, rank)}" for one in together[:_MAX_NAMED]]
        more = f" and {len(together) - _MAX_NAMED} more" if len(together) > _MAX_NAMED else ""
        text += (
            f" {len(together)} processes claim rank {rank} at the same time ({', '.join(named)}{more}); each is "
            "counted separately. Tell each process its rank: set RANK and WORLD_SIZE, or call "
            "torch.distributed.init_process_group. If they are separate jobs, give each its own run folder."
        )
    return text


def _shown_as(process: ProcessLog, claimed: int) -> str:
    return f", shown as rank {process.rank}" if process.rank != claimed else ""


def _overlap(one: ProcessLog, other: ProcessLog) -> bool:
    return one.started <= other.last_time and other.started <= one.last_time


def child_processes(processes: Sequence[ProcessLog]) -> int:
    """How many processes the run has started with multiprocessing, without DataLoader workers."""
    return sum(process.totals.get("child_processes", 0) for process in processes)
