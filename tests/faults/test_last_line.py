"""The agent's last line on stderr: whole, at the right place, or not at all, however the process ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from faults.processes import HANG, RUN, environment, events, python, without_start_line, write
from tests.faults.warm_python import warm_python

LINE = re.compile(r"^telemetry: (?!run ).*; see: telemetry report .*\n", re.MULTILINE)

TRAIN = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from quick_optimizers import QuickSGD

def main():
    model = torch.nn.Linear(4, 4)
    optimizer = QuickSGD(model.parameters(), lr=0.1)
    for batch, in DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=2, num_workers=WORKERS):
        model(batch).sum().backward()
        optimizer.step()
    sys.stderr.write("the loop is over\\n")
ENDING

if __name__ == "__main__":
    main()
"""

ONE = {
    "return": "pass",
    "status": "sys.exit(3)",
    "text": "sys.exit('a message')",
    "error": "raise ValueError('x')",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "terminate-handled": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); os.kill(os.getpid(), 15)",
    "unflushed": "sys.stderr.write('no line break ')",
    "forked-child": "sys.stderr.flush(); os.fork() and os.wait()",
    "stopped-twice": "import telemetry; telemetry.stop(); telemetry.stop()",
}
ORDER_OF_EXIT = ("error", "interrupt", "forked-child")
"""Endings of a whole process: in it the agent asks to be told of the exit before torch is imported."""

NONE = {
    "terminate": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "_exit": "sys.stderr.flush(); os._exit(7)",
    "kill": "os.kill(os.getpid(), 9)",
    "closed": "sys.stderr.close()",
    "no-stream": "sys.stderr = None",
}


FILL = """
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 512):
        pass
except BlockingIOError:
    os.set_blocking(2, True)
"""


def train(folder, ending: str, workers: int = 0):
    ending = textwrap.indent(textwrap.dedent(ending), "    ")
    return write(folder, "script.py", TRAIN.replace("ENDING", ending).replace("WORKERS", str(workers)))


def on() -> dict[str, str]:
    return {k: v for k, v in environment().items() if k != "TELEMETRY_END_LINE"}


@pytest.mark.parametrize("ending", [*ONE, *NONE])
def test_the_script_ends_as_it_does_without_the_line(ending, tmp_path):
    train(tmp_path, (ONE | NONE)[ending])
    run = python if ending in ORDER_OF_EXIT else warm_python
    off = run(*RUN, "script.py", cwd=tmp_path)
    done = run(*RUN, "script.py", cwd=tmp_path, env=on())
    without, lines = LINE.subn("", done.stderr)
    if ending == "unflushed":
        without, lines = re.subn(LINE.pattern.lstrip("^"), "", done.stderr)
    assert lines == (1 if ending in ONE else 0), done.stderr
    assert (done.returncode, done.stdout) == (off.returncode, off.stdout)
    assert without_start_line(without)[0] == without_start_line(off.stderr)[0]
    if ending in ONE:
        assert done.stderr.splitlines()[-1].endswith("run"), "the line is the last one, after any traceback"


def test_workers_and_their_children_write_none(tmp_path):
    train(tmp_path, "pass", workers=2)
    done = python(*RUN, "script.py", cwd=tmp_path, env=on())
    assert len(LINE.findall(done.stderr)) == 1, done.stderr


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_exit(tmp_path):
    train(tmp_path, FILL)
    reading, writing = os.pipe()
    try:
        child = subprocess.run(
            [sys.executable, *RUN, "script.py"], cwd=tmp_path, env=on(), stderr=writing, timeout=HANG, check=False
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert child.returncode == 0
    assert events(tmp_path / "run", "run_end")


@pytest.mark.parametrize("broken", ["/dev/full", "pipe"])
def test_a_stream_that_cannot_be_written_changes_no_exit_status(broken, tmp_path):
    train(tmp_path, "pass")
    source = (tmp_path / "script.py").read_text().replace('sys.stderr.write("the loop is over\\n")', "pass")
    (tmp_path / "script.py").write_text(source)
    if broken == "pipe":
        reading, target = os.pipe()
        os.close(reading)
    else:
        target = os.open("/dev/full", os.O_WRONLY)
    try:
        child = subprocess.run(
            [sys.executable, *RUN, "script.py"], cwd=tmp_path, env=on(), stderr=target, timeout=HANG, check=False
        )
    finally:
        os.close(target)
    assert child.returncode == 0
    assert events(tmp_path / "run", "run_end")


@pytest.mark.parametrize("clean_up", ["", "time.sleep(1)"], ids=["at once", "with ticks in between"])
def test_a_stuck_run_that_is_interrupted_says_so_and_so_does_its_report(tmp_path, clean_up):
    train(tmp_path, "time.sleep(120)")
    source = (tmp_path / "script.py").read_text()
    source = source.replace("optimizer.step()", "optimizer.step(); steps.append(1); len(steps) < 15 or stick()")
    source = source.replace("def main():", "steps = []\ndef stick():\n    from threading import Timer\n"
        "    Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()\n    time.sleep(100)\n\ndef main():")  # fmt: skip
    source = source.replace("    main()\n", f"    try:\n        main()\n    finally:\n        {clean_up or 'pass'}\n")
    (tmp_path / "script.py").write_text(source)
    settings = ("--stuck-seconds", "1", "--interval-seconds", "0.1")
    done = python(*RUN, *settings, "script.py", cwd=tmp_path, env=on())
    (line,) = LINE.findall(done.stderr)
    told = "Stuck before its end: rank 0 was in the compute of a step and had not gone on since"
    assert line.startswith(f"telemetry: {told}"), line
    report = python("-m", "telemetry", "report", "run", cwd=tmp_path)
    assert told in report.stdout


TWO_RANKS = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from quick_optimizers import QuickSGD

rank, trains, ended = int(os.environ["RANK"]), Path("rank-0-trains"), Path("rank-1-has-ended")


class Samples(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.02 * rank)
        return torch.zeros(4)


model = torch.nn.Linear(4, 4)
optimizer = QuickSGD(model.parameters(), lr=0.1)
while rank and not trains.exists():
    time.sleep(0.01)
left = 150 if rank else 30
for batch in DataLoader(Samples()):
    model(batch).sum().backward()
    time.sleep(0.01 * (1 - rank))
    optimizer.step()
    trains.touch()
    left -= rank or ended.exists()
    if not left:
        break
"""


def test_rank_0_tells_of_a_rank_that_ended_before_it(tmp_path):
    write(tmp_path, "script.py", TWO_RANKS)
    command = [sys.executable, *RUN, "--interval-seconds", "0.1", "script.py"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=on() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert "telemetry: rank" not in ranks[1].communicate(timeout=HANG)[1]
    (tmp_path / "rank-1-has-ended").touch()
    (line,) = LINE.findall(ranks[0].communicate(timeout=HANG)[1])
    assert line.startswith("telemetry: Starved: rank 1 spent ")
