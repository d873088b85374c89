"""Unusual loaders are measured correctly, and what cannot be measured is absent."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.datapipes.iter import IterableWrapper

import telemetry
from telemetry.model.records import DATA_WAIT, EVALUATION
from telemetry.seams.worker import WorkerLoop
from tests.data_sets import Numbers
from tests.faults.processes import HANG, environment
from tests.loaders.observe import depth, layers
from tests.loaders.torch_cases import note
from tests.loaders.unusual_loaders import AnyAttribute, LikeALoader, RaisingAttribute, Resetting, ThreadContext

KINDS = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)


# -- workers that are threads -----------------------------------------------------------------------------------------


def test_the_wait_for_thread_workers_is_counted_and_their_fetches_are_not(agent):
    loader = DataLoader(Numbers(20), num_workers=2, multiprocessing_context=ThreadContext())
    batches = iter(loader)
    next(batches)
    (handle,) = agent.tracker.loaders.live()
    assert (handle.kind, handle.threads, handle.block) == ("workers", 2, None)
    list(batches)
    agent.accounting.update()
    assert agent.accounting.ledger.batches == 20
    assert agent.accounting.ledger.ns[DATA_WAIT] > 0
    assert layers() == {"_MapDatasetFetcher": 0, "_IterableDatasetFetcher": 0}


class Nvtx:
    @staticmethod
    def range_push(*_: str) -> None:
        """Does nothing."""

    range_pop = range_push


def be_worker_again_and_again(loop: WorkerLoop, answer) -> None:
    sys.modules["torch.cuda.nvtx"] = Nvtx  # type: ignore[assignment]
    for _ in range(5):
        loop(worker_id=0)
    answer.put([depth(kind.fetch) for kind in KINDS])


def no_loop(*, worker_id: int) -> None:
    """Stands for torch's own."""


def test_a_process_that_is_worker_after_worker_has_one_probe(observed):
    """Its fetches have the timer and the NVTX range."""
    context = multiprocessing.get_context("fork")
    loop, answer = WorkerLoop(no_loop, observed.tracker), context.Queue()
    observed.tracker.profiler_ranges.nvtx = True
    loop.begin(1)
    process = context.Process(target=be_worker_again_and_again, args=(loop, answer))
    process.start()
    assert answer.get(timeout=HANG) == [2, 2]
    process.join(HANG)
    assert layers() == {"_MapDatasetFetcher": 0, "_IterableDatasetFetcher": 0}


# -- iterators that are made in other ways ----------------------------------------------------------------------------


class SpareLoader:
    """What a library passes to torch's iterator instead of a loader."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader, self.num_workers = loader, loader.num_workers

    def __getattr__(self, name: str):
        return getattr(self._loader, name)


def a_spare_iterator():
    return torch_dataloader._MultiProcessingDataLoaderIter(SpareLoader(DataLoader(Numbers(4), num_workers=1)))


def a_data_pipe():
    return iter(DataLoader(IterableWrapper(range(4)), num_workers=1, worker_init_fn=note))


@pytest.mark.parametrize("made", [a_spare_iterator, a_data_pipe])
def test_an_iterator_that_is_made_in_another_way_is_timed(observed, made):
    iterator = made()
    assert len(list(iterator)) == 4
    (handle,) = observed.tracker.loaders.live()
    assert sum(c.fetches for c in handle.block.read()) == 4


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_detaching_puts_torch_s_worker_loop_back(observed, context):
    assert isinstance(_utils.worker._worker_loop, WorkerLoop)
    iterator = iter(DataLoader(Numbers(4), num_workers=1, multiprocessing_context=context))
    observed.attachment.detach()
    assert type(_utils.worker._worker_loop).__name__ == "function"
    assert len(list(iterator)) == 4


# -- what is watched --------------------------------------------------------------------------------------------------


class Slow(Resetting):
    def __next__(self):
        time.sleep(0.002)
        return super().__next__()


@pytest.mark.parametrize("kind", [LikeALoader, AnyAttribute, RaisingAttribute])
def test_a_source_that_looks_like_a_loader_does_not_hide_its_waits(agent, kind):
    source = type("SlowKind", (kind, Slow), {"__next__": Slow.__next__})(range(50))
    for _ in telemetry.watch(source):
        assert agent.tracker.loaders.newest().kind == "watched"
    agent.accounting.update()
    assert agent.tracker.errors == 0, agent.tracker.last_error
    assert agent.accounting.stats.steps == 50
    assert agent.accounting.ledger.ns[DATA_WAIT] >= 50 * 0.002e9


def test_what_is_watched_twice_is_timed_once(agent):
    watched = telemetry.watch(Slow())
    assert telemetry.watch(watched) is watched
    assert telemetry.watch(iterator := iter(watched)) is iterator
    for _ in telemetry.watch(x for x in watched):
        pass
    agent.accounting.update()
    assert agent.accounting.ledger.batches == 3


class Around:
    """Returns the iterator of a loader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def test_a_loader_inside_what_is_watched_is_seen_once(agent):
    watched = telemetry.watch(Around(DataLoader(Numbers(4), num_workers=1)))
    seen = []
    for batch in watched:
        seen.append(int(batch))
        (handle,) = agent.tracker.loaders.live()
        assert agent.tracker.loaders.newest() is handle
    assert seen == [0, 1, 2, 3]
    for _ in telemetry.watch(Around(DataLoader(Numbers(4)))):
        assert agent.tracker.loaders.newest().kind == "training_thread"
    agent.accounting.update()
    assert agent.accounting.ledger.batches == 8


def test_what_was_watched_goes_on_without_an_agent_and_with_the_next(tmp_path):
    first = telemetry.start(tmp_path / "first", port="off", start_line=False)
    watched, generator = telemetry.watch(Slow()), telemetry.watch(x for x in range(5))
    assert (list(watched), next(generator)) == ([1, 2, 3], 0)
    telemetry.stop()
    assert (list(watched), next(generator)) == ([1, 2, 3], 1)
    second = telemetry.start(tmp_path / "second", port="off", start_line=False)
    assert (list(watched), list(watched), list(generator)) == ([1, 2, 3], [1, 2, 3], [2, 3, 4])
    second.accounting.update()
    assert first.accounting.ledger.batches == 4
    assert second.accounting.ledger.batches == 9


def test_a_pickle_of_what_is_watched_needs_nothing_of_ours(agent, tmp_path):
    import pickle

    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps({"watched": telemetry.watch([1, 2, 3]), "iterator": telemetry.watch(iter([4, 5]))}))
    code = (
        "import pickle, sys; d = pickle.load(open(sys.argv[1], 'rb'));"
        "print(d['watched'], list(d['iterator']), [m for m in sys.modules if 'telemetry' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment(), capture_output=True, text=True)
    assert done.stdout == "[1, 2, 3] [4, 5] []\n", done.stderr


class Odd(type):
    """A class whose name is no text, so that none can be made that looks like it."""

    __name__ = property(lambda _cls: 3)


def test_an_object_that_cannot_be_wrapped_is_returned_as_it_is(agent):
    source = Odd("Source", (Resetting,), {})()
    assert telemetry.watch(source) is source
    assert agent.tracker.errors == 1


def test_a_copy_of_what_is_watched_is_watched(agent):
    import copy

    watched = telemetry.watch(Slow())
    for other in (copy.copy(watched), copy.deepcopy(watched)):
        assert type(other) is type(watched)
        assert list(other) == [1, 2, 3]
    agent.accounting.update()
    assert agent.accounting.ledger.batches == 6


def test_an_evaluation_is_known_again_by_the_object_that_is_watched(observed_loop):
    """Also if it is handed to ``watch`` again for each epoch."""
    agent, step = observed_loop
    training, evaluation = Slow(range(12)), Slow(range(12))
    for _ in range(3):
        for _ in telemetry.watch(training):
            step()
        for _ in telemetry.watch(evaluation):
            pass
    agent.accounting.update()
    assert agent.accounting.ledger.ns[EVALUATION] >= 2 * 12 * 0.002e9
    assert 36 <= agent.accounting.stats.steps <= 36 + 4, "the first batches of the first evaluation may be either"


@pytest.fixture
def observed_loop(agent):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        weight.grad = torch.ones(1)
        optimizer.step()

    return agent, step
