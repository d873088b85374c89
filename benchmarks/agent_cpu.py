"""What the agent's own threads take of a core, at one tick a second, with DataLoader workers to watch."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import child

_PREFIX: Final = "telemetry-"
_SETTLE_SECONDS: Final = 2.0
_STEP_SECONDS: Final = 0.01


class Samples(Dataset[Any]):  # type: ignore[misc]
    """Small samples that take a little time, without end as far as a benchmark goes."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.full((3, 8, 8), float(index))


def measure(*, seconds: float, workers: int) -> dict[str, Any]:
    """CPU time of our threads over the wall clock, while a loop with workers runs."""
    import telemetry

    torch.set_num_threads(1)
    loader = DataLoader(Samples(), batch_size=4, num_workers=workers)
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        telemetry.start(run_dir, port=0, start_line=False)
        try:
            iterator = iter(loader)
            _train(iterator, _SETTLE_SECONDS)
            threads, start, before = _threads(), time.perf_counter(), cpu_seconds()
            steps = _train(iterator, seconds)
            spent = {name: after - before.get(name, 0.0) for name, after in cpu_seconds().items()}
            wall = time.perf_counter() - start
            del iterator
        finally:
            telemetry.stop()
    by_thread = {threads.get(task, "ended"): used / wall for task, used in spent.items()}
    return {"share": sum(by_thread.values()), "by_thread": by_thread, "wall_seconds": wall, "steps": steps}


def _train(iterator: Any, seconds: float) -> int:
    """Some steps that wait more than they compute, as a GPU's do."""
    end = time.perf_counter() + seconds
    steps = 0
    while time.perf_counter() < end:
        next(iterator).square().mean()
        time.sleep(_STEP_SECONDS)
        steps += 1
    return steps


def _threads() -> dict[str, str]:
    """Our threads, as kernel task ids with their names. Their kernel names are set from Python 3.14 on only."""
    return {str(t.native_id): t.name for t in threading.enumerate() if t.name.startswith(_PREFIX)}


def cpu_seconds() -> dict[str, float]:
    """CPU time of each of our threads, by task id."""
    spent = {}
    for task in _threads():
        try:
            spent[task] = _task_seconds(Path(f"/proc/self/task/{task}"))
        except OSError:
            continue  # it has ended
    return spent


def _task_seconds(task: Path) -> float:
    """From schedstat, in nanoseconds, where the kernel has it; from stat, in ticks of 10 ms, elsewhere."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    child.answer(measure)
