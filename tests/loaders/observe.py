"""What a job observes of its own loaders: `tests.unnoticed` runs it bare and under the agent."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import threading
import time
from multiprocessing import forkserver

import torch
from torch.utils.data._utils import fetch

import telemetry
from telemetry.agent.agent import Agent

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


def main(group: str) -> None:
    """Run every case of a module of this folder."""
    torch.set_num_threads(1)
    multiprocessing.get_context("spawn").Event()  # starts the resource tracker, which keeps a descriptor
    if multiprocessing.get_start_method() == "forkserver":  # the default from Python 3.14 on; it keeps one, too
        forkserver.ensure_running()
    cases = importlib.import_module(f"tests.loaders.{group}").CASES
    agent = telemetry.start(start_line=False, port="off", interval_seconds=0.1)
    until = time.monotonic() + 5
    while isinstance(agent, Agent) and agent.attempt._file is None and time.monotonic() < until:
        time.sleep(0.01)  # the agent thread opens the heartbeat at its first tick, and keeps it
    observe(lambda: None)  # for what stays open from the first use on
    for name, case in cases.items():
        print(name, observe(case))
    telemetry.stop()
    print(layers(), threads())
