"""The shipped Slurm job on two emulated nodes: found, recorded, and nothing of it left behind."""

import itertools
import re
import shutil
import subprocess
import sys

import pytest

from stack.cluster.slurm import NODES, SlurmJob
from stack.jobs import environment, wait_for
from stack.test_snapshot_ranks import recorded_steps, traces
from telemetry.node.board import Board
from tests.faults.processes import events

pytestmark = pytest.mark.stack


def ranks_by_node(monitoring, job):
    """What Prometheus shows of a job: its ranks by the name of their node."""
    assert job.slurm.state(job.number) in {"PENDING", "CONFIGURING", "RUNNING"} or pytest.fail(job.said())
    series = monitoring.prometheus.query(
        f'training_run_info{{run="{job.run}"}} and on (run, rank) training_steps_total > 3'
    )
    return {s["metric"]["node"]: s["metric"]["rank"] for s in series}


@pytest.fixture(scope="module")
def jobs(slurm, monitoring, launch):
    """Two jobs on the same two nodes, both of them training and seen."""
    started = [SlurmJob(slurm, monitoring.folder, launch.folder / f"{name}.stop") for name in ("ends", "cancelled")]
    for job in started:
        wait_for(
            f"both nodes of {job.run} in Prometheus", lambda job=job: len(ranks_by_node(monitoring, job)) == 2, 90, 0.5
        )
    yield started
    for job, node in itertools.product(started, NODES):  # a cancelled job's boards would stay for an hour
        shutil.rmtree(Board(job.run, str(job.run_dir), node).path, ignore_errors=True)


def files_of(monitoring, job):
    return [path.name for path in monitoring.targets.glob(f"{job.run}-*")]


def test_both_nodes_are_found_by_the_shipped_configuration(monitoring, jobs):
    for job in jobs:
        by_node = ranks_by_node(monitoring, job)
        assert sorted(by_node) == list(NODES)
        assert sorted(by_node.values()) == ["0", "1"]
        infos = monitoring.prometheus.query(f'training_run_info{{run="{job.run}"}}')
        assert {info["metric"]["instance"].partition(":")[0] for info in infos} == set(NODES)
        names = sorted(re.sub(r"-[0-9a-f]{12}\.", ".", name) for name in files_of(monitoring, job))
        assert names == [f"{job.run}.{node}.json" for node in NODES]


def test_a_snapshot_of_the_same_steps_on_both_nodes(jobs):
    job = jobs[0]
    asked = subprocess.run(
        [sys.executable, "-m", "telemetry", "snapshot", str(job.run_dir), "--steps", "2", "--timeout", "60"],
        env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip

    assert asked.returncode == 0, asked.stderr + job.said()
    paths = traces(job.run_dir, "request")
    assert sorted(path.name.split("_")[0].split(".", 1)[1] for path in paths) == list(NODES)
    steps = [recorded_steps(path) for path in paths]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 2


def test_target_files_are_gone_however_a_job_ends(monitoring, slurm, jobs):
    ends, cancelled = jobs
    assert len(files_of(monitoring, ends)) == len(files_of(monitoring, cancelled)) == 2

    slurm.run("scancel", cancelled.number)
    cancelled.ended("CANCELLED")
    assert len(files_of(monitoring, ends)) == 2, "the other job's stay"
    ends.until.touch()
    ends.ended("COMPLETED")
    accused = [line for line in events(ends.run_dir, "stall_open") if line["cause"] == "straggler"]
    assert [*accused, *events(ends.run_dir, "hang")] == [], "nothing was wrong on either node"

    for job in jobs:
        wait_for(f"no target file of {job.run}", lambda job=job: files_of(monitoring, job) == [])
        wait_for(
            f"{job.run} gone from Prometheus",
            lambda job=job: (
                monitoring.prometheus.query(f'up * on (instance) group_left training_run_info{{run="{job.run}"}}') == []
            ),
        )
