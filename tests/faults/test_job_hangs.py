"""A job that hangs: the rank, the kind and the line are in the log. The ways to hang are those of the campaign."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.faults.hang_campaign import HEALTHY, NODES, WAYS, HangingJob, hang, healthy, line_of
from tests.faults.processes import wait_for

needs_recorder = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no flight recorder for gloo"
)


@pytest.mark.parametrize("way", [pytest.param(way, marks=needs_recorder if way == "ddp" else ()) for way in WAYS])
def test_the_rank_that_a_hanging_job_waits_for_is_named_with_its_line(way):
    trial = hang(way, odd=1, step=12)
    assert trial.right, trial.said


@pytest.mark.parametrize("what", HEALTHY)
def test_a_job_that_goes_on_accuses_nobody(what):
    trial = healthy(what, odd=1)
    assert trial.right, trial.said


@pytest.mark.parametrize(
    ("signum", "kind", "doing"),
    [
        (signal.SIGKILL, "rank_gone", "gone: its process has ended"),
        (signal.SIGSTOP, "rank_stopped", "stopped, by a signal or a debugger"),
    ],
)
def test_the_rank_that_served_its_node_may_be_the_one(tmp_path, signum, kind, doing):
    with HangingJob(tmp_path, "signal", odd=0, nodes=("n1", "n1", "n1")) as job:
        job.reached()
        job.send(signum)
        said = job.verdict(kind)
    (suspect,), (waiting,) = said["suspects"], said["waiting"]
    assert (suspect["rank"], suspect["doing"]) == (0, doing)
    assert (waiting["ranks"], waiting["collective"]) == ([[1, 2]], "all_reduce")
    assert said["rank"] != 0


@needs_recorder
def test_without_torch_s_recorder_the_stack_names_the_collective(tmp_path):
    with HangingJob(tmp_path, "lock", odd=1, nodes=("n1", "n1"), TORCH_FR_BUFFER_SIZE="0") as job:
        job.reached()
        said = job.verdict("compute")
    assert said["suspects"][0]["doing"] == "in a step, waiting for a lock"
    assert said["waiting"] == [{"ranks": [[0, 0]], "collective": "all_reduce", "sequence": 13}]
    assert said["recorder"].startswith("off; start the job with TORCH_FR_BUFFER_SIZE=")


def test_over_two_nodes_both_name_the_rank_of_the_other(tmp_path):
    with HangingJob(tmp_path, "fetch", odd=3, nodes=NODES) as job:
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
