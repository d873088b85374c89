"""Failures of the driver: hangs, lost GPUs, missing libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu

from telemetry.sources.collector import Poller
from telemetry.sources.nvml import NvmlSource
from tests.nvml.nvml_harness import SECOND, A, Clock, nvml_threads, outcome, reason, sample, source, until

# --- failures


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
        cwd=Path(__file__).parents[2],
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
