"""The figures and the advice of traces: small ones by hand, any one by its sums, real ones against other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.trace.reader import read_trace
from telemetry.trace.steps import difference, intersection, length, split, union, within
from tests.trace_files import kernel, launch, step, write, x

TRACES = Path(__file__).parent / "traces"
RIVALS = json.loads((TRACES / "rivals.json").read_text())
REAL = sorted(name for name in RIVALS if name.endswith(".gz"))
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


def test_fractions_of_a_microsecond_are_rounded_as_hta_does(tmp_path):
    """Starts up, ends down: 10.2-20.9 is 11-20, 30.5-30.9 is 31-30 and counts negative."""
    events = [launch(0, 1), kernel(10.2, 10.7, 1), launch(1, 2), kernel(30.5, 0.4, 2), launch(2, 3), kernel(40.0, 5, 3)]
    temporal = read_trace(write(tmp_path, events)).temporal
    assert temporal.compute_ratio == pytest.approx((9 - 1 + 5) / (45 - 11))
    assert temporal.idle_ratio == pytest.approx(1 - (9 - 1 + 5) / (45 - 11))


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


# -- advice


def test_advice_on_synchronisations_layouts_and_unused_memory(tmp_path):
    """Ten steps of 1 ms; in each an .item() after which the GPU idles for 300 us."""
    events = []
    for i in range(10):
        at, c = 1000 * i, 10 * i
        events += [
            step(i, at, 1000),
            x("cpu_op", "aten::cudnn_convolution", at, 20, external=c + 1),
            launch(at + 5, c + 1, external=c + 1),
            kernel(at + 10, 300, c + 1, external=c + 1, name="cudnn::nchwToNhwcKernel<half>"),
            launch(at + 12, c + 2, external=c + 1),
            kernel(at + 310, 300, c + 2, external=c + 1, name="sm80_xmma_fprop_implicit_gemm_f16f16_tensor16x8x16"),
            x("cpu_op", "aten::item", at + 30, 600, external=c + 2),
            x("cpu_op", "aten::_local_scalar_dense", at + 31, 598, external=c + 3),
            x("python_function", "train.py(40): step", at + 1, 900),
            launch(at + 40, c + 4, dur=580, name="cudaStreamSynchronize", external=c + 3),
            launch(at + 908, c + 3),
            kernel(at + 910, 90, c + 3, name="elementwise"),
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "tid": 1, "pid": 1,
             "args": {"Device Type": 1, "Device Id": 0, "Total Reserved": 2_000_000_000 + i, "Total Allocated": 1}},
        ]  # fmt: skip
    properties = [{"id": 0, "name": "NVIDIA A100", "totalGlobalMem": 40_000_000_000, "computeMajor": 8}]
    trace = read_trace(write(tmp_path, events, deviceProperties=properties))
    found = {each.action.split(":")[0].split(" (")[0]: each for each in trace.advice}
    assert set(found) == {"remove a synchronisation", "keep model and batch in channels_last", "use a larger batch"}
    assert found["remove a synchronisation"].share_ratio == pytest.approx(0.3, abs=0.001)
    assert "from aten::_local_scalar_dense at train.py(40): step" in found["remove a synchronisation"].because
    assert found["keep model and batch in channels_last"].share_ratio == pytest.approx(0.3, abs=0.001)
    assert "95 % of the GPU's memory" in found["use a larger batch"].because
    assert trace.peak_memory_bytes == 2_000_000_009
    (wait,) = trace.synchronizations
    assert (wait.operator, wait.within, wait.calls) == ("aten::_local_scalar_dense", "aten::item", 10)
    assert wait.call_site == "train.py(40): step"


def test_waiting_for_a_batch_is_not_blamed_on_a_synchronisation(tmp_path):
    """The GPU idles for 500 us after .item(): 100 us of Python, then 400 us in next()."""
    events = [
        step(1, 0, 1000),
        launch(0, 1), kernel(10, 390, 1),
        launch(20, 2, dur=380, name="cudaStreamSynchronize"),
        x("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 400),
        launch(895, 3), kernel(900, 100, 3),
    ]  # fmt: skip
    loading, waiting = read_trace(write(tmp_path, events)).advice
    assert "num_workers" in loading.action
    assert loading.share_ratio == pytest.approx(0.4, abs=0.003)
    assert "synchronisation" in waiting.action
    assert waiting.share_ratio == pytest.approx(0.1, abs=0.003)


def test_a_launch_bound_stretch(tmp_path):
    """Fifty kernels of 2 us, each launched 8 us after the one before has ended."""
    events = [step(1, 0, 1000)]
    for i in range(50):
        events += [launch(100 + 10 * i, i), kernel(104 + 10 * i, 2, i)]
    trace = read_trace(write(tmp_path, events))
    (stretch,) = trace.launch_bound
    assert (stretch.step, stretch.launches) == (1, 49)
    assert stretch.idle_ratio == pytest.approx(0.8, abs=0.01)
    (advice,) = trace.advice
    assert "torch.compile" in advice.action
    assert advice.share_ratio == pytest.approx(49 * 8 / 1000)
    for event in events:  # the same kernels, launched far ahead: nothing to win
        event["ts"] = 90 if event["cat"] == "cuda_runtime" else event["ts"]
    assert read_trace(write(tmp_path, events)).launch_bound == ()


# -- any trace


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (float(p[0]), float(sum(p)))), max_size=9
)


@settings(deadline=None, max_examples=300)
@given(spans, spans, st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_interval_arithmetic_against_sets_of_moments(one, other, window):
    def moments(intervals):
        return {m for start, end in intervals for m in range(int(start), int(end))}

    a, b = union(one), union(other)
    assert moments(a) == moments(one)
    assert all(x[1] < y[0] for x, y in zip(a, a[1:], strict=False))
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    assert [moments(part) for part in split(a, b)] == [moments(a) & moments(b), moments(a) - moments(b)]
    assert moments(within(a, *map(float, sorted(window)))) == moments(a) & set(range(*sorted(window)))
    assert length(difference(a, b)) == len(moments(a) - moments(b))


rows = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation", "cuda_sync"]),
        st.sampled_from(["k", "nccl:all_reduce", "ncclKernel_X", "enumerate(DataLoader)#x.__next__", "ProfilerStep#1",
                         "ProfilerStep#2", "cudaDeviceSynchronize", "aten::copy_", "Optimizer.zero_grad#SGD.zero_grad"]),
        st.integers(0, 200) | st.floats(0, 200), st.integers(0, 80) | st.floats(0, 80),
        st.integers(-1, 5), st.integers(-1, 3), st.integers(-1, 9),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(rows)
def test_whatever_is_in_a_trace_categories_sum_to_the_step(tmp_path_factory, found):
    events = [
        x(cat, name, ts, dur, tid, correlation=correlation, stream=stream, external=correlation)
        for cat, name, ts, dur, correlation, stream, tid in found
    ]
    path = write(tmp_path_factory.getbasetemp(), events)
    try:
        trace = read_trace(path)
    except Exception as error:
        assert type(error).__name__ == "NoTraceError"  # nothing in it lasts
        return
    for each in trace.steps:
        assert sum(each.categories.values()) == pytest.approx(each.seconds, abs=1e-9)
        assert min(each.categories.values()) >= -1e-12
    assert sum(trace.average.categories.values()) == pytest.approx(1)
    assert all(0 <= a.share_ratio <= 1 + 1e-9 for a in trace.advice)


# -- real traces


@pytest.fixture(scope="module", params=REAL)
def real(request):
    return read_trace(TRACES / request.param), RIVALS[request.param]


def test_the_breakdown_is_that_of_tensorboard(real):
    trace, rivals = real
    theirs = rivals["torch-tb-profiler 0.4.3"]
    assert trace.average.seconds == pytest.approx(theirs["seconds"], rel=1e-6)
    if theirs["categories"]:
        ours = {name: 100 * ratio for name, ratio in trace.average.categories.items()}
        assert ours == pytest.approx(theirs["categories"], abs=0.05)
    for name, percent in theirs["gpu"].items():
        assert 100 * getattr(trace.gpu, f"{name}_ratio") == pytest.approx(percent, abs=0.05)


def test_the_streams_are_those_of_holistic_trace_analysis(real):
    trace, rivals = real
    theirs = rivals["HolisticTraceAnalysis 0.5.0"]
    for name, percent in theirs["temporal"].items():
        assert getattr(trace.temporal, f"{name}_ratio") == pytest.approx(percent / 100, abs=1e-4)
    overlap = theirs["overlap"]
    assert trace.overlap_ratio == (None if overlap is None else pytest.approx(overlap / 100, abs=1e-4))
    assert {str(each.stream) for each in trace.idle} == set(theirs["idle"])
    for each in trace.idle:
        ratios = (each.host_wait_ratio, each.kernel_wait_ratio, each.other_ratio)
        shares = theirs["idle"][str(each.stream)]
        assert ratios == ((None,) * 3 if shares is None else pytest.approx([s / 100 for s in shares], abs=0.0051))
