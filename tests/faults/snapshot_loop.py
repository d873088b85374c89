"""A training loop for scripts that take snapshots. It imports what they need."""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import telemetry
from tests.faults.inside import agent, tell, until

__all__ = [
    "DataLoader", "Ones", "Path", "ProfilerActivity", "agent", "count", "glob", "json", "loop", "on_thread",
    "os", "profile", "recorded", "recording", "signal", "start", "sys", "telemetry", "tell", "threading", "time", "torch", "until",
]  # fmt: skip


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.ones(4)


def start(**settings):
    return telemetry.start("run", **settings)


def count(result: str) -> int:
    """How many snapshots have ended so."""
    return agent().snapshots.counts[result]


def loop(until, steps=2):
    """Train, and ask for snapshots, until something is so."""
    skipped = -1
    for batch in DataLoader(Ones(), batch_size=4):
        if count("skipped") > skipped:  # on a busy machine the plan may be read too late: once more
            skipped = count("skipped")
            telemetry.request_snapshot(steps=steps)
        torch.nn.functional.relu(batch * 2).sum()
        time.sleep(0.001)
        if until():
            return


def recorded() -> int:
    return count("recorded")


def recording() -> bool:
    """The profiler has recorded a step, and more are to come."""
    capture = agent().snapshots._capture
    return capture._export is not None and capture._ended > capture._export.plan.first_step


def on_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
