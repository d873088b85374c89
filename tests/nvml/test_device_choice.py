"""Which device the NVML source reads: the one that torch uses, or a MIG device of it."""

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu, Process

from tests.nvml.nvml_harness import (
    AB,
    M1,
    M2,
    A,
    B,
    nvml_threads,
    outcome,
    partitioned,
    read_one,
    reason,
    sample,
    source,
    until,
)

# --- which device


def several():
    return [Gpu(uuid=A), Gpu(uuid=B, utilization=11), Gpu(uuid=AB, utilization=22)]


@pytest.mark.parametrize("uuid", [B, B.removeprefix("GPU-")])
def test_the_device_that_torch_names(state, uuid):
    state.gpus = several()
    reading = read_one(state, uuid=uuid, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert (reading.index, reading.uuid, reading.utilization_ratio) == (1, B, 0.11)


def test_a_uuid_that_nvml_does_not_know(state):
    with source(state, uuid="ffffffff") as made:
        reason(made, "NVML knows no device with the UUID ffffffff")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": B}, B),
        ({"CUDA_VISIBLE_DEVICES": B[:8]}, B),
        ({"CUDA_VISIBLE_DEVICES": B[:6]}, B),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaaa"}, A),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, B),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, B),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, B),
        ({"CUDA_VISIBLE_DEVICES": f"{B},x,{A}"}, B),
    ],
)
def test_the_one_visible_device_before_cuda_is_initialised(state, environ, expected):
    state.gpus = several()
    assert read_one(state, uuid=None, environ=environ).uuid == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CUDA_VISIBLE_DEVICES": "1"},  # CUDA's order is not NVML's, unless it is told to be
        {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": f"{A},{B}"},
    ],
)
def test_with_a_choice_the_device_is_not_guessed(state, environ):
    state.gpus = several()
    with source(state, uuid=None, environ=environ) as made:
        reason(made, "not known before CUDA is initialised")
        assert nvml_threads()  # it goes on asking torch


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "5", "0,0", "GPU-ffff", "GPU-aaaa", "MIG-ffff"])
def test_no_visible_gpu_ends_the_thread(state, visible):
    state.gpus = several()
    environ = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with source(state, uuid=None, environ=environ) as made:
        until(lambda: not nvml_threads())
        assert "no GPU is visible" in outcome(made)
    until(lambda: not nvml_threads())
    assert state.initialised == 0


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "0,1,2"}])
def test_the_only_gpu_of_the_machine(state, environ):
    assert read_one(state, uuid=None, environ=environ).uuid == A


def test_a_driver_without_a_gpu(state):
    state.gpus = []
    with source(state, uuid=None) as made:
        until(lambda: not nvml_threads())
        assert outcome(made) == "the NVIDIA driver is there, but no GPU is"


def test_torch_overrules_the_environment_once_it_knows(state):
    state.gpus = several()
    known = {"uuid": None}
    with source(state, uuid=lambda: known["uuid"], environ={"CUDA_VISIBLE_DEVICES": A}, interval_seconds=0.001) as made:
        assert sample(state, made).uuid == A
        known["uuid"] = B
        until(lambda: outcome(made).uuid == B)
        known["uuid"] = None  # cannot be, but is no reason to forget
        assert sample(state, made).uuid == B
        state.errors = {"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}
        reason(made, "GPU is lost")
        state.errors = {}
        assert sample(state, made).uuid == B


def test_a_lost_gpu_hides_no_other(state):
    state.gpus = [Gpu(uuid=A, lost=True), Gpu(uuid=B)]
    assert read_one(state, uuid=None, environ={"CUDA_VISIBLE_DEVICES": B[:8]}).uuid == B


def test_mig_memory_is_its_own_and_the_rest_its_parents(state):
    state.gpus = [Gpu(uuid=A), partitioned(gpm=True, processes=[Process()])]
    reading = read_one(state, uuid=M2)
    assert (reading.index, reading.uuid, reading.name) == (1, M2, "NVIDIA Fake MIG 1g.10gb")
    assert reading.memory_used_bytes == 2 << 30
    assert reading.memory_total_bytes == 10 << 30
    assert reading.utilization_ratio is None
    assert reading.power_watts == 350.5
    assert reading.temperature_celsius == 61.0
    assert reading.sm_clock_hertz == 1.98e9
    assert (reading.sm_active_ratio, reading.sm_active_source) == (0.625, "gpm")
    assert state.arguments["nvmlGpmMigSampleGet"][1] == 8
    assert state.calls["nvmlGpmSampleGet"] == 0


def test_mig_without_gpm_has_no_activity(state):
    state.gpus = [partitioned(processes=[Process()])]
    reading = read_one(state, uuid=M1)
    assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)


@pytest.mark.parametrize(
    ("uuid", "visible"),
    [
        (M2.removeprefix("MIG-"), None),
        (None, M2),
        (None, f"MIG-{B}/8/0"),
        (B, M2),
        (B.removeprefix("GPU-"), f"MIG-{B}/8/0"),
    ],
)
def test_every_name_of_a_mig_device(state, uuid, visible):
    state.gpus = [Gpu(uuid=A), partitioned()]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read_one(state, uuid=uuid, environ=environ).uuid == M2


def test_the_only_mig_device_of_a_gpu(state):
    state.gpus = [partitioned()]
    del state.gpus[0].mig[0]
    assert read_one(state, uuid=None).uuid == M2
    assert read_one(state, uuid=B).uuid == M2


def test_several_mig_devices_are_not_guessed(state):
    state.gpus = [partitioned()]
    with source(state, uuid=None) as made:
        reason(made, "which MIG device it uses is not known")


def test_a_partitioned_gpu_without_a_mig_device(state):
    state.gpus = [Gpu(mig_enabled=True)]
    with source(state, uuid=None) as made:
        reason(made, "there is no MIG device")


def test_an_index_beside_a_partitioned_gpu_is_not_guessed(state):
    state.gpus = [Gpu(uuid=A), partitioned()]
    environ = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with source(state, uuid=None, environ=environ) as made:
        reason(made, "not known before CUDA is initialised")
