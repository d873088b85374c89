"""FLOPs and MFU of a trace: by hand, of a real trace, and of a snapshot of our own run against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import telemetry
from telemetry.trace.flops import ATTENTION, peaks_of
from telemetry.trace.reader import read_trace
from tests.data_sets import Numbers
from tests.trace_files import kernel, launch, step, write, x

H100 = "NVIDIA H100 80GB HBM3"
HALF, SINGLE = "c10::Half", "float"


def op(name, ts, dur, dims, kind=SINGLE, values=(), tid=1):
    event = x("cpu_op", name, ts, dur, tid, Input_Dims=dims, Input_type=[kind] * len(dims))
    event["args"]["Concrete Inputs"] = list(values)
    return event


def flops(tmp_path, *events, device=None, steps=1):
    """Of steps of 1 s each."""
    marks = [step(number, number * 1e6, 1e6) for number in range(steps)]
    head = {} if device is None else {"deviceProperties": [{"id": 0, "name": device}]}
    return read_trace(write(tmp_path, [*marks, *events], **head)).flops


def on_gpu(ts, name):
    """A kernel, launched at this time."""
    return [launch(ts, ts), kernel(ts + 5, 10, ts, name=name)]


# -- by hand -------------------------------------------------------------------------------------------------------------

PRODUCTS = [
    ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
    ("aten::addmm", [[7], [3, 5], [5, 7], [], []], 2 * 3 * 5 * 7),
    ("aten::bmm", [[4, 3, 5], [4, 5, 7]], 4 * 2 * 3 * 5 * 7),
    ("aten::baddbmm", [[4, 3, 7], [4, 3, 5], [4, 5, 7], [], []], 4 * 2 * 3 * 5 * 7),
    ("aten::linear", [[2, 3, 5], [7, 5], [7]], 2 * 2 * 3 * 5 * 7),
    ("aten::matmul", [[2, 3, 5], [5, 7]], 2 * 2 * 3 * 5 * 7),
    ("aten::mv", [[3, 5], [5]], 2 * 3 * 5),
    ("aten::dot", [[5], [5]], 2 * 5),
]


def test_a_product_takes_two_operations_for_each_pair(tmp_path):
    for name, dims, expected in PRODUCTS:
        found = flops(tmp_path, op(name, 10, 5, dims), op(name, 20, 5, dims))
        assert (name, found.per_step, found.not_counted) == (name, 2 * expected, ())


def test_flops_are_those_of_a_step_and_not_of_what_is_outside(tmp_path):
    matrices = [[3, 5], [5, 7]]
    inside = [op("aten::mm", 10, 5, matrices), op("aten::mm", 1.5e6, 5, matrices, tid=2)]
    outside = [op("aten::mm", -50, 5, matrices), op("aten::mm", 5e6, 5, matrices)]
    assert flops(tmp_path, *inside, *outside, steps=2).per_step == 2 * 3 * 5 * 7


def test_of_nested_operators_the_one_that_really_ran_counts_once(tmp_path):
    """Under autocast ``aten::linear`` calls itself with other types, and then what does the work."""
    found = flops(
        tmp_path,
        op("aten::linear", 0, 100, [[3, 5], [7, 5], [7]]),
        op("aten::to", 5, 5, [[3, 5]]),
        op("aten::linear", 20, 80, [[3, 5], [7, 5], [7]], HALF),
        op("aten::addmm", 30, 60, [[7], [3, 5], [5, 7], [], []], HALF),
        op("aten::mm", 100, 9, [[3, 5], [5, 7]], HALF),  # begins where the others end: beside them
    )
    assert found.by_format == {"float16": 2 * 2 * 3 * 5 * 7}


CONVOLUTION = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
BATCH, WEIGHT, MADE = [4, 3, 16, 16], [8, 3, 3, 3], [4, 8, 8, 8]
ONE = 2 * (4 * 8 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("mask", "gradients"), [("[True, True, False]", 2), ("[False, True, True]", 1), ("[False, False, True]", 0)]
)
def test_a_convolution_and_the_gradients_that_are_needed(tmp_path, mask, gradients):
    backward = ["", "", "", "[8]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask]
    found = flops(
        tmp_path,
        op("aten::conv2d", 0, 100, [BATCH, WEIGHT, [8]]),
        op("aten::convolution", 1, 90, [BATCH, WEIGHT, [8], *[[]] * 6], values=CONVOLUTION),
        op("aten::convolution_backward", 200, 90, [MADE, BATCH, WEIGHT, *[[]] * 8], values=backward, tid=2),
    )
    assert found.per_step == (1 + gradients) * ONE
    assert found.not_counted == ()


def test_convolutions_that_are_transposed_or_grouped(tmp_path):
    transposed = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"]
    grouped = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "4"]
    up = op("aten::convolution", 0, 5, [[4, 8, 8, 8], [8, 4, 2, 2], [4]], values=transposed)
    assert flops(tmp_path, up).per_step == 2 * (4 * 8 * 8 * 8) * (4 * 2 * 2)  # each input meets each weight of its row
    narrow = op("aten::convolution", 0, 5, [[4, 8, 8, 8], [8, 2, 3, 3], [8]], values=grouped)
    assert flops(tmp_path, narrow).per_step == 2 * (4 * 8 * 8 * 8) * (2 * 3 * 3)


SDPA = "aten::_scaled_dot_product_"


@pytest.mark.parametrize(("causal", "pairs"), [("False", 6 * 6), ("True", 1 + 2 + 3 + 4 + 5 + 6)])
@pytest.mark.parametrize("name", ATTENTION)
def test_fused_attention_by_its_pairs(tmp_path, name, causal, pairs):
    query, place, times = ATTENTION[name]
    dims = [[2, 4, 6, 8] if query <= at < query + 3 else [] for at in range(place + 2)]
    values = [causal if at == place else "" for at in range(place + 2)]
    assert flops(tmp_path, op(SDPA + name, 0, 5, dims, HALF, values)).per_step == times * 2 * (2 * 4) * pairs * (8 + 8)


@pytest.mark.parametrize("name", ATTENTION)
def test_the_arguments_of_attention_are_where_torch_has_them(name):
    if "cudnn" in name and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
        pytest.skip("it has other arguments there, none of them a flag at this place: it is not counted")
    query, place, _ = ATTENTION[name]
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    names = [argument.name for argument in operator._schema.arguments]
    assert names[query : query + 3] == ["query", "key", "value"]
    assert names[place] == "is_causal"


# -- the device's peak ---------------------------------------------------------------------------------------------------


def used(tmp_path, kind, kernel_name, device, *more):
    """A product that takes 989.5e12 operations at the peak of an H100 for a hundredth of the step."""
    product = op("aten::mm", 10, 90, [[1_000_000, 1000], [1000, 4947]], kind)
    return flops(tmp_path, product, *on_gpu(20, kernel_name), *more, device=device)


def test_mfu_is_the_time_at_the_peak_as_a_share_of_the_step(tmp_path):
    found = used(tmp_path, HALF, "nvjet_hsh_128x256", H100)
    assert found.peak_per_second == {"float16": 989.5e12}
    assert found.mfu_ratio == pytest.approx(2e9 * 4947 / 989.5e12, rel=1e-6)
    assert found.absent is None
    single = op("aten::addmm", 200, 90, [[], [1000, 1000], [1000, 67]], SINGLE)
    found = used(tmp_path, HALF, "nvjet", H100, single, *on_gpu(220, "sgemm"))
    assert found.by_format == {"float16": 2e9 * 4947, "float32": 2e6 * 67}
    assert found.peak_per_second == {"float16": 989.5e12, "float32": 494.5e12}  # TF32, whether it is used or not
    assert found.mfu_ratio == pytest.approx(2e9 * 4947 / 989.5e12 + 2e6 * 67 / 494.5e12, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "device", "why"),
    [
        (HALF, "NVIDIA GeForce RTX 4090", "the peak of NVIDIA GeForce RTX 4090 is not in the table"),
        (HALF, f"{H100} MIG 1g.10gb", f"the peak of {H100} MIG 1g.10gb is not in the table"),
        ("c10::BFloat16", "Tesla T4", "the table has no peak of Tesla T4 for bfloat16"),
        ("long int", H100, f"the table has no peak of {H100} for long int"),
        (HALF, None, "the trace does not name the GPU"),
    ],
)
def test_without_a_known_peak_there_is_no_mfu_and_a_reason(tmp_path, kind, device, why):
    found = used(tmp_path, kind, "nvjet", device)
    assert (found.mfu_ratio, found.peak_per_second, found.absent) == (None, None, why)
    assert found.per_step == 2e9 * 4947


def test_more_than_the_peak_and_several_gpus_or_none_have_no_mfu(tmp_path):
    huge = op("aten::mm", 200, 90, [[1_000_000, 1_000_000], [1_000_000, 1_000]], HALF)
    found = used(tmp_path, HALF, "nvjet", H100, huge, *on_gpu(220, "nvjet"))
    assert found.mfu_ratio is None
    assert found.absent == "at the peak the counted operations would take longer than the step did"
    product = op("aten::mm", 10, 90, [[3, 5], [5, 7]], HALF)
    assert flops(tmp_path, product).absent == "no kernel ran on a GPU"
    other = [launch(50, 50), kernel(55, 10, 50, name="nvjet", device=1)]
    assert "several GPUs" in flops(tmp_path, product, *on_gpu(20, "nvjet"), *other, device=H100).absent


def test_devices_are_known_by_the_name_that_cuda_gives():
    for name in (
        "Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe", "NVIDIA A10G", "NVIDIA L4", "NVIDIA L40S", H100, "NVIDIA H200", "NVIDIA B200",
    ):  # fmt: skip
        peaks = peaks_of(name)
        assert peaks["float32"] <= peaks["float16"]
        assert not peaks_of(f"{name} MIG 1g.5gb")


# -- what is not counted ---------------------------------------------------------------------------------------------------


def test_what_could_not_be_counted_is_named(tmp_path):
    product = op("aten::mm", 10, 90, [[3, 5], [5, 7]], HALF)
    varlen = op("flash_attn::_flash_attn_varlen_forward", 200, 90, [[100, 4, 8]] * 3, HALF)
    found = flops(tmp_path, product, varlen, *on_gpu(20, "nvjet"), device=H100)
    assert found.per_step == 2 * 3 * 5 * 7
    assert found.not_counted == ("flash_attn::_flash_attn_varlen_forward",)
    assert "at least: flash_attn::_flash_attn_varlen_forward not counted" in str(found)


def test_without_shapes_nothing_is_known_and_the_setting_is_named(tmp_path):
    bare = x("cpu_op", "aten::mm", 10, 90)
    found = flops(tmp_path, bare, *on_gpu(20, "nvjet"), device=H100)
    assert (found.per_step, found.mfu_ratio, found.by_format) == (None, None, {})
    assert "snapshot_shapes" in found.absent
    assert flops(tmp_path, x("cpu_op", "aten::add", 10, 90)).absent == (
        "no operator in it multiplies matrices, convolves or attends"
    )


@pytest.mark.parametrize(
    "dims",
    [[[3, -5], [5, 7]], [["3", 5], [5, 7]], [[3, 5], [6, 7]], [[3, 5]], "[[3, 5]]", {}, [3, 5], [[], []],
     [[10**400, 1], [1, 1]], [[True, 5], [5, 7]]],
)  # fmt: skip
def test_shapes_that_make_no_sense_are_not_counted(tmp_path, dims):
    event = x("cpu_op", "aten::mm", 10, 90, Input_Dims=dims, Input_type=7)
    assert flops(tmp_path, event).per_step is None


# -- a real trace --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 4, 2, stride=2)
        )
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(self.attention(self.convolutions(images).flatten(2).transpose(1, 2))).sum()


def test_a_snapshot_with_shapes_has_the_flops_that_torch_counts(tmp_path, capfd):
    torch.manual_seed(0)
    net, images = Net(), torch.randn(2, 1, 16, 16)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        net(images).backward()
    agent = telemetry.start(tmp_path / "run", port="off", interval_seconds=0.1, start_line=False, snapshot_shapes=True)
    for number, _ in enumerate(DataLoader(Numbers(100_000)), 1):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            net(images).backward()
        if number == 10:
            assert telemetry.request_snapshot(steps=2)
        if sum(agent.snapshots.counts.values()):
            break
    telemetry.stop()
    (path,) = (tmp_path / "run" / "snapshots").glob("request-*/*.json.gz")
    found = read_trace(path).flops
    assert found.per_step == counter.get_total_flops()
    assert found.absent == "no kernel ran on a GPU"
    assert capfd.readouterr().err == ""
