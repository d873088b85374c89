"""The thread of the NVML source, and the summary for the doctor."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fakes import nvml as fake
from fakes.nvml import Gpu, Process, State

from telemetry.records import THROTTLE_REASONS
from telemetry.sources.collector import CollectorError
from telemetry.sources.nvml import THROTTLE_BITS, device_summary
from telemetry.util import threads
from tests.nvml.nvml_harness import AB, A, nvml_threads, outcome, partitioned, reason, sample, source, ticks, until

# --- the thread, and what it holds


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
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


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
