"""A job that Slurm requeues: one run of two attempts, under the labels of its job."""

import getpass
import os
import shutil
import sys
from pathlib import Path

import pytest

from stack.cluster import shipped
from stack.cluster.slurm import NODES
from stack.jobs import wait_for
from telemetry.node.board import Board
from tests.faults.processes import report
from tests.faults.restart_campaign import FINISHED, KILLED, SCRIPT, Attempt, process_of, stamps_of, true_books

pytestmark = pytest.mark.stack


class RequeuedJob:
    """The shipped job on both nodes, which is requeued once it has written checkpoints, and then ends."""

    def __init__(self, slurm, shared):
        self.slurm, self.folder, self.out = slurm, shared / "requeued", shared / "requeued.out"
        self.folder.mkdir()
        self.number = slurm.run(
            "sbatch", "--parsable", "--requeue", "--open-mode=append", "--gpus-per-node=1", "--cpus-per-task=1",
            f"--output={self.out}", "--chdir", shared, shipped.DEPLOY / "slurm" / "train.sbatch", SCRIPT,
            self.folder, SHARED_DIR=str(shared), TELEMETRY_INTERVAL_SECONDS="0.1", OMP_NUM_THREADS="1",
            TELEMETRY_LOG_INTERVAL_SECONDS="0.5",  # attempts of seconds: between windows, steps are taken as equal
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        ).strip()  # fmt: skip
        self.run = f"slurm-{self.number}"
        self.run_dir = shared / "runs" / self.run

    def said(self):
        return self.out.read_text() if self.out.exists() else "nothing"

    def steps(self, attempt):
        return [stamp["number"] for stamp in stamps_of(self.folder, attempt) if stamp["what"] == "stepped"]

    def trains(self, attempt, steps):
        wait_for(
            f"{steps} steps of attempt {attempt}\n{self.said()}", lambda: len(self.steps(attempt)) > steps, 90, 0.1
        )

    def attempts(self):
        """What the stamps say of both attempts."""
        ways = (KILLED, FINISHED)
        return [Attempt([process_of(self.folder, self.run_dir, n, rank) for rank in (0, 1)], ways[n]) for n in (0, 1)]


@pytest.fixture(scope="module")
def job(slurm, monitoring):
    job = RequeuedJob(slurm, monitoring.folder)
    job.trains(0, 70)
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
    (job.folder / "until").write_text("0")
    wait_for(f"{job.run} to end\n{job.said()}", lambda: slurm.state(job.number) == "COMPLETED", 60, 0.2)
    yield job
    for node in NODES:
        shutil.rmtree(Board(job.run, str(job.run_dir), node).path, ignore_errors=True)


def test_a_requeued_job_is_one_run_of_two_attempts(job):
    attempts = report(job.run_dir)["job"]["attempts"]
    assert [each["end"] for each in attempts] == ["killed", "finished"]
    assert [each["ranks"] for each in attempts] == [2, 2]
    first, second = job.attempts()
    assert attempts[1]["resumed_from_step"] == second.resumed > 0
    lost = first.done() - second.resumed
    assert abs(attempts[0]["lost_steps"] - lost) <= 5, "steps after the last heartbeat are not known"


def test_each_second_is_where_the_stamps_of_the_script_have_it(job):
    """The time in the queue is down, and the steps after the checkpoint are redone."""
    goodput = report(job.run_dir)["job"]["goodput"]
    seconds, wall = goodput["seconds"], goodput["wall_seconds"]
    books = true_books(job.attempts(), stuck_seconds=30.0)
    assert sum(books.values()) == pytest.approx(wall, rel=0.01)
    assert min(books[category] for category in ("redone", "down", "evaluation", "checkpoint", "restore")) > 0
    off = {category: seconds[category] - books.get(category, 0.0) for category in seconds}
    assert max(map(abs, off.values())) <= 0.01 * wall, (off, books, seconds)


def test_the_metrics_have_the_labels_of_the_job(job):
    for info in job.infos:
        labels = info["metric"]
        assert labels.get("exported_job", labels["job"]) == job.number
        assert labels["partition"] == "all"
        assert labels["user"] == getpass.getuser()
