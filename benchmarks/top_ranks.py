"""Simulated ranks of a large job, as their logs and heartbeats show them: files that grow like those of real ranks."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import CATEGORIES
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from pathlib import Path

RANKS_OF_A_NODE: Final = 8
WINDOW_SECONDS: Final = 10.0
STEP_SECONDS: Final = 0.25
SLOW_RANK: Final = 437
SKETCH: Final = {str(bucket): 3 for bucket in range(80, 110)}


class SimulatedRanks:
    """The files of all ranks. One rank waits for data; all others wait for it in their compute.

    Args:
        run_dir: the run folder.
        ranks: how many.
        minutes: of history in the logs.
    """

    def __init__(self, run_dir: Path, ranks: int, minutes: float) -> None:
        self._logs, self._beats = run_dir / "logs", run_dir / "attempts"
        self._logs.mkdir(parents=True)
        self._beats.mkdir()
        self._slow = SLOW_RANK % ranks
        self.ranks = range(ranks)
        self._began = time.time() - 60 * minutes
        for rank in self.ranks:
            lines = [self._head(rank)]
            for window in range(int(60 * minutes / WINDOW_SECONDS)):
                lines += self._window(rank, self._began + (window + 1) * WINDOW_SECONDS)
            lines.append(self._stall(rank, time.time() - 45))
            self._append(rank, lines)
        self.beat()

    def grow(self, share: int, shares: int) -> None:
        """Add a window to the logs of a share of the ranks."""
        for rank in self.ranks[share::shares]:
            self._append(rank, self._window(rank, time.time()))

    def beat(self) -> None:
        """Write the heartbeats of all ranks over."""
        for rank in self.ranks:
            now = time.time()
            content = json.dumps(
                {"life": f"{rank:016x}", "unix_seconds": now, **self._totals(rank, now), "resumption": {}}
            ).encode()
            file = os.open(self._beats / f"{rank:016x}.beat", os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(file, content.ljust(1023) + b"\n", 0)
            os.close(file)

    def _append(self, rank: int, lines: list[dict[str, Any]]) -> None:
        with open(self._logs / f"rank-{rank}.{10_000 + rank}.jsonl", "ab") as log:
            log.write(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))

    def _line(self, rank: int, event: str, at: float, **fields: Any) -> dict[str, Any]:
        node = f"node-{rank // RANKS_OF_A_NODE:03d}"
        line = {"time": iso_time(at), "event": event, "run": "large", "rank": rank}
        return line | {"local_rank": rank % RANKS_OF_A_NODE, "node": node, "pid": 10_000 + rank, "tid": 1} | fields

    def _head(self, rank: int) -> dict[str, Any]:
        settings = {"interval_seconds": 1.0, "log_interval_seconds": WINDOW_SECONDS, "stall_enter_ratio": 0.2}
        return self._line(rank, "run_start", self._began, started=iso_time(self._began), world_size=len(self.ranks),
                          life=f"{rank:016x}", settings=settings)  # fmt: skip

    def _totals(self, rank: int, at: float) -> dict[str, Any]:
        seconds = at - self._began
        slow = rank == self._slow
        ledger = dict.fromkeys(CATEGORIES, 0.0) | {"startup": 5.0}
        ledger["data_wait"] = (0.6 if slow else 0.01) * (seconds - 5)
        ledger["compute"] = (0.4 if slow else 0.99) * (seconds - 5)
        return {"steps_total": int(seconds / STEP_SECONDS), "optimizer_steps_total": int(seconds / STEP_SECONDS),
                "wall_seconds": seconds, "first_wait_seconds": 0.5, "ledger_total_seconds": ledger}  # fmt: skip

    def _window(self, rank: int, at: float) -> list[dict[str, Any]]:
        totals = self._totals(rank, at)
        ledger = totals["ledger_total_seconds"]
        percentiles = {"p50": 0.25, "p95": 0.26, "p99": 0.27, "max": 0.3}
        window = self._line(
            rank, "window", at, window_seconds=WINDOW_SECONDS, steps=40, ledger_seconds=ledger,
            step_seconds=percentiles, data_wait_seconds=percentiles, step_sketch=SKETCH, data_wait_sketch=SKETCH,
            exposed_wait_total_seconds=ledger["data_wait"], overhead_seconds={"training": 0.1, "agent": 1.0},
            stall_lost_total_seconds={"straggler": max(0.0, at - time.time() + 45)}, unseen_steps_total=0, **totals,
        )  # fmt: skip
        gpu = self._line(
            rank, "gpu", at, name="Simulated GPU", index=rank % 8, utilization_ratio=0.42, sm_active_ratio=0.31,
            memory_used_bytes=61_000_000_000, memory_total_bytes=80_000_000_000, power_watts=412.0,
            temperature_celsius=61.0, throttled=[],
        )  # fmt: skip
        host = self._line(rank, "host", at, cpu_ratio=0.5, process_resident_memory_bytes=3_000_000_000,
                          pressure_ratio={"cpu": 0.1, "io": 0.0, "memory": 0.0})  # fmt: skip
        workers = self._line(rank, "workers", at, workers=8, worker_busy_ratio=0.9, worker_cpu_ratio=0.7)
        return [window, gpu, host, workers]

    def _stall(self, rank: int, at: float) -> dict[str, Any]:
        if rank == self._slow:
            advice = {"action": "use more workers", "setting": "num_workers", "value": "12", "predicted_speedup": 1.9,
                      "because": "8 workers, each with 1,200 ms a batch, deliver one every 150 ms"}  # fmt: skip
            evidence: dict[str, Any] = {"lost_seconds": {"workers_cpu_bound": 27.0}}
            cause = "workers_cpu_bound"
        else:
            advice = {"action": f"look at rank {self._slow}", "because": "it waits for data"}
            evidence = {"lost_seconds": {"straggler": 20.0}, "straggler_rank": self._slow}
            cause = "straggler"
        return self._line(rank, "stall_open", at, cause=cause, opened=iso_time(at), first_step=100,
                          evidence=evidence, advice=[advice])  # fmt: skip


def grow_until(ranks: SimulatedRanks, path: Path) -> None:
    """Let the files grow, each second a tenth of the logs and all heartbeats, until a file appears."""
    second = 0
    while not path.exists():
        began = time.monotonic()
        ranks.grow(second % int(WINDOW_SECONDS), int(WINDOW_SECONDS))
        ranks.beat()
        second += 1
        time.sleep(max(0.0, began + 1.0 - time.monotonic()))
