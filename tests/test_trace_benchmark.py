"""The parts of the trace benchmark run. Nothing here judges a time."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from benchmarks import child
from benchmarks import trace as benchmark
from telemetry.trace.reader import read_trace


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_repeated_events_are_a_trace_with_the_same_steps_many_times(tmp_path, name):
    target = tmp_path / name
    count = benchmark.write_trace(benchmark.EVENTS, target, 6_000_000)
    data = target.read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
    assert len(events) == count
    once, often = read_trace(benchmark.EVENTS), read_trace(target)
    assert len(often.steps) % len(once.steps) == 0
    assert len(often.steps) > len(once.steps)
    assert len({step.step for step in often.steps}) == len(often.steps)
    assert often.average.categories == pytest.approx(once.average.categories, abs=1e-6)


def test_a_command_is_measured_with_memory_of_its_own():
    held = bytearray(200 << 20)  # what this process holds is not the child's
    cost = benchmark.measure([sys.executable, "-c", "import time; b = bytearray(50 << 20); time.sleep(0.3)"])
    assert 50 < cost.mib < 150
    assert cost.seconds > 0.3
    assert cost.cpu_seconds > 0
    del held
    with pytest.raises(child.ChildError, match="no such thing"):
        benchmark.measure([sys.executable, "-c", "raise SystemExit('no such thing')"])


def test_without_hta_its_rows_say_so(tmp_path):
    benchmark.write_trace(benchmark.EVENTS, tmp_path / "t.json", 1000)
    rows = benchmark.compare(tmp_path / "t.json", 1, None, "it is not here")
    ours = [row for row in rows if row.name.startswith("telemetry")]
    assert len(ours) == 3
    assert all(row.figure is not None for row in ours)
    assert {row.note for row in rows if row not in ours} == {"it is not here"}
