"""The run's totals over its attempts, as the endpoint shows them, and the state file that carries them."""

from __future__ import annotations

import json
import os
import posix
import shutil
import time
import urllib.request

import pytest

import telemetry
from telemetry.agent.end_evidence import EndEvidence
from telemetry.agent.run_losses import RunLosses
from telemetry.job.run_state import LOST, RunState, decoded
from telemetry.util import processes
from telemetry.util.clock import NS
from telemetry.util.errors import ErrorLog
from telemetry.util.processes import Identity, job_labels


def start(folder):
    return telemetry.start(folder, port=0, interval_seconds=0.1, start_line=False)


def shown(agent, name: str) -> dict[str, float]:
    """The samples of a metric, by its one label."""
    found = {}
    with urllib.request.urlopen(agent.metrics_url, timeout=60) as answer:
        text = answer.read().decode()
    for line in text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line.rsplit(" ", 1)
            category = labels.partition('category="')[2].partition('"')[0]
            found[category] = float(value)
    return found


def write(folder, state: RunState) -> None:
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "run.json").write_bytes(state.encoded())


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_the_first_attempt_is_number_0(tmp_path):
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0}
    lost = shown(agent, "training_run_lost_seconds_total")
    assert set(lost) == set(LOST)
    assert (lost["down"], lost["redone"], lost["restore"]) == (0, 0, 0)
    assert lost["startup"] > 0
    telemetry.stop()
    state = decoded((tmp_path / "run" / "attempts" / "run.json").read_bytes())
    assert (state.attempt, state.finished, state.run) == (0, True, "run")


def test_a_later_attempt_goes_on_from_the_state_of_the_run(tmp_path):
    before = RunState("run", 2, "n/1/5", "ab", time.time() - 5000, without_progress=1, loop_seconds=900.0,
                      kept_seconds=600.0, carried={"down": 1000.0, "redone": 50.0}, own={"startup": 70.0})  # fmt: skip
    write(tmp_path / "run", before)
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 3.0}
    assert shown(agent, "training_run_attempts_without_progress") == {"": 2.0}
    lost = shown(agent, "training_run_lost_seconds_total")
    assert lost["redone"] == pytest.approx(350)
    # The process that runs this test started some time ago.
    assert 1000 < lost["down"] <= 6001
    assert lost["startup"] > 70


def test_the_heartbeat_of_a_killed_process_is_newer_than_the_state(tmp_path):
    before = RunState("run", 0, "n/1/5", "ab", time.time() - 9000, loop_seconds=100.0, kept_seconds=100.0)
    write(tmp_path / "run", before)
    ledger = {"startup": 40.0, "data_wait": 20.0, "compute": 300.0}
    beat = dict(life="ab", unix_seconds=time.time(), ledger_total_seconds=ledger, first_wait_seconds=10.0,
                seconds_before=2.0, kept_seconds=110.0, saves_completed=1,
                steps_total=300, optimizer_steps_total=300, resumption={"replay_seconds": 5.0})  # fmt: skip
    (tmp_path / "run" / "attempts" / "ab.beat").write_text(json.dumps(beat) + "   \n")
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 1.0}
    lost = shown(agent, "training_run_lost_seconds_total")
    assert lost["redone"] == pytest.approx(210)
    assert lost["replay"] == pytest.approx(5)
    assert lost["startup"] > 52
    assert lost["down"] == 0
    assert shown(agent, "training_run_attempts_without_progress") == {"": 0.0}


@pytest.mark.parametrize(("optimizer_steps", "redone", "replay"), [(7, 0, 310), (8, 310, 0)])
def test_a_process_killed_in_its_replay_has_redone_nothing(tmp_path, optimizer_steps, redone, replay):
    write(tmp_path / "run", RunState("run", 1, "n/1/5", "ab", time.time() - 9000))
    ledger = {"startup": 40.0, "data_wait": 20.0, "compute": 300.0}
    resumption = {"resumed_step": 500, "resumed_from": "optimizer", "resumed_at_optimizer_steps": 7}
    beat = dict(life="ab", unix_seconds=time.time(), ledger_total_seconds=ledger, first_wait_seconds=10.0,
                seconds_before=2.0, kept_seconds=0.0, saves_completed=0, steps_total=300,
                optimizer_steps_total=optimizer_steps, resumption=resumption)  # fmt: skip
    (tmp_path / "run" / "attempts" / "ab.beat").write_text(json.dumps(beat) + "   \n")
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 2.0}
    lost = shown(agent, "training_run_lost_seconds_total")
    assert (lost["redone"], lost["replay"]) == pytest.approx((redone, replay))


DAMAGED = [
    *(b"", b"{", b"[]", b'{"run": 7}', b'{"run": "run", "attempt": "x"}', b"\xff" * 99, b"[" * 8000),
    *(b'{"run": "run", "attempt": 1e999}', b'{"run": "run", "attempt": -3}', b'{"run": "run", "time": NaN}'),
    b'{"run": "run", "time": 1' + b"0" * 400 + b"}",
    b'{"run": "run", "carried": {"down": Infinity}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_state_begins_anew(tmp_path, content):
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    (tmp_path / "run" / "attempts" / "run.json").write_bytes(content)
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0}


BEAT = dict(life="ab", unix_seconds=1e9, ledger_total_seconds={"startup": 1, "data_wait": 1, "compute": 1},
            first_wait_seconds=1, seconds_before=1, kept_seconds=1, saves_completed=1, steps_total=9,
            optimizer_steps_total=9, resumption={})  # fmt: skip


@pytest.mark.parametrize("field", sorted(BEAT.keys() - {"life"}))
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 10**400, "x", None, [], {"startup": "x"}])
def test_a_damaged_heartbeat_leaves_the_state(tmp_path, field, value):
    before = RunState("run", 2, "n/1/5", "ab", 1e9 - 100, loop_seconds=100.0, kept_seconds=100.0)
    write(tmp_path / "run", before)
    (tmp_path / "run" / "attempts" / "ab.beat").write_text(json.dumps(BEAT | {field: value}))
    losses = RunLosses(tmp_path / "run" / "attempts", AttemptNow(), "cd", ErrorLog())
    processes = Identity("run", 0, 0, 1, "n", os.getpid(), "plain")
    ledger = dict.fromkeys(("startup", "data_wait", "compute"), 0.0)
    losses.tick(processes, ledger, 0.0, has_batch=True, stuck_for_seconds=0.0, stuck_in=None)
    view = losses.view()
    assert view.number == 3
    assert all(0 <= seconds < 1e12 for seconds in view.lost_seconds.values()), view


class AttemptNow:
    """As `AttemptLog`, of a process that has just begun."""

    seconds_before = restore_seconds = replay_seconds = kept_seconds = 0.0
    in_replay = False
    saves_completed = 0
    stuck = None

    def unix_now(self) -> float:
        return time.time()


@pytest.mark.parametrize("name", ["run.json", "ab.beat"])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    write(tmp_path / "run", RunState("run", 0, "n/1/5", "ab", time.time()))
    place = tmp_path / "run" / "attempts" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0 if name == "run.json" else 1.0}


def test_heartbeats_begin_anew_where_others_delete_them(tmp_path):
    agent = start(tmp_path / "run")
    folder = tmp_path / "run" / "attempts"
    (beat,) = wait_for(lambda: [*folder.glob("*.beat")])
    beat.unlink()
    assert wait_for(lambda: [*folder.glob("*.beat")]) == [beat]
    shutil.rmtree(folder)
    assert wait_for(lambda: [*folder.glob("*.beat")]) == [beat]
    assert json.loads(wait_for(beat.read_bytes))["life"] == beat.stem
    assert agent.attempt.saves_completed == 0


def test_heartbeats_go_on_once_there_is_room_again(tmp_path, monkeypatch):
    monkeypatch.setattr("telemetry.agent.attempt_log._RETRY_SECONDS", 0.2)
    folder = tmp_path / "run" / "attempts"
    folder.parent.mkdir()
    folder.write_text("a file in its place")
    agent = start(tmp_path / "run")
    wait_for(lambda: any("no heartbeats" in line.read_text() for line in (tmp_path / "run").glob("logs/*.jsonl")))
    folder.unlink()
    assert wait_for(lambda: [*folder.glob("*.beat")])
    telemetry.stop()
    (log,) = (tmp_path / "run").glob("logs/*.jsonl")
    assert log.read_text().count("no heartbeats") == 1
    assert agent.attempt.saves_completed == 0


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (3, 3), (-1, 255), (256, 0), ("text", 1), (True, 1)])
def test_the_exit_status_is_what_the_kernel_keeps(code, status):
    end = EndEvidence()
    end.leaving(code)
    assert end.fields() == {"exit_status": status}
    assert end.finished is (status == 0)


def test_another_run_in_the_folder_is_no_attempt_of_this_one(tmp_path):
    write(tmp_path / "run", RunState("another", 4))
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0}


def test_an_agent_started_again_in_its_process_is_the_same_attempt(tmp_path):
    start(tmp_path / "run")
    telemetry.stop()
    agent = start(tmp_path / "run")
    assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0}


def test_the_same_attempt_also_after_the_clock_was_stepped(tmp_path, monkeypatch):
    start(tmp_path / "run")
    telemetry.stop()
    real = processes.unix_time
    with monkeypatch.context() as patch:
        patch.setattr(processes, "unix_time", lambda: real() + 3600)
        agent = start(tmp_path / "run")
        assert wait_for(lambda: shown(agent, "training_run_attempt")) == {"": 0.0}
        telemetry.stop()


def test_a_clock_that_is_stepped_is_no_time_before_the_agent(tmp_path):
    agent = start(tmp_path / "run")
    wait_for(lambda: shown(agent, "training_run_lost_seconds_total"))
    before = agent.attempt.seconds_before
    agent._wall._wall = lambda: time.time_ns() + 36_000 * NS
    wait_for(lambda: agent.attempt.unix_now() > time.time() + 18_000)
    assert agent.attempt.seconds_before == before
    wait_for(lambda: agent._losses._state is not None and agent._losses._state.own)
    assert shown(agent, "training_run_lost_seconds_total")["startup"] < before + 18_000


CHAIN = [
    # progress, finished: of an attempt; attempts without progress that the next one is told of
    ((False, False), 1),
    ((False, False), 2),
    ((True, False), 0),
    ((False, False), 1),
    ((False, True), 0),
]


def test_attempts_without_progress_are_counted():
    state = RunState("r", 0, "p0", "l0", 0.0)
    for number, ((progress, finished), told) in enumerate(CHAIN, 1):
        state = RunState(**{**vars_of(state), "progress": progress, "finished": finished})
        state = state.next(process=f"p{number}", life=f"l{number}", started=10.0 * number)
        assert (state.attempt, state.without_progress) == (number, told)


def vars_of(state: RunState) -> dict:
    return {name: getattr(state, name) for name in state.__slots__}


def test_the_job_is_told_by_its_scheduler(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("SLURM", "LSB", "PBS", "USER", "LOGNAME", "JOB_NAME", "POD_", "ACCOUNT", "QUEUE")):
            monkeypatch.delenv(name)
    assert job_labels() == {"job": "", "user": "", "account": "", "partition": ""}
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_USER": "ada",
        "SLURM_JOB_ACCOUNT": "vision",
        "SLURM_JOB_PARTITION": "a100",
    }
    told = {"job": "77", "user": "ada", "account": "vision", "partition": "a100"}
    assert job_labels(slurm | {"USER": "root", "JOB_NAME": "no"}) == told
    pod = {"JOB_NAME": "resnet", "POD_NAMESPACE": "team", "QUEUE_NAME": "gold", "USER": "app"}
    assert job_labels(pod) == {"job": "resnet", "user": "app", "account": "team", "partition": "gold"}


def test_a_program_that_cannot_be_executed_ends_nothing(agent):
    for execute in (os.execv, os.execvp):
        with pytest.raises(FileNotFoundError):
            execute("/nowhere/program", ["program"])
    assert agent.running
    telemetry.stop()
    assert os.execv is posix.execv
