"""A view of a run in which everything was measured."""

import dataclasses

import msgspec

from telemetry.config import STEP_BUCKETS
from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.hangs import HangState, HangVerdict
from telemetry.diagnosis.memory_outlook import MemoryGrowth
from telemetry.model.records import (
    CATEGORIES,
    COMPUTE_PARTS,
    MEMORY_PARTS,
    SNAPSHOT_RESULTS,
    CollectorHealth,
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
from telemetry.node.board import Numbers, RankHead, RankState
from telemetry.node.metrics import COLLECTOR, AttemptView, RunView, SnapshotsView, StallView
from telemetry.node.prometheus import numbers_of, rendered


def published(numbers):
    """As another rank reads it from the board."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(numbers), type=Numbers)


def page(*views, run="a run", node="n1", first=7, openmetrics=False):
    """What a scrape gets from a node with these ranks. The first one serves."""
    states = [
        RankState(RankHead(rank=rank, pid=1, ticks=1), published(numbers_of(view)))
        for rank, view in enumerate(views, first)
    ]
    machine = numbers_of(views[0], of_node=True)
    return rendered(states, machine, run=run, node=node, openmetrics=openmetrics).decode()


def full_view():
    """A view in which everything was measured."""
    view = RunView(
        info=dict.fromkeys(
            (
                "node", "local_rank", "world_size", "launcher", "telemetry_version", "python_version", "torch_version",
                "job", "user", "account", "partition",
            ),
            "x",
        ),
        started_unix_seconds=1.6e9,
        ended=False,
        totals=Totals(
            steps=3, estimated_steps=3, ledger_seconds=dict.fromkeys(CATEGORIES, 1.5), exposed_wait_seconds=0.5, optimizer_steps=3,
            overhead_seconds={"training": 1e-6, "agent": 1e-3}, dropped_steps=1,
            stacks=StackTotals(samples=30, in_sync=10), samples=96, tokens=960,
            gpu_energy_joules=dict.fromkeys(CATEGORIES, 9.5),
            compute_parts=dict.fromkeys(COMPUTE_PARTS, 4.5),
        ),
        step_duration=Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        wait_duration=Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        last_step_unix_seconds=1.7e9,
        errors={"nvml": 1},
        hang=HangVerdict("fetch", (HangState(3, "n1", "data_wait", where="data.py:88"),), 1, (), 60.0, ()),
        stalls=StallView("checkpoint", dict.fromkeys(CAUSES, 0), dict.fromkeys(CAUSES, 0.0), 1),
        snapshots=SnapshotsView(dict.fromkeys(SNAPSHOT_RESULTS, 1)),
        collectors=tuple(CollectorHealth(name, True, 0.001, "why") for name in COLLECTOR.values),
        gpu=GpuSample(
            index=0, uuid="GPU-1", name="a GPU", utilization_ratio=0.5, utilization_source="nvml",
            sm_active_ratio=0.5, sm_active_source="gpm",
            sm_occupancy_ratio=0.5, tensor_active_ratio=0.5, memory_bandwidth_ratio=0.5, memory_used_bytes=1,
            memory_total_bytes=2, power_watts=300.0, energy_joules=9e6, temperature_celsius=40.0, sm_clock_hertz=1e9, sm_clock_max_hertz=2e9,
            throttled=("sw_thermal",), nvlink_receive_bytes_per_second=1, nvlink_transmit_bytes_per_second=2,
            pcie_receive_bytes_per_second=3, pcie_transmit_bytes_per_second=4, power_limit_watts=700.0,
            memory_temperature_celsius=50.0, memory_clock_hertz=2e9, power_violation_seconds=1.5,
            thermal_violation_seconds=0.5, ecc_corrected_errors_total=3, ecc_uncorrected_errors_total=1,
            corrected_remapped_rows_total=2, uncorrected_remapped_rows_total=1, row_remap_pending=1,
            row_remap_failure=0, pcie_replays_total=4, xid=79, xid_errors_total=2,
        ),
        gpu_hour_price=2.5,
        host=HostSample(cpu_ratio=0.5, cpu_count=2, memory_used_bytes=1, memory_total_bytes=2),
        process=ProcessSample(cpu_seconds=1.0, resident_memory_bytes=1, threads=3, runnable_seconds=0.1, running_seconds=0.1),
        workers=WorkersSample(
            workers=2, training_workers=2, resident_memory_bytes=1, ready_batches=4, fetching_seconds=0.0, fetches_total=3,
            fetch_duration=Histogram(bounds=(0.1, 1.0), counts=(1, 1, 1), total=3.0), cpu_ratio=0.5,
            busy_ratio=0.5, runnable_ratio=0.1, blocked_ratio=0.1, read_bytes_per_second=1.0,
            slack_seconds=0.1, head_of_line_batches=2, head_of_line_worker=0, head_of_line_since_seconds=0.1,
            allowed_cores=2, pickling_ratio=0.1, written_bytes_per_second=1.0, same_batches=False,
        ),
        pressure=PressureSample(
            pressure_ratio={"cpu": 0.1, "io": 0.1, "memory": 0.1}, cgroup_cpu_limit=2.0, cgroup_cpu_used=1.5,
            cgroup_throttled_ratio=0.1,
            cgroup_memory_limit_bytes=2, cgroup_memory_used_bytes=1,
        ),
        own_fetches=Histogram(bounds=(0.1, 1.0), counts=(1, 0, 0), total=0.1),
        worker_fetches=Histogram(bounds=(0.1, 1.0), counts=(1, 1, 1), total=3.0),
        torch_memory=TorchMemorySample(allocated_bytes=1, reserved_bytes=2),
        memory=MemoryGrowth(dict.fromkeys(MEMORY_PARTS, 1.0), "workers", 1.0, 60.0, "memory", True),
        attempt=AttemptView(
            1, 1, dict.fromkeys(("redone", "restore", "replay", "startup", "stuck", "down"), 1.0)
        ),
        step_change_ratio=1.0,
    )  # fmt: skip
    view = dataclasses.replace(view, energy=EnergyView(view.gpu, dict.fromkeys(CATEGORIES, 9.5)))
    left_out = {
        f"{type(part).__name__}.{spec.name}"
        for part in (view, *(getattr(view, spec.name) for spec in dataclasses.fields(view)))
        if dataclasses.is_dataclass(part)
        for spec in dataclasses.fields(part)
        if getattr(part, spec.name) is None
    }
    assert not left_out, "full_view() does not fill these"
    return view
