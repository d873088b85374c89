"""The fast path while the ring is full: ordinary steps are added up as they would have been booked."""

from __future__ import annotations

from telemetry.hooks.ring import CAPACITY, S_COMPUTE, S_DATA_WAIT, STEP, Ring

WAIT, STEP_NS, DROPPED = 3, 10, 5


def test_ordinary_steps_that_are_dropped_add_up():
    ring = Ring()
    for number in range(CAPACITY + DROPPED):
        ring.push(number * STEP_NS, number * STEP_NS + WAIT, STEP)
    lost = ring.lost
    assert (lost.steps, lost.batches, ring.dropped) == (DROPPED, DROPPED, DROPPED)
    assert lost.ns[S_DATA_WAIT] == DROPPED * WAIT
    assert lost.ns[S_COMPUTE] == (DROPPED - 1) * (STEP_NS - WAIT), "what follows the last wait is not known yet"
    assert sum(lost.ns) == lost.end_ns - lost.start_ns
    assert (lost.wait_ns, lost.compute_ns, lost.open, lost.opened) == (WAIT, 0, True, True)
    assert lost.last_step_ns == (CAPACITY + DROPPED - 1) * STEP_NS
    assert lost.entered_ns == lost.end_ns
    assert ring.closed == CAPACITY + DROPPED - 1


def test_the_sums_of_dropped_spans_go_into_the_ring_once_there_is_room():
    ring = Ring()
    for number in range(CAPACITY + DROPPED):
        ring.push(number * STEP_NS, number * STEP_NS + WAIT, STEP)
    lost = ring.lost
    ring.drain(CAPACITY)
    ring.push((CAPACITY + DROPPED) * STEP_NS, (CAPACITY + DROPPED) * STEP_NS + WAIT, STEP)
    (*_, gap), (*_, source) = ring.drain(CAPACITY)
    assert gap == lost == ring.lost
    assert source is None
