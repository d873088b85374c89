"""Every kind of DataLoader counts, and stays what it was."""

from __future__ import annotations

import gc
import threading
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import dataloader as torch_dataloader

import telemetry
from telemetry.attach.watched import Watched
from telemetry.records import COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP


class Numbers(Dataset):
    def __init__(self, length: int = 12, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.length, self.seconds, self.fail_at = length, seconds, fail_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.fail_at:
            raise ValueError(f"no sample {index}")
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            yield from range(12)
        else:
            yield from range(worker.id, 12, worker.num_workers)


KINDS = {
    "map, no workers": dict(dataset=Numbers(), batch_size=2),
    "map, fork": dict(dataset=Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
    "map, spawn": dict(dataset=Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn"),
    "map, forkserver": dict(dataset=Numbers(), batch_size=2, num_workers=1, multiprocessing_context="forkserver"),
    "map, persistent": dict(dataset=Numbers(), batch_size=2, num_workers=2, persistent_workers=True),
    "map, no batching": dict(dataset=Numbers(6), batch_size=None),
    "iterable, no workers": dict(dataset=Stream(), batch_size=2),
    "iterable, workers": dict(dataset=Stream(), batch_size=2, num_workers=2),
    "iterable, no batching": dict(dataset=Stream(), batch_size=None, num_workers=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loader_counts(observed, kind):
    loader = DataLoader(**KINDS[kind])
    batches = 0
    for _ in range(2):
        for _ in loader:
            batches += 1
    ledger = observed.read()
    assert len(observed.steps) == ledger.batches == batches > 0
    assert ledger.category == OTHER  # the epoch is over
    assert all(0 <= step.wait_seconds <= step.seconds for step in observed.steps)
    assert ledger.ns[DATA_WAIT] > 0
    assert ledger.ns[EVALUATION] == 0


def test_worker_start_up_and_the_first_batch_are_data_wait(observed):
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=2)
    began = time.perf_counter_ns()
    iterator = iter(loader)
    next(iterator)
    took = time.perf_counter_ns() - began
    ledger = observed.read()
    # What is not waiting is our own bookkeeping and the two lines above.
    assert ledger.ns[DATA_WAIT] > 0.9 * took
    assert ledger.ns[DATA_WAIT] <= took


def test_slow_batches_are_waiting_and_slow_steps_are_compute(observed):
    for _ in DataLoader(Numbers(4, seconds=0.02), batch_size=1):
        time.sleep(0.01)
    ledger = observed.read()
    waits = sorted(step.wait_seconds for step in observed.steps)
    assert len(waits) == 4
    assert waits[0] >= 0.02
    assert all(step.seconds - step.wait_seconds >= 0.01 for step in observed.steps)
    assert ledger.ns[DATA_WAIT] >= 4 * 0.02e9
    assert ledger.ns[COMPUTE] >= 4 * 0.01e9


def test_an_iterator_alive_before_the_start_counts():
    iterator = iter(DataLoader(Numbers(6), batch_size=1))
    next(iterator)
    agent = telemetry.start(port="off", start_line=False, run_dir=None)
    try:
        rest = list(iterator)
        agent.accounts.update()
        assert len(rest) == 5
        assert agent.accounts.stats.steps == 5
    finally:
        telemetry.stop()


class SlowToBegin:
    """A batch sampler whose iteration is slow to begin."""

    def __iter__(self):
        time.sleep(0.03)
        return iter([[index] for index in range(8)])


def test_an_epoch_left_with_break_closes_its_step(observed):
    loader = DataLoader(Numbers(8), batch_sampler=SlowToBegin())
    for _ in range(3):
        for index, _ in enumerate(loader):
            if index == 1:
                break
    observed.read()
    assert observed.ledger.batches == 6
    assert len(observed.steps) == 5  # the last one is still open
    assert max(step.seconds for step in observed.steps) < 0.03  # the next epoch's beginning is in none of them
    assert observed.ledger.ns[DATA_WAIT] >= 3 * 0.03e9


def test_the_end_of_workers_that_are_left_with_break_is_data_wait(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    for _ in loader:
        left = time.perf_counter_ns()
        break
    took = time.perf_counter_ns() - left  # the next fetch, which is in progress, is not broken off
    observed.read()
    assert observed.ledger.left == 1
    assert took > 0.05e9
    assert 0.9 * took < observed.ledger.edge_wait_ns <= took


def test_asking_for_an_iterator_s_first_batch_alone_is_an_edge_each_time(observed):
    loader = DataLoader(Numbers(64), batch_size=1, num_workers=1)
    began = time.perf_counter_ns()
    for _ in range(4):
        next(iter(loader))
    took = time.perf_counter_ns() - began
    observed.read()
    assert (observed.ledger.batches, observed.ledger.edges, observed.ledger.left) == (
        4,
        3,
        4,
    )  # the first began the run
    assert observed.ledger.ns[DATA_WAIT] > 0.9 * took
    assert len(observed.steps) == 3
    assert all(step.wait_seconds > 0.9 * step.seconds for step in observed.steps)


def test_the_end_of_the_workers_of_an_evaluation_is_evaluation(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    with torch.no_grad():
        for _ in loader:
            break
    next(iter(DataLoader(Numbers(8))))
    observed.read()
    assert observed.ledger.ns[EVALUATION] > 0.1e9
    assert observed.ledger.ns[DATA_WAIT] < 0.05e9
    assert (observed.ledger.edges, observed.ledger.left) == (0, 0)


def test_another_loader_asked_for_one_batch_makes_no_edge_of_the_next_ordinary_wait(observed):
    iterator = iter(DataLoader(Numbers(64, seconds=0.05), batch_size=1))
    other = DataLoader(Numbers(4), batch_size=1, num_workers=1)
    for _ in range(3):
        next(iterator)
        began = time.perf_counter_ns()
        next(iter(other))
        took = time.perf_counter_ns() - began
    next(iterator)
    observed.read()
    assert (observed.ledger.edges, observed.ledger.left) == (3, 3)
    assert observed.ledger.edge_wait_ns > 0.5 * took
    assert observed.ledger.ns[DATA_WAIT] - observed.ledger.edge_wait_ns > 4 * 0.05e9  # the ordinary ones


def test_workers_that_garbage_collection_ends_are_of_its_time(observed):
    loader = DataLoader(Numbers(64, seconds=0.1), batch_size=1, num_workers=1)
    held = [iter(loader)]
    next(held[0])
    held.append(held)
    del held
    before = observed.tracker.garbage_ns
    gc.collect()
    observed.read()
    assert observed.tracker.garbage_ns - before > 0.05e9
    assert observed.ledger.left == 0


def test_an_exception_in_the_loop_leaves_the_state_right(observed):
    loader = DataLoader(Numbers(8), batch_size=1)
    with pytest.raises(RuntimeError, match="mine"):
        for _ in loader:
            raise RuntimeError("mine")
    list(loader)
    observed.read()
    assert observed.ledger.batches == 9
    assert len(observed.steps) == 9


def test_two_loaders_zipped_are_one_step(observed):
    first, second = (
        DataLoader(Numbers(5, seconds=0.002), batch_size=1),
        DataLoader(Numbers(5, seconds=0.002), batch_size=1),
    )
    for _ in zip(first, second):
        pass
    observed.read()
    assert len(observed.steps) == 5
    assert all(step.wait_seconds >= 0.004 for step in observed.steps)  # both waits belong to it


def test_a_short_second_loader_may_end_and_begin_again_inside_a_step(observed):
    second = DataLoader(Numbers(2), batch_size=1)
    iterator = iter(second)
    for _ in DataLoader(Numbers(5), batch_size=1):
        try:
            next(iterator)
        except StopIteration:
            iterator = iter(second)
            next(iterator)
    observed.read()
    assert len(observed.steps) == 5


def test_alternating_loaders_are_steps_of_their_own_where_the_optimizer_steps(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    iterators = [iter(DataLoader(Numbers(4), batch_size=1)) for _ in range(2)]
    for turn in range(8):
        next(iterators[turn % 2])
        weight.grad = torch.ones(1)
        optimizer.step()
    observed.read()
    assert len(observed.steps) == 7  # and one open
    assert observed.tracker.optimizer_steps == 8


@pytest.mark.parametrize("asks", [False, True])
def test_a_loader_that_joins_in_the_middle_of_a_step_adds_to_it_also_when_the_agent_has_asked_for_more(observed, asks):
    """The steps before it were on the short path, where nobody notes what the optimizer had done when they began."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    joins = iter(DataLoader(Numbers(4), batch_size=1))
    for number, _ in enumerate(DataLoader(Numbers(12), batch_size=1)):
        if number == 8:
            if asks:
                observed.tracker.time_next_batch()
            next(joins)
        weight.grad = torch.ones(1)
        optimizer.step()
    observed.read()
    assert len(observed.steps) == 12


def test_gradient_accumulation_tells_batches_from_optimizer_steps(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index, _ in enumerate(DataLoader(Numbers(12), batch_size=1)):
        weight.grad = torch.ones(1)
        if index % 4 == 3:
            optimizer.step()
    observed.read()
    assert len(observed.steps) == 12
    assert observed.tracker.optimizer_steps == 3


def test_fetches_on_another_thread_are_no_waits(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ready: list = []
    thread = threading.Thread(target=lambda: ready.extend(DataLoader(Numbers(6, seconds=0.005), batch_size=1)))
    thread.start()
    thread.join()
    for _ in ready:
        weight.grad = torch.ones(1)
        optimizer.step()
        time.sleep(0.002)
    ledger = observed.read()
    assert ledger.ns[DATA_WAIT] == 0
    assert len(observed.steps) == 5  # from one optimizer step to the next
    assert ledger.category == COMPUTE


def test_training_on_another_thread_than_the_one_that_started(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train() -> None:
        for _ in DataLoader(Numbers(6), batch_size=1):
            weight.grad = torch.ones(1)
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    observed.read()
    assert len(observed.steps) >= 5
    followed = observed.tracker.thread, observed.tracker.native_thread
    assert followed == (thread.ident, thread.native_id), "both names of it"


def test_a_loader_inside_a_dataset_is_part_of_the_outer_wait(observed):
    class Outer(IterableDataset):
        def __iter__(self):
            yield from DataLoader(Numbers(4), batch_size=2)

    assert len(list(DataLoader(Outer(), batch_size=None))) == 2
    observed.read()
    assert len(observed.steps) == 2


# -- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loader_iterated_with_gradients_off_is_evaluation(observed, mode):
    loader = DataLoader(Numbers(4), batch_size=1)
    list(loader)
    with mode():
        for _ in loader:
            time.sleep(0.005)
    list(loader)
    ledger = observed.read()
    assert len(observed.steps) == 8
    assert ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert [p.name for p in observed.phases] == [EVALUATION]


def test_evaluation_in_the_middle_of_an_epoch_is_no_part_of_the_step(observed):
    evaluation = DataLoader(Numbers(3, seconds=0.01), batch_size=1)
    for index, _ in enumerate(DataLoader(Numbers(6), batch_size=1)):
        if index == 3:
            with torch.no_grad():
                list(evaluation)
    observed.read()
    assert len(observed.steps) == 6
    assert max(step.seconds for step in observed.steps) < 0.01
    assert observed.ledger.ns[EVALUATION] >= 0.03e9


def test_evaluation_left_with_break_ends_when_training_goes_on(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index, _ in enumerate(DataLoader(Numbers(4), batch_size=1)):
        if index == 1:
            with torch.no_grad():
                for _ in DataLoader(Numbers(3), batch_size=1):
                    break
        weight.grad = torch.ones(1)
        optimizer.step()
        observed.read()
        assert observed.ledger.category == COMPUTE
        time.sleep(0.005)
    observed.read()
    assert len(observed.steps) == 4
    assert observed.ledger.ns[EVALUATION] < 0.005e9


def test_evaluation_before_training_ends_the_start_up(observed):
    observed.read()
    assert observed.ledger.category == STARTUP
    with torch.no_grad():
        list(DataLoader(Numbers(2), batch_size=1))
    observed.read()
    assert observed.ledger.category == OTHER
    assert observed.ledger.ns[EVALUATION] > 0


# -- unchanged ----------------------------------------------------------------------------------------------------


def _surface() -> dict:
    loader = DataLoader(Numbers(5), batch_size=2, num_workers=1)
    single = DataLoader(Numbers(5), batch_size=2)
    iterator = iter(loader)
    seen = {
        "type": type(iterator),
        "type of single": type(iter(single)),
        "len": (len(loader), len(iterator), len(single)),
        "attributes": sorted(vars(iterator)),
        "eager workers": all(w.is_alive() for w in iterator._workers),
        "batches": [b.tolist() for b in iterator],
        "dir": sorted(dir(loader)),
        "pickles": DataLoader.__iter__.__qualname__,
        "doc": torch_dataloader._BaseDataLoaderIter.__next__.__doc__,
    }
    del iterator
    gc.collect()
    return seen


def test_loader_and_iterator_look_as_they_did(observed):
    attached = _surface()
    observed.attachment.detach()
    assert attached == _surface()


def _trace(action) -> str:
    try:
        action()
    except BaseException:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


FAILING = {
    "dataset": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1)),
    "dataset in a worker": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1, num_workers=1)),
    "end": lambda: next(iter(DataLoader(Numbers(0), batch_size=1))),
    "loader": lambda: iter(DataLoader(Numbers(2), batch_size=1, num_workers=1, timeout=-1)),
    "save": lambda: torch.save({}, "/nowhere/at/all.pt"),
}


@pytest.mark.parametrize("what", FAILING)
def test_tracebacks_stay_as_they_were(observed, what):
    attached = _trace(FAILING[what])
    observed.attachment.detach()
    plain = _trace(FAILING[what])
    assert attached == plain


def test_a_failing_fetch_off_the_training_thread_has_its_own_traceback(observed):
    traces = []
    for attached in (True, False):
        if not attached:
            observed.attachment.detach()
        thread = threading.Thread(target=lambda: traces.append(_trace(FAILING["dataset"])))
        thread.start()
        thread.join()
    assert traces[0] == traces[1]


def test_detach_puts_everything_back():
    from torch.optim.optimizer import _global_optimizer_post_hooks

    def patched() -> tuple:
        import torch.distributed.checkpoint as dcp

        return (
            torch_dataloader._BaseDataLoaderIter.__next__,
            DataLoader.__iter__,
            torch.save,
            torch.serialization.save,
            dcp.save,
            dcp.async_save,
            dict(_global_optimizer_post_hooks),
        )

    before = patched()
    telemetry.start(port="off", start_line=False)
    assert all(a != b for a, b in zip(before, patched()))
    telemetry.stop()
    assert patched() == before


def test_a_patch_over_ours_stays(observed):
    ours = torch.save
    torch.save = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = torch.save
    try:
        assert observed.attachment.detach() == ["torch.save"]
        assert torch.save is theirs
    finally:
        torch.save = torch.serialization.save


def test_iterators_are_not_kept_alive(observed):
    loader = DataLoader(Numbers(8), batch_size=1, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    (worker,) = iterator._workers
    assert len(observed.tracker.sources.live()) == 1
    del iterator
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()
    assert not observed.tracker.sources.live()


# -- watch --------------------------------------------------------------------------------------------------------


def test_watch_times_any_iterable(agent):
    def source():
        for index in range(5):
            time.sleep(0.005)
            yield index

    assert list(telemetry.watch(source())) == list(range(5))
    agent.accounts.update()
    assert agent.accounts.stats.steps == 5
    assert agent.accounts.ledger.ns[DATA_WAIT] >= 5 * 0.005e9


def test_a_watched_iterable_behaves_as_itself(agent):
    watched = telemetry.watch([3, 1, 2])
    assert isinstance(watched, Watched)
    assert (len(watched), watched[1], watched.index(2), list(watched), list(watched)) == (3, 1, 2, [3, 1, 2], [3, 1, 2])
    iterator = iter(watched)
    assert iter(iterator) is iterator
    assert next(iterator) == 3
    generator = iter(telemetry.watch(x for x in (1, 2)))
    next(generator)
    generator.close()
    assert list(generator) == []


def test_watching_a_loader_does_not_count_twice(agent):
    loader = DataLoader(Numbers(4), batch_size=1)
    assert telemetry.watch(loader) is loader

    def outer():
        yield from DataLoader(Numbers(4), batch_size=1)

    list(telemetry.watch(outer()))
    agent.accounts.update()
    assert agent.accounts.stats.steps == 4


def test_watch_without_an_agent_is_the_iterable_itself():
    items = [1, 2]
    assert telemetry.watch(items) is items


def test_watch_needs_something_to_iterate_over(agent):
    with pytest.raises(TypeError, match="not int"):
        telemetry.watch(7)
