"""A stack request does not harm a process, and a process that is not a worker is never asked."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from telemetry.sources.stuck_stacks import ask_workers, live_workers
from tests.data_sets import Numbers
from tests.faults.processes import wait_for


@pytest.fixture
def workers(start):
    """Starts an agent, and iterates a loader with one worker. Returns the iterator, its worker, and what asks it."""
    agent = start(port="off")

    def begin(dataset, **settings):
        iterator = iter(DataLoader(dataset, batch_size=1, num_workers=1, **settings))
        ready = lambda: [worker.counters and worker.counters.stack_pipe for worker in live(agent)]
        wait_for(lambda: all(ready()), "the workers are ready")
        return iterator, iterator._workers[0], functools.partial(asked, agent)

    return begin


def live(agent):
    return live_workers(agent.tracker.loaders)


def asked(agent, **changed):
    """The answer of the only worker, or of who is asked instead."""
    (worker,) = live(agent)
    worker = dataclasses.replace(worker, **changed)
    ask_workers([worker])
    return worker


def pipe_of_ours() -> int:
    """The number of the pipe, seen from inside the worker: one descriptor that is open for reading and writing."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            both = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if both and stat.S_ISFIFO(os.fstat(number).st_mode):
                return number
        except OSError:  # the folder's own
            pass
    raise AssertionError("no pipe of ours")


def everything_closed(victim, worker_id: int) -> None:
    os.close(pipe_of_ours())


def another_file(victim, worker_id: int) -> None:
    os.dup2(os.open(victim, os.O_RDWR), pipe_of_ours())


def another_pipe(victim, worker_id: int) -> None:
    """What is written into it can be read by the data set."""
    ends = os.pipe2(os.O_NONBLOCK)
    number = pipe_of_ours()
    os.dup2(ends[1], number)
    Reading.end, Reading.other = ends


class Reading(Numbers):
    """A data set that has a pipe of its own. It sees whether anybody else has written into it."""

    end = -1

    def __getitem__(self, index):
        if self.end >= 0:
            try:
                raise AssertionError(os.read(self.end, 100))
            except BlockingIOError:
                pass
        return index


@pytest.mark.parametrize("what", [everything_closed, another_file, another_pipe], ids=lambda what: what.__name__)
def test_a_worker_that_has_taken_our_pipe_away_is_never_hurt(tmp_path, workers, what):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    iterator, worker, ask = workers(Reading(100), worker_init_fn=functools.partial(what, victim))
    next(iterator)
    for _ in range(3):
        answer = ask()
        assert (answer.stack, answer.missing) == ("", "it has ended, or has closed our pipe")
    assert len([*iterator]) == 99  # the workers are alive and as fast as before
    assert victim.read_bytes() == b"precious"


class Forking(Numbers):
    """The first sample forks a child. A later one lets it end, and waits for it."""

    def __getitem__(self, index):
        if index == 0:
            self.told, self.tell = os.pipe()
            self.child = os.fork()
            if self.child == 0:
                self.as_a_child()
        elif index == 10:
            os.write(self.tell, b"x")
            assert os.waitpid(self.child, 0)[1] == 0
        return index

    def as_a_child(self):
        os.read(self.told, 1)
        tasks = os.listdir("/proc/self/task")
        os._exit(0 if len(tasks) == 1 and threading.active_count() == 1 else 1)


def test_a_child_of_a_worker_neither_answers_nor_takes_the_request(workers):
    """The child has the pipe, too. It exits as a program does, which ends its threads, and would wait for them."""
    iterator, worker, ask = workers(Forking(20))
    assert int(next(iterator)) == 0
    (child,) = map(int, Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split())
    for _ in range(20):
        answer = ask()
        assert "_worker_loop" in answer.stack, answer
        assert "in as_a_child" not in answer.stack
    assert ask(pid=child).stack == ""
    assert len([*iterator]) == 19


class Looking(Numbers):
    """What a worker's own code sees of the process that it runs in."""

    def __getitem__(self, index):
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "handled": handled_signals(),
            "main": threading.current_thread() is threading.main_thread(),
        }


def handled_signals() -> list[tuple[str, int]]:
    """Without 32 and 33, which glibc handles itself from a process' first thread on."""
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
    return [(name, int(mask, 16) & ~(3 << 31)) for name, mask in lines]


def without_batching(batch):
    return batch[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_s_own_code_sees_no_thread_and_no_signal_of_ours(start, context):
    def seen():
        loader = DataLoader(Looking(1), num_workers=1, collate_fn=without_batching, multiprocessing_context=context)
        return next(iter(loader))

    alone = seen()
    start(port="off")
    assert seen() == alone


def test_the_thread_that_answers_has_the_signals_blocked(workers):
    _iterator, worker, ask = workers(Numbers(100))
    assert ask().stack
    (thread,) = (
        path for path in Path(f"/proc/{worker.pid}/task").iterdir() if "telemetry" in (path / "comm").read_text()
    )
    status = (thread / "status").read_text().splitlines()
    blocked = int(next(line.split()[1] for line in status if line.startswith("SigBlk:")), 16)
    ours = signal.valid_signals() - {getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT")}
    assert all(blocked >> (number - 1) & 1 for number in ours - {signal.SIGKILL, signal.SIGSTOP})


def test_who_is_no_worker_of_ours_is_never_asked(workers):
    _iterator, _, ask = workers(Numbers(100))
    with subprocess.Popen(["sleep", "600"]) as other:
        answers = [ask(pid=pid) for pid in (other.pid, os.getpid(), 1, 2**22 + 5)]
        assert [answer.stack for answer in answers] == [""] * 4
        assert other.poll() is None
        other.kill()
    assert {answer.missing for answer in answers} == {"it has ended, or has closed our pipe"}


class InTwoPlaces(Numbers):
    """Both samples wait for a byte, each in a function of its own."""

    def __init__(self) -> None:
        super().__init__(2)
        self.fifo, self.to_fifo = os.pipe()

    def __getitem__(self, index):
        (self.second_place if index else self.first_place)()
        return index

    def first_place(self):
        os.read(self.fifo, 1)

    def second_place(self):
        os.read(self.fifo, 1)


def test_an_answer_is_of_now(workers):
    dataset = InTwoPlaces()
    iterator, worker, ask = workers(dataset, multiprocessing_context="fork")
    stack = lambda: ask().stack
    wait_for(lambda: "in first_place" in stack(), "it reads")
    os.write(dataset.to_fifo, b"x")
    next(iterator)
    wait_for(lambda: "in second_place" in stack(), "it reads")
    assert "in first_place" not in stack()
    os.write(dataset.to_fifo, b"x")
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


def test_a_busy_worker_is_asked_again_and_again(workers):
    """Asking changes nothing in the training process."""
    before = handled_signals()
    iterator, worker, ask = workers(Busy(4))
    next(iterator)
    wait_for(lambda: "deep" in ask().stack, "it is busy")
    for _ in range(50):
        answer = ask()
        assert "in spin" in answer.stack, answer
        assert "thread Thread-" in answer.stack
    assert worker.is_alive()
    worker.kill()
    assert handled_signals() == before


def test_all_workers_are_asked_at_once(start):
    agent = start(port="off")
    iterator = iter(DataLoader(Numbers(600), batch_size=1, num_workers=16))

    def answered():
        everyone = live(agent)
        ask_workers(everyone)
        return all(worker.stack for worker in everyone) and everyone

    answers = wait_for(answered, "all answer")
    assert [answer.pid for answer in answers] == [worker.pid for worker in iterator._workers]
    assert all("_worker_loop" in answer.stack for answer in answers)


GARBAGE = """
import gc, threading
from telemetry.util.stacks import python_threads, stack_of

class Node:
    pass

def look():
    for _ in range(300):
        node = Node()
        node.local, node.itself = threading.local(), node
        node.local.value = node
        del node
        assert stack_of(main) and python_threads()
    assert gc.isenabled()

gc.set_threshold(1)
main = threading.get_ident()
looking = threading.Thread(target=look)
looking.start()
looking.join()
"""


def test_reading_a_stack_never_frees_the_garbage_of_the_script():
    """Before Python 3.11.9 and 3.12.3 the process hangs if a ``threading.local`` is freed in the middle of it."""
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, timeout=60)
