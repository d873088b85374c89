"""The figures of small traces, computed by hand."""

from __future__ import annotations

import json

import pytest

from telemetry.trace.reader import read_trace
from tests.trace_files import kernel, launch, step, write, x

CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]


def test_every_microsecond_is_in_the_first_category_that_covers_it(tmp_path):
    """One step of 100 us: each category is given 20 us or what is named, the next starts 10 us earlier."""
    events = [
        step(4, 0, 100),
        launch(0, 1, dur=1),
        kernel(0, 10, 1),
        kernel(5, 10, 1, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)", bytes=1000),  # 5 of its own
        kernel(10, 10, 1, cat="gpu_memset", name="Memset (Device)"),  # 5
        kernel(15, 15, 1, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"),  # 10
        x("cuda_runtime", "cudaEventQuery", 25, 10),  # 5
        x("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 30, 25),  # 20
        x("cpu_op", "aten::add", 50, 20),  # 15
        x("user_annotation", "my own mark", 60, 30),  # none: Other
        x("python_function", "train.py(3): main", 0, 100),
    ]
    trace = read_trace(write(tmp_path, events))
    (only,) = trace.steps
    assert only.step == 4
    assert only.seconds == pytest.approx(100e-6)
    assert list(only.categories) == CATEGORIES
    expected = [10, 5, 5, 10, 5, 20, 15, 30]
    assert [1e6 * s for s in only.categories.values()] == pytest.approx(expected)
    assert [100 * s for s in trace.average.categories.values()] == pytest.approx(expected)
    assert trace.gpu.utilization_ratio == pytest.approx(0.25)  # any kernel: 0-10 and 15-30
    assert trace.gpu.sm_efficiency_ratio is None
    assert trace.gpu.occupancy_ratio is None


def test_a_step_lasts_until_its_kernels_have_ended(tmp_path):
    """tensorboard: the step ends with its last kernel, the next begins there; the first after earlier work."""
    events = [
        kernel(90, 15, 77),  # launched before the first step
        *(step(i, 100 * i, 100) for i in (1, 2, 3)),
        launch(110, 1),
        kernel(130, 100, 1),  # until 230
        launch(210, 2),
        launch(215, 3),
        kernel(230, 10, 2),
        kernel(240, 5, 3),
        launch(298, 4, dur=9),  # reaches beyond its step: belongs to none
        kernel(310, 500, 4),
    ]
    trace = read_trace(write(tmp_path, events))
    assert [(s.step, round(1e6 * s.seconds)) for s in trace.steps] == [(1, 125), (2, 70)]
    assert trace.notes == ("the last 1 step(s) are left out: the trace ends before their kernels do",)


def test_a_torn_last_step_is_left_out(tmp_path):
    events = [step(1, 0, 100), step(2, 100, 100)]
    for i in range(10):
        events += [launch(i * 10, i), kernel(i * 10 + 1, 1, i)]
    for i in range(7):  # fewer than 80 % of 10
        events += [launch(100 + i * 10, 50 + i), kernel(101 + i * 10, 1, 50 + i)]
    assert len(read_trace(write(tmp_path, events)).steps) == 1
    events += [launch(190, 90), kernel(191, 1, 90)]
    assert len(read_trace(write(tmp_path, events)).steps) == 2


def test_idle_time_by_reason(tmp_path):
    """Stream 7: gaps of 20 (launched after the device ran dry), 10 and 70 (launched before)."""
    events = [launch(0, 1), kernel(10, 10, 1)]  # until 20
    events += [launch(25, 2), kernel(40, 10, 2)]  # host wait 20
    events += [launch(28, 3), kernel(60, 10, 3)]  # kernel wait 10
    events += [launch(30, 4), kernel(140, 10, 4)]  # other 70
    events += [launch(140, 5), kernel(20, 100, 5, stream=9, name="ncclKernel_AllReduce")]
    trace = read_trace(write(tmp_path, events))
    seven, nine = trace.idle
    assert (seven.stream, nine.stream) == (7, 9)
    assert (seven.host_wait_ratio, seven.kernel_wait_ratio, seven.other_ratio) == pytest.approx((0.2, 0.1, 0.7))
    assert nine.host_wait_ratio is None
    # First 10, last 150; covered 10-120 and 140-150; compute 40; NCCL 20-120, of it 20 beside compute.
    assert trace.temporal.idle_ratio == pytest.approx(20 / 140)
    assert trace.temporal.compute_ratio == pytest.approx(40 / 140)
    assert trace.temporal.non_compute_ratio == pytest.approx(80 / 140)
    assert trace.overlap_ratio == pytest.approx(0.2)
    assert trace.notes == ("no step is marked (ProfilerStep#…): all of the trace is taken as one step",)


def test_fractions_of_a_microsecond_are_rounded_as_hta_does(tmp_path):
    """Starts up, ends down: 10.2-20.9 is 11-20, 30.5-30.9 is 31-30 and counts negative."""
    events = [launch(0, 1), kernel(10.2, 10.7, 1), launch(1, 2), kernel(30.5, 0.4, 2), launch(2, 3), kernel(40.0, 5, 3)]
    temporal = read_trace(write(tmp_path, events)).temporal
    assert temporal.compute_ratio == pytest.approx((9 - 1 + 5) / (45 - 11))
    assert temporal.idle_ratio == pytest.approx(1 - (9 - 1 + 5) / (45 - 11))


def test_sm_efficiency_and_occupancy(tmp_path):
    events = [
        step(1, 0, 100),
        launch(0, 1, dur=1),
        kernel(0, 40, 1, blocks=0.25, occupancy=10),
        kernel(20, 40, 1, stream=8, blocks=2.0, occupancy=50),
    ]
    gpu = read_trace(write(tmp_path, events)).gpu
    assert gpu.utilization_ratio == pytest.approx(0.6)
    assert gpu.sm_efficiency_ratio == pytest.approx((20 * 0.25 + 40) / 100)
    assert gpu.occupancy_ratio == pytest.approx((40 * 0.10 + 40 * 0.50) / 80)


def test_old_names_and_new_names_give_the_same(tmp_path):
    """Categories, field names, threads as text, and times with a base of the epoch or of none."""
    new = [
        step(1, 0, 50), step(2, 50, 50),
        x("cpu_op", "aten::mm", 0, 9, external=5), launch(1, 1, external=5), kernel(10, 20, 1, external=5, blocks=1.5),
        launch(51, 2), kernel(60, 20, 2),
    ]  # fmt: skip
    renamed = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    old = []
    for event in json.loads(json.dumps(new)):
        event["cat"] = renamed[event["cat"]]
        event["ts"] += 1623142623460111
        event["tid"] = str(event["tid"])
        if "External id" in event["args"] and event["cat"] != "Operator":
            event["args"]["external id"] = event["args"].pop("External id")
        old.append(event)
    one, other = (read_trace(write(tmp_path, each, displayTimeUnit="ns")) for each in (new, old))
    assert one.steps == other.steps
    assert one.operators == other.operators
    assert one.operators[0].device_seconds == pytest.approx(20e-6)
    assert (one.temporal, one.idle, one.gpu) == (other.temporal, other.idle, other.gpu)


def test_operators_are_found_by_time_where_ids_do_not_match(tmp_path):
    events = [
        x("cpu_op", "aten::linear", 0, 30, external=1),
        x("cpu_op", "aten::addmm", 5, 20, external=2),
        launch(10, 901, external=901),
        kernel(50, 7, 901, external=901, name="ampere_sgemm_128x64_nn"),
        launch(10, 902, external=902, tid=2),  # another thread: within no operator
        kernel(60, 3, 902, external=902),
    ]
    trace = read_trace(write(tmp_path, events))
    addmm, linear = trace.operators
    assert (addmm.name, linear.name) == ("aten::addmm", "aten::linear")
    assert addmm.device_seconds == pytest.approx(7e-6)
    assert addmm.device_ratio == pytest.approx(0.7)
    assert linear.host_seconds == pytest.approx(10e-6)
    assert addmm.tensor_core_ratio == 0


def test_amd_without_what_it_does_not_say(tmp_path):
    events = [
        step(1, 0, 100),
        x("cuda_runtime", "hipLaunchKernel", 5, 2, stream="0x0", correlation=3),
        kernel(10, 10, 3, stream=0, name="Cijk_Alik_Bljk_HB", device=2),
        kernel(30, 5, 3, stream=0, cat="gpu_memcpy", name="Memcpy HtoD (Host -> Device)", device=2),
    ]
    trace = read_trace(write(tmp_path, events, deviceProperties=[{"id": 2, "name": "AMD Instinct MI250X"}]))
    assert trace.device == "AMD Instinct MI250X"
    assert trace.gpu.tensor_core_ratio is None
    assert trace.gpu.occupancy_ratio is None
    (copy,) = trace.memcpy
    assert (copy.kind, copy.pageable, copy.bytes, copy.bandwidth_bytes_per_second) == ("HtoD", None, None, None)


def test_events_that_make_no_sense_are_counted_and_passed_over(tmp_path):
    good = [step(1, 0, 100), x("cpu_op", "aten::add", 10, 20)]
    bad = [
        x("cpu_op", "a", "soon", 1), x("cpu_op", "a", 1, -5), x("cpu_op", "a", 1e300, 1), x("cpu_op", 7, 1, 1),
        {"ph": "X", "cat": ["kernel"], "ts": 1, "dur": 1}, {"ph": "X", "cat": "kernel", "dur": 1}, 5, None, "x", [],
        kernel(1, 1, "five"), kernel(1, 1, 2**70), x("cpu_op", "a", None, 1),
    ]  # fmt: skip
    mixed = [event for pair in zip(bad, good * 7, strict=False) for event in pair][: 2 * len(good)] + bad
    trace = read_trace(write(tmp_path, mixed))
    assert [round(1e6 * s) for s in trace.steps[0].categories.values()] == [0, 0, 0, 0, 0, 0, 20, 80]
    assert trace.notes[0].startswith(f"{len(bad) + 2} event(s)")
