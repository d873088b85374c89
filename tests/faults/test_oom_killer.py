"""Processes that the kernel's OOM killer really kills, in a cgroup with a memory limit."""

from __future__ import annotations

import json
import signal

import pytest

from .memory_cgroup import limited_group
from .processes import Child, environment, events, python, wait_for, write

TRAIN = """
    import os, sys, torch
    open(os.path.join(os.environ["GROUP"], "cgroup.procs"), "w").write("0")
    import telemetry
    from quick_optimizers import QuickSGD
    telemetry.start("run", interval_seconds=0.1, log_interval_seconds=0.3)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            if os.environ["EATS"] == "worker" and index == 300:
                eat()
            return torch.randn(16)

    def eat():
        os.environ["EATS"] = ""
        held = []
        while True:
            held.append(bytearray(os.urandom(1 << 20) * 16))

    net = torch.nn.Linear(16, 1)
    optimizer = QuickSGD(net.parameters(), lr=0.1)
    workers = 1 if os.environ["EATS"] == "worker" else 0
    for number, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=workers, multiprocessing_context="fork" if workers else None), 1):
        net(batch).sum().backward()
        optimizer.step()
        if number == 200:
            print("trains", flush=True)
            sys.stdin.readline()
            if os.environ["EATS"] == "self":
                eat()
        if os.environ["EATS"] == "" and number == 500:
            break
"""


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "train.py", TRAIN)
    with limited_group() as group:
        yield tmp_path, group


def attempt(folder, group, eats: str, **more: str) -> int:
    env = environment(GROUP=str(group), EATS=eats, OMP_NUM_THREADS="1", **more)
    with Child(folder / "train.py", cwd=folder, env=env) as child:
        assert child.line() == "trains"
        wait_for(lambda: any((folder / "run" / "attempts").glob("*.beat")), "a heartbeat")
        wait_for(lambda: events(folder / "run", "window", running=True), "a window")
        child.tell()
        return child.wait()


def report(folder) -> tuple[dict, str]:
    found = python("-m", "telemetry", "report", "run", "--json", cwd=folder)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout), python("-m", "telemetry", "report", "run", cwd=folder).stdout


def dead(folder) -> None:
    """Until the newest stamp is old enough for the report to know that the process is gone."""
    wait_for(lambda: report(folder)[0]["job"]["attempts"][-1]["end"] != "running", "the end to be known")


def test_the_report_of_a_dead_run_says_that_the_oom_killer_killed_it(folder):
    folder, group = folder
    assert attempt(folder, group, "self") == -signal.SIGKILL
    dead(folder)
    found, text = report(folder)
    (only,) = found["job"]["attempts"]
    assert (only["end"], only["reason"]) == ("killed", "rank 0 killed by the OOM killer")
    assert "The run has ended: rank 0 killed by the OOM killer." in text
    assert ") was killed by the OOM killer; newest line" in text


def test_the_next_attempt_tells_how_the_first_one_ended(folder):
    folder, group = folder
    assert attempt(folder, group, "self") == -signal.SIGKILL
    assert attempt(folder, group, "") == 0
    found, text = report(folder)
    assert [each["reason"] for each in found["job"]["attempts"]] == ["rank 0 killed by the OOM killer", None]
    assert "attempt 0: killed," in text
    assert "(rank 0 killed by the OOM killer)" in text


def test_a_kill_by_hand_in_the_same_cgroup_is_not_the_oom_killer(folder):
    folder, group = folder
    with Child(folder / "train.py", cwd=folder, env=environment(GROUP=str(group), EATS="", OMP_NUM_THREADS="1")) as one:
        assert one.line() == "trains"
        wait_for(lambda: events(folder / "run", "window", running=True), "a window")
        one.process.kill()
        one.wait()
    dead(folder)
    (only,) = report(folder)[0]["job"]["attempts"]
    assert (only["end"], only["reason"]) == ("killed", None)


def test_a_worker_that_the_oom_killer_kills_is_why_the_rank_failed(folder):
    folder, group = folder
    assert attempt(folder, group, "worker") == 1
    (only,) = report(folder)[0]["job"]["attempts"]
    assert (only["end"], only["reason"]) == ("failed", "RuntimeError; the OOM killer killed a process of rank 0")
