"""SM activity of the NVML source: hardware counters, the process statistics, or none."""

import os
from collections import Counter

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu, Process

from tests.nvml.nvml_harness import SECOND, TICKED, Clock, outcome, read_one, sample, source, ticks, until

# --- how busy the SMs are, and who says so


def test_gpm_needs_two_samples(state):
    """The first tick has nothing to compare with; it must neither invent a value nor use another source."""
    state.gpus = [Gpu(gpm=True, processes=[Process()])]
    with source(state, interval_seconds=3600) as made:
        until(lambda: not isinstance(outcome(made), str))
        reading = made.read()
    assert reading.sm_active_ratio is None
    assert reading.sm_active_source is None
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
    assert reading.sm_active_ratio is None
    assert reading.sm_active_source is None
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
    assert reading.sm_active_ratio is None
    assert reading.sm_active_source is None


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
    assert (reading.sm_active_ratio, reading.sm_active_source) == (None, None)
    assert reading.utilization_ratio == 0.80
