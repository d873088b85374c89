"""Measures what the agent costs a loop of short steps whose batches have hundreds of small tensors.

    python -m benchmarks.small_steps

Segments with and without the agent alternate in one process, in a new order for each pair, and each begins a new
iteration of the loader. A pair gives one ratio of step times, one of the CPU times of the training thread, which other
programs of the machine disturb less, and the CPU time of the agent's threads, too, as a share of the step. Where the
allocator puts the tensors changes a segment by several per cent, with or without the agent. So these need many pairs.

The last column is what the agent itself reports for a step of the measured part: its hooks (also as a share of the
step), and its threads.

With ``--stalled``, the window of a stall is so short that one is open in most of the segment: waits for such batches
are long. Then the agent also samples the training thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import machine
from benchmarks.spread import percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

TENSORS: Final = 500
_STEP_SECONDS: Final = 0.001
_SETTLE_SECONDS: Final = 3.0
_SKIPPED: Final = 50


class Batches(Dataset):  # type: ignore[misc]
    """Items that are batches of `TENSORS` small tensors, in a list or in a mapping."""

    def __init__(self, *, mapping: bool) -> None:
        self.mapping = mapping
        self.rows = torch.zeros(TENSORS, 4)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        tensors = [row.clone() for row in self.rows]
        return {f"field{number}": tensor for number, tensor in enumerate(tensors)} if self.mapping else tensors


class Loop:
    """A training of steps that take about `_STEP_SECONDS`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.weight = torch.randn(64, 64, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-9)
        self.products = 1
        iterator = iter(loader)
        for _ in range(_SKIPPED):
            self._step(iterator)
        while statistics.median(self._timed(iterator) for _ in range(100)) < _STEP_SECONDS:
            self.products += 1

    def _timed(self, iterator: Iterator[Any]) -> float:
        start = time.perf_counter()
        self._step(iterator)
        return time.perf_counter() - start

    def _step(self, iterator: Iterator[Any]) -> Any:
        batch = next(iterator)
        product = self.weight
        for _ in range(self.products):
            product = product @ self.weight
        product.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return batch

    def run(self, settle: float, seconds: float, running: Any = None) -> Costs:
        """Run steps, of which those after ``settle`` seconds are measured. ``running``: the agent, if there is one."""
        iterator, kept = iter(self.loader), None
        until = time.perf_counter() + settle
        while time.perf_counter() < until:
            kept = self._step(iterator)
        steps, before = 0, Costs.of(running)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            kept = self._step(iterator)  # the batch is freed when the next one replaces it, as in a ``for`` loop
            steps += 1
        del kept
        return Costs(*((now - then) / steps for now, then in zip(Costs.of(running), before, strict=True)))


class Costs(NamedTuple):
    """Seconds of a step, or up to now.

    Attributes:
        wall: on the wall clock.
        thread: CPU seconds of the training thread. ``others``: of all other threads.
        hooks: seconds that the agent reports for its hooks. ``agent``: for its own threads.
    """

    wall: float
    thread: float
    others: float
    hooks: float
    agent: float

    @classmethod
    def of(cls, running: Any) -> Costs:
        """The costs up to now."""
        own = time.thread_time()
        reported = {"training": 0.0, "agent": 0.0} if running is None else running.overhead.seconds()
        others = time.process_time() - own
        return cls(time.perf_counter(), own, others, reported["training"], reported["agent"])


def segment(loop: Loop, seconds: float, *, agent: bool, window: float = 30.0) -> Costs:
    """Run one segment."""
    if not agent:
        return loop.run(_SETTLE_SECONDS, seconds)
    import telemetry

    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        running: Any = telemetry.start(
            run_dir, port="off", start_line=False, end_line=False, max_snapshots=0, stall_window_seconds=window
        )
        try:
            return loop.run(_SETTLE_SECONDS, seconds, running)
        finally:
            telemetry.stop()


def compare(loop: Loop, pairs: int, seconds: float, window: float) -> list[tuple[Costs, Costs]]:
    """Pairs of segments without and with the agent."""
    found = []
    for _ in range(pairs):
        pair = {agent: segment(loop, seconds, agent=agent, window=window) for agent in random.sample((False, True), 2)}
        found.append((pair[False], pair[True]))
    return found


def main() -> None:
    """Measure, and print one row for each kind of batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each segment")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--stalled", action="store_true")
    parser.add_argument("--results", type=Path, metavar="DIR", help="write the table there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    about = machine.describe()
    lines = [
        "# Short steps with hundreds of small tensors",
        "",
        (
            f"Measured by `python -m benchmarks.small_steps` on {about['cpu']}, {about['cores']} cores shared with "
            f"other work; Python {about['python']}, torch {about['torch']}. Medians of {options.pairs} pairs of "
            f"{options.seconds:.0f} s, with the 10th to the 90th percentile."
        ),
        "",
        "| batch | workers | us of a step | longer by | CPU of the training thread | of all threads | reported, us |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for workers in options.workers:
        for mapping in (False, True):
            loader = DataLoader(Batches(mapping=mapping), batch_size=None, num_workers=workers)
            pairs = compare(Loop(loader), options.pairs, options.seconds, 2.0 if options.stalled else 30.0)
            lines.append(_row("mapping" if mapping else "list", workers, pairs))
            print(lines[-1], flush=True)
    if options.results is not None:
        path = options.results / f"small-steps-{machine.slug(about)}.md"
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
        print(f"written: {path}")


def _row(kind: str, workers: int, both: list[tuple[Costs, Costs]]) -> str:
    more = (
        [100 * (agent.wall / bare.wall - 1) for bare, agent in both],
        [100 * (agent.thread / bare.thread - 1) for bare, agent in both],
        [100 * (agent.thread + agent.others - bare.thread - bare.others) / bare.wall for bare, agent in both],
    )
    spreads = (f"{statistics.median(of):.2f} % ({percentile(of, 0.1):.2f} to {percentile(of, 0.9):.2f})" for of in more)
    step = statistics.median(bare.wall for bare, _ in both)
    hooks, own = (statistics.median(of) for of in zip(*((agent.hooks, agent.agent) for _, agent in both), strict=True))
    reported = f"{1e6 * hooks:.1f} ({100 * hooks / step:.2f} %) + {1e6 * own:.1f} |"
    return " | ".join([f"| {kind}", str(workers), f"{1e6 * step:.0f}", *spreads, reported])


if __name__ == "__main__":
    main()
