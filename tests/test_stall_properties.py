"""Properties of the stall detector that hold for any input."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.diagnosis.advice import WORTH_IT, advise
from telemetry.diagnosis.causes import costs
from telemetry.diagnosis.stragglers import held_up_by
from telemetry.records import CAUSES
from tests.slice_cases import CASES, STARVED, a_slice, pace, slices, with_workers
from tests.slices import Detector, evidence_over


@given(st.lists(slices, min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_anything(pieces):
    machine = Detector(30, 0.2, 0.1)
    for part in pieces:
        change = machine.update(part)
        if change is not None:
            assert change.stall.cause in CAUSES
            assert change.stall.exposed_ratio is None or 0 <= change.stall.exposed_ratio <= 1
    evidence = evidence_over(pieces)
    assert set(costs(evidence)) <= set(CAUSES)
    for cause in CAUSES:
        for advice in advise(cause, evidence):
            gain = advice.predicted_speedup
            assert gain is None or (gain >= WORTH_IT and not math.isnan(gain))


def costliest(part):
    lost = costs(evidence_over([part]))
    return max(lost, key=lambda cause: lost[cause])


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
    part = with_workers(busy=busy, cpu=cpu, runnable=runnable, blocked=blocked, **STARVED)
    if costliest(part) != cause:
        return
    grown = dataclasses.replace(part.workers, **{which: getattr(part.workers, which) + more})
    assert costliest(dataclasses.replace(part, workers=grown)) == cause


GROWS = {
    "checkpoint": "checkpoint_seconds",
    "gc_pause": "garbage_seconds",
    "host_bound": "gpu_idle_seconds",
    "gpu_throttled": "gpu_slowed_seconds",
    "worker_startup": "edge_wait_seconds",
    "batch_transfer": "transfer_wait_seconds",
    "uneven_batches": "fetch_wait_seconds",
    "worker_stuck": "long_fetches",
}
"""By cause, what its evidence is more of."""


@given(st.sampled_from(sorted(GROWS)), st.lists(slices, min_size=1, max_size=3), st.floats(0.0, 1e5))
@settings(max_examples=500, deadline=None)
def test_nor_does_more_of_what_else_a_cause_is_told_by(cause, pieces, more):
    """The case in which it is named, and whatever else there may be."""
    of_it = next(part for case, part in CASES.items() if case.partition(",")[0] == cause)
    for evidence in (evidence_over([of_it]), evidence_over(pieces)):
        lost = costs(evidence)
        if not lost or max(lost, key=lost.get) != cause:
            continue
        seen = getattr(evidence, GROWS[cause])
        then = (*seen, more) if isinstance(seen, tuple) else (seen or 0.0) + more
        grown = costs(dataclasses.replace(evidence, **{GROWS[cause]: then}))
        assert max(grown.values()) == grown[cause]


@given(st.floats(0.01, 0.99), st.floats(0.0, 0.5))
def test_more_waiting_never_closes_a_stall(share, more):
    machine = Detector(30, 0.2, 0.1)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", wait=share, compute=1 - share))
    was_open = machine.stall is not None
    worse = min(0.99, share + more)
    for _ in range(40):
        machine.update(a_slice(source="training_thread", wait=worse, compute=1 - worse))
    assert not was_open or machine.stall is not None


# -- across ranks, and what adds up ------------------------------------------------------------------------------------


def test_who_holds_up_ranks_that_are_stuck():
    here, there = (pace(rank, seconds_without_step=30.0, waits_for_ranks=True) for rank in (0, 1))
    elsewhere, for_data = (
        pace(2, seconds_without_step=29.0),
        pace(3, seconds_without_step=28.0, compute=0.0, exposed=1.0),
    )
    assert held_up_by(here, [there, elsewhere]) == elsewhere
    assert held_up_by(here, [there, for_data]) == for_data
    assert held_up_by(here, [there]) is None  # all have come: the network, or a rank of another node
    assert held_up_by(elsewhere, [here, there]) is None
    assert held_up_by(here, [pace(4, seconds_without_step=1.0)]) is None  # it goes on
