"""A training loop for scripts that take snapshots, and functions that run such a script and look at what it left."""

from __future__ import annotations

import gzip
import json
import textwrap

from faults.processes import events, write
from tests.faults.warm_python import warm_python

LOOP = """
import json, os, sys, threading, time, torch, telemetry
from pathlib import Path
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.ones(4)


def start(**settings):
    return telemetry.start("run", start_line=False, interval_seconds=0.1, **settings)


def loop(until, steps=2):
    skipped = -1
    for batch in DataLoader(Ones(), batch_size=4):
        if agent.snapshots.counts["skipped"] > skipped:  # on a busy machine the plan may be read too late: once more
            skipped = agent.snapshots.counts["skipped"]
            telemetry.request_snapshot(steps=steps)
        torch.nn.functional.relu(batch * 2).sum()
        time.sleep(0.001)
        if until():
            return


def recorded():
    return agent.snapshots.counts["recorded"]


def recording():
    capture, plan = agent.snapshots._capture, agent.snapshots._capture._plan
    return plan is not None and capture._ended > plan.first_step


def on_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def run_loop(folder, body, *arguments, status=0, says="", **options):
    """Run a script that begins with `LOOP`. It must end with this status, and say nothing on stderr, or this."""
    script = write(folder, "script.py", LOOP + textwrap.dedent(body))
    done = warm_python(script, *arguments, cwd=folder, **options)
    assert done.returncode == status, done.stderr
    assert (says in done.stderr) if says else (done.stderr == ""), done.stderr
    return done


def snapshot_lines(folder) -> list[dict]:
    """The lines of the log, without those of plans that were read too late."""
    return [each for each in events(folder / "run", "snapshot") if "before it read" not in (each["why"] or "")]


def whole(path) -> bool:
    return bool(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
