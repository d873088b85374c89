"""A run that hangs is shown in the log, the metrics and the report, with the stacks of its workers; and what is no hang."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing
import multiprocessing.util
import os
import pdb  # noqa: T100 - a debugger is what is tested
import select
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers
from tests.faults.processes import end_of, events, of_rank, quiet, report, report_text, wait_for, write
from tests.faults.warm_python import WarmChild
from tests.running_agent import scrape

STUCK_SECONDS = 1.0
AT = 40
"""Number of the sample that hangs: some steps have ended before it, and some follow."""


@pytest.fixture
def begin(start):
    """Starts an agent that sees soon that the run is stuck, and no other stall."""
    return lambda **settings: start(
        **{"port": "off", "log_interval_seconds": 0.2, "stall_window_seconds": 600, "stuck_seconds": STUCK_SECONDS}
        | settings
    )


@pytest.fixture
def lines(tmp_path):
    return lambda event: events(tmp_path / "run", event, running=True)


@pytest.fixture
def when_stuck(lines):
    """Calls a function as soon as the log says that the run is stuck."""
    threads = []

    def watch(then, stalls: int = 1) -> None:
        def wait():
            wait_for(lambda: len(lines("stall_open")) == stalls, "a stall")
            then()

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield watch
    for thread in threads:
        thread.join()


class Hanging(Numbers):
    """A data set whose sample number `AT` hangs until it is released."""

    def __init__(self, hang, length: int = 60) -> None:
        super().__init__(length)
        self.hang = hang

    def __getitem__(self, index):
        if index == AT:
            self.hang()
        return index


def train(loader, step=lambda batch: None) -> list:
    seen = []
    for batch in loader:
        step(batch)
        seen.append(batch)
    return seen


def stack_of(opened: dict, who: str) -> list[str]:
    """The lines of the only stack whose heading says this."""
    (text,) = [text for text in opened["evidence"]["stacks"] if who in text.partition("\n")[0]]
    return text.splitlines()


@pytest.fixture
def release(tmp_path):
    return Release(tmp_path)


class Release:
    """The object that a hanging sample waits for, in this process and in its workers."""

    def __init__(self, tmp_path) -> None:
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.lock.acquire()
        self.fifo, self.to_fifo = os.pipe()
        self.file = tmp_path / "go"
        self.memory = mmap.mmap(-1, 1)

    def __call__(self) -> None:
        self.lock.release()
        os.write(self.to_fifo, b"done")
        self.file.touch()
        self.memory[0] = 1


def in_read(release):
    assert os.read(release.fifo, 4) == b"done"


# -- the training thread hangs -------------------------------------------------------------------------------------


@pytest.fixture
def lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


def hangs_at(lock, number: int = AT):
    def step(batch):
        time.sleep(0.002)
        if int(batch) == number:
            stand_in_the_middle_of_a_step(lock)

    return step


def stand_in_the_middle_of_a_step(lock):
    lock.acquire()


def test_a_step_that_hangs_is_shown_in_log_metrics_and_report(tmp_path, begin, lines, when_stuck, lock):
    heard, verdicts = [], []
    agent = begin(port=0, on_stall=heard.append)
    other = threading.Thread(target=lambda: wait_for(lambda: heard, "a stall"), name="a helper")
    other.start()

    def look():
        wait_for(lambda: scrape(agent)["training_stall_active", "unknown"] == 1, "the metric")
        wait_for(lambda: scrape(agent).get(("training_hang_active", "compute")) == 1, "the kind of the hang")
        assert scrape(agent)["training_hang_active", "fetch"] == 0
        verdicts.append(report(tmp_path / "run")["verdict"])
        lock.release()

    when_stuck(look)
    train(DataLoader(Numbers(60), batch_size=1), hangs_at(lock))
    other.join()
    assert verdicts[0].startswith("Stuck: rank 0 is in the compute of a step and has not gone on")
    (opened,) = lines("stall_open")
    evidence = opened["evidence"]
    assert (opened["cause"], opened["first_step"], opened["exposed_wait_ratio"]) == ("unknown", AT, 0)
    assert evidence["stuck_in"] == "compute"
    assert evidence["stuck_at"].startswith("stand_in_the_middle_of_a_step (test_stuck.py:")
    assert "stand_in_the_middle_of_a_step" in opened["advice"][0]["action"]
    frames = evidence["stacks"][0].splitlines()[1:4]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["stand_in_the_middle_of_a_step", "step", "train"]
    assert stack_of(opened, "thread a helper")
    assert heard[0]["evidence"] == evidence
    wait_for(lambda: scrape(agent)["training_stall_active", "unknown"] == 0, "the metric")
    assert scrape(agent)["training_stalls_total", "unknown"] == 1
    wait_for(lambda: ("training_hang_active", "compute") not in scrape(agent), "no hang")
    telemetry.stop()
    said, over = lines("hang")
    assert said["verdict"].startswith("rank 0 on ")
    assert "is in a step at test_stuck.py:" in said["verdict"]
    assert (over["kind"], over["over"], over["since"]) == ("compute", True, said["since"])
    (closed,) = lines("stall_close")
    assert closed["opened"] == opened["opened"] < closed["closed"]
    text = report_text(tmp_path / "run")
    assert "Stuck" not in text
    assert "stall on rank 0: unknown" in text
    assert "in stand_in_the_middle_of_a_step" in text


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda data: DataLoader(data, batch_size=1), "loader_on_training_thread"),
        (lambda data: telemetry.watch(data[index] for index in range(60)), "source_slow"),
    ],
    ids=["loader", "watched"],
)
def test_a_source_that_hangs(begin, lines, when_stuck, release, make, cause):
    begin()
    when_stuck(release)
    assert len(train(make(Hanging(lambda: in_read(release))))) == 60
    (opened,) = lines("stall_open")
    assert (opened["cause"], opened["evidence"]["stuck_in"]) == (cause, "data_wait")
    assert opened["evidence"]["stuck_at"].startswith("in_read (test_stuck.py:")


def test_a_stuck_run_takes_the_place_of_the_stall_that_was_open(begin, lines, when_stuck, release):
    class Slow(Hanging):
        def __getitem__(self, index):
            time.sleep(0.05)
            return super().__getitem__(index)

    begin(stall_window_seconds=1)
    when_stuck(release, stalls=2)
    data = Slow(lambda: in_read(release), 45)
    assert len(train(DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork"))) == 45
    telemetry.stop()
    first, second, *_ = lines("stall_open")
    assert first["cause"].startswith("workers_")
    assert not {"stuck_in", "stacks"} & first["evidence"].keys()
    assert (second["cause"], second["evidence"]["stuck_in"]) == ("worker_stuck", "data_wait")
    assert lines("stall_close")[0]["closed"] <= second["opened"]


COLLECTIVE = """
    import os, sys, time
    import telemetry
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    telemetry.start("run", stuck_seconds=4)
    for batch in DataLoader(range(40), batch_size=1):
        if rank == 1 and int(batch) == 30:
            print("late", flush=True)
            sys.stdin.readline()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.002)
    dist.destroy_process_group()
"""


def test_who_waits_in_a_collective_names_the_rank_that_does_not_come(tmp_path, lines):
    """The advice is about the hang, and not about a stall that a short window has seen before it."""

    def stuck(event: str) -> dict[int, dict]:
        return {line["rank"]: line for line in lines(event) if "stuck_in" in line["evidence"]}

    script = write(tmp_path, "script.py", COLLECTIVE)
    ranks = [WarmChild(script, cwd=tmp_path, env=of_rank(rank)) for rank in (0, 1)]
    with ranks[0] as zero, ranks[1] as one:
        while one.line() != "late":  # torch 2.9 prints the number of peers to stdout
            pass
        opened = wait_for(lambda: len(found := stuck("stall_open")) == 2 and found, "both are stuck")
        one.tell()
        assert (zero.wait(), one.wait()) == (0, 0)
    assert stuck("stall_close").keys() == {0, 1}
    waits, late = opened[0]["evidence"], opened[1]["evidence"]
    assert waits["stuck_in"] == "compute"
    assert waits["stuck_at"].startswith("all_reduce (distributed_c10d.py:")
    assert "<module> (script.py:" in waits["stuck_at"]
    assert "in all_reduce" in waits["stacks"][0]
    assert late["stuck_at"].startswith("<module> (script.py:")
    assert (opened[0]["cause"], waits["straggler_rank"]) == ("straggler", 1)
    (advice,) = opened[0]["advice"]
    assert advice["action"] == "find out what rank 1 does"
    assert "last seen in <module> (script.py:" in advice["because"]
    assert (opened[1]["cause"], "straggler_rank" in late) == ("unknown", False)


# -- a worker hangs ------------------------------------------------------------------------------------------------


def in_lock(release):
    release.lock.acquire()


def checked(result):
    """The result of a C function, as clients in C take it: whatever interrupts it is an error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def in_c_poll(release):
    entry = (ctypes.c_int * 2)(release.fifo, select.POLLIN)
    assert checked(ctypes.CDLL(None, use_errno=True).poll(entry, 1, 60_000)) == 1


def in_c_semaphore(release):
    library = ctypes.CDLL(None, use_errno=True)
    semaphore = ctypes.create_string_buffer(64)
    checked(library.sem_init(semaphore, 0, 0))
    threading.Thread(target=lambda: (in_read(release), library.sem_post(semaphore)), daemon=True).start()
    until = (ctypes.c_long * 2)(int(time.time()) + 60, 0)
    checked(library.sem_timedwait(semaphore, until))


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


HANGS = [in_lock, in_read, in_sleep, in_python_loop, in_c_loop, in_c_poll, in_c_semaphore]


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_a_worker_that_hangs_is_shown_and_goes_on_unharmed(begin, lines, when_stuck, release, hang):
    begin()
    when_stuck(release)

    def sample():
        hang(release)

    loader = DataLoader(Hanging(sample), batch_size=1, num_workers=2, multiprocessing_context="fork")
    assert [int(batch) for batch in train(loader)] == list(range(60))  # no call of the worker failed
    (opened,) = lines("stall_open")
    (closed,) = wait_for(lambda: lines("stall_close"), "the close")
    evidence = opened["evidence"]
    assert (opened["cause"], closed["cause"], evidence["stuck_in"]) == ("worker_stuck", "worker_stuck", "data_wait")
    assert closed["evidence"]["stuck_for_seconds"] >= evidence["stuck_for_seconds"] >= STUCK_SECONDS
    assert evidence["fetching_seconds"] > 0, "the fetch that was seen last, a figure of its own"
    assert evidence["stuck_at"].endswith(f"< train (test_stuck.py:{train.__code__.co_firstlineno + 2})")
    assert "stacks" not in closed["evidence"]
    assert opened["advice"][1]["setting"] == "timeout"

    assert evidence["stacks"][0].startswith("training thread MainThread (")
    assert f'File "{__file__}"' in evidence["stacks"][0]
    worker = stack_of(opened, "in a fetch for")
    assert worker[0].startswith(f"worker {AT % 2} (pid ")
    names = [line.rpartition(" in ")[2] for line in worker[1:]]
    assert names.index(hang.__name__) < names.index("sample") < names.index("__getitem__")  # innermost first
    assert any(text.startswith(f"worker {1 - AT % 2} (pid ") for text in evidence["stacks"])  # also the idle worker
    assert not any("telemetry-agent" in text for text in evidence["stacks"])


def holding_the_gil(release):
    buffer = ctypes.create_string_buffer(4)
    assert ctypes.PyDLL(None).read(release.fifo, buffer, 4) == 4


def computing_with_the_gil(release):
    next(filter(None, map(release.memory.__getitem__, itertools.repeat(0))))


@pytest.mark.parametrize(("hang", "state"), [(holding_the_gil, "sleeping"), (computing_with_the_gil, "running")])
def test_a_worker_that_holds_the_gil_cannot_answer_and_that_is_said(begin, lines, when_stuck, release, hang, state):
    begin()
    when_stuck(release)
    loader = DataLoader(Hanging(lambda: hang(release)), 1, num_workers=1, multiprocessing_context="fork")
    assert [int(batch) for batch in train(loader)] == list(range(60))
    (opened,) = lines("stall_open")
    heading, text = stack_of(opened, "in a fetch for")
    assert state in heading
    assert text == "  no stack: it did not answer in 1.5 s: it is stopped, has no core, or a call holds the GIL"


class Named(Numbers):
    """Hangs on a FIFO that it opens by name. So it also works in a worker that inherits nothing."""

    def __init__(self, path) -> None:
        super().__init__(60)
        self.path = path

    def __getitem__(self, index):
        if index == AT:
            with open(self.path) as file:
                file.read()
        return index


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_whatever_the_start_method(begin, lines, when_stuck, fifo, context):
    begin()
    when_stuck(lambda: fifo.write_text("go"))
    assert len(train(DataLoader(Named(fifo), batch_size=1, num_workers=1, multiprocessing_context=context))) == 60
    (opened,) = lines("stall_open")
    assert opened["cause"] == "worker_stuck"
    assert "in __getitem__" in stack_of(opened, "worker 0")[1]


def test_a_worker_that_hangs_at_the_start_of_an_epoch(begin, lines, when_stuck, fifo):
    def until_workers_are_seen(batch):
        """The first line may contain a sample of the workers from before."""
        if batch == 0:
            before = len(lines("workers"))
            wait_for(lambda: len(lines("workers")) >= before + 2, "a look at the workers")

    begin(stuck_seconds=3)
    assert len(train(DataLoader(Numbers(30), batch_size=1, num_workers=1), until_workers_are_seen)) == 30
    when_stuck(lambda: fifo.write_text("go"))
    assert len(train(DataLoader(Named(fifo), batch_size=1, num_workers=1, sampler=[AT, 1, 2]))) == 3
    (opened,) = lines("stall_open")
    assert opened["cause"] == "worker_stuck"


def test_a_stopped_worker_is_left_alone(begin, lines, when_stuck):
    begin()
    data = Hanging(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    iterator = iter(DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork"))
    (worker,) = iterator._workers
    when_stuck(lambda: os.kill(worker.pid, signal.SIGCONT))
    assert len(train(iterator)) == 60
    (opened,) = lines("stall_open")
    assert opened["cause"] == "worker_stuck"
    heading, text = stack_of(opened, "worker 0")
    assert "stopped" in heading
    assert "no stack: it did not answer in 1.5 s: it is stopped" in text


def test_a_worker_begun_before_the_agent_cannot_be_asked_and_that_is_said(begin, lines, when_stuck, release):
    data = Hanging(lambda: in_read(release))
    iterator = iter(DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork"))
    begin()
    when_stuck(release)
    assert len(train(iterator)) == 60
    (opened,) = lines("stall_open")
    assert opened["cause"] == "unknown"  # it is not known what its fetches do
    text = "\n".join(stack_of(opened, "worker 0"))
    assert "in a fetch" not in text
    assert "no stack: it was started before the agent" in text


# -- what is not stuck ---------------------------------------------------------------------------------------------

LONG = 1.7 * STUCK_SECONDS


def evaluation():
    train(DataLoader(Numbers(60), batch_size=1))
    with torch.no_grad():
        for _ in DataLoader(Numbers(10, seconds=LONG / 10), batch_size=1):
            pass


def named_phase():
    for _ in DataLoader(Numbers(30), batch_size=1):
        pass
    for batch in DataLoader(Numbers(30), batch_size=1):
        if int(batch) == 20:
            with telemetry.phase("publishing"):
                time.sleep(LONG)


def checkpoint():
    class Slow:
        def write(self, data):
            time.sleep(LONG / 2)  # several times
            return len(data)

        def flush(self):
            pass

    train(DataLoader(Numbers(60), batch_size=1))
    for batch in DataLoader(Numbers(60), batch_size=1):
        if int(batch) == 40:
            torch.save({}, Slow(), _use_new_zipfile_serialization=False)


def first_batch():
    train(DataLoader(Hanging(lambda: time.sleep(LONG)), batch_size=1, sampler=[AT, *range(AT)]))


def compile_in_the_first_step():
    for batch in DataLoader(Numbers(10), batch_size=1):
        if int(batch) == 0:
            time.sleep(LONG)


def after_the_epoch():
    train(DataLoader(Numbers(60), batch_size=1))
    time.sleep(LONG)


def workers_that_are_slow_to_end():
    def init(worker_id):
        multiprocessing.util.Finalize(None, time.sleep, args=(LONG,), exitpriority=10)

    train(DataLoader(Numbers(60), batch_size=1, num_workers=1, worker_init_fn=init, multiprocessing_context="fork"))


def after_break_with_workers():
    for batch in DataLoader(Numbers(60), batch_size=1, num_workers=1):
        if int(batch) == 40:
            break
    time.sleep(LONG)


def a_debugger_s_pause():
    reading, writing = os.pipe()
    threading.Timer(LONG, lambda: os.write(writing, b"continue\n")).start()
    with open(reading) as commands, open(os.devnull, "w") as nowhere:
        debugger = pdb.Pdb(stdin=commands, stdout=nowhere, nosigint=True, readrc=False)
        debugger.use_rawinput = False
        for batch in DataLoader(Numbers(60), batch_size=1):
            if int(batch) == 40:
                debugger.set_trace()
    os.close(writing)


def optimizer_steps_go_on():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.zeros(1)
    for batch in DataLoader(Numbers(42), batch_size=1):
        for _ in range(50 if int(batch) == 40 else 1):
            optimizer.step()
            time.sleep(LONG / 50 if int(batch) == 40 else 0)


NOT_STUCK = [
    evaluation, named_phase, checkpoint, first_batch, compile_in_the_first_step, after_the_epoch,
    workers_that_are_slow_to_end, after_break_with_workers, a_debugger_s_pause, optimizer_steps_go_on,
]  # fmt: skip


@pytest.mark.parametrize("what", NOT_STUCK, ids=lambda what: what.__name__)
def test_what_is_not_stuck(tmp_path, begin, lines, what):
    begin()
    what()
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["steps_total"] >= 1
    assert end["wall_seconds"] > LONG
    # A run too short for a window is judged at its end: the checkpoint may be a stall, but it is not a hang.
    assert [line for line in lines("stall_open") if "stuck_in" in line["evidence"]] == []
    assert end["errors_total"].keys() <= {"nvml"}


STOPPED = """
    import multiprocessing, sys, time
    import telemetry
    from torch.utils.data import DataLoader

    multiprocessing.set_start_method("fork")
    telemetry.start("run", stuck_seconds=1)
    for batch in DataLoader(range(100_000), batch_size=1, num_workers=int(sys.argv[1])):
        time.sleep(0.005)
        if int(batch) == 50:
            print("going", flush=True)
        if int(batch) > 50 and int(batch) % 50 == 0 and open("end").read():
            break
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_was_stopped_was_not_stuck(tmp_path, lines, workers):
    (tmp_path / "end").touch()
    with WarmChild(write(tmp_path, "script.py", STOPPED), workers, cwd=tmp_path, env=quiet()) as child:
        assert child.line() == "going"
        for _ in range(2):
            os.killpg(child.pid, signal.SIGSTOP)
            time.sleep(2.0)  # the process is stopped for this long
            os.killpg(child.pid, signal.SIGCONT)
            before = len(lines("window"))
            wait_for(lambda before=before: len(lines("window")) > before + 3, "it goes on")
        (tmp_path / "end").write_text("now")
        assert child.wait() == 0
    assert [line for line in lines("stall_open") if "stuck_in" in line["evidence"]] == []
