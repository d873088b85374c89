"""A stack request does not harm a process, and a process that is not a worker is never asked."""

from __future__ import annotations

import functools
import os
import signal
import threading

import pytest
from torch.utils.data import DataLoader

from telemetry.collect.worker_stack_requests import ask_workers
from tests.data_sets import Numbers
from tests.faults.processes import Child, wait_for, write
from tests.faults.stuck_runs import (
    Release,
    in_read,
    start,
)


def ports(agent) -> dict:
    (entry,) = agent.tracker.sources.live()
    return entry.block.stack_ports()


def their_own_handlers(worker_id: int) -> None:
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, lambda *_: None)


def no_handlers(worker_id: int) -> None:
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_DFL)


def blocked_signals(worker_id: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def another_file(victim, worker_id: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "telemetry-stacks" in os.readlink(path):
            os.dup2(os.open(victim, os.O_RDWR), int(name))


def another_of_that_name(worker_id: int) -> None:
    """The state of a process that was forked by a worker, or by a library that forks in this way."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "telemetry-stacks" in os.readlink(path):
            os.dup2(os.memfd_create("telemetry-stacks"), int(name))


TAKEN = ["their own handlers", "no handlers", "blocked signals", "another file", "another of that name"]


@pytest.mark.parametrize("what", TAKEN)
def test_a_worker_that_has_taken_our_signal_or_file_away_is_never_hurt(tmp_path, what):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    init, why = {
        "their own handlers": (their_own_handlers, "did not answer"),
        "no handlers": (no_handlers, "does not take our signal"),
        "blocked signals": (blocked_signals, "does not take our signal"),
        "another file": (functools.partial(another_file, victim), "has closed our file"),
        "another of that name": (another_of_that_name, "has closed our file"),
    }[what]
    agent = start(tmp_path)
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1, worker_init_fn=init))
    next(iterator)
    (worker,) = iterator._workers
    port = wait_for(lambda: ports(agent), "the worker is ready")[worker.pid]
    for _ in range(3):
        (answer,) = ask_workers([(worker.pid, port)])
        assert answer.stack == ""
        assert why in answer.missing
    assert len([*iterator]) == 99  # the workers are alive and as fast as before
    assert victim.read_bytes() == b"precious"


def test_who_is_no_worker_of_ours_is_never_asked(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1))
    next(iterator)
    (port,) = ports(agent).values()
    script = write(tmp_path, "sleep.py", "print('ready', flush=True)\nimport time\ntime.sleep(600)")
    with Child(script, cwd=tmp_path) as child:
        child.line()
        answers = ask_workers([(child.pid, port), (os.getpid(), port), (1, port), (2**22 + 5, port)])
        assert [answer.stack for answer in answers] == [""] * 4
        assert child.process.poll() is None
    assert [answer.missing for answer in answers][2:] == [
        "it has ended, and its pid is another process's",
        "it has ended",
    ]


class InTwoPlaces(Numbers):
    def __init__(self, release) -> None:
        super().__init__(2)
        self.release = release

    def __getitem__(self, index):
        (self.second_place if index else self.first_place)()
        return index

    def first_place(self):
        in_read(self.release)

    def second_place(self):
        in_read(self.release)


def test_an_answer_is_of_now(tmp_path):
    release = Release(tmp_path)
    agent = start(tmp_path)
    iterator = iter(DataLoader(InTwoPlaces(release), batch_size=1, num_workers=1, multiprocessing_context="fork"))
    (worker,) = iterator._workers
    port = wait_for(lambda: ports(agent), "the worker is ready")[worker.pid]
    wait_for(lambda: "in first_place" in ask_workers([(worker.pid, port)])[0].stack, "it reads")
    os.write(release.to_fifo, b"done")
    next(iterator)
    wait_for(lambda: "in second_place" in (stack := ask_workers([(worker.pid, port)])[0].stack) and stack, "it reads")
    assert "in first_place" not in ask_workers([(worker.pid, port)])[0].stack
    os.write(release.to_fifo, b"done")
    assert len([*iterator]) == 1


class Busy(Numbers):
    """A worker that runs Python on two threads all the time."""

    def __getitem__(self, index):
        if index == 1:
            threading.Thread(target=self.spin, daemon=True).start()
            self.spin()
        return index

    def spin(self):
        def deep(left):
            return deep(left - 1) if left else sorted([3, 1, 2], key=lambda x: -x)

        number = 0
        while True:
            number += 1
            deep(number % 50)


def test_a_busy_worker_is_asked_again_and_again(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Busy(4), batch_size=1, num_workers=1))
    next(iterator)
    (worker,) = iterator._workers
    port = wait_for(lambda: ports(agent), "the worker is ready")[worker.pid]
    wait_for(lambda: "deep" in ask_workers([(worker.pid, port)])[0].stack, "it is busy")
    for _ in range(100):
        (answer,) = ask_workers([(worker.pid, port)])
        assert "in spin" in answer.stack, answer
        assert "thread Thread-" in answer.stack  # the Python handler has answered: it sees all threads
    assert worker.is_alive()
    worker.kill()


def test_asking_changes_nothing_in_the_training_process(tmp_path):
    def handlers():
        with open("/proc/self/status") as status:
            return [line for line in status if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]

    before = handlers()
    test_a_busy_worker_is_asked_again_and_again(tmp_path)
    assert handlers() == before


def answered(answers):
    """The answers of the workers, if all of them have answered."""
    return all(answer.stack for answer in answers) and answers


def test_all_workers_are_asked_at_once(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Numbers(600), batch_size=1, num_workers=16))
    next(iterator)
    everyone = wait_for(lambda: (p := ports(agent)) and len(p) == 16 and p, "all are ready")
    answers = wait_for(lambda: answered(ask_workers([*everyone.items()])), "all answer")
    assert [answer.pid for answer in answers] == list(everyone)
    assert all("_worker_loop" in answer.stack for answer in answers)
