"""Loaders of other libraries, and batches that reach the training thread in another way than by a DataLoader."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import time
import types

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data import dataloader as torch_dataloader
from torchdata.nodes import Batcher, Loader, Mapper, Prefetcher, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import telemetry
from telemetry.log.reader import load
from telemetry.model.records import DATA_WAIT, STARTUP
from tests.data_sets import Numbers
from tests.report_logs import summarize

# -- loaders of other libraries: those that read ahead on threads, and those that make torch's iterators themselves ----


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
    repeats = 1

    def __iter__(self):
        for batch in ThreadBuffer(super().__iter__()):
            yield from [batch] * self.repeats
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
    module = importlib.import_module("monai.data.thread_buffer")
    observed.attachment.look()
    yield module
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
    loader = monai.ThreadDataLoader(Numbers(6), num_workers=1)
    loader.repeats = 2
    for _ in loader:
        (handle,) = observed.tracker.loaders.live()
    observed.read()
    assert len(observed.steps) == 12
    assert not handle.arrivals


def test_its_iteration_stays_a_generator(monai, observed):
    loader = monai.ThreadDataLoader(Numbers(6), batch_size=2)
    iterator = iter(loader)
    assert isinstance(iterator, types.GeneratorType)
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


# -- dALI's iterators, by a stand-in with their shape: threads below Python make the batches ---------------------------


PLUGIN = """
import time


class _DaliBaseIterator:
    def __init__(self, batches, seconds):
        self._batches, self._seconds, self._taken = batches, seconds, 0

    def __iter__(self):
        return self

    def _get_outputs(self):
        if self._taken == self._batches:
            self._taken = 0
            raise StopIteration
        time.sleep(self._seconds)
        self._taken += 1
        return [{"data": self._taken}]


class DALIGenericIterator(_DaliBaseIterator):
    def __init__(self, batches, seconds):
        super().__init__(batches, seconds)
        self._first_batch = None
        self._first_batch = DALIGenericIterator.__next__(self)

    def __next__(self):
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        return self._get_outputs()


class DALIClassificationIterator(DALIGenericIterator):
    def __init__(self, *args):
        super().__init__(*args)

"""


@pytest.fixture
def dali(tmp_path, monkeypatch, observed):
    """The stand-in, imported while the hooks are attached. CUDA's wheels may have brought a package ``nvidia``."""
    folder = tmp_path / "nvidia" / "dali" / "plugin" / "pytorch"
    folder.mkdir(parents=True)
    for package in (folder.parents[1], folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    nvidia = importlib.import_module("nvidia")
    monkeypatch.setattr(nvidia, "__path__", [str(tmp_path / "nvidia"), *nvidia.__path__])
    module = importlib.import_module("nvidia.dali.plugin.pytorch")
    observed.attachment.look()
    yield module
    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["DALIGenericIterator", "DALIClassificationIterator"])
def test_waits_for_its_pipeline_are_seen(dali, observed, kind):
    batches = getattr(dali, kind)(6, 0.01)
    for epoch in range(1, 3):
        assert [batch[0]["data"] for batch in batches] == [1, 2, 3, 4, 5, 6]
        ledger = observed.read()
        assert len(observed.steps) == 6 * epoch, "each batch is one step, whichever iterator asks another"
        assert ledger.ns[DATA_WAIT] >= (6 * epoch - 1) * 0.01e9
    assert observed.waited_for == "read_ahead"
    assert observed.tracker.loaders.newest().settings == {"reader": "DALI"}


def test_the_first_batch_of_a_constructor_is_startup(dali, observed):
    validation, training = dali.DALIGenericIterator(2, 0.02), dali.DALIClassificationIterator(2, 0.02)
    ledger = observed.read()
    assert (ledger.ns[DATA_WAIT], observed.tracker.batch_seen) == (0, False)
    assert ledger.ns[STARTUP] >= 0.04e9
    assert len(list(training)) == 2
    assert len(list(validation)) == 2
    observed.read()
    assert len(observed.steps) == 4


def test_a_constructor_that_raises_leaves_nothing_behind(dali, observed):
    with pytest.raises(TypeError):
        dali.DALIGenericIterator("none")
    with pytest.raises(TypeError):
        dali.DALIGenericIterator(2, "never")
    assert observed.tracker.waiting_since == 0
    assert len(list(dali.DALIGenericIterator(2, 0.0))) == 2


# -- torchdata's StatefulDataLoader, which makes its iterators and workers itself --------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def handle_of(observed):
    (handle,) = observed.tracker.loaders.live()
    return handle


@pytest.mark.parametrize("persistent", [False, True])
def test_its_workers_are_timed_and_their_start_is_data_wait(observed, persistent):
    loader = StatefulDataLoader(Numbers(12, 0.005), batch_size=2, num_workers=2, persistent_workers=persistent)
    for epoch in range(1, 3):
        for number, batch in enumerate(loader):
            assert batch.tolist() == [2 * number, 2 * number + 1]
            handle = handle_of(observed)
        ledger = observed.read()
        read = handle.block.read()
        epochs = epoch if persistent else 1
        assert [c.worker for c in read] == [0, 1]
        assert sum(c.fetches for c in read) == 6 * epochs
        assert {c.epoch for c in read} == {epochs}
        assert [a.number for a in handle.arrivals][-6:] == list(range(6)), "each has its number"
        assert ledger.ns[DATA_WAIT] > 0
        assert ledger.epoch_boundaries == epoch
    assert observed.waited_for == "workers"
    assert len(observed.steps) == 12


def test_batches_of_a_resumed_first_epoch_are_not_matched(observed):
    """The state says which worker goes on, and with which fetch."""
    first = StatefulDataLoader(Numbers(24), batch_size=2, num_workers=2)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    state = first.state_dict()
    del iterator, first
    resumed = StatefulDataLoader(Numbers(24), batch_size=2, num_workers=2, persistent_workers=True)
    resumed.load_state_dict(state)
    assert [batch.tolist()[0] for batch in resumed] == list(range(10, 24, 2))
    observed.read()
    handle = handle_of(observed)
    assert not handle.arrivals
    assert [batch.tolist()[0] for batch in resumed] == list(range(0, 24, 2))
    observed.read()
    assert [a.number for a in handle.arrivals] == list(range(12))


# -- a loader's own attributes are the user's --------------------------------------------------------------------------


# -- batches that reach the training thread another way: the verdict does not call such a run healthy ------------------


def read_on_a_thread(batches):
    """A generator that hands out what a thread of its own reads."""
    ready: queue.Queue = queue.Queue(1)

    def fill() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    yield from iter(ready.get, None)


class Threaded(DataLoader):
    """A loader that nobody knows, whose iteration reads on a thread."""

    def __iter__(self):
        yield from read_on_a_thread(super().__iter__())


class Training:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def step(self, batch) -> None:
        (self.weight * float(batch)).sum().backward()
        self.optimizer.step()


def finished(agent) -> dict:
    run_dir = agent.run_dir
    telemetry.stop()
    return summarize(load(run_dir))


def test_a_thread_behind_a_generator_is_not_called_healthy(agent):
    """The loader's iteration begins on the training thread, so a little waiting is seen; none of the rest is."""
    training = Training()
    for batch in Threaded(Numbers(20, 0.002), batch_size=None):
        training.step(batch)
    report = finished(agent)
    (rank,) = report["ranks"]
    assert rank["ledger"]["data_wait"] > 0
    assert rank["steps"] == 20
    assert rank["exposed_wait_ratio"] is None, "what was not measured is absent"
    assert report["verdict"].startswith("Not known whether this run waits for data.")
    assert "20 of 20 steps" in report["verdict"]
    assert "telemetry.watch()" in report["verdict"]


def test_going_over_to_a_thread_is_noticed(agent):
    """After ordinary epochs, whose iterator is alive still, another thread requests the batches."""
    training = Training()
    iterator = iter(DataLoader(Numbers(10_000), batch_size=None))
    for _ in range(5):
        training.step(next(iterator))
    deadline = time.monotonic() + 60
    steps = 0
    for batch in read_on_a_thread(DataLoader(Numbers(1_000_000, 0.001), batch_size=None)):
        training.step(batch)
        steps += 1
        if agent.accounting.unseen_steps >= 50 or time.monotonic() > deadline:
            break
    assert agent.accounting.unseen_steps >= 50
    report = finished(agent)
    assert report["verdict"].startswith("Not known")
    assert report["ranks"][0]["steps"] >= 50


class Pipeline:
    """Like DALI's iterators: threads below Python make the batches, and nothing of torch is in it."""

    def __init__(self, batches: int) -> None:
        self.batches, self.taken = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.batches:
            self.taken = 0
            raise StopIteration
        self.taken += 1
        return [{"data": torch.ones(1)}]


def epochs(agent, training: Training, pipeline: Pipeline, steps: int) -> None:
    """Train on it until the agent has seen that these batches come in another way, and then so many steps more."""
    deadline, known = time.monotonic() + 60, None
    while known is None or agent.tracker.optimizer_steps < known + steps:
        for batch in pipeline:
            training.step(batch[0]["data"])
        if known is None and agent.accounting.unseen_steps:
            known = agent.tracker.optimizer_steps
        assert time.monotonic() < deadline, "it was not noticed"


@pytest.mark.parametrize("before", ["nothing", "an epoch", "one batch", "an evaluation"])
def test_a_pipeline_without_torch_is_not_called_healthy(agent, before):
    """Whatever a DataLoader was used for before: statistics, a warm-up, initialising by a batch."""
    training = Training()
    loader = DataLoader(Numbers(4), batch_size=None)
    if before == "an epoch":
        for batch in loader:
            training.step(batch)
    if before == "one batch":
        training.step(next(iter(loader)))
    if before == "an evaluation":
        with torch.no_grad():
            list(loader)
    epochs(agent, training, Pipeline(50), steps=2000)
    report = finished(agent)
    assert report["ranks"][0]["steps"] >= 2000
    assert report["verdict"].startswith("Not known whether this run waits for data."), report["verdict"]
    assert "telemetry.watch()" in report["verdict"]


def test_a_few_steps_after_the_end_of_a_loop_are_no_other_batches(agent):
    """As with gradient accumulation, whose last step comes after the last batch."""
    training = Training()
    for _ in range(3):
        for batch in DataLoader(Numbers(40), batch_size=None):
            training.step(batch)
        for _ in range(3):
            training.step(batch)
        agent.accounting.update()
        agent.accounting.update()
    assert agent.accounting.unseen_steps == 0
    assert finished(agent)["ranks"][0]["steps"] == 120


def test_many_optimizer_steps_for_one_batch_are_one_step(agent):
    """No other thread requests batches, so the loop is taken to use each of them many times."""
    training = Training()
    for batch in DataLoader(Numbers(4), batch_size=None):
        for _ in range(100):
            training.step(batch)
        agent.accounting.update()
    assert agent.accounting.unseen_steps == 0
    report = finished(agent)
    assert report["ranks"][0]["steps"] == 4
    assert "Not known" not in report["verdict"]


def test_a_loader_that_iterates_in_its_own_way_can_be_watched(agent):
    training, loader = Training(), Threaded(Numbers(20, 0.005), batch_size=None)
    assert telemetry.watch(loader) is loader, "it stays a DataLoader"
    for batch in loader:
        training.step(batch)
    report = finished(agent)
    assert agent.accounting.unseen_steps == 0
    assert report["ranks"][0]["steps"] == 20
    assert report["verdict"].startswith("Starved"), report["verdict"]
    assert not hasattr(Threaded.__iter__, "__wrapped__"), "the class is as it was when the agent has stopped"
