"""Stalls open and close as they should, and their causes are named by their own evidence."""

from __future__ import annotations

import dataclasses
import math

import pytest

from telemetry.diagnosis.causes import costs
from telemetry.diagnosis.stalls import Stall
from telemetry.records import CAUSES, RankPace
from tests.slice_cases import CASES, STARVED, a_slice, pace, with_workers
from tests.slices import Detector, evidence_over


@pytest.mark.parametrize("case", CASES)
def test_each_cause_is_named_by_its_evidence(case):
    lost = costs(evidence_over([CASES[case]]))
    cause = case.partition(",")[0]
    assert max(lost, key=lost.get) == cause
    assert cause in CAUSES


@pytest.mark.parametrize("case", CASES)
def test_a_stall_opens_and_closes_with_its_cause(case):
    cause = case.partition(",")[0]
    machine = Detector(30, 0.2, 0.1)
    opened = None
    for _ in range(40):
        change = machine.update(CASES[case])
        if change is not None and change.kind == "opened":
            opened = change
    assert opened is not None
    assert machine.stall.cause == cause
    changes = [machine.update(a_slice()) for _ in range(40)]
    assert [c.kind for c in changes if c is not None and c.kind == "closed"] == ["closed"]
    assert machine.stall is None


QUIET = {
    "healthy": a_slice(wait=0.05, compute=0.95),
    "hidden wait": a_slice(wait=0.5, compute=0.5, exposed=0.01),
    "a peer that waits as long": a_slice(wait=0.1, compute=0.9, peers=(pace(1, compute=0.9, exposed=0.1),)),
    "a peer whose wait nobody feels": a_slice(peers=(pace(1, compute=0.3, exposed=0.02),)),
    "a peer with a pace of its own": a_slice(peers=(pace(1, steps=20, compute=0.3, exposed=0.7),)),
    "a peer that is in sync as long": a_slice(samples=50, in_sync=30, peers=(pace(1, samples=50, in_sync_samples=28),)),
    "a peer whose host waits for its own GPU": a_slice(
        samples=50,
        in_sync=40,
        gpu_utilization_ratio=0.99,
        peers=(pace(1, samples=50, in_sync_samples=2, on_gpu=True, gpu_busy_ratio=0.97),),
    ),
    "a peer that was hardly looked at": a_slice(samples=50, in_sync=40, peers=(pace(1, samples=3),)),
    "cores that others take": with_workers(
        busy=0.1, cpu=0.05, runnable=0.05, wait=0.0, compute=1.0, own_runnable=0.5, cores=2.0
    ),
    "cores that others take most of": with_workers(
        busy=0.9,
        cpu=0.3,
        runnable=0.6,
        wait=0.0,
        compute=1.0,
        own_runnable=0.5,
        process_cpu=0.5,
        cores=8.0,
        host_cores=8,
        host_cpu_ratio=7.7 / 8,
    ),  # fmt: skip
    "a GPU that is waited for": a_slice(gpu_utilization_ratio=0.95),
    "a GPU idle in an evaluation": a_slice(compute=0.5, evaluation=0.5, gpu_utilization_ratio=0.5),
    "a GPU at its power cap": a_slice(gpu_utilization_ratio=1.0, gpu_clock_ratio=0.7, gpu_throttled=("sw_power_cap",)),
    "evaluation": a_slice(wait=0.0, compute=0.05, evaluation=0.95, steps=0),
    "no steps": a_slice(**STARVED, steps=0),
    "exposure not known": a_slice(**STARVED, exposed=None),
    "one start of workers": a_slice(wait=0.05, compute=0.95, boundary_wait=0.05, boundaries=0),
    "start-up": a_slice(wait=0.0, compute=0.0, seconds=1.0, steps=0),
}


@pytest.mark.parametrize("what", QUIET)
def test_what_is_no_stall(what):
    machine = Detector(30, 0.2, 0.1)
    assert [machine.update(QUIET[what]) for _ in range(100)] == [None] * 100


def test_the_first_batch_and_the_end_of_an_epoch_are_no_stall():
    machine = Detector(30, 0.2, 0.1)
    first = a_slice(wait=12.0, compute=0.2, steps=1, boundary_wait=12.0, boundaries=1)
    changes = [machine.update(part) for part in (first, *[a_slice() for _ in range(60)])]
    assert [c for c in changes if c is not None] == []
    end = a_slice(wait=4.0, compute=0.0, steps=0, boundary_wait=4.0, boundaries=1)
    changes = [machine.update(part) for part in (end, *[a_slice() for _ in range(60)])]
    assert [c for c in changes if c is not None] == []


SHARED = with_workers(
    busy=0.4,
    cpu=0.4,
    ready=3,
    fetch_wait=0.5,
    transfer_wait=0.5,
    outlier_wait=0.1,
    boundary_wait=0.1,
    boundaries=2,
    wait=0.3,
    compute=0.7,
)
"""A starving run: a tenth of it each for workers to start, for fetches, and for transfers."""


def test_waits_of_several_causes_are_one_stall():
    lost = costs(evidence_over([SHARED]))
    assert len(lost) == 3
    assert max(lost.values()) < 0.2 < sum(lost.values())
    machine = Detector(10, 0.2, 0.1)
    changes = [machine.update(SHARED) for _ in range(12)]
    assert [c.kind for c in changes if c is not None][0] == "opened"
    fewer = dataclasses.replace(SHARED, wait=0.15, exposed=0.15, boundary_wait=0.05, compute=0.85)
    assert all(machine.update(fewer).kind == "held" for _ in range(30))  # none of the three costs a tenth any more
    changes = [machine.update(a_slice()) for _ in range(12)]
    assert "closed" in [c.kind for c in changes if c is not None]


def test_a_stall_closes_at_a_lower_share_than_it_opens_at():
    fifteen = a_slice(source="training_thread", wait=0.15, compute=0.85)
    machine = Detector(10, 0.2, 0.1)
    assert [machine.update(fifteen) for _ in range(30)] == [None] * 30
    for _ in range(12):
        machine.update(CASES["loader_on_training_thread"])
    assert all(machine.update(fifteen).kind == "held" for _ in range(30))
    changes = [machine.update(a_slice(source="training_thread", wait=0.05, compute=0.95)) for _ in range(12)]
    assert "closed" in [c.kind for c in changes if c is not None]


def test_a_stall_has_the_name_of_what_cost_most_of_it():
    machine = Detector(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["workers_io_bound"])
    changes = [machine.update(CASES["workers_cpu_bound"]) for _ in range(40)]
    assert [c.kind for c in changes].count("renamed") == 1
    assert machine.stall.cause == "workers_cpu_bound"


def test_a_stall_that_closes_still_has_the_evidence_it_had():
    """What to change is not read from the window in which the run has recovered."""
    machine = Detector(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["loader_on_training_thread"])
    closed = next(c for _ in range(12) if (c := machine.update(a_slice(source="training_thread"))).kind == "closed")
    assert closed.stall.evidence.wait_seconds >= 0.2 * closed.stall.evidence.loop_seconds


def test_steps_of_many_seconds_are_judged_as_others_are():
    """A step of 20 s, half of it waiting, in slices of a second: a window of 30 s never holds five of them."""
    waiting = a_slice(source="training_thread", wait=1.0, compute=0.0, steps=0)
    computing = [a_slice(source="training_thread", steps=int(last)) for last in [*[False] * 9, True]]
    machine = Detector(30, 0.2, 0.1)
    changes = [machine.update(part) for _ in range(12) for part in (*[waiting] * 10, *computing)]
    assert "opened" in [c.kind for c in changes if c is not None]
    assert machine.stall.cause == "loader_on_training_thread"
    assert machine.stall.evidence.steps >= 9


def test_a_checkpoint_costs_what_it_takes_of_the_time_between_two():
    writing = a_slice(compute=0.0, checkpoint=1.0, steps=0)
    for between, kinds in ((1800, []), (60, ["opened"])):
        machine = Detector(30, 0.2, 0.1)
        changes = []
        for _ in range(3):
            changes += [machine.update(a_slice()) for _ in range(between)]
            changes += [machine.update(writing) for _ in range(45)]
        assert [c.kind for c in changes if c is not None and c.kind == "opened"][:1] == kinds, between


def test_what_the_first_checkpoints_of_a_run_took_is_remembered():
    """The first two take a second each, the others 0.4 s."""
    machine = Detector(30, 0.2, 0.1)
    for number in range(60):
        took = 1.0 if number < 2 else 0.4
        machine.update(a_slice(seconds=1 + took, compute=1.0, checkpoint=took, steps=10, checkpoint_steps=1))
    assert machine.stall.cause == "checkpoint"
    evidence = machine.stall.evidence
    assert evidence.checkpoint_seconds / evidence.checkpoints == pytest.approx(0.4)  # the window has forgotten them
    assert evidence.early_checkpoint_seconds == pytest.approx(1.0)


def test_a_tick_that_is_skipped_is_in_no_window():
    """A process that was stopped for 20 s in the middle of a stall: it goes on as if nothing had been."""
    stopped = a_slice(source="training_thread", wait=0.0, compute=20.0, steps=0)
    with_it, without = Detector(10, 0.2, 0.1), Detector(10, 0.2, 0.1)
    for second in range(20):
        if second == 12:
            with_it.skip(stopped)
        for machine in (with_it, without):
            machine.update(CASES["loader_on_training_thread"])
    assert with_it.stall.lost_seconds == pytest.approx(without.stall.lost_seconds)
    assert with_it.stall.loop_seconds == pytest.approx(without.stall.loop_seconds)
    assert with_it.stall.evidence.window_seconds == pytest.approx(without.stall.evidence.window_seconds)


def test_it_takes_enough_of_a_window():
    machine = Detector(30, 0.2, 0.1)
    for number in range(14):
        assert machine.update(a_slice(**STARVED)) is None, number
    assert machine.update(a_slice(**STARVED)).kind == "opened"


def test_a_run_that_ends_early_is_judged_by_what_there_is_of_it():
    machine = Detector(30, 0.2, 0.1)
    for _ in range(5):
        assert machine.update(CASES["workers_io_bound"]) is None
    change = machine.last()
    assert (change.kind, change.stall.cause) == ("opened", "workers_io_bound")
    for healthy in (CASES["workers_io_bound"], *[a_slice() for _ in range(5)]), (a_slice(**STARVED, steps=40),):
        machine = Detector(30, 0.2, 0.1)
        for part in healthy:
            machine.update(part)
        assert machine.last() is None  # too little of it, or too short


def test_a_run_whose_stall_has_closed_is_not_judged_again_at_its_end():
    machine = Detector(10, 0.2, 0.1)
    for part in [*[CASES["workers_io_bound"]] * 12, *[a_slice()] * 12, *[CASES["workers_io_bound"]] * 3]:
        machine.update(part)
    assert machine.stall is None
    assert machine.last() is None


def test_peers_that_cannot_be_read_for_a_moment_do_not_end_a_stall():
    machine = Detector(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["straggler"])
    assert machine.update(a_slice()).kind == "held"


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("samples", "opens"), [(10, False), (100, True)])
def test_what_may_be_chance_in_the_samples_opens_no_stall(samples, opens, at_end):
    """Of this rank's samples 30 % are in synchronisation, of the other's 8 %: that is 22 %, more than 20 %."""
    peer = RankPace(1, 10.0, 100, 10.0, 0.0, 0.0, samples=10 * samples, in_sync_samples=round(0.8 * samples))
    part = a_slice(steps=10, samples=samples, in_sync=round(0.3 * samples), peers=(peer,))
    machine = Detector(30 if at_end else 10, 0.2, 0.1)
    opened = [change for _ in range(12) if (change := machine.update(part)) is not None and change.kind == "opened"]
    assert machine.may_have_straggler, "so more samples are taken"
    opened += [machine.last()] if at_end else []
    assert [change.stall.cause for change in opened if change is not None] == ["straggler"] * opens


def test_the_ratio_is_that_of_the_stall():
    machine = Detector(10, 0.2, 0.1)
    for _ in range(50):
        machine.update(CASES["workers_io_bound"])
    assert machine.stall.exposed_ratio == pytest.approx(0.6)
    assert machine.stall.opened_step == 0
    assert machine.stall.lost_seconds["workers_io_bound"] == pytest.approx(0.6 * 50, rel=0.1)


def test_a_share_that_rounds_below_zero_is_zero():
    stall = Stall("checkpoint", 1, {"checkpoint": 1.0}, 10.0, -3.7e-291, evidence_over([a_slice()]))
    assert stall.exposed_ratio == 0.0
    assert math.copysign(1, stall.exposed_ratio) == 1
