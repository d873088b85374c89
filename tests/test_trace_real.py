"""The figures of real traces, against those of TensorBoard's plugin and Holistic Trace Analysis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telemetry.trace.reader import read_trace

TRACES = Path(__file__).parent / "traces"
RIVALS = json.loads((TRACES / "rivals.json").read_text())
REAL = sorted(name for name in RIVALS if name.endswith(".gz"))
POINT = 0.005


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
    gpu = theirs["gpu"]
    assert 100 * trace.gpu.utilization_ratio == pytest.approx(gpu["utilization"], abs=0.05)
    assert 100 * trace.gpu.sm_efficiency_ratio == pytest.approx(gpu["sm_efficiency"], abs=0.05)
    assert 100 * trace.gpu.occupancy_ratio == pytest.approx(gpu["occupancy"], abs=0.05)
    assert 100 * trace.gpu.tensor_core_ratio == pytest.approx(gpu["tensor_core"], abs=0.05)


def test_the_streams_are_those_of_holistic_trace_analysis(real):
    trace, rivals = real
    theirs = rivals["HolisticTraceAnalysis 0.5.0"]
    temporal = theirs["temporal"]
    assert trace.temporal.idle_ratio == pytest.approx(temporal["idle"] / 100, abs=1e-4)
    assert trace.temporal.compute_ratio == pytest.approx(temporal["compute"] / 100, abs=1e-4)
    assert trace.temporal.non_compute_ratio == pytest.approx(temporal["non_compute"] / 100, abs=1e-4)
    overlap = theirs["overlap"]
    assert trace.overlap_ratio == (None if overlap is None else pytest.approx(overlap / 100, abs=1e-4))
    assert {str(each.stream) for each in trace.idle} == set(theirs["idle"])
    for each in trace.idle:
        ratios = (each.host_wait_ratio, each.kernel_wait_ratio, each.other_ratio)
        shares = theirs["idle"][str(each.stream)]
        assert ratios == ((None,) * 3 if shares is None else pytest.approx([s / 100 for s in shares], abs=0.0051))


def test_communication_is_counted_where_tensorboard_misses_it():
    """It knows a collective's kernel by an external id that newer traces do not give, and no cuda_runtime call."""
    trace = read_trace(TRACES / "nccl_rank0.json.gz")
    assert trace.average.categories["Communication"] == pytest.approx(0.274, abs=0.001)
    assert trace.average.categories["Kernel"] == pytest.approx(0.171, abs=0.001)
    assert trace.average.categories["Runtime"] > 0.004
    assert (trace.rank, trace.world_size, trace.device) == (0, 128, None)


def test_what_to_change_in_the_real_ones():
    loading, fed, nccl = (read_trace(TRACES / name) for name in reversed(REAL))
    loading, fed = (loading, fed) if loading.file.endswith("workers0.json.gz") else (fed, loading)
    first = loading.advice[0]
    assert "num_workers=" in first.action
    assert "62.5 ms of every 180.9 ms" in first.because
    assert first.share_ratio == pytest.approx(loading.average.categories["DataLoader"])
    assert not any("workers" in each.action for each in (*fed.advice, *nccl.advice))
    for trace in (loading, fed):
        actions = " ".join(each.action for each in trace.advice)
        for word in ("autocast", "compile", "set_to_none", "pin_memory", "uint8"):
            assert word in actions
        for word in ("channels_last", "larger batch", "synchronisation"):
            assert word not in actions  # the trace does not show the reason
        assert [a.share_ratio for a in trace.advice] == sorted((a.share_ratio for a in trace.advice), reverse=True)
    assert loading.device == "Tesla V100-DGXS-32GB"
    assert loading.device_memory_bytes == 34084028416
    (copy,) = loading.memcpy
    assert (copy.kind, copy.pageable, copy.calls, copy.bytes) == ("HtoD", True, 6, 57803520)
    (wait,) = loading.synchronizations
    assert (wait.name, wait.operator, wait.within) == ("cudaStreamSynchronize", "aten::copy_", "aten::to")
    assert wait.call_site == "resnet50_profiler_api.py(44): <module>"
    assert [k.name.split("<")[0] for k in loading.layout_conversions] == ["void nchwToNhwcKernel"]
    assert loading.launch_bound
    assert loading.operators[0].name == "aten::cudnn_convolution_backward_weight"
    assert loading.operators[0].tensor_core_eligible
