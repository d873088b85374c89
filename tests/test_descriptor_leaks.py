"""Every start and stop gives back all that it has opened."""

from __future__ import annotations

import gc
import os
import re

import pytest
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers

CYCLES = 8


def descriptors() -> list[str]:
    """What is open in this process: the names of the files, without the numbers in them."""
    gc.collect()
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # that of the listing itself
            continue
    return sorted(found)


def unusable(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    return {}


def no_port(tmp_path):
    return {"host": "203.0.113.7"}  # an address for documentation: this machine does not have it


@pytest.mark.parametrize("trouble", [None, unusable, no_port], ids=["well", "unusable run folder", "no port"])
@pytest.mark.parametrize("workers", [0, 2])
def test_descriptors_after_many_cycles_are_those_after_two(tmp_path, trouble, workers):
    settings = trouble(tmp_path) if trouble is not None else {}
    seen = []
    for cycle in range(CYCLES):
        telemetry.start(tmp_path / "run", **{"port": 0, "start_line": False, "interval_seconds": 0.1} | settings)
        for _ in DataLoader(Numbers(4), batch_size=1, num_workers=workers):
            pass
        telemetry.stop()
        if cycle in {1, CYCLES - 1}:
            seen.append(descriptors())
    assert seen[-1] == seen[0]
