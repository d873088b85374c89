"""The ranks agree on steps. In each test the ranks poll when the test says so, by a clock that the test sets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from telemetry.snapshot import agree, command
from telemetry.snapshot.agree import Agreement, Answer, InvalidMessageError, Plan, Request, Result
from telemetry.snapshot.command import SnapshotOptions, snapshot
from telemetry.util import files


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
    def __init__(self, folder: Path, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count
        self.folder = folder / "snapshots"
        self.refuses: dict[int, str] = {}
        self.each = [self.rank(rank) for rank in range(count)]
        clock.now += 10

    def rank(self, rank: int) -> Agreement:
        return Agreement(
            self.folder, rank=rank, world_size=self.count, tick_seconds=1.0, refuses=lambda _: self.refuses.get(rank)
        )

    def request(self, kind: str = agree.COMMAND, rank: int | None = None, steps: int = 5) -> Request:
        self.clock.now += 0.001
        return Request(agree.new_id(self.clock.now), kind, agree.REQUEST, rank, steps, "a test")

    def poll(self, *ranks: int, at: dict[int, int] | None = None) -> dict[int, Plan]:
        """One tick of some ranks, by default of all. Returns the plans that they read."""
        heard = {}
        for rank in ranks or range(len(self.each)):
            plan = self.each[rank].poll((at or {}).get(rank, 100), 0.1)
            if plan is not None:
                heard[rank] = plan
        self.clock.now += 1
        return heard

    def names(self) -> list[str]:
        return sorted(name.partition(".")[2] for name in os.listdir(self.folder / ".meeting"))


@pytest.fixture
def make(tmp_path, clock):
    return lambda count: Ranks(tmp_path, clock, count)


def test_a_single_process_agrees_with_itself_at_once(make):
    ranks = make(1)
    assert ranks.poll() == {}
    ranks.each[0].ask(ranks.request(steps=3))
    plan = ranks.poll()[0]
    assert (plan.refused, plan.ranks, plan.last_step - plan.first_step) == (None, (0,), 2)
    assert 102 < plan.first_step < 110
    assert plan.folder == f"request-step{plan.first_step}"
    assert ranks.poll() == {}


def test_all_ranks_hear_the_same_steps_ahead_of_the_furthest(make):
    ranks = make(4)
    ranks.each[2].ask(ranks.request())
    heard: dict[int, Plan] = {}
    for _ in range(3):
        heard |= ranks.poll(at={0: 100, 1: 120, 2: 100, 3: 90})
    assert heard.keys() == {0, 1, 2, 3}
    assert len(set(heard.values())) == 1
    assert heard[0].ranks == (0, 1, 2, 3)
    assert heard[0].first_step >= 120 + 3 / 0.1


def test_a_rank_that_never_polls_is_waited_for_three_ticks(make):
    ranks = make(4)
    ranks.each[1].ask(ranks.request())
    ticks = [ranks.poll(0, 1, 2) for _ in range(5)]
    assert [sorted(heard) for heard in ticks[:3]] == [[], [], []]
    assert ticks[3].keys() == {0, 1, 2}
    assert ticks[3][0].ranks == (0, 1, 2)
    late = ranks.poll(3)[3]
    assert late == ticks[3][0], "it hears of the plan; that it is past the step is found on its training thread"


def test_the_rank_that_would_propose_dies(make):
    ranks = make(3)
    ranks.each[1].ask(ranks.request())
    ranks.poll(0)  # has answered, and is gone
    ticks = [ranks.poll(1, 2) for _ in range(8)]
    heard = next(tick for tick in ticks if tick)
    assert heard.keys() == {1, 2}


def test_the_first_plan_written_holds(make, monkeypatch):
    """Two propose at the same moment."""
    ranks = make(2)
    ranks.each[0].ask(ranks.request())
    assert ranks.poll(0) == {}
    original, heard = agree.first_step, {}

    def slow(answers, now):
        monkeypatch.setattr(agree, "first_step", original)
        ranks.clock.now += 60  # rank 1 thinks that rank 0 has died, and proposes
        heard.update(ranks.poll(1))
        return original(answers, now)

    monkeypatch.setattr(agree, "first_step", slow)
    ranks.poll(1)
    assert ranks.poll(0) == {}
    assert heard[1].first_step != 0
    assert ranks.poll(0)[0] == heard[1]


def test_requests_of_several_ranks_at_once_become_one(make):
    ranks = make(3)
    for rank in ranks.each:
        rank.ask(ranks.request(agree.API))
    heard: list[Plan] = []
    for _ in range(8):
        heard += ranks.poll().values()
    assert len(heard) == 3
    assert len(set(heard)) == 1
    assert ranks.names().count("request.json") == 1


def test_what_persons_ask_for_is_taken_one_after_the_other(make):
    ranks = make(1)
    for _ in range(2):
        ranks.each[0].ask(ranks.request())
    first, second = ranks.poll()[0], ranks.poll()[0]
    assert first.request.id < second.request.id


def test_one_rank_alone(make):
    ranks = make(3)
    ranks.each[0].ask(ranks.request(rank=2))
    heard: dict[int, Plan] = {}
    for _ in range(4):
        heard |= ranks.poll()
    assert heard.keys() == {2}
    assert heard[2].ranks == (2,)


def test_a_rank_that_is_busy_does_not_answer_but_hears(make):
    ranks = make(2)
    ranks.each[0].ask(ranks.request())
    heard = [ranks.poll(0) and ranks.each[1].poll(100, None) for _ in range(5)]
    assert [plan.ranks for plan in heard if plan] == [(0,)]


def test_the_policy_of_the_rank_that_proposes_refuses_for_all(make):
    ranks = make(2)
    ranks.refuses[0] = "no more"
    ranks.each[1].ask(ranks.request())
    heard: dict[int, Plan] = {}
    for _ in range(3):
        heard |= ranks.poll()
    assert {rank: plan.refused for rank, plan in heard.items()} == {0: "no more", 1: "no more"}


def test_what_is_left_of_a_run_before_is_not_followed_up(make):
    ranks = make(1)
    ranks.each[0].ask(ranks.request())
    ranks.poll()  # there is a plan
    ranks.each[0].ask(ranks.request())
    ranks.clock.now += 30
    again = ranks.rank(0)
    assert again.poll(0, 0.1) is None
    ranks.clock.now += 1000
    assert again.poll(0, 0.1) is None
    assert ranks.names() == []


def test_a_request_nobody_followed_up_is_too_old_at_some_point(make):
    ranks = make(1)
    ranks.each[0].ask(ranks.request())
    ranks.clock.now += 200
    assert ranks.poll() == {}


def test_the_last_result_clears_what_led_to_it(make):
    ranks = make(2)
    ranks.each[0].ask(ranks.request())
    plan = {rank: plan for _ in range(3) for rank, plan in ranks.poll().items()}[0]
    for rank in (0, 1):
        ranks.each[rank].report(plan, Result(rank, "recorded", None, "x", 1, 2))
    assert ranks.names() == ["plan.json", "result-0.json", "result-1.json"]


BAD = [b"", b"{", b"[]", b'{"kind": "stall"}', b"\xff\xfe", b"9" * 2_000_000, b'{"stall":' + b"[" * 100_000]


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("name", ["request", "plan", "answer-0"])
def test_a_file_that_says_nothing_is_passed_over_once(make, name, content):
    ranks = make(1)
    good = ranks.request()
    ranks.each[0].ask(good)
    bad = agree.new_id(ranks.clock.now - 1)
    folder = ranks.folder / ".meeting"
    if name == "answer-0":  # of a request that is good
        request = Request(bad, agree.COMMAND, agree.REQUEST, None, 5, "")
        (folder / f"{bad}.request.json").write_bytes(msgspec.json.encode(request))
    (folder / f"{bad}.{name}.json").write_bytes(content)
    heard, failed = {}, 0
    for _ in range(3):
        try:
            heard |= ranks.poll()
        except (OSError, InvalidMessageError):
            failed += 1
    assert failed == 1
    assert heard[0].request == good


@pytest.mark.parametrize("folder", ["../x", "/etc", "request-step1/../../x", ".meeting", "request-stepx"])
def test_a_plan_does_not_name_another_folder(folder):
    request = Request(agree.new_id(1.7e9), agree.API, agree.REQUEST, None, 5, "")
    plan = Plan(request, None, 1, 5, (0,), "request-step1", 1)
    content = msgspec.json.encode(plan)
    assert msgspec.json.decode(content, type=Plan) == plan
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(content.replace(b"request-step1", folder.encode()), type=Plan)


def test_names_that_are_no_ids_are_no_requests(make):
    ranks = make(1)
    ranks.each[0].ask(ranks.request())
    ranks.poll()
    for name in ("..evil.request.json", "x.request.json", "1-a.plan.json", "1700000000000-a.answer-x.json"):
        (ranks.folder / ".meeting" / name).write_text("{}")
    assert ranks.poll() == {}


def test_the_steps_of_a_fast_loop_are_far_enough_ahead():
    answers = [Answer(rank, 1000, 0.001, 100.0, 1.0) for rank in range(2)]
    assert agree.first_step(answers, 100.5) >= 1000 + 500 + 3000


# -- nodes that see files late -------------------------------------------------------------------------------------


def test_ranks_of_two_nodes_agree_though_each_sees_files_late(tmp_path, clock):
    """Each node sees what the other one has written up to 30 s later, as with the cached folders of NFS."""
    folders = [tmp_path / "a", tmp_path / "b"]
    ranks = [
        Agreement(
            folders[rank // 2], rank=rank, world_size=4, tick_seconds=1.0, refuses=lambda _: None, far=lambda: True
        )
        for rank in range(4)
    ]
    heard: dict[int, Plan] = {}
    at: dict[int, float] = {}
    began = clock.now = clock.now + 10
    for second in range(200):
        if second == 5:
            ranks[3].ask(Request(agree.new_id(clock.now), agree.COMMAND, agree.REQUEST, None, 5, "a test"))
        for rank, each in enumerate(ranks):
            plan = each.poll(int((clock.now - began) / 0.1), 0.1)
            if plan is not None:
                heard[rank], at[rank] = plan, clock.now
        if second % 30 == 0:
            exchange(*(folder / ".meeting" for folder in folders))
        clock.now = began + second + 1
    assert heard.keys() == {0, 1, 2, 3}
    assert len(set(heard.values())) == 1
    assert heard[0].ranks == (0, 1, 2, 3)
    assert all((at[rank] - began) / 0.1 < heard[rank].first_step - 2 for rank in heard), "each hears in time"
    assert heard[0].first_step < (at[0] - began + 100) / 0.1, "and nobody waits for long"


def exchange(one: Path, other: Path) -> None:
    """Each of two folders gets the files that only the other one has."""
    for source, target in ((one, other), (other, one)):
        target.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*"):
            if not (target / file.name).exists():
                (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("kind", "caches"), [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("ext4", False), ("lustre", False)]
)
def test_file_systems_that_show_a_folder_late(kind, caches, tmp_path, monkeypatch):
    status = tmp_path.stat()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"21 1 0:1 / / rw - overlay overlay rw\n36 21 {os.major(status.st_dev)}:{os.minor(status.st_dev)} / /data rw"
        f" shared:1 - {kind} server:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr(files, "MOUNTS", mounts)
    assert files.caches_folders(tmp_path) is caches
    assert files.caches_folders(tmp_path / "missing") is False


@pytest.mark.parametrize(("caches", "status"), [(True, 0), (False, 1)], ids=["nfs", "local disk"])
def test_the_command_waits_for_nodes_that_see_files_late(tmp_path, clock, monkeypatch, capsys, caches, status):
    """The second rank never answers. So the first one writes the plan only when it can be sure: after 90 s."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "snapshots").mkdir()
    start = {"event": "run_start", "settings": {"interval_seconds": 1.0}}
    (logs / "rank-0.1.jsonl").write_text(json.dumps(start) + "\n")
    rank = Agreement(
        tmp_path / "snapshots", rank=0, world_size=2, tick_seconds=1.0, refuses=lambda _: None, far=lambda: True
    )

    def poll() -> None:
        plan = rank.poll(100, 0.5)
        if plan is not None:
            rank.report(plan, Result(0, "recorded", None, "snapshots/trace.gz", plan.first_step, plan.last_step))

    clock.on_sleep = poll
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(command, "caches_folders", lambda _: caches)
    clock.now += 1
    said: list[str] = []
    assert snapshot(str(tmp_path), SnapshotOptions.parse("all", "5", "300"), said.append) == status
    error = capsys.readouterr().err
    if caches:
        assert error == ""
        assert "agreed on by rank 0" in said[0]
        assert said[1].endswith("snapshots/trace.gz")
    else:
        assert "rank 0 answered, but wrote no plan" in error
