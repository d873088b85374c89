"""What one attempt of a run leaves for the next, and what restarts and hangs cost the run in all."""

from __future__ import annotations

import itertools
import json
import os
import posix
import shutil
import time
import urllib.request

import msgspec
import pytest
from msgspec.structs import replace

import telemetry
from telemetry.agent.restarts import LOST, Beat, EndEvidence, Resumption, RunLosses, RunState, StuckTime, read_record
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
    (folder / "attempts" / "run.json").write_bytes(msgspec.json.encode(state))


def beat(**fields) -> Beat:
    told = dict(life="ab", unix_seconds=time.time(), wall_seconds=99.0, steps_total=300, optimizer_steps_total=300,
                ledger_total_seconds={"startup": 40.0, "data_wait": 20.0, "compute": 300.0}, first_wait_seconds=10.0,
                seconds_before=2.0, kept_seconds=0.0, saves_completed=0, resumption=Resumption())  # fmt: skip
    return Beat(**told | fields)


def write_beat(folder, newest: Beat) -> None:
    (folder / "ab.beat").write_bytes(msgspec.json.encode(newest).ljust(1023) + b"\n")


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
    state = read_record(tmp_path / "run" / "attempts" / "run.json", RunState)
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
    newest = beat(kept_seconds=110.0, saves_completed=1, resumption=Resumption(replay_seconds=5.0))
    write_beat(tmp_path / "run" / "attempts", newest)
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
    resumption = Resumption(resumed_step=500, resumed_from="optimizer", resumed_at_optimizer_steps=7)
    write_beat(tmp_path / "run" / "attempts", beat(optimizer_steps_total=optimizer_steps, resumption=resumption))
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


def test_a_damaged_state_is_none(tmp_path):
    for content in DAMAGED:
        (tmp_path / "run.json").write_bytes(content)
        assert read_record(tmp_path / "run.json", RunState) is None, content
    assert read_record(tmp_path / "none", RunState) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 10**400, "x", None, [], {"startup": "x"}])
def test_a_damaged_heartbeat_leaves_the_state(tmp_path, value):
    whole = msgspec.to_builtins(beat(unix_seconds=1e9, kept_seconds=1.0, saves_completed=1))
    state = RunState("run", 2, "n/1/5", "ab", 1e9 - 100, loop_seconds=100.0, kept_seconds=100.0)
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(state))
    for field in whole.keys() - {"life"}:
        (tmp_path / "ab.beat").write_text(json.dumps(whole | {field: value}))
        losses = RunLosses(tmp_path, AttemptNow(), "cd", ErrorLog())
        losses.tick(IDENTITY, has_batch=True, stuck_for_seconds=0.0, stuck_in=None)
        view = losses.view()
        assert view.number == 3
        assert all(0 <= seconds < 1e12 for seconds in view.lost_seconds.values()), (field, view)
        (tmp_path / "run.json").write_bytes(msgspec.json.encode(state))


IDENTITY = Identity("run", 0, 0, 1, "n", os.getpid(), "plain")


class AttemptNow:
    """As `AttemptLog`, of a process that has just begun."""

    def __init__(self) -> None:
        self.now = beat(life="cd", ledger_total_seconds=dict.fromkeys(("startup", "data_wait", "compute"), 0.0),
                        first_wait_seconds=0.0, seconds_before=0.0)  # fmt: skip
        self.seconds_before, self.stuck = 0.0, None

    @property
    def saves_completed(self) -> int:
        return self.now.saves_completed

    def beat(self) -> Beat:
        return self.now

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
    monkeypatch.setattr("telemetry.agent.restarts._RETRY_SECONDS", 0.2)
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
        state = replace(state, progress=progress, finished=finished)
        state = state.next(process=f"p{number}", life=f"l{number}", started=10.0 * number)
        assert (state.attempt, state.without_progress) == (number, told)


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


# -- hangs: each second once, and no counter falls, whatever the process was doing ------------------------------------


class Hung:
    """260 s of a loop in which a process is stuck for 100 s, from second 50 on, as `RunLosses` sees it every 10 s.

    Attributes:
        stuck_in: in which category. Only the loop's own are part of the loop.
        first_wait: how long the first batch takes; ``replay``: how long the batches after it are only drawn.
        saves: checkpoints. When one is noticed, and where it began, in seconds of the loop.
    """

    def __init__(self, folder, *, stuck_in="compute", first_wait=0.0, replay=0.0, saves=()):
        self.folder, self.stuck_in, self.saves = folder, stuck_in, saves
        self.first_wait, self.replay = first_wait, replay
        self.attempt = AttemptNow()
        self.losses = RunLosses(folder, self.attempt, "ab", ErrorLog())
        self.seen: list[dict[str, float]] = []
        self.in_heartbeat: list[float] = []  # seconds stuck, at each of these views

    def run(self, last=260):
        """Returns itself. The newest view is the last of ``seen``."""
        for second in range(0, last + 1, 10):
            in_hang = min(100, max(0, second - 50))
            loop = second if self.stuck_in in {"data_wait", "compute"} else second - in_hang
            for noticed, began in self.saves:
                if second == noticed:
                    saved = self.attempt.saves_completed + 1
                    self.attempt.now = replace(self.attempt.now, saves_completed=saved, kept_seconds=began)
            replay = self.replay if loop > self.first_wait + self.replay else 0.0
            self.attempt.now = replace(
                self.attempt.now,
                ledger_total_seconds={"startup": 5.0, "data_wait": 0.0, "compute": float(loop)},
                first_wait_seconds=min(float(loop), self.first_wait),
                resumption=Resumption(replay_seconds=replay),
            )
            self.in_heartbeat.append(0.0 if self.attempt.stuck is None else self.attempt.stuck.seconds)
            self.losses.tick(
                IDENTITY,
                has_batch=loop > self.first_wait,
                stuck_for_seconds=float(in_hang) if 30 <= in_hang and second <= 150 else 0.0,
                stuck_in=self.stuck_in,
            )
            self.seen.append(self.losses.view().lost_seconds)
        return self

    def ended(self) -> RunState:
        """The state that the process leaves when it ends by itself."""
        self.losses.end(finished=False)
        return read_record(self.folder / "run.json", RunState)


@pytest.mark.parametrize(
    ("saves", "redone"),
    [
        ([], 160),
        ([(40, 35.0)], 125),
        ([(200, 200.0)], 60),
        ([(40, 35.0), (200, 200.0)], 60),
        ([(160, 45.0)], 115),  # an asynchronous one, which was complete after the hang
    ],
)
def test_a_hang_before_the_newest_checkpoint_makes_redone_no_less(tmp_path, saves, redone):
    state = Hung(tmp_path, saves=saves).run().ended()
    assert state.own["stuck"] == pytest.approx(100)
    assert state.next(process="next", life="cd", started=time.time()).carried["redone"] == pytest.approx(redone)


@pytest.mark.parametrize("stuck_in", ["evaluation", "checkpoint"])
def test_a_hang_beside_the_loop_takes_nothing_from_it(tmp_path, stuck_in):
    state = Hung(tmp_path, stuck_in=stuck_in, first_wait=8.0, saves=[(40, 35.0)]).run().ended()
    assert state.lost() == dict.fromkeys(LOST, 0.0) | {"startup": 13.0, "stuck": 100.0}
    assert state.next(process="next", life="cd", started=time.time()).carried["redone"] == pytest.approx(160 - 35)


HANGS = [
    (0.0, 0.0, {"startup": 5, "replay": 0}),
    (160.0, 0.0, {"startup": 65, "replay": 0}),  # it was stuck while it waited for its first batch
    (10.0, 150.0, {"startup": 15, "replay": 50}),
]


@pytest.mark.parametrize(("first_wait", "replay", "lost"), HANGS)
def test_a_hang_in_the_first_wait_or_in_the_replay_counts_once(tmp_path, first_wait, replay, lost):
    hung = Hung(tmp_path, first_wait=first_wait, replay=replay).run()
    assert all(after[name] >= before[name] for before, after in itertools.pairwise(hung.seen) for name in LOST)
    assert hung.seen[-1] == dict.fromkeys(LOST, 0.0) | lost | {"stuck": 100}
    assert hung.ended().lost() == hung.seen[-1]


def test_a_hang_is_shown_once_the_heartbeat_has_it(tmp_path):
    """A process that is killed between the two would leave a counter that falls."""
    hung = Hung(tmp_path).run()
    assert [view["stuck"] for view in hung.seen] == hung.in_heartbeat
    assert max(hung.in_heartbeat) == 100


@pytest.mark.parametrize("second", [90, 130, 260])
@pytest.mark.parametrize(("first_wait", "replay", "lost"), HANGS)
def test_no_counter_falls_when_a_hung_process_is_killed(tmp_path, first_wait, replay, lost, second):
    """The next attempt has the state as it was written long before, and the newest heartbeat."""
    hung = Hung(tmp_path, first_wait=first_wait, replay=replay).run(second)
    newest = replace(hung.attempt.now, life="ab", unix_seconds=time.time() + 1, stuck=hung.attempt.stuck)
    write_beat(tmp_path, newest)
    after = RunLosses(tmp_path, AttemptNow(), "cd", ErrorLog())
    after.tick(Identity("run", 0, 0, 1, "n", 1, "plain"), has_batch=False, stuck_for_seconds=0.0, stuck_in=None)
    now = after.view().lost_seconds
    assert all(now[name] >= seconds for name, seconds in hung.seen[-1].items()), (hung.seen[-1], now)
    of_attempt = sum(now[name] for name in ("startup", "stuck", "replay", "redone"))
    assert of_attempt == pytest.approx(5 + second), "each second once"


@pytest.mark.parametrize(("kept", "redone"), [(100.0, 60), (100.0000004, 60), (150.0, 110)])
def test_a_checkpoint_in_the_heartbeat_alone_was_after_the_hang(kept, redone):
    before = RunState("run", 0, "p", "ab", 1.0, loop_seconds=200.0, kept_seconds=100.0, stuck_since_kept=100.0)
    ledger = {"startup": 0.0, "data_wait": 0.0, "compute": 260.0}
    newest = beat(
        unix_seconds=2.0, ledger_total_seconds=ledger, first_wait_seconds=0.0, kept_seconds=kept, saves_completed=1
    )
    for told in (newest, replace(newest, stuck=StuckTime(100.0, since_kept=100.0, kept_seconds=100.0))):
        assert before.newer(told).next(process="q", life="cd", started=2.0).carried["redone"] == pytest.approx(redone)
