"""The difference of two totals: field by field, whatever a field is."""

from __future__ import annotations

from telemetry.records import Deliveries, EpochTotals, Sampled, SampledTotals, Totals, WorkerTotals


def test_counters_are_subtracted_in_every_group():
    oldest = Totals(
        steps=3, ledger_seconds={"compute": 1.0}, epochs=EpochTotals(boundaries=1), fetch_counts=(1, 2),
        deliveries=Deliveries(batches=4, head_of_line_worker_seconds={0: 0.5}),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(0.5, 1.0))),
    )  # fmt: skip
    newest = Totals(
        steps=5, ledger_seconds={"compute": 4.0, "other": 2.0}, epochs=EpochTotals(boundaries=1, left=2), fetch_counts=(1, 5),
        deliveries=Deliveries(batches=9, head_of_line_worker_seconds={0: 0.75, 1: 1.0}),
        sampled=SampledTotals(workers=WorkerTotals(busy_ratio=Sampled(2.5, 5.0))),
    )  # fmt: skip
    added = newest - oldest
    assert (added.steps, added.ledger_seconds, added.epochs) == (2, {"compute": 3.0, "other": 2.0}, EpochTotals(left=2))
    assert added.fetch_counts == (0, 3)
    assert added.deliveries == Deliveries(batches=5, head_of_line_worker_seconds={0: 0.25, 1: 1.0})
    assert added.sampled.workers.busy_ratio.mean == 0.5


def test_what_one_end_does_not_tell_the_difference_does_not_tell():
    known, unknown = Totals(exposed_wait_seconds=2.0), Totals(exposed_wait_seconds=None)
    assert (known - Totals()).exposed_wait_seconds == 2.0
    assert (unknown - known).exposed_wait_seconds is None
    assert (known - unknown).exposed_wait_seconds is None
    assert (unknown - unknown).exposed_wait_seconds is None


def test_a_value_that_was_never_known_has_no_mean():
    assert (Sampled().plus(None, 1.0).mean, Sampled().plus(None, 1.0).known) == (None, None)
    assert Sampled().plus(0.5, 1.0).plus(None, 5.0).plus(1.0, 3.0).mean == 0.875


def test_a_rounding_difference_is_not_a_sample():
    """After a skip, ``a - (a - b)`` differs from ``b`` by the last bit."""
    assert Sampled(3e-17, 1e-16).mean is None
    assert Sampled(3e-17, 1e-16).known is None
    assert Sampled(1.0, 2.0).mean == 0.5
