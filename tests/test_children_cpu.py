"""CPU time of a run's own short processes, such as a decoder for each sample: it is not that of other programs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.records import HostSample, ProcessSample
from telemetry.sources.proc import ProcessSource
from tests.monitored_rank import Run

BURN = "import time\nwhile time.process_time() < 0.2:\n    pass"


def test_a_child_that_has_ended_is_read():
    source = ProcessSource(threading.get_native_id)
    before = source.read()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = source.read()
    assert after.children_cpu_seconds - before.children_cpu_seconds > 0.1  # in ticks of 10 ms
    assert after.runnable_seconds is not None
    assert after.running_seconds is not None


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


@pytest.mark.parametrize(
    ("children", "used", "others"),
    [
        (lambda second: 1.0 * second, 1.5, 0.5),
        (lambda second: 5.0 * second, 0.5, 1.5),  # no second has so much: they lived for longer
        (lambda second: 3.0 * second, 2.0, 0.0),  # more than is in use
        (lambda second: 1000.0, 0.5, 1.5),  # before the agent began
    ],
)
def test_children_that_have_ended_are_no_other_programs(run, children, used, others):
    """Such as a decoder that the training thread starts for each sample."""
    run.samples["host"] = HostSample(0.5, 4, 0, 0)
    for second in range(1, 11):
        run.samples["process"] = ProcessSample(second / 2, 0, 1, children_cpu_seconds=children(second))
        run.request(second - 0.5, second - 0.1)
        run.tick(second, cpu_ratio=0.0)
    cpu = run.builder.totals.sampled.cpu
    assert cpu.used_cores.mean == pytest.approx(used, rel=0.12)
    assert cpu.other_cores.mean == pytest.approx(others, rel=0.12, abs=0.2)
