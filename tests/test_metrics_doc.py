"""The table of metrics: what is rendered of it, and docs/METRICS.md, which is made from it."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.agent.totals import CollectorPoller
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.publish.endpoint import join
from telemetry.publish.exposition import Exposition
from telemetry.publish.metrics.agent_metrics import COLLECTOR
from telemetry.publish.metrics.table import SECTIONS
from telemetry.util.errors import ErrorLog
from tests.full_views import all_families, full_view

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


@pytest.fixture(scope="module")
def exposition():
    state = SimpleNamespace(families=all_families(Exposition("a run", 7, "n1"), full_view()))
    return join([state]).decode()


@pytest.fixture(scope="module")
def rendered(exposition):
    """``{name: (type, labels without run)}`` of what the endpoint shows."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = set()
        for sample in family.samples:
            assert sample.labels["run"] == "a run"
            assert sample.labels.get("rank", "7") == "7"
            labels |= sample.labels.keys() - {"run"}
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
            {*group.labels, "node" if group.of_node else "rank"}
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


def test_contract(rendered):
    of_machine = {name for name, (_, labels) in rendered.items() if "rank" not in labels}
    assert of_machine == {name for name in rendered if name.startswith(("training_host_", "training_cgroup_"))}
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
