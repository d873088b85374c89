"""A training loop for scripts that take snapshots, and a function that lists the files that are left."""

from __future__ import annotations

import gzip
import json

LOOP = """
import os, sys, time, torch, telemetry
from torch.utils.data import DataLoader


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.ones(4)


def loop(agent, until, steps=2):
    telemetry.request_snapshot(steps=steps)
    for batch in DataLoader(Numbers(), batch_size=4):
        torch.nn.functional.relu(batch * 2).sum()
        time.sleep(0.001)
        if until():
            return


def recording(agent):
    capture, plan = agent.snapshots._capture, agent.snapshots._capture._plan
    return plan is not None and capture._ended > plan.first_step


def start(**settings):
    return telemetry.start("run", start_line=False, interval_seconds=0.1, **settings)
"""


def whole(path) -> bool:
    return bool(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def partial(folder) -> list[str]:
    return [str(path) for path in folder.rglob(".partial-*")]
