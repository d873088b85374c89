"""What a rank's monitor tells its peers, and what their paces change: who is slow, who is stuck, who only waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from telemetry.diagnosis.stalls import StallDetector
from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.records import CHECKPOINT, HostSample, ProcessSample, RankPace
from telemetry.sources.lines import ThreadSamples
from telemetry.util.stacks import stack_of
from tests.monitored_rank import SECOND, Run


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
        if run.stall_monitor.hang is not None:
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
        if run.stall_monitor.hang is not None:
            noticed = second
            break
    assert noticed is not None
    assert 480 < noticed <= latest


@pytest.mark.parametrize("loop_left", [False, True])
def test_a_checkpoint_that_stands_still_is_a_hang_of_its_own_rank(run, monkeypatch, loop_left):
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
        hung.append(run.stall_monitor.hang is not None)
    assert hung.index(True) + 19 == pytest.approx(510, abs=3)  # the hooks, which tell of progress, are not there
    assert run.stall_monitor.hang.category == CHECKPOINT
    assert run.stall_monitor.job_hangs


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
