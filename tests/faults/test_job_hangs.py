"""A job that hangs: the rank, the kind and the line are in the log."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from tests.faults.hanging_jobs import HangingJob, line_of
from tests.faults.processes import wait_for

ONE_NODE = ("n1", "n1", "n1")

needs_recorder = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no flight recorder for gloo"
)

STANDING = [
    ("fetch", "fetch", "the fetch", "in a fetch"),
    ("compute", "compute", "the compute", "in a step"),
    ("lock", "compute", "the lock", "in a step, waiting for a lock"),
    ("checkpoint", "phase", "the checkpoint", "in a checkpoint"),
    ("evaluation", "phase", "the evaluation", "in an evaluation"),
    ("left", "rank_left", "after the loop", "out of its training loop, after 12 steps"),
    ("barrier", "rank_left", "after the loop, in a barrier", "out of its training loop, after 12 steps, waiting for"),
]


@pytest.mark.parametrize(("what", "kind", "line", "doing"), STANDING, ids=[case[0] for case in STANDING])
def test_the_rank_that_stands_elsewhere_is_named_with_its_line(tmp_path, what, kind, line, doing):
    with HangingJob(tmp_path, what, odd=1, nodes=ONE_NODE) as job:
        job.reached()
        said = job.verdict(kind)
    (suspect,) = said["suspects"]
    assert (suspect["rank"], suspect["node"]) == (1, "n1")
    assert suspect["doing"].startswith(doing)
    assert suspect["where"].startswith(f"train.py:{line_of(line)} (")
    (waiting,) = said["waiting"]
    assert waiting["ranks"] == [[0, 0], [2, 2]]
    assert waiting["collective"] == "all_reduce"
    assert said["verdict"].startswith("ranks 0, 2 have waited in all_reduce #")


def test_all_ranks_in_a_checkpoint_that_does_not_go_on(tmp_path):
    with HangingJob(tmp_path, "all_save", odd=1, nodes=ONE_NODE) as job:
        job.reached()
        said = job.verdict("phase")
    assert [(suspect["rank"], suspect["doing"]) for suspect in said["suspects"]] == [
        (rank, "in a checkpoint") for rank in range(3)
    ]
    assert said["suspects"][0]["where"] == f"train.py:{line_of('the checkpoint')} (write)"
    assert said["waiting"] == []


def test_a_node_whose_ranks_are_all_killed_is_named(tmp_path):
    with HangingJob(tmp_path, "signal", odd=2, nodes=("n1", "n1", "n2", "n2"), AT="25", PAUSE="0.1") as job:
        job.reached()
        for rank in (2, 3):
            job.send(signal.SIGKILL, rank)
        said = job.verdict("rank_gone")
    assert [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]] == [(2, "n2"), (3, "n2")]
    assert said["waiting"][0]["ranks"] == [[0, 1]]


def test_the_worker_in_a_fetch_is_named_with_its_line(tmp_path):
    with HangingJob(tmp_path, "worker", odd=1, nodes=ONE_NODE[:2]) as job:
        job.reached(0)
        said = job.verdict("fetch")
    (suspect,) = said["suspects"]
    assert (suspect["rank"], suspect["doing"].partition(",")[0]) == (1, "in a fetch")
    assert suspect["where"] == f"train.py:{line_of('the fetch')} (__getitem__)"


@needs_recorder
def test_a_rank_that_ddp_waits_for_is_named(tmp_path):
    # torch 2.9 has the recorder for gloo, but off.
    with HangingJob(tmp_path, "ddp", odd=0, nodes=ONE_NODE[:2], TORCH_FR_BUFFER_SIZE="2000") as job:
        job.reached()
        said = job.verdict("compute")
    assert [suspect["rank"] for suspect in said["suspects"]] == [0]
    assert said["waiting"][0]["ranks"] == [[1, 1]]
    assert said["waiting"][0]["collective"] == "all_reduce", (
        "the stack shows the backward pass, the recorder its collective"
    )


SIGNALS = [
    (signal.SIGKILL, "rank_gone", "gone: its process has ended"),
    (signal.SIGSTOP, "rank_stopped", "stopped, by a signal or a debugger"),
]


@pytest.mark.parametrize("odd", [0, 1, 2])  # one of them serves the node: the first that started
@pytest.mark.parametrize(("signum", "kind", "doing"), SIGNALS, ids=["killed", "stopped"])
def test_a_process_that_does_not_run_is_named(tmp_path, signum, kind, doing, odd):
    with HangingJob(tmp_path, "signal", odd=odd, nodes=ONE_NODE) as job:
        job.reached()
        job.send(signum)
        said = job.verdict(kind)
    (suspect,) = said["suspects"]
    assert (suspect["rank"], suspect["doing"]) == (odd, doing)
    assert sum(last - first + 1 for first, last in said["waiting"][0]["ranks"]) == 2
    assert said["waiting"][0]["collective"] == "all_reduce"
    assert said["rank"] != odd


def test_a_rank_that_has_ended_is_named(tmp_path):
    with HangingJob(tmp_path, "end", odd=1, nodes=ONE_NODE) as job:
        job.reached()
        said = job.verdict("rank_left")
    assert [(s["rank"], s["doing"]) for s in said["suspects"]] == [(1, "at its end: it has left the job by itself")]


def test_c_code_that_holds_the_gil_is_told_by_the_other_ranks(tmp_path):
    with HangingJob(tmp_path, "gil", odd=0, nodes=ONE_NODE[:2]) as job:
        job.reached()
        said = job.verdict("compute")
    (suspect,) = said["suspects"]
    assert (suspect["rank"], suspect["where"]) == (0, None)
    assert suspect["doing"] == "in a step, and its agent does not answer, as while C code holds the GIL"


def test_collectives_in_another_order(tmp_path):
    with HangingJob(tmp_path, "order", odd=2, nodes=ONE_NODE) as job:
        job.reached()
        said = job.verdict("mismatch")
    assert [suspect["rank"] for suspect in said["suspects"]] == [2]
    assert said["suspects"][0]["where"].startswith(f"train.py:{line_of('the other collective')} (")
    assert [(w["ranks"], w["collective"]) for w in said["waiting"]] == [
        ([[0, 1]], "all_reduce"),
        ([[2, 2]], "broadcast"),
    ]


def test_over_two_nodes_both_name_the_rank_of_the_other(tmp_path):
    with HangingJob(tmp_path, "fetch", odd=3, nodes=("n1", "n1", "n2", "n2")) as job:
        job.reached()
        found = wait_for(
            lambda: (
                (f := {line["node"]: line for line in job.hangs() if line["kind"] == "fetch"}) and len(f) == 2 and f
            ),
            "a line of each node",
        )
    for said in found.values():
        assert [(s["rank"], s["node"]) for s in said["suspects"]] == [(3, "n2")]
        assert said["suspects"][0]["where"] == f"train.py:{line_of('the fetch')} (__getitem__)"
        assert said["waiting"] == [{"ranks": [[0, 2]], "collective": "all_reduce", "sequence": 13}]
        assert said["silent_ranks"] == 0


@needs_recorder
def test_without_torch_s_recorder_the_stack_names_the_collective(tmp_path):
    with HangingJob(tmp_path, "lock", odd=1, nodes=ONE_NODE[:2], TORCH_FR_BUFFER_SIZE="0") as job:
        job.reached()
        said = job.verdict("compute")
    assert said["waiting"] == [{"ranks": [[0, 0]], "collective": "all_reduce", "sequence": 13}]
    assert said["recorder"].startswith("off; start the job with TORCH_FR_BUFFER_SIZE=")


# -- what is no hang ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["evaluate", "one_evaluates", "compile", "debugger", "slow"])
def test_a_job_that_goes_on_accuses_nobody(tmp_path, what):
    with HangingJob(tmp_path, what, odd=1, nodes=ONE_NODE[:2], stuck=1.0) as job:
        for rank in (0, 1):
            job.reached(rank, "done")
        assert job.hangs() == []
        assert [line for line in job.logged("stall_open") if "stuck_in" in line["evidence"]] == []


def test_a_job_whose_processes_were_all_stopped_accuses_nobody(tmp_path):
    with HangingJob(tmp_path, "slow", odd=1, nodes=ONE_NODE[:2], stuck=1.0) as job:
        wait_for(lambda: job.logged("window"), "it goes on")
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for rank in (0, 1):
                job.send(signum, rank)
            time.sleep(3.0 if signum == signal.SIGSTOP else 0)  # so long the machine was suspended
        for rank in (0, 1):
            job.reached(rank, "done")
        assert job.hangs() == []
