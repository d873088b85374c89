"""A run that hangs says where, and whoever is asked for it is not hurt."""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import pdb  # noqa: T100 - a debugger is what is tested
import signal
import socket
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.collect.worker_stacks import ask_workers
from tests.faults.processes import Child, environment, events, wait_for, write
from tests.test_agent import scrape
from tests.test_attach_loaders import Numbers

STUCK_SECONDS = 1.0
AT = 40
"""The sample that hangs: late enough that steps have ended, early enough that some follow."""


def start(tmp_path, **settings):
    defaults = dict(
        port="off",
        interval_seconds=0.1,
        log_interval_seconds=0.2,
        stall_window_seconds=600,  # nothing else is to open
        stuck_seconds=STUCK_SECONDS,
        start_line=False,
    )
    return telemetry.start(tmp_path / "run", **defaults | settings)


def lines(agent, event: str) -> list[dict]:
    (path,) = (agent.run_dir / "logs").iterdir()
    read = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in read if line["event"] == event]


def when_stuck(agent, then) -> threading.Thread:
    """Do something as soon as the log says that the run is stuck."""
    thread = threading.Thread(target=lambda: (wait_for(lambda: lines(agent, "stall_open"), "a stall"), then()))
    thread.start()
    return thread


class Hanging(Numbers):
    """A data set whose sample number `AT` takes until it is released."""

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
    """What a hanging sample waits for, in this process and in its workers."""

    def __init__(self, tmp_path) -> None:
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.lock.acquire()
        self.fifo, self.to_fifo = os.pipe()
        self.socket, self.to_socket = socket.socketpair()
        self.file = tmp_path / "go"

    def __call__(self) -> None:
        self.lock.release()
        os.write(self.to_fifo, b"done")
        self.to_socket.sendall(b"done")
        self.file.touch()


def in_lock(release):
    release.lock.acquire()


def in_read(release):
    assert os.read(release.fifo, 4) == b"done"


def in_c_read(release):
    buffer = ctypes.create_string_buffer(4)
    assert ctypes.CDLL(None).read(release.fifo, buffer, 4) == 4  # no retry: it would return -1 with EINTR


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


HANGS = [in_lock, in_read, in_c_read, holding_the_gil, in_socket, in_sleep, in_python_loop, in_c_loop]


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
    assert evidence["stuck_seconds"] >= STUCK_SECONDS
    assert evidence["stuck_at"].endswith(f"< train (test_stuck_run.py:{train.__code__.co_firstlineno + 2})")
    assert closed["evidence"]["stuck_seconds"] >= evidence["stuck_seconds"]
    assert "stacks" not in closed["evidence"]
    assert opened["advice"][1]["setting"] == "timeout"

    first = evidence["stacks"][0].splitlines()
    assert first[0].startswith("training thread MainThread (")
    assert f'File "{__file__}"' in evidence["stacks"][0]
    worker = stack_of(evidence["stacks"], "in a fetch for").splitlines()
    assert worker[0].startswith(f"worker {AT % 2} (pid ")
    names = [line.rpartition(" in ")[2] for line in worker[1:]]
    assert names.index(hang.__name__) < names.index("sample") < names.index("__getitem__")  # innermost first
    assert any(text.startswith(f"worker {1 - AT % 2} (pid ") for text in evidence["stacks"])  # the idle one too
    assert not any("telemetry-agent" in text for text in evidence["stacks"])


class Named(Numbers):
    """Hangs on a FIFO that is known by its name: also in a worker that inherits nothing."""

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
    """Wait until the agent has looked at the workers since; of two lines the first may be of a look before."""
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
    iterator = iter(DataLoader(Hanging(lambda: in_read(release) or AT), batch_size=1, num_workers=1))
    agent = start(tmp_path)
    watching = when_stuck(agent, release)
    assert len(train(iterator)) == 60
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == "unknown"  # nobody knows what its fetches do
    text = stack_of(opened["evidence"]["stacks"], "worker 0")
    assert "in a fetch" not in text
    assert "no stack: it was started before the agent" in text


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
    """As a worker would have one that was forked by a worker, or another library of that habit."""
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
    assert len([*iterator]) == 99  # alive, and as fast as ever
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
    iterator = iter(DataLoader(InTwoPlaces(release), batch_size=1, num_workers=1))
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
    """Runs Python on two threads all the time."""

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
        assert "thread Thread-" in answer.stack  # Python has answered: it sees all threads
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
    """The answers, if there is one of each."""
    return all(answer.stack for answer in answers) and answers


def test_all_workers_are_asked_at_once(tmp_path):
    agent = start(tmp_path)
    iterator = iter(DataLoader(Numbers(600), batch_size=1, num_workers=16))
    next(iterator)
    everyone = wait_for(lambda: (p := ports(agent)) and len(p) == 16 and p, "all are ready")
    answers = wait_for(lambda: answered(ask_workers([*everyone.items()])), "all answer")
    assert [answer.pid for answer in answers] == list(everyone)
    assert all("_worker_loop" in answer.stack for answer in answers)


# -- the training thread ------------------------------------------------------------------------------------------


def steps(lock, *, hang_at: int | None = None):
    def step(batch):
        time.sleep(0.002)
        if int(batch) == hang_at:
            stand_in_the_middle_of_a_step(lock)

    return step


def stand_in_the_middle_of_a_step(lock):
    lock.acquire()


def test_a_step_that_hangs_is_shown_in_log_metrics_and_report(tmp_path, capsys):
    lock = threading.Lock()
    lock.acquire()
    heard = []
    agent = start(tmp_path, port=0, on_stall=heard.append)
    other = threading.Thread(target=lambda: wait_for(lambda: heard, "a stall"), name="a helper")
    other.start()

    def look():
        wait_for(lambda: scrape(agent)["training_stall_active", "unknown"] == 1, "the metric")
        lock.release()

    watching = when_stuck(agent, look)
    train(DataLoader(Numbers(60), batch_size=1), steps(lock, hang_at=AT))
    watching.join()
    other.join()
    (opened,) = lines(agent, "stall_open")
    evidence = opened["evidence"]
    assert opened["cause"] == "unknown"
    assert evidence["stuck_in"] == "compute"
    assert evidence["stuck_at"].startswith("stand_in_the_middle_of_a_step (test_stuck_run.py:")
    assert opened["first_step"] == AT
    assert opened["exposed_wait_ratio"] == 0
    assert "stand_in_the_middle_of_a_step" in opened["advice"][0]["action"]
    frames = evidence["stacks"][0].splitlines()
    assert "stand_in_the_middle_of_a_step" in frames[1]
    assert "in step" in frames[2]
    assert "in train" in frames[3]
    assert stack_of(evidence["stacks"], "thread a helper")
    assert heard[0]["evidence"] == evidence
    wait_for(lambda: scrape(agent)["training_stall_active", "unknown"] == 0, "the metric")
    assert scrape(agent)["training_stalls_total", "unknown"] == 1
    telemetry.stop()
    (closed,) = lines(agent, "stall_close")
    assert closed["opened"] == opened["opened"] < closed["closed"]

    from telemetry.report.command import report

    report(str(agent.run_dir), as_json=False)
    text = capsys.readouterr().out
    assert "stall on rank 0: unknown" in text
    assert "in stand_in_the_middle_of_a_step" in text


def test_the_report_of_a_run_that_hangs_begins_with_it(tmp_path):
    from telemetry.report.load import load
    from telemetry.report.summary import summarize

    lock = threading.Lock()
    lock.acquire()
    agent = start(tmp_path)
    verdicts = []

    def look():
        verdicts.append(summarize(load(agent.run_dir))["verdict"])
        lock.release()

    watching = when_stuck(agent, look)
    train(DataLoader(Numbers(60), batch_size=1), steps(lock, hang_at=AT))
    watching.join()
    assert verdicts[0].startswith("Stuck: rank 0 is in the compute of a step and has not gone on")
    telemetry.stop()
    assert "Stuck" not in summarize(load(agent.run_dir))["verdict"]


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda data: DataLoader(data, batch_size=1), "loader_on_training_thread"),
        (lambda data: telemetry.watch(data[index] for index in range(60)), "source_slow"),
    ],
    ids=["loader", "watched"],
)
def test_a_source_that_hangs(tmp_path, make, cause):
    release = Release(tmp_path)
    data = Hanging(lambda: in_read(release) or AT)
    agent = start(tmp_path)
    watching = when_stuck(agent, release)
    assert len(train(make(data))) == 60
    watching.join()
    (opened,) = lines(agent, "stall_open")
    assert opened["cause"] == cause
    assert opened["evidence"]["stuck_in"] == "data_wait"
    assert opened["evidence"]["stuck_at"].startswith("in_read (test_stuck_run.py:")


def test_a_stuck_run_takes_the_place_of_the_stall_that_was_open(tmp_path):
    release = Release(tmp_path)

    class Slow(Hanging):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    agent = start(tmp_path, stall_window_seconds=1)
    seen = []

    def when_replaced():
        seen.append(wait_for(lambda: len(lines(agent, "stall_open")) == 2, "the second stall"))
        release()

    watching = threading.Thread(target=when_replaced)
    watching.start()
    assert len(train(DataLoader(Slow(lambda: in_read(release) or AT, 45), batch_size=1, num_workers=1))) == 45
    watching.join()
    telemetry.stop()
    first, second = lines(agent, "stall_open")
    assert first["cause"].startswith("workers_")
    assert "stuck_in" not in first["evidence"]
    assert (second["cause"], second["evidence"]["stuck_in"]) == ("worker_stuck", "data_wait")
    assert "stacks" not in first["evidence"]
    order = [line["event"] for line in sorted(lines(agent, "stall_open") + lines(agent, "stall_close"), key=_when)]
    assert order[:3] == ["stall_open", "stall_close", "stall_open"]


def _when(line: dict) -> tuple:
    return (line.get("closed") or line["opened"], line["event"] != "stall_close")


# -- what is not stuck --------------------------------------------------------------------------------------------

LONG = 1.7 * STUCK_SECONDS


def evaluation(train_steps):
    train_steps()
    with torch.no_grad():
        for _ in DataLoader(Numbers(10, seconds=LONG / 10), batch_size=1):
            pass


def named_phase(train_steps):
    for _ in DataLoader(Numbers(30), batch_size=1):
        pass
    for batch in DataLoader(Numbers(30), batch_size=1):
        if int(batch) == 20:
            with telemetry.phase("publishing"):
                time.sleep(LONG)


def evaluation_phase_in_a_step(train_steps):
    for batch in DataLoader(Numbers(60), batch_size=1):
        if int(batch) == 40:
            with telemetry.phase("evaluation"):
                time.sleep(LONG)


def checkpoint(train_steps):
    class Slow:
        def write(self, data):
            time.sleep(LONG / 2)  # several times
            return len(data)

        def flush(self):
            pass

    train_steps()
    for batch in DataLoader(Numbers(60), batch_size=1):
        if int(batch) == 40:
            torch.save({}, Slow(), _use_new_zipfile_serialization=False)


def first_batch(train_steps):
    train(DataLoader(Hanging(lambda: time.sleep(LONG) or AT), batch_size=1, sampler=[AT, *range(AT)]))


def compile_in_the_first_step(train_steps):
    for batch in DataLoader(Numbers(10), batch_size=1):
        if int(batch) == 0:
            time.sleep(LONG)


def after_the_epoch(train_steps):
    train_steps()
    time.sleep(LONG)


def workers_that_are_slow_to_end(train_steps):
    def init(worker_id):
        multiprocessing.util.Finalize(None, time.sleep, args=(LONG,), exitpriority=10)

    train(DataLoader(Numbers(60), batch_size=1, num_workers=1, worker_init_fn=init))


def after_break(train_steps):
    for batch in DataLoader(Numbers(60), batch_size=1):
        if int(batch) == 40:
            break
    time.sleep(LONG)


def after_break_with_workers(train_steps):
    for batch in DataLoader(Numbers(60), batch_size=1, num_workers=1):
        if int(batch) == 40:
            break
    time.sleep(LONG)


def between_explicit_steps(train_steps):
    for _ in range(20):
        with telemetry.step():
            time.sleep(0.002)
    time.sleep(LONG)


def a_debugger_s_pause(train_steps):
    reading, writing = os.pipe()
    threading.Timer(LONG, lambda: os.write(writing, b"continue\n")).start()
    with open(reading) as commands, open(os.devnull, "w") as nowhere:
        debugger = pdb.Pdb(stdin=commands, stdout=nowhere, nosigint=True, readrc=False)
        debugger.use_rawinput = False
        for batch in DataLoader(Numbers(60), batch_size=1):
            if int(batch) == 40:
                debugger.set_trace()
    os.close(writing)


def optimizer_steps_go_on(train_steps):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.zeros(1)
    for batch in DataLoader(Numbers(42), batch_size=1):
        for _ in range(50 if int(batch) == 40 else 1):
            optimizer.step()
            time.sleep(LONG / 50 if int(batch) == 40 else 0)


QUIET = [
    evaluation, named_phase, evaluation_phase_in_a_step, checkpoint, first_batch, compile_in_the_first_step,
    after_the_epoch, workers_that_are_slow_to_end, after_break, after_break_with_workers, between_explicit_steps, a_debugger_s_pause,
    optimizer_steps_go_on,
]  # fmt: skip


@pytest.mark.parametrize("what", QUIET, ids=lambda what: what.__name__)
def test_what_is_not_stuck(tmp_path, what):
    agent = start(tmp_path)
    what(lambda: train(DataLoader(Numbers(60), batch_size=1)))
    telemetry.stop()
    assert sum(line["steps"] for line in lines(agent, "window")) >= 1
    assert agent.accounts.ledger.wall_seconds > LONG
    # A run too short for a window is judged as it ends: the checkpoint may be a stall, but nobody was stuck.
    assert [line for line in lines(agent, "stall_open") if "stuck_in" in line["evidence"]] == []
    assert agent.faults.counts == {}


SCRIPT = """
    import sys, time
    import telemetry
    from torch.utils.data import DataLoader

    agent = telemetry.start("run", port="off", interval_seconds=0.1, log_interval_seconds=0.2, stuck_seconds=1,
                            start_line=False)
    for batch in DataLoader(range(100_000), batch_size=1, num_workers=int(sys.argv[1])):
        time.sleep(0.005)
        if int(batch) == 50:
            print("going", flush=True)
        if int(batch) > 50 and int(batch) % 50 == 0 and open("end").read():
            break
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_was_stopped_was_not_stuck(tmp_path, workers):
    (tmp_path / "end").touch()
    with Child(write(tmp_path, "script.py", SCRIPT), workers, cwd=tmp_path) as child:
        assert child.line() == "going"
        for _ in range(2):
            os.killpg(child.pid, signal.SIGSTOP)
            time.sleep(2.0)  # so long it stood still
            os.killpg(child.pid, signal.SIGCONT)
            before = len(events(tmp_path / "run", "window", running=True))
            wait_for(lambda: len(events(tmp_path / "run", "window", running=True)) > before + 3, "it goes on")
        (tmp_path / "end").write_text("now")
        assert child.wait() == 0
    assert [line for line in events(tmp_path / "run", "stall_open") if "stuck_in" in line["evidence"]] == []


COLLECTIVE = """
    import sys, time
    import telemetry
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    telemetry.start("run", port="off", interval_seconds=0.1, log_interval_seconds=0.2, start_line=False,
                    stuck_seconds=float(sys.argv[3]))
    for batch in DataLoader(range(40), batch_size=1):
        if rank == 1 and int(batch) == 30:
            print("late", flush=True)
            sys.stdin.readline()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        time.sleep(0.002)
    dist.destroy_process_group()
"""


def stuck(run_dir, event):
    """Of a run that is stuck, and not of what a short window has made of it before."""
    return [line for line in events(run_dir, event) if "stuck_in" in line["evidence"]]


def the_stalls_of_a_collective(tmp_path, stuck_seconds):
    """By rank, what is logged when rank 1 reads from a pipe where the other waits for it in an all-reduce."""
    script = write(tmp_path, "script.py", COLLECTIVE)
    environments = [environment(RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
    rest = (tmp_path / "store", stuck_seconds)
    with (
        Child(script, 0, *rest, cwd=tmp_path, env=environments[0]) as zero,
        Child(script, 1, *rest, cwd=tmp_path, env=environments[1]) as one,
    ):
        assert one.line() == "late"
        opened = wait_for(
            lambda: (o := {line["rank"]: line for line in stuck(tmp_path / "run", "stall_open")}) and len(o) == 2 and o,
            "both are stuck",
        )
        one.tell()
        assert (zero.wait(), one.wait()) == (0, 0)
    assert sorted(line["rank"] for line in stuck(tmp_path / "run", "stall_close")) == [0, 1]
    return opened


def test_who_waits_in_a_collective_names_the_rank_that_does_not_come(tmp_path):
    opened = the_stalls_of_a_collective(tmp_path, stuck_seconds=4)
    assert opened[0]["evidence"]["stuck_in"] == "compute"
    assert opened[0]["evidence"]["stuck_at"].startswith("all_reduce (distributed_c10d.py:")
    assert "<module> (script.py:" in opened[0]["evidence"]["stuck_at"]
    assert "in all_reduce" in opened[0]["evidence"]["stacks"][0]
    assert opened[1]["evidence"]["stuck_at"].startswith("<module> (script.py:")
    assert opened[0]["cause"] == "straggler"
    assert opened[0]["evidence"]["straggler_rank"] == 1
    (advice,) = opened[0]["advice"]
    assert advice["action"] == "see what rank 1 does"
    assert "last seen in <module> (script.py:" in advice["because"]
    assert opened[1]["cause"] == "unknown"
    assert "straggler_rank" not in opened[1]["evidence"]
