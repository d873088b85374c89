"""A run that hangs is shown in the log, the metrics and the report."""

from __future__ import annotations

import threading
import time

import pytest
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers
from tests.faults.processes import Child, environment, events, wait_for, write
from tests.faults.stuck_runs import (
    AT,
    Hanging,
    Release,
    in_read,
    lines,
    stack_of,
    start,
    steps,
    train,
    when_stuck,
)
from tests.running_agent import scrape


def test_a_step_that_hangs_is_shown_in_log_metrics_and_report(tmp_path, capsys):
    lock = threading.Lock()
    lock.acquire()
    heard = []
    agent = start(tmp_path, port=0, on_stall=heard.append)
    other = threading.Thread(target=lambda: wait_for(lambda: heard, "a stall"), name="a helper")
    other.start()

    def look():
        wait_for(lambda: scrape(agent)["training_stall_active", "unknown"] == 1, "the metric")
        wait_for(lambda: scrape(agent).get(("training_hang_active", "compute")) == 1, "the kind of the hang")
        assert scrape(agent)["training_hang_active", "fetch"] == 0
        lock.release()

    watching = when_stuck(agent, look)
    train(DataLoader(Numbers(60), batch_size=1), steps(lock, hang_at=AT))
    watching.join()
    other.join()
    (opened,) = lines(agent, "stall_open")
    evidence = opened["evidence"]
    assert opened["cause"] == "unknown"
    assert evidence["stuck_in"] == "compute"
    assert evidence["stuck_at"].startswith("stand_in_the_middle_of_a_step (stuck_runs.py:")
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
    wait_for(lambda: ("training_hang_active", "compute") not in scrape(agent), "no hang")
    telemetry.stop()
    said, over = lines(agent, "hang")
    assert said["verdict"].startswith("rank 0 on ")
    assert "is in a step at stuck_runs.py:" in said["verdict"]
    assert (over["kind"], over["over"], over["since"]) == ("compute", True, said["since"])
    (closed,) = lines(agent, "stall_close")
    assert closed["opened"] == opened["opened"] < closed["closed"]

    from telemetry.report.command import report

    report(str(agent.run_dir), as_json=False)
    text = capsys.readouterr().out
    assert "stall on rank 0: unknown" in text
    assert "in stand_in_the_middle_of_a_step" in text


def test_the_report_of_a_run_that_hangs_begins_with_it(tmp_path):
    from telemetry.report.logs import load
    from tests.report_logs import summarize

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
    assert opened["evidence"]["stuck_at"].startswith("in_read (stuck_runs.py:")


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
    assert (
        len(
            train(
                DataLoader(
                    Slow(lambda: in_read(release) or AT, 45),
                    batch_size=1,
                    num_workers=1,
                    multiprocessing_context="fork",
                )
            )
        )
        == 45
    )
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
    """The advice is about the hang, and not about a stall that a short window has seen before it."""
    return [line for line in events(run_dir, event) if "stuck_in" in line["evidence"]]


def the_stalls_of_a_collective(tmp_path, stuck_seconds):
    """The log lines by rank, when rank 1 reads from a pipe and rank 0 waits for it in an all-reduce."""
    script = write(tmp_path, "script.py", COLLECTIVE)
    environments = [environment(RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
    rest = (tmp_path / "store", stuck_seconds)
    with (
        Child(script, 0, *rest, cwd=tmp_path, env=environments[0]) as zero,
        Child(script, 1, *rest, cwd=tmp_path, env=environments[1]) as one,
    ):
        said = one.line()
        while said.startswith("[Gloo]"):  # torch 2.9 prints the number of peers to stdout
            said = one.line()
        assert said == "late"
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
    assert advice["action"] == "find out what rank 1 does"
    assert "last seen in <module> (script.py:" in advice["because"]
    assert opened[1]["cause"] == "unknown"
    assert "straggler_rank" not in opened[1]["evidence"]
