"""Several lives in one run folder: which of them the verdict is about, and which claim one rank at the same time."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.load import ProcessLog

_MOST_NAMED: Final = 8


def current(processes: Sequence[ProcessLog]) -> list[ProcessLog]:
    """The lives that no later one has taken the place of.

    A life is over for good once one of the same rank has begun after its newest line; or one of a job that has no such
    rank any more, as after an elastic restart with fewer ranks.
    """
    newest: dict[int, str] = {}
    for process in processes:
        newest[process.rank] = max(newest.get(process.rank, ""), process.started)
    began = sorted((process.started, process.head.get("world_size") or math.inf) for process in processes)
    # From each start on: the fewest ranks that a job had which began then or later.
    fewest = list(accumulate((world_size for _, world_size in reversed(began)), min))[::-1]

    def replaced(process: ProcessLog) -> bool:
        later = bisect_right(began, (process.last_time, math.inf))
        return newest[process.rank] > process.last_time or (later < len(began) and fewest[later] <= process.rank)

    return [process for process in processes if not replaced(process)]


def shared_ranks(processes: Sequence[ProcessLog]) -> str:
    """Says so where several processes that train claim one rank at the same time, and what to do; else empty."""
    claims: dict[int, list[ProcessLog]] = {}
    for process in processes:
        if process.totals.get("steps_total"):
            claims.setdefault(process.head.get("claimed_rank", process.rank), []).append(process)
    text = ""
    for rank, claimants in sorted(claims.items()):
        together = [one for one in claimants if any(_overlap(one, other) for other in claimants if other is not one)]
        if not together:
            continue
        named = [f"pid {one.pid} on {one.head.get('node')}{_shown(one, rank)}" for one in together[:_MOST_NAMED]]
        more = f" and {len(together) - _MOST_NAMED} more" if len(together) > _MOST_NAMED else ""
        text += (
            f" {len(together)} processes claim rank {rank} at the same time ({', '.join(named)}{more}); each is "
            "counted by itself. Tell each one its rank: set RANK and WORLD_SIZE, or call "
            "torch.distributed.init_process_group. If they are jobs of their own, give each a run folder of its own."
        )
    return text


def _shown(process: ProcessLog, claimed: int) -> str:
    return f", shown as rank {process.rank}" if process.rank != claimed else ""


def _overlap(one: ProcessLog, other: ProcessLog) -> bool:
    return one.started <= other.last_time and other.started <= one.last_time


def child_processes(processes: Sequence[ProcessLog]) -> int:
    """How many processes of their own those of the run have started with multiprocessing, DataLoader workers aside."""
    return sum(process.totals.get("child_processes", 0) for process in processes)
