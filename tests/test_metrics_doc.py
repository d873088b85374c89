"""docs/METRICS.md against what is rendered: names, types, labels and label values."""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry import records
from telemetry.attach.ring import Ring
from telemetry.attach.steps import StepTracker
from telemetry.config import STEP_BUCKETS
from telemetry.faults import Faults
from telemetry.publish.endpoint import join
from telemetry.publish.exposition import Families, Renderer
from telemetry.sampling import Sampler

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "METRICS.md"

COLLECTORS = ("nvml", "host", "process", "workers", "pressure", "torch_memory")

CONTRACT = set(
    """
    training_steps_total training_step_duration_seconds training_time_seconds_total
    training_exposed_wait_seconds_total training_last_step_timestamp_seconds training_run_ended training_run_info
    training_stall_active training_stalls_total training_snapshots_total
    training_gpu_utilization_ratio training_gpu_sm_active_ratio training_gpu_sm_occupancy_ratio
    training_gpu_tensor_active_ratio training_gpu_memory_bandwidth_ratio
    training_gpu_memory_used_bytes training_gpu_memory_total_bytes
    training_gpu_power_watts training_gpu_temperature_celsius training_gpu_sm_clock_hertz training_gpu_throttled
    training_cuda_memory_allocated_bytes training_cuda_memory_reserved_bytes
    training_process_cpu_seconds_total training_process_resident_memory_bytes training_process_threads
    training_host_cpu_ratio training_host_memory_used_bytes training_host_memory_total_bytes
    training_host_pressure_ratio
    training_loader_workers training_loader_ready_batches training_loader_worker_busy_ratio
    training_loader_worker_cpu_ratio training_loader_worker_blocked_ratio training_loader_worker_runnable_ratio
    training_loader_fetch_duration_seconds training_loader_slack_seconds training_loader_workers_memory_bytes
    telemetry_overhead_seconds_total telemetry_collector_up telemetry_collector_duration_seconds
    telemetry_errors_total telemetry_dropped_steps_total
    """.split()
)
"""The names that dashboards and alerts rely on."""

NOT_YET: set[str] = set()
"""Those of the contract that come with what measures them. Whoever adds one takes it out here."""

UNITS = {
    "_seconds": "seconds",
    "_seconds_total": "seconds",
    "_bytes": "bytes",
    "_ratio": "ratio",
    "_watts": "watts",
    "_celsius": "celsius",
    "_hertz": "hertz",
    "_cores": "cores",
    "_steps_total": "steps",
}


def full_view():
    """A view in which everything was measured."""
    view = records.RunView(
        info=dict.fromkeys(
            ("node", "local_rank", "world_size", "launcher", "telemetry_version", "python_version", "torch_version"), "x"
        ),
        ended=False,
        steps=3,
        step_duration=records.Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        wait_duration=records.Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        ledger_seconds=dict.fromkeys(records.CATEGORIES, 1.5),
        exposed_wait_seconds=0.5,
        last_step_unix_seconds=1.7e9,
        optimizer_steps=3,
        overhead_seconds={"training": 1e-6, "agent": 1e-3},
        dropped_steps=1,
        errors={"nvml": 1},
        stalls=records.StallView("checkpoint", dict.fromkeys(records.CAUSES, 0), dict.fromkeys(records.CAUSES, 0.0), 1),
        snapshots=records.SnapshotsView(dict.fromkeys(records.SNAPSHOT_RESULTS, 1), "slower"),
        collectors=tuple(records.SourceHealth(name, True, 0.001, "why") for name in COLLECTORS),
        gpu=records.GpuSample(
            index=0, uuid="GPU-1", name="a GPU", utilization_ratio=0.5, sm_active_ratio=0.5, sm_active_source="gpm",
            sm_occupancy_ratio=0.5, tensor_active_ratio=0.5, memory_bandwidth_ratio=0.5, memory_used_bytes=1,
            memory_total_bytes=2, power_watts=300.0, temperature_celsius=40.0, sm_clock_hertz=1e9, sm_clock_max_hertz=2e9,
            throttled=("sw_thermal",),
        ),
        host=records.HostSample(cpu_ratio=0.5, cpu_count=2, memory_used_bytes=1, memory_total_bytes=2),
        process=records.ProcessSample(cpu_seconds=1.0, resident_memory_bytes=1, threads=3, runnable_seconds=0.1),
        workers=records.WorkersSample(
            workers=2, training_workers=2, resident_memory_bytes=1, ready_batches=4, fetching_seconds=0.0, fetches_total=3,
            fetch_duration=records.Histogram(bounds=(0.1, 1.0), counts=(1, 1, 1), total=3.0), cpu_ratio=0.5,
            busy_ratio=0.5, runnable_ratio=0.1, blocked_ratio=0.1, read_bytes_per_second=1.0,
            slack_seconds=0.1, head_of_line_batches=2, head_of_line_worker=0, head_of_line_since_seconds=0.1,
            allowed_cores=2, packing_ratio=0.1, written_bytes_per_second=1.0,
        ),
        pressure=records.PressureSample(
            pressure_ratio={"cpu": 0.1, "io": 0.1, "memory": 0.1}, cgroup_cpu_limit=2.0, cgroup_cpu_used=1.5,
            cgroup_throttled_ratio=0.1,
            cgroup_memory_limit_bytes=2, cgroup_memory_used_bytes=1,
        ),
        own_fetches=records.Histogram(bounds=(0.1, 1.0), counts=(1, 0, 0), total=0.1),
        worker_fetches=records.Histogram(bounds=(0.1, 1.0), counts=(1, 1, 1), total=3.0),
        torch_memory=records.TorchMemorySample(allocated_bytes=1, reserved_bytes=2),
    )  # fmt: skip
    left_out = {
        f"{type(part).__name__}.{spec.name}"
        for part in (view, *(getattr(view, spec.name) for spec in dataclasses.fields(view)))
        if dataclasses.is_dataclass(part)
        for spec in dataclasses.fields(part)
        if getattr(part, spec.name) is None
    }
    assert not left_out, "full_view() does not fill these"
    return view


@pytest.fixture(scope="module")
def exposition():
    state = SimpleNamespace(families=[Renderer().render(family) for family in Families("a run", 7).of(full_view())])
    return join([state]).decode()


@pytest.fixture(scope="module")
def rendered(exposition):
    """``{name: (type, labels besides run and rank)}`` of what the endpoint shows."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = set()
        for sample in family.samples:
            assert sample.labels["run"] == "a run"
            assert sample.labels["rank"] == "7"
            labels |= sample.labels.keys() - {"run", "rank"}
        assert name not in found
        found[name] = (family.type, labels)
    return found


@pytest.fixture(scope="module")
def rows():
    """The rows of the document's tables of metrics."""
    rows = []
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 6 and cells[0].startswith("`"):
            name, kind, unit, labels, meaning, absent = cells
            rows.append(SimpleNamespace(
                name=name.strip("`"), type=kind, unit=unit, labels=set(re.findall(r"`(\w+)`", labels)),
                meaning=meaning, absent=absent,
            ))  # fmt: skip
    return rows


def test_document_has_what_is_rendered_and_nothing_else(rows, rendered):
    assert sorted(row.name for row in rows) == sorted(rendered)
    assert {row.name: (row.type, row.labels) for row in rows} == rendered


def test_rows_are_complete_and_units_stand_in_the_names(rows):
    for row in rows:
        assert row.meaning.endswith("."), row.name
        assert row.absent, row.name
        suffixes = [suffix for suffix in UNITS if row.name.endswith(suffix)]
        if suffixes:
            assert row.unit == UNITS[max(suffixes, key=len)], row.name
        else:
            assert row.unit in {"", "threads", "processes", "batches", "errors"}, row.name


def test_contract(rendered):
    assert NOT_YET < CONTRACT
    assert rendered.keys() >= CONTRACT - NOT_YET
    assert not rendered.keys() & NOT_YET, "it is there now: take it out of NOT_YET"


def test_label_values_of_the_document():
    table = dict(re.findall(r"^\| `(\w+)` \| (`[^|]*`) \|$", DOCUMENT.read_text(), re.MULTILINE))
    documented = {label: re.findall(r"`(\w+)`", values) for label, values in table.items()}

    assert documented == {
        "category": list(records.CATEGORIES),
        "reason": list(records.THROTTLE_REASONS),
        "resource": ["cpu", "io", "memory"],
        "collector": list(COLLECTORS),
        "thread": ["training", "agent"],
        "result": list(records.SNAPSHOT_RESULTS),
    }


def test_collectors_are_those_of_the_agent():
    sampler = Sampler(StepTracker(Ring()), 1.0, Faults())
    try:
        assert {health.name for health in sampler.health()} == set(COLLECTORS)
    finally:
        sampler.close()


@pytest.mark.stack
def test_promtool_has_nothing_to_say(exposition):
    promtool = shutil.which("promtool")
    if promtool is None:
        missing = pytest.fail if os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1" else pytest.skip
        missing("promtool is not installed (Debian's package prometheus has it)")
    check = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, text=True, timeout=30)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
