"""One rank's part in finding out why the job hangs, with real boards and a clock set by hand."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from telemetry.agent.job_hang import JobHang
from telemetry.diagnosis.hangs import Collective, HangState
from telemetry.node.board import Board, HangBoard
from telemetry.node.metrics import HangView
from telemetry.util.clock import NS, WallClock
from telemetry.util.processes import Identity
from tests.faults.processes import Child, write

WAITS = HangState(
    0, "n1", "compute", stuck=True, seconds=30.0, waits=True, where="train.py:4", collective=Collective("all_reduce", 5)
)
FETCHES = HangState(1, "n1", "data_wait", stuck=True, seconds=31.0, where="data.py:88", call="read")


class Rank:
    """A rank of a job with its part in the hang; all of them share one board and this process."""

    node_hangs, recorder_is_off = True, True

    def __init__(self, board: HangBoard, state: HangState, world_size: int = 2, *, leads: bool = True) -> None:
        self.state, self.steps = state, 7
        self.node = SimpleNamespace(hang_board=board, leads=leads)
        self.job = SimpleNamespace(local=(), elsewhere=(), stuck_elsewhere=False)
        self.identity = Identity("run", state.rank, 0, world_size, "n1", os.getpid(), "plain")
        self.lines: list[dict] = []
        self.seconds, self.asked = 100.0, 0
        wall = WallClock(wall_ns=lambda: self.now_ns() + 1_767_225_600 * NS, mono_ns=self.now_ns)
        log = SimpleNamespace(emit=lambda event, fields: self.lines.append({"event": event} | fields))
        self.part = JobHang(self, log, wall, mono_ns=self.now_ns)

    def now_ns(self) -> int:
        return int(self.seconds * NS)

    def read(self, identity: Identity) -> HangState:
        self.asked += 1
        return self.state

    def tick(self, *, hangs: bool = True, steps: int = 7, seconds: float = 1.0) -> list[dict]:
        self.seconds += seconds
        self.node_hangs, self.steps = hangs, steps
        self.part.tick(self.identity, self.node, self.job)
        return self.lines


@pytest.fixture
def board(tmp_path):
    return HangBoard(Board("r", "x", "n1", root=tmp_path / "boards").path)


def test_on_a_calm_run_nothing_is_read_and_nothing_written(board):
    rank = Rank(board, WAITS)
    for _ in range(50):
        assert rank.tick(hangs=False) == []
    assert rank.asked == 0
    assert board.reports() == []
    assert (rank.part.view(), rank.job.local) == (None, ())


def test_the_serving_rank_writes_one_line_when_it_knows_all_ranks(board):
    rank = Rank(board, WAITS)
    for _ in range(5):
        assert rank.tick() == [], "nothing is known of rank 1"
    rank.job.elsewhere = (replace(FETCHES, node="n2"),)
    for _ in range(30):
        rank.tick()
    (line,) = rank.lines
    assert (line["event"], line["kind"]) == ("hang", "fetch")
    assert line["suspects"] == [{"rank": 1, "node": "n2", "where": "data.py:88 (read)", "doing": "in a fetch"}]
    assert line["recorder"].startswith("off; start the job with TORCH_FR_BUFFER_SIZE=")
    assert rank.part.view() == HangView("fetch", 1, "data.py:88 (read)")


def test_a_silent_rank_does_not_hold_the_line_back_which_comes_again(board):
    rank = Rank(board, WAITS)
    for _ in range(20):
        rank.tick()
    (line,) = rank.lines
    assert (line["kind"], line["suspects"], line["silent_ranks"]) == ("unknown", [], 1)
    assert line["verdict"].endswith("nothing is known of rank 1")
    rank.job.elsewhere = (replace(FETCHES, node="n2"),)
    assert [line["kind"] for line in rank.tick()] == ["unknown", "fetch"]


def test_a_rank_that_may_still_go_on_is_given_time(board):
    rank = Rank(board, WAITS)
    rank.job.elsewhere = (replace(FETCHES, stuck=False),)
    assert rank.tick() == rank.tick() == []
    rank.job.elsewhere = (replace(WAITS, rank=1),)
    rank.tick()
    (line,) = rank.lines
    assert line["kind"] == "unknown"


def test_another_rank_says_what_it_does_and_decides_nothing(board):
    rank = Rank(board, FETCHES, leads=False)
    for _ in range(20):
        assert rank.tick() == []
    (row,) = board.reports()
    assert (row.state.where, row.pid) == ("data.py:88", os.getpid())
    rank.tick(hangs=False)
    assert board.reports() == []


def test_a_hang_is_over_once_steps_end_again(board):
    rank = Rank(board, WAITS, world_size=1)
    rank.tick()
    rank.tick(hangs=False)
    assert [line.get("over") for line in rank.tick(hangs=False)] == [None]
    assert rank.part.view() is None
    rank.tick(hangs=False, steps=8)
    assert [line.get("over") for line in rank.tick(hangs=False, steps=9)] == [None, True]


def test_a_second_hang_has_a_line_of_its_own(board):
    rank = Rank(board, WAITS, world_size=1)
    for steps in (7, 8, 9):
        rank.tick(steps=steps)
        rank.tick(hangs=False, steps=steps)
    assert [line.get("over") for line in rank.lines] == [None] * 3
    assert len({line["since"] for line in rank.lines}) <= 3


OTHER = """
import sys
from pathlib import Path
from telemetry.node.board import Board, Numbers
board = Board("r", "x", "n1", root=Path(sys.argv[1]))
board.publish(1, Numbers(), ended=sys.argv[2] == "ended")
print("published", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [("killed", "rank_gone"), ("stopped", "rank_stopped"), ("ended", "rank_left"), ("silent", "compute")],
)
def test_what_has_become_of_the_process_of_another_rank(tmp_path, how, kind):
    own = Board("r", "x", "n1", root=tmp_path / "boards")
    with Child(write(tmp_path, "other.py", OTHER), tmp_path / "boards", how, cwd=tmp_path) as child:
        assert child.line() == "published"
        if how == "killed":
            child.process.kill()
            child.wait()
            assert own.states() == [], "a scrape removes the file of a dead rank"
        elif how == "stopped":
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)  # the signal is delivered a moment later
        elif how == "ended":
            child.tell()
            child.wait()
        rank = Rank(HangBoard(own.path), WAITS)
        for _ in range(17):
            rank.tick()
    assert rank.lines[-1]["kind"] == kind
    assert [suspect["rank"] for suspect in rank.lines[-1]["suspects"]] == [1]
    if how == "silent":
        assert rank.lines[-1]["verdict"].endswith(
            "rank 1 on n1 is in a step, and its agent does not answer, as while C code holds the GIL"
        )


def test_one_that_was_started_again_is_not_gone(tmp_path):
    own = Board("r", "x", "n1", root=tmp_path / "boards")
    script = write(tmp_path, "other.py", OTHER)
    with Child(script, tmp_path / "boards", "first", cwd=tmp_path) as first:
        assert first.line() == "published"
    own.states()
    with Child(script, tmp_path / "boards", "second", cwd=tmp_path) as second:
        assert second.line() == "published"
        rank = Rank(HangBoard(own.path), WAITS)
        for _ in range(17):
            rank.tick()
    assert rank.lines[-1]["kind"] == "compute", "it is there, and says nothing"


HOSTILE = [
    b"",
    b"[" * 60_000,
    b"\xff",
    b"{}",
    b'{"rank": 1e999, "pid": 1, "ticks": 1}',
    b'{"rank": 1, "pid": "x"}',
    b"[1]",
]


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("name", ["rank-9.bin", "hang-9.json", "gone-9"])
def test_a_file_of_the_board_that_makes_no_sense_is_passed_over(board, name, content):
    rank = Rank(board, WAITS, world_size=1)
    (board._folder / name).write_bytes(content)
    os.mkfifo(board._folder / f"{name.split('-')[0]}-8")
    (board._folder / f"{name.split('-')[0]}-7").symlink_to("/dev/zero")
    rank.tick()
    assert [state.rank for state in rank.job.local] == [0]
