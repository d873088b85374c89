"""The reader of GPUs and NVML's table: the real binding above a fake driver."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fakes import nvml as fake
from fakes.nvml import Gpu, Mig, State

import telemetry
from telemetry.log.lines import GpuErrorLine
from telemetry.log.reader import load
from telemetry.model.records import THROTTLE_REASONS, XIDS, GpuSample
from telemetry.safety import threads
from telemetry.sources import nvml
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import GpuSource
from telemetry.sources.nvml import THROTTLE_BITS, Nvml
from tests.full_views import page
from tests.report_logs import summarize
from tests.running_agent import log_lines

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
M1 = "MIG-11111111-0000-0000-0000-000000000000"
M2 = "MIG-22222222-0000-0000-0000-000000000000"
SECOND = 1_000_000_000
TICKED = "nvmlDeviceGetPowerUsage"  # called once in every tick
ALL_ONES, MINUS_ONE = (1 << 64) - 1, (1 << 32) - 1


class Clock:
    """Monotonic ns that move with the driver's ticks, 200 ms each, and when told."""

    def __init__(self, state):
        self.state = state
        self.extra_ns = 0

    def __call__(self):
        return self.state.calls[TICKED] * SECOND // 5 + self.extra_ns


@contextmanager
def source(state, uuid=A, environ=None, clock=None, interval_seconds=0.001):
    uuids = uuid if callable(uuid) else lambda: filter(None, [uuid])
    driver = Nvml(environ or {}, clock or Clock(state))
    made = GpuSource(driver, uuids, interval_seconds=interval_seconds)
    try:
        yield made
    finally:
        made.close()
        for release in list(state.hang.values()):
            release.set()


def nvml_threads():
    return [name for name in threads.running() if name.startswith("telemetry-nvml")]


def until(met, seconds=20):
    """Wait for something to come true, and return it."""
    end = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.002)
    return value


def newest(made):
    """The sample of the only GPU."""
    (found,) = made.read()
    return found


def outcome(made, read=newest):
    """The sample, or the reason why it is missing, as text."""
    try:
        return read(made)
    except CollectorError as error:
        return str(error)


def ticks(state, number=3):
    """Wait for this many complete ticks from now."""
    target = state.calls[TICKED] + number
    until(lambda: state.calls[TICKED] >= target)


def sample(state, made):
    """A sample taken after now, with two ticks before it."""
    until(lambda: not isinstance(outcome(made), str))
    ticks(state)
    return until(lambda: outcome(made) if not isinstance(outcome(made), str) else None)


def reason(made, part):
    """Wait until ``read`` gives this reason."""
    return until(lambda: text if isinstance(text := outcome(made, GpuSource.read), str) and part in text else None)


def read_one(state, **settings):
    with source(state, **settings) as made:
        return sample(state, made)


def activity(reading):
    return reading.sm_active_ratio, reading.sm_active_source


def partitioned(**settings):
    migs = [Mig(uuid=M1, gpu_instance=7, memory_used=1 << 30), Mig(uuid=M2, gpu_instance=8, memory_used=2 << 30)]
    return Gpu(uuid=B, mig_enabled=True, mig=migs, **settings)


@pytest.fixture
def state():
    state = State()
    with fake.installed(state):
        yield state
        for release in list(state.hang.values()):
            release.set()
        # A thread of this test must be gone before the next one installs another driver.
        until(lambda: not nvml_threads())


# -- readings and their units ------------------------------------------------------------------------------------------


def test_every_reading_in_base_units(state):
    state.gpus = [Gpu(gpm=True, throttle=0x004 | 0x040)]
    state.gpus[0].gpm_values |= {60: 2.0, 61: 3.0, 21: 4.0, 20: 5.0}
    assert read_one(state) == GpuSample(
        index=0, uuid=A, name="NVIDIA Fake H100", utilization_ratio=0.80, utilization_source="nvml",
        sm_active_ratio=0.625, sm_active_source="gpm",
        sm_occupancy_ratio=0.25, tensor_active_ratio=0.125, memory_bandwidth_ratio=0.40,
        nvlink_receive_bytes_per_second=2 << 20, nvlink_transmit_bytes_per_second=3 << 20,
        pcie_receive_bytes_per_second=4 << 20, pcie_transmit_bytes_per_second=5 << 20, memory_used_bytes=20 << 30,
        memory_total_bytes=80 << 30, power_watts=350.5, power_limit_watts=700.0, energy_joules=9_000_000.5,
        temperature_celsius=61.0, memory_temperature_celsius=72.0, sm_clock_hertz=1.98e9, sm_clock_max_hertz=1.98e9,
        memory_clock_hertz=2.619e9, throttled=("sw_power_cap", "hw_thermal"), power_violation_seconds=90.5,
        thermal_violation_seconds=1.5, ecc_corrected_errors_total=12, ecc_uncorrected_errors_total=0,
        corrected_remapped_rows_total=3, uncorrected_remapped_rows_total=1, row_remap_pending=0, row_remap_failure=0,
        pcie_replays_total=5, xid=0, xid_errors_total=0,
    )  # fmt: skip


GPM_FIELDS = ["sm_active_ratio", "sm_active_source", "sm_occupancy_ratio", "tensor_active_ratio"]
TRAFFIC = [name for name in GpuSample.__slots__ if name.endswith("_bytes_per_second")]
FIELD_VALUES = {
    82: "memory_temperature_celsius", 74: "power_violation_seconds", 75: "thermal_violation_seconds",
    3: "ecc_corrected_errors_total", 4: "ecc_uncorrected_errors_total", 142: "corrected_remapped_rows_total",
    143: "uncorrected_remapped_rows_total", 144: "row_remap_pending", 145: "row_remap_failure", 94: "pcie_replays_total",
}  # fmt: skip


@pytest.mark.parametrize(
    ("functions", "fields"),
    [
        (["nvmlDeviceGetUtilizationRates"], ["utilization_ratio", "utilization_source"]),
        (["nvmlDeviceGetPowerUsage"], ["power_watts"]),
        (["nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"], ["temperature_celsius"]),
        (["nvmlDeviceGetClockInfo"], ["sm_clock_hertz", "memory_clock_hertz"]),
        (["nvmlDeviceGetEnforcedPowerLimit"], ["power_limit_watts"]),
        (["nvmlDeviceGetFieldValues"], FIELD_VALUES.values()),
        (["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"], ["throttled"]),
        (["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"], ["memory_used_bytes", "memory_total_bytes"]),
        (["nvmlGpmSampleGet"], [*GPM_FIELDS, *TRAFFIC, "memory_bandwidth_ratio"]),
    ],
)
@pytest.mark.parametrize("code", [fake.NOT_SUPPORTED, fake.UNKNOWN])
def test_a_reading_that_is_not_to_be_had_is_none_by_itself(state, functions, fields, code):
    state.gpus = [Gpu(gpm=True)]
    state.gpus[0].gpm_values |= dict.fromkeys((60, 61, 21, 20), 1.0)
    state.errors = dict.fromkeys(functions, code)
    reading = read_one(state)
    assert sorted(name for name in reading.__slots__ if getattr(reading, name) is None) == sorted(fields)


def test_older_and_newer_drivers_are_read_by_the_functions_that_they_have(state):
    read_one(state)
    assert state.calls["nvmlDeviceGetMemoryInfo"] == 0
    state.gpus[0].throttle = 0x004
    state.errors = dict.fromkeys(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryInfo_v2"), fake.FUNCTION_NOT_FOUND
    )
    reading = read_one(state)
    assert (reading.throttled, reading.memory_used_bytes) == (("sw_power_cap",), 21 << 30)
    if hasattr(pytest.importorskip("pynvml"), "nvmlDeviceGetTemperatureV"):
        state.errors = {"nvmlDeviceGetTemperature": fake.FUNCTION_NOT_FOUND}
        assert read_one(state).temperature_celsius == 61.0


def test_no_reading_at_all_is_no_sample(state):
    names = [name for name in fake.FUNCTIONS if name.startswith(("nvmlDeviceGet", "nvmlEventSetCreate"))]
    identity = {"Count_v2", "HandleByIndex_v2", "UUID", "Name", "MigMode"}
    state.errors = {name: fake.UNKNOWN for name in names if name.removeprefix("nvmlDeviceGet") not in identity}
    with source(state) as made:
        reason(made, "Unknown Error")


def test_throttle_bits_are_those_of_the_binding(state):
    """An idle GPU is not throttled."""
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
    bits = {reason: getattr(pynvml, "nvmlClocksEventReason" + name) for reason, name in names.items()}
    assert bits == dict(THROTTLE_BITS)
    assert set(bits) == set(THROTTLE_REASONS)
    state.gpus[0].throttle = 0x001
    assert read_one(state).throttled == ()


@pytest.mark.parametrize(("number", "value"), [(82, 0), (82, MINUS_ONE), (74, ALL_ONES), (4, ALL_ONES), (94, None)])
def test_a_field_that_a_gpu_does_not_have_is_none_by_itself(state, number, value):
    if value is None:
        del state.gpus[0].fields[number]
    else:
        state.gpus[0].fields[number] = value
    reading = read_one(state)
    assert [name for name in FIELD_VALUES.values() if getattr(reading, name) is None] == [FIELD_VALUES[number]]


def test_what_seldom_changes_is_read_every_ten_seconds(state):
    with source(state) as made:
        sample(state, made)
        before = Counter(state.calls)
        ticks(state, 200)  # 40 seconds
        for function in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetEnforcedPowerLimit"):
            assert 3 <= state.calls[function] - before[function] <= 5
        state.gpus[0].fields[4] = 1
        until(lambda: newest(made).ecc_uncorrected_errors_total == 1)


@pytest.mark.parametrize(
    ("field", "value", "absent"),
    [
        ("memory_used", ALL_ONES - (1 << 40), ("memory_used_bytes",)),
        ("memory_total", ALL_ONES, ("memory_total_bytes",)),
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
    assert {getattr(reading, name) for name in absent} == {None}
    others = {"memory_used_bytes", "temperature_celsius", "power_watts", "sm_clock_hertz", "throttled"} - set(absent)
    assert all(getattr(reading, name) is not None for name in others)


# -- which device is read: the one that torch uses, or a MIG device of it ----------------------------------------------


@pytest.mark.parametrize("uuid", [B, B.removeprefix("GPU-")])
def test_the_device_that_torch_names(state, uuid):
    state.gpus = [Gpu(uuid=A), Gpu(uuid=B, utilization=11)]
    reading = read_one(state, uuid=uuid, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert (reading.index, reading.uuid, reading.utilization_ratio) == (1, B, 0.11)


def test_before_cuda_is_initialised_the_only_gpu_or_the_one_that_is_named(state):
    assert read_one(state, uuid=None, environ={"CUDA_VISIBLE_DEVICES": "0"}).uuid == A
    state.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    assert read_one(state, uuid=None, environ={"CUDA_VISIBLE_DEVICES": B}).uuid == B


@pytest.mark.parametrize(
    ("gpus", "visible", "text"),
    [
        ([], None, "the NVIDIA driver is there, but no GPU or MIG device is"),
        ([Gpu()], "", "no GPU is visible: CUDA_VISIBLE_DEVICES hides them all"),
        ([Gpu()], "-1", "no GPU is visible: CUDA_VISIBLE_DEVICES hides them all"),
        ([Gpu(mig_enabled=True)], None, "the NVIDIA driver is there, but no GPU or MIG device is"),
    ],
)
def test_without_a_gpu_the_thread_ends(state, gpus, visible, text):
    state.gpus = gpus
    with source(state, uuid=None, environ={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) as made:
        until(lambda: not nvml_threads())
        assert outcome(made) == text
    until(lambda: not nvml_threads())
    assert state.initialised == 0


@pytest.mark.parametrize(
    ("gpus", "uuid", "visible", "text"),
    [
        ([Gpu()], "ffffffff", None, "no device with the UUID ffffffff"),
        ([Gpu(), Gpu(uuid=B)], None, None, "not known before CUDA is initialised"),
        ([Gpu(), Gpu(uuid=B)], None, "1", "not known before CUDA"),  # CUDA's order is not NVML's
        ([Gpu(), Gpu(uuid=B)], None, f"{A},{B}", "not known before CUDA"),
        ([Gpu(), Gpu(uuid=B, lost=True)], None, None, "not known before CUDA"),
        ([partitioned()], None, None, "not known before CUDA"),
        ([Gpu(), Gpu(uuid=B)], None, M1, "not known before CUDA"),
        ([partitioned()], B, "0", "its MIG device is not known"),
    ],
)
def test_with_a_choice_the_device_is_not_guessed(state, gpus, uuid, visible, text):
    state.gpus = gpus
    with source(state, uuid=uuid, environ={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) as made:
        reason(made, text)
        assert nvml_threads()  # it goes on asking torch


def test_torch_overrules_the_environment_once_it_knows(state):
    state.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    known = {"uuid": None}
    with source(state, uuid=lambda: filter(None, [known["uuid"]]), environ={"CUDA_VISIBLE_DEVICES": A}) as made:
        assert sample(state, made).uuid == A
        known["uuid"] = B
        until(lambda: outcome(made).uuid == B)
        known["uuid"] = None  # cannot be, but is no reason to forget
        state.errors = {"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}
        reason(made, "GPU is lost")
        state.errors = {}
        assert sample(state, made).uuid == B


def test_mig_memory_is_its_own_and_the_rest_its_parents(state):
    state.gpus = [Gpu(uuid=A), partitioned(gpm=True)]
    reading = read_one(state, uuid=M2)
    assert (reading.index, reading.uuid, reading.name) == (1, M2, "NVIDIA Fake MIG 1g.10gb")
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (2 << 30, 10 << 30)
    assert (reading.utilization_ratio, reading.energy_joules) == (None, None)
    assert (reading.power_watts, reading.temperature_celsius, reading.sm_clock_hertz) == (350.5, 61.0, 1.98e9)
    assert activity(reading) == (0.625, "gpm")
    assert state.arguments["nvmlGpmMigSampleGet"][1] == 8
    assert state.calls["nvmlGpmSampleGet"] == 0
    assert reading.ecc_corrected_errors_total == 12
    state.gpus[1].gpm = False
    assert activity(read_one(state, uuid=M1)) == (None, None)


def test_utilisation_of_a_mig_device_is_that_of_its_counters(state):
    state.gpus = [partitioned(gpm=True)]
    state.gpus[0].gpm_values[1] = 70.0
    with source(state, uuid=M2) as made:
        reading = sample(state, made)
        assert (reading.utilization_ratio, reading.utilization_source) == (0.70, "gpm")
        state.gpus[0].mig_enabled = False  # so that NVML would give it
        before = state.calls["nvmlDeviceGetUtilizationRates"]
        assert sample(state, made).utilization_source == "gpm"
        assert state.calls["nvmlDeviceGetUtilizationRates"] == before


def test_utilisation_keeps_its_source(state):
    """Without a reading it is absent, and does not change over to the counters."""
    state.gpus = [Gpu(gpm=True)]
    state.gpus[0].gpm_values[1] = 70.0
    with source(state) as made:
        assert sample(state, made).utilization_source == "nvml"
        state.errors = {"nvmlDeviceGetUtilizationRates": fake.NOT_SUPPORTED}
        reading = sample(state, made)
        assert (reading.utilization_ratio, reading.utilization_source) == (None, None)


@pytest.mark.parametrize(
    ("uuid", "visible"), [(M2.removeprefix("MIG-"), None), (None, M2), (B, M2), (B.removeprefix("GPU-"), M2)]
)
def test_every_name_of_a_mig_device(state, uuid, visible):
    state.gpus = [Gpu(uuid=A), partitioned()]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read_one(state, uuid=uuid, environ=environ).uuid == M2
    del state.gpus[1].mig[0]
    assert read_one(state, uuid=B).uuid == M2, "the only one of its GPU"


# -- how busy the SMs are ----------------------------------------------------------------------------------------------


def test_gpm_values_that_are_none_are_none(state):
    state.gpus = [Gpu(gpm=True, gpm_returns={5: fake.NOT_SUPPORTED})]
    for value in (float("nan"), float("inf"), -1.0, 250.0):
        state.gpus[0].gpm_values |= {2: value, 3: 100.2}
        reading = read_one(state)
        assert activity(reading) == (None, None)
        assert (reading.sm_occupancy_ratio, reading.tensor_active_ratio) == (1.0, None)
        assert reading.memory_bandwidth_ratio == 0.40
    request = state.arguments["nvmlGpmMetricsGet"][0]._obj
    asked = [2, 3, 5, 10, 60, 61, 21, 20, 1, 0]
    assert [request.metrics[slot].metricId for slot in range(10)] == asked, "only these are touched"


def test_gpm_needs_two_samples_more_than_100_ms_apart(state):
    state.gpus = [Gpu(gpm=True)]
    with source(state, interval_seconds=3600) as made:
        until(lambda: not isinstance(outcome(made), str))
        assert activity(newest(made)) == (None, None), "neither invented nor of another source"
    clock = Clock(state)
    with source(state, clock=lambda: clock() // 10) as made:  # 20 ms a tick
        until(lambda: not isinstance(outcome(made), str) and newest(made).sm_active_ratio == 0.625)
        before = Counter(state.calls)
        ticks(state, 60)
        pairs = state.calls["nvmlGpmMetricsGet"] - before["nvmlGpmMetricsGet"]
        assert 1 <= pairs <= (state.calls[TICKED] - before[TICKED]) / 5 + 1


def test_gpm_does_not_average_over_a_gap(state):
    """After a hang the counters tell of the last minutes, not of now."""
    state.gpus = [Gpu(gpm=True)]
    clock = Clock(state)
    with source(state, clock=clock) as made:
        sample(state, made)
        last_call = state.hang_in("nvmlDeviceGetCurrentClocksEventReasons")
        until(lambda: state.hanging)
        clock.extra_ns = 600 * SECOND
        before = Counter(state.calls)
        after_gpm = state.hang_in("nvmlDeviceGetUtilizationRates")
        last_call.set()
        until(lambda: "nvmlDeviceGetUtilizationRates" in state.hanging)
        assert state.calls["nvmlGpmSampleGet"] == before["nvmlGpmSampleGet"] + 1
        assert state.calls["nvmlGpmMetricsGet"] == before["nvmlGpmMetricsGet"]
        after_gpm.set()
        sample(state, made)


def test_counters_that_are_refused_rest_and_are_tried_again(state):
    """A virtual GPU may say it has the counters, and then not let them be read, at once or later."""
    state.gpus = [Gpu(gpm=True)]
    state.errors = {"nvmlGpmSampleGet": fake.NO_PERMISSION}
    with source(state) as made:
        assert activity(sample(state, made)) == (None, None)
        state.errors = {}
        until(lambda: newest(made).sm_active_source == "gpm")
        state.errors = {"nvmlGpmSampleGet": fake.NO_PERMISSION}
        assert activity(sample(state, made)) == (None, None)
        before = Counter(state.calls)
        ticks(state, 200)  # 40 seconds
        assert 3 <= state.calls["nvmlGpmSampleGet"] - before["nvmlGpmSampleGet"] <= 5
        state.errors = {}
        until(lambda: newest(made).sm_active_source == "gpm")


# -- errors that the driver reports (Xid) ------------------------------------------------------------------------------

OFF_THE_BUS, PAGE_FAULT, CLEANUP = 79, 31, 45


def error(xid):
    return GpuErrorLine(gpu=0, uuid=A, xid=xid, text=XIDS[xid])


def xids(made):
    return [error.xid for error in made.take_errors()]


def test_xid_errors_are_counted_and_told_once(state):
    state.gpus[0].xids = [(48, fake.NO_INSTANCE)]  # before the agent
    with source(state) as made:
        assert (sample(state, made).xid, newest(made).xid_errors_total, xids(made)) == (0, 0, [])
        state.gpus[0].xids += [(PAGE_FAULT, fake.NO_INSTANCE), (OFF_THE_BUS, fake.NO_INSTANCE)]
        until(lambda: newest(made).xid == OFF_THE_BUS)
        assert (newest(made).xid_errors_total, made.take_errors()) == (
            2, [error(PAGE_FAULT), error(OFF_THE_BUS)],
        )  # fmt: skip
        state.gpus[0].xids += [(CLEANUP, fake.NO_INSTANCE)]
        until(lambda: newest(made).xid_errors_total == 3)
        assert newest(made).xid == OFF_THE_BUS, "a clean-up does not hide what it follows"
        assert (xids(made), xids(made)) == ([CLEANUP], [])
        assert state.arguments["nvmlEventSetWait_v2"][2].value == 0, "it never waits"


def test_an_error_that_takes_the_gpu_along_is_told(state):
    with source(state) as made:
        sample(state, made)
        state.gpus[0].xids += [(OFF_THE_BUS, fake.NO_INSTANCE)]  # first: a GPU that is lost loses what was not read
        state.errors = {"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}
        reason(made, "GPU is lost")
        assert xids(made) == [OFF_THE_BUS]
        state.errors = {}
        assert (sample(state, made).xid, newest(made).xid_errors_total) == (OFF_THE_BUS, 1)
        assert len(state.event_sets) == 1
    until(lambda: not nvml_threads())
    assert not state.event_sets


def test_each_gpu_of_several_has_its_own_readings_and_errors(state):
    """Layers of one model on several GPUs."""
    state.gpus = [Gpu(uuid=A, utilization=80), Gpu(uuid=B, utilization=11)]
    known = [B]
    with source(state, uuid=lambda: known) as made:
        assert sample(state, made).index == 1
        known.append(A)
        until(lambda: len(made.read()) == 2)
        assert [(gpu.uuid, gpu.utilization_ratio) for gpu in made.read()] == [(B, 0.11), (A, 0.80)]
        state.gpus[0].xids += [(PAGE_FAULT, fake.NO_INSTANCE)]
        until(lambda: made.read()[1].xid == PAGE_FAULT)
        assert (made.read()[0].xid, made.take_errors()) == (0, [error(PAGE_FAULT)])
        state.errors = {"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}
        until(lambda: not state.event_sets)
        state.errors = {}
        until(lambda: not isinstance(outcome(made, GpuSource.read), str))
        assert [gpu.xid for gpu in made.read()] == [0, PAGE_FAULT], "the count goes on"


def test_a_gpu_of_several_that_is_not_found_for_a_while(state):
    both = state.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    with source(state, uuid=lambda: [B, A]) as made:
        until(lambda: not isinstance(outcome(made, GpuSource.read), str))
        state.errors = {TICKED: fake.GPU_IS_LOST}
        reason(made, "GPU is lost")
        state.gpus, state.errors = both[1:], {}
        missing = reason(made, f"knows no device with the UUID {A}")
        asked = state.calls["nvmlDeviceGetHandleByIndex_v2"]
        until(lambda: state.calls["nvmlDeviceGetHandleByIndex_v2"] > asked + 9)
        assert outcome(made, GpuSource.read) == missing, "not the reading of one alone"
        state.gpus = both
        until(lambda: not isinstance(outcome(made, GpuSource.read), str))
        assert [gpu.uuid for gpu in made.read()] == [B, A]


def test_an_agent_shows_each_gpu_of_its_process(state, monkeypatch, request):
    properties = [SimpleNamespace(uuid=uuid.removeprefix("GPU-")) for uuid in (A, B)]
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=properties.__getitem__)
    monkeypatch.setattr("telemetry.sources.polling.cuda", lambda: cuda)
    state.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    agent = request.getfixturevalue("agent")
    agent.tracker.device, agent.tracker.devices = 1, [torch.device("cuda", 1), torch.device("cuda", 0)]
    until(lambda: [gpu.index for gpu in agent._collectors.samples.gpus or ()] == [1, 0])
    until(lambda: {A, B} <= agent._builder.energies.keys())
    state.gpus[0].energy += 30_000
    state.gpus[1].energy += 7_000
    until(lambda: all(sum((each.joules or {}).values()) for each in agent._builder.energies.values()))

    joules = {}
    for line in page(agent._view()).splitlines():
        if line.startswith("training_gpu_energy_joules_total"):
            uuid = B if B in line else A
            joules[uuid] = joules.get(uuid, 0.0) + float(line.split()[-1])
    assert joules == {A: pytest.approx(30), B: pytest.approx(7)}

    telemetry.stop()
    lines = [line for line in log_lines(agent) if line["event"] == "gpu"]
    assert {(line["index"], line["wait_measured"]) for line in lines[-2:]} == {(1, True), (0, False)}
    summary = summarize(load(agent.run_dir))
    assert sum(summary["ranks"][0]["gpu_energy_joules"].values()) == pytest.approx(37)
    assert log_lines(agent)[-1]["gpu_uuid"] == f"{B} {A}"


def test_parameters_on_the_host_add_no_gpu(state, monkeypatch, request):
    """With offloaded parameters each rank would show the current device of the agent's thread, GPU 0, as one of its own."""
    properties = {1: SimpleNamespace(uuid=B.removeprefix("GPU-")), None: SimpleNamespace(uuid=A.removeprefix("GPU-"))}
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=properties.__getitem__)
    monkeypatch.setattr("telemetry.sources.polling.cuda", lambda: cuda)
    state.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    agent = request.getfixturevalue("agent")
    agent.tracker.device, agent.tracker.devices = 1, [torch.device("cpu")]
    until(lambda: agent._collectors.samples.gpus)
    assert [gpu.index for gpu in agent._collectors.samples.gpus] == [1]


def test_an_error_in_the_middle_of_a_reading_is_told(state):
    """The call that fails because of it is the last one of this reader."""
    with source(state) as made:
        sample(state, made)
        release = state.hang_in(TICKED)
        until(lambda: TICKED in state.hanging)
        state.gpus[0].xids += [(OFF_THE_BUS, fake.NO_INSTANCE)]
        state.errors = {TICKED: fake.GPU_IS_LOST}
        release.set()
        reason(made, "GPU is lost")
        assert xids(made) == [OFF_THE_BUS]


def test_errors_of_another_mig_device_are_not_told(state):
    state.gpus = [partitioned()]
    with source(state, uuid=M2) as made:
        assert sample(state, made).xid == 0
        state.gpus[0].xids += [(94, 7), (PAGE_FAULT, 8), (OFF_THE_BUS, fake.NO_INSTANCE)]
        until(lambda: newest(made).xid == OFF_THE_BUS)
        assert xids(made) == [PAGE_FAULT, OFF_THE_BUS]


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
@pytest.mark.parametrize("code", [fake.NOT_SUPPORTED, fake.FUNCTION_NOT_FOUND])
def test_a_driver_that_reports_no_errors_is_asked_once(state, function, code):
    state.errors = {function: code}
    with source(state) as made:
        reading = sample(state, made)
        assert (reading.xid, reading.xid_errors_total) == (None, None)
        ticks(state, 10)
        assert state.calls[function] == 1
        assert not state.event_sets


def test_a_look_takes_the_next_tick_at_once_and_does_not_wait_for_a_driver_that_hangs(state):
    with source(state, interval_seconds=3600) as made:
        until(lambda: not isinstance(outcome(made), str))
        state.gpus[0].xids += [(OFF_THE_BUS, fake.NO_INSTANCE)]
        made.look(20)
        assert xids(made) == [OFF_THE_BUS]
        state.hang_in("nvmlDeviceGetPowerUsage")
        made.look(0.001)
        until(lambda: state.hanging)


# -- failures of the driver: hangs, lost GPUs, missing libraries -------------------------------------------------------


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlInitWithFlags", "nvmlGpmSampleGet"])
def test_a_call_that_hangs_and_returns(state, function):
    state.gpus = [Gpu(gpm=True)]
    clock = Clock(state)
    release = state.hang_in(function)
    with source(state, clock=clock) as made:
        until(lambda: state.hanging)
        assert outcome(made) == "NVML has given no reading yet"
        clock.extra_ns = 7 * SECOND
        binding = function.replace("WithFlags", "")
        assert outcome(made) == f"an NVML call has not returned for over 5 s ({binding})"
        for _ in range(50):
            clock.extra_ns += 60 * SECOND
            outcome(made)
        assert len(nvml_threads()) == 1
        release.set()
        assert sample(state, made).power_watts == 350.5
        assert state.initialised == 1


def test_what_was_read_before_a_hang_is_not_shown_after_it(state):
    """The tick in which a call hung has readings from before the hang."""
    clock = Clock(state)
    release = state.hang_in("nvmlDeviceGetPowerUsage")
    with source(state, clock=clock) as made:
        until(lambda: state.hanging)
        clock.extra_ns = 600 * SECOND
        after = state.hang_in("nvmlDeviceGetUtilizationRates")
        release.set()
        until(lambda: "nvmlDeviceGetUtilizationRates" in state.hanging)
        assert outcome(made) == "the newest NVML reading is over 1 s old"
        after.set()
        sample(state, made)


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlGpmSampleGet"])
def test_a_gpu_that_is_lost_and_comes_back(state, function):
    state.gpus = [Gpu(gpm=True)]
    with source(state) as made:
        sample(state, made)
        state.errors = {function: fake.GPU_IS_LOST}
        before = state.calls["nvmlInitWithFlags"]
        assert reason(made, function).endswith("GPU is lost")
        until(lambda: state.calls["nvmlInitWithFlags"] > before + 2)  # it tries anew
        assert state.initialised <= 1
        state.errors = {}
        sample(state, made)
        assert state.initialised == 1
        assert len(state.gpm_buffers) == 2


def test_a_driver_that_vanishes_and_comes_back(state):
    with source(state) as made:
        sample(state, made)
        state.errors = {"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}
        state.errors["nvmlInitWithFlags"] = fake.DRIVER_NOT_LOADED
        until(lambda: not nvml_threads())
        assert outcome(made) == "no NVIDIA driver: its kernel module is not loaded"
        state.errors = {}
        sample(state, made)


def test_a_failure_of_the_callable_is_contained(state):
    answers = {"fail": True}

    def uuid():
        if answers["fail"]:
            raise RuntimeError("boom")
        return [A]

    with source(state, uuid=uuid) as made:
        reason(made, "RuntimeError: boom")
        answers["fail"] = False
        sample(state, made)


def test_no_driver_leaves_no_thread_and_one_installed_later_is_found(state):
    """On most machines without a GPU there is not even the library."""
    with fake.no_driver():
        made = GpuSource(Nvml({}, Clock(state)), lambda: [A], interval_seconds=0.001)
        used = [0.0]
        for _ in range(20):
            until(lambda: not nvml_threads())
            used.append(made.cpu_seconds())
            assert outcome(made) == "no NVIDIA driver: libnvidia-ml.so.1 is missing"
        assert used == sorted(set(used)), "CPU time counts on over restarts of the thread"
        until(lambda: not nvml_threads())
    try:
        sample(state, made)
    finally:
        made.close()


def test_the_binding_may_be_missing(state, monkeypatch):
    monkeypatch.setattr(nvml, "pynvml", None)
    with source(state) as made:
        until(lambda: not nvml_threads())
        assert "nvidia-ml-py is not installed" in outcome(made)


# -- its thread --------------------------------------------------------------------------------------------------------


def test_only_its_own_thread_calls_nvml_and_leaves_nothing_behind(state):
    state.gpus = [Gpu(gpm=True)]
    with source(state, interval_seconds=0.0001) as made:
        ticks(state, 300)
        assert len(state.gpm_buffers) == 2
        first = until(made.cpu_seconds)
        until(lambda: made.cpu_seconds() > first)
    until(lambda: not nvml_threads())
    assert outcome(made) == "the NVML source is closed"
    assert (state.gpm_allocated, dict(state.gpm_buffers), state.initialised) == (2, {}, 0)
    assert state.callers == {"telemetry-nvml"}
