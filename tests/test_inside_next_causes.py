"""The sampler and garbage collections inside ``next()``: the cause named, its evidence, the advice."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.diagnosis.advice import advise
from telemetry.diagnosis.causes import costs
from telemetry.diagnosis.evidence import RecurringCostsWatch, evidence_field
from telemetry.records import Tick
from tests.data_sets import Numbers
from tests.slice_cases import a_slice, with_workers
from tests.slices import evidence_over, next_tick

IDLE_WORKERS = dict(busy=0.1, cpu=0.1, fetches=10, workers=2, matched=10, batches=10)
SLOW_SAMPLER = dict(timed_waits=5, timed_sampler=0.25, timed_sampler_cpu=0.25, timed_receiving_cpu=0.01)
"""50 ms for each of the five batches that were timed."""


def test_a_slow_sampler_is_work_of_the_training_thread():
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **SLOW_SAMPLER, **IDLE_WORKERS)])
    assert evidence.sampler_seconds == pytest.approx(0.5)
    assert evidence.receiving_cpu_seconds == pytest.approx(0.002)
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
    no_core = dataclasses.replace(evidence, own_runnable_seconds=0.5)
    (advice,) = advise("loader_on_training_thread", no_core)
    assert "cheaper" in advice.action, "it waited in the run queue"


def test_a_sampler_that_was_not_timed_is_absent():
    evidence = evidence_over([with_workers(wait=0.6, compute=0.4, transfer_wait=0.6, **IDLE_WORKERS)])
    assert evidence.sampler_seconds is None
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
    ratios = {"boundary_ratio": pytest.approx(0.45), "sampler_boundary_ratio": pytest.approx(0.4)}
    assert {name: getattr(recurring.costs, name) for name in ratios} == ratios
    evidence = evidence_over(
        [with_workers(compute=1.0, **IDLE_WORKERS)],
        boundary_ratio=recurring.costs.boundary_ratio,
        sampler_boundary_ratio=0.4,
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
