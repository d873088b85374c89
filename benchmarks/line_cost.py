"""Measures what it costs a DataLoader worker to be sampled while a stall is open, and to look whether it is asked.

    python -m benchmarks.line_cost

One worker fetches without a pause. It is asked for samples in every second period. Its main thread does the fetches,
and its other threads send the batches, and sample. The kernel counts what the sampling thread itself takes. While a
worker is sampled, its threads may take turns ten times as often, so those that wait for the GIL wake more often, too.
So the second figure is the CPU time of all threads but the main one, less that of as many batches in periods without
samples. The time from one batch to the next shows what the worker does altogether.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from benchmarks import machine
from telemetry.safety import threads
from telemetry.seams.worker import WorkerLoop
from telemetry.seams.worker_block import WorkerBlock
from telemetry.util.clock import NS, now_ns
from telemetry.util.profiles import StackProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = Path(__file__).resolve().parent / "results"

_SETTLE_SECONDS = 0.3
"""At the start of each period: the thread starts, or notices that the request is over."""


class Work(Dataset):  # type: ignore[misc]
    """A batch has four figures of the worker, in ns: a stamp; CPU time of all threads, the main one, the sampling one.

    Args:
        kind: ``python`` (holds the GIL), ``long python``, ``tensors`` (release it often) or ``waiting``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.set_num_threads(1)
        _WORK[self.kind]()
        return torch.tensor([now_ns(), time.process_time_ns(), time.thread_time_ns(), sampling_ns()])


def sampling_ns() -> int:
    """CPU time of the sampling thread, in ns; 0 while there is no such thread."""
    for thread in [*threads._running.values()]:
        if thread.name == "telemetry-lines":
            with contextlib.suppress(OSError):  # it ends just now
                return int(Path(f"/proc/self/task/{thread.native}/schedstat").read_text().split()[0])
    return 0


def _python(numbers: int = 100_000) -> None:
    sum([number * number for number in range(numbers)])


def _long_python() -> None:
    _python(500_000)


def _tensors() -> None:
    picture = torch.ones(3, 128, 128)
    for _ in range(150):
        picture = picture * 1.01 + 0.1


def _waiting() -> None:
    time.sleep(0.01)


_WORK: dict[str, Callable[[], None]] = {
    "python": _python,
    "long python": _long_python,
    "tensors": _tensors,
    "waiting": _waiting,
}


class Period(NamedTuple):
    """Shares of a core that all threads but the main one took, and the sampling thread; seconds from batch to batch."""

    others: float
    sampling: float
    fetch: float


def period(batches: Iterator[torch.Tensor], block: WorkerBlock, seconds: float, *, asked: bool) -> Period:
    """Fetch for so many seconds."""
    session = now_ns()
    block.ask_samples(session, session + int(2 * seconds * NS) if asked else 1)
    settled = now_ns() + int(_SETTLE_SECONDS * NS)
    first = next(batches)
    while int(first[0]) < settled:
        first = next(batches)
    count, last = 0, first
    while int(last[0]) < int(first[0]) + seconds * NS:
        last, count = next(batches), count + 1
    wall, process, thread, sampling = (last - first).tolist()
    return Period((process - thread) / wall, sampling / wall, wall / NS / count)


def measure(kind: str, rounds: int, seconds: float) -> str:
    """One row of the table."""
    block = WorkerBlock(1)
    loop = WorkerLoop(worker._worker_loop, tracker=None)  # type: ignore[arg-type]  # the block exists already
    loop.making.block, worker._worker_loop = block, loop
    batches = iter(DataLoader(Work(kind), batch_size=None, num_workers=1))
    worker._worker_loop = loop.original
    next(batches)
    added, longer, own, rates = [], [], [], []
    for _ in range(rounds):
        without = period(batches, block, seconds, asked=False)
        began = now_ns()
        sampled = period(batches, block, seconds, asked=True)
        profiles = [StackProfile.unpacked(found.content) for found in block.sampled()]
        rates.append(sum(profile.samples for profile in profiles) / ((now_ns() - began) / NS))
        own.append(100 * sampled.sampling)
        added.append(100 * (sampled.others - without.others * without.fetch / sampled.fetch))
        longer.append(100 * (sampled.fetch / without.fetch - 1))
    cells = [kind, f"{1e3 * without.fetch:.1f}", f"{statistics.median(rates):.0f}"]
    cells += [f"{statistics.median(own):.2f} % ({min(own):.2f} to {max(own):.2f})"]
    cells += [f"{statistics.median(each):+.2f} % ({min(each):+.2f} to {max(each):+.2f})" for each in (added, longer)]
    return f"| {' | '.join(cells)} |"


def looking() -> float:
    """Nanoseconds of a look at the request."""
    known = {"counters": WorkerBlock(1).counters(0), "start": now_ns()}
    looks, nothing = (
        min(timeit.repeat(code, globals=known, number=200_000, repeat=5))
        for code in ("counters.sample_until_ns > start", "start > start")
    )
    return (looks - nothing) / 200_000 * NS


def main() -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.line_cost", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="periods of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a period")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    about = machine.describe()
    lines = [
        "# What it costs a worker to be sampled",
        "",
        (
            f"Measured by `python -m benchmarks.line_cost` on {about['cpu']}, {about['cores']} cores shared with other "
            f"work; Python {about['python']}, torch {about['torch']}. Medians of {options.repeat} comparisons, with "
            f"the least and the most. The load average was {os.getloadavg()[0]:.1f} at the start."
        ),
        "",
        "CPU is a share of a core. *Others*: all threads but the main one, so with those that send batches.",
        "",
        "| Fetches | ms each | samples/s | CPU of the sampling thread | of others, more by | a batch takes longer by |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[4:]))
    for kind in _WORK:
        lines.append(measure(kind, options.repeat, options.seconds))
        print(lines[-1], flush=True)
    lines += ["", f"While no stall is open, a fetch looks at the request once: {looking():.0f} ns.", ""]
    print(lines[-2])
    path = options.results / f"line-cost-{machine.slug(about)}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
