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
from telemetry.diagnosis.evidence import Gpu, RecurringCostsWatch, evidence_field
from telemetry.totals import Tick
from tests.data_sets import Numbers
from tests.slice_cases import CASES, STARVED, a_slice, slices, with_workers
from tests.slices import Detector, evidence_over, next_tick, with_part

# -- evidence about workers and epochs: what counts for a cause, and for how long --------------------------------------


@pytest.mark.parametrize(("starting", "found"), [(15, True), (5, False)])
def test_epochs_that_are_longer_than_the_window_add_up(starting, found):
    """A minute each, and a quarter of it for spawned workers to import everything again; or a twelfth."""
    epoch = [
        with_workers(busy=0.2, cpu=0.2, wait=1.0, compute=0.0, steps=0, boundary_wait=1.0, boundaries=int(not second))
        for second in range(starting)
    ] + [with_workers(busy=0.2, cpu=0.2, wait=0.0, compute=1.0) for _ in range(60 - starting)]
    machine = Detector(30, 0.2, 0.1)
    opened = [machine.update(part) for part in epoch * 2]
    assert [change for change in opened if change is not None] == []  # one start is no pattern
    kinds = [change.kind for part in epoch * 4 if (change := machine.update(part)) is not None]
    assert (kinds[:1], "closed" in kinds) == ((["opened"], False) if found else ([], False))
    if found:
        assert machine.stall.cause == "worker_startup"
        advice = advise("worker_startup", machine.stall.evidence)[0]
        assert advice.predicted_speedup == pytest.approx(60 / 45, rel=0.1)


def test_workers_are_not_judged_by_what_they_do_in_an_evaluation():
    """Persistent workers that wait for it to end, and others that fetch for it."""
    busy = dataclasses.replace(CASES["workers_cpu_bound"], seconds=1.0)
    evaluating = dataclasses.replace(
        busy, wait=0.0, exposed=0.0, compute=0.0, steps=0, evaluation=1.0, fetches=500, fetch_busy=0.0,
        workers=dataclasses.replace(busy.workers, busy_ratio=0.0, cpu_ratio=0.0),
    )  # fmt: skip
    alone, between = evidence_over([busy] * 10), evidence_over([busy, evaluating] * 10)
    assert between.workers.busy_ratio == alone.workers.busy_ratio
    assert between.fetches.seconds == alone.fetches.seconds


def test_workers_of_an_ended_epoch_do_not_count_in_the_next():
    """They may still be there when a sample is taken. As twice the workers they would make batches twice as fast."""
    one = with_workers(busy=0.8, cpu=0.8, workers=1, fetches=100, transfer_wait=0.58, fetch_wait=0.02, **STARVED)
    both = dataclasses.replace(one, workers=dataclasses.replace(one.workers, training_workers=2))
    evidence = evidence_over([*[one] * 6, both, *[one] * 6])
    assert evidence.workers.count == 1
    assert costs(evidence) == pytest.approx(costs(evidence_over([one] * 13)))


def test_a_transfer_delayed_by_a_long_fetch_counts_for_that_fetch():
    """0.2 s of fetch wait, and 0.4 s of transfer wait: half of that for workers that were in a long fetch."""
    with_long = with_workers(busy=0.3, cpu=0.3, fetch_wait=0.2, transfer_wait=0.4, transfer_wait_long=0.2, **STARVED)
    without = dataclasses.replace(with_long, transfer_wait_long=0.0)
    lost, lost_without = costs(evidence_over([with_long])), costs(evidence_over([without]))
    assert lost == pytest.approx({"uneven_batches": 0.4, "batch_transfer": 0.2})
    assert lost_without == pytest.approx({"uneven_batches": 0.2, "batch_transfer": 0.4})


def test_a_stuck_fetch_has_cost_what_it_took_when_it_is_over_too():
    starved = with_workers(busy=0.9, cpu=0.1, blocked=0.8, fetches=100, **STARVED)
    six_seconds = [
        with_workers(busy=0.9, cpu=0.1, blocked=0.8, stuck=n, fetches=100, **STARVED) for n in (2.0, 4.0, 6.0)
    ]
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
    assert evidence_over(window).fetches.long_seconds == (7.0, 7.0, 7.0, 7.0, 2.0)
    assert "worker_stuck" not in costs(evidence_over(window))


def test_a_single_worker_that_was_stuck_is_not_called_slow_after_it():
    """20 s without an answer, and then again batches as fast as they are used."""
    machine = Detector(30, 0.2, 0.1)
    fine = with_workers(busy=0.5, cpu=0.2, blocked=0.3, wait=0.05, compute=0.95, workers=1, steps=40, fetches=40)
    for _ in range(20):
        machine.update(fine)
    for second in range(1, 21):
        machine.update(
            with_workers(
                busy=1.0, blocked=1.0, wait=1.0, compute=0.0, steps=0, fetches=0, workers=1, stuck=float(second)
            )
        )
    changes = [machine.update(fine) for _ in range(40)]
    (closed,) = [change for change in changes if change is not None and change.kind != "held"]
    assert (closed.kind, closed.stall.cause) == ("closed", "worker_stuck")


def test_a_machine_that_slept_is_no_stall():
    machine = Detector(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice())
    assert machine.update(a_slice(wait=4000.0, compute=0.1)) is None
    assert [machine.update(a_slice()) for _ in range(40)] == [None] * 40


@given(st.lists(slices, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_what_is_waited_for_in_mid_epoch_is_in_some_cause_and_only_once(pieces):
    evidence = evidence_over(pieces)
    plain = with_part(evidence, "checkpoints", seconds=0.0)
    plain = with_part(plain, "garbage", seconds=0.0)
    plain = structs.replace(plain, gpu=Gpu(), peers=())
    exposed, boundary = plain.exposed_seconds, plain.edges.wait_seconds
    if not exposed or not plain.wait_seconds:
        return
    kept = plain.edges.count >= 2 or plain.source != "workers"
    expected = exposed if kept else exposed * (1 - min(1.0, boundary / plain.wait_seconds))
    expected += crowded_out(plain)
    assert sum(costs(plain).values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_transfer_without_a_core_counts_as_late_for_want_of_cores():
    part = with_workers(
        busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, fetch_wait=0.3, transfer_wait=0.3, fetches=20, own_runnable=0.5, cores=8.0,
        **STARVED,
    )  # fmt: skip
    assert costs(evidence_over([part])) == pytest.approx({"workers_throttled": 0.45, "batch_transfer": 0.15})


# -- the sampler and garbage collections inside ``next()``: the cause named, its evidence, the advice ------------------


IDLE_WORKERS = dict(busy=0.1, cpu=0.1, fetches=10, workers=2, matched=10, batches=10)
SLOW_SAMPLER = dict(timed_waits=5, timed_sampler=0.25, timed_sampler_cpu=0.25, timed_receiving_cpu=0.01)
"""50 ms for each of the five batches that were timed."""


def test_a_slow_sampler_is_work_of_the_training_thread():
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **SLOW_SAMPLER, **IDLE_WORKERS)])
    assert evidence.sampler.seconds == pytest.approx(0.5)
    assert evidence.transfer.receiving_cpu_seconds == pytest.approx(0.002)
    lost = costs(evidence)
    assert lost == {"loader_on_training_thread": pytest.approx(0.5), "batch_transfer": pytest.approx(0.1)}
    (advice,) = advise("loader_on_training_thread", evidence)
    assert advice.predicted_speedup == pytest.approx(2.0)
    assert "sampler takes 50.0 ms of every 100.0 ms" in advice.because
    assert "100 % of it on the CPU" in advice.because
    assert advice.setting is None
    (transfer,) = advise("batch_transfer", evidence)
    assert transfer.predicted_speedup == pytest.approx(1 / 0.9, abs=0.01), "only the transfer itself"


def test_a_sampler_that_waits_is_advised_not_to():
    waits = SLOW_SAMPLER | {"timed_sampler_cpu": 0.01}
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **waits, **IDLE_WORKERS)])
    (advice,) = advise("loader_on_training_thread", evidence)
    assert "not wait" in advice.action
    no_core = with_part(evidence, "cpu", own_runnable_seconds=0.5)
    (advice,) = advise("loader_on_training_thread", no_core)
    assert "cheaper" in advice.action, "it waited in the run queue"


def test_a_sampler_that_was_not_timed_is_absent():
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **IDLE_WORKERS)])
    assert evidence.sampler.seconds is None
    assert "sampler_seconds" not in evidence_field(evidence)
    assert set(costs(evidence)) == {"batch_transfer"}


def test_workers_that_are_the_limit_are_named_with_a_sampler_beside_them():
    """A batch every 100 ms; the 20 ms of the sampler are a part of the wait for it."""
    sampler = dict(timed_waits=10, timed_sampler=0.2, timed_sampler_cpu=0.2)
    fetching = dict(busy=1.0, cpu=0.95, blocked=0.05, fetches=10, workers=1, matched=10)
    evidence = evidence_over(
        [with_workers(wait=0.5, compute=0.5, fetch_wait=0.3, transfer_wait=0.2, **sampler, **fetching)]
    )
    lost = costs(evidence)
    assert max(lost, key=lost.get) == "workers_cpu_bound"
    assert lost["loader_on_training_thread"] == pytest.approx(0.2)
    more, *_ = advise("workers_cpu_bound", evidence)
    assert more.predicted_speedup == pytest.approx(1 / 0.7, rel=0.01), "the sampler's time stays"
    assert advise("loader_on_training_thread", evidence) == (), "on its own it gains nothing"


def test_a_collection_inside_next_is_no_wait():
    collecting = dict(garbage=0.5, garbage_wait=0.45, timed_waits=5, timed_sampler=0.0)
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **collecting, **IDLE_WORKERS)])
    lost = costs(evidence)
    assert lost == {"gc_pause": pytest.approx(0.5), "batch_transfer": pytest.approx(0.15)}
    freeze, calls = advise("gc_pause", evidence)
    assert freeze.predicted_speedup == calls.predicted_speedup == pytest.approx(2.0)
    assert "sampler" in calls.action
    assert "inside next()" in freeze.because


@pytest.mark.parametrize(
    ("collecting", "low", "high"), [(0.1, 1 / 0.4, 1 / 0.3), (0.03, None, 1 / 0.33)], ids=["much", "little"]
)
def test_sending_few_tensors_may_end_collections_inside_next(collecting, low, high):
    """A step has 30 ms of compute and 70 ms of a transfer, in which collections take 10 ms or 3 ms."""
    garbage = dict(garbage=collecting, garbage_wait=collecting)
    (advice,) = advise(
        "batch_transfer",
        evidence_over([with_workers(wait=0.7, compute=0.3, transfer_wait=0.7, **garbage, **IDLE_WORKERS)]),
    )
    assert advice.predicted_speedup == pytest.approx(high, abs=0.01)
    assert advice.predicted_low == (low and pytest.approx(low, abs=0.01))
    assert ("collections" in advice.because) == (low is not None)


@pytest.mark.parametrize("source", ["training_thread", "watched"])
def test_a_collection_in_an_own_fetch_is_no_fetch(source):
    lost = costs(evidence_over([a_slice(source=source, wait=0.6, compute=0.4, garbage=0.5, garbage_wait=0.5)]))
    cause = "source_slow" if source == "watched" else "loader_on_training_thread"
    assert lost == {"gc_pause": pytest.approx(0.5), cause: pytest.approx(0.1)}


def test_what_the_gpu_did_not_feel_of_a_collection_is_not_lost():
    part = with_workers(
        wait=0.6, compute=0.4, exposed=0.3, transfer_wait=0.6, garbage=0.4, garbage_wait=0.4, **IDLE_WORKERS
    )
    assert costs(evidence_over([part]))["gc_pause"] == pytest.approx(0.2)


def test_a_sampler_where_epochs_begin_is_no_start_of_workers():
    part = with_workers(
        wait=0.6, compute=0.4, boundary_wait=0.6, boundaries=2, boundary_sampler=0.4, boundary_sampler_cpu=0.4, boundary_garbage=0.1,
        garbage=0.1, **IDLE_WORKERS,
    )  # fmt: skip
    evidence = evidence_over([part])
    assert costs(evidence) == {
        "gc_pause": pytest.approx(0.1),
        "loader_on_training_thread": pytest.approx(0.4),
        "worker_startup": pytest.approx(0.1),
    }
    (advice,) = advise("loader_on_training_thread", evidence)
    assert "start" in advice.action
    assert advice.predicted_speedup == pytest.approx(1 / 0.6, abs=0.01)


def test_a_sampler_at_epoch_starts_is_judged_from_one_to_the_next():
    recurring, tick = RecurringCostsWatch(), Tick()
    for _ in range(3):
        boundary = a_slice(
            wait=1.0, compute=0.0, boundary_wait=1.0, boundaries=1, boundary_sampler=0.8, boundary_garbage=0.1
        )
        for part in (boundary, a_slice(compute=1.0)):
            tick = next_tick(tick.totals, part)
            recurring.add(tick)
    ratios = {"edge_share": pytest.approx(0.45), "edge_share_of_sampler": pytest.approx(0.4)}
    assert {name: getattr(recurring.costs, name) for name in ratios} == ratios
    evidence = evidence_over(
        [with_workers(compute=1.0, **IDLE_WORKERS)],
        edge_share=recurring.costs.edge_share,
        edge_share_of_sampler=0.4,
    )
    assert costs(evidence) == {
        "loader_on_training_thread": pytest.approx(0.4),
        "worker_startup": pytest.approx(0.05),
    }
    (advice,) = advise("loader_on_training_thread", evidence)
    assert advice.predicted_speedup == pytest.approx(1 / 0.6, abs=0.01)


class Sampling:
    """A batch sampler that takes the training thread ``seconds`` a batch."""

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


CAUSES = {
    "spin": "loader_on_training_thread",
    "sleep": "loader_on_training_thread",
    "collect": "gc_pause",
    "mixed": "loader_on_training_thread",  # of a small heap
}


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("way", CAUSES)
def test_a_run_names_what_its_sampler_does(tmp_path, way):
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
    assert stall["cause"] == CAUSES[way], evidence
    assert "send less data" not in stall["advice"][0]["action"]
    assert stall["advice"][0]["predicted_speedup"] > 1
    if way != "collect":
        assert 0 < evidence["sampler_seconds"] <= evidence["wait_seconds"]
        assert "sampler" in stall["advice"][0]["action"]
    if way in {"collect", "mixed"}:
        assert 0 < evidence["garbage_wait_seconds"] <= evidence["garbage_seconds"]
