"""Across ranks: which one the others wait for, what paces change, and why the whole job hangs."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from telemetry.agent.job_hang import JobHang
from telemetry.diagnosis.hangs import Collective, HangState
from telemetry.diagnosis.stalls import StallDetector
from telemetry.diagnosis.stragglers import OwnPaces, short_of_cores, straggler
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.node.board import Board
from telemetry.node.peers import candidates, of_node
from telemetry.records import CHECKPOINT, HostSample, ProcessSample, RankPace
from telemetry.sources.lines import ThreadSamples
from telemetry.util.clock import NS, WallClock
from telemetry.util.processes import Identity
from telemetry.util.stacks import stack_of
from tests.faults.processes import Child, write
from tests.monitored_rank import SECOND, Run


def pace(rank: int, in_sync: int, node: str | None = None, ranks: int = 0) -> RankPace:
    """30 steps of a second; ``in_sync`` of 100 samples waited for other ranks."""
    return RankPace(rank, 30.0, 30, 30.0, 0.0, 0.0, samples=100, in_sync_samples=in_sync, node=node, node_ranks=ranks)


def test_all_ranks_of_a_node_are_slow():
    slow = straggler(pace(0, 40), [pace(1, 41), *(pace(rank, rank - 4, "n2", 4) for rank in range(4, 8))])
    assert slow.name == "rank 4 on n2"
    assert slow.lost == pytest.approx(0.4)
    assert slow.why == "takes longer to compute a step; all 4 ranks of that node are waited for, so the node is slow"


@pytest.mark.parametrize(
    "others",
    [
        [pace(4, 1, "n2", 4), pace(5, 39, "n2", 4), pace(6, 1, "n2", 4), pace(7, 1, "n2", 4)],
        [pace(4, 1, "n2", 4), pace(5, 1, "n2", 4)],
        [pace(4, 1, "n2", 1)],
        [pace(4, 1)],
    ],
    ids=["one rank is fast", "not all are known", "a node of one rank", "a rank of this node"],
)
def test_a_slow_rank_makes_no_slow_node(others):
    slow = straggler(pace(0, 40), [pace(1, 41), *others])
    assert slow.rank == 4
    assert slow.why == "takes longer to compute a step"


def test_chance_in_the_samples_is_no_slow_compute():
    """It waits for data 0.1 s of each step. By the samples it may cost 0.22 s; with 30 of them, that may be chance."""
    own = replace(pace(0, 12), samples=30)
    waiting = replace(pace(1, 5), samples=30, compute_seconds=27.0, exposed_wait_seconds=3.0)
    assert straggler(own, [waiting]).why == "waits for data"
    certain = replace(waiting, samples=3000, in_sync_samples=500)
    slow = straggler(replace(own, samples=3000, in_sync_samples=1200), [certain])
    assert slow.why == "takes longer to compute a step"


def test_windows_of_other_moments_make_an_evaluation_no_slow_compute():
    """Rank 3 evaluates. The newest pace of its node is 21 steps old: the window of rank 1 has more of the evaluations.

    The figures are those of a real job, of which rank 1 named slow compute, and ranks 0 and 2 the evaluation.
    """
    own = RankPace(1, 10.0018, 126, 9.9838, 0.0180, 0.0, samples=108, in_sync_samples=42, last_step=2392)
    away = dict(away_seconds=1.6445, away_in="evaluation", node="n2", node_ranks=2, last_step=2371)
    slow = RankPace(3, 12.0001, 172, 10.3298, 0.0257, samples=354, in_sync_samples=43, **away)
    assert straggler(own, [slow]).why == "is in an evaluation"


def test_a_rank_that_waits_is_not_slow_because_its_window_began_earlier():
    """Rank 2 writes checkpoints. Rank 3 waits for it, too, but half of its window of 15 s was before them."""
    own = RankPace(1, 10.003, 110, 9.984, 0.019, 0.0, samples=181, in_sync_samples=65, last_step=4157)
    of_n2 = dict(node="n2", node_ranks=2, last_step=4157)
    away = dict(away_seconds=2.854, away_in="checkpoint")
    slow = RankPace(2, 10.0, 110, 7.127, 0.019, samples=116, in_sync_samples=22, **away, **of_n2)
    peer = RankPace(3, 15.0, 192, 14.962, 0.038, 0.0, samples=517, in_sync_samples=99, node_fastest=True, **of_n2)
    assert straggler(own, [slow, peer]).why == "is in a checkpoint"


@pytest.mark.parametrize(("samples", "is_slow"), [(100, False), (3000, True)])
def test_a_node_is_not_slow_by_chance_in_the_samples(samples, is_slow):
    """Rank 3 seems to cost 0.13 s of each step, more than half of the 0.2 s that rank 2 costs."""
    own = replace(pace(0, round(0.4 * samples)), samples=samples)
    peer = replace(pace(3, round(0.27 * samples), "n2", 2), samples=samples)
    waits = replace(pace(2, 0, "n2", 2), samples=0, compute_seconds=24.0, exposed_wait_seconds=6.0)
    assert straggler(own, [waits, peer]).why.endswith("so the node is slow") == is_slow


def test_the_error_of_the_samples_is_known():
    alike = replace(pace(1, 10), samples=1000, in_sync_samples=100)
    assert straggler(pace(0, 40), [pace(1, 10)]).error == pytest.approx(0.057, abs=0.001)
    assert straggler(pace(0, 40), [alike]).error == pytest.approx(0.050, abs=0.001)
    waiting = replace(pace(1, 1), compute_seconds=18.0, exposed_wait_seconds=12.0, samples=0, in_sync_samples=0)
    assert straggler(pace(0, 40), [waiting]).error == 0.0, "clocks measured this"


# -- nodes of many ranks ------------------------------------------------------------------------------------------


def passed_on(*slow_ranks: int, ranks: int = 16) -> list[RankPace]:
    """What another node gets of a node of 16 ranks, through two levels of the tree, and of one that is healthy."""
    slow = {rank: replace(pace(rank, 1 + rank % 16 // 4), compute_seconds=29.0 + rank / 64) for rank in slow_ranks}
    n2 = of_node("n2", [slow.get(rank, pace(rank, 40)) for rank in range(16, 16 + ranks)])
    n3 = of_node("n3", [pace(rank, 40) for rank in range(32, 32 + ranks)])
    return list(candidates([*candidates(n2), *candidates(n3)]))


@pytest.mark.parametrize("ranks", [2, 9, 16])
def test_a_slow_node_of_any_number_of_ranks_is_slow(ranks):
    slow = straggler(pace(0, 40), [pace(1, 41), *passed_on(*range(16, 16 + ranks), ranks=ranks)])
    assert slow.node == "n2"
    assert slow.why.endswith(f"; all {ranks} ranks of that node are waited for, so the node is slow")


@pytest.mark.parametrize("fast", [16, 25, 31])
def test_one_fast_rank_of_sixteen_shows_that_the_node_is_not_slow(fast):
    slow = straggler(pace(0, 40), [pace(1, 41), *passed_on(*(r for r in range(16, 32) if r != fast))])
    assert slow.node == "n2"
    assert slow.why == "takes longer to compute a step"


def test_a_node_whose_fastest_rank_has_another_pace_is_not_slow():
    ranks = of_node("n2", [pace(rank, 1) for rank in range(16, 32)])
    changed = [replace(p, steps=3 * p.steps) if p.node_fastest else p for p in ranks]
    assert straggler(pace(0, 40), changed).why == "takes longer to compute a step"


def test_a_node_of_which_one_fastest_rank_has_another_pace_is_not_slow():
    """Rank 3 is slow, but has the longest mean compute, too: the pace of rank 2, which waits, is of an earlier step."""
    waits, slow = replace(pace(2, 44), steps=33), pace(3, 1)
    of_n2 = of_node("n2", [waits, slow])
    assert [peer.node_fastest for peer in of_n2] == [True, True]
    assert straggler(pace(0, 53), of_n2).why == "takes longer to compute a step"
    further = [replace(peer, steps=40) if peer.rank == 2 else peer for peer in of_n2]
    assert straggler(pace(0, 53), further).why == "takes longer to compute a step"


def test_a_node_whose_loaders_are_slow_is_slow():
    waits = dict(compute_seconds=18.0, exposed_wait_seconds=12.0, in_sync_samples=1)
    ranks = of_node("n2", [replace(pace(rank, 1), **waits) for rank in range(16, 32)])
    slow = straggler(pace(0, 40), candidates(ranks))
    assert slow.why == "waits for data; all 16 ranks of that node are waited for, so the node is slow"


# -- what other nodes say is some seconds old ---------------------------------------------------------------------


def window(rank: int, end: int, slow_steps: int, *, is_slow: bool = False, node: str | None = None) -> RankPace:
    """100 steps up to ``end``, each of 0.1 s; the last ones took 0.02 s longer because of the slow rank."""
    seconds = 10.0 + 0.02 * slow_steps
    in_sync = 0 if is_slow else round(100 * 0.02 * slow_steps / seconds)
    return replace(pace(rank, in_sync, node, 2), seconds=seconds, steps=100, compute_seconds=seconds, last_step=end)


def test_a_rank_is_not_slow_because_its_pace_is_of_an_earlier_time():
    """Rank 2 has become slow at step 1000. Node n2 was last heard of at step 1010, and rank 0 is at step 1060."""
    history = OwnPaces()
    for end in range(900, 1061, 10):
        history.add(window(0, end, max(0, end - 1000)), end / 10)
    peers = of_node("n2", [window(2, 1010, 10, is_slow=True), window(3, 1010, 10)])
    slow = straggler(window(0, 1060, 60), peers, history.at_the_time_of(peers))
    assert (slow.rank, slow.why) == (2, "takes longer to compute a step")
    assert slow.lost == pytest.approx(0.002, rel=0.1), "as much as then"


def test_paces_of_the_same_time_are_compared_as_they_are():
    history = OwnPaces()
    for end in range(900, 1061, 10):
        history.add(window(0, end, 0), end / 10)
    assert history.at_the_time_of([window(1, 1060, 0), window(2, 1058, 0)]) == ()
    assert [p.last_step for p in history.at_the_time_of([window(2, 1004, 0), window(3, 1006, 0)])] == [1000, 1010]
    assert history.at_the_time_of([window(2, 7, 0), window(3, 2000, 0)]) == (), "they count other steps"


# -- what a rank does outside of its steps ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("away_in", "cause", "why"),
    [
        ("evaluation", None, "is in an evaluation"),
        ("checkpoint", "checkpoint", "is in a checkpoint"),
        ("checkpoint", "gc_pause", "is in a checkpoint (gc_pause)"),
        ("other", None, "is busy outside of its steps"),
        (None, "gc_pause", "is busy outside of its steps (gc_pause)"),
    ],
)
def test_what_a_rank_does_while_the_others_wait(away_in, cause, why):
    away = replace(pace(1, 1), compute_seconds=18.0, away_seconds=12.0, away_in=away_in, cause=cause)
    assert straggler(pace(0, 40), [away]).why == why


# -- machines without enough cores --------------------------------------------------------------------------------


def without_core(seconds: float, busy: float | None, node: str | None = None) -> RankPace:
    return replace(pace(1, 1, node), core_wait_seconds=seconds, cores_busy_ratio=busy)


def measured(wait: float = 0.3) -> RankPace:
    return replace(pace(0, 40), core_wait_seconds=wait, cores_busy_ratio=0.97)


def test_a_rank_without_a_core_on_a_busy_machine_is_no_straggler():
    slow = without_core(12.3, 0.97, "n2")
    assert straggler(measured(), [slow]) is None
    short = short_of_cores(measured(), [slow])
    assert (short.name, short.lost) == ("rank 1 on n2", pytest.approx(0.4))
    assert short.why == "waits for a core, and all cores of its machine are busy"


def test_slow_compute_on_a_busy_machine_is_a_straggler():
    slow = straggler(measured(), [without_core(3.3, 0.97)])
    assert slow.why == "takes longer to compute a step"
    assert slow.lost == pytest.approx(0.39 - 0.1)


def test_a_rank_without_a_core_on_an_idle_machine_is_a_straggler():
    slow = straggler(measured(), [without_core(12.3, 0.4)])
    assert slow.lost == pytest.approx(0.39)
    assert slow.why == (
        "takes longer to compute a step; its training thread waits for a core, although its machine has idle ones"
    )
    assert short_of_cores(measured(), [without_core(12.3, 0.4)]) is None


@pytest.mark.parametrize("own_wait", [12.3, None])
def test_a_wait_for_cores_that_all_ranks_have_changes_nothing(own_wait):
    slow = straggler(replace(measured(), core_wait_seconds=own_wait), [without_core(12.3, 0.97)])
    assert (slow.lost, slow.why) == (pytest.approx(0.39), "takes longer to compute a step")


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


def test_a_rank_tells_its_peers_that_it_writes_a_checkpoint(run):
    run.request(1.0, 1.1)
    run.tick(2.0)
    assert run.stall_monitor.pace().phase is None
    run.accounting.ledger.fold([(3 * SECOND,) * 2 + (CHECKPOINT, CHECKPOINT, *[False] * 4)])
    run.tick(4.0)
    assert run.stall_monitor.pace().phase == CHECKPOINT


def test_a_pace_tells_where_the_time_outside_of_steps_went(run):
    for second in range(1, 6):
        run.request(second, second + 0.1)
        run.tick(second + 0.5)
    assert (run.stall_monitor.pace().away_in, run.stall_monitor.pace().last_step) == (None, 4)
    run.checkpoint(6.0, 9.0)
    run.tick(10.0)
    assert run.stall_monitor.pace().away_in == CHECKPOINT
    assert run.stall_monitor.pace().away_seconds == pytest.approx(3.0, abs=0.1)


def test_a_pace_tells_how_long_the_training_thread_had_no_core(run):
    run.samples["host"] = HostSample(0.95, 4, 0, 0)
    for second in range(1, 6):
        run.samples["process"] = ProcessSample(second / 2, 0, 1, runnable_seconds=second / 4)
        run.request(second, second + 0.1)
        run.tick(second + 0.5)
    pace = run.stall_monitor.pace()
    assert pace.core_wait_seconds == pytest.approx(1.25)
    assert pace.cores_busy_ratio == pytest.approx(0.95)


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
    apart, held_up = [], []
    for first, peer in ((1, alike), (10, slow), (19, alike)):
        run.peers = (peer,)
        for second in range(first, first + 9):
            for tenth in range(10):
                run.request(second + tenth / 10, second + tenth / 10 + 0.001)
            run.tick(second + 0.95)
        apart.append(run.stall_monitor.sample_seconds)
        held_up.append(run.stall_monitor.holds_others_up)
    usual, close, again = apart
    assert close < usual == again
    assert held_up == [False, holds_others_up, False]


def test_after_a_suspension_nobody_is_sampled_closely(run):
    run.peers = (SLIGHTLY_SLOW,)
    for second in range(1, 10):
        for tenth in range(10):
            run.request(second + tenth / 10, second + tenth / 10 + 0.001)
        run.tick(second + 0.95)
    close = run.stall_monitor.sample_seconds
    run.tick(100.0)
    assert run.stall_monitor.sample_seconds > close


@pytest.mark.parametrize(("node", "seconds"), [(None, 30), ("n2", 45)])
def test_a_rank_that_waits_for_another_node_is_stuck_later(run, monkeypatch, node, seconds):
    """What that node's ranks do is known later: one of them may be in an evaluation."""
    run.peers = (RankPace(1, 10.0, 100, 9.9, 0.0, 0.0, node=node),)
    for second in range(1, 11):
        for tenth in range(10):
            run.request(second + tenth / 10, second + tenth / 10 + 0.001)
        run.tick(second + 0.95)
    monkeypatch.setattr(run.thread_sampler, "take", lambda: ThreadSamples(10, 10, None))
    for second in range(11, 70):
        run.tick(second + 0.95)
        if run.stall_monitor.stuck is not None:
            break
    assert second - 1 == pytest.approx(seconds, abs=2)  # the hooks, which tell of progress, are not there


@pytest.mark.parametrize(("step", "longest", "latest"), [(0.1, 0, 512), (10, 0, 512), (1, 300, 542)])
def test_a_rank_stuck_in_a_checkpoint_is_noticed_before_nccl_ends_it(run, step, longest, latest):
    """Rank 0 writes a checkpoint and stands still. This rank waits for it in its next collective."""
    now = 1.0

    def train() -> float:
        begin = run_until[0]
        for number in range(15):
            run.request(begin + number * step, begin + number * step + 0.01)
            run.tick(begin + (number + 0.5) * step)
        run_until[0] = begin + 15 * step
        return run_until[0]

    run_until = [now]
    now = train()
    if longest:  # a sound checkpoint, which took so long
        for second in range(longest):
            run.peers = (RankPace(0, 10.0, 10, 1.0, 0.0, 9.0, phase=CHECKPOINT, still_seconds=second),)
            run.tick(now + second)
        run_until[0] = now + longest
        run.peers = ()
        now = train()
    noticed = None
    for second in range(700):
        run.peers = (RankPace(0, 10.0, 10, 1.0, 0.0, 9.0, phase=CHECKPOINT, still_seconds=second),)
        run.tick(now + second)
        if run.stall_monitor.stuck is not None:
            noticed = second
            break
    assert noticed is not None
    assert 480 < noticed <= latest


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


def stuck_until_the_loop_is_left(run, monkeypatch) -> float:
    """A rank is stuck, and then its loop is left, as by Ctrl-C. Returns the time of that tick."""
    for second in range(1, 11):
        for tenth in range(10):
            run.request(second + tenth / 10, second + tenth / 10 + 0.001)
        run.tick(second + 0.95)
    while run.stall_monitor.stuck is None:
        second += 1
        run.tick(second + 0.95)
    monkeypatch.setattr(StepTracker, "loop_left", True)
    run.tick(second + 1.95)
    monkeypatch.undo()
    return second + 1.95


def test_a_stuck_rank_whose_loop_is_left_is_remembered_for_a_while(run, monkeypatch):
    left_at = stuck_until_the_loop_is_left(run, monkeypatch)
    monitor = run.stall_monitor.stuck_monitor
    assert (run.stall_monitor.stuck, monitor.left.category) == (None, "compute")
    for second in range(1, 9):
        run.tick(left_at + second)
    assert monitor.left is not None
    for second in range(9, 13):
        run.tick(left_at + second)
    assert monitor.left is None


def test_a_step_that_ends_forgets_that_the_rank_was_stuck_when_its_loop_was_left(run, monkeypatch):
    left_at = stuck_until_the_loop_is_left(run, monkeypatch)
    assert run.stall_monitor.stuck_monitor.left is not None
    run.request(left_at + 0.5, left_at + 0.6)
    run.tick(left_at + 1)
    assert run.stall_monitor.stuck_monitor.left is None


@pytest.mark.parametrize(("busy", "told"), [(0.97, True), (0.5, False)])
def test_a_wait_for_a_rank_without_a_core_is_told_and_no_stall(run, busy, told, monkeypatch):
    mine = dict(seconds=10.0, steps=100, compute_seconds=10.0, exposed_wait_seconds=0.0, away_seconds=0.0, samples=100)
    peer = RankPace(1, **mine, in_sync_samples=1, core_wait_seconds=6.0, cores_busy_ratio=busy, node="n2")
    own = RankPace(0, **mine, in_sync_samples=60, core_wait_seconds=0.0, cores_busy_ratio=busy)
    window = SimpleNamespace(pace=own, peers=(peer,), earlier_paces=())
    monkeypatch.setattr(StallDetector, "window", window)
    run.tick(1)
    run.tick(2)
    said = [line["message"] for line in run.errors.take_lines()]
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
        log = SimpleNamespace(emit=lambda event, fields: self.lines.append({"event": event} | fields))
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
