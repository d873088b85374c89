"""Evidence about workers and epochs: what counts for a cause, and for how long."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.diagnosis.advice import advise
from telemetry.diagnosis.causes import costs, crowded_out
from tests.slice_cases import CASES, STARVED, a_slice, slices, with_workers
from tests.slices import Detector, evidence_over


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
    assert between.busy_ratio == alone.busy_ratio
    assert between.fetch_seconds == alone.fetch_seconds


def test_workers_of_an_ended_epoch_do_not_count_in_the_next():
    """They may still be there when a sample is taken. As twice the workers they would make batches twice as fast."""
    one = with_workers(busy=0.8, cpu=0.8, workers=1, fetches=100, transfer_wait=0.58, fetch_wait=0.02, **STARVED)
    both = dataclasses.replace(one, workers=dataclasses.replace(one.workers, training_workers=2))
    evidence = evidence_over([*[one] * 6, both, *[one] * 6])
    assert evidence.workers == 1
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
    for window in ([starved] * 27 + six_seconds, [starved] * 14 + six_seconds + [starved] * 13):
        lost = costs(evidence_over(window))
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
    plain = dataclasses.replace(
        evidence,
        checkpoint_seconds=0.0,
        garbage_seconds=0.0,
        gpu_idle_seconds=None,
        gpu_slowed_seconds=None,
        peers=(),
    )
    exposed, boundary = plain.exposed_seconds, plain.edge_wait_seconds
    if not exposed or not plain.wait_seconds:
        return
    kept = plain.edges >= 2 or plain.source != "workers"
    expected = exposed if kept else exposed * (1 - min(1.0, boundary / plain.wait_seconds))
    expected += crowded_out(plain)
    assert sum(costs(plain).values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_transfer_without_a_core_counts_as_late_for_want_of_cores():
    part = with_workers(
        busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, fetch_wait=0.3, transfer_wait=0.3, fetches=20, own_runnable=0.5, cores=8.0,
        **STARVED,
    )  # fmt: skip
    assert costs(evidence_over([part])) == pytest.approx({"workers_throttled": 0.45, "batch_transfer": 0.15})
