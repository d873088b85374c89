"""Measures what it costs a node to get the paces of a large job: CPU and wall time of one cycle of `JobExchange`.

    python -m benchmarks.job_exchange [--nodes 1250] [--ranks 8] [--cycles 10] [--folder DIR]

The files of the other nodes are simulated, and all of them change before each cycle. The second row adds 20 ms to each
file operation, like a busy shared file system. During that time the thread of the exchange sleeps.
In the third row the job hangs, and each node writes the states of its ranks. The last line is the verdict on them.
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

from telemetry.core.hang_records import Collective, HangState
from telemetry.diagnose.hang_verdict import decide, with_sentence
from telemetry.job import exchange
from telemetry.job.candidates import candidates, of_node
from telemetry.job.hang_states import to_rows
from telemetry.job.node_report import MAX_BYTES, NodeReport, encoded
from telemetry.records import RankPace
from telemetry.util.files import read_small, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS_OF_A_READ = 3  # open, read, close
OPERATIONS_OF_A_WRITE = 4  # open, write, close, rename


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_exchange", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="run folder to use (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = Job(Path(folder), options.nodes, options.ranks)
        print(f"{options.nodes} nodes of {options.ranks} ranks, median (and worst) of {options.cycles} cycles")
        for name, latency in (("as this file system is", 0.0), ("20 ms for each operation on a file", 0.02)):
            cpu, wall, files, heard = job.measured(options.cycles if not latency else 3, latency)
            busy = f"{statistics.median(cpu) * 1e3:.1f} ms ({max(cpu) * 1e3:.1f}) of CPU"
            took = f"{statistics.median(wall):.2f} s ({max(wall):.2f}) of wall time"
            print(f"  {name}: {busy}, {took}, {files} files, {heard} ranks passed on")
        job.hang()
        cpu, wall, files, _ = job.measured(options.cycles, 0.0)
        busy = f"{statistics.median(cpu) * 1e3:.1f} ms ({max(cpu) * 1e3:.1f}) of CPU"
        print(f"  while the job hangs: {busy}, {files} files")
        seconds, peak, sentence = verdict(job)
        print(f"  the verdict: {seconds * 1e3:.1f} ms, {peak / 2**20:.1f} MiB: {sentence}")


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
        """All other nodes write their files again, and each group its own."""
        self.sequence += 1
        groups: dict[int, list[RankPace]] = {}
        states: dict[int, list[HangState]] = {}
        for name, paces in self.nodes.items():
            file = f"node-{name}.json"
            if name != self.own:
                (self.folder / file).write_bytes(encoded(self._report(name, paces)))
            groups.setdefault(exchange._group_of(file), []).extend(paces)
            states.setdefault(exchange._group_of(file), []).extend(self.states.get(name, ()))
        for group, paces in groups.items():
            all_ranks = to_rows(exchange.gone(paces))
            report = NodeReport("n", self.sequence, len(paces), candidates(paces), tuple(states[group]), all_ranks)
            (self.folder / exchange._group_file(group)).write_bytes(encoded(report))

    def _report(self, name: str, paces: list[RankPace]) -> NodeReport:
        return NodeReport(name, self.sequence, 1, tuple(paces), self.states.get(name, ()))

    def measured(self, cycles: int, latency: float) -> tuple[list[float], list[float], int, int]:
        """CPU and wall seconds of each cycle, files used in the last one, and ranks received."""
        files = 0

        def slow(operations: int, call: Callable[..., Any], *args: object) -> Any:
            nonlocal files
            files += 1
            if latency:
                time.sleep(operations * latency)
            return call(*args)

        node = exchange.JobExchange(
            self.run_dir,
            self.own,
            read=partial(slow, OPERATIONS_OF_A_READ, lambda path: read_small(path, MAX_BYTES)),
            write=partial(slow, OPERATIONS_OF_A_WRITE, replace_file),
        )
        cpu, wall = [], []
        for number in range(cycles + 2):  # a writer is known to be alive from the second cycle on
            self.advance()
            files, began, busy = 0, time.perf_counter(), time.thread_time()
            heard = node.cycle(self.nodes[self.own], self.states.get(self.own, ()))
            if number >= 2:
                cpu.append(time.thread_time() - busy)
                wall.append(time.perf_counter() - began)
        self.heard = node.hang
        return cpu, wall, files, len(heard)


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
    return statistics.median(seconds), peak, with_sentence(found, "14:05:12").sentence


def _state(rank: int, node: str, *, odd: bool) -> HangState:
    if odd:
        return HangState(rank, node, "data_wait", stuck=True, seconds=31.0, where="data.py:88", call="read", stack="b")
    newest = Collective("all_reduce", 81234, "0", "1024x1024 BFloat16")
    told = {"where": "train.py:120", "call": "backward", "stack": "a", "state": "sleeping in futex_do_wait"}
    return HangState(rank, node, "compute", stuck=True, seconds=30.0, waits=True, steps=300, collective=newest, **told)


def _paces(node: str, first: int, ranks: int) -> list[RankPace]:
    return list(of_node(node, [_pace(first + rank) for rank in range(ranks)]))


def _pace(rank: int) -> RankPace:
    return RankPace(
        rank=rank,
        seconds=30.0,
        steps=300,
        compute_seconds=27.0 + rank % 100 / 100,
        exposed_wait_seconds=0.3,
        away_seconds=0.0,
        samples=150,
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
