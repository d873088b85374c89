"""Writes the logs of a training that was not run: as many ranks for as long as wanted, as the agent would write them.

Every line has the fields and the size of a real one. The files are rotated and capped as by default, so of a week only
the newest 128 MiB of a rank are there. Rank ``ranks // 2`` is slow for a while: its GPU's clock is reduced, and the
other ranks wait for it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.util.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEGAN: Final = datetime(2026, 3, 2, 6, tzinfo=timezone.utc).timestamp()
_RANKS_PER_NODE: Final = 8
_MAX_BYTES: Final = 16 << 20
_MAX_FILES: Final = 8
_SHAPES: Final = 64
"""How many different windows a rank has. They follow each other in random order."""

_SAMPLES_PER_STEP: Final = 32
_TOKENS_PER_SAMPLE: Final = 2048
_WATTS: Final = {"startup": 120, "data_wait": 140, "compute": 610, "evaluation": 480, "checkpoint": 130, "other": 120}


@dataclass(frozen=True, slots=True)
class _Phase:
    """Evaluations or checkpoints: the first ends ``first`` seconds after the start. No two phases overlap."""

    name: str
    first: int
    every: int
    seconds: float

    def spent(self, at: float) -> float:
        """Seconds in them, so many seconds after the start."""
        ended = max(0, (at - self.first) // self.every + 1)
        began = self.first + ended * self.every - self.seconds
        return self.seconds * ended + max(0.0, at - began)


_PHASES: Final = (_Phase("evaluation", 7200, 7200, 240.0), _Phase("checkpoint", 1800, 3600, 12.0))


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What to simulate. ``slow``: shares of the run between which one rank is slow."""

    ranks: int
    seconds: int
    interval_seconds: int = 10
    step_seconds: float = 0.42
    slow: tuple[float, float] = (0.55, 0.72)

    @property
    def slow_rank(self) -> int:
        """The rank whose GPU's clock is reduced for a while."""
        return self.ranks // 2

    def is_slow(self, at: float) -> bool:
        """Whether it is, so many seconds after the start."""
        return self.slow[0] * self.seconds <= at < self.slow[1] * self.seconds


def write_run(folder: Path, run: SimulatedRun) -> int:
    """Write the logs into ``folder/logs``. Returns how many bytes they have."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    return sum(_write_rank(logs, run, rank) for rank in range(run.ranks))


def _write_rank(logs: Path, run: SimulatedRun, rank: int) -> int:
    shapes = _Shapes(run, rank)
    intervals = run.seconds // run.interval_seconds
    per_file = max(1, _MAX_BYTES // shapes.bytes_per_interval)
    files = -(-intervals // per_file)
    kept = range(max(0, files - _MAX_FILES), files)
    written = 0
    for number in kept:
        suffix = "" if number == files - 1 else f".{files - 1 - number}"
        first, last = number * per_file, min((number + 1) * per_file, intervals)
        with (logs / f"rank-{rank}.{4000 + rank}.jsonl{suffix}").open("wb") as file:
            file.write(shapes.head(first))
            for interval in range(first, last):
                file.write(shapes.lines(interval))
            if number == files - 1:
                file.write(shapes.end(last))
            written += file.tell()
    return written


class _Shapes:
    """The lines of a rank. Only what differs from window to window is put together anew."""

    def __init__(self, run: SimulatedRun, rank: int) -> None:
        self._run, self._rank = run, rank
        self._random = random.Random(rank)
        self._steps = max(1, int(run.interval_seconds / run.step_seconds))
        self._base = {
            "run": "simulated", "rank": rank, "local_rank": rank % _RANKS_PER_NODE,
            "node": f"gpu-{rank // _RANKS_PER_NODE:03d}", "pid": 4000 + rank, "tid": 4001 + rank, "step": 0,
        }  # fmt: skip
        self._windows = {slow: [self._window(slow=slow) for _ in range(_SHAPES)] for slow in (False, True)}
        self._samples = {slow: [self._sampled(slow=slow) for _ in range(_SHAPES)] for slow in (False, True)}
        self.bytes_per_interval = len(self.lines(0))

    def lines(self, interval: int) -> bytes:
        """The window and the samples of one interval, and the phases that end in it."""
        run, at = self._run, (interval + 1) * self._run.interval_seconds
        slow = run.is_slow(at)
        stamp = _stamp(at)
        shape = self._random.randrange(_SHAPES)
        before, between, after = self._windows[slow][shape]
        totals = msgspec.json.encode(self._totals(at))[1:-1]
        window = b"".join((b'{"time":"', stamp, before, between, totals, after))
        samples = b"".join(b'{"time":"' + stamp + rest for rest in self._samples[slow][shape])
        return b"".join((window, samples, *self._events(at)))

    def head(self, interval: int) -> bytes:
        """The first line of a file."""
        at = interval * self._run.interval_seconds
        fields: dict[str, Any] = {
            "started": _stamp(0).decode(), "world_size": self._run.ranks, "launcher": "torchrun", "launch": "a",
            "restarts": 0, "rank_source": "RANK", "claimed_rank": self._rank, "telemetry_version": "0.1.0",
            "python_version": "3.12.3", "cpu_count": 192, "metrics_url": "http://127.0.0.1:9464/metrics",
            "memory_group": "/", "memory_events": "/sys/fs/cgroup/memory.events", "oom_kills_total": 0,
            "life": f"simulated{self._rank}", "process_started": _stamp(-4).decode(),
            "settings": {"interval_seconds": 1.0, "log_interval_seconds": float(self._run.interval_seconds),
                         "stall_enter_ratio": 0.2},
            "environment": {"torch": "2.9.0", "cuda": "12.8"},
            "loader": {"num_workers": 8, "prefetch_factor": 2, "pin_memory": True},
        }  # fmt: skip
        if interval:
            sketch = Sketch()
            sketch.merge([(-43, self._steps * interval)], 1.4)
            fields |= {"continued": True, "step_sketch": sketch.as_log_field(), "step_max_seconds": 1.4}
            fields |= {"data_wait_sketch": sketch.as_log_field(), "data_wait_max_seconds": 1.4}
        return self._line(at, "run_start", fields)

    def end(self, interval: int) -> bytes:
        """The last line."""
        at = interval * self._run.interval_seconds
        return self._line(at, "run_end", self._totals(at) | {"errors_total": {}, "log_lines_dropped": 0})

    def _totals(self, at: float) -> dict[str, Any]:
        run = self._run
        evaluations, checkpoints = (phase.spent(at) for phase in _PHASES)
        startup = min(at, 9.0)
        loop = max(0.0, at - startup - evaluations - checkpoints)
        wait = loop * (0.03 + 0.01 * math.sin(loop / 20000) + 0.003 * (self._rank % 5))
        begin, end = (share * run.seconds for share in run.slow)
        steps = int((loop - 0.3 * max(0.0, min(at, end) - begin)) / run.step_seconds)  # 1 - 1 / 1.42
        samples = _SAMPLES_PER_STEP * steps
        ledger = {"startup": startup, "data_wait": wait, "compute": loop - wait, "evaluation": evaluations,
                  "checkpoint": checkpoints, "other": 0.0}  # fmt: skip
        energy = {category: round(_WATTS[category] * seconds, 6) for category, seconds in ledger.items()}
        cpu = {"used": 3.1 * loop, "others": 30.0 * loop, "known": loop, "thread": 0.9 * loop,
               "thread_delay": 0.001 * loop, "worker": 0.6 * loop, "worker_delay": 0.01 * loop}  # fmt: skip
        return {
            "steps_total": steps, "wall_seconds": at, "ledger_total_seconds": ledger,
            "exposed_wait_total_seconds": 0.8 * wait, "exposed_wait_absent": None, "first_wait_seconds": 1.2,
            "overhead_seconds": {"training": 2e-6 * loop, "agent": 0.003 * at}, "stall_lost_total_seconds": {},
            "dropped_steps_total": 0, "child_processes": 8, "unseen_steps_total": 0,
            "samples_total": samples, "tokens_total": _TOKENS_PER_SAMPLE * samples, "gpu_energy_total_joules": energy,
            "gpu_uuid": _gpu_uuid(self._rank), "cpu_total_seconds": {name: round(cpu[name], 6) for name in cpu},
            "optimizer_steps_total": steps, "oom_kills_total": 0,
        }  # fmt: skip

    def _events(self, at: int) -> Iterator[bytes]:
        for phase in _PHASES:
            if at >= phase.first and (at - phase.first) % phase.every < self._run.interval_seconds:
                fields = {"name": phase.name, "category": phase.name, "started": _stamp(at - phase.seconds).decode()}
                yield self._line(at, "phase", fields | {"seconds": phase.seconds})
        slow, closed = (int(share * self._run.seconds) for share in self._run.slow)
        interval = self._run.interval_seconds
        if self._rank == self._run.slow_rank and at - interval < slow <= at:
            yield self._line(at, "stall_open", self._stall(slow))
        if self._rank == self._run.slow_rank and at - interval < closed <= at:
            lost = {"lost_seconds": {"gpu_throttled": 0.3 * (closed - slow)}, "share_ratio": 0.3}
            fields = self._stall(slow) | {"closed": _stamp(closed).decode(), "last_step": int(closed / 0.42)}
            yield self._line(at, "stall_close", fields | {"evidence": lost})

    def _stall(self, begin: int) -> dict[str, Any]:
        return {
            "cause": "gpu_throttled", "opened": _stamp(begin).decode(), "first_step": int(begin / 0.42),
            "exposed_wait_ratio": 0.02, "evidence": {},
            "advice": [{"action": "have the cooling or the power limit of this GPU checked", "setting": None,
                        "value": None, "predicted_speedup": 1.42,
                        "because": "its clock is 990 of 1980 MHz, and the other ranks wait for it"}],
        }  # fmt: skip

    def _window(self, *, slow: bool) -> tuple[bytes, bytes, bytes]:
        """A window without its time and its totals: the parts around them."""
        sketches = []
        for middle in (self._run.step_seconds * (1.42 if slow else 1.0), 0.012):
            sketch = Sketch()
            sketch.add([middle * self._random.lognormvariate(0, 0.06) for _ in range(self._steps)])
            sketches.append(sketch)
        step, wait = sketches
        fields = {
            "window_seconds": float(self._run.interval_seconds), "steps": self._steps, "optimizer_steps": self._steps,
            "ledger_seconds": {"startup": 0.0, "data_wait": 0.3, "compute": 9.7, "evaluation": 0.0, "checkpoint": 0.0,
                               "other": 0.0},
            "exposed_wait_seconds": 0.24, "exposed_wait_ratio": 0.024, "exposed_wait_source": "gpu",
            "step_seconds": {"p50": step.quantile(0.5), "p95": step.quantile(0.95), "p99": step.quantile(0.99),
                             "max": step.largest},
            "data_wait_seconds": {"p50": wait.quantile(0.5), "p95": wait.quantile(0.95), "p99": wait.quantile(0.99),
                                  "max": wait.largest},
            "step_sketch": step.as_log_field(), "data_wait_sketch": wait.as_log_field(),
        }  # fmt: skip
        line = self._line(0, "window", fields)
        return line[33:-2] + b",", b"", b"}\n"

    def _sampled(self, *, slow: bool) -> list[bytes]:
        """The samples of an interval without their time."""
        draw, own = self._random.gauss, slow and self._rank == self._run.slow_rank
        busy = min(1.0, 0.93 + draw(0, 0.012)) * (0.72 if slow and not own else 1.0)
        gpu = {
            "index": self._rank % _RANKS_PER_NODE, "uuid": _gpu_uuid(self._rank),
            "name": "NVIDIA H100 80GB HBM3", "utilization_ratio": 0.99, "utilization_source": "nvml",
            "sm_active_ratio": busy,
            "sm_active_source": "gpm", "sm_occupancy_ratio": 0.41, "tensor_active_ratio": 0.36,
            "memory_bandwidth_ratio": 0.44, "memory_used_bytes": int(6.1e10 + draw(0, 2e8)),
            "memory_total_bytes": 85520809984, "power_watts": (420 if own else 640 * busy) + draw(0, 9),
            "temperature_celsius": (84 if own else 61) + draw(0, 1.2), "sm_clock_hertz": 9.9e8 if own else 1.98e9,
            "sm_clock_max_hertz": 1.98e9, "energy_joules": 4.1e9,
            "throttled": ["hw_thermal"] if own else [], "nvlink_receive_bytes_per_second": int(9e10),
            "nvlink_transmit_bytes_per_second": int(9e10), "pcie_receive_bytes_per_second": int(2e9),
            "pcie_transmit_bytes_per_second": int(1e9), "power_limit_watts": 700.0, "memory_temperature_celsius": 72,
            "memory_clock_hertz": 2.619e9, "power_violation_seconds": 91.5, "thermal_violation_seconds": 0.0,
            "ecc_corrected_errors_total": 0, "ecc_uncorrected_errors_total": 0, "corrected_remapped_rows_total": 0,
            "uncorrected_remapped_rows_total": 0, "row_remap_pending": 0, "row_remap_failure": 0,
            "pcie_replays_total": 0, "xid": 0, "xid_errors_total": 0,
            "allocated_bytes": int(5.4e10), "reserved_bytes": int(5.9e10),
        }  # fmt: skip
        host = {
            "cpu_ratio": 0.38 + draw(0, 0.02), "cpu_count": 192, "memory_used_bytes": int(3.1e11 + draw(0, 1e9)),
            "memory_total_bytes": int(2.1e12), "process_cpu_seconds": 1e4, "process_resident_memory_bytes": int(9e9),
            "process_threads": 61, "process_runnable_seconds": 8.2, "process_running_seconds": 9e3,
            "process_children_cpu_seconds": 0.0,
            "pressure_ratio": {"cpu": 0.02, "io": 0.01 + abs(draw(0, 0.01)), "memory": 0.0}, "cgroup_cpu_limit": None,
            "cgroup_cpu_used": None, "cgroup_throttled_ratio": None, "cgroup_memory_limit_bytes": None,
            "cgroup_memory_used_bytes": None, "training_bytes": int(9e9), "workers_bytes": int(2.4e10),
            "workers_shared_bytes": int(4e9), "shared_memory_bytes": int(2e10), "shared_memory_free_bytes": int(1e12),
            "memory_available_bytes": int(1.7e12), "memory_limit_bytes": int(2.1e12),
        }  # fmt: skip
        workers = {
            "workers": 8, "training_workers": 8, "resident_memory_bytes": int(2.4e10), "ready_batches": 13,
            "fetching_seconds": 0.2, "fetches_total": 100000, "cpu_ratio": 0.61 + draw(0, 0.02), "busy_ratio": 0.71,
            "runnable_ratio": 0.01 + abs(draw(0, 0.005)), "blocked_ratio": 0.09 + abs(draw(0, 0.01)),
            "read_bytes_per_second": 3.1e8, "slack_seconds": 1.9, "fetch_wait_seconds_total": 3.1,
            "transfer_wait_seconds_total": 2.2,
            "head_of_line_seconds_total": 0.4, "matched_total": 1000, "from_busy_total": 800,
            "transfer_wait_busy_worker_seconds_total": 1.1, "transfer_wait_long_fetch_seconds_total": 0.1,
            "head_of_line_batches": 0,
            "head_of_line_worker": None, "head_of_line_since_seconds": None, "written_bytes_per_second": 1.4e6,
            "allowed_cores": 192, "pickling_ratio": 0.04,
        }  # fmt: skip
        events = (("gpu", gpu), ("host", host), ("workers", workers))
        return [self._line(0, event, fields)[33:] for event, fields in events]

    def _line(self, at: float, event: str, fields: dict[str, Any]) -> bytes:
        return msgspec.json.encode({"time": _stamp(at).decode(), "event": event} | self._base | fields) + b"\n"


def _gpu_uuid(rank: int) -> str:
    return f"GPU-{rank:08x}-0000-0000-0000-000000000000"


def _stamp(at: float) -> bytes:
    """A time so many seconds after the start, as the log has it."""
    text = datetime.fromtimestamp(BEGAN + at, tz=timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z").encode()
