"""Several lives in one run folder: which of them the verdict is about, and which claim one rank at the same time."""

from __future__ import annotations

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
    return [process for process in processes if not any(_replaces(other, process) for other in processes)]


def _replaces(new: ProcessLog, old: ProcessLog) -> bool:
    if not new.started or new.started <= old.last_time:
        return False
    return new.rank == old.rank or 0 < new.head.get("world_size", 0) <= old.rank


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
