"""When a snapshot is taken, how the ranks agree on its steps, and snapshots of whole runs.

Ranks poll when a test says so, by a clock that the test sets.
"""

from __future__ import annotations

import gzip
import json
import os
from types import SimpleNamespace

import msgspec
import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent import snapshots
from telemetry.agent.snapshots import StepWatch
from telemetry.config import Config
from telemetry.records import RECORDED
from telemetry.snapshot import agree, command
from telemetry.snapshot.agree import Agreement, Answer, InvalidMessageError, Plan, Request, Result, Trigger
from telemetry.snapshot.command import snapshot
from telemetry.util import files
from telemetry.util.processes import Identity
from tests.data_sets import Numbers
from tests.running_agent import log_lines
from tests.snapshot_recording import mark, marks


class Clock:
    """Stands for the time of the ranks, and for the module `time` of the command."""

    def __init__(self) -> None:
        self.now = 1.7e9
        self.on_sleep = lambda: None

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += 10 * seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(agree, "unix_time", clock.time)
    return clock


class Ranks:
    def __init__(self, folder, clock, count: int) -> None:
        self.clock, self.count, self.folder = clock, count, folder
        self.triggers = [Trigger(Config()) for _ in range(count)]
        self.each = [self.rank(rank) for rank in range(count)]
        clock.now += 10

    def rank(self, rank: int, folder=None, far: bool = False) -> Agreement:
        identity = Identity("r", rank, rank, self.count, "n", 1, "plain")
        job = SimpleNamespace(ranks_elsewhere=lambda _: far)
        return Agreement(folder or self.folder, identity, 1.0, self.triggers[rank], job)

    def ask(self, by: int = 0, kind: str = agree.COMMAND, rank: int | None = None, steps: int = 5) -> Request:
        self.clock.now += 0.001
        request = Request(agree.new_id(self.clock.now), kind, agree.REQUEST, rank, steps, "a test")
        self.each[by].ask(request)
        return request

    def tick(self, *ranks: int, at: dict[int, int] | None = None) -> dict[int, Plan]:
        """One tick of some ranks, by default of all. Returns the plans that they read."""
        plans = {rank: self.each[rank].poll((at or {}).get(rank, 100), 0.1) for rank in ranks or range(self.count)}
        self.clock.now += 1
        return {rank: plan for rank, plan in plans.items() if plan is not None}

    def ticks(self, count: int, *ranks: int, at: dict[int, int] | None = None) -> dict[int, Plan]:
        return {rank: plan for _ in range(count) for rank, plan in self.tick(*ranks, at=at).items()}

    def names(self) -> list[str]:
        return sorted(name.partition(".")[2] for name in os.listdir(self.folder / ".meeting"))


@pytest.fixture
def make(tmp_path, clock):
    return lambda count: Ranks(tmp_path / "snapshots", clock, count)


# -- agreement -----------------------------------------------------------------------------------------------------


def test_a_single_process_agrees_with_itself_at_once(make):
    ranks = make(1)
    assert ranks.tick() == {}
    ranks.ask(steps=3)
    plan = ranks.tick()[0]
    assert (plan.refused, plan.ranks, plan.last_step - plan.first_step) == (None, (0,), 2)
    assert 102 < plan.first_step < 110
    assert plan.folder == f"request-step{plan.first_step}"
    assert ranks.tick() == {}


def test_all_ranks_read_the_same_steps_ahead_of_the_furthest(make):
    ranks = make(4)
    ranks.ask(2)
    plans = ranks.ticks(3, at={0: 100, 1: 120, 2: 100, 3: 90})
    assert plans.keys() == {0, 1, 2, 3}
    assert len(set(plans.values())) == 1
    assert plans[0].ranks == (0, 1, 2, 3)
    assert plans[0].first_step >= 120 + 3 / 0.1
    fast = [Answer(rank, 1000, 0.001, 100.0, 1.0) for rank in range(2)]
    assert agree.first_step(fast, 100.5) >= 1000 + 500 + 3000


def test_a_rank_that_never_polls_is_waited_for_three_ticks(make):
    ranks = make(4)
    ranks.ask(1)
    assert ranks.ticks(3, 0, 1, 2) == {}
    plans = ranks.tick(0, 1, 2)
    assert plans.keys() == {0, 1, 2}
    assert plans[0].ranks == (0, 1, 2)
    assert ranks.tick(3)[3] == plans[0], "its training thread finds that the step is past"


def test_the_rank_that_would_write_the_plan_dies(make):
    ranks = make(3)
    ranks.ask(1)
    ranks.tick(0)  # has answered, and is gone
    assert ranks.ticks(8, 1, 2).keys() == {1, 2}


def test_the_first_plan_that_is_written_is_valid(make, monkeypatch):
    """Two ranks write one at the same moment."""
    ranks = make(2)
    ranks.ask()
    assert ranks.tick(0) == {}
    original, plans = agree.first_step, {}

    def slow(answers, now):
        monkeypatch.setattr(agree, "first_step", original)
        ranks.clock.now += 60  # rank 1 thinks that rank 0 has died
        plans.update(ranks.tick(1))
        return original(answers, now)

    monkeypatch.setattr(agree, "first_step", slow)
    ranks.tick(1)
    assert ranks.tick(0) == {}
    assert plans[1].first_step != 0
    assert ranks.tick(0)[0] == plans[1]


def test_requests_of_several_ranks_at_once_become_one_and_those_of_persons_do_not(make):
    ranks = make(3)
    for rank in range(3):
        ranks.ask(rank, agree.API)
    plans = [plan for _ in range(8) for plan in ranks.tick().values()]
    assert (len(plans), len(set(plans))) == (3, 1)
    assert ranks.names().count("request.json") == 1
    ranks.ask(), ranks.ask()
    assert len({plan for _ in range(8) for plan in ranks.tick().values()}) == 2


def test_one_rank_alone(make):
    ranks = make(3)
    ranks.ask(rank=2)
    plans = ranks.ticks(4)
    assert {rank: plan.ranks for rank, plan in plans.items()} == {2: (2,)}


def test_a_busy_rank_reads_the_plan_and_does_not_answer(make):
    ranks = make(2)
    ranks.ask()
    plans = [ranks.tick(0) and ranks.each[1].poll(100, None) for _ in range(5)]
    assert [plan.ranks for plan in plans if plan] == [(0,)]


def test_the_policy_of_the_rank_that_writes_the_plan_refuses_for_all(make):
    ranks = make(2)
    ranks.triggers[0].off = "no more"
    ranks.ask(1)
    assert {rank: plan.refused for rank, plan in ranks.ticks(3).items()} == {0: "no more", 1: "no more"}


def test_old_files_are_not_followed_and_then_removed(make):
    ranks = make(1)
    ranks.ask()
    ranks.tick()  # there is a plan
    ranks.ask()
    ranks.clock.now += 30
    later_run = ranks.rank(0)
    assert later_run.poll(0, 0.1) is None
    ranks.clock.now += 200
    assert ranks.tick() == {}, "nobody waits for it any more"
    ranks.clock.now += 1000
    assert later_run.poll(0, 0.1) is None
    assert ranks.names() == []


BAD = [b"", b'{"kind": "stall"}', b"\xff\xfe", b"9" * 2_000_000, b'{"stall":' + b"[" * 100_000]


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("name", ["request", "plan", "answer-0"])
def test_an_invalid_file_is_an_error_once(make, name, content):
    ranks = make(1)
    good = ranks.ask()
    bad = agree.new_id(ranks.clock.now - 1)
    if name == "answer-0":  # of a request that is good
        request = Request(bad, agree.COMMAND, agree.REQUEST, None, 5, "")
        (ranks.folder / ".meeting" / f"{bad}.request.json").write_bytes(msgspec.json.encode(request))
    (ranks.folder / ".meeting" / f"{bad}.{name}.json").write_bytes(content)
    plans, failed = {}, 0
    for _ in range(3):
        try:
            plans |= ranks.tick()
        except (OSError, InvalidMessageError):
            failed += 1
    assert (failed, plans[0].request) == (1, good)


@pytest.mark.parametrize("folder", ["../x", "/etc", "request-step1/../../x", ".meeting", "request-stepx"])
def test_a_plan_does_not_name_another_folder(folder):
    request = Request(agree.new_id(1.7e9), agree.API, agree.REQUEST, None, 5, "")
    plan = Plan(request, None, 1, 5, (0,), "request-step1", 1)
    content = msgspec.json.encode(plan)
    assert msgspec.json.decode(content, type=Plan) == plan
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(content.replace(b"request-step1", folder.encode()), type=Plan)


# -- nodes that see files late -------------------------------------------------------------------------------------


def test_ranks_of_two_nodes_agree_though_each_sees_files_late(tmp_path, make, clock, monkeypatch):
    """Each node sees what the other one has written up to 30 s later, as with the cached folders of NFS."""
    monkeypatch.setattr(agree, "caches_folders", lambda _: True)
    folders = [tmp_path / "a", tmp_path / "b"]
    two = make(4)
    two.each = [two.rank(rank, folders[rank // 2], far=True) for rank in range(4)]
    plans: dict[int, Plan] = {}
    at: dict[int, float] = {}
    began = clock.now = clock.now + 10
    for second in range(200):
        if second == 5:
            two.ask(3)
        for rank, each in enumerate(two.each):
            plan = each.poll(int((clock.now - began) / 0.1), 0.1)
            if plan is not None:
                plans[rank], at[rank] = plan, clock.now
        if second % 30 == 0:
            exchange(*(folder / ".meeting" for folder in folders))
        clock.now = began + second + 1
    assert plans.keys() == {0, 1, 2, 3}
    assert len(set(plans.values())) == 1
    assert plans[0].ranks == (0, 1, 2, 3)
    assert all((at[rank] - began) / 0.1 < plans[rank].first_step - 2 for rank in plans), "each reads it in time"
    assert plans[0].first_step < (at[0] - began + 100) / 0.1, "and nobody waits for long"


def exchange(one, other) -> None:
    """Each of two folders gets the files that only the other one has."""
    for source, target in ((one, other), (other, one)):
        target.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*"):
            if not (target / file.name).exists():
                (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(("kind", "caches"), [("nfs4", True), ("fuse.sshfs", True), ("ext4", False)])
def test_file_systems_that_show_a_folder_late(kind, caches, tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mount = f"36 21 {os.major(device)}:{os.minor(device)} / /data rw shared:1 - {kind} server:/export rw"
    (tmp_path / "mountinfo").write_text(f"21 1 0:1 / / rw - overlay overlay rw\n{mount}\n")
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "mountinfo")
    assert files.caches_folders(tmp_path) is caches
    assert files.caches_folders(tmp_path / "missing") is False


@pytest.mark.parametrize(("caches", "status"), [(True, 0), (False, 1)], ids=["nfs", "local disk"])
def test_the_command_waits_for_nodes_that_see_files_late(tmp_path, make, clock, monkeypatch, capsys, caches, status):
    """The second rank never answers. So the first one writes the plan only when it can be sure: after 90 s."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "snapshots").mkdir()
    start = {"event": "run_start", "settings": {"interval_seconds": 1.0}}
    (tmp_path / "logs" / "rank-0.1.jsonl").write_text(json.dumps(start) + "\n")
    monkeypatch.setattr(agree, "caches_folders", lambda _: True)
    rank = make(2).rank(0, far=True)

    def poll() -> None:
        plan = rank.poll(100, 0.5)
        if plan is not None:
            rank.report(plan, Result(0, "recorded", None, "snapshots/trace.gz", plan.first_step, plan.last_step))

    clock.on_sleep = poll
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(command, "caches_folders", lambda _: caches)
    clock.now += 1
    assert snapshot(str(tmp_path), None, 5, 300) == status
    said, error = capsys.readouterr()
    if caches:
        assert error == ""
        assert "agreed on by rank 0" in said
        assert said.endswith("snapshots/trace.gz\n")
    else:
        assert "rank 0 answered, but wrote no plan" in error


# -- when stalls trigger one ---------------------------------------------------------------------------------------

CAUSE = "uneven_batches"


def trigger(most: int = 3) -> Trigger:
    return Trigger(Config(snapshot_settle_seconds=10, snapshot_cooldown_seconds=100, max_snapshots=most))


def fired(one: Trigger, causes: list[str | None], since: int = 0) -> list[int]:
    """The seconds at which it fires, asked once a second, each taken."""
    found = []
    for now, cause in enumerate(causes, since):
        if one.stalled(now, cause):
            found.append(now)
            one.took(now)
    return found


@pytest.mark.parametrize(
    ("causes", "at"),
    [([CAUSE] * 300, [10]), (["straggler"] * 300, [20]), (["checkpoint"] * 300, []),
     ([CAUSE] * 9 + [None] + [CAUSE] * 9, []), ([CAUSE] * 12 + [None] + [CAUSE] * 288, [10, 110])],
    ids=["once, when it has held", "the straggler first", "a trace of steps shows no checkpoint",
         "closed before it has settled", "the next one waits for the cooldown"],
)  # fmt: skip
def test_a_stall_triggers_one_snapshot(causes, at):
    assert fired(trigger(), causes) == at


def test_another_s_snapshot_shows_the_stall_too():
    one = trigger()
    one.stalled(0, CAUSE)
    one.took(5)
    assert fired(one, [CAUSE] * 1000, since=6) == []


def test_a_person_waits_for_no_cooldown_but_there_is_a_maximum():
    one = trigger(most=2)
    one.took(0)
    assert "cooldown" in one.refuses(1, agree.STALL)
    assert one.refuses(1, agree.COMMAND) is None
    one.took(1)
    for kind in (agree.STALL, agree.API, agree.COMMAND):
        assert "max_snapshots = 2" in one.refuses(1000, kind)
    assert fired(trigger(most=0), [CAUSE] * 100) == []
    one.off = "slower"
    assert one.refuses(0, agree.COMMAND) == "slower"


# -- steps before and after ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "during", "after", "slower"),
    [
        ([0.1] * 100, [0.3] * 5, [[0.1] * 400], False),
        ([0.1] * 100, [0.3] * 5, [[0.115] * 400], True),
        ([0.1] * 100, [0.3] * 5, [[0.15] * 100, [0.1] * 100], False),
        ([0.1] * 100, [0.3] * 5, [([0.1] * 9 + [5.0]) * 10], False),
        ([0.05] * 5000, [0.2] * 60, [[0.2] * 400], True),
        ([0.1] * 5, [0.1] * 5, [[9.0] * 1000], False),
        ([0.001] * 5000, [0.001] * 5, [[0.002] * 900], False),
        ([0.001] * 5000, [0.001] * 5, [[0.002] * 900, [0.002] * 3000], True),
    ],
    ids=["as fast", "slower", "slower for a while", "some slow steps", "only those before it count",
         "nothing to compare with", "three windows of 50 steps and not of 2 s", "windows of 2 s"],
)  # fmt: skip
def test_whether_steps_stay_slower_after_a_snapshot(before, during, after, slower):
    watch = StepWatch()
    assert watch.add(before) is None
    watch.add(during)
    watch.compare(len(before) + 1, len(before) + len(during))
    found = [each for steps in after if (each := watch.add(steps))]
    assert len(found) == slower
    assert all(f"({1e3 * before[0]:.2f} ms before" in each for each in found)


def test_the_pace_is_the_fastest_of_late_and_no_single_step():
    watch = StepWatch()
    assert watch.step_seconds is None
    watch.add([0.3])
    assert watch.step_seconds is None
    watch.add([0.3, 0.3, 0.001])
    assert watch.step_seconds == sum([0.3, 0.3, 0.001]) / 3
    watch.add([0.1] * 4)
    watch.add([0.5] * 4)
    assert round(watch.step_seconds, 6) == 0.1
    for _ in range(5):
        watch.add([0.5] * 4)
    assert watch.step_seconds == 0.5


# -- whole runs ----------------------------------------------------------------------------------------------------


def recorded(agent, loader, steps: int) -> list[dict]:
    """Train until a snapshot of so many steps is taken. Returns the events of its trace."""
    counts, asked = agent.snapshots.counts, 0
    for step, _ in enumerate(loader, 1):
        mark(step)
        if counts[RECORDED]:
            break
        if step >= 10 and sum(counts.values()) == asked:  # again, if a busy machine was too late for the first
            assert telemetry.request_snapshot(steps=steps)
            asked += 1
    telemetry.stop()
    (path,) = agent.run_dir.glob("snapshots/request-step*/rank-0.*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    first = int(path.parent.name.removeprefix("request-step"))
    assert marks(events) == [*range(first, first + steps)]
    return events


@pytest.fixture
def agent(tmp_path):
    return telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)


def test_a_whole_run_with_the_fetches_of_its_workers(agent, capfd):
    iterator = iter(DataLoader(Numbers(100_000, seconds=0.02), num_workers=2, prefetch_factor=1))
    pids = [worker.pid for worker in iterator._workers]
    events = recorded(agent, iterator, 6)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] in pids}
    assert named == dict(zip(pids, ["DataLoader worker 0", "DataLoader worker 1"], strict=True))
    fetches = [e for e in events if e.get("cat") == "dataloader_worker"]
    assert {e["pid"] for e in fetches} == set(pids)
    assert all(e["dur"] >= 20_000 for e in fetches)
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    for fetch in fetches:  # on the trace's own clock: those in progress at some time of the recording
        assert begin - 1e6 < fetch["ts"] + fetch["dur"]
        assert fetch["ts"] < end + 1e6
    assert capfd.readouterr() == ("", "")


def test_a_trace_without_a_kernel_is_told_where_a_gpu_trains(agent, monkeypatch):
    monkeypatch.setattr(snapshots, "on_gpu", lambda: True)
    recorded(agent, DataLoader(Numbers(100_000, seconds=0.02), num_workers=1), 3)
    (told,) = [line for line in log_lines(agent) if line["event"] == "error" and line["source"] == "snapshot"]
    assert "has no kernel of the GPU" in told["message"]


@pytest.mark.parametrize(
    ("setting", "gpu", "asked"), [("auto", False, 1), ("auto", True, 0), ("on", True, 1), ("off", False, 0)]
)
def test_a_stall_asks_for_none_on_a_gpu_unless_it_is_told_to(tmp_path, monkeypatch, setting, gpu, asked):
    monkeypatch.setattr(snapshots, "on_gpu", lambda: gpu)
    quiet = {"port": "off", "interval_seconds": 30, "start_line": False}
    agent = telemetry.start(tmp_path, snapshot_settle_seconds=0, snapshot_on_stall=setting, **quiet)
    agent.snapshots.tick(SimpleNamespace(active_cause="uneven_batches", open_record=lambda: None))
    telemetry.stop()
    assert len(list(tmp_path.glob("snapshots/.meeting/*.request.json"))) == asked


def test_a_request_must_be_valid_and_needs_an_agent():
    for arguments in (dict(steps=0), dict(steps=51), dict(rank=-1)):
        with pytest.raises(ValueError, match="snapshot"):
            telemetry.request_snapshot(**arguments)
    with pytest.raises(TypeError, match="steps"):
        telemetry.request_snapshot(steps="5")
    assert telemetry.request_snapshot() is False, "no agent runs"
