"""The text of the metrics, against prometheus_client's: numbers, labels, what is absent."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from telemetry.publish.exposition import Exposition
from telemetry.publish.metrics.table import SECTIONS
from tests.full_views import all_families, full_view


def one(view, name):
    """The rendered family of a metric; None where it is absent."""
    header = f"# HELP {name} ".encode()
    found = [family for family in all_families(Exposition("a run", 7, "n1"), view) if family.header.startswith(header)]
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
    rendered = b"".join(
        part for family in all_families(Exposition(text, 7, text), full_view()) for part in family
    ).decode()
    labels = [s.labels for family in text_string_to_metric_families(rendered) for s in family.samples]

    expected = text.encode("utf-8", "replace").decode()
    assert {each["run"] for each in labels} == {expected}
    assert {each["node"] for each in labels if "rank" not in each} == {expected}


def test_a_family_is_rendered_anew_only_when_its_reading_changes():
    exposition, view = Exposition("a run", 7, "n1"), full_view()
    before = {family.header: family for family in all_families(exposition, view)}
    view.stalls.opened["checkpoint"] += 1  # in place: its owner keeps counting
    totals = dataclasses.replace(view.totals, steps=4)
    gpu = dataclasses.replace(view.gpu, uuid="GPU-2")
    view = dataclasses.replace(view, totals=totals, gpu=gpu, energy_gpu=gpu)
    after = {family.header: family for family in all_families(exposition, view)}

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
    names = {family.header.split()[2].decode() for family in all_families(Exposition("a run", 7, "n1"), bare)}

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

    shown = {family.header.split()[2].decode() for family in all_families(Exposition("a run", 7, "n1"), bare)} & names
    assert {name for name in shown if not name.endswith("_total") and "head_of_line" not in name} == always
