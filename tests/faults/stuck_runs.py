"""Runs that hang: data sets, steps, and readers of their logs."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import multiprocessing.util
import os
import socket
import threading
import time

import telemetry
from tests.data_sets import Numbers
from tests.faults.processes import wait_for

STUCK_SECONDS = 1.0
AT = 40
"""Number of the sample that hangs: some steps have ended before it, and some follow."""


def start(tmp_path, **settings):
    defaults = dict(
        port="off",
        interval_seconds=0.1,
        log_interval_seconds=0.2,
        stall_window_seconds=600,  # so that no other stall opens
        stuck_seconds=STUCK_SECONDS,
        start_line=False,
    )
    return telemetry.start(tmp_path / "run", **defaults | settings)


def lines(agent, event: str) -> list[dict]:
    (path,) = (agent.run_dir / "logs").iterdir()
    read = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in read if line["event"] == event]


def when_stuck(agent, then) -> threading.Thread:
    """Call a function as soon as the log says that the run is stuck."""
    thread = threading.Thread(target=lambda: (wait_for(lambda: lines(agent, "stall_open"), "a stall"), then()))
    thread.start()
    return thread


class Hanging(Numbers):
    """A data set whose sample number `AT` hangs until it is released."""

    def __init__(self, hang, length: int = 60) -> None:
        super().__init__(length)
        self.hang = hang

    def __getitem__(self, index):
        if index == AT:
            return self.hang()
        return index


def train(loader, step=lambda batch: None) -> list:
    seen = []
    for batch in loader:
        step(batch)
        seen.append(batch)
    return seen


def stack_of(texts: list[str], who: str) -> str:
    (text,) = [text for text in texts if who in text.partition("\n")[0]]
    return text


# -- workers ------------------------------------------------------------------------------------------------------


class Release:
    """The object that a hanging sample waits for, in this process and in its workers."""

    def __init__(self, tmp_path) -> None:
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.lock.acquire()
        self.fifo, self.to_fifo = os.pipe()
        self.socket, self.to_socket = socket.socketpair()
        self.file = tmp_path / "go"
        self.memory = mmap.mmap(-1, 1)

    def __call__(self) -> None:
        self.lock.release()
        os.write(self.to_fifo, b"done")
        self.to_socket.sendall(b"done")
        self.file.touch()
        self.memory[0] = 1


def in_read(release):
    assert os.read(release.fifo, 4) == b"done"


# -- the training thread ------------------------------------------------------------------------------------------


def steps(lock, *, hang_at: int | None = None):
    def step(batch):
        time.sleep(0.002)
        if int(batch) == hang_at:
            stand_in_the_middle_of_a_step(lock)

    return step


def stand_in_the_middle_of_a_step(lock):
    lock.acquire()
