"""What a trace advises to change, and the share of the step that it wins."""

from __future__ import annotations

import pytest

from telemetry.trace.reader import read_trace
from tests.trace_files import kernel, launch, step, write, x


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
