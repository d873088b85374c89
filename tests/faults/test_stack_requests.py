"""A stack request does not harm a process, and a process that is not a worker is never asked."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import stat
import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from telemetry.sources.stacks import ask_workers
from telemetry.util import threads
from tests.data_sets import Numbers
from tests.faults.processes import Child, wait_for, write
from tests.faults.stuck_runs import (
    Release,
    in_read,
    start,
)


def ports(agent) -> dict:
    (entry,) = agent.tracker.loaders.live()
    return entry.block.stack_ports()


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


def everything_closed(worker_id: int) -> None:
    os.close(pipe_of_ours())


def another_file(victim, worker_id: int) -> None:
    os.dup2(os.open(victim, os.O_RDWR), pipe_of_ours())


def another_pipe(worker_id: int) -> None:
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


TAKEN = ["everything closed", "another file", "another pipe"]


@pytest.mark.parametrize("what", TAKEN)
def test_a_worker_that_has_taken_our_pipe_away_is_never_hurt(tmp_path, what):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    init = {
        "everything closed": everything_closed,
        "another file": functools.partial(another_file, victim),
        "another pipe": another_pipe,
    }[what]
    agent = start(tmp_path)
    iterator = iter(DataLoader(Reading(100), batch_size=1, num_workers=1, worker_init_fn=init))
    next(iterator)
    (worker,) = iterator._workers
    port = wait_for(lambda: ports(agent), "the worker is ready")[worker.pid]
    for _ in range(3):
        (answer,) = ask_workers([(worker.pid, port)])
        assert (answer.stack, answer.missing) == ("", "it has closed our pipe")
    assert len([*iterator]) == 99  # the workers are alive and as fast as before
    assert victim.read_bytes() == b"precious"


def test_a_child_of_a_worker_neither_answers_nor_takes_the_request(tmp_path):
    """The child has the pipe, too. It exits as a program does, which ends its threads, and would wait for them."""
    agent = start(tmp_path)
    iterator = iter(DataLoader(Forking(20), batch_size=1, num_workers=1))
    assert int(next(iterator)) == 0
    (worker,) = iterator._workers
    port = wait_for(lambda: ports(agent), "the worker is ready")[worker.pid]
    (child,) = map(int, Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split())
    for _ in range(20):
        (answer,) = ask_workers([(worker.pid, port)])
        assert "_worker_loop" in answer.stack, answer
        assert "in as_a_child" not in answer.stack
    (answer,) = ask_workers([(child, port)])
    assert answer.stack == ""
    assert len([*iterator]) == 19


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


class AllOurs(Numbers):
    """In the first fetch the worker has one thread besides its main thread: ours."""

    def __getitem__(self, index):
        return threads._FILTER[3].match("a module")


def test_python_s_warning_of_forks_knows_the_thread_that_answers(tmp_path):
    start(tmp_path)
    assert bool(next(iter(DataLoader(AllOurs(1), num_workers=1))))


def without_batching(batch):
    return batch[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_s_own_code_sees_no_thread_and_no_signal_of_ours(tmp_path, context):
    def seen():
        loader = DataLoader(Looking(1), num_workers=1, collate_fn=without_batching, multiprocessing_context=context)
        return next(iter(loader))

    alone = seen()
    start(tmp_path)
    assert seen() == alone


def test_the_thread_that_answers_has_the_signals_blocked(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Numbers(100), batch_size=1, num_workers=1))
    next(iterator)
    ((pid, port),) = ports(agent).items()
    with open(f"/proc/{pid}/task/{port.thread}/status") as status:
        blocked = int(next(line.split()[1] for line in status if line.startswith("SigBlk:")), 16)
    ours = signal.valid_signals() - {getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT")}
    assert all(blocked >> (number - 1) & 1 for number in ours - {signal.SIGKILL, signal.SIGSTOP})


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
        assert "thread Thread-" in answer.stack
    assert worker.is_alive()
    worker.kill()


def test_asking_changes_nothing_in_the_training_process(tmp_path):
    before = handled_signals()
    test_a_busy_worker_is_asked_again_and_again(tmp_path)
    assert handled_signals() == before


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
