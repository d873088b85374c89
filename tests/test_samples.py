"""Samples and tokens that the training took: every batch of it, none that was prefetched, evaluated or thrown away."""

from __future__ import annotations

import time
import traceback
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import telemetry
from telemetry.hooks.batches import FetchedSamples, tokens_in
from telemetry.hooks.worker import timed_fetch
from telemetry.hooks.worker_block import UNKNOWN_COUNT, WorkerBlock
from telemetry.report.logs import load
from tests.report_logs import summarize

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

# -- loaders whose batches have uneven numbers of tokens, and a script that counts them ----------------------------


def length_of(index: int) -> int:
    """Tokens of an item: 1 to 23."""
    return 1 + index * 7 % 23


class Texts(Dataset):
    def __init__(self, size: int = 60, fail_at: int = -1) -> None:
        self.size = size
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise ValueError(index)
        return torch.arange(length_of(int(index)))


class Stream(IterableDataset):
    """The same items, dealt to the workers in turn; ``first_more``: the first worker has all but six of each other."""

    def __init__(self, size: int = 60, *, first_more: bool = False) -> None:
        self.size = size
        self.first_more = first_more

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        mine = range(worker, self.size, workers)
        if self.first_more and workers > 1:
            mine = range(6 * worker, 6 * worker + 6) if worker else range(6 * workers, self.size)
        return (torch.arange(length_of(index)) for index in mine)


class Seedable(RandomSampler):
    """As accelerate's."""


class Sharded(BatchSampler):
    """As accelerate's."""


class Uneven(BatchSampler):
    def __iter__(self):
        yield from ([0, 1, 2], (3,), range(4, 6), torch.tensor([6, 7, 8, 9]), np.array([10]))


def packed(items):
    """A batch whose first dimension is not the samples. The script is told their number."""
    return {"input_ids": torch.cat(list(items)).unsqueeze(0), "count": len(items)}


class Trainer:
    """A loop that counts what it trains on."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.samples = self.tokens = 0

    def step(self, *batches) -> None:
        self.weight.sum().backward()
        self.optimizer.step()
        for batch in batches:
            self.samples += batch["count"]
            self.tokens += batch["input_ids"].numel()

    def train(self, loader, epochs: int = 1, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for number, batch in enumerate(loader, 1):
                self.step(batch)
                if number == stop_after:
                    break

    @property
    def counts(self) -> tuple[int, int]:
        return self.samples, self.tokens


@pytest.fixture
def counted(run):
    """The samples and tokens of the run, which it ends."""

    def ended() -> tuple[int | None, int | None]:
        rank = run()
        return rank["samples"], rank["tokens"]

    return ended


def loader_of(data: Dataset, batch_size: int | None = 4, workers: int = 0, **settings) -> DataLoader:
    if batch_size is not None:
        settings["batch_size"] = batch_size
    return DataLoader(data, num_workers=workers, collate_fn=packed, **settings)


TEXTS = Texts()
LOADERS = {
    "plain": {"data": TEXTS, "batch_size": 8},
    "without the last": {"data": TEXTS, "batch_size": 8, "drop_last": True, "shuffle": True},
    "torch's subset": {"data": TEXTS, "sampler": SubsetRandomSampler(range(17))},
    "torch's shard": {"data": TEXTS, "sampler": DistributedSampler(TEXTS, num_replicas=3, rank=1)},
    "stream": {"data": Stream()},
    "stream without the last": {"data": Stream(), "batch_size": 7, "drop_last": True},
    "sampler": {"data": TEXTS, "sampler": Seedable(TEXTS)},
    "batch sampler": {"data": TEXTS, "batch_size": None, "batch_sampler": Sharded(SequentialSampler(TEXTS), 4, False)},
    "uneven": {"data": TEXTS, "batch_size": None, "batch_sampler": Uneven(SequentialSampler(TEXTS), 3, False)},
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("workers", "kept"), [(0, False), (2, False), (2, True)])
def test_counts_are_those_that_the_script_trained_on(counted, workers, kept, kind):
    """Epochs with a shorter last batch, one that is left while others are prefetched, and again a whole one."""
    trainer, loader = Trainer(), loader_of(workers=workers, persistent_workers=kept, **LOADERS[kind])
    trainer.train(loader, epochs=2)
    trainer.train(loader, stop_after=2)
    trainer.train(loader)
    assert counted() == trainer.counts


@pytest.mark.parametrize(("stop_after", "known"), [(9, True), (None, False)])
def test_a_stream_whose_workers_end_at_different_times_is_unknown_from_then_on(counted, stop_after, known):
    """Nothing tells which worker has made the batches after the first end. Before it, all is known."""
    trainer = Trainer()
    trainer.train(loader_of(Stream(90, first_more=True), 2, workers=3), stop_after=stop_after)
    assert counted() == (trainer.counts if known else (None, None))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fetch_that_raises_takes_nothing_from_others(counted, workers):
    trainer = Trainer()
    sampler = Sharded(SequentialSampler(TEXTS), 3, False)
    batches = iter(loader_of(Texts(fail_at=9), None, workers, batch_sampler=sampler))
    while True:
        try:
            trainer.step(next(batches))
        except StopIteration:
            break
        except ValueError:
            continue
    assert trainer.samples == 57
    assert counted() == trainer.counts


@pytest.mark.parametrize("data", [Texts(33), Stream(33)], ids=["items", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_do_not_count(counted, workers, data):
    trainer = Trainer()
    for number, batch in enumerate(loader_of(type(data)(60), 2, workers)):
        trainer.step(batch)
        if number % 10 == 5:
            with torch.no_grad():
                list(loader_of(data, 5, workers))
    assert counted() == trainer.counts


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_thrown_away_after_a_restart_do_not_count(counted, workers):
    trainer = Trainer()
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    for number, batch in enumerate(loader_of(Texts(400), 4, workers)):
        if number < 60:
            continue
        trainer.step(batch)
        time.sleep(0.05)  # much longer than a busy machine holds up a batch that is thrown away
    assert counted() == trainer.counts


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_asked_in_turn(counted, workers):
    trainer = Trainer()
    for batches in zip(loader_of(Texts(40), 4, workers), loader_of(Texts(30), 3, workers), strict=True):
        trainer.step(*batches)
    assert counted() == trainer.counts


@pytest.mark.parametrize("stop_after", [6, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_goes_on_from_a_state(counted, workers, stop_after):
    def loader():
        return StatefulDataLoader(Texts(), 3, num_workers=workers, collate_fn=packed)

    trainer, first = Trainer(), loader()
    trainer.train(first, stop_after=stop_after)
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    trainer.train(second, epochs=2)
    assert counted() == trainer.counts


# -- what is not known is absent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_that_began_before_the_agent_is_unknown(tmp_path, workers):
    trainer, batches = Trainer(), iter(loader_of(Stream(), workers=workers))
    trainer.step(next(batches))
    telemetry.start(tmp_path, port="off", interval_seconds=0.1, start_line=False)
    for batch in batches:
        trainer.step(batch)
    telemetry.stop()
    (rank,) = summarize(load(tmp_path))["ranks"]
    assert rank["samples"] is None


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_batch_size_samples_are_unknown_and_tokens_are_not(counted, workers):
    """Nothing tells whether the first dimension is that of the samples. One such batch makes the sum unknown."""
    trainer = Trainer()
    trainer.train(loader_of(Texts(50), 8))
    trainer.train(DataLoader([packed([torch.arange(3 + n)]) for n in range(9)], batch_size=None, num_workers=workers))
    assert counted() == (None, trainer.tokens)


def test_batches_without_input_ids_have_no_tokens(counted):
    trainer = Trainer()
    for (_,) in DataLoader(TensorDataset(torch.zeros(50, 4)), 5, num_workers=2):
        trainer.step()
    assert counted() == (50, None)


def test_batches_out_of_order_are_not_guessed(counted):
    trainer = Trainer()
    trainer.train(loader_of(Texts(), workers=2, in_order=False))
    assert counted() == (60, None)


class Rare(Texts):
    """Items of which those from ``first`` on have tokens."""

    def __init__(self, size: int, first: int) -> None:
        super().__init__(size)
        self.first = first

    def __getitem__(self, index: int):
        return {"input_ids" if index >= self.first else "pixels": torch.zeros(1, 3, dtype=torch.long)}


@pytest.mark.parametrize(("first", "tokens"), [(0, 3 * 80), (5, 3 * 75), (81, None), (70, None)])
def test_a_worker_that_finds_no_tokens_looks_no_more(counted, first, tokens):
    """Each of the two workers looks at 16 batches. What it has not looked at is not counted as none."""
    trainer = Trainer()
    for _ in DataLoader(Rare(80, first), batch_size=None, num_workers=2):
        trainer.step()
    assert counted() == (None, tokens)


def test_only_what_a_worker_has_noted_is_known():
    block = WorkerBlock(2)
    assert block.counts(1, 0, 1) == (None, None), "no worker has begun"
    for worker in range(2):
        block.counters(worker).epoch = 1
        for fetch in range(3):
            block.note_batch(worker, fetch, 1 + worker, UNKNOWN_COUNT if fetch == 2 else 10)
    assert block.counts(1, 0, 1) == (1, 10)
    assert block.counts(1, 0, 4) == (6, 40)
    assert block.counts(1, 1, 3) == (5, 30)
    assert block.counts(1, 0, 4, first_worker=1) == (6, 40)
    assert block.counts(1, 0, 1, first_worker=1) == (2, 10)
    assert block.counts(1, 0, 6) == (9, None)
    assert block.counts(1, 0, 7) == (None, None), "the last one is not made yet"
    assert block.counts(2, 0, 1) == (None, None), "no worker has begun that iteration"
    for fetch in range(3, block.kept_batches + 3):
        block.note_batch(0, fetch, 1, 10)
    assert block.counts(1, 0, 1) == (None, None), "a later batch has its place by now"
    assert block.counts(1, 2 * block.kept_batches, 1) == (1, 10)
    block.note_batch(1, block.kept_batches - 1, 1, 10)
    block.note_batch(1, block.kept_batches, 1, 10)
    assert block.counts(1, 2 * block.kept_batches - 2, 4) == (4, 40), "the places begin anew in between"


def test_a_worker_without_a_batch_in_an_iteration_keeps_its_place():
    """Its first fetch of the third iteration is not taken for one of the second."""
    block = WorkerBlock(2)
    block.counters(0).pid = block.counters(1).pid = 1  # as in workers that have begun

    class Fetcher:
        pass

    fetches = [timed_fetch(lambda *_: None, block, worker, None) for worker in range(2)]
    for workers in ((0, 1), (0,), (0, 1)):
        fetcher = Fetcher()
        for worker in workers:
            fetches[worker](fetcher, None)
        block.head.iteration += 1
    assert [counters.epoch for counters in block.read()] == [3, 3]
    assert [tuple(counters.epoch_began[1:4]) for counters in block.read()] == [(0, 1, 2), (0, 1, 1)]


# -- what a batch has ----------------------------------------------------------------------------------------------

IDS = torch.zeros(3, 5, dtype=torch.long)


class Secret:
    """Not to be looked into."""

    def __getattr__(self, name: str):
        raise AssertionError(name)


class Computed:
    @property
    def input_ids(self):
        raise AssertionError("computed")


class OwnGet(dict):
    def __getitem__(self, key):
        raise AssertionError(key)

    get = keys = items = values = __iter__ = __contains__ = __getitem__


BATCHES = {
    "mapping": ({"input_ids": IDS}, 15),
    "other ids": ({"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": IDS}, 15),
    "int32": ({"input_ids": IDS.int()}, 15),
    "array": ({"input_ids": np.zeros((2, 4), np.int32)}, 8),
    "UserDict": (UserDict(input_ids=IDS), 15),
    "class of mappings": (OwnGet(input_ids=IDS), 15),
    "object": (SimpleNamespace(input_ids=IDS), 15),
    "list": ([{"input_ids": IDS}, {"input_ids": IDS[:1]}], 20),
    "tuple": ((UserDict(input_ids=IDS), torch.zeros(3)), 15),
    "tuple with an unknown object": ((Secret(), {"input_ids": IDS}), 15),
    "two mappings": ({"query": {"input_ids": IDS}, "document": {"input_ids": IDS}}, 30),
    "mapping in a mapping": ({"text": UserDict(input_ids=IDS), "n": 3}, 15),
    "too deep in a list": ([[{"input_ids": IDS}]], 0),
    "too deep in a mapping": ({"a": {"b": {"input_ids": IDS}}}, 0),
    "tensors": ([IDS, IDS], 0),
    "tensor": (IDS, 0),
    "other names": ({"x": IDS}, 0),
    "empty": ([], 0),
    "number": (7, 0),
    "none": (None, 0),
    "floats": ({"input_ids": IDS.float()}, None),
    "booleans": ({"input_ids": IDS.bool()}, None),
    "lists of numbers": ({"input_ids": [[1, 2], [3]]}, None),
    "an unknown object inside": ({"input_ids": Secret()}, None),
    "an unknown object": (Secret(), None),
    "computed": (Computed(), None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_are_the_positions_of_input_ids(name):
    batch, tokens = BATCHES[name]
    assert tokens_in(batch) == tokens


class OwnLength(list):
    def __len__(self) -> int:
        raise AssertionError("a method of the user's")


@pytest.mark.parametrize(
    ("indices", "samples"),
    [
        ([1, 2], 2), ((), 0), (np.zeros((3, 2)), 3), (torch.tensor(4), None), ({1, 2}, None), ("ab", None), (7, None),
        (OwnLength([1]), None),
    ],
    ids=str,
)  # fmt: skip
def test_samples_of_indices(indices, samples):
    assert FetchedSamples(stream=False).of(indices) == samples


# -- the script notices nothing ------------------------------------------------------------------------------------


def broken(items):
    raise KeyError("in the collate function")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_traceback_does_not_show_us(counted, workers):
    with pytest.raises(KeyError) as caught:
        list(DataLoader(Stream(), 4, num_workers=workers, collate_fn=broken))
    text = "".join(traceback.format_exception(caught.value))
    assert "noting" not in text
    assert "telemetry" not in text.replace(str(Path(__file__).parent), "")
    counted()


@pytest.mark.parametrize("data", [Texts(), Stream()], ids=["items", "stream"])
def test_after_the_agent_loaders_are_as_they_were(counted, data):
    loader = loader_of(data)
    Trainer().train(loader)
    counted()
    iterator = iter(loader)
    next(iterator)
    assert "fetch" not in vars(iterator._dataset_fetcher)
    assert iterator._dataset_fetcher.collate_fn is packed


# -- tokens that the script tells ----------------------------------------------------------------------------------


def test_tokens_that_the_script_tells_count_instead_of_those_of_its_batches(counted):
    trainer = Trainer()
    for batch in loader_of(Texts(50), 10):
        trainer.step(batch)
        telemetry.tokens(np.int64(128))
    with torch.no_grad():
        for _ in loader_of(Texts(50), 10):
            telemetry.tokens(1000)
    with telemetry.phase("checkpoint"):
        telemetry.tokens(1000)
    assert counted() == (50, 5 * 128)


@pytest.mark.parametrize(
    ("wrong", "kind"), [(1.5, TypeError), (True, TypeError), (torch.tensor(3), TypeError), (-1, ValueError)]
)
def test_tokens_are_a_whole_number(counted, wrong, kind):
    with pytest.raises(kind, match="tokens are"):
        telemetry.tokens(wrong)
