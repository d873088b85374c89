"""Advice for batches that are late although fetches are fast enough on average."""

from __future__ import annotations

import dataclasses

import pytest

from telemetry.diagnosis.advice import advise
from telemetry.hooks.worker_block import FETCH_BUCKETS
from telemetry.records import Histogram
from tests.advice_cases import HELD, first, uneven
from tests.slice_cases import CASES, STARVED, with_workers
from tests.slices import evidence_over


def test_persistent_workers_are_not_advised_to_who_has_them():
    part = dataclasses.replace(CASES["worker_startup"], settings={"persistent_workers": True})
    (longer,) = advise("worker_startup", evidence_over([part]))
    assert longer.setting is None
    assert longer.action.startswith("make epochs 24 times as long")
    assert longer.predicted_speedup == pytest.approx(1 / (0.45 + 0.55 / 24), rel=0.02)
    late = dataclasses.replace(part, wait=0.75, compute=0.25, near_boundaries=0.15)  # next to the edges: rare too, then
    (longer,) = advise("worker_startup", evidence_over([late]))
    assert longer.predicted_speedup == pytest.approx(1 / (0.30 + 0.70 / 45), rel=0.02)
    assert "0.1 s for batches next to them" in longer.because
    advice = first("worker_startup", CASES["worker_startup"])
    assert (advice.setting, advice.value) == ("persistent_workers", "True")
    assert advice.predicted_speedup > 1.4


def test_prefetching_covers_the_longest_fetch():
    def sample(counts):
        return Histogram(FETCH_BUCKETS, (*counts, *(0,) * (len(FETCH_BUCKETS) + 1 - len(counts))), 1.0)

    def uneven(counts):
        part = with_workers(
            busy=0.4,
            cpu=0.1,
            blocked=0.3,
            fetch_wait=0.4,
            transfer_wait=0.0,
            workers=2,
            fetches=50,
            steps=50,
            **STARVED,
        )
        return dataclasses.replace(part, workers=dataclasses.replace(part.workers, fetch_duration=sample(counts)))

    evidence = evidence_over([uneven((1,)), uneven((40, 0, 0, 0, 0, 0, 0, 0, 1))])
    assert (
        evidence.longest_fetch_seconds == FETCH_BUCKETS[8]
    )  # 268 ms, of steps of 8 ms: 34 batches of two workers ahead
    advice = advise("uneven_batches", evidence)[0]
    assert advice.setting == "prefetch_factor"
    assert 16 <= int(advice.value) <= 32
    assert advice.predicted_speedup == pytest.approx(2.5, rel=0.1)


def test_pinning_is_not_advised_to_who_has_no_gpu():
    part = CASES["batch_transfer, matched"]
    assert [a.setting for a in advise("batch_transfer", evidence_over([part]))] == [None]
    on_gpu = dataclasses.replace(part, gpu_utilization_ratio=0.5)
    assert first("batch_transfer", on_gpu).setting == "pin_memory"


def test_what_it_takes_to_free_a_batch_is_won_with_it():
    """And the core that the training thread lacks while workers pack; but pinning wins neither."""
    part = dataclasses.replace(CASES["batch_transfer, matched"], fetch_busy=0.1)
    (moved,) = advise("batch_transfer", evidence_over([part]))
    assert moved.predicted_speedup == pytest.approx(1 / 0.6, rel=0.01)
    freed = dataclasses.replace(part, release=0.06, releases=2)  # 30 ms of the 40 of compute, of steps of 100
    (advice,) = advise("batch_transfer", evidence_over([freed]))
    assert advice.predicted_speedup == pytest.approx(1 / 0.3, rel=0.01)
    assert "and 30.0 ms to be released" in advice.because
    # For 40 % of the time it has no core; half of what else runs is packing.
    workers = dataclasses.replace(part.workers, pickling_ratio=part.workers.cpu_ratio)
    crowded = dataclasses.replace(freed, workers=workers, own_runnable=0.4)
    (advice,) = advise("batch_transfer", evidence_over([crowded]))
    assert advice.predicted_speedup == pytest.approx(1 / (0.3 - 0.4 * 0.5 * 0.1), rel=0.01)
    (limited,) = advise("batch_transfer", evidence_over([dataclasses.replace(crowded, fetch_busy=2.4)]))
    assert limited.predicted_speedup == pytest.approx(1 / 0.6, rel=0.01)  # four workers make a batch every 60 ms
    on_gpu = dataclasses.replace(crowded, gpu_utilization_ratio=0.5)
    pinned, sent = advise("batch_transfer", evidence_over([on_gpu]))
    assert pinned.predicted_speedup == moved.predicted_speedup
    assert sent.predicted_speedup == advice.predicted_speedup


def test_the_bytes_of_a_pickled_batch_still_have_to_come():
    """However few objects they are in. A second has 10 steps, and 40 ms of each to move a batch."""
    part = CASES["batch_transfer, matched"]

    def sending(written: float):
        workers = dataclasses.replace(part.workers, written_bytes_per_second=written)
        return advise("batch_transfer", evidence_over([dataclasses.replace(part, workers=workers, fetches=10)]))

    (large,), (small,) = sending(3e8), sending(1e7)
    assert large.predicted_speedup == pytest.approx(100 / (60 + 9), rel=0.01)  # 30 MB each, 0.3 ns a byte
    assert "9.0 ms remain for its 30.0 MB" in large.because
    assert small.predicted_speedup == pytest.approx(100 / (60 + 0.3), rel=0.01)
    assert "remain" not in small.because
    assert sending(1e12) == ()  # nothing to win


def test_workers_of_a_loader_that_is_made_anew_are_not_kept_by_a_setting():
    part = dataclasses.replace(CASES["worker_startup"], settings={"loader_used_again": False})
    advice = first("worker_startup", part)
    assert advice.setting is None
    assert "make the DataLoader once" in advice.action
    assert advice.predicted_speedup == first("worker_startup", CASES["worker_startup"]).predicted_speedup


def handed_over_in(from_busy_seconds: float, cpu_ratio: float | None = None, **settings):
    """The same, with batches that take 2 ms to transfer from an idle worker."""
    evidence = uneven(0.06, **settings)
    cpu = evidence.worker_cpu_ratio if cpu_ratio is None else cpu_ratio
    return dataclasses.replace(
        evidence, moving_seconds=0.002, moving_from_busy_seconds=from_busy_seconds, worker_cpu_ratio=cpu
    )


def test_no_prefetching_makes_up_for_a_worker_that_is_always_slower():
    advice = advise("uneven_batches", uneven(0.4))  # a batch of it every fourth step: a step takes 100 ms
    assert [a.setting for a in advice] == ["in_order", None]
    assert "one worker takes 400.0 ms a batch" in advice[0].because
    assert "give every worker an equal share" in advice[1].action
    assert advice[0].predicted_speedup == pytest.approx(100 / (50 + 5), rel=0.01)
    as_they_come = advise("uneven_batches", uneven(0.4, in_order=False))
    assert [a.setting for a in as_they_come] == ["prefetch_factor"]


def test_what_moving_a_batch_takes_is_left_when_no_batch_is_late():
    advice = advise("uneven_batches", uneven(0.06))
    assert [(a.setting, a.predicted_speedup) for a in advice] == [
        ("prefetch_factor", pytest.approx(100 / (50 + 5), rel=0.01)),
        ("in_order", pytest.approx(100 / (50 + 5), rel=0.01)),
    ]


def test_batches_that_a_busy_worker_hands_over_late_are_shared_by_file():
    """Prefetching alone was worth 2 % for such a loader, and with files 70 %."""
    busy = handed_over_in(0.05, 0.9, sharing_strategy="file_descriptor")
    advice = advise("uneven_batches", busy)[0]
    assert advice.setting is None
    assert "set_sharing_strategy('file_system')" in advice.action
    assert "prefetch_factor=" in advice.action
    assert "takes 50.0 ms to transfer" in advice.because
    assert advice.predicted_speedup == pytest.approx(100 / (50 + 2), rel=0.01)
    for other in (
        handed_over_in(0.05, 0.2, sharing_strategy="file_descriptor"),  # the worker waits: its other thread has the GIL
        handed_over_in(0.01, 0.9, sharing_strategy="file_descriptor"),
        handed_over_in(0.05, 0.9, sharing_strategy="file_system"),
    ):
        assert advise("uneven_batches", other)[0].setting == "prefetch_factor"


def test_busier_workers_transfer_more_batches_late():
    """A step of 52 ms would find them in a fetch for nearly half of the time, and so be longer, and so find them less."""
    busy = handed_over_in(0.05)
    (ahead, _) = advise("uneven_batches", busy)
    then = 100 / ahead.predicted_speedup
    assert then == pytest.approx(52 + 48 * 25 / then, rel=0.01)  # a batch every 25 ms is what they make


def test_a_worker_that_has_hardly_fetched_is_not_called_slow():
    assert (
        slowest(
            {1: (0, 0.0), 2: (0, 0.0)},
            {1: (2, 9.0), 2: (5, 1.0), 3: (25, 45.0)},
            {1: (4, 18.0), 2: (10, 2.0), 3: (50, 90.0)},
        )
        == 1.8
    )
    assert slowest({1: (0, 0.0)}) is None


def test_a_worker_is_not_called_slow_for_one_long_fetch():
    assert slowest({1: (0, 0.0), 2: (0, 0.0)}, {1: (5, 10.0), 2: (5, 1.0)}, {1: (10, 11.0), 2: (10, 2.0)}) == 0.2


def slowest(*fetched):
    return evidence_over(
        [dataclasses.replace(HELD, workers=dataclasses.replace(HELD.workers, fetched=f)) for f in fetched]
    ).slowest_fetch_seconds


def test_kept_workers_first_finish_the_batches_of_a_left_epoch():
    short = with_workers(
        busy=0.5, cpu=0.5, fetches=10, workers=2, boundary_wait=0.6, boundaries=4, wait=0.6, compute=0.4, left=4
    )
    fetch = evidence_over([short]).fetch_seconds
    assert fetch == pytest.approx(0.1)
    assert advise("worker_startup", short_of(short, left=0))[0].predicted_speedup == pytest.approx(
        1 / (0.4 + 0.4), rel=0.01
    )
    assert advise("worker_startup", evidence_over([short])) == ()  # three fetches to an edge are as long as it is


def short_of(part, **fields):
    return evidence_over([dataclasses.replace(part, **fields)])
