"""A forked child never releases what it has inherited of a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

TRAINING = """
import gc, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import telemetry
from tests.quick_optimizers import QuickSGD
from tests.fakes.device import Event, install_cuda

report, folder = int(sys.argv[1]), sys.argv[2]
install_cuda(torch, report)
parent = os.getpid()
agent = telemetry.start(folder, port="off", interval_seconds=0.1, start_line=False)
agent.canary = Event(enable_timing=True)  # stands for anything else of a device that the agent may hold
model = torch.nn.Linear(2, 2)
optimizer = QuickSGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.rand(16, 2))


def train(loader):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        while agent.tracker.gpu is None:  # the agent has seen that the device is in use
            time.sleep(0.01)


def ends(loader):
    workers = []
    iterator = iter(loader)
    workers += iterator._workers
    yield from iterator
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0, worker.exitcode


train(DataLoader(data, batch_size=4))
"""

EPOCHS = """
for epoch in range(3):
    train(ends(DataLoader(data, batch_size=4, num_workers=2)))
    with torch.no_grad():
        for _ in ends(DataLoader(data, batch_size=4, num_workers=2)):
            pass
"""

FORKS = """
for end in ("_exit", "exit", "agent", "hooks"):
    child = os.fork()
    if child == 0:
        if end == "agent":
            second = telemetry.start(folder, port="off", start_line=False)
            telemetry.stop()
            del second
        if end == "hooks":
            for _ in DataLoader(data, batch_size=4):
                optimizer.zero_grad()  # no gradient is left: on a device, any work in a child fails
                optimizer.step()
        del agent
        gc.collect()
        if end == "_exit":
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, end
"""

LAST = """
assert agent.tracker.gpu.pairs > 0
assert Event.made >= 3
telemetry.stop()
"""


# Python 3.12 warns of a fork beside any threads, so also beside those of CUDA's driver.
CUDA_THREADS = ("-W", "ignore:This process:DeprecationWarning")


def run(tmp_path, *parts: str, script: str = TRAINING, options: tuple[str, ...] = ()) -> tuple[set[int], int, str]:
    """The pids in which an event was destroyed, the pid of the training, and its stderr."""
    report, write = os.pipe()
    code = "\n".join((script, *parts))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, *options, "-c", code, str(write), str(tmp_path / "run")]
    process = subprocess.Popen(
        arguments, pass_fds=(write,), env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    os.close(write)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    with os.fdopen(report) as lines:
        destroyed = {int(line) for line in lines}
    assert process.returncode == 0, errors
    return destroyed, process.pid, errors


def test_workers_destroy_no_event_of_the_training(tmp_path):
    destroyed, training, errors = run(tmp_path, EPOCHS, LAST)
    assert destroyed == {training}  # the agent is stopped there, and releases its events
    assert errors == ""


def test_plain_forks_destroy_no_event_of_the_training(tmp_path):
    destroyed, training, errors = run(tmp_path, FORKS, LAST)
    assert destroyed == {training}
    assert errors == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with its driver")
def test_children_end_well_beside_real_events(tmp_path):
    real = TRAINING.replace("install_cuda(torch, report)\n", "").replace(
        "model = torch.nn.Linear(2, 2)", "model = torch.nn.Linear(2, 2).cuda()"
    )
    real = real.replace(
        "agent.canary = Event(enable_timing=True)",
        "agent.canary = torch.cuda.Event(enable_timing=True); agent.canary.record()",
    )
    real = real.replace("model(batch)", "model(batch.cuda())")
    last = LAST.replace("assert Event.made >= 3\n", "")
    assert run(tmp_path, EPOCHS, FORKS, last, script=real, options=CUDA_THREADS)[2] == ""


KEPT = """
import os, sys
from telemetry.hooks.patching import keep
from tests.fakes.device import Event

Event.report = int(sys.argv[1])
keep(Event(enable_timing=True))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_what_is_kept_outlives_the_interpreter(tmp_path):
    assert run(tmp_path, script=KEPT)[0] == set()
