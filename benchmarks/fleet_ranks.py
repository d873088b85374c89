"""Simulated ranks: what the agent of each would show at a moment, with everything measured and changing values.

The exposition is the real one (`telemetry.node.prometheus`). Only the view that it renders is simulated.

``python -m benchmarks.fleet_ranks RANKS RANKS_PER_NODE``, started by `benchmarks.fleet`, prints its port, and serves
them until it is terminated.
"""

from __future__ import annotations

import math
import sys
import time
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from telemetry._version import __version__
from telemetry.config import STEP_BUCKETS
from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.memory_outlook import MemoryGrowth
from telemetry.model import records  # RECORDS
from telemetry.model.records import (
    COMPUTE_PARTS,
    FETCH_BUCKETS,
    MEMORY_PARTS,
    CollectorHealth,
    Deliveries,
    EnergyView,
    GpuSample,
    Histogram,
    HostSample,
    PressureSample,
    ProcessSample,
    TorchMemorySample,
    WorkersSample,
)
from telemetry.model.totals import StackTotals, Totals
from telemetry.node.board import RankHead, RankState
from telemetry.node.metrics import AttemptView, RunView, SnapshotsView, StallView
from telemetry.node.prometheus import numbers_of, rendered

if TYPE_CHECKING:
    from collections.abc import Iterable

GIB: Final = 1 << 30
CPUS: Final = 64
STEP_SECONDS: Final = 0.25
_LOST = ("redone", "restore", "replay", "startup", "stuck", "down")
_COLLECTORS: Final = ("nvml", "host", "process", "workers", "pressure", "torch_memory", "memory")
_STARTUP_SECONDS: Final = 20.0
_SECONDS_OF_MEMORY: Final = 30 * 86400.0
_NODES_OF_A_RUN: Final = 8
_NIL: Final = uuid.UUID(int=0)


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One rank of a simulated run.

    Attributes:
        run: its run. ``rank``: its rank. ``node``: its machine. ``local_rank``: its number there, and its GPU's.
        world_size: number of ranks of the run.
        began: Unix time at which it began.
        waits: share of its training loop in which it waits for data, 0 to 1.
        cause: the cause of its waiting, from `CAUSES`; None if it has no stall.
    """

    run: str
    rank: int
    node: str
    local_rank: int
    world_size: int
    began: float
    waits: float
    cause: str | None

    def view(self, now: float, gpu: GpuSample | None = None) -> RunView:
        """The state of the rank.

        Args:
            now: Unix time.
            gpu: a reading to show instead of a simulated one.
        """
        age = max(now - self.began, _STARTUP_SECONDS)
        loop = age - _STARTUP_SECONDS
        waited = loop * self.waits
        steps = int(loop / STEP_SECONDS)
        lost = dict.fromkeys(CAUSES, 0.0)
        opened = dict.fromkeys(CAUSES, 0)
        if self.cause is not None:
            lost[self.cause], opened[self.cause] = waited, 1
        ledger = dict.fromkeys(records.CATEGORIES, 0.0)
        ledger[records.STARTUP] = _STARTUP_SECONDS
        ledger[records.DATA_WAIT], ledger[records.COMPUTE] = waited, loop - waited
        return RunView(
            info={
                "node": self.node,
                "local_rank": str(self.local_rank),
                "world_size": str(self.world_size),
                "launcher": "torchrun",
                "telemetry_version": __version__,
                "python_version": "3.11.7",
                "torch_version": "2.13.0+cu130",
                "job": self.run,
                "user": "somebody",
                "account": "research",
                "partition": "gpu",
            },
            started_unix_seconds=self.began,
            ended=False,
            totals=Totals(
                steps=steps,
                ledger_seconds=ledger,
                exposed_wait_seconds=waited,
                optimizer_steps=steps,
                samples=32 * steps,
                tokens=65536 * steps,
                compute_parts=dict.fromkeys(COMPUTE_PARTS, (loop - waited) / len(COMPUTE_PARTS)),
                stacks=StackTotals(
                    samples=int(loop - waited),
                    in_sync=int((loop - waited) * (0.6 if self.cause == "straggler" else 0.05)),
                ),
                overhead_seconds={"training": 4e-6 * steps, "agent": 0.005 * age},
            ),
            step_duration=_histogram(STEP_BUCKETS, steps, STEP_SECONDS),
            wait_duration=_histogram(STEP_BUCKETS, steps, STEP_SECONDS * self.waits),
            last_step_unix_seconds=now - STEP_SECONDS * self._wave(now),
            errors={},
            stalls=StallView(self.cause, opened, lost, straggler=0 if self.cause == "straggler" else None),
            snapshots=SnapshotsView({"recorded": int(self.cause is not None), "refused": 0, "failed": 0, "skipped": 0}),
            collectors=tuple(CollectorHealth(name, True, 0.001 * (1 + self._wave(now)), None) for name in _COLLECTORS),
            gpu=gpu or self._gpu(now),
            energy=EnergyView(gpu or self._gpu(now), {category: 500.0 * s for category, s in ledger.items()}),
            gpu_hour_price=2.5,
            host=HostSample(0.3 + 0.2 * self._wave(now), CPUS, int((300 + 20 * self._wave(now)) * GIB), 1024 * GIB),
            process=ProcessSample(0.9 * age, int((9 + self._wave(now)) * GIB), 92),
            workers=self._workers(now, steps, waited),
            worker_fetches=_histogram(FETCH_BUCKETS, steps, 8 * STEP_SECONDS * 0.8),
            pressure=PressureSample(
                {"cpu": 0.02 * self._wave(now), "io": self.waits * self._wave(now), "memory": 0.0},
                cgroup_cpu_limit=CPUS,
                cgroup_throttled_ratio=0.01 * self._wave(now),
                cgroup_memory_limit_bytes=900 * GIB,
                cgroup_memory_used_bytes=int((310 + 20 * self._wave(now)) * GIB),
            ),
            torch_memory=TorchMemorySample(int((40 + self._wave(now)) * GIB), 60 * GIB),
            memory=MemoryGrowth(
                dict.fromkeys(MEMORY_PARTS, 0.0), exhausted_in_seconds=None if self.rank else _SECONDS_OF_MEMORY
            ),
            step_change_ratio=1.0,
            attempt=None if self.rank else AttemptView(2, 0, dict.fromkeys(_LOST, 100.0)),
        )

    def _wave(self, now: float) -> float:
        """A value that moves from 0 to 1 and back in a few minutes, with another period for each rank."""
        return (1 + math.sin(now / (20 + self.rank % 17) + self.rank)) / 2

    def _gpu(self, now: float) -> GpuSample:
        busy = 1 - self.waits
        return GpuSample(
            index=self.local_rank,
            uuid=f"GPU-{uuid.uuid5(_NIL, f'{self.run}/{self.rank}')}",
            name="NVIDIA H100 80GB HBM3",
            utilization_ratio=min(1.0, busy + 0.1),
            utilization_source="nvml",
            sm_active_ratio=busy * (0.7 + 0.2 * self._wave(now)),
            sm_active_source="gpm",
            sm_occupancy_ratio=busy * 0.4,
            tensor_active_ratio=busy * 0.35,
            memory_bandwidth_ratio=busy * 0.3,
            memory_used_bytes=int((61 + self._wave(now)) * GIB),
            memory_total_bytes=80 * GIB,
            power_watts=120 + 500 * busy + 20 * self._wave(now),
            temperature_celsius=40 + 25 * busy,
            sm_clock_hertz=1.98e9 - 2e8 * self._wave(now),
            sm_clock_max_hertz=1.98e9,
            throttled=("sw_power_cap",) if self._wave(now) > 0.5 else (),
            nvlink_receive_bytes_per_second=int(busy * 9e10),
            nvlink_transmit_bytes_per_second=int(busy * 9e10),
            pcie_receive_bytes_per_second=int(busy * 2e9),
            pcie_transmit_bytes_per_second=int(busy * 1e9),
            power_limit_watts=700.0,
            memory_temperature_celsius=50 + 25 * busy,
            memory_clock_hertz=2.619e9,
            power_violation_seconds=now / 100,
            thermal_violation_seconds=0.0,
            ecc_corrected_errors_total=0,
            ecc_uncorrected_errors_total=0,
            corrected_remapped_rows_total=0,
            uncorrected_remapped_rows_total=0,
            row_remap_pending=0,
            row_remap_failure=0,
            pcie_replays_total=0,
            xid=0,
            xid_errors_total=0,
        )

    def _workers(self, now: float, steps: int, waited: float) -> WorkersSample:
        workers = 8
        return WorkersSample(
            workers=workers,
            training_workers=workers,
            resident_memory_bytes=int(workers * (1.2 + 0.1 * self._wave(now)) * GIB),
            ready_batches=round((1 - self.waits) * 2 * workers * self._wave(now)),
            fetching_seconds=0.1,
            fetches_total=steps,
            fetch_duration=_histogram(FETCH_BUCKETS, steps, workers * STEP_SECONDS * 0.8),
            cpu_ratio=0.3,
            busy_ratio=0.3 + 0.05 + 0.5 * self.waits,
            runnable_ratio=0.05,
            blocked_ratio=0.5 * self.waits,
            read_bytes_per_second=2e8,
            slack_seconds=(1 - self.waits) * self._wave(now),
            deliveries=Deliveries(
                fetch_wait_seconds=0.9 * waited,
                transfer_wait_seconds=0.1 * waited,
                head_of_line_seconds=0.2 * waited,
            ),
            head_of_line_batches=round(self.waits * self._wave(now)),
        )


def fleet(ranks: int, ranks_per_node: int, began: float) -> list[list[SimulatedRank]]:
    """Ranks by node: one run on half the nodes, and runs of eight nodes.

    One run in four starves, including the large one: on each of its nodes one rank waits for data, the others for it.
    """
    nodes = math.ceil(ranks / ranks_per_node)
    sizes = [max(1, nodes // 2)]
    while sum(sizes) < nodes:
        sizes.append(min(_NODES_OF_A_RUN, nodes - sum(sizes)))
    places = [(run, place, size) for run, size in enumerate(sizes) for place in range(size)]
    return [
        [
            SimulatedRank(
                run=f"run-{run:04}",
                rank=place * ranks_per_node + local,
                node=f"node-{number:05}",
                local_rank=local,
                world_size=size * ranks_per_node,
                began=began,
                waits=(0.6 if local == 0 else 0.02) if run % 4 == 0 else 0.05 + 0.01 * local,
                cause=("workers_io_bound" if local == 0 else "straggler") if run % 4 == 0 else None,
            )
            for local in range(min(ranks_per_node, ranks - number * ranks_per_node))
        ]
        for number, (run, place, size) in enumerate(places)
    ]


class Node:
    """The answer of a node's endpoint: the metrics of its ranks, rendered as the rank that serves does it."""

    def __init__(self, ranks: Iterable[SimulatedRank]) -> None:
        self.ranks = tuple(ranks)

    def expose(self, views: Iterable[RunView]) -> bytes:
        """The exposition of one view of each rank. The first one serves, so it shows the machine."""
        views, first = list(views), self.ranks[0]
        states = [
            RankState(RankHead(rank=rank.rank, pid=0, ticks=0), numbers_of(view))
            for rank, view in zip(self.ranks, views, strict=True)
        ]
        return rendered(states, numbers_of(views[0], of_node=True), run=first.run, node=first.node)


def _histogram(bounds: tuple[float, ...], count: int, value: float) -> Histogram:
    """``count`` values near ``value``: half of them in its bucket, the rest in the two buckets above."""
    counts = [0] * (len(bounds) + 1)
    place = next((index for index, bound in enumerate(bounds) if bound >= value), len(bounds))
    for offset, share in enumerate((0.5, 0.4)):
        counts[min(place + offset, len(bounds))] += int(count * share)
    counts[min(place + 2, len(bounds))] += count - sum(counts)
    return Histogram(bounds, tuple(counts), count * value)


# -- a fleet of endpoints: nodes at one loopback port, each at its own path ------------------------------------------

AGE_SECONDS: Final = 3600.0
"""Age of the runs when they are first scraped."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, nodes: list[list[SimulatedRank]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.nodes = {f"/{ranks[0].node}/metrics": Node(ranks) for ranks in nodes}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a scraper disconnects."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Prometheus keeps its connections
    server: _Server

    def do_GET(self) -> None:
        node = self.server.nodes.get(self.path)
        if node is None:
            self.send_error(404)
            return
        now = time.time()
        body = node.expose(rank.view(now) for rank in node.ranks)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        del format, args


def main(argv: list[str]) -> None:
    """Serve ``ranks`` simulated ranks."""
    ranks, ranks_per_node = map(int, argv)
    server = _Server(fleet(ranks, ranks_per_node, time.time() - AGE_SECONDS))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
