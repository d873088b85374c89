"""What the training thread does itself between two batches: the sampler, receiving, freeing, garbage collections."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.diagnosis.evidence import aggregate
from telemetry.model.totals import StackTotals, Tick, Totals
from telemetry.util.clock import now_ns
from tests.data_sets import Numbers
from tests.sampled_thread import often, sampled

# -- by the samples of its stack ---------------------------------------------------------------------------------------

SLEEP = 0.03


class Slow:
    """A batch sampler that is slow for each batch, at the start of an epoch, or not."""

    def __init__(self, batches: int = 1_000_000, *, each: float = 0.0, start: float = 0.0) -> None:
        self.batches, self.each, self.start = batches, each, start

    def __iter__(self):
        time.sleep(self.start)
        return self._each()

    def _each(self):
        for number in range(self.batches):
            if self.each:
                time.sleep(self.each)
            yield [number]

    def __len__(self) -> int:
        return self.batches


class Tensors(Dataset):
    """Items of many small tensors in shared memory, which take long to receive and to free."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.ones(1) for _ in range(200)]


def as_it_is(batch):
    return batch


def loader(sampler, data=None, **settings) -> DataLoader:
    settings = dict(num_workers=1, multiprocessing_context="fork") | settings
    return DataLoader(data or Numbers(1 << 40), batch_sampler=sampler, **settings)


RUN: dict = {}
exec(
    compile("def as_the_command(script): script()", str(Path(telemetry.__file__).with_name("__main__.py")), "exec"), RUN
)


@pytest.fixture
def seen(observed, monkeypatch):
    """What samples show of loops over loaders, once there are so many of a kind of work."""
    often(monkeypatch)

    def of(batches, kind: str, samples: int = 200, *, step: float = 0.001):
        torch.set_num_threads(1)
        with sampled(observed.tracker) as made:

            def loops() -> None:
                until = time.monotonic() + 60
                while (kind not in made.run or made.run[kind].samples < samples) and time.monotonic() < until:
                    for batch in batches():
                        assert batch is not None
                        time.sleep(step)
                        if kind in made.run and made.run[kind].samples >= samples:
                            break

            RUN["as_the_command"](loops)
        observed.read()
        return made.seen

    return of


def test_the_sampler_is_a_part_of_the_waits_for_workers(seen):
    slow = seen(lambda: loader(Slow(each=SLEEP)), "wait")
    assert slow.sampler > 0.5 * slow.wait
    assert slow.sampler_cpu < 0.4 * slow.sampler, "it sleeps"
    quick = seen(lambda: loader(Slow(), Numbers(1 << 40, seconds=SLEEP)), "wait")
    assert quick.sampler < 0.1 * quick.wait
    assert quick.wait_cpu < 0.4 * quick.wait


@pytest.mark.parametrize("persistent", [False, True])
def test_the_sampler_is_seen_where_later_epochs_begin(seen, persistent):
    batches = loader(Slow(3, start=4 * SLEEP), persistent_workers=persistent)
    found = seen(lambda: batches, "wait", 100)
    assert found.boundary_sampler > 0.3 * found.boundary
    assert found.boundary_sampler_cpu < 0.4 * found.boundary_sampler
    assert found.sampler < found.boundary_sampler / 4, "its start is at the boundaries"


def test_receiving_takes_cpu_and_freeing_a_part_of_the_compute(seen):
    """Tensors are mapped in ``next()``, and freed by the statement that asks for the batch after."""
    found = seen(lambda: (batch for batch in loader(Slow(), Tensors(), collate_fn=as_it_is)), "step", 80)
    assert found.wait_cpu > 0.2 * found.wait
    assert found.sampler < 0.1 * found.wait
    assert found.freeing > 0.2 * found.step
    small = seen(lambda: loader(Slow(), Numbers(1 << 40)), "step", 80, step=0.005)
    assert small.freeing < 0.1 * small.step


def test_they_are_figures_of_a_window():
    """Of ten waits of 100 ms in mid-epoch, and one at a boundary, that garbage collections were no part of."""
    stacks = StackTotals(
        step=10_000, freeing=3_000, wait=1_000, wait_cpu=700, sampler=500, sampler_cpu=400,
        boundary=200, boundary_sampler=50, boundary_sampler_cpu=50,
    )  # fmt: skip
    before = Totals()
    after = Totals(
        wall_seconds=4.0, steps=10, batches=10, ledger_seconds={"data_wait": 2.0, "compute": 2.0}, stacks=stacks
    )
    evidence = aggregate([Tick(before), Tick(after)])
    assert evidence.sampler_seconds == pytest.approx(1.0)
    assert evidence.receiving_cpu_seconds == pytest.approx(0.06)
    assert evidence.freeing_seconds == pytest.approx(0.06)
    assert evidence.sampler_cpu_ratio == pytest.approx(450 / 550)
    evidence = aggregate([Tick(before), Tick(before)])
    assert evidence.sampler_seconds is evidence.freeing_seconds is evidence.receiving_cpu_seconds is None


# -- garbage collections, timed where they delay a step ----------------------------------------------------------------


def test_a_collection_in_a_step_is_counted_with_what_the_callback_costs(observed):
    gc.collect()
    assert observed.garbage.ns == 0, "starting up"
    loop = iter(DataLoader(Numbers(4), batch_size=1))
    next(loop)
    start = time.perf_counter_ns()
    gc.collect()
    assert 0 < observed.garbage.ns < time.perf_counter_ns() - start
    assert observed.garbage.wait_ns == 0
    cost = observed.garbage.cost_ns
    assert cost > 0
    assert observed.garbage.cost_ns == cost, "once"
    before = observed.garbage.ns
    with torch.no_grad():
        next(iter(DataLoader(Numbers(4), batch_size=1)))
        gc.collect()
    assert observed.garbage.ns == before, "an evaluation"


class Collects(Numbers):
    """Collects as it is read, and between."""

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_a_collection_in_a_wait_is_a_part_of_it(observed, small_heap):
    data = DataLoader(Collects(6), batch_size=1)
    list(data)
    garbage = observed.garbage
    assert 0 < garbage.wait_ns == garbage.ns
    assert garbage.boundary_wait_ns == 0
    next(iter(data))
    assert observed.garbage.boundary_wait_ns == garbage.ns - garbage.wait_ns > 0
    assert garbage.ns <= observed.read().ns["data_wait"]


def test_a_collection_on_another_thread_is_none_of_the_training(observed):
    next(iter(DataLoader(Numbers(4), batch_size=1)))
    before = observed.garbage.ns
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert observed.garbage.ns == before


def test_when_a_collection_has_ended_is_known(observed, small_heap):
    next(iter(DataLoader(Numbers(4), batch_size=1)))
    heap, stamps = [[number] for number in range(100_000)], [now_ns()]
    for _ in range(2):
        gc.collect()
        stamps.append(now_ns())
    before, between, after = stamps
    ended_within = observed.tracker.garbage.ended_within
    assert before < ended_within(before, between) < between < ended_within(before, after) < after
    assert ended_within(after, now_ns()) == 0
    assert heap


def test_the_callback_goes_with_the_hooks(observed):
    ours = [one for one in gc.callbacks if "GarbageClock" in repr(one)]
    assert len(ours) == 1
    observed.attachment.detach()
    assert not any(one in gc.callbacks for one in ours)
