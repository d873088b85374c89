"""The part of a run that is compared: its blocks, how busy its machine was, and its seconds per step by category."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from telemetry.compare.pace_interval import PaceBlock
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT
from telemetry.report.process_log import CpuSeconds, PacePoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.process_log import ProcessLog

_FIRST_STEPS: Final = 10
_FIRST_RATIO: Final = 0.1
_FIRST_SECONDS: Final = 300.0
"""The first steps are left out: this many at least, and this share of the training loop, but no more seconds of it.
They fill caches, start workers and choose kernels."""

_MOSTLY_KNOWN: Final = 0.5
"""Who used the cores in a window is known if it was measured over this share of it."""

_WAIT: Final = CATEGORIES.index(DATA_WAIT)
_LOOP: Final = tuple(CATEGORIES.index(name) for name in (DATA_WAIT, COMPUTE))


@dataclass(frozen=True, slots=True)
class RunPace:
    """The part of a run after its first steps, over all ranks.

    Attributes:
        blocks: a block for each window in which the training loop ran.
        steps: steps of the mean rank.
        per_step_seconds: by category of the ledger: seconds of a rank for each of its steps.
        others: share of the cores that other programs used while the training loop ran; None if that is not known.
        ranks: how many.
    """

    blocks: tuple[PaceBlock, ...]
    steps: float
    per_step_seconds: dict[str, float]
    others: float | None = None
    ranks: int = 1


def pace_of(processes: Sequence[ProcessLog]) -> RunPace:
    """The pace of a run, from the processes that no later one has replaced.

    The windows are those of the first rank. The totals of the others at the same moments are added.
    """
    series = [_Series(process) for process in processes if process.totals.get("steps_total")]
    if not series:
        return RunPace((), 0.0, dict.fromkeys(CATEGORIES, 0.0))
    first = series[0]
    ends = [first.started + point.wall_seconds for point in _without_short_windows(first.compared())]
    points = [[each.at(end) for each in series] for end in ends]
    if not points:
        return RunPace((), 0.0, dict.fromkeys(CATEGORIES, 0.0))
    blocks = [_block(before, after, series) for before, after in pairwise(points)]
    begin, end = _sum(points[0]), _sum(points[-1])
    steps = end.steps - begin.steps
    spent = (after - before for before, after in zip(begin.ledger, end.ledger, strict=True))
    return RunPace(
        tuple(block for block in blocks if block.seconds > 0),
        steps / len(series),
        {name: seconds / steps if steps else 0.0 for name, seconds in zip(CATEGORIES, spent, strict=False)},
        _others(blocks),
        len(series),
    )


def _without_short_windows(points: Sequence[PacePoint]) -> list[PacePoint]:
    """The ends of windows. One that is shorter than half of the usual one joins its neighbour.

    The last window of a run may be a fraction of a second. Of two windows it would make one that has hardly any weight,
    and the scatter of the two would say nothing about the other.
    """
    if len(points) < 3:
        return list(points)
    least = median(_loop(end) - _loop(begin) for begin, end in pairwise(points)) / 2
    kept = [points[0]]
    for point in points[1:]:
        if _loop(point) - _loop(kept[-1]) >= least:
            kept.append(point)
    return [*kept[:-1], points[-1]]


class _Series:
    """The points of one process, on the clock of its node."""

    def __init__(self, process: ProcessLog) -> None:
        self.started = _unix_seconds(process.started)
        self.node = process.head.get("node")
        self.cores: int = process.head.get("cpu_count", 0)
        self.on_gpu = "gpu" in process.environment
        self._points = [PacePoint(0.0, 0.0, (0.0,) * len(CATEGORIES)), *process.pace.points()]
        self._walls = [point.wall_seconds for point in self._points]

    def compared(self) -> list[PacePoint]:
        """The points from the end of the first steps on."""
        total = _loop(self._points[-1])
        left_out = min(_FIRST_RATIO * total, _FIRST_SECONDS)
        return [point for point in self._points if point.steps >= _FIRST_STEPS and _loop(point) >= left_out]

    def at(self, moment: float) -> PacePoint:
        """The totals at a moment: between two points in a straight line."""
        wall = moment - self.started
        after = min(bisect_left(self._walls, wall), len(self._points) - 1)
        low, high = self._points[max(0, after - 1)], self._points[after]
        span = high.wall_seconds - low.wall_seconds
        share = min(1.0, max(0.0, (wall - low.wall_seconds) / span)) if span > 0 else 1.0
        return PacePoint(
            wall,
            low.steps + share * (high.steps - low.steps),
            tuple(a + share * (b - a) for a, b in zip(low.ledger, high.ledger, strict=True)),
            CpuSeconds(*(a + share * (b - a) for a, b in zip(low.cpu, high.cpu, strict=True))),
        )


def _block(before: Sequence[PacePoint], after: Sequence[PacePoint], series: Sequence[_Series]) -> PaceBlock:
    """The window between two moments, from the points of all ranks."""
    begin, end = _sum(before), _sum(after)
    block = PaceBlock(end.steps - begin.steps, _loop(end) - _loop(begin))
    ranks = [_RankWindow(*each) for each in zip(before, after, strict=True)]
    if not all(rank.known and each.cores for rank, each in zip(ranks, series, strict=True)):
        return block
    by_node: dict[tuple[str | None, int], list[_RankWindow]] = {}
    for rank, each in zip(ranks, series, strict=True):
        by_node.setdefault((each.node, each.cores), []).append(rank)
    others = thread = workers = cpu = 0.0
    for (_, cores), group in by_node.items():
        used = sum(rank.cores.used for rank in group)
        # To a rank the other ranks of its node are others too. Here they are not.
        found = max(0.0, sum(rank.cores.used + rank.cores.others for rank in group) / len(group) - used)
        others += min(1.0, found / cores) / len(by_node)
        thread += sum(rank.thread_held_up(found, used) for rank in group)
        workers += sum(rank.workers_held_up(found, used) for rank in group)
    if math.isnan(thread):
        return block._replace(others=others)
    for rank, each in zip(ranks, series, strict=True):
        cpu += rank.workers_cpu() + (0.0 if each.on_gpu else rank.thread_cpu())
    return block._replace(others=others, held_up=thread + workers, workers_held_up=workers, cpu=cpu)


class _RankWindow:
    """Who used the cores during a window of one rank: ``cores`` has the fields of `CpuSeconds`, for each second."""

    def __init__(self, before: PacePoint, after: PacePoint) -> None:
        cpu = CpuSeconds(*(high - low for low, high in zip(before.cpu, after.cpu, strict=True)))
        wall = after.wall_seconds - before.wall_seconds
        self.known = wall > 0 and cpu.known > _MOSTLY_KNOWN * wall
        if not self.known:
            return
        self.cores = CpuSeconds(
            cpu.used / cpu.known, cpu.others / cpu.known, 1.0, cpu.thread / wall, cpu.thread_delay / wall,
            cpu.worker / cpu.known, cpu.worker_delay / cpu.known,
        )  # fmt: skip
        self._loop_seconds = _loop(after) - _loop(before)
        waited = after.ledger[_WAIT] - before.ledger[_WAIT]
        self._waited_ratio = waited / self._loop_seconds if self._loop_seconds > 0 else 0.0

    def thread_held_up(self, others: float, used: float) -> float:
        """Run-queue delay of the training thread in its compute, as far as others caused it.

        A thread waits for a core because all are in use: by others, or by the rest of the run itself. Each is
        counted with its share of these cores.

        Args:
            others: cores that other programs use.
            used: cores that the run uses on this node.
        """
        delay = self.cores.thread_delay * _share(others, used - self.cores.thread)
        return self._loop_seconds * (1 - self._waited_ratio) * delay

    def workers_held_up(self, others: float, used: float) -> float:
        """The same of the mean worker, in the training thread's waits for data."""
        delay = self.cores.worker_delay * _share(others, used - self.cores.worker)
        return self._loop_seconds * self._waited_ratio * delay

    def thread_cpu(self) -> float:
        """Seconds of the training loop in which the training thread used a core."""
        return min(1.0, self.cores.thread) * self._loop_seconds

    def workers_cpu(self) -> float:
        """Seconds of its waits for data in which the mean worker used a core."""
        return min(1.0, self.cores.worker) * self._loop_seconds * self._waited_ratio


def _share(others: float, own: float) -> float:
    return others / (others + max(0.0, own)) if others > 0 else 0.0


def _others(blocks: Sequence[PaceBlock]) -> float | None:
    known = [block for block in blocks if block.others is not None]
    seconds = sum(block.seconds for block in known)
    return sum((block.others or 0.0) * block.seconds for block in known) / seconds if seconds > 0 else None


def _sum(points: Sequence[PacePoint]) -> PacePoint:
    ledgers = zip(*(point.ledger for point in points), strict=True)
    return PacePoint(points[0].wall_seconds, sum(point.steps for point in points), tuple(map(sum, ledgers)))


def _loop(point: PacePoint) -> float:
    return sum(point.ledger[index] for index in _LOOP)


def _unix_seconds(time: str) -> float:
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
