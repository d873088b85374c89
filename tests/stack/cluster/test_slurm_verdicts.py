"""A Slurm job on two nodes in which one rank is slow, and then hangs: both nodes say which one, where, and why."""

import shutil
from pathlib import Path

import pytest

from stack.cluster.slurm import NODES, SlurmJob
from stack.jobs import SCRIPT, wait_for
from telemetry.node.board import Board
from tests.faults.processes import events

pytestmark = pytest.mark.stack

SLOW = 1
SETTINGS = {"TELEMETRY_STALL_WINDOW_SECONDS": "8", "TELEMETRY_STUCK_SECONDS": "3"}


class Troubled(SlurmJob):
    """Rank 1 thinks in each step, and hangs once a file is there."""

    def __init__(self, slurm, shared, folder):
        self.hang = folder / "slurm-verdicts.hang"
        arguments = ("--slow-seconds", "0", "--think-seconds", "0.1", "--hang", self.hang)
        super().__init__(slurm, shared, folder / "verdicts.stop", *arguments, SLOW_RANK=str(SLOW), **SETTINGS)

    def logged(self, event):
        """The lines of all ranks so far."""
        assert self.slurm.state(self.number) in {"PENDING", "CONFIGURING", "RUNNING"}, self.said()
        return events(self.run_dir, event, running=True)

    def node_of(self, rank):
        return next(line["node"] for line in self.logged("run_start") if line["rank"] == rank)


@pytest.fixture(scope="module")
def job(slurm, launch, tmp_path_factory):
    started = Troubled(slurm, tmp_path_factory.mktemp("verdicts"), launch.folder)
    yield started
    slurm.run("scancel", "--signal=KILL", started.number)
    for node in NODES:  # a cancelled job's boards would stay for an hour
        shutil.rmtree(Board(started.run, str(started.run_dir), node).path, ignore_errors=True)


def test_the_slow_rank_of_a_slurm_job_is_named(job):
    def stalled():
        found = [line for line in job.logged("stall_open") if line["rank"] != SLOW]
        return [line for line in found if line["cause"] == "straggler"]

    evidence = wait_for("a straggler", stalled, 120, every=0.5)[0]["evidence"]
    assert (evidence["straggler_rank"], evidence["straggler_node"]) == (SLOW, job.node_of(SLOW))
    assert evidence["straggler_node"] in NODES
    assert evidence["straggler_reason"].startswith("takes longer to compute a step, mostly in think (train_ddp.py:")


def test_both_nodes_of_a_slurm_job_name_the_rank_that_hangs(job):
    wait_for("steps", lambda: {line["rank"] for line in job.logged("window") if line["steps"]} == {0, 1}, 120, 0.5)
    job.hang.touch()

    def named():
        lines = [line for line in job.logged("hang") if line.get("kind") == "compute" and not line["silent_ranks"]]
        return {line["node"]: line for line in lines} if {line["node"] for line in lines} == set(NODES) else None

    line_of_hang = Path(SCRIPT).read_text().split("threading.Event().wait()")[0].count("\n") + 1
    for said in wait_for("a line of each node", named, 120, every=0.5).values():
        (suspect,) = said["suspects"]
        assert (suspect["rank"], suspect["node"]) == (SLOW, job.node_of(SLOW))
        assert suspect["where"].startswith(f"train_ddp.py:{line_of_hang} (")
        assert [waiting["ranks"] for waiting in said["waiting"]] == [[[1 - SLOW, 1 - SLOW]]]
