"""Measures what the probe adds to a fetch in a DataLoader worker: hot, and between the work of real fetches.

The fetcher is torch's own, patched in the same way as by the probe. The data set returns a ready batch, so that the
added cost is visible. In the cold measurement, an image-like transform runs before each fetch and evicts the caches.
The floor is the least cost of any timing: a stamp before and after, each stored where another process can read it.
"""

from __future__ import annotations

import random
import statistics
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from benchmarks import child
from telemetry.seams.worker import timed_fetch
from telemetry.seams.worker_block import WorkerBlock

if TYPE_CHECKING:
    from collections.abc import Callable

_HOT_CALLS: Final = 500


class Ready:
    """A data set of one ready batch."""

    batch: Final = (torch.zeros(8, 3), torch.zeros(8))

    def __getitem__(self, index: object) -> object:
        return self.batch


def _floor(original: Callable[[Any, Any], Any], block: WorkerBlock) -> Callable[[Any, Any], Any]:
    counters = block.counters(0)

    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        counters.fetching_since_ns = perf_counter_ns()
        data = original(self, possibly_batched_index)
        counters.wall_ns = perf_counter_ns()
        return data

    return fetch


def measure(hot_rounds: int, cold_rounds: int) -> dict[str, Any]:
    """Nanoseconds that are added to a fetch, one reading per round.

    ``{"hot": {"floor": [...], "timed": [...]}, "cold": the same, "fetches": ...}``.
    """
    torch.set_num_threads(1)
    block = WorkerBlock(1)
    block.counters(0).pid = 1  # as in a worker that has begun
    fetcher, bare = _MapDatasetFetcher(Ready(), False, lambda batch: batch, False), _MapDatasetFetcher.fetch
    kinds = {"bare": bare, "floor": _floor(bare, WorkerBlock(1)), "timed": timed_fetch(bare, block, 0)}
    indices = [0]  # the fetcher makes no batches: it passes them on to the data set
    image, kernel = torch.rand(1, 3, 256, 256), torch.rand(8, 3, 5, 5)

    def hot(fetch: Callable[[Any, Any], Any]) -> float:
        start = perf_counter_ns()
        for _ in range(_HOT_CALLS):
            fetch(fetcher, indices)
        return (perf_counter_ns() - start) / _HOT_CALLS

    def cold(fetch: Callable[[Any, Any], Any]) -> float:
        readings = []
        for _ in range(5):
            torch.nn.functional.conv2d(image, kernel).relu().sum()
            start = perf_counter_ns()
            fetch(fetcher, indices)
            readings.append(perf_counter_ns() - start)
        return statistics.median(readings)

    answer: dict[str, Any] = {}
    for name, loop, rounds in (("hot", hot, hot_rounds), ("cold", cold, cold_rounds)):
        added: dict[str, list[float]] = {"floor": [], "timed": []}
        for _ in range(rounds):
            taken = {kind: loop(kinds[kind]) for kind in random.sample([*kinds], len(kinds))}
            for kind, readings in added.items():
                readings.append(taken[kind] - taken["bare"])
        answer[name] = added
    return answer | {"fetches": sum(sum(c.histogram) for c in block.read())}


if __name__ == "__main__":
    child.answer(measure)
