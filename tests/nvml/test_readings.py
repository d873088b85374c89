"""Readings of the NVML source and their units, from the real binding above a fake driver."""

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu

from telemetry.sources.nvml import THROTTLE_BITS
from tests.nvml.nvml_harness import A, read_one, reason, source

# --- readings and their units


def test_every_reading_in_base_units(state):
    state.gpus = [Gpu(gpm=True, throttle=0x004 | 0x040)]
    reading = read_one(state)
    assert (reading.index, reading.uuid, reading.name) == (0, A, "NVIDIA Fake H100")
    assert reading.utilization_ratio == 0.80
    assert reading.sm_active_ratio == 0.625
    assert reading.sm_active_source == "gpm"
    assert reading.sm_occupancy_ratio == 0.25
    assert reading.tensor_active_ratio == 0.125
    assert reading.memory_bandwidth_ratio == 0.40
    assert reading.memory_used_bytes == 20 << 30
    assert reading.memory_total_bytes == 80 << 30
    assert reading.power_watts == 350.5
    assert reading.temperature_celsius == 61.0
    assert reading.sm_clock_hertz == 1.98e9
    assert reading.energy_joules == 9_000_000.5
    assert reading.throttled == ("sw_power_cap", "hw_thermal")


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetUtilizationRates", ["utilization_ratio"]),
        ("nvmlDeviceGetPowerUsage", ["power_watts"]),
        ("nvmlDeviceGetTemperature", ["temperature_celsius"]),
        ("nvmlDeviceGetClockInfo", ["sm_clock_hertz"]),
        ("nvmlDeviceGetCurrentClocksEventReasons", ["throttled"]),
        (
            "nvmlGpmSampleGet",
            ["sm_active_ratio", "sm_active_source", "sm_occupancy_ratio", "tensor_active_ratio"]
            + ["memory_bandwidth_ratio"],
        ),
    ],
)
@pytest.mark.parametrize("code", [fake.NOT_SUPPORTED, fake.NO_PERMISSION, fake.UNKNOWN])
def test_a_reading_that_is_not_to_be_had_is_none_by_itself(state, function, fields, code):
    state.gpus = [Gpu(gpm=True)]
    state.errors = {function: code}
    reading = read_one(state)
    absent = [name for name in reading.__slots__ if getattr(reading, name) is None]
    assert sorted(absent) == sorted(fields)


def test_memory_that_is_not_supported_is_none(state):
    state.errors = dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), fake.NOT_SUPPORTED)
    reading = read_one(state)
    assert reading.memory_used_bytes is None
    assert reading.memory_total_bytes is None
    assert reading.power_watts == 350.5


def test_memory_version_1_serves_old_drivers_only(state):
    read_one(state)
    assert state.calls["nvmlDeviceGetMemoryInfo"] == 0
    state.errors = {"nvmlDeviceGetMemoryInfo_v2": fake.FUNCTION_NOT_FOUND}
    assert read_one(state).memory_used_bytes == 21 << 30


def test_renamed_functions_are_found_by_either_name(state):
    state.gpus[0].throttle = 0x004
    state.errors = {"nvmlDeviceGetCurrentClocksEventReasons": fake.FUNCTION_NOT_FOUND}
    reading = read_one(state)
    assert reading.throttled == ("sw_power_cap",)
    assert state.calls["nvmlDeviceGetCurrentClocksThrottleReasons"] > 0


def test_temperature_comes_from_its_heir_where_the_old_function_is_gone(state):
    if not hasattr(pytest.importorskip("pynvml"), "nvmlDeviceGetTemperatureV"):
        pytest.skip("this nvidia-ml-py does not know the new function")
    state.errors = {"nvmlDeviceGetTemperature": fake.FUNCTION_NOT_FOUND}
    assert read_one(state).temperature_celsius == 61.0


def test_no_reading_at_all_is_no_sample(state):
    names = [name.removeprefix("_") for name in dir(fake.FakeLibrary) if name.startswith("_nvmlDeviceGet")]
    identity = {"Count_v2", "HandleByIndex_v2", "HandleByUUID", "UUID", "Name", "Index", "MigMode"}
    state.errors = {name: fake.UNKNOWN for name in names if name.removeprefix("nvmlDeviceGet") not in identity}
    with source(state) as made:
        reason(made, "Unknown Error")


@pytest.mark.parametrize("reason_name", THROTTLE_BITS)
def test_each_throttle_reason_by_its_label(state, reason_name):
    state.gpus[0].throttle = THROTTLE_BITS[reason_name]
    assert read_one(state).throttled == (reason_name,)


def test_throttle_bits_are_those_of_the_binding():
    pynvml = pytest.importorskip("pynvml")
    names = {
        "applications_clocks": "ApplicationsClocksSetting",
        "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sync_boost": "SyncBoost",
        "sw_thermal": "SwThermalSlowdown",
        "hw_thermal": "HwThermalSlowdown",
        "hw_power_brake": "HwPowerBrakeSlowdown",
        "display_clocks": "DisplayClockSetting",
    }
    assert {reason: getattr(pynvml, "nvmlClocksEventReason" + name) for reason, name in names.items()} == dict(
        THROTTLE_BITS
    )


def test_an_idle_gpu_is_not_throttled(state):
    state.gpus[0].throttle = 0x001
    assert read_one(state).throttled == ()


ALL_ONES = (1 << 64) - 1
MINUS_ONE = (1 << 32) - 1


@pytest.mark.parametrize(
    ("field", "value", "absent"),
    [
        ("memory_used", ALL_ONES, ("memory_used_bytes", "memory_total_bytes")),
        ("memory_used", (80 << 30) + 1, ("memory_used_bytes", "memory_total_bytes")),
        ("memory_total", ALL_ONES, ("memory_used_bytes", "memory_total_bytes")),
        ("temperature", MINUS_ONE, ("temperature_celsius",)),
        ("power", MINUS_ONE, ("power_watts",)),
        ("energy", ALL_ONES, ("energy_joules",)),
        ("energy", 0, ("energy_joules",)),
        ("sm_clock", MINUS_ONE, ("sm_clock_hertz",)),
        ("sm_clock_max", MINUS_ONE, ("sm_clock_max_hertz",)),
        ("throttle", ALL_ONES, ("throttled",)),
        ("utilization", MINUS_ONE, ("utilization_ratio",)),
    ],
)
def test_a_value_no_gpu_can_have_is_a_failed_reading(state, field, value, absent):
    setattr(state.gpus[0], field, value)
    reading = read_one(state)
    known = {name for name in absent if getattr(reading, name) is not None}
    assert not known
    others = {"memory_used_bytes", "temperature_celsius", "power_watts", "sm_clock_hertz", "throttled"} - set(absent)
    assert all(getattr(reading, name) is not None for name in others)
