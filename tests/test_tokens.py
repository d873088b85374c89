"""Tokens that the agent finds by itself: the positions of ``input_ids`` in the batches that the training took."""

from __future__ import annotations

import time
import weakref
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from token_scripts import COLLATES, Stream, Texts, TokenTrainer, Uneven, as_dict, as_encoding
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import telemetry
from telemetry.attach.batch_table import SLOTS, BatchWriter
from telemetry.attach.batch_tokens import tokens_in
from telemetry.attach.worker_block import WorkerBlock
from telemetry.attach.worker_counts import WorkerTokens

# -- what a batch has --------------------------------------------------------------------------------------------------

IDS = torch.zeros(3, 5, dtype=torch.long)


class Secret:
    """Not to be looked into."""

    def __getattr__(self, name: str):
        raise AssertionError(name)


class Computed:
    @property
    def input_ids(self):
        raise AssertionError("computed")

    @property
    def __dict__(self):
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


# -- what the training took --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate", COLLATES)
@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_are_those_that_the_script_trained_on(run, workers, collate):
    trainer = TokenTrainer()
    trainer.train(DataLoader(Texts(), 4, num_workers=workers, collate_fn=collate, shuffle=True), epochs=2)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_batches_that_were_only_prefetched_have_no_tokens(run, persistent, method):
    trainer = TokenTrainer()
    loader = DataLoader(
        Texts(), 3, num_workers=2, persistent_workers=persistent, prefetch_factor=4, collate_fn=as_encoding,
        multiprocessing_context=method,
    )  # fmt: skip
    trainer.train(loader, epochs=2, stop_after=3)
    trainer.train(loader)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("stop_after", [None, 13])
@pytest.mark.parametrize(("method", "workers"), [(None, 0), ("fork", 1), ("fork", 3), ("spawn", 2)])
def test_streams_whose_workers_end_at_different_times(run, workers, method, stop_after):
    trainer = TokenTrainer()
    loader = DataLoader(Stream(), 4, num_workers=workers, collate_fn=as_dict, multiprocessing_context=method)
    trainer.train(loader, epochs=2, stop_after=stop_after)
    assert run()["tokens"] == trainer.tokens


def test_a_stream_with_workers_that_are_kept(run):
    trainer = TokenTrainer()
    loader = DataLoader(Stream(), 4, num_workers=3, persistent_workers=True, collate_fn=as_dict)
    trainer.train(loader, epochs=3)
    assert run()["tokens"] == trainer.tokens


def test_short_epochs_of_kept_workers_in_another_order_each(run):
    """Several are over before the agent reads the first."""
    trainer = TokenTrainer()
    loader = DataLoader(Texts(), 4, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=as_dict)
    trainer.train(loader, epochs=6)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_the_users_own(run, workers):
    trainer = TokenTrainer()
    sampler = Uneven(range(11), 3, drop_last=False)
    trainer.train(DataLoader(Texts(), batch_sampler=sampler, num_workers=workers, collate_fn=as_dict), epochs=3)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fetch_that_raises_takes_no_tokens_from_others(run, workers):
    trainer = TokenTrainer()
    batches = iter(DataLoader(Texts(fail_at=9), 3, num_workers=workers, collate_fn=as_dict))
    while True:
        try:
            trainer.step(next(batches))
        except StopIteration:
            break
        except ValueError:
            continue
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_of_an_evaluation_do_not_count(run, workers):
    trainer = TokenTrainer()
    other = DataLoader(Texts(33), 5, num_workers=workers, collate_fn=as_dict)
    for number, batch in enumerate(DataLoader(Texts(), 2, num_workers=workers, collate_fn=as_dict)):
        trainer.step(batch)
        if number % 10 == 5:
            with torch.no_grad():
                list(other)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_phase_do_not_count(run, workers):
    trainer = TokenTrainer()
    batches = iter(DataLoader(Texts(), 2, num_workers=workers, collate_fn=as_dict))
    for number, batch in enumerate(batches):
        trainer.step(batch)
        if number % 7 == 3:
            with telemetry.phase("evaluation"):
                next(batches)
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_that_are_thrown_away_after_a_restart_do_not_count(run, workers):
    trainer = TokenTrainer()
    for number, batch in enumerate(DataLoader(Texts(400), 4, num_workers=workers, collate_fn=as_dict)):
        if number < 60:
            continue
        trainer.step(batch)
        time.sleep(0.05)  # much longer than a busy machine holds up a batch that is thrown away
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_asked_in_turn(run, workers):
    trainer = TokenTrainer()
    loaders = [
        DataLoader(Texts(size), batch, num_workers=workers, collate_fn=as_dict) for size, batch in ((40, 4), (30, 3))
    ]
    for first, second in zip(*loaders, strict=True):
        trainer.step(first)
        trainer.tokens += second["input_ids"].numel()
    assert run()["tokens"] == trainer.tokens


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_goes_on_from_a_state(run, workers):
    trainer = TokenTrainer()

    def loader():
        return StatefulDataLoader(Texts(), 3, num_workers=workers, collate_fn=as_dict)

    first = loader()
    trainer.train(first, stop_after=7)
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    trainer.train(second)
    assert run()["tokens"] == trainer.tokens


def test_a_batch_of_the_data_set_itself(run):
    trainer = TokenTrainer()
    batches = [as_dict([torch.arange(3 + number)]) for number in range(9)]
    trainer.train(DataLoader(batches, batch_size=None, num_workers=2))
    assert run()["tokens"] == trainer.tokens == sum(range(3, 12))


def as_array(items):
    """A batch that is sent as bytes. A tensor is sent as a descriptor of its own, which costs more."""
    return {"input_ids": as_dict(items)["input_ids"].numpy()}


def test_more_batches_than_the_table_has_room_for(run):
    trainer = TokenTrainer()
    for number, ids in enumerate(DataLoader(Texts(SLOTS + 900), 1, num_workers=2, collate_fn=as_array)):
        trainer.step({"input_ids": torch.from_numpy(ids["input_ids"])})
        if number % 1000 == 0:
            time.sleep(0.25)  # so that no steps are dropped from the ring
    assert run()["tokens"] == trainer.tokens


def test_what_the_script_tells_counts_instead(run):
    trainer = TokenTrainer()
    for batch in DataLoader(Texts(), 4, collate_fn=as_dict):
        trainer.step(batch)
        telemetry.tokens(11)
    assert run()["tokens"] == 15 * 11


def test_batches_without_input_ids_have_no_tokens(run):
    trainer = TokenTrainer()
    for (_,) in DataLoader(TensorDataset(torch.zeros(50, 4)), 5, num_workers=2):
        trainer.optimizer.step()
    assert run()["tokens"] is None


def test_batches_out_of_order_are_not_guessed(run):
    TokenTrainer().train(DataLoader(Texts(), 4, num_workers=2, collate_fn=as_dict, in_order=False))
    assert run()["tokens"] is None


def test_after_the_agent_loaders_are_as_they_were(run):
    loader = DataLoader(Texts(), 4, collate_fn=as_dict)
    TokenTrainer().train(loader)
    run()
    iterator = iter(loader)
    next(iterator)
    assert "fetch" not in vars(iterator._dataset_fetcher)


class Rare(Texts):
    """Items of which those from ``first`` on have tokens."""

    def __init__(self, size: int, first: int) -> None:
        super().__init__(size)
        self.first = first

    def __getitem__(self, index: int):
        return {"input_ids" if index >= self.first else "pixels": torch.zeros(1, 3, dtype=torch.long)}


@pytest.mark.parametrize(("first", "tokens"), [(0, 3 * 80), (5, 3 * 75), (81, None), (70, None)])
def test_a_worker_that_finds_no_tokens_looks_no_more(run, first, tokens):
    """Each of the two workers looks at 16 batches. What it has not looked at is not counted as none."""
    trainer = TokenTrainer()
    for _ in DataLoader(Rare(80, first), batch_size=None, num_workers=2):
        trainer.optimizer.step()
    assert run()["tokens"] == tokens


# -- the table in the shared block -------------------------------------------------------------------------------------


def test_iterations_of_kept_workers_do_not_mix():
    """Both are over before the first is read. The fourth batch of the second is not made: its worker had ended."""
    block = WorkerBlock(2)
    writer_of(block)
    earlier = WorkerTokens(block, 0, 0, every=True)
    for number in range(6):
        block.batches.write(number, 50 + number)
    block.batches.begin_again(8)
    later = WorkerTokens(block, 0, 0, every=True)
    for number in (0, 1, 2, 4):
        block.batches.write(8 + number, 10 + number)
    assert [earlier.of(number) for number in range(6)] == [49, 50, 51, 52, 53, 54]
    assert [later.of(number) for number in range(4)] == [9, 10, 11, 13]


def test_a_batch_whose_slot_has_a_later_one_is_unknown():
    block = WorkerBlock(2)
    writer_of(block)
    block.batches.write(SLOTS, 10)
    tokens = WorkerTokens(block, 0, 0, every=False)
    assert tokens.of(0) is None
    assert tokens.of(1) is None, "from then on, nothing is known"


def test_before_a_worker_counts_nothing_is_known():
    block = WorkerBlock(1)
    assert WorkerTokens(block, 0, 0, every=False).of(0) is None
    writer_of(block)
    assert WorkerTokens(block, 0, 0, every=False).of(0) == 0


def test_tokens_do_not_keep_the_memory_of_the_workers():
    block = WorkerBlock(1)
    writer_of(block)
    tokens, alive = WorkerTokens(block, 0, 0, every=False), weakref.ref(block)
    assert tokens.of(0) == 0
    assert not tokens.ended
    block.retired = True
    assert tokens.ended
    tokens.release()
    del block
    assert alive() is None
    assert tokens.of(1) is None


def writer_of(block: WorkerBlock) -> BatchWriter:
    return BatchWriter(block.batches, stream=False)
