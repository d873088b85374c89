"""Snapshots of real jobs of several ranks: the same steps on all, and no rank waits for another one."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stack.jobs import SLOW_RANK, Job, environment, wait_for

pytestmark = pytest.mark.stack

ALONE = Path(__file__).with_name("train_alone.py")
TRACES = "snapshots/{}-step*/rank-{}.*.pt.trace.json.gz"


def traces(run_dir, reason, rank="*"):
    return sorted(run_dir.glob(TRACES.format(reason, rank)))


def recorded_steps(path):
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = [event["name"] for event in trace["traceEvents"]]
    assert path.name.startswith(f"rank-{trace['distributedInfo']['rank']}.")
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#"))


def lines(job, event):
    return [line for line in job.logs() if line["event"] == event]


def ask(run_dir, *options):
    command = [sys.executable, "-m", "telemetry", "snapshot", str(run_dir), "--timeout", "60", *options]
    return subprocess.run(
        command, env=environment(), cwd=run_dir.parent, capture_output=True, text=True, timeout=120
    )  # fmt: skip


@pytest.fixture
def nodes(launch, request):
    """Four ranks on two emulated Slurm nodes; the run folder is shared, and nothing else."""
    run_dir, until = launch.folder / f"nodes-{request.node.name[-20:]}", launch.folder / "nodes.stop"
    until.unlink(missing_ok=True)
    processes = [
        launch(
            [
                sys.executable, "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", "off",
                "--interval-seconds", "0.5", "--snapshot-settle-seconds", "3600", str(ALONE), str(until),
            ],
            f"nodes-{rank}", SLURM_PROCID=str(rank), SLURM_NTASKS="4", SLURM_LOCALID=str(rank % 2), SLURM_JOB_ID="77",
            SLURM_JOB_NAME="two-nodes", SLURMD_NODENAME=f"n{rank // 2 + 1}",
        )
        for rank in range(4)
    ]  # fmt: skip
    job = Job(processes, run_dir, 0, until)
    wait_for(
        "all ranks step", lambda: len({line["rank"] for line in lines(job, "window") if line["steps"] > 5}) == 4, 60
    )
    yield job
    until.touch()
    job.wait()


def test_a_rank_that_dies_between_agreement_and_recording(nodes):
    command = [sys.executable, "-m", "telemetry", "snapshot", str(nodes.run_dir), "--timeout", "20"]
    asking = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    plan = wait_for("a plan", lambda: list(nodes.run_dir.glob("snapshots/.meeting/*.plan.json")), every=0.01)
    os.kill(nodes.pids()[3], signal.SIGKILL)
    out, err = asking.communicate(timeout=60)
    assert len(plan) == 1
    assert asking.returncode == 0
    assert [line.split(":")[0] for line in out.splitlines()[1:]] == ["rank 0", "rank 1", "rank 2"]
    assert "rank 3 has no result" in err
    assert len(traces(nodes.run_dir, "request")) == 3
    before = {line["rank"]: line["step"] for line in nodes.logs()}
    wait_for("the others train on", lambda: all(
        line["step"] > before[line["rank"]] for line in {line["rank"]: line for line in nodes.logs()}.values() if line["rank"] != 3
    ))  # fmt: skip


@pytest.fixture(scope="module")
def starved(torchrun, launch):
    """Four gloo ranks, one of which starves, with stalls that are soon believed."""
    options = ("--interval-seconds", "0.2", "--stall-window-seconds", "4", "--snapshot-settle-seconds", "1")
    job = torchrun("starved", 4, 0, options, ("--by-hand",), SLOW_RANK=str(SLOW_RANK))
    yield job
    job.until.touch()
    assert job.wait() == [0], job.stderr


def test_a_stall_on_one_rank_gives_traces_of_the_same_steps_on_all(starved):
    found = wait_for("four log lines", lambda: len(lines(starved, "snapshot")) == 4 and lines(starved, "snapshot"), 90)
    assert {(line["result"], line["why"], line["reason"]) for line in found} == {
        ("recorded", None, "loader_on_training_thread")
    }
    assert {line["asked_by"].partition(",")[0] for line in found} == {f"rank {SLOW_RANK}"}
    first, last = found[0]["first_step"], found[0]["last_step"]
    for line in found:
        assert line["pause_seconds"].keys() == {"prepare", "start", "stop"}
        assert line["held_seconds"].keys() == {"save", "free"}
        assert recorded_steps(starved.run_dir / line["path"]) == list(range(first, last + 1))
    assert sorted(line["rank"] for line in found) == [0, 1, 2, 3]
    about = json.loads(gzip.decompress((starved.run_dir / found[0]["path"]).read_bytes()))["telemetry"]
    assert (about["first_step"], about["request"]["steps"]) == (first, last - first + 1)
    assert about["request"]["stall"]["cause"] == about["request"]["reason"] == "loader_on_training_thread"
    assert max(line["started"] for line in found) <= min(line["ended"] for line in found), "at the same time"
    assert {len(path.name.split(".")) for path in traces(starved.run_dir, "*")} == {7}
    stamps = {path.name.split(".")[2] for path in traces(starved.run_dir, "*")}
    assert len(stamps) == 1, "one span, in the words of TensorBoard's plugin"
    report = starved.report()
    assert sorted(s["rank"] for s in report["snapshots"])[:4] == [0, 1, 2, 3]
    assert all(
        set(s) >= {"rank", "first_step", "last_step", "path", "reason", "breakdown"} for s in report["snapshots"]
    )
    for line in lines(starved, "window"):
        assert line["dropped_steps_total"] == 0


def test_the_command_asks_all_ranks_or_one(starved):
    everyone = ask(starved.run_dir, "--steps", "2")
    assert everyone.returncode == 0, everyone.stderr
    assert len(everyone.stdout.splitlines()) == 5
    paths = traces(starved.run_dir, "request")
    assert len(paths) == 4
    assert len({tuple(recorded_steps(path)) for path in paths}) == 1
    one = ask(starved.run_dir, "--rank", "3")
    assert one.returncode == 0, one.stderr
    assert [line.split(":")[0] for line in one.stdout.splitlines()[1:]] == ["rank 3"]
    assert len(traces(starved.run_dir, "request")) == 5
