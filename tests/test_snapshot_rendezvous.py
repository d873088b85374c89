"""The ranks agree on steps. In each test the ranks poll when the test says so, by a clock that the test sets."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from telemetry.snapshot import protocol as p
from telemetry.snapshot import rendezvous
from telemetry.snapshot.rendezvous import Position, Rendezvous, first_step
from telemetry.snapshot.request_files import new_id
from telemetry.util import files


class Ranks:
    def __init__(self, folder, ranks: int, tick: float = 1.0) -> None:
        self.now = 1.7e9
        self.folder = folder / "snapshots"
        self.refuses: dict[int, str] = {}
        self.each = [self.rank(rank, ranks, tick) for rank in range(ranks)]
        self.now += 10

    def rank(self, rank: int, ranks: int, tick: float = 1.0) -> Rendezvous:
        return Rendezvous(
            self.folder,
            rank=rank,
            world_size=ranks,
            tick_seconds=tick,
            refuses=lambda _: self.refuses.get(rank),
            clock=lambda: self.now,
        )

    def request(self, kind: str = p.COMMAND, rank: int | None = None, steps: int = 5) -> p.Request:
        self.now += 0.001
        return p.Request(new_id(self.now), kind, p.REQUEST, rank, steps, "a test")

    def poll(self, *ranks: int, at: dict[int, int] | None = None) -> dict[int, p.Plan]:
        """One tick of some ranks, by default of all. Returns the plans that they read."""
        heard = {}
        for rank in ranks or range(len(self.each)):
            plan = self.each[rank].poll(partial(Position, (at or {}).get(rank, 100), 0.1))
            if plan is not None:
                heard[rank] = plan
        self.now += 1
        return heard

    def names(self) -> list[str]:
        return sorted(name.partition(".")[2] for name in os.listdir(self.folder / ".meeting"))


def test_a_single_process_agrees_with_itself_at_once(tmp_path):
    ranks = Ranks(tmp_path, 1)
    ranks.each[0].ask(ranks.request(steps=3))
    plan = ranks.poll()[0]
    assert (plan.refused, plan.ranks, plan.last_step - plan.first_step) == (None, (0,), 2)
    assert 102 < plan.first_step < 110
    assert plan.folder == f"request-step{plan.first_step}"
    assert ranks.poll() == {}


def test_all_ranks_hear_the_same_steps_ahead_of_the_furthest(tmp_path):
    ranks = Ranks(tmp_path, 4)
    ranks.each[2].ask(ranks.request())
    heard: dict[int, p.Plan] = {}
    for _ in range(3):
        heard |= ranks.poll(at={0: 100, 1: 120, 2: 100, 3: 90})
    assert heard.keys() == {0, 1, 2, 3}
    assert len(set(heard.values())) == 1
    assert heard[0].ranks == (0, 1, 2, 3)
    assert heard[0].first_step >= 120 + 3 / 0.1


def test_a_rank_that_never_polls_is_waited_for_three_ticks(tmp_path):
    ranks = Ranks(tmp_path, 4)
    ranks.each[1].ask(ranks.request())
    ticks = [ranks.poll(0, 1, 2) for _ in range(5)]
    assert [sorted(heard) for heard in ticks[:3]] == [[], [], []]
    assert ticks[3].keys() == {0, 1, 2}
    assert ticks[3][0].ranks == (0, 1, 2)
    late = ranks.poll(3)[3]
    assert late == ticks[3][0], "it hears of the plan; that it is past the step is found on its training thread"


def test_the_rank_that_would_propose_dies(tmp_path):
    ranks = Ranks(tmp_path, 3)
    ranks.each[1].ask(ranks.request())
    ranks.poll(0)  # has answered, and is gone
    ticks = [ranks.poll(1, 2) for _ in range(8)]
    heard = next(tick for tick in ticks if tick)
    assert heard.keys() == {1, 2}


def test_the_first_plan_written_holds(tmp_path):
    """Two propose at the same moment."""
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].ask(ranks.request())
    assert ranks.poll(0) == {}
    original = ranks.each[0]._plan

    def slow(folder, request, answered):
        plan = original(folder, request, answered)
        ranks.now += 60  # rank 1 thinks that rank 0 has died, and proposes
        heard.update(ranks.poll(1))
        return plan

    heard: dict[int, p.Plan] = {}
    ranks.each[0]._plan = slow
    ranks.poll(1)
    assert ranks.poll(0) == {}
    assert heard[1].first_step != 0
    assert ranks.poll(0)[0] == heard[1]


def test_requests_of_several_ranks_at_once_become_one(tmp_path):
    ranks = Ranks(tmp_path, 3)
    for rank in ranks.each:
        rank.ask(ranks.request(p.API))
    heard: list[p.Plan] = []
    for _ in range(8):
        heard += ranks.poll().values()
    assert len(heard) == 3
    assert len(set(heard)) == 1
    assert [name for name in ranks.names() if name == "request.json"] == ["request.json"]


def test_what_persons_ask_for_is_taken_one_after_the_other(tmp_path):
    ranks = Ranks(tmp_path, 1)
    for _ in range(2):
        ranks.each[0].ask(ranks.request())
    first, second = ranks.poll()[0], ranks.poll()[0]
    assert first.request.id < second.request.id


def test_one_rank_alone(tmp_path):
    ranks = Ranks(tmp_path, 3)
    ranks.each[0].ask(ranks.request(rank=2))
    heard: dict[int, p.Plan] = {}
    for _ in range(4):
        heard |= ranks.poll()
    assert heard.keys() == {2}
    assert heard[2].ranks == (2,)


def test_a_rank_that_is_busy_does_not_answer_but_hears(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].ask(ranks.request())
    heard = [ranks.poll(0) and ranks.each[1].poll(lambda: None) for _ in range(5)]
    assert [plan.ranks for plan in heard if plan] == [(0,)]


def test_the_policy_of_the_rank_that_proposes_refuses_for_all(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.refuses[0] = "no more"
    ranks.each[1].ask(ranks.request())
    heard: dict[int, p.Plan] = {}
    for _ in range(3):
        heard |= ranks.poll()
    assert {rank: plan.refused for rank, plan in heard.items()} == {0: "no more", 1: "no more"}


def test_what_is_left_of_a_run_before_is_not_followed_up(tmp_path):
    ranks = Ranks(tmp_path, 1)
    ranks.each[0].ask(ranks.request())
    ranks.poll()  # there is a plan
    ranks.each[0].ask(ranks.request())
    ranks.now += 30
    again = ranks.rank(0, 1)
    assert again.poll(partial(Position, 0, 0.1)) is None
    ranks.now += 1000
    assert again.poll(partial(Position, 0, 0.1)) is None
    assert ranks.names() == []


def test_a_request_nobody_followed_up_is_too_old_at_some_point(tmp_path):
    ranks = Ranks(tmp_path, 1)
    ranks.each[0].ask(ranks.request())
    ranks.now += 200
    assert ranks.poll() == {}


def test_the_last_result_clears_what_led_to_it(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.each[0].ask(ranks.request())
    for _ in range(3):
        ranks.poll()
    (plan,) = {p.plan_from(json.loads(path.read_text())) for path in ranks.folder.glob(".meeting/*.plan.json")}
    for rank in (0, 1):
        ranks.each[rank].report(plan, p.Result(rank, "recorded", None, "x", 1, 2))
    assert ranks.names() == ["plan.json", "result-0.json", "result-1.json"]


BAD = [b"", b"{", b"[]", b"null", b'{"id": 3}', b'{"kind": "stall"}', b"\xff\xfe", b"9" * 2_000_000]


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("name", ["request", "plan", "answer-0"])
def test_a_file_that_says_nothing_is_passed_over_once(tmp_path, name, content):
    ranks = Ranks(tmp_path, 1)
    good = ranks.request()
    ranks.each[0].ask(good)
    bad = new_id(ranks.now - 1)
    folder = ranks.folder / ".meeting"
    if name == "answer-0":  # of a request that is good
        (folder / f"{bad}.request.json").write_text(
            json.dumps(p.as_json(p.Request(bad, p.COMMAND, p.REQUEST, None, 5, "")))
        )
    (folder / f"{bad}.{name}.json").write_bytes(content)
    heard = {}
    for _ in range(3):
        try:
            heard |= ranks.poll()
        except (OSError, p.InvalidError):
            pass
    assert name == "answer-0" or heard[0].request == good


@pytest.mark.parametrize("folder", ["../x", "/etc", "request-step1/../../x", ".meeting", "request-stepx", ""])
def test_a_plan_does_not_name_another_folder(folder):
    plan = p.Plan(p.Request(new_id(1.7e9), p.API, p.REQUEST, None, 5, ""), None, 1, 5, (0,), "request-step1", 1)
    assert p.plan_from(json.loads(json.dumps(p.as_json(plan)))) == plan
    with pytest.raises(p.InvalidError):
        p.plan_from(p.as_json(plan) | {"folder": folder})


def test_names_that_are_no_ids_are_no_requests(tmp_path):
    ranks = Ranks(tmp_path, 1)
    ranks.each[0].ask(ranks.request())
    ranks.poll()
    for name in ("..evil.request.json", "x.request.json", "1-a.plan.json", "1700000000000-a.answer-x.json"):
        (ranks.folder / ".meeting" / name).write_text("{}")
    assert ranks.poll() == {}


def test_the_steps_of_a_fast_loop_are_far_enough_ahead():
    answers = [p.Answer(rank, 1000, 0.001, 100.0, 1.0) for rank in range(2)]
    assert first_step(answers, 100.5) >= 1000 + 500 + 3000


def test_a_folder_that_stays_empty_is_not_listed(tmp_path, monkeypatch):
    ranks, listed = Ranks(tmp_path, 1), []
    real = rendezvous.scan
    monkeypatch.setattr(rendezvous, "scan", lambda folder: listed.append(folder) or real(folder))
    for _ in range(20):
        ranks.poll()
    assert 0 < len(listed) <= 6
    ranks.each[0].ask(ranks.request(steps=3))
    assert ranks.poll().keys() == {0}, "a request is read at the next tick"


def test_a_file_with_the_stamp_of_the_empty_folder_is_found(tmp_path):
    """A file system may keep times to two seconds."""
    ranks = Ranks(tmp_path, 1)
    for _ in range(3):
        ranks.poll()
    meeting = ranks.folder / ".meeting"
    empty = meeting.stat().st_mtime_ns
    ranks.each[0].ask(ranks.request(steps=3))
    os.utime(meeting, ns=(empty, empty))
    assert ranks.poll().keys() == {0}


def test_ranks_of_two_nodes_agree_though_each_sees_files_late(tmp_path):
    """Each node sees what the other one has written up to 30 s later, as with the cached folders of NFS."""
    nodes = [Ranks(tmp_path / name, 0) for name in ("a", "b")]
    ranks = []
    for rank, node in enumerate((nodes[0], nodes[0], nodes[1], nodes[1])):
        ranks.append(
            Rendezvous(
                node.folder, rank=rank, world_size=4, tick_seconds=1.0, refuses=lambda _: None,
                clock=lambda: nodes[0].now, far=lambda: True,
            )
        )  # fmt: skip
    heard: dict[int, p.Plan] = {}
    at: dict[int, float] = {}
    began = nodes[0].now = nodes[0].now + 10
    for second in range(200):
        if second == 5:
            ranks[3].ask(nodes[0].request())
        for rank, each in enumerate(ranks):
            plan = each.poll(lambda: Position(int((nodes[0].now - began) / 0.1), 0.1))
            if plan is not None:
                heard[rank], at[rank] = plan, nodes[0].now
        if second % 30 == 0:
            exchange(*(node.folder / ".meeting" for node in nodes))
        nodes[0].now = began + second + 1
    assert heard.keys() == {0, 1, 2, 3}
    assert len(set(heard.values())) == 1
    assert heard[0].ranks == (0, 1, 2, 3)
    assert all((at[rank] - began) / 0.1 < heard[rank].first_step - 2 for rank in heard), "each hears in time"
    assert heard[0].first_step < (at[0] - began + 100) / 0.1, "and nobody waits for long"


def exchange(one, other):
    """Each of two folders gets the files that only the other one has."""
    names = [{file.name for file in folder.iterdir()} for folder in (one, other)]
    for name in names[0] - names[1]:
        (other / name).write_bytes((one / name).read_bytes())
    for name in names[1] - names[0]:
        (one / name).write_bytes((other / name).read_bytes())


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
