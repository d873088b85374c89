"""The metrics: what a scrape shows of them, that absent is what was not measured, and docs/METRICS.md."""

import dataclasses
import gzip
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from telemetry.model.records import EnergyView
from telemetry.node import prometheus
from telemetry.node.board import RankHead, RankState
from telemetry.node.metrics import COLLECTOR, GROUPS, metrics
from telemetry.node.prometheus import Exposition, numbers_of
from telemetry.safety.errors import ErrorLog
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sources.polling import CollectorPoller
from tests.full_views import full_view, page

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
    training_samples_total training_tokens_total training_gpu_energy_joules_total training_compute_seconds_total
    """.split()
)
"""The names that dashboards and alerts rely on."""


UNITS = set("seconds bytes ratio watts celsius hertz cores steps samples tokens joules".split())


METRICS = [metric for _, metric in metrics()]


def changed(view=None, **parts):
    return dataclasses.replace(view or full_view(), **parts)


def shown(*views, **more):
    """``{name: [sample]}`` of what a scrape gets."""
    found = {}
    for family in text_string_to_metric_families(page(*views, **more)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in found, "each family is there once"
        found[name] = family.samples
    return found


def value(view, name):
    (sample,) = shown(view)[name]
    return sample.value


# -- the exposition ------------------------------------------------------------------------------------------------


def test_each_metric_is_shown_with_its_type_and_labels():
    found = {}
    for family in text_string_to_metric_families(page(full_view())):
        labels = set().union(*(sample.labels for sample in family.samples))
        assert {(s.labels["run"], s.labels.get("rank", "7")) for s in family.samples} == {("a run", "7")}
        found[f"{family.name}_total" if family.type == "counter" else family.name] = (family.type, labels - {"run"})
    of_machine = {name for name, (_, labels) in found.items() if "rank" not in labels}

    assert found == {
        metric.name: (
            metric.type,
            {*group.labels, "node" if group.of_node else "rank"}
            | ({metric.label.name} if metric.label else set())
            | ({"le"} if metric.type == "histogram" else set()),
        )
        for group, metric in metrics()
    }
    assert found.keys() >= CONTRACT
    assert of_machine == {name for name in found if name.startswith(("training_host_", "training_cgroup_"))}


def test_ranks_of_a_node_share_families_and_the_machine_is_shown_once():
    found = shown(full_view(), full_view(), full_view(), first=0)
    assert {sample.labels["rank"] for sample in found["training_steps_total"]} == {"0", "1", "2"}
    assert [sample.labels for sample in found["training_host_cpu_ratio"]] == [{"run": "a run", "node": "n1"}]


def test_each_gpu_of_a_rank_has_its_samples():
    first = full_view()
    second = dataclasses.replace(first.gpu, index=1, uuid="GPU-2", power_watts=None)
    found = shown(changed(first, other_gpus=((second, EnergyView(second, {"compute": 7.0})), (None, None))))
    place = {(s.labels["gpu"], s.labels["uuid"]) for s in found["training_gpu_utilization_ratio"]}
    assert place == {("0", "GPU-1"), ("1", "GPU-2")}
    assert len(found["training_gpu_power_watts"]) == len(found["training_steps_total"]) == 1
    energy = found["training_gpu_energy_joules_total"]
    assert {s.labels["gpu"]: s.value for s in energy if s.labels["category"] == "compute"} == {"0": 9.5, "1": 7.0}


class Ranks:
    """Stands in for a board. Counts how often it is read."""

    read = 0

    def states(self):
        self.read += 1
        return [RankState(RankHead(rank=self.read, pid=1, ticks=1), numbers_of(full_view()))]


def test_a_page_is_rendered_at_most_once_a_second_in_each_form(monkeypatch):
    now, second = [10**9], prometheus._KEPT_NS
    monkeypatch.setattr(prometheus, "now_ns", lambda: now[0])
    exposition = Exposition(ranks := Ranks(), "a run", "n1")

    def rank_shown(accept="", encoding=""):
        body = exposition.page(accept, encoding).body
        return int(re.search(r'rank="(\d+)"', (gzip.decompress(body) if encoding else body).decode())[1])

    assert [rank_shown(), rank_shown(), rank_shown(encoding="gzip"), rank_shown("application/openmetrics-text")] == [
        1,
        1,
        2,
        3,
    ]
    now[0] += second - 1
    assert [rank_shown(), rank_shown(encoding="gzip")] == [1, 2]
    now[0] += 1
    assert [rank_shown(), rank_shown(), rank_shown(encoding="gzip")] == [4, 4, 5]
    exposition.keep()  # the board may go: what it has now is shown from here on
    assert [rank_shown(), rank_shown(encoding="gzip")] == [6, 6]
    now[0] += second
    assert (rank_shown(), ranks.read) == (6, 6)


@pytest.mark.parametrize(("sample_ms", "turns"), [(0.05, 0.5), (10, 0.0)])
def test_the_training_gets_its_turn_while_a_page_is_rendered(sample_ms, turns, monkeypatch):
    """After each 0.1 ms. But a page that takes longer than a second is not delayed more by that."""
    now, given = itertools.count(step=int(sample_ms * 1e6)), []
    monkeypatch.setattr(prometheus, "now_ns", lambda: next(now))
    monkeypatch.setattr(prometheus, "let_others_run", lambda: given.append(True))
    samples = sum(not line.startswith("#") for line in page(full_view(), full_view()).splitlines())
    assert samples * turns <= len(given) <= max(samples * turns * 1.1, 50)


def test_values_are_exact():
    view = full_view()
    totals = dataclasses.replace(view.totals, steps=12_345_678_901)
    view = changed(view, totals=totals, last_step_unix_seconds=1.7e9 + 1e-6)
    assert value(view, "training_steps_total") == 12_345_678_901
    assert value(view, "training_last_step_timestamp_seconds") == 1.7e9 + 1e-6
    buckets = shown(view)["training_loader_fetch_duration_seconds"]  # two fetches in the first, one in each other
    assert [(s.labels.get("le"), s.value) for s in buckets] == [
        ("0.1", 2), ("1.0", 3), ("+Inf", 4), (None, 4), (None, 3.1),
    ]  # fmt: skip


def test_openmetrics_has_units_and_the_time_since_when_a_counter_counts():
    families = {family.name: family for family in openmetrics_families(page(full_view(), openmetrics=True))}
    text = {family.name for family in text_string_to_metric_families(page(full_view()))}
    assert families.keys() == text

    units = {name: family.unit for name, family in families.items() if family.unit}
    assert units["training_time_seconds"] == "seconds"
    assert "training_memory_growth_bytes_per_second" not in units, "a unit is the end of the name"
    created = {
        name: {s.value for s in family.samples if s.name.endswith("_created")} for name, family in families.items()
    }
    created = {name: values for name, values in created.items() if values}
    assert set.union(*created.values()) == {1.6e9}
    assert {"training_steps", "training_step_duration_seconds"} <= created.keys()
    assert not created.keys() & {"training_samples", "training_process_cpu_seconds", "training_stalls"}


@pytest.mark.parametrize("text", ['a "run"', "back\\slash", "two\nlines", "é€", "\udce9"])
def test_label_values_are_escaped(text):
    view = full_view()
    view = changed(
        view,
        info=view.info | {"job": text},
        hang=dataclasses.replace(view.hang, suspects=(structs.replace(view.hang.suspect, where=text),)),
    )
    expected = text.encode("utf-8", "replace").decode()
    found = shown(view)
    assert found["training_run_info"][0].labels["job"] == expected
    assert found["training_hang_place_info"][0].labels["place"] == expected


def test_what_was_not_measured_is_absent():
    view = full_view()
    gone = {spec.name: None for spec in dataclasses.fields(view) if spec.default is None}
    totals = dataclasses.replace(view.totals, exposed_wait_seconds=None)
    names = shown(changed(view, **gone, totals=totals, collectors=(), last_step_unix_seconds=None)).keys()

    assert "training_steps_total" in names
    pattern = "training_(gpu|cuda|loader|host|process|cgroup|stall|snapshot)"
    assert not {name for name in names if re.match(pattern, name)}
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
    names = {metric.name for group in GROUPS if group.record(view) is sample for metric in group.metrics}

    found = shown(changed(view, **{part: dataclasses.replace(sample, **lacking)})).keys() & names
    assert {name for name in found if not name.endswith("_total") and "head_of_line" not in name} == always


# -- the table and the document ------------------------------------------------------------------------------------


def test_entries_of_the_table_are_complete():
    for metric in METRICS:
        assert metric.help.endswith(".")
        assert "\n" not in metric.help
        assert metric.details == "" or metric.details.endswith(".")
        assert not set("|\n") & {*metric.help, *metric.details, *(metric.absent or "")}, (
            "it breaks the table of the document"
        )
        assert (metric.type == "counter") == metric.name.endswith("_total")
        last = metric.name.removesuffix("_total").removesuffix("_per_second").rpartition("_")[2]
        assert metric.unit in ({last} if last in UNITS else {"", "threads", "processes", "batches", "errors"})


def test_label_values_are_those_of_the_table():
    closed = {metric.name: metric.label for metric in METRICS if metric.label is not None and metric.label.values}
    for name, samples in shown(full_view()).items():
        if name in closed:
            label = closed[name]
            assert [sample.labels[label.name] for sample in samples] == list(label.values), name


def test_collectors_are_those_of_the_agent():
    sampler = CollectorPoller(StepTracker(Ring()), 1.0, ErrorLog())
    try:
        assert {health.name for health in sampler.health()} == set(COLLECTOR.values) - {"amdsmi"}  # without ROCm
    finally:
        sampler.close()


@pytest.mark.stack
def test_promtool_has_nothing_to_say():
    promtool = shutil.which("promtool")
    if promtool is None:
        missing = pytest.fail if os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1" else pytest.skip
        missing("promtool is not installed (Debian's package prometheus has it)")
    check = subprocess.run(
        [promtool, "check", "metrics"], input=page(full_view()), capture_output=True, text=True, timeout=30
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
