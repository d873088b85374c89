"""A snapshot's trace is exported on a thread, which cannot be started at every moment."""

from __future__ import annotations

import gzip
import json

from faults.processes import events, write
from tests.faults.warm_python import warm_python

SCRIPT = """
import os, sys, time, torch, telemetry
from telemetry.core import own_threads
from telemetry.snapshot.store import TraceStore
from torch.utils.data import DataLoader, TensorDataset


def refuse(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def loop(until, steps=2):
    telemetry.request_snapshot(steps=steps)
    while True:
        for (batch,) in DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=4):
            torch.relu(batch)
            time.sleep(0.001)
            if until():
                return


def recording():
    plan = agent.snapshots._capture._plan
    return plan is not None and agent.snapshots._capture._ended > plan.first_step


def fork(stage):
    "Say what a child that is forked now, as a worker is, has open in the run folder, the log aside."
    if stage == "saved" and not (child := os.fork()):
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        print("open", [link for link in links if "/run/snapshots" in link], flush=True)
        os._exit(0)
    elif stage == "saved":
        os.waitpid(child, 0)


if sys.argv[1] == "fork":
    publish = TraceStore.publish
    TraceStore.publish = lambda self, trace, folder, name, extra_events: publish(
        self, trace, folder, name, extra_events=extra_events, on_stage=fork
    )
agent = telemetry.start("run", start_line=False, interval_seconds=0.1, snapshot_max_seconds=600)
if sys.argv[1] == "exit":
    loop(recording, 50)
    own_threads.start_new_thread = refuse  # as Python 3.12 does once the script has come to its end
elif sys.argv[1] == "fork":
    loop(lambda: agent.snapshots.counts["recorded"])
else:
    start, own_threads.start_new_thread = own_threads.start_new_thread, refuse
    loop(lambda: agent.snapshots.counts["refused"])
    own_threads.start_new_thread = start
    loop(lambda: agent.snapshots.counts["recorded"])
    telemetry.stop()
    print(own_threads.running())
"""


def test_a_recording_cut_short_by_the_exit_needs_no_new_thread(tmp_path):
    done = warm_python(write(tmp_path, "script.py", SCRIPT), "exit", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = events(tmp_path / "run", "snapshot")
    assert line["result"] == "recorded"
    assert json.loads(gzip.decompress((tmp_path / "run" / line["path"]).read_bytes()))["traceEvents"]
    assert events(tmp_path / "run", "run_end"), "it does not hold up the end"


def test_without_a_thread_there_is_no_recording_and_the_next_one_is_made(tmp_path):
    done = warm_python(write(tmp_path, "script.py", SCRIPT), "loop", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    refused, recorded = events(tmp_path / "run", "snapshot")
    assert (refused["result"], recorded["result"]) == ("refused", "recorded")
    assert "no thread to save it" in refused["why"]


def test_a_worker_forked_during_an_export_keeps_none_of_its_files(tmp_path):
    """Otherwise the disk space of removed files would stay in use as long as the worker lives."""
    done = warm_python(write(tmp_path, "script.py", SCRIPT), "fork", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "open []\n"), done.stderr
