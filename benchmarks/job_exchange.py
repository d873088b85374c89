"""Measures what it costs a node to get the paces of a large job: CPU and wall time of one cycle of `JobExchange`.

    python -m benchmarks.job_exchange [--nodes 255] [--ranks 8] [--cycles 10] [--folder DIR]

The files of the other nodes are simulated, and all of them change before each cycle. The row with a latency adds 20 ms
to each file operation, like a busy shared file system. During that time the thread of the exchange sleeps. In the last
row the job hangs, and each node writes the states of its ranks. The last line is the verdict on them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from telemetry.diagnosis.hangs import HangState, decide
from telemetry.model.records import Collective, RankPace
from telemetry.node import peers
from telemetry.node.peers import JobExchange, NodeReport
from telemetry.safety.files import read_small, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS_OF_A_READ = 3  # open, read, close
OPERATIONS_OF_A_WRITE = 4  # open, write, close, rename


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_exchange", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=255)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="run folder to use (default: a temporary one)")
    options = parser.parse_args()
    print(f"{options.nodes} nodes of {options.ranks} ranks, median (and worst) of {options.cycles} cycles")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = Job(Path(folder), options.nodes, options.ranks)
        report("as this file system is", *job.measured(options.cycles, 0.0))
        report("20 ms for each operation on a file", *job.measured(3, 0.02))
        job.hang()
        report("while the job hangs", *job.measured(options.cycles, 0.0))
        seconds, peak, sentence = verdict(job)
    print(f"  the verdict: {seconds * 1e3:.1f} ms, {peak / 2**20:.1f} MiB: {sentence}")


def report(what: str, cpu: list[float], wall: list[float], files: int, heard: int) -> None:
    """Print a row."""
    busy = f"{statistics.median(cpu) * 1e3:.1f} ms ({max(cpu) * 1e3:.1f}) of CPU"
    took = f"{statistics.median(wall):.2f} s ({max(wall):.2f}) of wall time"
    print(f"  {what}: {busy}, {took}, {files} files, {heard} ranks passed on")


class Job:
    """A run folder with the files of all nodes except the one whose exchange is measured."""

    def __init__(self, folder: Path, nodes: int, ranks: int) -> None:
        self.run_dir, self.folder = folder, folder / "job"
        self.folder.mkdir()
        self.sequence = 0
        self.nodes = {name: _paces(name, n * ranks, ranks) for n in range(nodes) for name in [f"n{n:05d}"]}
        self.own = f"n{nodes // 2:05d}"
        self.states: dict[str, tuple[HangState, ...]] = {}
        self.heard: tuple[HangState, ...] = ()

    def hang(self) -> None:
        """From now on all ranks wait for one, which is in a fetch."""
        ranks = sum(len(paces) for paces in self.nodes.values())
        self.states = {
            name: tuple(_state(pace.rank, name, odd=pace.rank == 2 * ranks // 3) for pace in paces)
            for name, paces in self.nodes.items()
        }

    def advance(self) -> None:
        """All other nodes write their files again."""
        self.sequence += 1
        for name, paces in self.nodes.items():
            if name != self.own:
                report = NodeReport(name, self.sequence, tuple(paces), self.states.get(name, ()))
                (self.folder / f"node-{name}.json").write_bytes(msgspec.json.encode(report))

    def measured(self, cycles: int, latency: float) -> tuple[list[float], list[float], int, int]:
        """CPU and wall seconds of each cycle, files used in the last one, and ranks received."""
        files = 0

        def slow(operations: int, call: Callable[..., Any], *args: object) -> Any:
            nonlocal files
            files += 1
            if latency:
                time.sleep(operations * latency)
            return call(*args)

        node = JobExchange(self.run_dir, self.own)
        cpu, wall = [], []
        try:
            for number in range(cycles + 2):  # a writer is known to be alive from the second cycle on
                self.advance()
                if number == 2 or not latency:
                    use(
                        partial(slow, OPERATIONS_OF_A_READ, read_small),
                        partial(slow, OPERATIONS_OF_A_WRITE, replace_file),
                    )
                files, began, busy = 0, time.perf_counter(), time.thread_time()
                heard = node.cycle(self.nodes[self.own], self.states.get(self.own, ()))
                if number >= 2:
                    cpu.append(time.thread_time() - busy)
                    wall.append(time.perf_counter() - began)
        finally:
            use(read_small, replace_file)
        self.heard = node.hang
        return cpu, wall, files, len(heard)


def use(read: Callable[..., Any], write: Callable[..., Any]) -> None:
    """Let the exchange read and write files with these functions."""
    vars(peers).update(read_small=read, replace_file=write)


def verdict(job: Job) -> tuple[float, int, str]:
    """Seconds and bytes of the verdict on the states that the node has heard of, and its sentence."""
    states = [*job.states[job.own], *job.heard]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        found = decide(states, len(states))
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    found = decide(states, len(states))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    return statistics.median(seconds), peak, found.sentence("14:05:12")


def _state(rank: int, node: str, *, odd: bool) -> HangState:
    if odd:
        return HangState(rank, node, "data_wait", stuck=True, seconds=31.0, where="data.py:88", call="read", stack="b")
    newest = Collective("all_reduce", 81234, "0", "1024x1024 BFloat16")
    told = {"where": "train.py:120", "call": "backward", "stack": "a", "state": "sleeping in futex_do_wait"}
    return HangState(rank, node, "compute", stuck=True, seconds=30.0, waits=True, steps=300, collective=newest, **told)


def _paces(node: str, first: int, ranks: int) -> list[RankPace]:
    return [structs.replace(_pace(first + rank), node=node) for rank in range(ranks)]


def _pace(rank: int) -> RankPace:
    return RankPace(
        rank=rank,
        seconds=30.0,
        steps=300,
        compute_seconds=27.0 + rank % 100 / 100,
        exposed_wait_seconds=0.3,
        away_seconds=0.0,
        stack_samples=150,
        in_sync_samples=rank % 50,
        on_gpu=True,
        where="training_step (train.py:120)",
        gpu_busy_ratio=0.9,
        core_wait_seconds=0.125,
        cores_busy_ratio=0.5,
        last_step=81234,
    )


if __name__ == "__main__":
    main()
