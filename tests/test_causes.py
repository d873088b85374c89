"""What each cause has cost in a window: workers, epochs, the sampler and garbage."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.utils.data import DataLoader

import telemetry
from telemetry.diagnosis.causes import advise
from telemetry.diagnosis.costs import costs, crowded_out
from telemetry.diagnosis.evidence import RecurringCostsWatch, evidence_field
from telemetry.model.totals import Tick
from tests.data_sets import Numbers
from tests.slice_cases import CASES, STARVED, a_slice, slices, with_workers
from tests.slices import Detector, evidence_over, next_tick

# -- what counts for a cause -------------------------------------------------------------------------------------------

LOADER = "loader_on_training_thread"
IDLE_WORKERS = dict(busy=0.1, cpu=0.1, fetches=10, workers=2, matched=10, batches=10, **STARVED)
FROM_IDLE = IDLE_WORKERS | dict(transfer_wait=0.6)
SLOW_SAMPLER = dict(timed_waits=5, timed_sampler=0.25, timed_sampler_cpu=0.25, timed_receiving_cpu=0.01)
"""50 ms for each of the five batches that were timed."""

AT_EDGES = IDLE_WORKERS | dict(
    boundary_wait=0.6, boundaries=2, boundary_sampler=0.4, boundary_sampler_cpu=0.4, boundary_garbage=0.1, garbage=0.1
)
LONG_FETCH = dict(busy=0.3, cpu=0.3, fetch_wait=0.2, transfer_wait=0.4, **STARVED)
COLLECTING = dict(garbage=0.5, garbage_wait=0.5, **STARVED)
FULL = dict(busy=1.0, cpu=0.95, blocked=0.05, fetches=10, workers=1, matched=10, wait=0.5, compute=0.5)

COSTS = {
    "a transfer behind usual fetches": (
        with_workers(**LONG_FETCH), {"uneven_batches": 0.2, "batch_transfer": 0.4}
    ),
    "a transfer delayed by a long fetch counts for that fetch": (
        with_workers(**LONG_FETCH, transfer_wait_long=0.2), {"uneven_batches": 0.4, "batch_transfer": 0.2}
    ),
    "a transfer without a core counts as late for want of cores": (
        with_workers(
            busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, fetch_wait=0.3, transfer_wait=0.3, fetches=20,
            own_runnable=0.5, **STARVED,
        ),
        {"workers_throttled": 0.45, "batch_transfer": 0.15},
    ),
    "a slow sampler is work of the training thread": (
        with_workers(**SLOW_SAMPLER, **FROM_IDLE), {LOADER: 0.5, "batch_transfer": 0.1}
    ),
    "a sampler that was not timed": (with_workers(**FROM_IDLE), {"batch_transfer": 0.6}),
    # A batch every 100 ms; the 20 ms of the sampler are a part of the wait for it.
    "workers that are the limit, with a sampler beside them": (
        with_workers(
            fetch_wait=0.3, transfer_wait=0.2, timed_waits=10, timed_sampler=0.2, timed_sampler_cpu=0.2, **FULL
        ),
        {"workers_cpu_bound": 0.3, LOADER: 0.2},
    ),
    "a collection inside next() is no wait": (
        with_workers(garbage=0.5, garbage_wait=0.45, timed_waits=5, **FROM_IDLE),
        {"gc_pause": 0.5, "batch_transfer": 0.15},
    ),
    "nor is it a fetch": (a_slice(source="training_thread", **COLLECTING), {"gc_pause": 0.5, LOADER: 0.1}),
    "nor the work of a watched iterable": (a_slice(source="watched", **COLLECTING), {"gc_pause": 0.5, "source_slow": 0.1}),
    "what the GPU did not feel of a collection is not lost": (
        with_workers(exposed=0.3, garbage=0.4, garbage_wait=0.4, **FROM_IDLE), {"gc_pause": 0.2, "batch_transfer": 0.1}
    ),
    "a sampler where epochs begin is no start of workers": (
        with_workers(**AT_EDGES), {"gc_pause": 0.1, LOADER: 0.4, "worker_startup": 0.1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COSTS)
def test_what_each_cause_costs(case):
    part, expected = COSTS[case]
    assert costs(evidence_over([part])) == pytest.approx(expected)


@pytest.mark.parametrize(("starting", "found"), [(15, True), (5, False)])
def test_epochs_that_are_longer_than_the_window_add_up(starting, found):
    """A minute each, and a quarter of it for spawned workers to import everything again; or a twelfth."""
    epoch = [
        with_workers(busy=0.2, cpu=0.2, wait=1.0, compute=0.0, steps=0, boundary_wait=1.0, boundaries=int(not second))
        for second in range(starting)
    ] + [with_workers(busy=0.2, cpu=0.2, wait=0.0, compute=1.0) for _ in range(60 - starting)]
    machine = Detector(30)
    assert machine.play(*epoch * 2) == []  # one start is no pattern
    kinds = machine.play(*epoch * 4)
    assert (kinds[:1], "closed" in kinds) == ((["opened"], False) if found else ([], False))
    if found:
        assert machine.stall.cause == "worker_startup"
        advice = advise("worker_startup", machine.stall.evidence)[0]
        assert advice.predicted_speedup == pytest.approx(60 / 45, rel=0.1)


def test_workers_are_judged_by_the_training_alone():
    """Persistent workers wait for an evaluation to end, and others fetch for it. Those of an ended epoch may still be
    there when a sample is taken: as twice the workers they would make batches twice as fast."""
    busy = dataclasses.replace(CASES["workers_cpu_bound"], seconds=1.0)
    evaluating = dataclasses.replace(
        busy, wait=0.0, exposed=0.0, compute=0.0, steps=0, evaluation=1.0, fetches=500, fetch_busy=0.0,
        workers=dataclasses.replace(busy.workers, busy_ratio=0.0, cpu_ratio=0.0),
    )  # fmt: skip
    alone, between = evidence_over([busy] * 10), evidence_over([busy, evaluating] * 10)
    assert between.worker_busy_ratio == alone.worker_busy_ratio
    assert between.fetch_seconds == alone.fetch_seconds
    one = with_workers(busy=0.8, cpu=0.8, workers=1, fetches=100, transfer_wait=0.58, fetch_wait=0.02, **STARVED)
    both = dataclasses.replace(one, workers=dataclasses.replace(one.workers, training_workers=2))
    evidence = evidence_over([*[one] * 6, both, *[one] * 6])
    assert evidence.workers == 1
    assert costs(evidence) == pytest.approx(costs(evidence_over([one] * 13)))


def test_a_stuck_fetch_has_cost_what_it_took_when_it_is_over_too():
    slow = dict(busy=0.9, cpu=0.1, blocked=0.8, fetches=100, **STARVED)
    starved, six_seconds = with_workers(**slow), [with_workers(stuck=n, **slow) for n in (2.0, 4.0, 6.0)]
    for parts in ([starved] * 27 + six_seconds, [starved] * 14 + six_seconds + [starved] * 13):
        lost = costs(evidence_over(parts))
        assert lost["worker_stuck"] == pytest.approx(6.0)
        assert sum(lost.values()) == pytest.approx(0.6 * 30)
    assert "worker_stuck" not in costs(evidence_over([starved] * 30))  # the window has forgotten it


def test_fetches_that_are_all_long_are_not_stuck():
    """Of 8 s each, on eight workers."""
    window = [
        with_workers(busy=1.0, cpu=0.1, blocked=0.9, stuck=1.0 + n % 7, fetches=1, workers=8, **STARVED)
        for n in range(30)
    ]
    assert evidence_over(window).long_fetches == (7.0, 7.0, 7.0, 7.0, 2.0)
    assert "worker_stuck" not in costs(evidence_over(window))


def test_a_single_worker_that_was_stuck_is_not_called_slow_after_it():
    """20 s without an answer, and then again batches as fast as they are used."""
    machine = Detector(30)
    fine = with_workers(busy=0.5, cpu=0.2, blocked=0.3, wait=0.05, compute=0.95, workers=1, steps=40, fetches=40)
    silent = dict(busy=1.0, blocked=1.0, wait=1.0, compute=0.0, steps=0, fetches=0, workers=1)
    machine.play(*[fine] * 20, *(with_workers(stuck=float(second), **silent) for second in range(1, 21)))
    changes = [machine.update(fine) for _ in range(40)]
    (closed,) = [change for change in changes if change is not None and change.kind != "held"]
    assert (closed.kind, closed.stall.cause) == ("closed", "worker_stuck")


@given(st.lists(slices, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_what_is_waited_for_in_mid_epoch_is_in_some_cause_and_only_once(pieces):
    evidence = evidence_over(pieces)
    plain = structs.replace(evidence, checkpoint_seconds=0.0)
    plain = structs.replace(plain, garbage_seconds=0.0)
    plain = structs.replace(plain, gpu_idle_seconds=None, gpu_slowed_seconds=None, peers=())
    exposed, boundary = plain.exposed_seconds, plain.edge_wait_seconds
    if not exposed or not plain.wait_seconds:
        return
    kept = plain.edges >= 2 or plain.source != "workers"
    expected = exposed if kept else exposed * (1 - min(1.0, boundary / plain.wait_seconds))
    expected += crowded_out(plain)
    assert sum(costs(plain).values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# -- the sampler and garbage collections inside ``next()``: the evidence, and the advice -------------------------------


def test_a_slow_sampler_is_to_be_made_cheaper():
    evidence = evidence_over([with_workers(**SLOW_SAMPLER, **FROM_IDLE)])
    assert evidence.sampler_seconds == pytest.approx(0.5)
    assert evidence.receiving_cpu_seconds == pytest.approx(0.002)
    (advice,) = advise(LOADER, evidence)
    assert (advice.setting, advice.predicted_speedup) == (None, pytest.approx(2.0))
    assert "sampler takes 50.0 ms of every 100.0 ms" in advice.because
    assert "100 % of it on the CPU" in advice.because
    (transfer,) = advise("batch_transfer", evidence)
    assert transfer.predicted_speedup == pytest.approx(1 / 0.9, abs=0.01), "only the transfer itself"


@pytest.mark.parametrize(
    ("part", "delay", "word"),
    [
        pytest.param(SLOW_SAMPLER | dict(timed_sampler_cpu=0.01) | FROM_IDLE, None, "not wait", id="it waits"),
        pytest.param(SLOW_SAMPLER | dict(timed_sampler_cpu=0.01) | FROM_IDLE, 0.5, "cheaper", id="for a core"),
        pytest.param(AT_EDGES, None, "start", id="at the start of epochs"),
    ],
)
def test_what_is_to_be_done_about_a_sampler(part, delay, word):
    evidence = structs.replace(evidence_over([with_workers(**part)]), own_runnable_seconds=delay)
    (advice,) = advise(LOADER, evidence)
    assert word in advice.action


def test_a_sampler_that_was_not_timed_is_absent():
    evidence = evidence_over([with_workers(**FROM_IDLE)])
    assert evidence.sampler_seconds is None
    assert "sampler_seconds" not in evidence_field(evidence)


def test_the_sampler_s_time_stays_with_more_workers():
    evidence = evidence_over([COSTS["workers that are the limit, with a sampler beside them"][0]])
    more, *_ = advise("workers_cpu_bound", evidence)
    assert more.predicted_speedup == pytest.approx(1 / 0.7, rel=0.01)
    assert advise(LOADER, evidence) == (), "on its own it gains nothing"


def test_collections_inside_next_are_to_be_fewer():
    evidence = evidence_over([COSTS["a collection inside next() is no wait"][0]])
    freeze, calls = advise("gc_pause", evidence)
    assert freeze.predicted_speedup == calls.predicted_speedup == pytest.approx(2.0)
    assert "sampler" in calls.action
    assert "inside next()" in freeze.because


@pytest.mark.parametrize(
    ("collecting", "low", "high"), [(0.1, 1 / 0.4, 1 / 0.3), (0.03, None, 1 / 0.33)], ids=["much", "little"]
)
def test_sending_few_tensors_may_end_collections_inside_next(collecting, low, high):
    """A step has 30 ms of compute and 70 ms of a transfer, in which collections take 10 ms or 3 ms."""
    spent = dict(wait=0.7, compute=0.3, transfer_wait=0.7, garbage=collecting, garbage_wait=collecting)
    (advice,) = advise("batch_transfer", evidence_over([with_workers(**IDLE_WORKERS | spent)]))
    assert advice.predicted_speedup == pytest.approx(high, abs=0.01)
    assert advice.predicted_low == (low and pytest.approx(low, abs=0.01))
    assert ("collections" in advice.because) == (low is not None)


def test_a_sampler_at_epoch_starts_is_judged_from_one_to_the_next():
    recurring, tick = RecurringCostsWatch(), Tick()
    boundary = a_slice(
        wait=1.0, compute=0.0, boundary_wait=1.0, boundaries=1, boundary_sampler=0.8, boundary_garbage=0.1
    )
    for part in (boundary, a_slice()) * 3:
        tick = next_tick(tick.totals, part)
        recurring.add(tick)
    shares = {"edge_share": pytest.approx(0.45), "edge_share_of_sampler": pytest.approx(0.4)}
    assert {name: getattr(recurring.costs, name) for name in shares} == shares
    between = with_workers(**IDLE_WORKERS | dict(wait=0.0, compute=1.0))
    evidence = evidence_over([between], edge_share=0.45, edge_share_of_sampler=0.4)
    assert costs(evidence) == pytest.approx({LOADER: 0.4, "worker_startup": 0.05})
    (advice,) = advise(LOADER, evidence)
    assert advice.predicted_speedup == pytest.approx(1 / 0.6, abs=0.01)


class Sampling:
    """A batch sampler that takes the training thread 40 ms a batch, or collects garbage."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.heap = [{"number": [number]} for number in range(60_000)] if way == "collect" else []

    def __iter__(self):
        for number in range(100_000):
            until = time.thread_time() + (0.04 if self.way == "spin" else 0.0)
            while time.thread_time() < until:
                pass
            if self.way in {"sleep", "mixed"}:
                time.sleep(0.04)
            if self.way in {"collect", "mixed"}:
                gc.collect()
            yield [number % 100]


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    ("way", "cause"), [("spin", LOADER), ("sleep", LOADER), ("collect", "gc_pause"), ("mixed", LOADER)]
)
def test_a_run_names_what_its_sampler_does(tmp_path, way, cause):
    """The heap of ``mixed`` is small, so its collections are short."""
    opened = threading.Event()
    telemetry.start(
        tmp_path, port="off", interval_seconds=0.2, stall_window_seconds=2, start_line=False,
        on_stall=lambda _: opened.set(),
    )  # fmt: skip
    try:
        loader = DataLoader(Numbers(100), batch_sampler=Sampling(way), num_workers=2, multiprocessing_context="fork")
        for _ in loader:
            time.sleep(0.002)
            if opened.is_set():
                break
    finally:
        telemetry.stop()
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    stall = next(line for line in lines if line["event"] == "stall_open")
    evidence = stall["evidence"]
    assert stall["cause"] == cause, evidence
    assert "send less data" not in stall["advice"][0]["action"]
    assert stall["advice"][0]["predicted_speedup"] > 1
    if way != "collect":
        assert 0 < evidence["sampler_seconds"] <= evidence["wait_seconds"]
        assert "sampler" in stall["advice"][0]["action"]
    if way in {"collect", "mixed"}:
        assert 0 < evidence["garbage_wait_seconds"] <= evidence["garbage_seconds"]
