"""What one attempt of a run leaves for the next: what it lost and has done, its heartbeat, its end and its replay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import time

import msgspec
import pytest
from msgspec.structs import replace

import telemetry
from telemetry.agent.attempt import Replay, StuckTimes
from telemetry.agent.ending import EndEvidence
from telemetry.agent.run_so_far import RunSoFar, RunState, read_run_state
from telemetry.log.lines import Heartbeat, Resumption, stuck_in_loop
from telemetry.model.records import LOST, Step
from telemetry.safety import processes
from telemetry.safety.errors import ErrorLog
from telemetry.sources.cgroup import OomCounter, group_id
from telemetry.util.clock import NS
from telemetry.util.identity import Identity, job_labels
from tests.running_agent import log_lines, scrape, wait_for

IDENTITY = Identity("run", 0, 0, 1, "n", os.getpid(), "plain")
RANK_1 = Identity("run", 1, 1, 2, "n", os.getpid(), "plain")


def start(folder, port="off"):
    return telemetry.start(folder, port=port, interval_seconds=0.1, start_line=False)


def beat(**fields) -> Heartbeat:
    told = dict(life="ab", unix_seconds=time.time(), wall_seconds=99.0, steps_total=300, optimizer_steps_total=300,
                ledger_total_seconds={"startup": 40.0, "data_wait": 20.0, "compute": 300.0}, first_wait_seconds=10.0,
                seconds_before=2.0, kept_seconds=0.0, saves_completed=0, resumption={})  # fmt: skip
    return msgspec.convert(told | fields, Heartbeat)


EMPTY = beat(
    life="cd", ledger_total_seconds={}, first_wait_seconds=0.0, seconds_before=0.0, steps_total=0, unix_seconds=1.0
)


def left(folder, newest: Heartbeat, state: Heartbeat = EMPTY, *, process="n/1/5", heartbeat=True, **fields) -> None:
    """An attempt before has left this: the file of its rank, with its state when it began, and its heartbeat."""
    folder.mkdir(parents=True, exist_ok=True)
    known = RunState("run", newest.life, process, state if heartbeat else newest, **fields)
    (folder / "rank-0.json").write_bytes(msgspec.json.encode(known))
    if heartbeat:
        (folder / f"{newest.life}.beat").write_bytes(msgspec.json.encode(newest).ljust(1023) + b"\n")


class AttemptNow:
    """As `AttemptLog`, of a process that has just begun."""

    def __init__(self, newest: Heartbeat = EMPTY) -> None:
        self.newest, self.seconds_before, self.has_batch = newest, 0.0, True

    def beat(self) -> Heartbeat:
        return self.newest


def next_attempt(folder, identity: Identity = IDENTITY) -> RunSoFar:
    """The attempt after those that have left something in the folder."""
    run = RunSoFar(folder, AttemptNow(replace(EMPTY, unix_seconds=time.time())), identity, ErrorLog())
    run.tick()
    return run


# -- over attempts -----------------------------------------------------------------------------------------------------


def test_the_first_attempt_is_number_0(tmp_path):
    agent = start(tmp_path / "run", port=0)

    def shown(name):
        return {key[1:]: value for key, value in scrape(agent).items() if key[0] == name}

    assert wait_for(lambda: shown("training_run_attempt")) == {(): 0.0}
    lost = shown("training_run_lost_seconds_total")
    assert {name for (name,) in lost} == set(LOST)
    assert (lost["down",], lost["redone",], lost["restore",]) == (0, 0, 0)
    assert lost["startup",] > 0
    telemetry.tokens(3)
    wait_for(lambda: shown("training_tokens_total") == {(): 3.0})
    telemetry.stop()
    state = read_run_state(tmp_path / "run" / "attempts" / "rank-0.json")
    assert (state.attempt, state.finished, state.run, state.newest.tokens_total) == (0, True, "run", 3)
    assert not [*(tmp_path / "run" / "attempts").glob("*.beat")]


def test_a_later_attempt_goes_on_from_the_heartbeat_of_a_killed_one(tmp_path):
    newest = beat(unix_seconds=time.time() - 5000, kept_seconds=110.0, saves_completed=1, samples_total=8,
                  tokens_total=90, resumption={"replay_seconds": 5.0, "restore_seconds": 4.0})  # fmt: skip
    left(tmp_path, newest, attempt=2, without_progress=1, lost_before={"down": 1000.0, "redone": 50.0},
         samples_before=1000, tokens_before=20_000, steps_before=7)  # fmt: skip
    run = next_attempt(tmp_path)
    view = run.view()
    assert (view.number, view.without_progress) == (3, 0)
    assert (run.samples_before, run.tokens_before, run.steps_before) == (1008, 20_090, 307)
    down = view.lost_seconds.pop("down")
    assert 1000 < down <= 6001, "the process that runs this test started some time ago"
    assert view.lost_seconds == pytest.approx(
        {"redone": 50 + 320 - 110, "restore": 4, "replay": 5, "startup": 2 + 36 + 10, "stuck": 0}
    )


def test_a_first_attempt_has_restored_nothing_and_a_finished_one_redone_nothing(tmp_path):
    left(tmp_path, beat(resumption={"restore_seconds": 4.0}))
    lost = next_attempt(tmp_path).view().lost_seconds
    assert (lost["restore"], lost["startup"]) == (0, 52)
    left(tmp_path, beat(), heartbeat=False, finished=True, without_progress=1)
    view = next_attempt(tmp_path).view()
    assert (view.number, view.without_progress, view.lost_seconds["redone"]) == (1, 0, 0)


@pytest.mark.parametrize(("optimizer_steps", "redone", "replay"), [(7, 0, 310), (8, 310, 0)])
def test_a_process_killed_in_its_replay_has_redone_nothing(tmp_path, optimizer_steps, redone, replay):
    resumption = {"resumed_step": 500, "resumed_from": "optimizer", "resumed_at_optimizer_steps": 7}
    left(tmp_path, beat(optimizer_steps_total=optimizer_steps, resumption=resumption), attempt=1)
    lost = next_attempt(tmp_path).view().lost_seconds
    assert (lost["redone"], lost["replay"]) == pytest.approx((redone, replay))


def test_attempts_without_progress_are_counted():
    """Saves, and whether it finished, of an attempt; attempts without progress that the next one is told of."""
    state = RunState("r", "l0", "p0", EMPTY)
    chain = [((0, False), 1), ((0, False), 2), ((1, False), 0), ((0, False), 1), ((0, True), 0)]
    for number, ((saves, finished), told) in enumerate(chain, 1):
        state = replace(state, newest=replace(EMPTY, saves_completed=saves), finished=finished)
        state = state.next(process=f"p{number}", first=EMPTY, started=10.0 * number)
        assert (state.attempt, state.without_progress, state.attempts_without_progress()) == (number, told, told)


def test_a_rank_that_becomes_another_one_goes_on_from_the_file_of_that_one(tmp_path):
    left(tmp_path, beat(samples_total=8))
    identity = dataclasses.replace(RANK_1)
    run = RunSoFar(tmp_path, AttemptNow(replace(EMPTY, samples_total=3)), identity, ErrorLog())
    for identity.rank, before in ((1, 0), (0, 8), (1, 0), (0, 8)):
        run.tick()
        assert run.samples_before == before
        assert (run.view() is None) is (identity.rank == 1), "nothing is shown as lost on other ranks"


DAMAGED = [
    *(b"", b"{", b"[]", b'{"run": 7}', b"\xff" * 99, b"[" * 8000),
    *(
        msgspec.json.encode(msgspec.to_builtins(RunState("run", "ab", "p", EMPTY)) | wrong)
        for wrong in ({"attempt": "x"}, {"attempt": -3}, {"lost_before": {"down": -1}}, {"newest": {}}, {"life": 7})
    ),
    msgspec.json.encode(RunState("another", "ab", "p", EMPTY, attempt=4)),
    msgspec.json.encode(RunState("run", "../../x", "p", EMPTY)).replace(b'"attempt":0', b'"attempt":1' + b"0" * 400),
]


def test_a_damaged_file_or_that_of_another_run_is_none(tmp_path):
    for content in DAMAGED:
        (tmp_path / "rank-0.json").write_bytes(content)
        run = next_attempt(tmp_path)
        assert (run.view().number, run.samples_before) == (0, 0), content


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 10**400, "x", [], {"startup": "x"}])
def test_a_damaged_heartbeat_leaves_the_state(tmp_path, value):
    whole = msgspec.to_builtins(beat(unix_seconds=1e9, kept_seconds=1.0, saves_completed=1))
    for field in whole.keys() - {"life"}:
        left(tmp_path, beat(), attempt=2)
        (tmp_path / "ab.beat").write_text(json.dumps(whole | {field: value}))
        view = next_attempt(tmp_path).view()
        assert view.number == 3
        assert all(0 <= seconds < 1e12 for seconds in view.lost_seconds.values()), (field, view)


@pytest.mark.parametrize("name", ["rank-0.json", "ab.beat"])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    left(tmp_path, beat())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert next_attempt(tmp_path).view().number == (0 if name == "rank-0.json" else 1)


@pytest.mark.parametrize("wrong", [{"unix_seconds": 5.0}, {"life": "other"}], ids=["older", "of another life"])
def test_a_heartbeat_that_is_not_newer_leaves_the_state(tmp_path, wrong):
    left(tmp_path, beat(samples_total=8), beat(unix_seconds=9.0, samples_total=5))
    (tmp_path / "ab.beat").write_bytes(msgspec.json.encode(replace(beat(samples_total=8), **wrong)))
    assert next_attempt(tmp_path).samples_before == 5


def test_an_agent_started_again_in_its_process_is_the_same_attempt(tmp_path, monkeypatch):
    startup = []
    for _ in range(2):
        agent = start(tmp_path / "run")
        age, view = agent.attempt.seconds_before, wait_for(agent._run_so_far.view)
        startup.append(view.lost_seconds["startup"])
        telemetry.stop()
    assert startup[0] < startup[1] < startup[0] + age, "the time before the first agent counts once"
    real = processes.unix_time
    for stepped in (0, 3600):  # also after the clock was stepped
        monkeypatch.setattr(processes, "unix_time", lambda stepped=stepped: real() + stepped)
        agent = start(tmp_path / "run")
        assert wait_for(agent._run_so_far.view).number == 0
        telemetry.stop()


def test_a_folder_that_cannot_be_written_is_told_once_and_heartbeats_go_on_once_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr("telemetry.agent.attempt._RETRY_SECONDS", 0.2)
    folder = tmp_path / "run" / "attempts"
    folder.parent.mkdir()
    folder.write_text("a file in its place")
    agent = start(tmp_path / "run")
    telemetry.tokens(3)

    def told(text: str) -> list[dict]:
        return [line for line in log_lines(agent) if line["event"] == "error" and text in line["message"]]

    wait_for(lambda: (tmp_path / "run" / "logs").exists() and told("no heartbeats"))
    wait_for(lambda: telemetry.metrics().get("tokens_total") == 3)
    folder.unlink()
    (newest,) = wait_for(lambda: [*folder.glob("*.beat")])
    shutil.rmtree(folder)  # and where others delete them
    assert wait_for(lambda: [*folder.glob("*.beat")]) == [newest]
    assert json.loads(wait_for(newest.read_bytes))["life"] == newest.stem
    telemetry.stop()
    assert (len(told("no heartbeats")), len(told("the state of the run cannot be written"))) == (1, 1)


def test_a_clock_that_is_stepped_is_no_time_before_the_agent(tmp_path):
    agent = start(tmp_path / "run")
    wait_for(agent._run_so_far.view)
    before = agent.attempt.seconds_before
    agent._wall._wall = lambda: time.time_ns() + 36_000 * NS
    wait_for(lambda: agent.attempt.newest.unix_seconds > time.time() + 18_000)
    assert agent.attempt.seconds_before == before
    assert agent._run_so_far.view().lost_seconds["startup"] < before + 18_000


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (3, 3), (-1, 255), (256, 0), ("text", 1), (True, 1)])
def test_the_exit_status_is_what_the_kernel_keeps(code, status):
    end = EndEvidence()
    end.leaving(code)
    assert end.settled.exit_status == status
    assert end.settled.failed is (status != 0)


def test_the_job_is_told_by_its_scheduler(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("SLURM", "LSB", "PBS", "USER", "LOGNAME", "JOB_NAME", "POD_", "ACCOUNT", "QUEUE")):
            monkeypatch.delenv(name)
    assert job_labels() == {"job": "", "user": "", "account": "", "partition": ""}
    slurm = {f"SLURM_JOB_{name}": value for name, value in (("ID", "77"), ("USER", "ada"), ("ACCOUNT", "vision"),
                                                           ("PARTITION", "a100"))}  # fmt: skip
    told = {"job": "77", "user": "ada", "account": "vision", "partition": "a100"}
    assert job_labels(slurm | {"USER": "root", "JOB_NAME": "no"}) == told
    pod = {"JOB_NAME": "resnet", "POD_NAMESPACE": "team", "QUEUE_NAME": "gold", "USER": "app"}
    assert job_labels(pod) == {"job": "resnet", "user": "app", "account": "team", "partition": "gold"}


# -- hangs: each second once, and no counter falls, whatever the process was doing ------------------------------------


class Hung:
    """260 s of a loop in which a process is stuck for 100 s, from second 50 on, with a heartbeat every 10 s.

    Attributes:
        stuck_in: where. An evaluation or a checkpoint is no part of the loop.
        first_wait: how long the first batch takes; ``replay``: how long the batches after it are only drawn.
        saves: checkpoints. When one is noticed, and where it began, in seconds of the loop.
    """

    def __init__(self, folder, *, stuck_in="compute", first_wait=0.0, replay=0.0, saves=()):
        self.stuck_in, self.saves, self.first_wait, self.replay = stuck_in, saves, first_wait, replay
        self.attempt, self.hangs = AttemptNow(replace(EMPTY, life="ab")), StuckTimes()
        self.run_so_far = RunSoFar(folder, self.attempt, IDENTITY, ErrorLog())
        self.folder, self.seen = folder, []

    def run(self, last=260):
        """Returns itself. The newest view is the last of ``seen``."""
        for second in range(0, last + 1, 10):
            in_hang = min(100, max(0, second - 50))
            loop = second if self.stuck_in in {"startup", "replay", "compute"} else second - in_hang
            now = self.attempt.newest
            self.hangs.follow(float(in_hang) if 30 <= in_hang and second <= 150 else 0.0, self.stuck_in)
            for noticed, began in self.saves:
                if second == noticed:
                    kept = began - (stuck_in_loop(self.hangs.seconds) if began > 150 else 0.0)
                    now = replace(now, saves_completed=now.saves_completed + 1, kept_seconds=kept)
            now = replace(
                now,
                unix_seconds=2.0 + second,
                ledger_total_seconds={"startup": 5.0, "data_wait": 0.0, "compute": float(loop)},
                first_wait_seconds=min(float(loop), self.first_wait),
                resumption=Resumption(replay_seconds=self.replay if loop > self.first_wait + self.replay else 0.0),
                stuck_total_seconds=dict(self.hangs.seconds),
            )
            self.attempt.newest = now
            self.attempt.has_batch = loop > self.first_wait
            self.run_so_far.tick()
            self.seen.append(self.run_so_far.view().lost_seconds)
        return self

    def after_its_end(self) -> dict[str, float]:
        """What the run has lost when the next attempt begins, ten seconds after this one has ended with an error."""
        self.run_so_far.end(finished=False)
        state = read_run_state(self.folder / "rank-0.json")
        return state.next(process="next", first=EMPTY, started=state.newest.unix_seconds + 10).lost()


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
    lost = Hung(tmp_path, saves=saves).run().after_its_end()
    assert (lost["stuck"], lost["redone"], lost["down"]) == pytest.approx((100, redone, 10))


@pytest.mark.parametrize("stuck_in", ["evaluation", "checkpoint"])
def test_a_hang_beside_the_loop_takes_nothing_from_it(tmp_path, stuck_in):
    hung = Hung(tmp_path, stuck_in=stuck_in, first_wait=8.0, saves=[(40, 35.0)]).run()
    assert hung.seen[-1] == dict.fromkeys(LOST, 0.0) | {"startup": 13.0, "stuck": 100.0}
    assert hung.after_its_end()["redone"] == pytest.approx(160 - 35)


HANGS = [
    ("compute", 0.0, 0.0, {"startup": 5, "replay": 0}),
    ("startup", 160.0, 0.0, {"startup": 65, "replay": 0}),  # it was stuck while it waited for its first batch
    ("replay", 10.0, 150.0, {"startup": 15, "replay": 50}),
]


@pytest.mark.parametrize(("stuck_in", "first_wait", "replay", "lost"), HANGS)
def test_a_hang_in_the_first_wait_or_in_the_replay_counts_once(tmp_path, stuck_in, first_wait, replay, lost):
    hung = Hung(tmp_path, stuck_in=stuck_in, first_wait=first_wait, replay=replay).run()
    assert all(after[name] >= before[name] for before, after in itertools.pairwise(hung.seen) for name in LOST)
    assert hung.seen[-1] == dict.fromkeys(LOST, 0.0) | lost | {"stuck": 100}


@pytest.mark.parametrize("second", [90, 130, 260])
@pytest.mark.parametrize(("stuck_in", "first_wait", "replay", "lost"), HANGS)
def test_no_counter_falls_when_a_hung_process_is_killed(tmp_path, stuck_in, first_wait, replay, lost, second):
    """The next attempt has the state as it was written when this one began, and the newest heartbeat."""
    hung = Hung(tmp_path, stuck_in=stuck_in, first_wait=first_wait, replay=replay).run(second)
    (tmp_path / "ab.beat").write_bytes(msgspec.json.encode(hung.attempt.newest))
    now = next_attempt(tmp_path, Identity("run", 0, 0, 1, "n", 1, "plain")).view().lost_seconds
    assert all(now[name] >= seconds for name, seconds in hung.seen[-1].items()), (hung.seen[-1], now)
    of_attempt = sum(now[name] for name in ("startup", "stuck", "replay", "redone"))
    assert of_attempt == pytest.approx(5 + second), "each second once"


def test_two_hangs_are_two_and_one_that_goes_on_is_one():
    times = StuckTimes()
    for stuck, place in (
        (30, "compute"),
        (60, "compute"),
        (0, ""),
        (40, "data_wait"),
        (60, "compute"),
        (20, "compute"),
    ):
        times.follow(float(stuck), place)
    assert times.seconds == {"compute": 80.0, "data_wait": 60.0}


# -- replay: batches without a step of the optimizer -------------------------------------------------------------------

STEP, DRAWN = [Step(0.101, 0.001)], [Step(0.0205, 0.02)]
"""A step that trains, and a batch that is thrown away."""


def replay(*looks: tuple[list[Step], int]) -> Replay:
    """Looks: steps that have closed since the last one, and the optimizer's steps by then."""
    found, batches = Replay(), 0
    for closed, optimizer_steps in looks:
        batches += len(closed)
        found.add(closed)
        found.look(batches, optimizer_steps, 0.02)
    return found


@pytest.mark.parametrize(
    ("looks", "batches"),
    [
        pytest.param([(DRAWN * 5000, 0), (DRAWN * 7 + STEP * 5, 5), (STEP * 5, 10)], 5007, id="a replay"),
        pytest.param([(STEP * 9, 9), (STEP * 9, 18)], 0, id="a training that begins"),
        pytest.param([(STEP * 11, 9), (STEP * 9, 18)], 0, id="a loop that reads ahead"),
        pytest.param([(STEP * 7, 0), (STEP * 33, 5), (STEP * 120, 20)], 0, id="accumulated gradients"),
        pytest.param([(DRAWN * 40 + STEP * 16, 4), (STEP * 62, 19)], 40, id="accumulated after a replay"),
        pytest.param([(DRAWN * 40, 0), (STEP * 3, 3)], None, id="one look does not tell what a step takes"),
        pytest.param([(STEP * 8, 1), (STEP * 9, 2)], None, id="nor do two, if it may take many"),
    ],
)  # fmt: skip
def test_replay_is_what_was_drawn_without_a_step_of_the_optimizer(looks, batches):
    found = replay(*looks)
    assert found.batches == batches
    if batches == 5007:
        assert found.seconds == pytest.approx(5007 * 0.0205 - 0.02), "without the first wait"
        assert found.wait_seconds == pytest.approx(5006 * 0.02)


# -- the counter of the OOM killer -------------------------------------------------------------------------------------


def tree(tmp_path, version: int, groups: dict[str, tuple[str, int]]):
    """``groups``: limit and kills by folder, from the root of the mount; the process is in ``job/step``."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("0123abcd-4567-89ab-cdef-0123456789ab\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n")
    root = mount if version == 2 else mount / "memory"
    for folder in ("", "job", "job/step"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        limit, kills = groups.get(folder, ("max", 0))
        if version == 1:
            (root / folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        elif folder:  # the root of version 2 has no such files
            (root / folder / "memory.max").write_text(f"{limit}\n")
            (root / folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 2\noom_kill {kills}\n")
    return OomCounter(proc, mount), root


@pytest.mark.parametrize(
    ("version", "groups", "of", "kills"),
    [
        (2, {"job/step": ("max", 3)}, "job/step/memory.events", 3),
        (2, {"job/step": ("max", 1), "job": ("1000", 4)}, "job/memory.events", 4),  # the tasks of a job share the limit
        (2, {"job/step": ("900", 1), "job": ("1000", 4)}, "job/step/memory.events", 1),
        (1, {"job/step": ("max", 3), "job": ("1000", 0)}, "job/step/memory.oom_control", 3),
    ],
)
def test_the_group_whose_counter_tells(tmp_path, version, groups, of, kills):
    counter, root = tree(tmp_path, version, groups)
    assert counter.path == str(root / of)
    assert counter.count() == kills
    assert counter.group == f"0123abcd-{(root / of).parent.stat().st_ino:x}"


def test_the_counter_is_read_again_and_its_group_is_one_of_this_boot(tmp_path):
    counter, root = tree(tmp_path, 2, {})
    (root / "job/step/memory.events").write_text("oom 1\noom_kill 1\n")
    assert counter.count() == 1
    for path in (tmp_path / "cgroup").rglob("memory.events"):
        path.write_text("oom 1\n")  # a kernel that does not count
    without = OomCounter(tmp_path / "proc", tmp_path / "cgroup")
    assert (counter.count(), without.count(), without.path) == (None, None, None)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("ffffffff-4567\n")
    assert group_id(root / "job/step", tmp_path / "proc") != counter.group
