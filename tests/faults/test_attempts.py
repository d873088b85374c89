"""A run in several attempts: each way to end, and the seconds of every category, compared with the script's stamps."""

from __future__ import annotations

import json
import signal
import time

import msgspec
import pytest

from telemetry.agent.run_so_far import RunState
from tests.faults.processes import RUN, Child, environment, events, python, quiet, report, report_text, wait_for, write
from tests.faults.restart_campaign import LOST, RestartingJob, compared
from tests.faults.warm_python import WarmChild, running_server, warm_python

# Checkpoints are of every 20th step. In the first attempt a fetch hangs, too.
ENDS = {
    "step": (37, {"hangs_after": 15}), "checkpoint": (40, {}), "restore": (0, {}), "exception": (13, {}), "status": (27, {}),
    "finish": (0, {}),
}  # fmt: skip
LOST_STEPS = [16, 20, 0, 13, 7, 0]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """All attempts, each with the same command."""
    running_server()  # so that no attempt waits for it to start
    job = RestartingJob(tmp_path_factory.mktemp("attempts"), warm=True)
    for number, (end, (after, more)) in enumerate(ENDS.items()):
        if end == "finish":
            job.until(20)
        job.attempt(end, after, **{"hangs_after": 0} | more)
        assert len(job.attempts) == number + 1, job.errors
    return job


@pytest.fixture(scope="module")
def told(job):
    return report(job.run_dir)["job"]


def test_each_attempt_has_its_end_its_position_and_its_lost_steps(job, told):
    assert [each["end"] for each in told["attempts"]] == ["killed"] * 3 + ["failed"] * 2 + ["finished"]
    assert [each["lost_steps"] for each in told["attempts"]] == LOST_STEPS
    positions = [(did.resumed, each["resumed_from_step"]) for did, each in zip(job.attempts, told["attempts"])]
    assert [truth for truth, _ in positions] == [0, 20, None, 40, 40, 60], (
        "the third was killed while it loaded its state"
    )
    assert all(truth in {None, said} for truth, said in positions)


def test_every_second_is_where_the_script_says_it_was(job, told):
    goodput, found = told["goodput"], compared(job)
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], rel=0.01)
    assert found.placed, found.detail
    assert found.steps_right == found.attempts == len(ENDS), found.detail
    assert all(abs(off) < 0.02 for off in (*found.off.values(), found.wall_off, found.ettr_off)), (
        found.off,
        found.detail,
    )
    assert min(found.books[category] for category in (*LOST, "productive", "data_wait", "evaluation", "checkpoint")) > 0


def test_the_totals_of_the_run_go_on_as_the_report_has_them(job, told):
    state = json.loads((job.run_dir / "attempts" / "rank-0.json").read_text())
    assert state["attempt"] == len(ENDS) - 1
    so_far = msgspec.convert(state, RunState).lost()
    for category in LOST:
        lost = so_far[category]
        goodput = told["goodput"]
        assert lost == pytest.approx(goodput["seconds"][category], abs=0.02 * goodput["wall_seconds"]), category


def test_the_report_says_what_the_restarts_cost(job):
    text = report_text(job.run_dir)
    (sentence,) = [line for line in text.splitlines() if " were productive (" in line]
    assert "GPU" not in text
    assert "redone after 3 kills and 2 failures" in sentence
    for words in ("(ValueError)", "(exit status 3)", "thrown away"):  # the last: batches that were drawn again
        assert words in text


ELASTIC = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    from tests.quick_optimizers import CountingSGD

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A store of its own: in the launcher's, gloo finds the addresses of the attempt before.
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{attempt}", rank=rank, world_size=2)
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    step = 0
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for batch in torch.utils.data.DataLoader(torch.randn(1000, 16)):
        net(batch).sum().backward()
        dist.all_reduce(net.weight.grad)
        optimizer.step()
        step += 1
        time.sleep(0.02)
        if step % 10 == 0 and rank == 0:
            torch.save({"optimizer": optimizer.state_dict(), "step": step}, "new.pt")
            os.replace("new.pt", "checkpoint.pt")
        if (step, attempt, rank) == (13, 0, 1):
            raise ValueError("as told")
        if (step, attempt, rank) == (25, 1, 1):
            time.sleep(1.5)  # longer than a heartbeat takes
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 40:
            break
    dist.destroy_process_group()
"""


def test_torchrun_starts_both_ranks_again_until_they_finish(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    command = (*torchrun, *RUN, "--interval-seconds", "0.1", write(tmp_path, "train.py", ELASTIC))
    done = warm_python(*command, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path / "run")
    job = found["job"]
    assert [(each["end"], each["ranks"], each["resumed_from_step"], each["lost_steps"]) for each in job["attempts"]] == [
        ("failed", 2, 0, 3), ("killed", 2, 10, 5), ("finished", 2, 20, 0)
    ]  # fmt: skip
    ranks = sorted((each["rank"], each["attempt"]) for each in found["ranks"])
    assert ranks == [(rank, attempt) for rank in (0, 1) for attempt in range(3)]
    assert sum(job["goodput"]["seconds"].values()) == pytest.approx(job["goodput"]["wall_seconds"], rel=0.01)


def test_a_process_that_is_stopped_is_not_called_killed(tmp_path):
    """As a job that its scheduler has suspended. Its log is as old as that of a killed one."""

    def ends() -> list[str]:
        return [each["end"] for each in report(tmp_path / "run")["job"]["attempts"]]

    script = write(tmp_path, "train.py", "import telemetry, time\ntelemetry.start('run')\ntime.sleep(600)")
    with Child(script, cwd=tmp_path, env=quiet()) as child:
        wait_for(lambda: events(tmp_path / "run", "window", running=True), "a window in the log")
        (log,) = (tmp_path / "run" / "logs").iterdir()
        child.send(signal.SIGSTOP)
        wait_for(lambda: time.time() - log.stat().st_mtime > 2, "the log is out of date")
        assert ends() == ["running"]
        child.send(signal.SIGKILL)
        child.wait()
        assert ends() == ["killed"]


RANKS = """
    import os, sys
    import torch
    import torch.distributed as dist
    from tests.quick_optimizers import QuickSGD

    class HeartbeatError(ConnectionResetError):
        pass

    rank, where = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1)) if where == "backward" else None
    for step, batch in enumerate(torch.utils.data.DataLoader(torch.randn(1000, 16))):
        if step == 10 and rank == 1:
            raise HeartbeatError("the data set's server was reset by peer, watchdog: no heartbeat")
        if where == "backward":
            net(batch).sum().backward()
        else:
            dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("where", ["collective", "backward"])
def test_a_rank_that_loses_its_peer_is_told_from_one_that_fails(where, tmp_path):
    """The exception of the first rank has the words that gloo's has, too."""
    script = write(tmp_path, "train.py", RANKS)
    envs = [environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)) for rank in (0, 1)]
    first, second = (WarmChild(*RUN, script, where, cwd=tmp_path, env=env) for env in envs)
    with first, second:
        assert [first.wait(), second.wait()] == [1, 1]
    lost, own = sorted(events(tmp_path / "run", "run_end"), key=lambda end: end["rank"])
    assert (lost["exception"], lost["lost_peer"]) == ("RuntimeError", True)
    assert (own["exception"], own["lost_peer"]) == ("HeartbeatError", False)
    (attempt,) = report(tmp_path / "run")["job"]["attempts"]
    assert (attempt["end"], attempt["reason"]) == ("failed", "HeartbeatError")


AGAIN = """
    import glob, json, os, sys, telemetry, time
    if os.environ["HOW"] == "start":
        telemetry.start("run", interval_seconds=0.1)
    again = int(os.environ.get("AGAIN", "0"))
    first = 20 * again
    if again:
        telemetry.resumed(step=first)

    def heard():
        # Whether the newest heartbeat has all steps that have ended.
        beats = sorted(glob.glob("run/attempts/*.beat"), key=os.path.getmtime)
        beat = open(beats[-1]).read() if len(beats) > again else ""
        if not beat.endswith(chr(10)) or json.loads(beat)["steps_total"] != 24:
            return False
        return json.loads(open("run/attempts/rank-0.json").read())["attempt"] == again

    for step, _ in enumerate(telemetry.watch(range(40)), first + 1):
        if step % 10 == 0:
            with telemetry.phase("checkpoint"):
                pass
        if again < 2 and step == first + 25:
            while not heard():
                time.sleep(0.01)
            os.environ["AGAIN"] = str(again + 1)
            os.execv(sys.executable, sys.orig_argv)
    print(os.getpid(), step)
"""


@pytest.mark.parametrize("how", ["run", "start"])
def test_a_script_that_executes_itself_anew_is_not_killed(how, tmp_path):
    """It keeps its pid and its start, and its log has no last line."""
    script = write(tmp_path, "train.py", AGAIN)
    env = environment(HOW=how, TELEMETRY_RUN="again")
    done = python(*(() if how == "start" else (*RUN, "--interval-seconds", "0.1")), script, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    pid, step = map(int, done.stdout.split())
    assert step == 80
    found = report(tmp_path / "run")
    assert {each["pid"] for each in found["ranks"]} == {pid}
    attempts, goodput = found["job"]["attempts"], found["job"]["goodput"]
    assert [each["end"] for each in attempts] == ["finished"] * 3
    assert [each["reason"] for each in attempts] == ["executed another program"] * 2 + [None]
    assert [each["steps"] for each in attempts] == [24, 24, 40]
    assert [each["resumed_from_step"] for each in attempts] == [None, 20, 40]
    assert [each["lost_steps"] for each in attempts] == [4, 4, 0]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], rel=0.01)
    assert goodput["seconds"]["down"] == 0
    state = json.loads((tmp_path / "run" / "attempts" / "rank-0.json").read_text())
    assert state["attempt"] == 2
    begun = msgspec.convert(state, RunState).lost()["startup"]
    assert begun == pytest.approx(goodput["seconds"]["startup"], rel=0.1), "no second is in two attempts"
