"""Loaders of other libraries: those that read ahead on threads, and those that make torch's iterators themselves."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data import dataloader as torch_dataloader
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, SamplerWrapper

from telemetry.hooks.ring import BEGINS, S_DATA_WAIT
from telemetry.records import DATA_WAIT, EVALUATION
from tests.data_sets import Numbers

THREAD_BUFFER = """
import queue
import threading
from torch.utils.data import DataLoader


class ThreadBuffer:
    def __init__(self, src):
        self.src = src

    def __iter__(self):
        ready = queue.Queue(1)
        stopped = threading.Event()

        def fill():
            for item in self.src:
                while not stopped.is_set():
                    try:
                        ready.put([item], timeout=0.01)
                        break
                    except queue.Full:
                        pass
                if stopped.is_set():
                    return
            ready.put(None)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        try:
            while (held := ready.get()) is not None:
                yield held[0]
        finally:
            stopped.set()
            thread.join()
        return "the end"


class ThreadDataLoader(DataLoader):
    def __init__(self, dataset, repeats=1, **settings):
        super().__init__(dataset, **settings)
        self.repeats = repeats

    def __iter__(self):
        for batch in ThreadBuffer(super().__iter__()):
            for _ in range(self.repeats):
                yield batch
"""


@pytest.fixture
def monai(tmp_path, monkeypatch, observed):
    """A stand-in for MONAI, imported while the hooks are attached."""
    folder = tmp_path / "monai" / "data"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    (folder / "thread_buffer.py").write_text(THREAD_BUFFER)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "monai"}
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("monai.data.thread_buffer")
    for name in [name for name in sys.modules if name.split(".")[0] == "monai"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_waits_behind_a_thread_are_seen(monai, observed):
    loader = monai.ThreadDataLoader(Numbers(12, 0.01), batch_size=2)
    for epoch in range(1, 3):
        assert [batch.tolist()[0] for batch in loader] == list(range(0, 12, 2))
        ledger = observed.read()
        assert len(observed.steps) == 6 * epoch
        assert ledger.ns[DATA_WAIT] >= epoch * 12 * 0.01e9
    assert observed.waited_for == "read_ahead"


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_behind_a_thread_are_known(monai, observed, persistent):
    loader = monai.ThreadDataLoader(Numbers(12, 0.005), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        for batch in loader:
            assert len(batch) == 2
            (handle, *_) = observed.tracker.loaders.live()
        observed.read()
        assert observed.waited_for == "workers"
        assert [arrival.number for arrival in handle.arrivals][-6:] == list(range(6))
    assert len(observed.steps) == 12


def test_batches_that_are_yielded_twice_are_not_matched(monai, observed):
    loader = monai.ThreadDataLoader(Numbers(6), repeats=2, num_workers=1)
    for _ in loader:
        handles = observed.tracker.loaders.live()
    observed.read()
    assert len(observed.steps) == 12
    assert {arrival.epoch for handle in handles for arrival in handle.arrivals} <= {0}, "no epoch of the workers' own"


def test_its_iteration_stays_a_generator(monai, observed):
    loader = monai.ThreadDataLoader(Numbers(6), batch_size=2)
    iterator = iter(loader)
    assert isinstance(iterator, types.GeneratorType)
    assert observed.tracker.ring.head == 0, "nothing has begun before the first batch is requested"
    next(iterator)
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    buffer = iter(monai.ThreadBuffer([1, 2]))
    assert [next(buffer), next(buffer)] == [1, 2]
    with pytest.raises(StopIteration, match="the end"):
        next(buffer)
    with pytest.raises(ZeroDivisionError):
        list(monai.ThreadBuffer(1 / each for each in ())) or iter(monai.ThreadBuffer([1])).throw(ZeroDivisionError())


def test_evaluation_behind_a_thread_is_evaluation(monai, observed):
    with torch.no_grad():
        list(monai.ThreadDataLoader(Numbers(4, 0.005), batch_size=2))
    ledger = observed.read()
    assert ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert not observed.steps


def test_detaching_puts_the_generators_back(monai, observed):
    assert hasattr(monai.ThreadDataLoader.__iter__, "__wrapped__")
    observed.attachment.detach()
    assert not hasattr(monai.ThreadDataLoader.__iter__, "__wrapped__")
    assert not hasattr(monai.ThreadBuffer.__iter__, "__wrapped__")


class Source:
    """What such a loader passes to torch's iterator instead of a DataLoader: only the attributes that it reads."""

    _IterableDataset_len_called, collate_fn, drop_last, in_order = None, staticmethod(torch.tensor), False, True
    _auto_collation, _dataset_kind, generator, prefetch_factor = True, torch_dataloader._DatasetKind.Map, None, 2
    pin_memory, timeout, persistent_workers, multiprocessing_context = False, 0, False, None
    pin_memory_device = ""
    _get_shared_seed = None

    def __init__(self, dataset, workers: int) -> None:
        self.dataset, self.num_workers = dataset, workers
        self._index_sampler = [[index] for index in range(len(dataset))]

    @property
    def worker_init_fn(self):
        return None


class OwnLoader:
    """Like fastai's: no DataLoader, but it makes torch's iterators itself."""

    def __init__(self, dataset, workers: int) -> None:
        self.source = Source(dataset, workers)

    def __iter__(self):
        of = torch_dataloader
        kind = of._MultiProcessingDataLoaderIter if self.source.num_workers else of._SingleProcessDataLoaderIter
        yield from kind(self.source)


def test_workers_of_a_loader_that_makes_its_iterators_are_timed(observed):
    loader = OwnLoader(Numbers(6, 0.005), 2)
    for epoch in range(1, 3):
        for _ in loader:
            (handle, *_) = observed.tracker.loaders.live()
        ledger = observed.read()
        assert handle.block is not None
        assert sum(counters.fetches for counters in handle.block.read()) == 6
        assert [arrival.number for arrival in handle.arrivals] == list(range(6))
        assert {arrival.epoch for arrival in handle.arrivals} == {1}, "as in the workers' counters"
        assert handle.settings["loader_used_again"] is (epoch == 2)
        assert ledger.epoch_boundaries == epoch
    assert observed.waited_for == "workers"
    assert len(observed.steps) == 12


def test_starting_those_workers_is_waiting_for_data(observed):
    iterator = iter(OwnLoader(Numbers(6), 2))
    next(iterator)
    (start, end, code, loader), (first_request, *_) = observed.tracker.ring.drain(2)
    assert code & 7 == S_DATA_WAIT
    assert code & BEGINS
    assert loader is not None
    assert start < end <= first_request, "the workers are started before the first batch is requested"
    iterator.close()


def test_without_workers_such_a_loader_fetches_on_the_thread(observed):
    assert len(list(OwnLoader(Numbers(6, 0.002), 0))) == 6
    observed.read()
    assert observed.waited_for == "training_thread"
    assert len(observed.steps) == 6


@pytest.mark.parametrize("ahead", [False, True])
def test_waits_for_nodes_are_seen_once(observed, ahead):
    samples = Numbers(12, 0.01)
    node = Mapper(Batcher(SamplerWrapper(SequentialSampler(samples)), 2), lambda batch: [samples[i] for i in batch])
    loader = Loader(Prefetcher(node, prefetch_factor=2) if ahead else node)
    for epoch in range(1, 3):
        assert list(loader) == [[2 * number, 2 * number + 1] for number in range(6)]
        ledger = observed.read()
        assert len(observed.steps) == 6 * epoch
        assert ledger.ns[DATA_WAIT] >= epoch * 12 * 0.01e9 * 0.5
    assert observed.waited_for == ("read_ahead" if ahead else "watched")


class ReadsOneAhead(DataLoader):
    """Like accelerate's: it reads ahead on the training thread, where the hooks see it."""

    def __iter__(self):
        iterator = super().__iter__()
        ahead = next(iterator)
        for batch in iterator:
            yield ahead
            ahead = batch
        yield ahead


def test_reading_one_ahead_is_counted_once(observed):
    loader = ReadsOneAhead(Numbers(6, 0.005))
    assert len(list(loader)) == 6
    once = observed.read().ns[DATA_WAIT]
    assert len(observed.steps) == 6
    assert observed.attachment.watch_class(ReadsOneAhead)
    assert len(list(loader)) == 6
    again = observed.read().ns[DATA_WAIT]
    assert len(observed.steps) == 12
    assert again - once >= 6 * 0.005e9
    assert observed.tracker.requests_elsewhere == 0


class AroundALoader:
    """Like timm's: a plain object whose generator reads ``self.loader`` one batch ahead, on the training thread."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        ahead = None
        for batch in self.loader:
            if ahead is not None:
                yield ahead
            ahead = batch.float()
        yield ahead

    def __len__(self) -> int:
        return len(self.loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prefetcher_around_a_loader_is_seen(observed, workers):
    loader = AroundALoader(DataLoader(Numbers(12, 0.005), batch_size=2, num_workers=workers))
    for epoch in range(1, 3):
        assert [batch.tolist()[0] for batch in loader] == list(range(0, 12, 2))
        ledger = observed.read()
        assert len(observed.steps) == len(loader) * epoch
    assert observed.waited_for == ("workers" if workers else "training_thread")
    if not workers:
        assert ledger.ns[DATA_WAIT] >= 2 * 12 * 0.005e9


def test_evaluation_through_a_prefetcher_is_evaluation(observed):
    with torch.no_grad():
        list(AroundALoader(DataLoader(Numbers(4, 0.005), batch_size=2)))
    ledger = observed.read()
    assert ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert not observed.steps
