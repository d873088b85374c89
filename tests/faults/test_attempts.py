"""A run in several attempts: each way to end, and the seconds of every category, compared with the script's stamps."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .attempt_scripts import ELASTIC, TRAIN, Attempted, expected, read_stamps
from .processes import RUN, Child, environment, events, python, wait_for, write
from .warm_python import WarmChild, running_server, warm_python

ENDS = ("step", "checkpoint", "restore", "exception", "status", "finish")
BLOCKING = {"step", "checkpoint", "restore"}


def beats(folder: Path) -> dict[Path, dict]:
    return {path: json.loads(path.read_text()) for path in (folder / "run" / "attempts").glob("*.beat")}


def attempt(folder: Path, number: int, end: str) -> Attempted:
    """Run the same command once more. It blocks where it is to be killed, until its heartbeat has come that far."""
    known = beats(folder) if number else {}
    env = environment(END=end, ATTEMPT=str(number))
    begin = time.time()
    stamps = folder / f"stamps-{number}.jsonl"
    with WarmChild(*RUN, "--interval-seconds", "0.1", folder / "train.py", cwd=folder, env=env) as child:
        if end not in BLOCKING:
            child.wait()
            return Attempted(begin, time.time(), False, read_stamps(stamps))
        assert child.process.stdout.readline() == "blocked\n", child.stderr
        blocked = read_stamps(stamps)[-1]["at"]

        def heard() -> dict | None:
            new = [beat for path, beat in beats(folder).items() if path not in known]
            return next((beat for beat in new if stamp_of(beat) > blocked + 0.1), None)

        wait_for(heard, "a heartbeat of the blocked process")
        os.kill(child.pid, signal.SIGKILL)
        gone = time.time()
        child.process.wait()
        return Attempted(begin, gone, True, read_stamps(stamps), tail=gone - stamp_of(heard()))


def stamp_of(beat: dict) -> float:
    return beat["unix_seconds"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All attempts, and the report of the run."""
    folder = tmp_path_factory.mktemp("attempts")
    write(folder, "train.py", TRAIN)
    running_server()  # so that no attempt waits for it to start
    attempts = [attempt(folder, number, end) for number, end in enumerate(ENDS)]
    done = python("-m", "telemetry", "report", "run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    text = python("-m", "telemetry", "report", "run", cwd=folder).stdout
    return attempts, json.loads(done.stdout), text, folder


def test_each_attempt_is_told_by_how_it_ended(run):
    _, report, *_ = run
    ends = [each["end"] for each in report["job"]["attempts"]]
    assert ends == ["killed", "killed", "killed", "failed", "failed", "finished"]


def test_steps_that_are_done_again_are_exact(run):
    attempts, report, *_ = run
    resumed = [each.resumed for each in attempts] + [None]
    for number, (did, told) in enumerate(zip(attempts, report["job"]["attempts"], strict=True)):
        if did.resumed is None:  # killed while it loaded the checkpoint
            assert told["lost_steps"] == 0
            continue
        later = next((step for step in resumed[number + 1 :] if step is not None), did.done)
        assert told["resumed_from_step"] == did.resumed, number
        assert told["lost_steps"] == did.done - later, number
    assert [each["lost_steps"] for each in report["job"]["attempts"]] == [6, 10, 0, 3, 4, 0]


def test_every_second_is_where_the_script_says_it_was(run):
    attempts, report, *_ = run
    goodput = report["job"]["goodput"]
    wall, seconds = goodput["wall_seconds"], goodput["seconds"]
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    own = expected(attempts)
    assert wall == pytest.approx(sum(own.values()), rel=0.01)
    for category, spent in seconds.items():
        assert spent == pytest.approx(own.get(category, 0.0), abs=0.01 * wall), (category, seconds, own)
    lost = sum(own[category] for category in ("redone", "restore", "replay", "startup", "down"))
    assert goodput["ettr_ratio"] == pytest.approx(1 - lost / wall, abs=0.02)


def test_the_report_says_what_the_restarts_cost(run):
    _, _, text, _ = run
    (sentence,) = [line for line in text.splitlines() if "GPU-hours, " in line]
    assert "were productive (" in sentence
    assert "redone after 3 kills and 2 failures" in sentence
    assert "(ValueError)" in text
    assert "(exit status 3)" in text
    assert "thrown away" in text, "the batches that were drawn again"


def test_torchrun_starts_both_ranks_again_until_they_finish(tmp_path):
    script = write(tmp_path, "train.py", ELASTIC)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    done = warm_python(
        *torchrun, *RUN[:2], "run", "--run-dir", "run", "--interval-seconds", "0.1", script, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(python("-m", "telemetry", "report", "run", "--json", cwd=tmp_path).stdout)
    job = report["job"]
    assert [each["end"] for each in job["attempts"]] == ["failed", "killed", "finished"]
    assert [each["ranks"] for each in job["attempts"]] == [2, 2, 2]
    assert [each["resumed_from_step"] for each in job["attempts"]] == [0, 10, 20]
    assert [each["lost_steps"] for each in job["attempts"]] == [3, 5, 0]
    assert sorted((each["rank"], each["attempt"]) for each in report["ranks"]) == [
        (r, a) for r in (0, 1) for a in range(3)
    ]
    seconds = job["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(job["goodput"]["wall_seconds"], rel=0.01)


def test_the_totals_of_the_run_go_on_as_the_report_has_them(run):
    _, report, _, folder = run
    state = json.loads((folder / "run" / "attempts" / "run.json").read_text())
    assert state["attempt"] == len(ENDS) - 1
    goodput = report["job"]["goodput"]
    for category in ("redone", "restore", "replay", "startup", "stuck", "down"):
        lost = state["carried"].get(category, 0.0) + state["own"].get(category, 0.0)
        assert lost == pytest.approx(goodput["seconds"][category], abs=0.02 * goodput["wall_seconds"]), category


def test_a_process_that_is_stopped_is_not_called_killed(tmp_path):
    """As a job that its scheduler has suspended. Its log is as old as that of a killed one."""
    script = """
        import time, telemetry
        telemetry.start("run", port="off", interval_seconds=0.1, log_interval_seconds=0.1, start_line=False)
        print("ready", flush=True)
        time.sleep(600)
    """

    def ends() -> list[str]:
        done = python("-m", "telemetry", "report", "run", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return [each["end"] for each in json.loads(done.stdout)["job"]["attempts"]]

    with Child(write(tmp_path, "train.py", script), cwd=tmp_path) as child:
        assert child.line() == "ready"
        (log,) = (tmp_path / "run" / "logs").iterdir()
        wait_for(lambda: b'"window"' in log.read_bytes(), "a window in the log")
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: time.time() - log.stat().st_mtime > 2, "the log is out of date")
        assert ends() == ["running"]
        os.kill(child.pid, signal.SIGKILL)
        child.process.wait()
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
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = QuickSGD(net.parameters())
    for step, batch in enumerate(torch.utils.data.DataLoader(torch.randn(1000, 16))):
        if step == 10 and rank == 1:
            raise HeartbeatError("the data set's server was reset by peer, watchdog: no heartbeat")
        if where == "backward":
            net(batch).sum().backward()
        else:
            dist.all_reduce(torch.ones(1))
        optimizer.step()
"""


@pytest.mark.parametrize("where", ["collective", "backward"])
def test_a_rank_that_loses_its_peer_is_told_from_one_that_fails(where, tmp_path):
    """The exception of the first rank has the words that gloo's has, too."""
    script = write(tmp_path, "train.py", RANKS)
    ranks = [
        Child(*RUN, script, where, cwd=tmp_path, env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)))
        for rank in (0, 1)
    ]
    with ranks[0], ranks[1]:
        assert [rank.wait() for rank in ranks] == [1, 1]
    lost, own = sorted(events(tmp_path / "run", "run_end"), key=lambda end: end["rank"])
    assert (lost["exception"], lost["lost_peer"]) == ("RuntimeError", True)
    assert (own["exception"], own["lost_peer"]) == ("HeartbeatError", False)
    report = json.loads(python("-m", "telemetry", "report", "run", "--json", cwd=tmp_path).stdout)
    (told,) = report["job"]["attempts"]
    assert (told["end"], told["reason"]) == ("failed", "HeartbeatError")


AGAIN = """
    import os, sys, torch
    from tests.quick_optimizers import CountingSGD
    if os.environ["HOW"] == "start":
        import telemetry
        telemetry.start("run")
    again = int(os.environ.get("AGAIN", "0"))
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    step = 0
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for batch in torch.utils.data.DataLoader(torch.randn(40, 16)):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            torch.save({"optimizer": optimizer.state_dict(), "step": step}, "checkpoint.pt")
        if again < 2 and step == 25 + 20 * again:
            os.environ["AGAIN"] = str(again + 1)
            if os.environ["HOW"] == "unwatched":
                os.execvp("python-of-the-test", [sys.executable, *sys.argv])
            os.execv(sys.executable, sys.orig_argv)
    print(os.getpid(), step)
"""


@pytest.mark.parametrize("how", ["run", "start", "unwatched"])
def test_a_script_that_executes_itself_anew_is_not_killed(how, tmp_path):
    """It keeps its pid. ``unwatched``: without the agent, which it had by ``telemetry run``."""
    script = write(tmp_path, "train.py", AGAIN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python-of-the-test").symlink_to(sys.executable)
    env = environment(HOW=how, TELEMETRY_RUN="again")
    env["PATH"] = os.pathsep.join(["/nowhere", str(tmp_path / "bin"), env["PATH"]])
    done = python(*(() if how == "start" else RUN), script, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    pid, step = map(int, done.stdout.split())
    report = json.loads(python("-m", "telemetry", "report", "run", "--json", cwd=tmp_path).stdout)
    assert {each["pid"] for each in report["ranks"]} == {pid}
    attempts = report["job"]["attempts"]
    assert {each["end"] for each in attempts} == {"finished"}
    assert attempts[0]["reason"] == "executed another program"
    goodput = report["job"]["goodput"]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], rel=0.01)
    if how == "unwatched":
        assert [(each["steps"], each["lost_steps"]) for each in attempts] == [(25, 0)]
        return
    assert step == 80
    assert [each["steps"] for each in attempts] == [25, 25, 40]
    assert [each["resumed_from_step"] for each in attempts] == [0, 20, 40]
    assert [each["lost_steps"] for each in attempts] == [5, 5, 0]
    assert attempts[2]["reason"] is None
    assert goodput["seconds"]["down"] == 0
    state = json.loads((tmp_path / "run" / "attempts" / "run.json").read_text())
    assert state["attempt"] == 2
    begun = state["carried"]["startup"] + state["own"]["startup"]
    assert begun == pytest.approx(goodput["seconds"]["startup"], rel=0.1), "no second is in two attempts"
