"""The link of a node to the others of its job, with real boards and real files."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from telemetry.agent import job_link
from telemetry.agent.job_link import JobLink
from telemetry.job import exchange
from telemetry.job.exchange import JobExchange
from telemetry.publish.board import Board
from telemetry.publish.node import NodeService
from telemetry.util import threads
from telemetry.util.clock import NS
from telemetry.util.errors import ErrorLog
from tests.rank_paces import pace


def until(what: str, found: Callable[[], object], seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


class Node:
    """One node of a job with one rank, which is this process."""

    def __init__(self, name: str, rank: int, run_dir, boards) -> None:
        self.board = Board("job", str(run_dir), name, root=boards)
        self.service = NodeService(self.board, None, host="127.0.0.1", port=None, node=name, errors=ErrorLog())
        self.errors = ErrorLog()
        self.seconds = 0.0
        self.rank = rank
        self.link = JobLink(run_dir, name, self.service, self.errors, mono_ns=lambda: int(self.seconds * NS))

    def tick(self, world_size: int = 2):
        self.seconds += 1
        self.service.publish(self.rank, [], [], pace=pace(self.rank), ended=False)
        self.service.lead_if_vacant()
        self.link.tick(world_size)
        return self.link.paces()


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setattr(job_link, "CYCLE_SECONDS", 0.01)
    nodes = []

    def make(name: str, rank: int, run_dir: str = "run") -> Node:
        (tmp_path / "boards").mkdir(mode=0o700, exist_ok=True)
        nodes.append(Node(name, rank, tmp_path / run_dir, tmp_path / "boards"))
        return nodes[-1]

    yield make
    for one in nodes:
        one.link.close(5)
        one.service.leave()


def test_each_node_learns_of_the_rank_of_the_other(node):
    first, second = node("n1", 0), node("n2", 1)
    (seen,) = until("rank 1", lambda: (second.tick(), first.tick())[1])
    assert (seen.rank, seen.node) == (1, "n2")
    (seen,) = until("rank 0", lambda: (first.tick(), second.tick())[1])
    assert (seen.rank, seen.node) == (0, "n1")


def test_a_job_of_one_node_has_no_thread_and_no_file(node, tmp_path):
    alone = node("n1", 0)
    for _ in range(3):
        assert alone.tick(world_size=1) == ()
    assert not (tmp_path / "run" / "job").exists()
    assert "telemetry-job" not in threads.running()


def test_closing_the_link_removes_the_file_of_the_node(node, tmp_path):
    first = node("n1", 0)
    folder = tmp_path / "run" / "job"
    until("its file", lambda: (first.tick(), list(folder.glob("node-n1-*.json")))[1])
    first.link.close(5)
    until("the end of its thread", lambda: not first.link._thread.is_alive())
    assert list(folder.glob("node-*")) == []


def test_a_folder_that_is_not_shared_is_told_once(node, monkeypatch):
    monkeypatch.setattr(exchange, "_ALONE_SECONDS", 5.0)
    first = node("n1", 0)
    lines = []

    def told():
        first.tick()
        lines.extend(first.errors.take_lines())
        return lines

    (line,) = until("a line in the log", told)
    assert line["source"] == "job"
    assert "put run_dir on a file system that all nodes share" in line["message"]
    for _ in range(200):
        told()
    assert len(lines) == 1


def test_what_was_learned_is_dropped_when_nothing_new_comes(node):
    first, second = node("n1", 0), node("n2", 1)
    until("rank 1", lambda: (second.tick(), first.tick())[1])
    first.link.close(5)
    until("the thread to end", lambda: not first.link._thread.is_alive())
    first.link.tick = lambda world_size: None
    for _ in range(62):
        last = first.tick()
    assert last == ()


def test_ranks_that_end_before_others_do_not_make_a_job_of_several_nodes(node, tmp_path):
    alone = node("n1", 0)
    live = [2]
    alone.service.live_ranks = lambda: live[0]
    alone.tick(world_size=2)
    live[0] = 1
    alone.tick(world_size=2)
    assert "telemetry-job" not in threads.running()


def test_a_folder_that_stays_unwritable_is_told_once(node, tmp_path):
    (tmp_path / "run" / "job").mkdir(parents=True)
    first = node("n1", 0)
    (tmp_path / "run" / "job" / JobExchange(tmp_path, "n1", first.service.board_name)._mine).mkdir()
    lines = []
    for _ in range(50):
        first.tick()
        lines += first.errors.take_lines()
        time.sleep(0.002)  # cycles of the exchange, each of which fails
    assert len(lines) <= 1


def test_files_that_cannot_be_written_are_told_and_hurt_nobody(node, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    first = node("n1", 0)
    lines = until("a line in the log", lambda: (first.tick(), first.errors.take_lines())[1])
    assert "the other nodes cannot be told" in lines[0]["message"]


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
    until("the thread", lambda: first.tick() is not None and first.link._thread)
