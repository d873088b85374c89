"""Snapshots over a long run: they leave no memory, output or thread behind, and stop if they slow the run down."""

from __future__ import annotations

import os

from faults.processes import events, results, run_script, write
from faults.snapshot_scripts import LOOP
from tests.faults.warm_python import warm_python

CYCLES = """
import json, os, threading
from pathlib import Path
import torch
from torch import nn
from telemetry.hooks.attachment import Attachment
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.core import own_threads
from telemetry.publish.board import board_root
from telemetry.core import own_threads
from telemetry.snapshot import protocol as p
from telemetry.snapshot.budget import Budget, BudgetWatch
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.store import TraceStore
from loop import Numbers
from torch.utils.data import DataLoader

tracker = StepTracker(Ring())
attachment = Attachment(tracker, print)
attachment.attach()
capture = Capture(tracker, profilers=attachment.profilers, max_seconds=9,
                  metadata={"rank": 0, "world_size": 1})
trace_store = TraceStore(Path("run/snapshots"), Path("shared"), "node-1-1", 1 << 28, 1 << 18)
os.mkdir("shared", 0o700)
layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
iterator = iter(DataLoader(Numbers(), batch_size=4))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096




def threads():
    return threading.active_count() + len(own_threads.running())


grown, before = [], threads()
for cycle in range(220):
    now = tracker.ring.closed
    request = p.Request("1700000000000-a", p.API, p.REQUEST, None, 3, "a test")
    watch = BudgetWatch(Budget.now(256 << 20, 1.0, ranks=1, shapes=False))
    capture.arm(p.Plan(request, None, now + 3, now + 5, (0,), f"request-step{now + 3}", 1), watch)
    for _ in range(8):
        layers(next(iterator)).sum().backward()
    tracker.ring.drain(1 << 20)
    outcome = capture.take()
    assert outcome.result == "recorded", outcome
    trace_store.publish(outcome.trace, outcome.plan.folder, "rank-0.gz")
    del outcome
    if cycle >= 19:
        grown.append(resident())
kept = sum(path.stat().st_size for path in Path("run/snapshots").rglob("*"))
with open("results.json", "w") as file:
    json.dump({"grown": grown, "kept": kept, "threads": threads() - before,
               "files": len(os.listdir("/proc/self/fd"))}, file)
"""


def test_two_hundred_snapshots_leave_no_memory_behind(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    script = write(tmp_path, "script.py", CYCLES)
    done = warm_python(script, cwd=tmp_path, timeout=300)  # half a minute of work on an idle machine
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    grown = found["grown"]
    early, late = max(grown[:50]), max(grown[-50:])
    assert late - early < 8 << 20, f"{(late - early) >> 20} MiB in 150 snapshots of about 1 MiB each"
    assert found["kept"] < (1 << 18) + 65536, "the budget holds"
    assert found["threads"] == 0
    assert done.stderr == ""


def test_nothing_on_stderr_and_no_thread_left(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import os, json
        from loop import loop, start
        import telemetry
        from telemetry.core import own_threads
        agent = start()
        before = dict(os.environ)
        loop(agent, lambda: agent.snapshots.counts["recorded"])
        threads = own_threads.running()
        telemetry.stop()
        assert dict(os.environ) == before
        with open("results.json", "w") as file:
            json.dump({"threads": threads, "left": own_threads.running()}, file)
        """,
        tmp_path,
        run=warm_python,
    )
    assert (done.stdout, done.stderr) == ("", "")
    found = results(tmp_path)
    assert "telemetry-export" not in found["threads"]
    assert found["left"] in ([], ["telemetry-nvml"])


def test_inductor_is_not_loaded_for_it(tmp_path):
    """Torch's own function that prepares a profile imports all of Inductor, on the training thread."""
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import sys
        from loop import loop, start
        import telemetry
        before = set(sys.modules)
        agent = start()
        loop(agent, lambda: agent.snapshots.counts["recorded"])
        telemetry.stop()
        assert "torch._inductor" not in sys.modules
        """,
        tmp_path,
        run=warm_python,
    )


def test_a_folder_that_is_another_s_is_left_alone_and_told(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "elsewhere")
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        from loop import loop, start
        import telemetry
        agent = start(log_interval_seconds=0.1)
        assert telemetry.request_snapshot() is False
        while not agent.accounting.stats.steps > 20:
            loop(agent, lambda: agent.accounting.stats.steps > 20)
        telemetry.stop()
        """,
        tmp_path,
        run=warm_python,
    )
    assert os.listdir(tmp_path / "elsewhere") == []
    assert [line["source"] for line in events(tmp_path / "run", "error") if line["source"] == "snapshot"] == [
        "snapshot"
    ]


def test_training_on_another_thread_is_left_alone(tmp_path):
    """Kineto would write a line to stderr."""
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        import threading
        from loop import loop, start
        import telemetry

        def train():
            agent = start()
            loop(agent, lambda: sum(agent.snapshots.counts.values()))
            telemetry.stop()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
        tmp_path,
        run=warm_python,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], "main thread" in line["why"]) == ("refused", True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_run_that_stays_slower_after_a_snapshot_takes_no_more(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    run_script(
        """
        import time
        from loop import Numbers, start
        from torch.utils.data import DataLoader
        import telemetry
        agent = start(log_interval_seconds=0.1)
        began, asked, again = time.monotonic(), False, False
        for step, _ in enumerate(DataLoader(Numbers(), batch_size=4)):
            time.sleep(0.02 if agent.snapshots.counts["recorded"] else 0.01)
            if not asked and time.monotonic() - began > 3:
                asked = telemetry.request_snapshot()
            if not again and agent.snapshots._trigger.off:
                again = telemetry.request_snapshot()
            if agent.snapshots.counts["refused"] or time.monotonic() - began > 60:
                break
        telemetry.stop()
        """,
        tmp_path,
        run=warm_python,
    )
    recorded, refused = events(tmp_path / "run", "snapshot")
    assert (recorded["result"], refused["result"]) == ("recorded", "refused")
    assert "slower after a snapshot" in refused["why"]
    assert [line["message"] for line in events(tmp_path / "run", "error") if line["source"] == "snapshot"] == [
        refused["why"]
    ]
