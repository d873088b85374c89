"""Across ranks: which one the others wait for, what paces change, and why the whole job hangs."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from telemetry.agent.job_hang import JobHang
from telemetry.diagnosis.hangs import HangState
from telemetry.diagnosis.stalls import StallDetector
from telemetry.diagnosis.stragglers import OwnPaces, short_of_cores, straggler
from telemetry.log.lines import fields_of
from telemetry.model.records import CHECKPOINT, Collective, HostSample, ProcessSample, RankPace
from telemetry.node.board import Board
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.util.clock import NS, WallClock
from telemetry.util.identity import Identity
from telemetry.util.stacks import stack_of
from tests.faults.processes import Child, write
from tests.monitored_rank import SECOND, Run


def pace(rank: int, in_sync: int, node: str | None = None, **changes) -> RankPace:
    """30 steps of a second; ``in_sync`` of 100 samples waited for other ranks."""
    own = RankPace(rank, 30.0, 30, 30.0, 0.0, 0.0, stack_samples=100, in_sync_samples=in_sync, node=node)
    return replace(own, **changes)


def two_nodes(*slow_ranks: int, ranks: int = 16) -> list[RankPace]:
    """A node with some slow ranks, and one that is healthy."""
    slow = {rank: pace(rank, 1 + rank % 16 // 4, "n2", compute_seconds=29.0 + rank / 64) for rank in slow_ranks}
    n2 = [slow.get(rank, pace(rank, 40, "n2")) for rank in range(16, 16 + ranks)]
    return [*n2, *(pace(rank, 40, "n3") for rank in range(32, 32 + ranks))]


SLOW = "takes longer to compute a step"
HEALTHY, NEAR = pace(0, 40), pace(1, 41)
WAITING = dict(compute_seconds=18.0, exposed_wait_seconds=12.0)
OF_N2 = dict(node="n2")


def all_of(ranks: int) -> str:
    return f"; all {ranks} ranks of that node are waited for, so the node is slow"


def sampled(samples: int, share: float, rank: int, **changes) -> RankPace:
    return pace(rank, round(share * samples), stack_samples=samples, **changes)


WHY = {
    "one rank of the node is fast": (
        HEALTHY, [NEAR, *(pace(rank, 39 if rank == 5 else 1, "n2") for rank in range(4, 8))], SLOW
    ),
    "a node of one rank": (HEALTHY, [NEAR, pace(4, 1, "n2")], SLOW),
    "a rank of this node": (HEALTHY, [NEAR, pace(4, 1)], SLOW),
    **{
        f"a slow node of {ranks}": (HEALTHY, [NEAR, *two_nodes(*range(16, 16 + ranks), ranks=ranks)], SLOW + all_of(ranks))
        for ranks in (2, 4, 16)
    },
    "one fast rank of sixteen": (HEALTHY, [NEAR, *two_nodes(*(r for r in range(16, 32) if r != 25))], SLOW),
    "the others of the node have another pace": (
        HEALTHY, [pace(r, 1, "n2", steps=30 if r == 16 else 90) for r in range(16, 32)], SLOW
    ),
    "a node whose loaders are slow": (
        HEALTHY, [pace(rank, 1, "n2", **WAITING) for rank in range(16, 32)], "waits for data" + all_of(16),
    ),
    # Rank 3 seems to cost 0.13 s of each step, more than half of the 0.2 s that rank 2 costs: by chance, or not.
    **{
        f"a node, by {samples} samples": (
            sampled(samples, 0.4, 0),
            [
                pace(2, 0, stack_samples=0, compute_seconds=24.0, exposed_wait_seconds=6.0, **OF_N2),
                sampled(samples, 0.27, 3, **OF_N2),
            ],
            why,
        )
        for samples, why in ((100, "waits for data"), (3000, "waits for data" + all_of(2)))
    },
    # It waits for data 0.1 s of each step. By the samples it may cost 0.22 s; with 30 of them, that may be chance.
    **{
        f"a rank that waits, by {samples} samples": (
            sampled(samples, 0.4, 0), [sampled(samples, 1 / 6, 1, compute_seconds=27.0, exposed_wait_seconds=3.0)], why
        )
        for samples, why in ((30, "waits for data"), (3000, SLOW))
    },
    # The figures are those of a real job, of which rank 1 named slow compute, and ranks 0 and 2 the evaluation. The
    # newest pace of rank 3's node is 21 steps old: the window of rank 1 has more of the evaluations.
    "an evaluation, with windows of other moments": (
        RankPace(1, 10.0018, 126, 9.9838, 0.0180, 0.0, stack_samples=108, in_sync_samples=42, last_step=2392),
        [
            RankPace(
                3, 12.0001, 172, 10.3298, 0.0257, 1.6445, stack_samples=354, in_sync_samples=43, away_in="evaluation",
                last_step=2371, **OF_N2,
            )
        ],
        "is in an evaluation",
    ),
    # Rank 2 writes checkpoints. Rank 3 waits for it, too, but half of its window of 15 s was before them.
    "a checkpoint, with a window that began earlier": (
        RankPace(1, 10.003, 110, 9.984, 0.019, 0.0, stack_samples=181, in_sync_samples=65, last_step=4157),
        [
            RankPace(
                2, 10.0, 110, 7.127, 0.019, 2.854, stack_samples=116, in_sync_samples=22, away_in="checkpoint",
                last_step=4157, **OF_N2,
            ),
            RankPace(
                3, 15.0, 192, 14.962, 0.038, 0.0, stack_samples=517, in_sync_samples=99, last_step=4157,
                **OF_N2,
            ),
        ],
        "is in a checkpoint",
    ),
    **{
        why: (HEALTHY, [pace(1, 1, compute_seconds=18.0, away_seconds=12.0, away_in=away_in, cause=cause)], why)
        for away_in, cause, why in (
            ("evaluation", None, "is in an evaluation"),
            ("checkpoint", "checkpoint", "is in a checkpoint"),
            ("checkpoint", "gc_pause", "is in a checkpoint (gc_pause)"),
            ("other", None, "is busy outside of its steps"),
            (None, "gc_pause", "is busy outside of its steps (gc_pause)"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", WHY)
def test_why_the_others_wait(case):
    own, others, why = WHY[case]
    assert straggler(own, others).why == why


def test_what_a_slow_rank_costs_and_how_sure_that_is():
    slow = straggler(HEALTHY, [NEAR, *(pace(rank, rank - 4, "n2") for rank in range(4, 8))])
    assert (slow.name, slow.lost) == ("rank 4 on n2", pytest.approx(0.4))
    assert straggler(HEALTHY, [pace(1, 10)]).error == pytest.approx(0.057, abs=0.001)
    assert straggler(HEALTHY, [sampled(1000, 0.1, 1)]).error == pytest.approx(0.050, abs=0.001)
    assert straggler(HEALTHY, [pace(1, 0, stack_samples=0, **WAITING)]).error == 0.0, "clocks measured this"


# -- what other nodes say is some seconds old --------------------------------------------------------------------------


def window(rank: int, end: int, slow_steps: int, *, is_slow: bool = False, node: str | None = None) -> RankPace:
    """100 steps up to ``end``, each of 0.1 s; the last ones took 0.02 s longer because of the slow rank."""
    seconds = 10.0 + 0.02 * slow_steps
    in_sync = 0 if is_slow else round(100 * 0.02 * slow_steps / seconds)
    return pace(rank, in_sync, node, seconds=seconds, steps=100, compute_seconds=seconds, last_step=end)


def history(slow_since: int) -> OwnPaces:
    paces = OwnPaces()
    for end in range(900, 1061, 10):
        paces.add(window(0, end, max(0, end - slow_since)))
    return paces


def test_a_rank_is_not_slow_because_its_pace_is_of_an_earlier_time():
    """Rank 2 has become slow at step 1000. Node n2 was last heard of at step 1010, and rank 0 is at step 1060."""
    peers = [window(2, 1010, 10, is_slow=True, node="n2"), window(3, 1010, 10, node="n2")]
    slow = straggler(window(0, 1060, 60), peers, history(1000).at_the_time_of(peers))
    assert (slow.rank, slow.why) == (2, SLOW)
    assert slow.lost == pytest.approx(0.002, rel=0.1), "as much as then"


def test_paces_of_the_same_time_are_compared_as_they_are():
    calm = history(2000)
    assert calm.at_the_time_of([window(1, 1060, 0), window(2, 1058, 0)]) == ()
    assert [p.last_step for p in calm.at_the_time_of([window(2, 1004, 0), window(3, 1006, 0)])] == [1000, 1010]
    assert calm.at_the_time_of([window(2, 7, 0), window(3, 2000, 0)]) == (), "they count other steps"


# -- machines without enough cores -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_wait", "their_wait", "busy", "lost", "more"),
    [
        pytest.param(0.3, 3.3, 0.97, 0.39 - 0.1, "", id="slow compute on a busy machine"),
        pytest.param(
            0.3, 12.3, 0.4, 0.39, "; its training thread waits for a core, although its machine has idle ones", id="idle cores"
        ),
        pytest.param(12.3, 12.3, 0.97, 0.39, "", id="all ranks lack cores"),
        pytest.param(None, 12.3, 0.97, 0.39, "", id="not known"),
    ],
)  # fmt: skip
def test_a_rank_that_waits_for_a_core_is_a_straggler(own_wait, their_wait, busy, lost, more):
    own, other = (
        pace(0, 40, core_wait_seconds=own_wait),
        pace(1, 1, core_wait_seconds=their_wait, cores_busy_ratio=busy),
    )
    slow = straggler(own, [other])
    assert (slow.lost, slow.why) == (pytest.approx(lost), SLOW + more)
    assert busy > 0.9 or short_of_cores(own, [other]) is None


def test_a_rank_without_a_core_on_a_busy_machine_is_no_straggler():
    own, slow = pace(0, 40, core_wait_seconds=0.3), pace(1, 1, "n2", core_wait_seconds=12.3, cores_busy_ratio=0.97)
    assert straggler(own, [slow]) is None
    short = short_of_cores(own, [slow])
    assert (short.name, short.lost) == ("rank 1 on n2", pytest.approx(0.4))
    assert short.why == "waits for a core, and all cores of its machine are busy"


# -- what the monitor of a rank tells its peers, and what their paces change -------------------------------------------


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


@pytest.mark.parametrize("phase", [CHECKPOINT, None])
def test_a_rank_is_not_stuck_while_it_waits_for_another_s_checkpoint(run, phase):
    """Rank 0 saves for all, and they wait for it in their next collective: longer than anything else would take."""
    peers = (RankPace(0, 10.0, 10, 1.0, 0.0, 9.0, phase=phase),)
    for second in range(1, 20):
        run.request(second, second + 0.01)
        run.tick(second + 0.5)
    run.peers = peers
    for second in range(20, 80):
        run.tick(second + 0.5)
    assert ("unknown" in run.causes) is (phase is None)
    assert phase is None or run.causes == []


def test_what_a_pace_tells(run):
    """That the rank writes a checkpoint, where the time outside of steps went, and how long it had no core."""
    run.samples["host"] = HostSample(0.95, 4, 0, 0)
    for second in range(1, 6):
        run.samples["process"] = ProcessSample(second / 2, 0, 1, runnable_seconds=second / 4)
        run.request(second, second + 0.1)
        run.tick(second + 0.5)
    pace = run.stall_monitor.pace()
    assert (pace.away_in, pace.last_step, pace.phase) == (None, 4, None)
    assert (pace.core_wait_seconds, pace.cores_busy_ratio) == (pytest.approx(1.25), pytest.approx(0.95))
    run.samples["process"] = ProcessSample(5.0, 0, 1)
    run.checkpoint(6.0, 9.0)
    run.tick(10.0)
    pace = run.stall_monitor.pace()
    assert (pace.away_in, pace.away_seconds) == (CHECKPOINT, pytest.approx(3.0, abs=0.1))
    run.accounting.ledger.fold([(11 * SECOND,) * 2 + (CHECKPOINT, CHECKPOINT, *[False] * 4)])
    run.tick(12.0)
    assert run.stall_monitor.pace().phase == CHECKPOINT


def train(run, seconds, first=1):
    """Ten steps a second, which wait for nothing."""
    for second in range(first, first + seconds):
        for tenth in range(10):
            run.request(second + tenth / 10, second + tenth / 10 + 0.001)
        run.tick(second + 0.95)


SLIGHTLY_SLOW = RankPace(1, 10.0, 100, 8.5, 1.5, 0.0)
"""A peer that costs the others less than a stall."""


@pytest.mark.parametrize(
    ("slow", "holds_others_up"),
    [
        pytest.param(RankPace(1, 10.0, 100, 1.0, 9.0, 0.0), False, id="it is a peer"),
        pytest.param(RankPace(1, 10.0, 100, 9.9, 0.0, 0.0, cause="straggler"), True, id="a peer waits for this rank"),
        pytest.param(SLIGHTLY_SLOW, False, id="it costs too little for a stall"),
    ],
)
def test_while_one_rank_is_slow_all_are_looked_at_more_closely(run, slow, holds_others_up):
    alike = RankPace(1, 10.0, 100, 9.9, 0.0, 0.0)
    closely, held_up = [], []
    for first, peer in ((1, alike), (10, slow), (19, alike)):
        run.peers = (peer,)
        train(run, 9, first)
        closely.append(run.stall_monitor.samples_closely)
        held_up.append(run.stall_monitor.holds_others_up)
    assert closely == [False, True, False]
    assert held_up == [False, holds_others_up, False]


def test_after_a_suspension_nobody_is_sampled_closely(run):
    run.peers = (SLIGHTLY_SLOW,)
    train(run, 9)
    assert run.stall_monitor.samples_closely
    run.tick(100.0)
    assert not run.stall_monitor.samples_closely


@pytest.mark.parametrize(("node", "seconds"), [(None, 30), ("n2", 45)])
def test_a_rank_that_waits_for_another_node_is_stuck_later(run, node, seconds):
    """What that node's ranks do is known later: one of them may be in an evaluation."""
    run.peers = (RankPace(1, 10.0, 100, 9.9, 0.0, 0.0, node=node),)
    train(run, 10)
    for second in range(11, 70):
        run.sampler.seen.samples += 10
        run.sampler.seen.in_sync += 10
        run.tick(second + 0.95)
        if run.stall_monitor.stuck is not None:
            break
    assert second - 1 == pytest.approx(seconds, abs=2)  # the hooks, which tell of progress, are not there


@pytest.mark.parametrize(("step", "longest", "latest"), [(0.1, 0, 512), (10, 0, 512), (1, 300, 542)])
def test_a_rank_stuck_in_a_checkpoint_is_noticed_before_nccl_ends_it(run, step, longest, latest):
    """Rank 0 writes a checkpoint and stands still. This rank waits for it in its next collective."""

    def steps(begin: float) -> float:
        for number in range(15):
            run.request(begin + number * step, begin + number * step + 0.01)
            run.tick(begin + (number + 0.5) * step)
        return begin + 15 * step

    def noticed(begin: float, seconds: int) -> int | None:
        for second in range(seconds):
            run.peers = (RankPace(0, 10.0, 10, 1.0, 0.0, 9.0, phase=CHECKPOINT, still_seconds=second),)
            run.tick(begin + second)
            if run.stall_monitor.stuck is not None:
                return second
        run.peers = ()
        return None

    now = steps(1.0)
    if longest:  # a sound checkpoint, which took so long
        assert noticed(now, longest) is None
        now = steps(now + longest)
    assert 480 < noticed(now, 700) <= latest


@pytest.mark.parametrize("loop_left", [False, True])
def test_a_rank_whose_checkpoint_stands_still_is_stuck_itself(run, monkeypatch, loop_left):
    """Also after an epoch: then the loop has been left, which does not count otherwise."""
    for second in range(1, 20):
        run.request(second, second + 0.01)
        run.tick(second + 0.5)
    run.accounting.ledger.fold([(20 * SECOND,) * 2 + (CHECKPOINT, CHECKPOINT, *[False] * 4)])
    monkeypatch.setattr(StepTracker, "loop_left", loop_left)
    monkeypatch.setattr("telemetry.agent.job_hang.stack_of", lambda _: stack)
    stack = stack_of(threading.get_ident())
    hung = []
    for second in range(20, 600):
        run.tick(second + 0.5)
        hung.append(run.stall_monitor.stuck is not None)
    assert hung.index(True) + 19 == pytest.approx(510, abs=3)  # the hooks, which tell of progress, are not there
    assert run.stall_monitor.stuck.category == CHECKPOINT
    assert run.stall_monitor.job_hangs


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_stuck_rank_whose_loop_is_left_is_remembered_for_a_while(run, monkeypatch, goes_on):
    """It is left as by Ctrl-C. A step that ends shows that the rank was not stuck."""
    train(run, 10)
    now = 10.95
    while run.stall_monitor.stuck is None:
        now += 1
        run.tick(now)
    with monkeypatch.context() as left:
        left.setattr(StepTracker, "loop_left", True)
        run.tick(now + 1)
    monitor = run.stall_monitor.stuck_monitor
    assert (run.stall_monitor.stuck, monitor.left.category) == (None, "compute")
    if goes_on:
        run.request(now + 1.5, now + 1.6)
    run.tick(now + 2)
    assert (monitor.left is None) is goes_on
    for second in range(3, 14):
        assert goes_on or second > 10 or monitor.left is not None
        run.tick(now + second)
    assert monitor.left is None


@pytest.mark.parametrize(("busy", "told"), [(0.97, True), (0.5, False)])
def test_a_wait_for_a_rank_without_a_core_is_told_and_no_stall(run, busy, told, monkeypatch):
    mine = dict(
        seconds=10.0, steps=100, compute_seconds=10.0, exposed_wait_seconds=0.0, away_seconds=0.0, stack_samples=100
    )
    peer = RankPace(1, **mine, in_sync_samples=1, core_wait_seconds=6.0, cores_busy_ratio=busy, node="n2")
    own = RankPace(0, **mine, in_sync_samples=60, core_wait_seconds=0.0, cores_busy_ratio=busy)
    window = SimpleNamespace(pace=own, peers=(peer,), earlier_paces=(), steps=0)
    monkeypatch.setattr(StallDetector, "evidence", window)
    run.tick(1)
    run.tick(2)
    said = [note.message for note in run.errors.take_notes()]
    expected = (
        "no straggler is named: rank 1 on n2 waits for a core, and all cores of its machine are busy; run less on that "
        "machine, or give it more cores"
    )
    assert said == ([expected] if told else [])


# -- why the whole job hangs -------------------------------------------------------------------------------------------

WAITS = HangState(
    0, "n1", "compute", stuck=True, seconds=30.0, waits=True, where="train.py:4", collective=Collective("all_reduce", 5)
)
FETCHES = HangState(1, "n1", "data_wait", stuck=True, seconds=31.0, where="data.py:88", call="read")


class Rank:
    """A rank of a job with its part in the hang; all of them share one board and this process."""

    node_hangs, recorder_is_off = True, True

    def __init__(self, board: Board, state: HangState, world_size: int = 2, *, leads: bool = True) -> None:
        self.state, self.steps = state, 7
        board.leads = leads
        self.job = SimpleNamespace(local=(), elsewhere=(), stuck_elsewhere=False)
        self.identity = Identity("run", state.rank, 0, world_size, "n1", os.getpid(), "plain")
        self.lines: list[dict] = []
        self.seconds, self.asked = 100.0, 0
        wall = WallClock(wall_ns=lambda: self.now_ns() + 1_767_225_600 * NS, mono_ns=self.now_ns)

        def emit(event: str, fields: dict) -> None:
            self.lines.append({"event": event} | fields)

        log = SimpleNamespace(emit=emit, write=lambda line: emit("hang", fields_of(line)))
        self.part = JobHang(self, log, wall, board, self.job, mono_ns=self.now_ns)

    def now_ns(self) -> int:
        return int(self.seconds * NS)

    def read(self) -> HangState:
        self.asked += 1
        return self.state

    def tick(self, *, hangs: bool = True, steps: int = 7, seconds: float = 1.0) -> list[dict]:
        self.seconds += seconds
        self.node_hangs, self.steps = hangs, steps
        self.part.tick()
        return self.lines


@pytest.fixture
def board(tmp_path) -> Board:
    return Board("r", "x", "n1", root=tmp_path / "boards")


@pytest.mark.parametrize("size", [10, 1 << 16, 200_001])
def test_a_file_of_the_board_is_read_whole(board, size):
    content = os.urandom(size)
    board.put("large", content)
    assert board.get("large") == content


def test_on_a_calm_run_nothing_is_read_and_nothing_written(board):
    rank = Rank(board, WAITS)
    for _ in range(50):
        assert rank.tick(hangs=False) == []
    assert rank.asked == 0
    assert (rank.part.state, rank.part.verdict, rank.job.local) == (None, None, ())


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
    assert (rank.part.verdict.kind, rank.part.verdict.suspect.rank) == ("fetch", 1)


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
    assert rank.part.state.where == "data.py:88"
    rank.tick(hangs=False)
    assert rank.part.state is None


def test_a_hang_is_over_once_steps_end_again(board):
    rank = Rank(board, WAITS, world_size=1)
    rank.tick()
    rank.tick(hangs=False)
    assert [line.get("over") for line in rank.tick(hangs=False)] == [None]
    assert rank.part.verdict is None
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
        rank = Rank(own, WAITS)
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
        rank = Rank(own, WAITS)
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
@pytest.mark.parametrize("name", ["rank-9.bin", "gone-9"])
def test_a_file_of_the_board_that_makes_no_sense_is_passed_over(board, name, content):
    rank = Rank(board, WAITS, world_size=1)
    (board.path / name).write_bytes(content)
    os.mkfifo(board.path / f"{name.split('-')[0]}-8")
    (board.path / f"{name.split('-')[0]}-7").symlink_to("/dev/zero")
    rank.tick()
    assert [state.rank for state in rank.job.local] == [0]
