"""This rank's GPU through NVML: the real binding above a fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu, Mig, Process, State

from telemetry.records import THROTTLE_REASONS, GpuSample
from telemetry.sources.collector import CollectorError, Poller
from telemetry.sources.nvml import THROTTLE_BITS, NvmlSource, device_summary
from telemetry.util import threads

# -- helpers of the tests of the NVML source: a source above a fake driver, and what it reads --------------------------


A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
AB = "GPU-aaaabbbb-0000-0000-0000-000000000000"
M1 = "MIG-11111111-0000-0000-0000-000000000000"
M2 = "MIG-22222222-0000-0000-0000-000000000000"
SECOND = 1_000_000_000
TICKED = "nvmlDeviceGetClockInfo"  # called once in every complete tick


class Clock:
    """Monotonic ns that move with the driver's ticks, 200 ms each, and when told."""

    def __init__(self, state):
        self.state = state
        self.extra_ns = 0

    def __call__(self):
        return self.state.calls[TICKED] * SECOND // 5 + self.extra_ns


@contextmanager
def source(state, uuid=A, environ=None, **settings):
    settings = {"interval_seconds": 0.001, "clock": Clock(state)} | settings
    made = NvmlSource(uuid if callable(uuid) else lambda: uuid, environ=environ or {}, **settings)
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


def outcome(made):
    """The sample, or the reason why it is missing, as text."""
    try:
        return made.read()
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
    return until(lambda: text if isinstance(text := outcome(made), str) and part in text else None)


def read_one(state, **settings):
    with source(state, **settings) as made:
        return sample(state, made)


def partitioned(**settings):
    migs = [
        Mig(uuid=M1, gpu_instance=7, memory_used=1 << 30),
        Mig(uuid=M2, gpu_instance=8, memory_used=2 << 30),
    ]
    return Gpu(uuid=B, mig_enabled=True, mig=migs, **settings)


# -- the fake driver of each test --------------------------------------------------------------------------------------


@pytest.fixture
def state():
    state = State()
    with fake.installed(state):
        yield state
        for release in list(state.hang.values()):
            release.set()
        # A thread of this test must be gone before the next one installs another driver.
        until(lambda: not nvml_threads())


# -- readings of the NVML source and their units, from the real binding above a fake driver ----------------------------


def test_every_reading_in_base_units(state):
    state.gpus = [Gpu(gpm=True, throttle=0x004 | 0x040)]
    assert read_one(state) == GpuSample(
        index=0, uuid=A, name="NVIDIA Fake H100", utilization_ratio=0.80, sm_active_ratio=0.625, sm_active_source="gpm",
        sm_occupancy_ratio=0.25, tensor_active_ratio=0.125, memory_bandwidth_ratio=0.40, memory_used_bytes=20 << 30,
        memory_total_bytes=80 << 30, power_watts=350.5, energy_joules=9_000_000.5, temperature_celsius=61.0,
        sm_clock_hertz=1.98e9, sm_clock_max_hertz=1.98e9, throttled=("sw_power_cap", "hw_thermal"),
    )  # fmt: skip


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
    names = [name for name in fake.FUNCTIONS if name.startswith("nvmlDeviceGet")]
    identity = {"Count_v2", "HandleByIndex_v2", "HandleByUUID", "UUID", "Name", "Index", "MigMode"}
    state.errors = {name: fake.UNKNOWN for name in names if name.removeprefix("nvmlDeviceGet") not in identity}
    with source(state) as made:
        reason(made, "Unknown Error")


@pytest.mark.parametrize(("bits", "reasons"), [(0x001, ()), *((bit, (name,)) for name, bit in THROTTLE_BITS.items())])
def test_each_throttle_reason_by_its_label(state, bits, reasons):
    """An idle GPU is not throttled."""
    state.gpus[0].throttle = bits
    assert read_one(state).throttled == reasons


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


# -- which device the NVML source reads: the one that torch uses, or a MIG device of it --------------------------------


IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def several():
    return [Gpu(uuid=A), Gpu(uuid=B, utilization=11), Gpu(uuid=AB, utilization=22)]


@pytest.mark.parametrize("uuid", [B, B.removeprefix("GPU-")])
def test_the_device_that_torch_names(state, uuid):
    state.gpus = several()
    reading = read_one(state, uuid=uuid, environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert (reading.index, reading.uuid, reading.utilization_ratio) == (1, B, 0.11)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": B}, B),
        ({"CUDA_VISIBLE_DEVICES": B[:8]}, B),
        ({"CUDA_VISIBLE_DEVICES": B[:6]}, B),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaaa"}, A),
        ({"CUDA_VISIBLE_DEVICES": "1", **IN_ORDER}, B),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0", **IN_ORDER}, B),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0", **IN_ORDER}, B),
        ({"CUDA_VISIBLE_DEVICES": f"{B},x,{A}"}, B),
    ],
)
def test_the_one_visible_device_before_cuda_is_initialised(state, environ, expected):
    state.gpus = several()
    assert read_one(state, uuid=None, environ=environ).uuid == expected


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "5", "0,0", "GPU-ffff", "GPU-aaaa", "MIG-ffff"])
def test_no_visible_gpu_ends_the_thread(state, visible):
    state.gpus = several()
    environ = {"CUDA_VISIBLE_DEVICES": visible} | IN_ORDER
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


NOT_KNOWN = {
    "a UUID that NVML does not know": (several, "ffffffff", {}, "no device with the UUID ffffffff"),
    "several GPUs": (several, None, {}, "not known before CUDA is initialised"),
    # CUDA's order is not NVML's, unless it is told to be.
    "an index": (several, None, {"CUDA_VISIBLE_DEVICES": "1"}, "not known before CUDA"),
    "two indexes": (several, None, {"CUDA_VISIBLE_DEVICES": "0,1"} | IN_ORDER, "not known before CUDA"),
    "two UUIDs": (several, None, {"CUDA_VISIBLE_DEVICES": f"{A},{B}"}, "not known before CUDA"),
    "several MIG devices": (lambda: [partitioned()], None, {}, "which MIG device it uses is not known"),
    "an index beside a partitioned GPU": (
        lambda: [Gpu(uuid=A), partitioned()], None, {"CUDA_VISIBLE_DEVICES": "0"} | IN_ORDER, "not known before CUDA"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gpus", "uuid", "environ", "text"), NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_with_a_choice_the_device_is_not_guessed(state, gpus, uuid, environ, text):
    state.gpus = gpus()
    with source(state, uuid=uuid, environ=environ) as made:
        reason(made, text)
        assert nvml_threads()  # it goes on asking torch


def test_a_partitioned_gpu_without_a_mig_device(state):
    state.gpus = [Gpu(mig_enabled=True)]
    with source(state, uuid=None) as made:
        reason(made, "there is no MIG device")


# -- SM activity of the NVML source: hardware counters, the process statistics, or none --------------------------------


def test_gpm_needs_two_samples(state):
    """The first tick has nothing to compare with; it must neither invent a value nor use another source."""
    state.gpus = [Gpu(gpm=True, processes=[Process()])]
    with source(state, interval_seconds=3600) as made:
        until(lambda: not isinstance(outcome(made), str))
        reading = made.read()
    assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)
    assert state.calls["nvmlGpmMetricsGet"] == 0


def test_gpm_samples_lie_more_than_100_ms_apart(state):
    """Under a faster interval the pair is kept until it is old enough."""
    state.gpus = [Gpu(gpm=True)]
    clock = Clock(state)
    with source(state, clock=lambda: clock() // 10) as made:  # 20 ms a tick
        until(lambda: not isinstance(outcome(made), str) and made.read().sm_active_ratio == 0.625)
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
        state.gpus[0].gpm_values = dict.fromkeys((2, 3, 5, 10), 100.0)
        after_gpm.set()
        assert sample(state, made).sm_active_ratio == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 250.0])
def test_gpm_values_that_are_none_are_none(state, value):
    state.gpus = [Gpu(gpm=True)]
    state.gpus[0].gpm_values[2] = value
    state.gpus[0].gpm_values[3] = 100.2
    reading = read_one(state)
    assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)
    assert reading.sm_occupancy_ratio == 1.0
    assert reading.tensor_active_ratio == 0.125


def test_each_gpm_metric_has_its_own_return_code(state):
    state.gpus = [Gpu(gpm=True, gpm_returns={5: fake.NOT_SUPPORTED})]
    reading = read_one(state)
    assert reading.tensor_active_ratio is None
    assert reading.memory_bandwidth_ratio == 0.40


def test_only_the_metrics_asked_for_are_touched(state):
    state.gpus = [Gpu(gpm=True)]
    read_one(state)
    request = state.arguments["nvmlGpmMetricsGet"][0]._obj
    assert request.numMetrics == 4
    assert [request.metrics[slot].metricId for slot in range(5)] == [2, 3, 5, 10, 0]


def test_gpm_that_is_refused_gives_way_to_the_process(state):
    """A virtual GPU may say it has the counters, and then not let them be read."""
    state.gpus = [Gpu(gpm=True, processes=[Process(sm=30)])]
    state.errors = {"nvmlGpmSampleGet": fake.NO_PERMISSION}
    reading = read_one(state)
    assert (reading.sm_active_ratio, reading.sm_active_source) == (0.30, "process")
    assert not state.gpm_buffers


def test_gpm_that_is_refused_later_is_absent_and_tried_again(state):
    """The figure must not change its meaning in mid-run."""
    state.gpus = [Gpu(gpm=True, processes=[Process(sm=30)])]
    with source(state) as made:
        until(lambda: not isinstance(outcome(made), str) and made.read().sm_active_source == "gpm")
        state.errors = {"nvmlGpmSampleGet": fake.NO_PERMISSION}
        reading = sample(state, made)
        assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)
        before = Counter(state.calls)
        ticks(state, 200)
        assert 2 <= state.calls["nvmlGpmSampleGet"] - before["nvmlGpmSampleGet"] <= 10
        state.errors = {}
        until(lambda: made.read().sm_active_source == "gpm")


def test_without_gpm_the_share_of_this_process(state):
    state.gpus[0].processes = [Process(pid=1, sm=90), Process(sm=20, age_seconds=0.9), Process(sm=40)]
    reading = read_one(state)
    assert (reading.sm_active_ratio, reading.sm_active_source) == (0.40, "process")
    assert reading.sm_occupancy_ratio is None


def test_a_process_seen_before_and_not_now_is_idle(state):
    state.gpus[0].processes = [Process(sm=40)]
    with source(state) as made:
        assert sample(state, made).sm_active_ratio == 0.40
        state.gpus[0].processes = []  # the driver answers "not found"
        reading = sample(state, made)
        assert (reading.sm_active_ratio, reading.sm_active_source) == (0.0, "process")
        state.gpus[0].processes = [Process(pid=1, sm=90)]
        assert sample(state, made).sm_active_ratio == 0.0


@pytest.mark.parametrize("processes", [[], [Process(pid=1, sm=90)]])
def test_a_process_never_seen_has_no_reading(state, processes):
    """In a container the driver may know us by another pid: that is not idleness."""
    state.gpus[0].processes = processes
    reading = read_one(state)
    assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)


def test_rubbish_of_a_process_is_no_reading(state):
    state.gpus[0].processes = [Process(sm=4_294_967)]
    assert read_one(state).sm_active_ratio is None


def test_pids_of_every_namespace_are_ours(tmp_path):
    from telemetry.sources.nvml import own_pids

    status = tmp_path / "status"
    status.write_text("Name:\tpython\nNSpid:\t4242\t17\n")
    assert own_pids(status) == {4242, 17, os.getpid()}
    assert own_pids(tmp_path / "none") == {os.getpid()}


def test_a_gpu_that_offers_neither(state):
    state.errors = {"nvmlDeviceGetProcessUtilization": fake.NOT_SUPPORTED}
    reading = read_one(state)
    assert (reading.sm_active_ratio, reading.utilization_ratio) == (None, 0.80)


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
    with source(state, clock=clock, interval_seconds=0.001) as made:
        until(lambda: state.hanging)
        clock.extra_ns = 600 * SECOND
        after = state.hang_in("nvmlDeviceGetUtilizationRates")
        release.set()
        until(lambda: "nvmlDeviceGetUtilizationRates" in state.hanging)
        assert outcome(made) == "the newest NVML reading is over 1 s old"
        after.set()
        sample(state, made)


def test_a_stale_sample_is_not_returned(state):
    clock = Clock(state)
    with source(state, clock=clock, interval_seconds=3600) as made:
        until(lambda: not isinstance(outcome(made), str))
        clock.extra_ns = 3 * 3600 * SECOND
        assert "over 10800 s old" in outcome(made)


def test_a_hang_blocks_neither_reading_nor_closing_nor_the_exit(tmp_path):
    """In a process of its own, so that its end is really seen."""
    environment = fake.subprocess_environment(tmp_path, hang=("nvmlDeviceGetPowerUsage",))
    code = (
        "import time\n"
        "from telemetry.sources.nvml import NvmlSource\n"
        "from telemetry.sources.collector import CollectorError\n"
        "source = NvmlSource(lambda: None, environ={}, deadline_seconds=0.05)\n"
        "end = time.monotonic() + 60\n"
        "reason = ''\n"
        "while 'has not returned' not in reason and time.monotonic() < end:\n"
        "    try:\n"
        "        source.read()\n"
        "    except CollectorError as error:\n"
        "        reason = str(error)\n"
        "    time.sleep(0.01)\n"
        "source.close()\n"
        "raise SystemExit(0 if 'has not returned' in reason else reason or 'no reason')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlGpmSampleGet"])
@pytest.mark.parametrize("code", [fake.GPU_IS_LOST, fake.UNINITIALIZED])
def test_a_gpu_that_is_lost_and_comes_back(state, function, code):
    state.gpus = [Gpu(gpm=True)]
    with source(state) as made:
        sample(state, made)
        state.errors = {function: code}
        before = state.calls["nvmlInitWithFlags"]
        text = reason(made, function)
        assert text.endswith("GPU is lost" if code == fake.GPU_IS_LOST else "Uninitialized")
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
        return A

    with source(state, uuid=uuid) as made:
        reason(made, "RuntimeError: boom")
        answers["fail"] = False
        sample(state, made)


def test_no_driver_leaves_no_thread(state):
    """On most machines without a GPU there is not even the library."""
    with fake.no_driver(), source(state) as made:
        until(lambda: not nvml_threads())
        for _ in range(3):
            assert outcome(made) == "no NVIDIA driver: libnvidia-ml.so.1 is missing"
            until(lambda: not nvml_threads())


def test_a_driver_that_is_installed_later_is_found(state):
    with fake.no_driver():
        made = NvmlSource(lambda: A, interval_seconds=0.001, environ={}, clock=Clock(state))
        until(lambda: not nvml_threads())
    try:
        sample(state, made)
    finally:
        made.close()


def test_the_binding_may_be_missing(state, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with source(state) as made:
        until(lambda: not nvml_threads())
        assert "nvidia-ml-py is not installed" in outcome(made)


def test_a_poller_sees_it_come_up(state):
    with source(state) as made:
        until(lambda: not isinstance(outcome(made), str))
        poller = Poller(made)
        assert poller.poll() is not None
        assert poller.health.up is True
        assert poller.health.name == "nvml"


# -- the thread of the NVML source, and the summary for the doctor -----------------------------------------------------


def test_gpm_buffers_do_not_leak(state):
    state.gpus = [Gpu(gpm=True)]
    with source(state, interval_seconds=0.0001) as made:
        ticks(state, 1000)
        assert state.calls["nvmlGpmMetricsGet"] >= 990
        assert len(state.gpm_buffers) == 2
        assert outcome(made).sm_active_ratio == 0.625
    until(lambda: not nvml_threads())
    assert state.gpm_allocated == 2
    assert not state.gpm_buffers
    assert state.initialised == 0


def test_only_its_own_thread_calls_nvml(state):
    with source(state) as made:
        sample(state, made)
    until(lambda: not nvml_threads())
    assert state.callers == {"telemetry-nvml"}


def test_the_thread_ends_on_close(state):
    with source(state, interval_seconds=3600) as made:
        assert nvml_threads() == ["telemetry-nvml"]
        until(lambda: not isinstance(outcome(made), str))
        made.close()
        until(lambda: not nvml_threads())
        assert outcome(made) == "the NVML source is closed"
        assert not nvml_threads()
    made.close()


def test_the_thread_tells_its_processor_time(state):
    with source(state) as made:
        sample(state, made)
        first = until(made.cpu_seconds)
        until(lambda: made.cpu_seconds() > first)


def test_processor_time_counts_on_over_restarts(state):
    used = [0.0]
    with fake.no_driver(), source(state) as made:
        for _ in range(40):
            until(lambda: not nvml_threads())
            used.append(made.cpu_seconds())
            outcome(made)
    assert used == sorted(set(used))


def test_a_forked_child_is_inert(state):
    release = state.hang_in("nvmlDeviceGetPowerUsage")
    with source(state) as made:
        until(lambda: state.hanging)
        threads._guard.acquire()  # the parent's thread may hold it at the moment of the fork
        pid = os.fork()
        if pid == 0:
            calls = Counter(state.calls)
            made.after_fork_in_child()
            text = outcome(made)
            made.close()
            inert = text == "a forked child does not sample the GPU" and made.cpu_seconds() == 0.0
            os._exit(0 if inert and state.calls == calls and nvml_threads() == [] else 1)
        threads._guard.release()
        ended = until(lambda: status if (status := os.waitpid(pid, os.WNOHANG))[0] else None)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        release.set()
        sample(state, made)


def test_a_state_file_is_read_again_at_each_call(state, tmp_path):
    """What the tests of whole training processes stand on."""
    path = tmp_path / "nvml.json"
    fake.write_state(path, State(gpus=[Gpu(gpm=True, processes=[Process()]), partitioned()]))
    seen = fake.install(path)
    with source(seen) as made:
        assert sample(seen, made).sm_active_ratio == 0.625
        fake.write_state(path, State(gpus=[Gpu(gpm=True, utilization=7), partitioned()]))
        until(lambda: made.read().utilization_ratio == 0.07)
        fake.write_state(path, State(errors={"nvmlDeviceGetPowerUsage": fake.GPU_IS_LOST}))
        reason(made, "GPU is lost")


def test_importing_the_module_does_not_import_the_binding():
    code = "import sys, telemetry.sources.nvml; raise SystemExit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


# --- the doctor's view


def test_summary_of_each_gpu(state):
    state.gpus = [Gpu(uuid=A, gpm=True), partitioned(), Gpu(uuid=AB), Gpu(lost=True)]
    first, second, third, lost = device_summary()
    assert first == {
        "index": 0,
        "uuid": A,
        "name": "NVIDIA Fake H100",
        "driver_version": "570.00",
        "sm_source": "gpm",
        "mig": False,
        "error": None,
    }
    assert (second["mig"], second["sm_source"]) == (True, None)
    assert third["sm_source"] == "process"
    assert lost["error"].endswith("GPU is lost")
    until(lambda: state.initialised == 0)


def test_the_doctor_takes_a_real_sample_of_the_counters(state):
    state.gpus = [Gpu(gpm=True)]
    state.errors = {"nvmlGpmSampleGet": fake.NO_PERMISSION}
    (gpu,) = device_summary()
    assert gpu["sm_source"] == "process"
    assert not state.gpm_buffers


def test_summary_without_a_driver(state):
    with fake.no_driver(), pytest.raises(CollectorError, match="no NVIDIA driver"):
        device_summary()


def test_summary_of_a_driver_that_hangs(state):
    release = state.hang_in("nvmlInitWithFlags")
    with pytest.raises(CollectorError, match=r"NVML has not answered for 0.05 s \(nvmlInit\)"):
        device_summary(timeout_seconds=0.05)
    release.set()


def test_the_reasons_are_those_the_endpoint_knows():
    assert set(THROTTLE_BITS) == set(THROTTLE_REASONS)
