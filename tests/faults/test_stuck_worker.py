"""A worker that hangs is shown with its stack."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import select
import signal
import threading
import time

import pytest
from torch.utils.data import DataLoader

from tests.data_sets import Numbers
from tests.faults.processes import wait_for
from tests.faults.stuck_runs import (
    AT,
    STUCK_SECONDS,
    Hanging,
    Release,
    in_read,
    lines,
    stack_of,
    start,
    train,
    when_stuck,
)


def in_lock(release):
    release.lock.acquire()


def in_c_read(release):
    buffer = ctypes.create_string_buffer(4)
    assert ctypes.CDLL(None).read(release.fifo, buffer, 4) == 4  # without a retry it would return -1 with EINTR


def checked(result):
    """The result of a C function, as clients in C take it: whatever interrupts it is an error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def in_c_poll(release):
    entry = (ctypes.c_int * 2)(release.fifo, select.POLLIN)
    assert checked(ctypes.CDLL(None, use_errno=True).poll(entry, 1, 60_000)) == 1


def in_c_sleep(release):
    checked(ctypes.CDLL(None, use_errno=True).usleep(2_500_000))


def in_c_semaphore(release):
    library = ctypes.CDLL(None, use_errno=True)
    semaphore = ctypes.create_string_buffer(64)
    checked(library.sem_init(semaphore, 0, 0))
    threading.Thread(target=lambda: (in_read(release), library.sem_post(semaphore)), daemon=True).start()
    until = (ctypes.c_long * 2)(int(time.time()) + 60, 0)
    checked(library.sem_timedwait(semaphore, until))


def holding_the_gil(release):
    buffer = ctypes.create_string_buffer(4)
    assert ctypes.PyDLL(None).read(release.fifo, buffer, 4) == 4


def in_socket(release):
    release.socket.settimeout(60)
    assert release.socket.recv(4) == b"done"


def in_sleep(release):
    until = time.monotonic() + 2.5
    time.sleep(2.5)
    assert time.monotonic() >= until


def in_python_loop(release):
    while not release.file.exists():
        pass


def in_c_loop(release):
    while not release.file.exists():
        sum(range(20_000_000))


HANGS = [
    *(in_lock, in_read, in_socket, in_sleep, in_python_loop, in_c_loop),
    *(in_c_read, in_c_poll, in_c_sleep, in_c_semaphore),
]


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_a_worker_that_hangs_is_shown_and_goes_on_unharmed(tmp_path, hang):
    release = Release(tmp_path)

    def sample():
        hang(release)
        return AT

    agent = start(tmp_path)
    loader = DataLoader(Hanging(sample), batch_size=1, num_workers=2, multiprocessing_context="fork")
    watching = when_stuck(agent, release)
    batches = train(loader)
    watching.join()
    assert [int(batch) for batch in batches] == list(range(60))  # no call of the worker failed
    (opened,) = lines(agent, "stall_open")
    closed = wait_for(lambda: lines(agent, "stall_close"), "the close")[0]
    assert (opened["cause"], closed["cause"]) == ("worker_stuck", "worker_stuck")
    evidence = opened["evidence"]
    assert evidence["stuck_in"] == "data_wait"
    assert evidence["stuck_for_seconds"] >= STUCK_SECONDS
    assert evidence["fetching_seconds"] > 0, "the fetch that was seen last, a figure of its own"
    assert evidence["stuck_at"].endswith(f"< train (stuck_runs.py:{train.__code__.co_firstlineno + 2})")
    assert closed["evidence"]["stuck_for_seconds"] >= evidence["stuck_for_seconds"]
    assert "stacks" not in closed["evidence"]
    assert opened["advice"][1]["setting"] == "timeout"

    first = evidence["stacks"][0].splitlines()
    assert first[0].startswith("training thread MainThread (")
    assert f'File "{__file__}"' in evidence["stacks"][0]
    worker = stack_of(evidence["stacks"], "in a fetch for").splitlines()
    assert worker[0].startswith(f"worker {AT % 2} (pid ")
    names = [line.rpartition(" in ")[2] for line in worker[1:]]
    assert names.index(hang.__name__) < names.index("sample") < names.index("__getitem__")  # innermost first
    assert any(text.startswith(f"worker {1 - AT % 2} (pid ") for text in evidence["stacks"])  # also the idle worker
    assert not any("telemetry-agent" in text for text in evidence["stacks"])


def computing_with_the_gil(release):
    next(filter(None, map(release.memory.__getitem__, itertools.repeat(0))))


HOLDING = {holding_the_gil: "sleeping", computing_with_the_gil: "running"}


@pytest.mark.parametrize("hang", HOLDING, ids=lambda hang: hang.__name__)
def test_a_worker_that_holds_the_gil_cannot_answer_and_that_is_said(tmp_path, hang):
    release = Release(tmp_path)
    agent = start(tmp_path)
    loader = DataLoader(Hanging(lambda: hang(release) or AT), 1, num_workers=1, multiprocessing_context="fork")
    watching = when_stuck(agent, release)
    assert [int(batch) for batch in train(loader)] == list(range(60))
    watching.join()
    (opened,) = lines(agent, "stall_open")
    heading, text = stack_of(opened["evidence"]["stacks"], "in a fetch for").splitlines()
    assert HOLDING[hang] in heading
    assert re.fullmatch(
        r"  no stack: it did not answer in 1\.\d s: a call that holds the GIL runs\. "
        r"Of this time its main thread was on a core for \d\.\d s",
        text,
    )


class Named(Numbers):
    """Hangs on a FIFO that it opens by name. So it also works in a worker that inherits nothing."""

    def __init__(self, path, length: int = 60) -> None:
        super().__init__(length)
        self.path = path

    def __getitem__(self, index):
        if index == AT:
            with open(self.path) as file:
                file.read()
        return index


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_whatever_the_start_method(tmp_path, context):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    agent = start(tmp_path)
    loader = DataLoader(Named(path), batch_size=1, num_workers=1, multiprocessing_context=context)
    watching = when_stuck(agent, lambda: path.write_text("go"))
    assert len(train(loader)) == 60
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == "worker_stuck"
    assert "in __getitem__" in stack_of(opened["evidence"]["stacks"], "worker 0").splitlines()[1]


def until_workers_are_seen(agent) -> None:
    """Wait for two log lines: the first may contain a sample of the workers from before this call."""
    before = len(lines(agent, "workers"))
    wait_for(lambda: len(lines(agent, "workers")) >= before + 2, "a look at the workers")


def test_a_worker_that_hangs_at_the_start_of_an_epoch(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    agent = start(tmp_path, stuck_seconds=3)
    first_epoch = DataLoader(Numbers(30), batch_size=1, num_workers=1)
    assert len(train(first_epoch, lambda batch: batch or until_workers_are_seen(agent))) == 30
    watching = when_stuck(agent, lambda: path.write_text("go"))
    loader = DataLoader(Named(path), batch_size=1, num_workers=1, sampler=[AT, 1, 2])
    assert len(train(loader)) == 3
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == "worker_stuck"


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)
    return AT


def test_a_stopped_worker_is_left_alone(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Hanging(stop_oneself), batch_size=1, num_workers=1))
    (worker,) = iterator._workers
    watching = when_stuck(agent, lambda: os.kill(worker.pid, signal.SIGCONT))
    assert len(train(iterator)) == 60
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == "worker_stuck"
    text = stack_of(opened["evidence"]["stacks"], "worker 0")
    assert "stopped" in text.splitlines()[0]
    assert "no stack: it is stopped" in text


def test_a_worker_begun_before_the_agent_cannot_be_asked_and_that_is_said(tmp_path):
    release = Release(tmp_path)
    iterator = iter(
        DataLoader(Hanging(lambda: in_read(release) or AT), batch_size=1, num_workers=1, multiprocessing_context="fork")
    )
    agent = start(tmp_path)
    watching = when_stuck(agent, release)
    assert len(train(iterator)) == 60
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == "unknown"  # it is not known what its fetches do
    text = stack_of(opened["evidence"]["stacks"], "worker 0")
    assert "in a fetch" not in text
    assert "no stack: it was started before the agent" in text
