"""How a run has ended comes first: exceptions and their meaning, a full /dev/shm, and a first fetch that never ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import nvml as fake
from msgspec import UNSET

from telemetry.agent.ending import EndEvidence, failure_of
from telemetry.diagnosis.endings import RunEnd
from telemetry.diagnosis.verdict import UNSURE, RankWaits, RunFacts, VerdictKind, judge
from telemetry.log.lines import GpuErrorLine, GpuMemoryFull, RunEndLine

ROOT = Path(__file__).parents[1]
CALM = RankWaits(
    rank=0,
    steps=100,
    wait_seconds=1.0,
    compute_seconds=99.0,
    first_wait_seconds=0.1,
    exposed_seconds=1.0,
    starved_ratio=0.2,
)

HELD = """
import sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset

LOCK = threading.Lock()

class Texts(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        with LOCK:
            return torch.zeros(4)

LOCK.acquire()
for batch in DataLoader(Texts(), num_workers=1, timeout=float(sys.argv[1])):
    pass
"""

LARGER = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Clips(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        return torch.zeros(1000 * (100 + 10 * index))

for batch in DataLoader(Clips(), num_workers=2, prefetch_factor=4):
    time.sleep(0.01)
"""

FAILING = """
import time
from torch.utils.data import DataLoader

def train():
    for number, batch in enumerate(DataLoader(range(400))):
        time.sleep(0.005)
        if number == 100:
            raise ValueError("a password: hunter2")

train()
"""

BROKEN_GPU = """
import os, pathlib, time
import fakes.nvml
import telemetry
from torch.utils.data import DataLoader

for number, batch in enumerate(DataLoader(range(10_000))):
    time.sleep(0.005)
    if "gpu_xid" in telemetry.metrics():  # the agent has seen the GPU
        gpu = fakes.nvml.Gpu(xids=[(79, fakes.nvml.NO_INSTANCE), (45, fakes.nvml.NO_INSTANCE)])
        fakes.nvml.write_state(pathlib.Path(os.environ[fakes.nvml.STATE_VARIABLE]), fakes.nvml.State(gpus=[gpu]))
        raise RuntimeError("CUDA error: unspecified launch failure")
"""


def run(
    folder: Path,
    script: str,
    *arguments: str,
    under: str = "",
    environ: dict | None = None,
    status: int = 1,
    **settings,
) -> tuple[str, Path]:
    """Run a script under the agent. Returns its last line on stderr and the run folder."""
    (folder / "script.py").write_text(script)
    run_dir = folder / "run"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "telemetry",
        "run",
        "--run-dir",
        str(run_dir),
        "--port=off",
        "--end-line=short",
        *options,
    ]
    command += [str(folder / "script.py"), *arguments]
    if under:
        command = ["unshare", "-m", "sh", "-c", f'{under} && exec "$@"', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TELEMETRY_")}
    done = subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)} | (environ or {}), capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stderr.splitlines()[-1], run_dir


def reported(run_dir: Path) -> dict:
    found = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(run_dir), "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(found.stdout)


def test_the_exception_and_its_line_come_first_and_its_text_is_nowhere(tmp_path):
    line, run_dir = run(tmp_path, FAILING)
    ended = "Failed: ValueError in train at script.py:9. Until then no rank lost more than "
    assert line.startswith(f"telemetry: {ended}")
    assert reported(run_dir)["verdict"].startswith(ended)
    assert "hunter2" not in "".join(path.read_text() for path in (run_dir / "logs").iterdir())


ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float)
parser.parse_args()
"""

IN_WORKER = """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {}["hunter2"]

for batch in DataLoader(Rows(), num_workers=1):
    pass
"""


@pytest.mark.parametrize(
    ("script", "arguments", "status", "ended"),
    [
        ("import sys\nsys.exit(3)", [], 3, "exit status 3 in <module> at script.py:2, before the first step. The script"),
        (ARGUMENTS, ["--rate", "x"], 2, ("exit status 2 in <module> at script.py:5, before the first step. The script ended "
         "itself, as argparse does for a wrong argument; what it printed says why")),
        (IN_WORKER, [], 1, "KeyError in __getitem__ at script.py:8, before the first step"),
    ],
)  # fmt: skip
def test_a_run_that_ends_before_its_first_step_has_its_own_line(tmp_path, script, arguments, status, ended):
    line, run_dir = run(tmp_path, script, *arguments, status=status)
    assert line.startswith(f"telemetry: Failed: {ended}")
    found = reported(run_dir)
    assert found["verdict"].startswith(f"Failed: {ended}")
    assert found["advice"] == []
    assert "hunter2" not in "".join(path.read_text() for path in (run_dir / "logs").iterdir())


def test_the_line_of_an_installed_program_is_in_its_own_package(tmp_path, monkeypatch):
    """``pip`` writes the file of a command. Its line, and that of the library that raised, tell nothing."""
    command = "import sys\nfrom program.cli import main\nif __name__ == '__main__':\n    sys.argv[0] = 'x'\n    sys.exit(main())"
    packages = tmp_path / "site-packages"
    (packages / "program").mkdir(parents=True)
    (packages / "program" / "cli.py").write_text("import library\n\ndef main():\n    library.work()\n")
    (packages / "library.py").write_text("def work():\n    raise RuntimeError\n")
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(RuntimeError) as raised:
        exec(compile(command, str(tmp_path / "bin" / "program"), "exec"), {"__name__": "__main__"})
    error = raised.value
    trace = error.__traceback__
    while trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    end = ends_with(monkeypatch, error.with_traceback(trace))
    assert end.exception_at == "main at cli.py:4"


def test_descriptors_that_a_worker_has_used_up_are_told_by_where_the_end_of_the_file_is_met():
    def recvfds():
        raise EOFError

    with pytest.raises(EOFError) as raised:
        recvfds()
    assert failure_of(raised.value) == "descriptors_used_up"
    assert failure_of(EOFError()) is None
    assert failure_of(OSError(98, "x")) == "port_in_use"
    assert failure_of(MemoryError()) == "memory_full"


def test_a_first_fetch_that_never_ends_is_found_and_has_the_stack_of_its_worker(tmp_path):
    line, run_dir = run(tmp_path, HELD, "12", stuck_seconds=2)
    begins = "Stuck before its end: rank 0 was waiting for a batch and had not gone on since before "
    failed = "Failed: RuntimeError in <module> at script.py:16, before the first step: a batch did not come within the timeout"
    assert line.startswith(f"telemetry: {begins}")
    assert "Cause: worker_stuck" in line and failed in line
    assert "; its worker stood in __getitem__ at script.py:12. Do: " in line
    found = reported(run_dir)
    assert found["verdict"].startswith(begins)
    (stall,) = found["stalls"]
    assert (stall["cause"], stall["first_step"]) == ("worker_stuck", 0)
    assert any("worker 0" in stack and "script.py" in stack for stack in stall["evidence"]["stacks"])
    assert ("multiprocessing_context", "forkserver") in [(one["setting"], one["value"]) for one in stall["advice"]]


def test_a_wait_that_the_timeout_ends_early_is_a_hang_too(tmp_path):
    line, run_dir = run(tmp_path, HELD, "4")
    assert line.startswith("telemetry: Stuck before its end: rank 0 was waiting for a batch")
    assert "a batch did not come within the timeout of the DataLoader" in line
    (stall,) = reported(run_dir)["stalls"]
    assert (stall["cause"], stall["first_step"]) == ("worker_stuck", 0)


def test_a_full_shared_memory_is_named_with_its_size(tmp_path):
    mount = "mount -t tmpfs -o size=12m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a small /dev/shm")
    line, run_dir = run(tmp_path, LARGER, under=mount)
    ended = r"Failed: RuntimeError in <module> at script.py:\d+: /dev/shm of 13 MB was full.*--shm-size"
    assert re.search(ended, line)
    assert re.match(ended, reported(run_dir)["verdict"])
    (last,) = [each for each in lines_of(run_dir) if each["event"] == "run_end"]
    assert (last["failure"], last["shared_memory_bytes"]) == ("shared_memory_full", 12 << 20)


def test_an_error_of_the_gpu_just_before_the_exception_is_read_and_named(tmp_path):
    (tmp_path / "driver").mkdir()
    environ = fake.subprocess_environment(tmp_path / "driver")
    environ["PYTHONPATH"] = f"{environ['PYTHONPATH']}{os.pathsep}{ROOT}"
    line, run_dir = run(tmp_path, BROKEN_GPU, environ=environ)
    named = r" GPU 0 on node \S+ had reported Xid 79: it has fallen off the bus\."
    ended = rf"Failed: RuntimeError in <module> at script.py:\d+\.{named}"
    assert " Do: have the node checked" in line
    assert re.search(ended, line)
    found = reported(run_dir)
    assert re.match(ended, found["verdict"])
    assert [attempt["reason"] for attempt in found["job"]["attempts"]] == ["RuntimeError; Xid 79 on rank 0"]
    errors = [(each["xid"], each["gpu"], each["text"]) for each in lines_of(run_dir) if each["event"] == "gpu_error"]
    assert errors[0] == (79, 0, "it has fallen off the bus")
    assert [xid for xid, *_ in errors] == [79, 45]


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for path in (run_dir / "logs").iterdir() for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "shared_memory_full"),
        ("unable to allocate shared memory(shm) for file </torch_7_1_2>: No space left on device (28)", "shared_memory_full"),
        ("unable to write to file </torch_7_1_2>: No space left on device (28)", "shared_memory_full"),
        ("DataLoader timed out after 5 seconds", "loader_timeout"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "worker_killed"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "worker_ended"),
        ("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ", "worker_ended"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "gpu_memory_full"),
        ("No space left on device", "disk_full"),
        ("[enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/0", "disk_full"),
        ("Too many open files. Communication with the workers is no longer possible.", "descriptors_used_up"),
        ("received 0 items of ancdata", "descriptors_used_up"),
        ("unable to open shared memory object </torch_7_1_2> in read-write mode: Too many open files (24)", "descriptors_used_up"),
        ("CUDA error: device-side assert triggered", "device_assert"),
        ("The server socket has failed to listen on any local network address. EADDRINUSE: address already in use", "port_in_use"),
        ("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to", "memory_full"),
        ("the model is on fire", None),
    ],
)  # fmt: skip
def test_what_an_exception_of_torch_means(text, failure):
    assert failure_of(RuntimeError(text)) == failure
    outer = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    outer.__cause__ = RuntimeError(text)
    assert failure_of(outer) in {failure, "worker_ended"}
    assert failure_of(ValueError(text)) is None


FULL = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of which 512.00 MiB is free. "
    "Including non-PyTorch memory, this process has 79.50 GiB memory in use. Of the allocated memory 70.00 GiB is allocated "
    "by PyTorch, with 20.00 MiB allocated in private pools (e.g., CUDA Graphs), and {} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def ends_with(monkeypatch, error: BaseException) -> RunEndLine:
    evidence = EndEvidence()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    evidence.at_exit()
    return evidence.settled


def test_the_memory_of_a_full_gpu_is_named_with_what_torch_held(monkeypatch):
    end = ends_with(monkeypatch, torch.OutOfMemoryError(FULL.format("8.25 GiB")))
    gib = 1 << 30
    assert end.gpu_memory == GpuMemoryFull(3 * gib // 2, 80 * gib, gib // 2, 70 * gib, 33 * gib // 4)
    assert ended(end).startswith(
        "Failed: OutOfMemoryError: the memory of the GPU was full. 1.5 GiB more did not fit; 70.0 GiB of 80.0 GiB were "
        "allocated, and 8.2 GiB reserved but not allocated. Until then"
    )
    assert "Do: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the reserved memory is in pieces." in ended(end)
    small = ends_with(monkeypatch, torch.OutOfMemoryError(FULL.format("512 bytes")))
    assert small.gpu_memory.unallocated_bytes == 512
    assert "512 B reserved but not allocated. Until then" in ended(small)
    assert "Do: use a smaller batch" in ended(small)


@pytest.mark.parametrize(
    "text", ["CUDA out of memory.", "CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 8 GiB)"]
)
def test_a_full_gpu_without_sizes_has_none(monkeypatch, text):
    """The text is torch's, and may change."""
    end = ends_with(monkeypatch, torch.OutOfMemoryError(text))
    assert (end.failure, end.gpu_memory) == ("gpu_memory_full", UNSET)
    assert ended(end).startswith("Failed: OutOfMemoryError: the memory of the GPU was full. Until then")


def ended(process: RunEndLine | None, *ranks: int, oom: str = "") -> str:
    facts = RunFacts(
        [CALM], world_size=max(1, len(ranks)), ended=True, broke_off=True, end=RunEnd(ranks or (0,), process, oom)
    )
    found = judge(facts)
    assert found.kind == VerdictKind.FAILED
    return found.text


def test_each_end_in_words():
    assert ended(RunEndLine(exit_status=3)).startswith(
        "Failed: exit status 3. The script ended itself; what it printed says why. Until then no rank lost more than 1.0 %"
    )
    assert ended(RunEndLine(exception="E")).startswith("Failed: E. Until then")
    assert ended(RunEndLine(exception="KeyboardInterrupt", exception_at="f at a.py:1")).startswith(
        "Interrupted: KeyboardInterrupt in f at a.py:1. Until then"
    )
    assert ended(None, 0).startswith("Killed: rank 0 did not end by itself. Until then")
    assert ended(None, 0, 1).startswith("Killed: ranks 0-1 did not end by themselves. Until then")
    killed = ended(None, 0, oom="rank 0 killed by the OOM killer")
    assert killed.startswith("Killed: rank 0 killed by the OOM killer. Until then")
    assert "Do: raise the memory limit of its cgroup" in killed
    assert ended(RunEndLine(exception="E"), 0, 1).startswith("Failed on rank 0: E.")
    assert judge(RunFacts([CALM], ended=True)).text.startswith("Healthy: ")


def test_a_minute_without_a_step_is_not_a_run_without_one():
    still = dataclasses.replace(CALM, steps=0)
    assert judge(RunFacts([still])).text == "No training step has ended yet."
    recent = judge(RunFacts([still], last_seconds=60.0, most_in="data_wait"))
    assert recent.text == "No training step has ended in the last 60 s; most ranks are in data wait."
    assert recent.level == UNSURE


def test_an_error_of_a_gpu_that_the_script_causes_has_other_advice():
    def said(xid: int) -> str:
        end = RunEnd((0,), RunEndLine(exception="E"), gpu_fault=GpuErrorLine(rank=0, xid=xid))
        return judge(RunFacts([CALM], ended=True, broke_off=True, end=end)).text

    assert said(31).startswith(
        "Failed: E. The GPU had reported Xid 31: a kernel of the script has read or written an address that is not "
        "there. Until then"
    )
    assert "Do: run it with CUDA_LAUNCH_BLOCKING=1" in said(31)
    assert "Do: have the node checked" in said(79)
