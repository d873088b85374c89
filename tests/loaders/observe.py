"""What a job observes of its own loaders, as JSON: run bare and under the agent, and compared.

Usage: ``python observe.py GROUP RESULTS``. With ``TELEMETRY_DISABLED=1`` it is the bare run.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import sys
import threading
import time
from multiprocessing import forkserver

import telemetry

EPOCHS = 60


def depth(function: object) -> int:
    """How many wrappers a function has around it."""
    layers = 0
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function, layers = inner, layers + 1
    return layers


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    """Those of the job that are alive."""
    return sorted(t.name.split("-")[0] for t in threading.enumerate())


def left_over(count, before: int) -> int:
    """What has been added, after the agent has had time to read what is gone."""
    until = time.monotonic() + 5
    while (more := count() - before) > 0 and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    return max(0, more)


def raised(action) -> list[str]:
    """The type and the message of what it raises, if anything."""
    try:
        return ["returned", repr(action())]
    except BaseException as error:  # noqa: BLE001
        return [type(error).__name__, str(error).partition("\n")[0]]


def layers() -> dict[str, int]:
    """Wrappers around what runs in a worker."""
    from torch.utils.data._utils import fetch

    return {
        kind.__name__: depth(vars(kind)["fetch"]) for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    }


def observe(case) -> dict:
    """Run one case. Returns its result and what it leaves behind."""
    gc.collect()
    before = descriptors(), len(threads())
    try:
        said = case()
    except BaseException as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    return {
        "said": said,
        "layers": layers(),
        "threads left": left_over(lambda: len(threads()), before[1]),
        "descriptors left": left_over(descriptors, before[0]),
    }


def main(group: str, results: str) -> None:
    """Run every case of a module of this folder."""
    import importlib

    import torch

    torch.set_num_threads(1)
    multiprocessing.get_context("spawn").Event()  # starts the resource tracker, which keeps a descriptor
    if multiprocessing.get_start_method() == "forkserver":  # the default from Python 3.14 on; it keeps one, too
        forkserver.ensure_running()
    cases = importlib.import_module(f"tests.loaders.{group}").CASES
    agent = telemetry.start(os.path.dirname(results), start_line=False, port="off", interval_seconds=0.1)
    seen = {"__warmup__": observe(lambda: None)} | {name: observe(case) for name, case in cases.items()}
    ran = agent.running
    errors = agent.tracker.errors if ran else 0
    last = repr(agent.tracker.last_error) if errors else None
    telemetry.stop()
    batches = agent.accounting.ledger.batches if ran else 0  # all of them, which only the end of the run has read
    stopped = {"layers": layers(), "threads": threads()}
    with open(results, "w") as file:
        told = json.dumps({"cases": seen, "stopped": stopped, "errors": errors, "last error": last, "batches": batches})
        file.write(re.sub(r" at 0x[0-9a-f]+", "", told))


if __name__ == "__main__":
    main(*sys.argv[1:])
