"""Nodes of a job tell one another of their ranks through files in the run folder, with real boards and real files."""

from __future__ import annotations

import json
import math
import os
import re
import time

import msgspec
import pytest
from msgspec.structs import replace

from telemetry.diagnosis.hangs import HangState
from telemetry.model.records import Collective, RankPace
from telemetry.node import peers
from telemetry.node.board import Board, Numbers
from telemetry.node.peers import JobExchange, JobLink, NodeReport, read_report
from telemetry.safety import threads
from telemetry.safety.errors import ErrorLog
from telemetry.util.clock import NS
from tests.faults.processes import wait_for


def pace(rank: int, compute: float = 9.0, **fields) -> RankPace:
    """A rank that made 100 steps in 10 s and never waited."""
    return RankPace(rank, 10.0, 100, compute, 0.0, 0.0, **fields)


class Job:
    """Nodes with one run folder and one clock."""

    def __init__(self, folder, nodes: int, ranks: int = 2) -> None:
        self.seconds, self.folder = 0.0, folder
        self.paces = {f"n{node:04d}": [pace(node * ranks + rank) for rank in range(ranks)] for node in range(nodes)}
        self.exchanges = {name: self.exchange(name) for name in self.paces}
        self.hang: dict[str, tuple[HangState, ...]] = {}
        self.heard: dict[str, tuple[RankPace, ...]] = {}

    def exchange(self, name: str) -> JobExchange:
        return JobExchange(self.folder, name, mono_ns=lambda: int(self.seconds * NS))

    def cycles(self, count: int, but: str = "") -> None:
        for _ in range(count):
            self.seconds += 5
            for name, exchange in self.exchanges.items():
                if name != but:
                    self.heard[name] = exchange.cycle(self.paces[name], self.hang.get(name, ()))

    def write(self, cycles: int) -> None:
        """Cycles of the exchanges that are there. The other nodes write only."""
        for cycle in range(cycles):
            for name in self.paces.keys() - self.exchanges.keys():
                ranks = tuple(replace(each, node=name) for each in self.paces[name])
                content = msgspec.json.encode(NodeReport(name, int(self.seconds) + cycle, ranks))
                (self.folder / "job").mkdir(exist_ok=True)
                (self.folder / "job" / f"node-{name}.json").write_bytes(content)
            self.cycles(1)

    def gone(self, of: str = "n0000") -> set[tuple[str, int]]:
        return {(state.node, state.rank) for state in self.exchanges[of].hang if state.process == "gone"}

    def hangs(self) -> None:
        self.hang = {name: states(int(name[1:])) for name in self.exchanges}


def states(node: int, ranks: int = 2, **fields) -> tuple[HangState, ...]:
    told = dict(doing="compute", stuck=True, seconds=30.0, waits=True, where="train.py:4", steps=7)
    told["collective"] = Collective("all_reduce", 5, "0", "4x8 Float")
    return tuple(HangState(node * ranks + rank, f"n{node:04d}", **told | fields) for rank in range(ranks))


def test_a_node_hears_of_the_ranks_of_another(tmp_path):
    job = Job(tmp_path, nodes=2)
    job.cycles(3)
    assert {(p.rank, p.node) for p in job.heard["n0000"]} == {(2, "n0001"), (3, "n0001")}
    assert {(p.rank, p.node) for p in job.heard["n0001"]} == {(0, "n0000"), (1, "n0000")}
    assert job.exchanges["n0000"].nodes == 2
    job.exchanges["n0000"].leave()
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["node-n0001.json"]


def test_the_files_of_an_earlier_attempt_are_nobody(tmp_path):
    before = Job(tmp_path, nodes=3)
    before.cycles(2)
    after = Job(tmp_path, nodes=2)
    after.cycles(4)
    assert {p.node for p in after.heard["n0000"]} == {"n0001"}
    assert after.exchanges["n0000"].nodes == 2


def test_two_containers_of_one_machine_have_a_file_each(tmp_path):
    seconds = [0.0]
    ours, theirs = (
        JobExchange(tmp_path, "host", board, mono_ns=lambda: int(seconds[0] * NS)) for board in ("one", "two")
    )
    for _ in range(3):
        seconds[0] += 5
        heard = ours.cycle([pace(0)]), theirs.cycle([pace(1)])
    assert [[p.rank for p in ranks] for ranks in heard] == [[1], [0]]


def test_a_node_that_is_gone_is_forgotten_and_one_that_joins_is_found(tmp_path):
    job = Job(tmp_path, nodes=3)
    job.cycles(3)
    assert {p.node for p in job.heard["n0000"]} == {"n0001", "n0002"}
    job.paces["late"], job.exchanges["late"] = [pace(9)], job.exchange("late")
    job.cycles(20, but="n0002")
    assert {p.node for p in job.heard["n0000"]} == {"n0001", "late"}


def test_files_of_killed_attempts_are_removed_after_an_hour(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    killed = folder / "node-n0009-00000000.json"
    killed.write_bytes(msgspec.json.encode(NodeReport("n0009", 7, (pace(9),))))
    job = Job(tmp_path, nodes=2)
    job.cycles(30)
    assert killed.exists()
    job.seconds += 3600
    job.cycles(30)
    assert {path.name for path in folder.iterdir()} == {"node-n0000.json", "node-n0001.json"}
    assert job.exchanges["n0000"].nodes == 2


# -- large jobs --------------------------------------------------------------------------------------------------------


def test_a_large_job_hears_of_whole_nodes_with_the_ranks_that_others_may_wait_for(tmp_path):
    job = Job(tmp_path, nodes=64, ranks=8)
    everyone = job.paces
    everyone["n0011"][3] = pace(91, compute=0.1)
    everyone["n0022"][0] = pace(176, stack_samples=50, in_sync_samples=1)
    everyone["n0033"][7] = pace(271, phase="checkpoint", seconds_without_step=9.0)
    everyone["n0044"][0] = pace(352, waits_for_ranks=True, seconds_without_step=9.0)
    for paces in everyone.values():
        paces[1] = replace(paces[1], stack_samples=50, in_sync_samples=30)
    job.exchanges = {name: job.exchanges[name] for name in ("n0000", "n0011", "n0022", "n0033", "n0044", "n0063")}
    job.write(3)
    heard = job.heard["n0000"]
    assert len(heard) < 100
    nodes = {node: {p.rank for p in heard if p.node == node} for node in {p.node for p in heard}}
    assert {"n0011", "n0022", "n0033"} <= nodes.keys()
    assert "n0044" not in nodes, "it waits"
    assert {len(ranks) for ranks in nodes.values()} == {8}
    assert job.exchanges["n0000"].nodes == 64
    assert job.exchanges["n0000"].seconds == 5.0


def test_of_a_job_of_64_ranks_all_are_heard(tmp_path):
    job = Job(tmp_path, nodes=9, ranks=8)
    job.cycles(3)
    assert {len(heard) for heard in job.heard.values()} == {64}


def test_the_more_nodes_the_longer_a_cycle_and_with_too_many_none_is_read(tmp_path, monkeypatch):
    job = Job(tmp_path, nodes=200, ranks=1)
    job.exchanges = {"n0000": job.exchanges["n0000"]}
    job.write(3)
    exchange = job.exchanges["n0000"]
    assert (exchange.nodes, exchange.trouble) == (200, "")
    assert exchange.seconds == 199 / 16
    monkeypatch.setattr(peers, "MAX_NODES", 199)
    job.write(1)
    assert (exchange.nodes, job.heard["n0000"]) == (1, ())
    assert exchange.trouble == "the job has more than 199 nodes, so each compares its own ranks only"


# -- damaged files -----------------------------------------------------------------------------------------------------


WHOLE = msgspec.json.encode(NodeReport("x", 1, (pace(3),)))
DAMAGED = [
    *(b"", b"{", b"[]", bytes(range(128, 192)), b"[" * 50_000, b'{"ranks":' + b"[" * 50_000),
    b'{"node": "n", "sequence": 1, "ranks": [{"rank": 0}]}',
    b'{"node": "n", "sequence": 1e999, "ranks": []}',
    *(
        re.sub(rb'"compute_seconds":[^,}]+', b'"compute_seconds":' + number, WHOLE)
        for number in (b"1e999", b"NaN", b'"x"')
    ),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_file_that_makes_no_sense_is_no_report(tmp_path, content):
    (tmp_path / "whole").write_bytes(WHOLE)
    (tmp_path / "damaged").write_bytes(content)
    assert read_report(tmp_path / "whole") is not None
    assert read_report(tmp_path / "damaged") is None


def test_a_pace_without_an_end_on_the_board_is_passed_over(tmp_path):
    board = Board("run", str(tmp_path / "run"), "n", root=tmp_path / "boards")
    board.publish(3, [], pace=pace(3, where="f (a.py:1)", stuck=True))
    assert board.paces() == (pace(3, where="f (a.py:1)", stuck=True),)
    board.publish(3, [], pace=replace(pace(3), seconds=math.nan))
    assert board.paces() == ()


def test_what_a_newer_version_adds_is_left_out(tmp_path):
    report = NodeReport("n", 3, (pace(0, node="n"),), states(0))
    content = json.loads(msgspec.json.encode(report))
    content["ranks"][0]["from_the_future"] = 1
    (tmp_path / "report").write_text(json.dumps(content))
    assert read_report(tmp_path / "report") == report


@pytest.mark.parametrize("nodes", [2, 12])
def test_files_of_others_in_the_folder_hide_no_node(tmp_path, nodes):
    """Names that are no UTF-8, contents that nobody can read, a folder, a FIFO, a link."""
    folder = tmp_path / "job"
    folder.mkdir()
    names = [f"node-{kind}.json".encode() for kind in ("deep", "folder", "fifo", "link")]
    deep, inner, fifo, link = (os.path.join(os.fsencode(folder), name) for name in names)
    for place in (os.path.join(os.fsencode(folder), b"node-\xff\xfe.json"), deep):
        with open(place, "wb") as file:
            file.write(b'{"ranks": ' + b"[" * 50_000)
    os.mkdir(inner)
    os.mkfifo(fifo)
    os.symlink("/dev/zero", link)
    job = Job(tmp_path, nodes=nodes)
    job.cycles(5)
    assert job.exchanges["n0000"].nodes == nodes
    assert job.heard["n0000"]


# -- while the job hangs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 12])
def test_each_node_hears_what_all_ranks_do(tmp_path, nodes):
    job = Job(tmp_path, nodes=nodes)
    job.cycles(4)
    assert all(exchange.hang == () for exchange in job.exchanges.values())
    job.hangs()
    job.cycles(4)
    everyone = {(2 * node + rank, f"n{node:04d}") for node in range(nodes) for rank in range(2)}
    for number, exchange in enumerate(job.exchanges.values()):
        own = {(state.rank, state.node) for state in states(number)}
        assert {(state.rank, state.node) for state in exchange.hang} == everyone - own
        assert {state.collective for state in exchange.hang} == {Collective("all_reduce", 5, "0", "4x8 Float")}
    job.hang = {}
    job.cycles(4)
    assert all(exchange.hang == () for exchange in job.exchanges.values())


def test_the_ranks_of_a_node_that_is_lost_are_gone(tmp_path):
    job = Job(tmp_path, nodes=3)
    job.cycles(6)
    job.cycles(14, but="n0001")
    assert job.exchanges["n0002"].hang == (), "nothing hangs"
    job.hangs()
    job.cycles(4, but="n0001")
    others = [name for name in job.exchanges if name != "n0001"]
    assert [job.gone(name) for name in others] == [{("n0001", 2), ("n0001", 3)}] * 2


def test_the_ranks_of_a_node_that_has_left_are_not_gone(tmp_path):
    job = Job(tmp_path, nodes=3)
    job.cycles(5)
    job.exchanges["n0001"].leave()
    job.hangs()
    job.cycles(15, but="n0001")
    assert job.gone() == set()
    assert "n0001" not in {state.node for state in job.exchanges["n0000"].hang}


# -- the link of a rank ------------------------------------------------------------------------------------------------


class Node:
    """One node of a job with one rank, which is this process."""

    def __init__(self, name: str, rank: int, run_dir, boards) -> None:
        self.board = Board("job", str(run_dir), name, root=boards)
        self.errors = ErrorLog()
        self.seconds = 0.0
        self.rank = rank
        self.link = JobLink(run_dir, name, self.board, self.errors, mono_ns=lambda: int(self.seconds * NS))

    def tick(self, world_size: int = 2):
        self.seconds += 1
        self.board.publish(self.rank, Numbers(), pace=pace(self.rank))
        if self.board.lead():
            self.board.server_lock.beat()
        self.link.tick(world_size)
        return self.link.paces(self.rank)


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "CYCLE_SECONDS", 0.01)
    nodes = []

    def make(name: str, rank: int, run_dir: str = "run") -> Node:
        (tmp_path / "boards").mkdir(mode=0o700, exist_ok=True)
        nodes.append(Node(name, rank, tmp_path / run_dir, tmp_path / "boards"))
        return nodes[-1]

    yield make
    for one in nodes:
        one.link.close(5)
        one.board.leave()


def test_each_node_learns_of_the_rank_of_the_other_and_of_its_hang(node):
    first, second = node("n1", 0), node("n2", 1)
    (seen,) = wait_for(lambda: (second.tick(), first.tick())[1], "rank 1")
    assert (seen.rank, seen.node) == (1, "n2")
    (seen,) = wait_for(lambda: (first.tick(), second.tick())[1], "rank 0")
    assert (seen.rank, seen.node) == (0, "n1")
    assert (first.link.elsewhere, first.link.stuck_elsewhere) == ((), False)
    second.link.local = (HangState(1, "n2", "data_wait", stuck=True),)
    wait_for(lambda: (second.tick(), first.tick(), first.link.stuck_elsewhere)[2], "the hang")
    assert [state.rank for state in first.link.elsewhere] == [1]


def test_a_job_of_one_node_has_no_thread_and_no_file(node, tmp_path):
    alone = node("n1", 0)
    for _ in range(3):
        assert alone.tick(world_size=1) == ()
    paces = alone.board.paces
    alone.board.paces = lambda but: (pace(1),)
    alone.tick(world_size=2)
    alone.board.paces = paces  # a rank has ended before the others
    for _ in range(20):
        alone.tick(world_size=2)
    assert not (tmp_path / "run" / "job").exists()
    assert [p.rank for p in alone.link.of_run] == [1], "the last line of the run names it"
    assert "telemetry-job" not in threads.running()


def test_closing_the_link_removes_the_file_of_the_node(node, tmp_path):
    first = node("n1", 0)
    folder = tmp_path / "run" / "job"
    wait_for(lambda: (first.tick(), list(folder.glob("node-n1-*.json")))[1], "its file")
    first.link.close(5)
    wait_for(lambda: not first.link._thread.is_alive(), "the end of its thread")
    assert list(folder.glob("node-*")) == []


def test_a_folder_that_is_not_shared_is_told_once(node, monkeypatch):
    monkeypatch.setattr(peers, "_ALONE_SECONDS", 5.0)
    first = node("n1", 0)
    lines = []

    def told():
        first.tick()
        lines.extend(first.errors.take_notes())
        return lines

    (line,) = wait_for(told, "a line in the log")
    assert line.source == "job"
    assert "put run_dir on a file system that all nodes share" in line.message
    for _ in range(200):
        told()
    assert len(lines) == 1


def test_what_was_learned_is_dropped_when_nothing_new_comes(node):
    first, second = node("n1", 0), node("n2", 1)
    wait_for(lambda: (second.tick(), first.tick())[1], "rank 1")
    first.link.close(5)
    wait_for(lambda: not first.link._thread.is_alive(), "the thread to end")
    first.link.tick = lambda world_size: None
    for _ in range(62):
        last = first.tick()
    assert last == ()


def test_files_that_cannot_be_written_are_told_once_and_hurt_nobody(node, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    first = node("n1", 0)
    lines = wait_for(lambda: (first.tick(), first.errors.take_notes())[1], "a line in the log")
    assert "the other nodes cannot be told" in lines[0].message
    for _ in range(50):
        first.tick()
        lines += first.errors.take_notes()
        time.sleep(0.002)  # cycles of the exchange, each of which fails
    assert len(lines) == 1


def test_without_a_thread_to_be_had_there_is_none_to_wait_for(node, monkeypatch):
    """A limit on processes counts threads, too. Each tick tries again."""
    first = node("n1", 0)

    def refused(*_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_new_thread", refused)
        with pytest.raises(RuntimeError):
            for _ in range(30):
                first.tick()
        first.link.close(5)
    wait_for(lambda: first.tick() is not None and first.link._thread, "the thread")
