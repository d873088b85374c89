"""What limits a snapshot: steps of very many operators, a kill during the export, and disks without room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from faults.processes import environment, events, results, write
from faults.snapshot_scripts import run_loop, snapshot_lines
from telemetry.snapshot import budget
from tests.faults.warm_python import warm_python

MIB = 1 << 20

MANY_OPERATORS = """
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
    "The steps are large from the one that is counted, or only from the first to record."
    if agent is None:
        return True
    capture, plan = agent.snapshots._capture, agent.snapshots._capture._plan
    return plan is not None and capture._ended >= plan.first_step - (3 if grows_at == "count" else 1)


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
    script, peaks = write(tmp_path, "script.py", MANY_OPERATORS), []
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
    monkeypatch.setattr(budget, "free_memory", lambda: 1 << 30)
    alone, eight = (budget.Budget.now(256 * MIB, 1.0, ranks=ranks, shapes=False) for ranks in (1, 8))
    assert (alone.memory_bytes, eight.memory_bytes) == (256 * MIB, 32 * MIB)
    assert eight.operators == 32 * MIB // 2048 < alone.operators
    assert "32 MiB of memory, this rank's share of what is free" in eight.why_more(10**6, at_least=False)


# -- the export ----------------------------------------------------------------------------------------------------

KILLED = """
import glob, signal
from telemetry.snapshot import capture, store


def kill_at(owner, name, *, after=False):
    original = getattr(owner, name)

    def killed(*arguments):
        if after:
            original(*arguments)
        with open("left.json", "w") as file:
            json.dump(sorted(map(os.path.basename, glob.glob("run/snapshots/.partial-*/*"))), file)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killed)


stage = sys.argv[1]
if stage == "saving":
    kill_at(capture.RecordedTrace, "save", after=True)
elif stage == "saved":
    kill_at(store.TraceStore, "_compress")
elif stage == "compressed":
    kill_at(store, "_unpacked_size")
else:
    kill_at(store.TraceStore, "_remove_oldest")
agent = start()
loop(lambda: agent.snapshots.counts["failed"])
"""


@pytest.mark.parametrize(
    ("stage", "left"), [("saving", ["trace.json"]), ("saved", []), ("compressed", ["packed"]), ("verified", ["packed"])]
)
def test_a_kill_at_any_stage_publishes_nothing_and_is_cleared_up(tmp_path, stage, left):
    run_loop(tmp_path, KILLED, stage, status=-9)
    assert json.loads((tmp_path / "left.json").read_text()) == left
    assert not list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    run_loop(tmp_path, "start(max_snapshots=0)\ntelemetry.stop()\n")
    assert not list(tmp_path.glob("run/snapshots/.partial-*"))


FULL = """
import json, os, shutil
from pathlib import Path
from telemetry.snapshot import agree, store

store.MIN_FREE_BYTES = -(1 << 40)  # not to be stopped by the look at the free space beforehand
store._PROBE_BYTES = 1
here = Path("full/run/snapshots")
content = b'{"traceEvents": [' + b",".join(b'"%s"' % os.urandom(30).hex().encode() for _ in range(600)) + b"]}"


class Trace:
    def save(self, path):
        path.write_bytes(content)
        return 0.0

    def free(self):
        return 0.0


def fill(pages):
    filler.unlink(missing_ok=True)
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 4096 * pages))


filler = Path("full/filler")
outcomes = []
request = agree.Request("1700000000000-a", agree.API, agree.REQUEST, None, 5, "a test")
plan = agree.Plan(request, None, 5, 9, (0,), "request-step5", 1)
for pages in range(40):
    fill(pages)
    trace_store = store.TraceStore(here, "node", max_bytes=1 << 20, disk_bytes=1 << 20)
    try:
        trace_store.publish(Trace(), plan, "rank-0.gz", most_bytes=1 << 20)
        outcomes.append("kept")
    except (OSError, store.StoreError) as error:
        outcomes.append(type(error).__name__)
    filler.unlink()
    files = [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
    assert files == (["request-step5/rank-0.gz"] if outcomes[-1] == "kept" else []), (pages, outcomes[-1], files)
    assert not [*here.glob(".partial-*")]
    shutil.rmtree(here, ignore_errors=True)
with open("results.json", "w") as file:
    json.dump(outcomes, file)
"""


def test_a_disk_that_is_full_at_any_stage(tmp_path):
    """A private file system, filled up to a number of free pages, so that the export fails at each of its stages."""
    (tmp_path / "full").mkdir()
    script = write(tmp_path, "full.py", FULL)
    mount = f"mount -t tmpfs -o size=512k,mode=700 none full && exec {sys.executable} {script}"
    namespace = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own needs mount namespaces")
    done = subprocess.run(
        [*namespace, "sh", "-c", mount], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    outcomes = results(tmp_path)
    assert outcomes[0] != "kept"
    assert outcomes[39] == "kept"
    assert {"OSError", "kept"} <= set(outcomes)


def test_no_room_is_seen_beforehand_and_told(tmp_path):
    run_loop(
        tmp_path,
        """
        from telemetry.snapshot import store
        store.MIN_FREE_BYTES = 1 << 60
        agent = start()
        loop(lambda: agent.snapshots.counts["failed"])
        telemetry.stop()
        """,
    )
    (line,) = snapshot_lines(tmp_path)
    assert (line["result"], line["path"]) == ("failed", None)
    assert "no room" in line["why"]
