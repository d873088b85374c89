"""A job that hangs: the rank, the kind and the line are in the log."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.faults.hang_campaign import SUSPENDED_SECONDS, HangingJob, line_of
from tests.faults.processes import wait_for

ONE_NODE, TWO_NODES = ("n1", "n1", "n1"), ("n1", "n1", "n2", "n2")

needs_recorder = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no flight recorder for gloo"
)


def said_of(folder, what: str, kind: str, *, odd: int, ranks: int = 3, seen_by: int | None = None, **variables) -> dict:
    """What the log says of a job that hangs. ``seen_by``: the rank that sees that it hangs."""
    with HangingJob(folder, what, odd=odd, nodes=ONE_NODE[:ranks], **variables) as job:
        job.reached(seen_by)
        return job.verdict(kind)


def is_at(suspect: dict, comment: str) -> bool:
    return suspect["where"].startswith(f"train.py:{line_of(comment)} (")


STANDING = [
    ("fetch", "fetch", "the fetch", "in a fetch"),
    ("compute", "compute", "the compute", "in a step"),
    ("checkpoint", "phase", "the checkpoint", "in a checkpoint"),
    ("evaluation", "phase", "the evaluation", "in an evaluation"),
    ("left", "rank_left", "after the loop", "out of its training loop, after 12 steps"),
    ("barrier", "rank_left", "after the loop, in a barrier", "out of its training loop, after 12 steps, waiting for"),
]


@pytest.mark.parametrize(("what", "kind", "line", "doing"), STANDING, ids=[case[0] for case in STANDING])
def test_the_rank_that_stands_elsewhere_is_named_with_its_line(tmp_path, what, kind, line, doing):
    said = said_of(tmp_path, what, kind, odd=1)
    (suspect,), (waiting,) = said["suspects"], said["waiting"]
    assert (suspect["rank"], suspect["node"]) == (1, "n1")
    assert suspect["doing"].startswith(doing)
    assert is_at(suspect, line)
    assert (waiting["ranks"], waiting["collective"]) == ([[0, 0], [2, 2]], "all_reduce")
    assert said["verdict"].startswith("ranks 0, 2 have waited in all_reduce #")


def test_all_ranks_in_a_checkpoint_that_does_not_go_on(tmp_path):
    said = said_of(tmp_path, "all_save", "phase", odd=1)
    assert [(each["rank"], each["doing"]) for each in said["suspects"]] == [(r, "in a checkpoint") for r in range(3)]
    assert said["suspects"][0]["where"] == f"train.py:{line_of('the checkpoint')} (write)"
    assert said["waiting"] == []


def test_the_worker_in_a_fetch_is_named_with_its_line(tmp_path):
    (suspect,) = said_of(tmp_path, "worker", "fetch", odd=1, ranks=2, seen_by=0)["suspects"]
    assert (suspect["rank"], suspect["doing"].partition(",")[0]) == (1, "in a fetch")
    assert suspect["where"] == f"train.py:{line_of('the fetch')} (__getitem__)"


@needs_recorder
def test_a_rank_that_ddp_waits_for_is_named(tmp_path):
    """The stack shows the backward pass, the recorder its collective. torch 2.9 has the recorder for gloo, but off."""
    said = said_of(tmp_path, "ddp", "compute", odd=0, ranks=2, TORCH_FR_BUFFER_SIZE="2000")
    assert [suspect["rank"] for suspect in said["suspects"]] == [0]
    assert [(each["ranks"], each["collective"]) for each in said["waiting"]] == [([[1, 1]], "all_reduce")]


@needs_recorder
def test_without_torch_s_recorder_the_stack_names_the_collective(tmp_path):
    said = said_of(tmp_path, "lock", "compute", odd=1, ranks=2, TORCH_FR_BUFFER_SIZE="0")
    assert said["waiting"] == [{"ranks": [[0, 0]], "collective": "all_reduce", "sequence": 13}]
    assert said["recorder"].startswith("off; start the job with TORCH_FR_BUFFER_SIZE=")


SIGNALS = [
    (signal.SIGKILL, "rank_gone", "gone: its process has ended"),
    (signal.SIGSTOP, "rank_stopped", "stopped, by a signal or a debugger"),
]


@pytest.mark.parametrize("odd", [0, 1])  # one of them serves the node: the first that started
@pytest.mark.parametrize(("signum", "kind", "doing"), SIGNALS, ids=["killed", "stopped"])
def test_a_process_that_does_not_run_is_named(tmp_path, signum, kind, doing, odd):
    with HangingJob(tmp_path, "signal", odd=odd, nodes=ONE_NODE) as job:
        job.reached()
        job.send(signum)
        said = job.verdict(kind)
    (suspect,), (waiting,) = said["suspects"], said["waiting"]
    assert (suspect["rank"], suspect["doing"]) == (odd, doing)
    assert sum(last - first + 1 for first, last in waiting["ranks"]) == 2
    assert waiting["collective"] == "all_reduce"
    assert said["rank"] != odd


def test_a_node_whose_ranks_are_all_killed_is_named(tmp_path):
    with HangingJob(tmp_path, "signal", odd=2, nodes=TWO_NODES, AT="25", PAUSE="0.1") as job:
        job.reached()
        job.send(signal.SIGKILL, 2, 3)
        said = job.verdict("rank_gone")
    assert [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]] == [(2, "n2"), (3, "n2")]
    assert said["waiting"][0]["ranks"] == [[0, 1]]


def test_a_rank_that_has_ended_is_named(tmp_path):
    said = said_of(tmp_path, "end", "rank_left", odd=1)
    assert [(s["rank"], s["doing"]) for s in said["suspects"]] == [(1, "at its end: it has left the job by itself")]


def test_c_code_that_holds_the_gil_is_told_by_the_other_ranks(tmp_path):
    (suspect,) = said_of(tmp_path, "gil", "compute", odd=0, ranks=2)["suspects"]
    assert (suspect["rank"], suspect["where"]) == (0, None)
    assert suspect["doing"] == "in a step, and its agent does not answer, as while C code holds the GIL"


def test_collectives_in_another_order(tmp_path):
    said = said_of(tmp_path, "order", "mismatch", odd=2)
    (suspect,) = said["suspects"]
    assert suspect["rank"] == 2
    assert is_at(suspect, "the other collective")
    waiting = [(each["ranks"], each["collective"]) for each in said["waiting"]]
    assert waiting == [([[0, 1]], "all_reduce"), ([[2, 2]], "broadcast")]


def test_over_two_nodes_both_name_the_rank_of_the_other(tmp_path):
    with HangingJob(tmp_path, "fetch", odd=3, nodes=TWO_NODES) as job:
        job.reached()

        def by_node() -> dict | None:
            found = {line["node"]: line for line in job.logged("hang", kind="fetch")}
            return found if len(found) == 2 else None

        found = wait_for(by_node, "a line of each node")
    for said in found.values():
        (suspect,) = said["suspects"]
        assert (suspect["rank"], suspect["node"]) == (3, "n2")
        assert suspect["where"] == f"train.py:{line_of('the fetch')} (__getitem__)"
        assert said["waiting"] == [{"ranks": [[0, 2]], "collective": "all_reduce", "sequence": 13}]
        assert said["silent_ranks"] == 0


@pytest.mark.parametrize("what", ["evaluate", "one_evaluates", "compile", "debugger", "slow", "suspended"])
def test_a_job_that_goes_on_accuses_nobody(tmp_path, what):
    with HangingJob(tmp_path, "slow" if what == "suspended" else what, odd=1, nodes=ONE_NODE[:2]) as job:
        if what == "suspended":
            wait_for(lambda: job.logged("window"), "it goes on")
            job.suspend(SUSPENDED_SECONDS)
        assert job.accused() == []
