"""Resident memory: what the agent adds at its start, and what a million steps add."""

from __future__ import annotations

import contextlib
import gc
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import child

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS: Final = 3
_CHUNK: Final = 500  # steps between two checks of how full the ring is
_TIMES_FASTER: Final = 10
"""A million steps take half a minute without dropped steps if everything is done ten times as often: a window of stalls
and a line of the log then have as many ticks and samples as in a run with the default settings."""


def measure(*, agent: bool, steps: int = 0, warm_up: int = 0) -> dict[str, Any]:
    """Memory of this process, with the agent or without, in MiB.

    Args:
        agent: whether the agent runs.
        steps: number of steps; 0 for none. Then the result is the memory after a few ticks.
        warm_up: number of steps before the growth is measured. They run as fast as possible and fill the ring, so that
            everything bounded by the ring's size has been allocated.
    """
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir, _agent(run_dir, agent, steps) as ring:
        if not steps:
            time.sleep(_TICKS + 0.5)
            return resident()
        loop = _Loop(ring)
        loop.run(warm_up, paced=False)
        dropped = ring.dropped if ring else 0
        before = resident()["rss"]
        loop.run(steps)
        return {"growth": resident()["rss"] - before, "dropped": ring.dropped - dropped if ring else 0}


def resident() -> dict[str, float]:
    """Resident and proportional set size of this process, MiB."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return {kind.lower(): int(_line(kind, text)) / 1024 for kind in ("Rss", "Pss")}


def _line(kind: str, text: str) -> str:
    found = re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError(f"smaps_rollup has no {kind}")
    return found[1]


@contextlib.contextmanager
def _agent(run_dir: str, wanted: bool, steps: int) -> Iterator[Any]:  # noqa: FBT001
    """The context in which the agent runs, if it is wanted. Gives its ring."""
    if not wanted:
        yield None
        return
    import telemetry

    # A loop that does nothing stalls, and would trigger a snapshot: torch's profiler keeps some 3 MiB, once.
    times = {"interval_seconds": 1.0, "log_interval_seconds": 10.0, "stall_window_seconds": 30.0}
    faster: dict[str, Any] = {name: seconds / _TIMES_FASTER for name, seconds in times.items()}
    settings = faster | {"max_snapshots": 0} if steps else {}
    agent: Any = telemetry.start(run_dir, port=0, start_line=False, **settings)
    try:
        yield agent.tracker.ring
    finally:
        telemetry.stop()


class _Loop:
    """Steps through torch's own (patched) iterator and optimizer hooks, no faster than the agent reads them."""

    def __init__(self, ring: Any) -> None:
        from benchmarks.loops import EndlessLoader, IdleOptimizer

        self._ring = ring
        self._iterator = iter(EndlessLoader(None))
        self._optimizer = IdleOptimizer()

    def run(self, steps: int, *, paced: bool = True) -> None:
        iterator, optimizer = self._iterator, self._optimizer
        for _ in range(0, steps, _CHUNK):
            for _ in range(min(_CHUNK, steps)):
                next(iterator)
                optimizer.step()
            while paced and self._ring is not None and self._ring.head - self._ring.tail > len(self._ring.words) // 2:
                time.sleep(0.001)


if __name__ == "__main__":
    child.answer(measure)
