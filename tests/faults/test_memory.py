"""Scripts in a memory cgroup that leak, or whose processes the kernel's OOM killer really kills."""

from __future__ import annotations

import signal

import pytest

from tests.faults.leak_campaign import LeakingRun
from tests.faults.memory_group import MIB, limited_group
from tests.faults.processes import events, quiet, report, report_text, wait_for, write
from tests.faults.warm_python import WarmChild


def test_a_leak_is_found_before_the_kernel_kills(tmp_path):
    """The campaign has all ways."""
    try:
        run = LeakingRun(tmp_path, "worker_cache", bytes_per_second=12 * MIB, limit_bytes=1500 * MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with run:

        def told():
            assert run.process.poll() is None, run.stderr
            found = (line["memory"] for line in run.windows() if line.get("memory", {}).get("where"))
            return next((memory for memory in found if "exhausted_in_seconds" in memory), None)

        said = wait_for(told, "a window with the part that grows and the end of memory")
        run.end()
    assert (said["where"], said["exhausted"]) == ("workers", "memory")
    assert said["exhausted_in_seconds"] > 0
    assert report(run.run_dir)["ranks"][0]["memory"]["where"] == "workers"


# -- the OOM killer ------------------------------------------------------------------------------------------------

TRAIN = """
    import os, sys, torch
    from tests.faults.memory_group import enter
    enter(os.environ["GROUP"])
    import telemetry
    from tests.quick_optimizers import QuickSGD
    telemetry.start("run", log_interval_seconds=0.3)

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
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if os.environ["EATS"] == "worker" else {}
    for number, batch in enumerate(torch.utils.data.DataLoader(Data(), **workers), 1):
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
def attempt(tmp_path):
    """Starts the training in one group. The result is its exit status, once the report knows that it has ended."""
    script = write(tmp_path, "train.py", TRAIN)
    with limited_group() as group:

        def run(eats: str, *, killed: bool = False) -> int:
            env = quiet(GROUP=str(group.folder), EATS=eats, OMP_NUM_THREADS="1")
            with WarmChild(script, cwd=tmp_path, env=env) as child:
                assert child.line() == "trains"
                wait_for(lambda: any((tmp_path / "run" / "attempts").glob("*.beat")), "a heartbeat")
                wait_for(lambda: events(tmp_path / "run", "window", running=True), "a window")
                child.send(signal.SIGKILL) if killed else child.tell()
                status = child.wait()
            wait_for(lambda: report(tmp_path / "run")["job"]["attempts"][-1]["end"] != "running", "the end to be known")
            return status

        yield run


def ends(folder) -> list[tuple]:
    return [(each["end"], each["reason"]) for each in report(folder / "run")["job"]["attempts"]]


def test_the_report_and_the_next_attempt_say_that_the_oom_killer_killed_it(attempt, tmp_path):
    assert attempt("self") == -signal.SIGKILL
    killed = ("killed", "rank 0 killed by the OOM killer")
    assert ends(tmp_path) == [killed]
    text = report_text(tmp_path / "run")
    assert "Killed: rank 0 killed by the OOM killer." in text
    assert ") was killed by the OOM killer; newest line" in text

    assert attempt("") == 0
    assert ends(tmp_path) == [killed, ("finished", None)]
    text = report_text(tmp_path / "run")
    assert "attempt 0: killed," in text
    assert "(rank 0 killed by the OOM killer)" in text


def test_a_kill_by_hand_in_the_same_cgroup_is_not_the_oom_killer(attempt, tmp_path):
    assert attempt("", killed=True) == -signal.SIGKILL
    assert ends(tmp_path) == [("killed", None)]


def test_a_worker_that_the_oom_killer_kills_is_why_the_rank_failed(attempt, tmp_path):
    assert attempt("worker") == 1
    assert ends(tmp_path) == [("failed", "RuntimeError; the OOM killer killed a process of rank 0")]
