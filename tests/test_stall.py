"""Stalls open and close as they should, and their causes are named by their own evidence."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.diagnose.advice import WORTH_IT, advise
from telemetry.diagnose.causes import costs, crowded_out, steady_cause
from telemetry.diagnose.gather import gather
from telemetry.diagnose.stall import StallMachine
from telemetry.diagnose.straggler import held_up_by
from telemetry.records import CAUSES, FETCH_BUCKETS, Histogram, RankPace, Slice, WorkersSample

IDLE = WorkersSample(
    workers=4, training_workers=4, resident_memory_bytes=1, ready_batches=0, fetching_seconds=0.0, fetches_total=0, fetch_duration=None,
    cpu_ratio=0.0, busy_ratio=0.0, runnable_ratio=0.0, blocked_ratio=0.0, read_bytes_per_second=0.0,
)  # fmt: skip


def a_slice(*, wait=0.0, compute=1.0, steps=10, seconds=None, **fields) -> Slice:
    whole = wait + compute + fields.get("checkpoint", 0.0) + fields.get("evaluation", 0.0)
    base = dict(
        seconds=whole if seconds is None else seconds, wait=wait, exposed=wait, edge_wait=0.0, edges=0, compute=compute,
        evaluation=0.0, checkpoint=0.0, garbage=0.0, steps=steps, source="workers", process_cpu=compute, cores=8.0,
    )  # fmt: skip
    return Slice(**base | fields)


def with_workers(
    *, busy, cpu=0.0, runnable=0.0, blocked=0.0, ready=0, fetches=10, stuck=0.0, workers=4, **fields
) -> Slice:
    sample = dataclasses.replace(
        IDLE, workers=workers, training_workers=workers, busy_ratio=busy, cpu_ratio=cpu, runnable_ratio=runnable, blocked_ratio=blocked,
        ready_batches=ready, fetching_seconds=stuck,
    )  # fmt: skip
    seconds = fields.get("wait", 0.0) + fields.get("compute", 1.0)
    return a_slice(workers=sample, fetches=fetches, fetch_busy=busy * workers * seconds, **fields)


def pace(rank: int, *, steps=10, compute=1.0, exposed=0.0, away=0.0, **fields) -> RankPace:
    """Over one second, or as many as the window has: only what comes to a step counts."""
    return RankPace(rank=rank, seconds=1.0, steps=steps, compute=compute, exposed=exposed, away=away, **fields)


STARVED = dict(wait=0.6, compute=0.4)
CASES = {
    "loader_on_training_thread": a_slice(source="training_thread", **STARVED),
    "source_slow": a_slice(source="watched", **STARVED),
    "workers_cpu_bound": with_workers(busy=0.99, cpu=0.90, blocked=0.09, **STARVED),
    "workers_io_bound": with_workers(busy=0.99, cpu=0.10, blocked=0.89, **STARVED),
    "workers_throttled": with_workers(busy=0.99, cpu=0.45, runnable=0.50, blocked=0.04, **STARVED),
    "uneven_batches": with_workers(busy=0.4, cpu=0.3, blocked=0.1, wait=0.3, compute=0.7, workers=4, fetches=10),
    "uneven_batches, others ready": with_workers(busy=0.4, cpu=0.4, ready=3, late_wait=0.5, **STARVED),
    "batch_transfer": with_workers(busy=0.2, cpu=0.2, ready=3, **STARVED),
    "worker_stuck": with_workers(busy=0.9, cpu=0.1, blocked=0.8, stuck=40.0, fetches=100, **STARVED),
    "worker_startup": with_workers(busy=0.3, cpu=0.3, edge_wait=0.55, edges=2, **STARVED),
    "batch_transfer, matched": with_workers(
        busy=0.6, cpu=0.5, blocked=0.1, late=0.1, moved=0.4, late_wait=0.5, **STARVED
    ),
    "uneven_batches, matched": with_workers(
        busy=0.4, cpu=0.4, ready=3, late=0.4, moved=0.1, head_of_line=0.3, **STARVED
    ),
    "workers_io_bound, matched": with_workers(busy=0.99, cpu=0.1, blocked=0.89, late=0.5, moved=0.1, **STARVED),
    "workers_cpu_bound, late to be moved": with_workers(  # as a busy interpreter lock lets its queue wait
        busy=0.97, cpu=0.9, blocked=0.07, late=0.2, moved=0.4, workers=1, fetches=10, **STARVED
    ),
    "workers_throttled, as the training thread is": with_workers(
        busy=0.2, cpu=0.2, late=0.1, moved=0.5, own_runnable=0.6, **STARVED
    ),
    "workers_throttled, crowding out the training thread": with_workers(
        busy=0.9, cpu=0.3, runnable=0.6, wait=0.0, compute=1.0, own_runnable=0.5, process_cpu=0.5, cores=2.0
    ),
    "batch_transfer, on a busy machine": with_workers(
        busy=0.2, cpu=0.2, late=0.1, moved=0.5, own_runnable=0.2, **STARVED
    ),
    "workers_throttled, supply and compute alike": with_workers(
        busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, late=0.3, moved=0.0, fetches=20, **STARVED
    ),
    "workers_cpu_bound, no schedstat": with_workers(busy=0.99, cpu=0.9, runnable=None, blocked=None, **STARVED),
    "workers_io_bound, no schedstat": with_workers(busy=0.99, cpu=0.1, runnable=None, blocked=None, **STARVED),
    "workers_throttled, no schedstat": with_workers(
        busy=0.99, cpu=0.4, runnable=None, blocked=None, host_cpu_ratio=0.99, **STARVED
    ),
    "workers_throttled, by a quota, no schedstat": with_workers(
        busy=0.99, cpu=0.4, runnable=None, blocked=None, throttled_ratio=0.9, host_cpu_ratio=0.1, **STARVED
    ),
    "straggler": a_slice(peers=(pace(1, compute=0.3, exposed=0.7), pace(2))),
    "straggler, in its compute": a_slice(samples=50, in_sync=40, peers=(pace(1, samples=50, in_sync=2),)),
    "straggler, on GPUs": a_slice(
        samples=50,
        in_sync=40,
        gpu_utilization_ratio=0.99,
        peers=(pace(1, samples=50, in_sync=2, on_gpu=True, gpu_busy=0.5),),
    ),
    "straggler, out of its steps": a_slice(peers=(pace(1, compute=0.5, exposed=0.0, away=0.5),)),
    "host_bound": a_slice(gpu_utilization_ratio=0.6),
    "gpu_throttled": a_slice(gpu_utilization_ratio=1.0, gpu_clock_ratio=0.5, gpu_throttled=("hw_thermal",)),
    "checkpoint": a_slice(compute=0.5, checkpoint=0.5),
    "gc_pause": a_slice(compute=1.0, garbage=0.4),
    "unknown": a_slice(source="workers", workers=None, **STARVED),
}


@pytest.mark.parametrize("case", CASES)
def test_each_cause_is_named_by_its_evidence(case):
    lost = costs(gather([CASES[case]]))
    cause = case.partition(",")[0]
    assert max(lost, key=lost.get) == cause
    assert cause in CAUSES


@pytest.mark.parametrize("case", CASES)
def test_a_stall_opens_and_closes_with_its_cause(case):
    cause = case.partition(",")[0]
    machine = StallMachine(30, 0.2, 0.1)
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
    "a peer that is in sync as long": a_slice(samples=50, in_sync=30, peers=(pace(1, samples=50, in_sync=28),)),
    "a peer whose host waits for its own GPU": a_slice(
        samples=50,
        in_sync=40,
        gpu_utilization_ratio=0.99,
        peers=(pace(1, samples=50, in_sync=2, on_gpu=True, gpu_busy=0.97),),
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
    "one start of workers": a_slice(wait=0.05, compute=0.95, edge_wait=0.05, edges=0),
    "start-up": a_slice(wait=0.0, compute=0.0, seconds=1.0, steps=0),
}


@pytest.mark.parametrize("what", QUIET)
def test_what_is_no_stall(what):
    machine = StallMachine(30, 0.2, 0.1)
    assert [machine.update(QUIET[what]) for _ in range(100)] == [None] * 100


def test_the_first_batch_and_the_end_of_an_epoch_are_no_stall():
    machine = StallMachine(30, 0.2, 0.1)
    first = a_slice(wait=12.0, compute=0.2, steps=1, edge_wait=12.0, edges=1)
    changes = [machine.update(piece) for piece in (first, *[a_slice() for _ in range(60)])]
    assert [c for c in changes if c is not None] == []
    end = a_slice(wait=4.0, compute=0.0, steps=0, edge_wait=4.0, edges=1)
    changes = [machine.update(piece) for piece in (end, *[a_slice() for _ in range(60)])]
    assert [c for c in changes if c is not None] == []


SHARED = with_workers(
    busy=0.4, cpu=0.4, ready=3, late=0.5, moved=0.5, late_wait=0.1, edge_wait=0.1, edges=2, wait=0.3, compute=0.7
)
"""A starving run: a tenth of it each for workers to start, for late batches, and for those that are moved."""


def test_waits_of_several_causes_are_one_stall():
    lost = costs(gather([SHARED]))
    assert len(lost) == 3
    assert max(lost.values()) < 0.2 < sum(lost.values())
    machine = StallMachine(10, 0.2, 0.1)
    changes = [machine.update(SHARED) for _ in range(12)]
    assert [c.kind for c in changes if c is not None][0] == "opened"
    fewer = dataclasses.replace(SHARED, wait=0.15, exposed=0.15, edge_wait=0.05, compute=0.85)
    assert all(machine.update(fewer).kind == "held" for _ in range(30))  # none of the three costs a tenth any more
    changes = [machine.update(a_slice()) for _ in range(12)]
    assert "closed" in [c.kind for c in changes if c is not None]


def test_a_stall_closes_at_a_lower_share_than_it_opens_at():
    fifteen = a_slice(source="training_thread", wait=0.15, compute=0.85)
    machine = StallMachine(10, 0.2, 0.1)
    assert [machine.update(fifteen) for _ in range(30)] == [None] * 30
    for _ in range(12):
        machine.update(CASES["loader_on_training_thread"])
    assert all(machine.update(fifteen).kind == "held" for _ in range(30))
    changes = [machine.update(a_slice(source="training_thread", wait=0.05, compute=0.95)) for _ in range(12)]
    assert "closed" in [c.kind for c in changes if c is not None]


def test_a_stall_has_the_name_of_what_cost_most_of_it():
    machine = StallMachine(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["workers_io_bound"])
    changes = [machine.update(CASES["workers_cpu_bound"]) for _ in range(40)]
    assert [c.kind for c in changes].count("renamed") == 1
    assert machine.stall.cause == "workers_cpu_bound"


def test_a_stall_that_closes_still_has_the_evidence_it_had():
    """What to change is not read from the window in which the run has recovered."""
    machine = StallMachine(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["loader_on_training_thread"])
    closed = next(c for _ in range(12) if (c := machine.update(a_slice(source="training_thread"))).kind == "closed")
    assert closed.stall.evidence.wait >= 0.2 * closed.stall.evidence.loop


def test_steps_of_many_seconds_are_judged_as_others_are():
    """A step of 20 s, half of it waiting, in slices of a second: a window of 30 s never holds five of them."""
    waiting = a_slice(source="training_thread", wait=1.0, compute=0.0, steps=0)
    computing = [a_slice(source="training_thread", steps=int(last)) for last in [*[False] * 9, True]]
    machine = StallMachine(30, 0.2, 0.1)
    changes = [machine.update(piece) for _ in range(12) for piece in (*[waiting] * 10, *computing)]
    assert "opened" in [c.kind for c in changes if c is not None]
    assert machine.stall.cause == "loader_on_training_thread"
    assert machine.stall.evidence.steps >= 9


def test_a_checkpoint_costs_what_it_takes_of_the_time_between_two():
    writing = a_slice(compute=0.0, checkpoint=1.0, steps=0)
    for between, kinds in ((1800, []), (60, ["opened"])):
        machine = StallMachine(30, 0.2, 0.1)
        changes = []
        for _ in range(3):
            changes += [machine.update(a_slice()) for _ in range(between)]
            changes += [machine.update(writing) for _ in range(45)]
        assert [c.kind for c in changes if c is not None and c.kind == "opened"][:1] == kinds, between


def test_what_the_first_checkpoints_of_a_run_took_is_remembered():
    """The first two take a second each, the others 0.4 s."""
    machine = StallMachine(30, 0.2, 0.1)
    for number in range(60):
        took = 1.0 if number < 2 else 0.4
        machine.update(a_slice(seconds=1 + took, compute=1.0, checkpoint=took, steps=10, checkpoint_steps=1))
    assert machine.stall.cause == "checkpoint"
    evidence = machine.stall.evidence
    assert evidence.checkpoint / evidence.checkpoints == pytest.approx(0.4)  # the window has forgotten them
    assert evidence.early_checkpoint == pytest.approx(1.0)


@pytest.mark.parametrize(("starting", "found"), [(15, True), (5, False)])
def test_epochs_that_are_longer_than_the_window_add_up(starting, found):
    """A minute each, and a quarter of it for spawned workers to import everything again; or a twelfth."""
    epoch = [
        with_workers(busy=0.2, cpu=0.2, wait=1.0, compute=0.0, steps=0, edge_wait=1.0, edges=int(not second))
        for second in range(starting)
    ] + [with_workers(busy=0.2, cpu=0.2, wait=0.0, compute=1.0) for _ in range(60 - starting)]
    machine = StallMachine(30, 0.2, 0.1)
    opened = [machine.update(piece) for piece in epoch * 2]
    assert [change for change in opened if change is not None] == []  # one start is no pattern
    kinds = [change.kind for piece in epoch * 4 if (change := machine.update(piece)) is not None]
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
    alone, between = gather([busy] * 10), gather([busy, evaluating] * 10)
    assert (between.busy_ratio, between.fetch_seconds) == (alone.busy_ratio, alone.fetch_seconds)


def test_workers_of_an_epoch_that_has_ended_do_not_count_beside_those_of_the_next():
    """They may still be there when a sample is taken. As twice the workers they would make batches twice as fast."""
    one = with_workers(busy=0.8, cpu=0.8, workers=1, fetches=100, moved=0.58, late=0.02, **STARVED)
    both = dataclasses.replace(one, workers=dataclasses.replace(one.workers, training_workers=2))
    evidence = gather([*[one] * 6, both, *[one] * 6])
    assert evidence.workers == 1
    assert costs(evidence) == pytest.approx(costs(gather([one] * 13)))


def test_what_a_long_fetch_keeps_its_worker_from_handing_over_is_the_long_fetch_s():
    """Batches were late for 0.2 s, and moved for 0.4 s: half of that from workers that were in a long fetch."""
    with_long = with_workers(busy=0.3, cpu=0.3, late=0.2, moved=0.4, moved_from_long=0.2, **STARVED)
    without = dataclasses.replace(with_long, moved_from_long=0.0)
    lost, lost_without = costs(gather([with_long])), costs(gather([without]))
    assert lost == pytest.approx({"uneven_batches": 0.4, "batch_transfer": 0.2})
    assert lost_without == pytest.approx({"uneven_batches": 0.2, "batch_transfer": 0.4})


def test_a_stuck_fetch_has_cost_what_it_took_when_it_is_over_too():
    starved = with_workers(busy=0.9, cpu=0.1, blocked=0.8, fetches=100, **STARVED)
    six_seconds = [
        with_workers(busy=0.9, cpu=0.1, blocked=0.8, stuck=n, fetches=100, **STARVED) for n in (2.0, 4.0, 6.0)
    ]
    for window in ([starved] * 27 + six_seconds, [starved] * 14 + six_seconds + [starved] * 13):
        lost = costs(gather(window))
        assert lost["worker_stuck"] == pytest.approx(6.0)
        assert sum(lost.values()) == pytest.approx(0.6 * 30)
    assert "worker_stuck" not in costs(gather([starved] * 30))  # the window has forgotten it


def test_fetches_that_are_all_long_are_not_stuck():
    """Of 8 s each, on eight workers."""
    window = [
        with_workers(busy=1.0, cpu=0.1, blocked=0.9, stuck=1.0 + n % 7, fetches=1, workers=8, **STARVED)
        for n in range(30)
    ]
    assert gather(window).long_fetches == (7.0, 7.0, 7.0, 7.0, 2.0)
    assert "worker_stuck" not in costs(gather(window))


def test_a_single_worker_that_was_stuck_is_not_called_slow_after_it():
    """20 s without an answer, and then again batches as fast as they are used."""
    machine = StallMachine(30, 0.2, 0.1)
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
    machine = StallMachine(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice())
    assert machine.update(a_slice(wait=4000.0, compute=0.1)) is None
    assert [machine.update(a_slice()) for _ in range(40)] == [None] * 40


def test_it_takes_enough_of_a_window():
    machine = StallMachine(30, 0.2, 0.1)
    for number in range(14):
        assert machine.update(a_slice(**STARVED)) is None, number
    assert machine.update(a_slice(**STARVED)).kind == "opened"


def test_a_run_that_ends_early_is_judged_by_what_there_is_of_it():
    machine = StallMachine(30, 0.2, 0.1)
    for _ in range(5):
        assert machine.update(CASES["workers_io_bound"]) is None
    change = machine.last()
    assert (change.kind, change.stall.cause) == ("opened", "workers_io_bound")
    for healthy in (CASES["workers_io_bound"], *[a_slice() for _ in range(5)]), (a_slice(**STARVED, steps=40),):
        machine = StallMachine(30, 0.2, 0.1)
        for piece in healthy:
            machine.update(piece)
        assert machine.last() is None  # too little of it, or too short


def test_a_run_whose_stall_has_closed_is_not_judged_again_at_its_end():
    machine = StallMachine(10, 0.2, 0.1)
    for piece in [*[CASES["workers_io_bound"]] * 12, *[a_slice()] * 12, *[CASES["workers_io_bound"]] * 3]:
        machine.update(piece)
    assert machine.stall is None
    assert machine.last() is None


def test_peers_that_cannot_be_read_for_a_moment_do_not_end_a_stall():
    machine = StallMachine(10, 0.2, 0.1)
    for _ in range(12):
        machine.update(CASES["straggler"])
    assert machine.update(a_slice()).kind == "held"


def test_the_ratio_is_that_of_the_stall():
    machine = StallMachine(10, 0.2, 0.1)
    for _ in range(50):
        machine.update(CASES["workers_io_bound"])
    assert machine.stall.exposed_ratio == pytest.approx(0.6)
    assert machine.stall.opened_step == 0
    assert machine.stall.lost["workers_io_bound"] == pytest.approx(0.6 * 50, rel=0.1)


# -- properties ---------------------------------------------------------------------------------------------------

amount = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-9])
ratio = st.floats(0, 1) | st.none()
samples = st.builds(
    WorkersSample, workers=st.integers(0, 64), training_workers=st.integers(0, 64), resident_memory_bytes=st.integers(0, 1 << 40),
    ready_batches=st.none() | st.integers(0, 1000), fetching_seconds=amount, fetches_total=st.integers(0, 1 << 40),
    fetch_duration=st.none() | st.lists(st.integers(0, 9), min_size=len(FETCH_BUCKETS) + 1, max_size=len(FETCH_BUCKETS) + 1)
    .map(lambda counts: Histogram(FETCH_BUCKETS, tuple(counts), 1.0)), cpu_ratio=ratio, busy_ratio=ratio, runnable_ratio=ratio, blocked_ratio=ratio,
    read_bytes_per_second=st.none() | amount, allowed_cores=st.none() | st.integers(1, 512), packing_ratio=st.none() | amount,
    written_bytes_per_second=st.none() | amount | st.floats(0, 1e12),
    fetched=st.dictionaries(st.integers(1, 4), st.tuples(st.integers(0, 10**6), amount), max_size=4),
)  # fmt: skip
paces = st.builds(
    RankPace, rank=st.integers(0, 9), seconds=amount, steps=st.integers(0, 10**6), compute=amount, exposed=st.none() | amount,
    away=amount, samples=st.integers(0, 100), in_sync=st.integers(0, 100), cause=st.none() | st.sampled_from(CAUSES),
    where=st.none() | st.just("f (train.py:1)"),
)  # fmt: skip
slices = st.builds(
    Slice, seconds=amount, wait=amount, exposed=st.none() | amount, edge_wait=amount, edges=st.integers(0, 100),
    compute=amount, evaluation=amount, checkpoint=amount, garbage=amount, steps=st.integers(0, 10**6), batches=st.integers(0, 10**6),
    around_edges=st.floats(-100.0, 100.0), late_wait=amount, checkpoint_steps=st.integers(0, 10**6), checkpoint_steps_compute=amount,
    source=st.sampled_from([None, "workers", "training_thread", "watched", "of a newer version"]),
    process_cpu=st.none() | amount, fetches=st.none() | st.integers(0, 10**6), fetch_busy=st.none() | amount,
    workers=st.none() | samples, cores=st.floats(0.05, 512), throttled_ratio=ratio, gpu_utilization_ratio=ratio,
    late=amount, moved=amount, head_of_line=amount, timed_fetch=amount, timed_fetch_cpu=amount, startup=amount,
    freeing=amount, freed=st.integers(0, 10**6),
    own_runnable=st.none() | amount, samples=st.integers(0, 100), in_sync=st.integers(0, 100), host_cpu_ratio=ratio,
    where=st.none() | st.just("f (train.py:1)"), peers=st.lists(paces, max_size=3).map(tuple), gpu_clock_ratio=ratio,
    gpu_throttled=st.lists(st.sampled_from(["hw_thermal", "sw_power_cap", "new"]), max_size=2).map(tuple),
    settings=st.sampled_from([
        {}, {"prefetch_factor": None, "in_order": True}, {"prefetch_factor": 64}, {"persistent_workers": True, "num_workers": 3},
        {"sharing_strategy": "file_descriptor", "in_order": False, "num_workers": 2}, {"loader_used_again": False},
    ]),
    moved_from_long=amount, matched=st.integers(0, 10**6), from_busy=st.integers(0, 10**6), moved_from_busy=amount, left=st.integers(0, 100),
    host_cores=st.integers(0, 512), quota=st.none() | st.floats(0.01, 512), quota_used=st.none() | amount,
)  # fmt: skip


@given(st.lists(slices, min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_anything(pieces):
    machine = StallMachine(30, 0.2, 0.1)
    for piece in pieces:
        change = machine.update(piece)
        if change is not None:
            assert change.stall.cause in CAUSES
            assert change.stall.exposed_ratio is None or 0 <= change.stall.exposed_ratio <= 1
    evidence = gather(pieces)
    assert set(costs(evidence)) <= set(CAUSES)
    for cause in CAUSES:
        for advice in advise(cause, evidence):
            gain = advice.predicted_speedup
            assert gain is None or (gain >= WORTH_IT and not math.isnan(gain))


@given(
    st.floats(0.85, 1.0), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1),
    st.sampled_from(["cpu_ratio", "blocked_ratio", "runnable_ratio"]),
)  # fmt: skip
def test_more_of_a_cause_s_evidence_never_turns_the_verdict_away_from_it(busy, cpu, runnable, blocked, more, which):
    cause = {
        "cpu_ratio": "workers_cpu_bound",
        "blocked_ratio": "workers_io_bound",
        "runnable_ratio": "workers_throttled",
    }[which]
    piece = with_workers(busy=busy, cpu=cpu, runnable=runnable, blocked=blocked, **STARVED)
    if steady_cause(gather([piece])) != cause:
        return
    grown = dataclasses.replace(piece.workers, **{which: getattr(piece.workers, which) + more})
    assert steady_cause(gather([dataclasses.replace(piece, workers=grown)])) == cause


GROWS = {
    "checkpoint": "checkpoint",
    "gc_pause": "garbage",
    "host_bound": "gpu_idle",
    "gpu_throttled": "gpu_slowed",
    "worker_startup": "edge_wait",
    "batch_transfer": "moved",
    "uneven_batches": "late",
    "worker_stuck": "long_fetches",
}
"""By cause, what its evidence is more of."""


@given(st.sampled_from(sorted(GROWS)), st.lists(slices, min_size=1, max_size=3), st.floats(0.0, 1e5))
@settings(max_examples=500, deadline=None)
def test_nor_does_more_of_what_else_a_cause_is_told_by(cause, pieces, more):
    """The case in which it is named, and whatever else there may be."""
    of_it = next(piece for case, piece in CASES.items() if case.partition(",")[0] == cause)
    for evidence in (gather([of_it]), gather(pieces)):
        lost = costs(evidence)
        if not lost or max(lost, key=lost.get) != cause:
            continue
        field = GROWS[cause]
        seen = getattr(evidence, field)
        then = (*seen, more) if isinstance(seen, tuple) else (seen or 0.0) + more
        grown = costs(dataclasses.replace(evidence, **{field: then}))
        assert max(grown.values()) == grown[cause]


@given(st.floats(0.01, 0.99), st.floats(0.0, 0.5))
def test_more_waiting_never_closes_a_stall(share, more):
    machine = StallMachine(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", wait=share, compute=1 - share))
    was_open = machine.stall is not None
    worse = min(0.99, share + more)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", wait=worse, compute=1 - worse))
    assert not was_open or machine.stall is not None


# -- across ranks, and what adds up ------------------------------------------------------------------------------------


def test_who_holds_up_ranks_that_are_stuck():
    here, there = (pace(rank, still=30.0, still_in_sync=True) for rank in (0, 1))
    elsewhere, for_data = pace(2, still=29.0), pace(3, still=28.0, compute=0.0, exposed=1.0)
    assert held_up_by(here, [there, elsewhere]) == elsewhere
    assert held_up_by(here, [there, for_data]) == for_data
    assert held_up_by(here, [there]) is None  # all have come: the network, or a rank of another node
    assert held_up_by(elsewhere, [here, there]) is None
    assert held_up_by(here, [pace(4, still=1.0)]) is None  # it goes on


@given(st.lists(slices, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_what_is_waited_for_in_mid_epoch_is_in_some_cause_and_only_once(pieces):
    evidence = gather(pieces)
    plain = dataclasses.replace(evidence, checkpoint=0.0, garbage=0.0, gpu_idle=None, gpu_slowed=None, peers=())
    if not plain.exposed or not plain.wait:
        return
    kept = plain.edges >= 2 or plain.source != "workers"
    expected = plain.exposed if kept else plain.exposed * (1 - min(1.0, plain.edge_wait / plain.wait))
    expected += crowded_out(plain)
    assert sum(costs(plain).values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_batch_on_its_way_while_there_is_no_core_adds_to_late_ones_for_want_of_cores():
    piece = with_workers(
        busy=0.8, cpu=0.05, runnable=0.7, blocked=0.05, late=0.3, moved=0.3, fetches=20, own_runnable=0.5, cores=8.0,
        **STARVED,
    )  # fmt: skip
    assert costs(gather([piece])) == pytest.approx({"workers_throttled": 0.45, "batch_transfer": 0.15})
