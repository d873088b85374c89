"""From the accounting to stalls: which part of a wait counts, with the clock of the host or of the GPU."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from telemetry.agent.overhead import Overhead
from telemetry.agent.stall_monitor import StallMonitor
from telemetry.agent.stall_report import StallCounts
from telemetry.agent.totals_builder import TotalsBuilder
from telemetry.agent.training_thread import TrainingThread
from telemetry.attach.ring import Ring
from telemetry.attach.step_tracker import StepTracker
from telemetry.collect.thread_sampler import ThreadSampler, ThreadSamples
from telemetry.config import Config
from telemetry.core.errors import ErrorLog
from telemetry.core.labels import CHECKPOINT, COMPUTE, DATA_WAIT, OTHER
from telemetry.core.samples import HostSample, ProcessSample
from telemetry.core.tick import RankPace
from telemetry.core.worker_records import Deliveries
from telemetry.diagnose.ledger import Ledger
from telemetry.diagnose.stall_detector import StallDetector
from telemetry.diagnose.step_stats import StepStats
from tests.running_agent import wait_for
from tests.slice_cases import IDLE

SECOND = 1_000_000_000
FETCHING = dict(workers=1, training_workers=1, busy_ratio=1.0, blocked_ratio=1.0)


class FakeAccounting(SimpleNamespace):
    """As much of `Accounting` as is read."""

    dropped_steps = unseen_steps = optimizer_steps = updated_ns = 0
    samples = SimpleNamespace(samples=None)

    @property
    def steps_total(self) -> int:
        return self.stats.steps + self.ledger.dropped_steps

    @property
    def exposed_seconds(self) -> float:
        return self.exposed.seconds


class Run:
    """A rank whose training thread does as told, and its monitor, a tick a second. Stamps: seconds from the start."""

    def __init__(self, tracker: StepTracker) -> None:
        config = Config.load({"stall_window_seconds": 10})
        self.lines: list[tuple[str, dict]] = []
        self.errors = ErrorLog()
        self.samples: dict[str, object] = {}
        self.exposed: float | None = None  # as the host sees it
        self.peers: tuple[RankPace, ...] = ()
        self.accounting = FakeAccounting(
            ledger=Ledger(0),
            stats=StepStats(config.step_buckets),
            exposed=SimpleNamespace(seconds=0.0),
            take_source=lambda: SimpleNamespace(kind="workers", settings={}),
        )
        sampler = SimpleNamespace(newest=self.samples.get, cpu_seconds=0.0)
        thread = TrainingThread(tracker)
        self.thread_sampler = ThreadSampler(thread.ident, thread.is_computing, thread.is_running)
        self.builder = TotalsBuilder(
            self.accounting, tracker, sampler, self.thread_sampler, Overhead(tracker, sampler), peers=lambda: self.peers
        )
        self.stall_monitor = StallMonitor(
            config,
            tracker,
            StallCounts(),
            errors=self.errors,
            emit=lambda event, fields: self.lines.append((event, fields)),
            timestamp=lambda: "now",
        )

    def request(self, start: float, end: float, *, opens: bool = True, batch: bool = True) -> None:
        after = COMPUTE if batch else OTHER
        span = (int(start * SECOND), int(end * SECOND), DATA_WAIT, after, opens, opens, batch, False)
        self.accounting.ledger.fold([span])
        self.accounting.stats.add(self.accounting.ledger.take_steps())

    def checkpoint(self, start: float, end: float) -> None:
        for stamp, category in ((start, CHECKPOINT), (end, COMPUTE)):
            self.accounting.ledger.fold([(int(stamp * SECOND),) * 2 + (category, category, *[False] * 4)])

    def tick(self, now: float, *, waiting_since: float = 0.0, **seen: float) -> None:
        """``seen``: of the workers."""
        self.accounting.ledger.advance(int(now * SECOND), int(waiting_since * SECOND))
        waited = self.accounting.ledger.ns[DATA_WAIT] / SECOND
        self.accounting.exposed.seconds = waited if self.exposed is None else self.exposed
        self.samples["workers"] = dataclasses.replace(IDLE, **FETCHING | seen)
        self.stall_monitor.tick(self.builder.tick(), self.accounting)

    def wait_for_the_first_batch(self) -> None:
        self.request(0.1, 0.2, opens=False, batch=False)  # the workers are started
        for second in range(1, 9):
            self.tick(second, waiting_since=0.5, fetching_seconds=second - 0.5)
        self.request(0.5, 8.5)

    @property
    def causes(self) -> list[str]:
        return [fields["cause"] for event, fields in self.lines if event == "stall_open"]


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


def test_the_first_batch_is_no_stall_however_long_it_is_waited_for(run):
    run.wait_for_the_first_batch()
    for second in range(9, 25):
        for tenth in range(10):
            run.request(second - 0.4 + tenth / 10, second - 0.39 + tenth / 10)
        run.tick(second + 0.55)
    assert run.causes == []


def test_the_waits_for_batches_are_taken_apart_from_tick_to_tick(run):
    run.request(0.5, 0.6)
    for second in range(1, 12):
        run.request(second - 0.3, second + 0.5)
        taken_apart = dict(late=0.1, moved=0.5, moved_from_busy=0.4, moved_from_long=0.3, head_of_line=0.05)
        deliveries = Deliveries(
            batches=second,
            fetch_wait_seconds=taken_apart["late"] * second,
            transfer_wait_seconds=taken_apart["moved"] * second,
            from_busy=second,
            transfer_wait_busy_worker_seconds=taken_apart["moved_from_busy"] * second,
            transfer_wait_long_fetch_seconds=taken_apart["moved_from_long"] * second,
            head_of_line_wait_seconds=taken_apart["head_of_line"] * second,
        )
        run.tick(second + 0.6, deliveries=deliveries)
    ((_, stall),) = [line for line in run.lines if line[0] == "stall_open"]
    evidence = stall["evidence"]
    ticks = round(evidence["late_seconds"] / 0.1)
    assert ticks >= 5
    for name in ("late", "moved", "moved_from_long", "head_of_line"):
        assert evidence[f"{name}_seconds"] == pytest.approx(taken_apart[name] * ticks)
    assert evidence["moving_from_busy_seconds"] == pytest.approx(taken_apart["moved_from_busy"])


def test_a_later_batch_that_is_waited_for_as_long_is_one(run):
    run.request(0.5, 0.6)
    for second in range(1, 12):
        run.tick(second, waiting_since=0.7, fetching_seconds=second - 0.7)
    assert run.causes == ["worker_stuck"]


@pytest.mark.parametrize("felt", [pytest.param(8.0, id="all of it"), pytest.param(1.0, id="little of it")])
def test_the_first_wait_is_none_either_where_the_gpu_tells_of_it_later(run, felt):
    run.exposed = 0.0
    run.wait_for_the_first_batch()
    run.request(9.0, 9.01)
    run.tick(9.5)
    run.exposed = felt  # its events have been read
    for second in range(10, 20):
        run.request(second, second + 0.01)
        run.tick(second + 0.5)
    assert run.causes == []
    for second in range(20, 32):  # and what is exposed from now on is no first wait
        for half in (0.0, 0.5):
            run.request(second + half, second + half + 0.3)
        run.exposed += 0.6
        run.tick(second + 0.99)
    assert run.causes == ["workers_io_bound"]


@pytest.mark.parametrize("cpu", [0.0, 20.0], ids=["stopped", "running"])
def test_time_in_which_the_process_was_stopped_is_no_wait(run, cpu):
    """Ticks that come four seconds late: nothing ran meanwhile, or a thread did that kept the interpreter."""
    used = 0.0
    for second in range(1, 40, 4):
        for tenth in range(8):
            run.request(second + tenth / 10, second + 0.05 + tenth / 10)
        run.request(second + 0.8, second + 4.0)
        used += cpu
        run.samples["process"] = ProcessSample(used, 0, 1)
        run.tick(second + 3.99)
    assert run.causes == (["workers_io_bound"] if cpu else [])


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


def test_a_clock_is_low_by_what_it_is_in_this_run(run):
    """At its power cap a GPU never has its highest clock: heat costs what it takes from there."""
    gpu = dict(utilization_ratio=1.0, sm_clock_max_hertz=2.0e9)
    for second in range(1, 28):
        held_back = second > 12
        run.samples["nvml"] = SimpleNamespace(
            **gpu,
            energy_joules=None,
            sm_clock_hertz=0.7e9 if held_back else 1.4e9,
            throttled=("hw_thermal",) if held_back else ("sw_power_cap",),
        )
        for tenth in range(10):
            run.request(second + tenth / 10, second + 0.001 + tenth / 10)
        run.tick(second + 0.95)
    (stall,) = (fields for event, fields in run.lines if event == "stall_open")
    assert stall["cause"] == "gpu_throttled"
    slowed = run.stall_monitor.stall_fields()["evidence"]
    assert slowed["gpu_slowed_seconds"] == pytest.approx(0.5 * slowed["compute_seconds"], rel=0.05)


def test_a_rank_tells_its_peers_that_it_writes_a_checkpoint(run):
    run.request(1.0, 1.1)
    run.tick(2.0)
    assert run.stall_monitor.pace().phase is None
    run.accounting.ledger.fold([(3 * SECOND,) * 2 + (CHECKPOINT, CHECKPOINT, *[False] * 4)])
    run.tick(4.0)
    assert run.stall_monitor.pace().phase == CHECKPOINT


def test_a_pace_tells_where_the_time_outside_of_steps_went_and_which_step_it_ended_at(run):
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


def test_how_many_batches_a_step_takes_is_in_the_evidence(run):
    for second in range(1, 15):
        for tenth in range(5):
            begin = second + tenth / 5
            run.request(begin, begin + 0.1)
            run.request(begin + 0.1, begin + 0.15, opens=False)
        run.tick(second + 0.99, fetches_total=10 * second)
    opened = next(fields for event, fields in run.lines if event == "stall_open")
    assert opened["evidence"]["batches_per_step"] == pytest.approx(2.0, rel=0.1)


def test_fetches_of_a_tick_without_busy_time_move_to_no_other_tick(run):
    """As after the workers of an epoch have been replaced."""
    for second in range(1, 15):
        for tenth in range(5):
            run.request(second + tenth / 5, second + tenth / 5 + 0.1)
        run.tick(second + 0.99, fetches_total=10 * second, busy_ratio=None if second % 2 else 1.0)
    opened = next(fields for event, fields in run.lines if event == "stall_open")
    assert opened["evidence"]["fetch_seconds"] == pytest.approx(0.1, rel=0.05)


def test_a_rank_whose_backward_pass_is_on_a_core_is_seen_at_work(observed):
    """The agent's own samples, as its thread takes them, of a real pass."""
    thread_sampler = Run(observed.tracker).thread_sampler
    at_work, in_sync, over = [], [], threading.Event()

    def look() -> bool:
        thread_sampler.sample()
        seen = thread_sampler.take()
        (in_sync if seen.in_sync else at_work if seen.where == place else []).append(seen)
        return len(at_work) + len(in_sync) >= 30

    def watch() -> None:
        try:
            thread_sampler._computing = lambda: True
            wait_for(look)
        finally:
            over.set()

    def backward(loss: torch.Tensor) -> None:
        """On this line and no other."""
        loss.backward()

    place = f"backward (test_stall_monitor.py:{backward.__code__.co_firstlineno + 2})"
    watching = threading.Thread(target=watch)
    watching.start()
    while not over.is_set():
        a = torch.rand(700, 700, requires_grad=True)
        backward((a @ a @ a).sum())
    watching.join()
    assert len(at_work) > len(in_sync)


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


@pytest.mark.parametrize(
    ("renaming", "predicted"), [pytest.param(0.2, 1 / 0.526, id="renamed"), pytest.param(0.0, 1 / 0.733, id="written")]
)
def test_what_steps_with_a_checkpoint_take_besides_is_won_with_it(run, renaming, predicted):
    """Ten steps a second, and a checkpoint of 0.3 s after the tenth; then a rename that frees the last one's file."""
    step = (0.7 - renaming) / 10
    for second in range(1, 14):
        for number in range(10):
            run.request(second + number * step, second + number * step)
            if not number:  # the last step has ended
                run.tick(second + step / 2)
        run.checkpoint(second + 0.7 - renaming, second + 1 - renaming)
    ((event, stall),) = run.lines
    advice, _ = stall["advice"]
    assert (event, stall["cause"]) == ("stall_open", "checkpoint")
    assert advice["predicted_speedup"] == pytest.approx(predicted, rel=0.05)
    assert advice["action"] == f"write a checkpoint every {190 if renaming else 90} steps, not every 10"
    assert ("more than other steps" in advice["because"]) is (renaming > 0)


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
