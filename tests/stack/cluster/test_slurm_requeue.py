"""A job that Slurm requeues: one run of two attempts, under the labels of its job."""

import getpass
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stack.cluster import shipped
from stack.cluster.slurm import NODES
from stack.jobs import environment, wait_for
from telemetry.publish.board import Board

pytestmark = pytest.mark.stack

SCRIPT = Path(__file__).parents[1] / "train_again.py"


class RequeuedJob:
    """The shipped job on both nodes, which is requeued once it has written checkpoints, and then ends."""

    def __init__(self, slurm, shared, until):
        self.slurm, self.folder, self.out = slurm, shared / "requeued", shared / "requeued.out"
        self.folder.mkdir()
        self.number = slurm.run(
            "sbatch", "--parsable", "--requeue", "--open-mode=append", "--gpus-per-node=1", "--cpus-per-task=1",
            f"--output={self.out}", "--chdir", shared, shipped.DEPLOY / "slurm" / "train.sbatch", SCRIPT, until,
            self.folder, SHARED_DIR=str(shared), TELEMETRY_INTERVAL_SECONDS="0.1", OMP_NUM_THREADS="1",
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        ).strip()  # fmt: skip
        self.run = f"slurm-{self.number}"
        self.run_dir = shared / "runs" / self.run

    def said(self):
        return self.out.read_text() if self.out.exists() else "nothing"

    def stamps(self, attempt, rank=0):
        path = self.folder / f"stamps-{attempt}-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def trains(self, attempt, steps):
        wait_for(
            f"{steps} steps of attempt {attempt}\n{self.said()}", lambda: len(self.stamps(attempt)) > steps, 90, 0.1
        )

    def report(self):
        command = [sys.executable, "-m", "telemetry", "report", str(self.run_dir), "--json"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr + self.said()
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def job(slurm, monitoring, launch):
    until = launch.folder / "requeued.stop"
    job = RequeuedJob(slurm, monitoring.folder, until)
    job.trains(0, 50)
    slurm.run("scontrol", "requeue", job.number)
    wait_for(f"{job.run} to wait\n{job.said()}", lambda: slurm.state(job.number) == "PENDING", 60, 0.2)
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # it would be held for two minutes
    job.trains(1, 30)
    job.infos = wait_for(
        "both ranks of the second attempt in Prometheus",
        lambda: (
            found if len(found := monitoring.prometheus.query(f'training_run_info{{run="{job.run}"}}')) == 2 else None
        ),
        30,
        0.5,
    )
    until.touch()
    wait_for(f"{job.run} to end\n{job.said()}", lambda: slurm.state(job.number) == "COMPLETED", 60, 0.2)
    yield job
    for node in NODES:
        shutil.rmtree(Board(job.run, str(job.run_dir), node).path, ignore_errors=True)


def test_a_requeued_job_is_one_run_of_two_attempts(job):
    attempts = job.report()["job"]["attempts"]
    assert [each["end"] for each in attempts] == ["killed", "finished"]
    assert [each["ranks"] for each in attempts] == [2, 2]
    resumed = job.stamps(1)[0]["step"]
    assert attempts[1]["resumed_from_step"] == resumed > 0
    lost = max(stamp["step"] for stamp in job.stamps(0)) - resumed
    assert abs(attempts[0]["lost_steps"] - lost) <= 5, "steps after the last heartbeat are not known"


def test_the_time_in_the_queue_is_down_and_the_steps_after_the_checkpoint_are_redone(job):
    goodput = job.report()["job"]["goodput"]
    seconds, wall = goodput["seconds"], goodput["wall_seconds"]
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    first, second = job.stamps(0), job.stamps(1)
    queued = second[0]["at"] - first[-1]["at"]
    assert seconds["down"] + seconds["startup"] > 0.8 * queued
    assert 0 < seconds["down"] < queued
    resumed = second[0]["step"]
    redone = first[-1]["at"] - next(
        stamp["at"] for stamp in first if stamp["what"] == "stepped" and stamp["step"] >= resumed
    )
    assert seconds["redone"] == pytest.approx(redone, abs=0.02 * wall + 0.2)


def test_the_metrics_have_the_labels_of_the_job(job):
    for info in job.infos:
        labels = info["metric"]
        assert labels.get("exported_job", labels["job"]) == job.number
        assert labels["partition"] == "all"
        assert labels["user"] == getpass.getuser()
