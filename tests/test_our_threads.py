"""What the agent's own threads must not do to the training process: import, write the environment, hold frames."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from itertools import repeat
from pathlib import Path

import pytest

from telemetry.sources.stuck_stacks import all_stacks
from telemetry.util.stacks import stack_of
from tests.faults.processes import HANG

ROOT = Path(__file__).parents[1]

WATCHED = """
import functools, io, multiprocessing, os, socket, sys, threading, time, urllib.request
from importlib.abc import MetaPathFinder
from telemetry.safety.threads import named, running

multiprocessing.set_start_method("fork")  # no worker can import what -c runs

seen = os.open(sys.argv[1] + "/imports", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # workers write into it, too


class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        thread = named(threading.get_ident())
        if thread is not None:
            os.write(seen, f"{thread} {name}\\n".encode())
        return None


sys.meta_path.insert(0, Watch())
import torch
import telemetry

# From here on all functions of `time` are replaced, as a script may do it before it starts the agent.
calls = os.open(sys.argv[1] + "/calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def seen_from(name, real):
    @functools.wraps(real)
    def replacement(*arguments):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        thread = named(threading.get_ident())
        if thread is not None or caller.startswith("telemetry."):
            os.write(calls, f"{name} in {caller} on {thread}\\n".encode())
        return real(*arguments)
    return replacement


for name, real in list(vars(time).items()):
    if callable(real) and not isinstance(real, type):
        setattr(time, name, seen_from(name, real))
time.sleep(0)

from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4)


stalled = threading.Event()
agent = telemetry.start(
    sys.argv[1] + "/run", port=0, host=socket.gethostname(), interval_seconds=0.1, log_interval_seconds=0.2,
    stall_window_seconds=1, start_line=False, on_stall=lambda stall: stalled.set(),
)
started = set(running())
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
epochs = 0
while epochs < 100 and not (stalled.is_set() and agent.snapshots.counts["recorded"]):
    epochs += 1
    telemetry.request_snapshot(steps=2)
    for batch in DataLoader(Slow(), 2, num_workers=1):
        layer(batch).sum().backward()
        optimizer.step()
        started |= set(running())
    torch.save(layer.state_dict(), io.BytesIO())
    with torch.no_grad():
        for batch in DataLoader(Slow(), 20):
            layer(batch)
    if agent.metrics_url:
        urllib.request.urlopen(agent.metrics_url, timeout=10).read()
assert agent.snapshots.counts["recorded"] and stalled.is_set(), (agent.snapshots.counts, epochs)
telemetry.stop()
print(*sorted(started))
"""


def test_our_threads_import_nothing_and_call_no_clock_and_no_sleep_of_a_script(tmp_path):
    """In a training with workers, a stall, a snapshot, checkpoints, evaluations, and a host that is a name.

    All that the agent can need is imported before the script starts.
    """
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TELEMETRY_END_LINE": "off"}
    arguments = [sys.executable, "-c", WATCHED, str(tmp_path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imports").read_text() == ""
    assert {"telemetry-agent", "telemetry-export"} <= set(done.stdout.split()), "these had something to do"
    assert sorted(set((tmp_path / "calls").read_text().splitlines())) == []


class Batch:
    """Something that the training holds in a local variable. Notes which thread frees it."""

    freed_by: set[int] = set()

    def __del__(self, get_ident=threading.get_ident) -> None:
        self.freed_by.add(get_ident())


class Training:
    """A thread in whose functions batches come and go."""

    def __init__(self) -> None:
        self.over = False
        self.thread = threading.Thread(target=self.run)

    def step(self, depth: int) -> None:
        batch = Batch()
        if depth:
            self.step(depth - 1)
        del depth
        assert batch is not None

    def run(self) -> None:
        while not self.over:
            self.step(5)

    def __enter__(self):
        Batch.freed_by = set()
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # threads change as often as they can
        gc.disable()  # a collection on the looking thread frees what it finds
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over = True
        self.thread.join()
        sys.setswitchinterval(self.interval)
        gc.enable()


@pytest.mark.parametrize("see", [stack_of, lambda ident: all_stacks(ident, ())], ids=["one", "all"])
def test_a_look_at_the_training_frees_nothing_of_it(see):
    with Training() as training:
        for _ in repeat(None, 2000):
            see(training.thread.ident)
    assert Batch.freed_by == {training.thread.ident}


AUDITED = """
import sys, threading
sys.addaudithook(lambda *_: threading.get_ident())
sys.path.append("tests")  # as pytest does
from tests.test_our_threads import all_stacks, stack_of, test_a_look_at_the_training_frees_nothing_of_it as check
check(stack_of)
check(lambda ident: all_stacks(ident, ()))
"""


def test_a_look_frees_nothing_beside_a_python_audit_hook():
    """filelock has such a hook, and torch.compile imports it. A hook cannot be removed, so this needs its own process."""
    done = subprocess.run([sys.executable, "-c", AUDITED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_with_quotes_and_control_characters_keeps_its_name():
    """A stack knows only what the frame prints."""
    name = 'it\'s "quoted", line 7, code x>\n\\\udc80.py'
    over, inside = threading.Event(), threading.Event()
    scope = {"over": over, "inside": inside, "__name__": "strange"}
    exec(compile("def wait():\n    inside.set()\n    over.wait()\n", name, "exec"), scope)
    thread = threading.Thread(target=scope["wait"])
    thread.start()
    assert inside.wait(60)
    (spot,) = [spot for spot in stack_of(thread.ident) if spot.module == "strange"]
    over.set()
    thread.join()
    assert (spot.file, spot.function) == (name, "wait")
