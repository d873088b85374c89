"""The table of metrics: what is rendered of it, and docs/METRICS.md, which is made from it."""

import dataclasses
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from telemetry.agent.collector_poller import CollectorPoller
from telemetry.attach.ring import Ring
from telemetry.attach.step_tracker import StepTracker
from telemetry.config import STEP_BUCKETS
from telemetry.core.distribution import Histogram
from telemetry.core.errors import ErrorLog
from telemetry.core.labels import CATEGORIES, CAUSES, SNAPSHOT_RESULTS
from telemetry.core.memory_records import MEMORY_PARTS, MemoryGrowth
from telemetry.core.samples import (
    CollectorHealth,
    GpuSample,
    HostSample,
    PressureSample,
    ProcessSample,
    TorchMemorySample,
)
from telemetry.core.totals import OwnTotals, Totals
from telemetry.core.views import AttemptView, HangView, RunView, SnapshotsView, StallView
from telemetry.core.worker_records import WorkersSample
from telemetry.publish.endpoint import join
from telemetry.publish.exposition import Exposition
from telemetry.publish.metrics.agent_metrics import COLLECTOR
from telemetry.publish.metrics.table import SECTIONS

ROOT = Path(__file__).resolve().parents[1]

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
    training_run_attempt training_run_lost_seconds_total training_step_change_ratio
    training_memory_growth_bytes_per_second training_memory_exhausted_in_seconds
    training_samples_total training_tokens_total training_gpu_energy_joules_total
    """.split()
)
"""The names that dashboards and alerts rely on."""

NOT_YET: set[str] = set()
"""Metrics of the contract that are not measured yet. Remove a name here when you add the metric."""

UNITS = {
    "_seconds": "seconds",
    "_seconds_total": "seconds",
    "_bytes": "bytes",
    "_bytes_per_second": "bytes",
    "_ratio": "ratio",
    "_watts": "watts",
    "_celsius": "celsius",
    "_hertz": "hertz",
    "_cores": "cores",
    "_steps_total": "steps",
    "_samples_total": "samples",
    "_tokens_total": "tokens",
    "_joules_total": "joules",
}


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
        ended=False,
        totals=Totals(
            steps=3, ledger_seconds=dict.fromkeys(CATEGORIES, 1.5), exposed_wait_seconds=0.5, optimizer_steps=3,
            overhead_seconds={"training": 1e-6, "agent": 1e-3}, dropped_steps=1,
            own=OwnTotals(samples=30, in_sync_samples=10), samples=96, tokens=960,
            gpu_energy_joules=dict.fromkeys(CATEGORIES, 9.5),
        ),
        step_duration=Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        wait_duration=Histogram(STEP_BUCKETS, (1,) * (len(STEP_BUCKETS) + 1), 9.0),
        last_step_unix_seconds=1.7e9,
        errors={"nvml": 1},
        hang=HangView("fetch", 3),
        stalls=StallView("checkpoint", dict.fromkeys(CAUSES, 0), dict.fromkeys(CAUSES, 0.0), 1),
        snapshots=SnapshotsView(dict.fromkeys(SNAPSHOT_RESULTS, 1), "slower"),
        collectors=tuple(CollectorHealth(name, True, 0.001, "why") for name in COLLECTOR.values),
        gpu=GpuSample(
            index=0, uuid="GPU-1", name="a GPU", utilization_ratio=0.5, sm_active_ratio=0.5, sm_active_source="gpm",
            sm_occupancy_ratio=0.5, tensor_active_ratio=0.5, memory_bandwidth_ratio=0.5, memory_used_bytes=1,
            memory_total_bytes=2, power_watts=300.0, energy_joules=9e6, temperature_celsius=40.0, sm_clock_hertz=1e9, sm_clock_max_hertz=2e9,
            throttled=("sw_thermal",),
        ),
        gpu_hour_price=2.5,
        host=HostSample(cpu_ratio=0.5, cpu_count=2, memory_used_bytes=1, memory_total_bytes=2),
        process=ProcessSample(cpu_seconds=1.0, resident_memory_bytes=1, threads=3, runnable_seconds=0.1, running_seconds=0.1),
        workers=WorkersSample(
            workers=2, training_workers=2, resident_memory_bytes=1, ready_batches=4, fetching_seconds=0.0, fetches_total=3,
            fetch_duration=Histogram(bounds=(0.1, 1.0), counts=(1, 1, 1), total=3.0), cpu_ratio=0.5,
            busy_ratio=0.5, runnable_ratio=0.1, blocked_ratio=0.1, read_bytes_per_second=1.0,
            slack_seconds=0.1, head_of_line_batches=2, head_of_line_worker=0, head_of_line_since_seconds=0.1,
            allowed_cores=2, pickling_ratio=0.1, written_bytes_per_second=1.0,
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
    view = dataclasses.replace(view, energy_gpu=view.gpu)
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
    state = SimpleNamespace(families=list(Exposition("a run", 7).render(full_view())))
    return join([state]).decode()


@pytest.fixture(scope="module")
def rendered(exposition):
    """``{name: (type, labels without run and rank)}`` of what the endpoint shows."""
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


METRICS = [metric for section in SECTIONS for group in section.groups for metric in group.metrics]


def test_the_document_is_as_generated():
    generate = runpy.run_path(str(ROOT / "docs" / "tools" / "generate_metrics.py"))

    assert (ROOT / "docs" / "METRICS.md").read_text() == generate["text"](), "run make docs-reference"


def test_each_metric_is_rendered_with_its_type_and_labels(rendered):
    table = {
        metric.name: (
            metric.type,
            {*group.labels}
            | ({metric.label.name} if metric.label else set())
            | ({"le"} if metric.type == "histogram" else set()),
        )
        for section in SECTIONS
        for group in section.groups
        for metric in group.metrics
    }

    assert table == rendered


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_entries_of_the_table_are_complete(metric):
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert metric.details == "" or metric.details.endswith(".")
    assert not set("|\n") & {*metric.help, *metric.details, *(metric.absent or "")}, (
        "it breaks the table of the document"
    )
    assert (metric.type == "counter") == metric.name.endswith("_total")
    suffixes = [suffix for suffix in UNITS if metric.name.endswith(suffix)]
    if suffixes:
        assert metric.unit == UNITS[max(suffixes, key=len)]
    else:
        assert metric.unit in {"", "threads", "processes", "batches", "errors", "samples"}


def test_label_values_are_those_of_the_table(exposition):
    closed = {metric.name: metric.label for metric in METRICS if metric.label is not None and metric.label.values}
    for family in text_string_to_metric_families(exposition):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name in closed:
            label = closed[name]
            assert [sample.labels[label.name] for sample in family.samples] == list(label.values), name


# -- the text, against prometheus_client's -------------------------------------------------------------------------------


def one(view, name):
    """The rendered family of a metric; None where it is absent."""
    header = f"# HELP {name} ".encode()
    found = [family for family in Exposition("a run", 7).render(view) if family.header.startswith(header)]
    return found[0] if found else None


def reference(family):
    """What prometheus_client renders of a family, as its parser reads it."""
    registry = SimpleNamespace(collect=lambda: [family])
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def parsed(rendered):
    return list(text_string_to_metric_families(b"".join(rendered).decode()))


def test_a_number_as_prometheus_client_renders_it():
    view = dataclasses.replace(full_view(), last_step_unix_seconds=1.7e9 + 1e-6)
    view = dataclasses.replace(view, totals=dataclasses.replace(view.totals, steps=12_345_678_901))
    steps = CounterMetricFamily("training_steps", "Training steps that have ended.", labels=["run", "rank"])
    steps.add_metric(["a run", "7"], 12_345_678_901)
    (last,) = parsed(one(view, "training_last_step_timestamp_seconds"))

    assert parsed(one(view, "training_steps_total")) == reference(steps)
    assert last.samples[0].value == 1.7e9 + 1e-6


def test_a_histogram_as_prometheus_client_renders_it():
    fetches = HistogramMetricFamily("training_loader_fetch_duration_seconds", "x", labels=["run", "rank"])
    fetches.add_metric(["a run", "7"], [("0.1", 2), ("1.0", 3), ("+Inf", 4)], 3.1)

    (rendered,) = parsed(one(full_view(), "training_loader_fetch_duration_seconds"))
    assert (rendered.type, rendered.samples) == ("histogram", reference(fetches)[0].samples)


@pytest.mark.parametrize("text", ['a "run"', "back\\slash", "two\nlines", "é€", "\udce9"])
def test_label_values_are_escaped_as_by_prometheus_client(text):
    rendered = b"".join(part for family in Exposition(text, 7).render(full_view()) for part in family).decode()
    runs = {s.labels["run"] for family in text_string_to_metric_families(rendered) for s in family.samples}

    assert runs == {text.encode("utf-8", "replace").decode()}


def test_a_family_is_rendered_anew_only_when_its_reading_changes():
    exposition, view = Exposition("a run", 7), full_view()
    before = {family.header: family for family in exposition.render(view)}
    view.stalls.opened["checkpoint"] += 1  # in place: its owner keeps counting
    totals = dataclasses.replace(view.totals, steps=4)
    gpu = dataclasses.replace(view.gpu, uuid="GPU-2")
    view = dataclasses.replace(view, totals=totals, gpu=gpu, energy_gpu=gpu)
    after = {family.header: family for family in exposition.render(view)}

    changed = {header.split()[2].decode() for header in after if after[header] is not before[header]}
    assert changed >= {"training_steps_total", "training_stalls_total", "training_gpu_info", "training_gpu_throttled"}
    assert {name for name in changed if not name.startswith("training_gpu")} == {
        "training_steps_total",
        "training_stalls_total",
    }
    text = b"".join(part for family in after.values() for part in family).decode()
    assert "GPU-1" not in text
    assert 'training_stalls_total{cause="checkpoint",rank="7",run="a run"} 1.0\n' in text


def test_the_energy_counter_stays_while_nvml_is_down():
    view = full_view()
    before, while_down = (
        b"".join(one(each, "training_gpu_energy_joules_total")) for each in (view, dataclasses.replace(view, gpu=None))
    )

    assert b'uuid="GPU-1"' in before
    assert while_down == before
    assert one(dataclasses.replace(view, gpu=None), "training_gpu_power_watts") is None


def test_a_price_is_shown_only_if_there_is_one():
    assert b"} 2.5\n" in b"".join(one(full_view(), "training_gpu_hour_price"))
    assert b"} 0.0\n" in b"".join(one(dataclasses.replace(full_view(), gpu_hour_price=0.0), "training_gpu_hour_price"))
    assert one(dataclasses.replace(full_view(), gpu_hour_price=None), "training_gpu_hour_price") is None


def test_what_was_not_measured_is_absent():
    view = full_view()
    gone = {spec.name: None for spec in dataclasses.fields(view) if spec.default is None}
    totals = dataclasses.replace(view.totals, exposed_wait_seconds=None)
    bare = dataclasses.replace(view, **gone, totals=totals, collectors=(), last_step_unix_seconds=None)
    names = {family.header.split()[2].decode() for family in Exposition("a run", 7).render(bare)}

    assert "training_steps_total" in names
    assert not {
        name for name in names if re.match("training_(gpu|cuda|loader|host|process|cgroup|stall|snapshot)", name)
    }
    assert not names & {"training_exposed_wait_seconds_total", "training_last_step_timestamp_seconds"}


@pytest.mark.parametrize(
    ("part", "always"),
    [
        ("gpu", {"training_gpu_info"}),
        ("host", {"training_host_memory_used_bytes", "training_host_memory_total_bytes"}),
        ("pressure", set()),
        ("workers", {"training_loader_workers", "training_loader_workers_memory_bytes"}),
    ],
)
def test_a_reading_that_a_sample_lacks_is_absent(part, always):
    view = full_view()
    sample = getattr(view, part)
    lacking = {spec.name: None for spec in dataclasses.fields(sample) if "None" in str(spec.type)}
    lacking |= {"pressure_ratio": {}} if part == "pressure" else {}
    bare = dataclasses.replace(view, **{part: dataclasses.replace(sample, **lacking)})
    groups = [g for section in SECTIONS for g in section.groups if g.record(view) is sample]
    names = {metric.name for group in groups for metric in group.metrics}

    shown = {family.header.split()[2].decode() for family in Exposition("a run", 7).render(bare)} & names
    assert {name for name in shown if not name.endswith("_total") and "head_of_line" not in name} == always


# -- what others rely on -------------------------------------------------------------------------------------------------


def test_contract(rendered):
    assert NOT_YET < CONTRACT
    assert rendered.keys() >= CONTRACT - NOT_YET
    assert not rendered.keys() & NOT_YET, "it is there now: take it out of NOT_YET"


def test_collectors_are_those_of_the_agent():
    sampler = CollectorPoller(StepTracker(Ring()), 1.0, ErrorLog())
    try:
        assert {health.name for health in sampler.health()} == set(COLLECTOR.values)
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
