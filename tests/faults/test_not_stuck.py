"""Long phases, pauses and slow starts are not a stuck run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import pdb  # noqa: T100 - a debugger is what is tested
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers
from tests.faults.processes import Child, events, wait_for, write
from tests.faults.stuck_runs import AT, STUCK_SECONDS, Hanging, lines, start, train

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

    train(DataLoader(Numbers(60), batch_size=1, num_workers=1, worker_init_fn=init, multiprocessing_context="fork"))


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
    assert agent.accounting.ledger.wall_seconds > LONG
    # A run too short for a window is judged at its end: the checkpoint may be a stall, but it is not a hang.
    assert [line for line in lines(agent, "stall_open") if "stuck_in" in line["evidence"]] == []
    assert agent.errors.counts == {}


SCRIPT = """
    import multiprocessing, sys, time
    import telemetry
    from torch.utils.data import DataLoader

    multiprocessing.set_start_method("fork")
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
            time.sleep(2.0)  # the process is stopped for this long
            os.killpg(child.pid, signal.SIGCONT)
            before = len(events(tmp_path / "run", "window", running=True))
            wait_for(lambda: len(events(tmp_path / "run", "window", running=True)) > before + 3, "it goes on")
        (tmp_path / "end").write_text("now")
        assert child.wait() == 0
    assert [line for line in events(tmp_path / "run", "stall_open") if "stuck_in" in line["evidence"]] == []
