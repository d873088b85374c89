"""Steps of so many operators that the profiler would take gigabytes for them, and seconds to stop."""

from __future__ import annotations

import json

import pytest

from faults.processes import events, write
from telemetry.snapshot import budget
from tests.faults.warm_python import warm_python

MIB = 1 << 20

SCRIPT = """
import json, sys, torch, telemetry
from torch.utils.data import DataLoader

torch.set_num_threads(1)
operators, grows_at, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
agent = None
if how != "bare":
    agent = telemetry.start("run", start_line=False, interval_seconds=0.1, **json.loads(how))


def step(number):
    first, second = torch.ones(4), torch.ones(4)
    for _ in range(number):
        first + second


def large():
    "The steps are large from the one before those to record, which is counted, or only from the first to record."
    if agent is None:
        return True
    capture, plan = agent.snapshots._capture, agent.snapshots._capture._plan
    return plan is not None and capture._ended >= plan.first_step - (2 if grows_at == "count" else 1)


steps = 0
for _ in DataLoader(range(100_000)):
    steps += 1
    if steps == 10 and agent is not None:
        telemetry.request_snapshot(steps=3)
    if agent is not None and sum(agent.snapshots.counts.values()) or agent is None and steps == 3:
        break
    step(operators if large() else 300)
telemetry.stop()
with open("/proc/self/status") as status:
    peak, = (int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    step(7)
assert sum(event.name == "aten::add" for event in profiler.events()) == 7, "the script's own profiler sees its operators"
print(json.dumps({"peak": peak}))
"""


def run(tmp_path, operators: int, grows_at: str = "count", **settings) -> tuple[dict, int]:
    """The line of the snapshot, and by how many bytes the peak of memory is above that of a run without the agent."""
    script, peaks = write(tmp_path, "script.py", SCRIPT), []
    for how in ("bare", json.dumps(settings)):
        done = warm_python(script, operators, grows_at, how, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak"])
    (line,) = events(tmp_path / "run", "snapshot")
    return line, peaks[1] - peaks[0]


def test_ordinary_steps_have_a_whole_trace(tmp_path):
    line, _ = run(tmp_path, 300)
    assert (line["result"], line["why"]) == ("recorded", None)
    assert line["last_step"] - line["first_step"] == 2


@pytest.mark.parametrize(("operators", "steps"), [(25_000, 2), (60_000, 1)])
def test_of_larger_steps_those_are_recorded_that_fit(tmp_path, operators, steps):
    line, more = run(tmp_path, operators)
    assert line["result"] == "recorded"
    assert line["last_step"] == line["first_step"] + steps - 1
    assert "cut short: a step has" in line["why"]
    assert more < 256 * MIB


@pytest.mark.parametrize("operators", [200_000, 1_000_000])
@pytest.mark.parametrize("grows_at", ["count", "record"])
def test_steps_of_too_many_operators_are_not_recorded(tmp_path, operators, grows_at):
    line, more = run(tmp_path, operators, grows_at)
    assert line["result"] == "refused"
    assert "1 s (snapshot_pause_seconds)" in line["why"]
    assert more < 256 * MIB


def test_ranks_share_a_part_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda: iter([64 << 30, 1 << 30]))
    alone, eight = (budget.Budget.now(256 * MIB, 1.0, ranks=ranks, shapes=False) for ranks in (1, 8))
    assert (alone.memory_bytes, eight.memory_bytes) == (256 * MIB, 32 * MIB)
    assert eight.operators == 32 * MIB // 2048 < alone.operators
    assert "32 MiB of memory, this rank's share of what is free" in eight.why_more(10**6, at_least=False)
