"""Loaders whose batches have ``input_ids`` of uneven lengths, and what a training script counts itself."""

from __future__ import annotations

from collections import UserDict

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, get_worker_info


def length_of(index: int) -> int:
    """Tokens of an item: 1 to 23."""
    return 1 + index * 7 % 23


class Texts(Dataset):
    """Items of uneven lengths."""

    def __init__(self, size: int = 60, fail_at: int = -1) -> None:
        self.size = size
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise ValueError(index)
        return torch.arange(length_of(index))


class Stream(IterableDataset):
    """The same items; with several workers, the first gets most of them."""

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            mine = range(self.size)
        else:
            share = self.size // (4 * info.num_workers)
            first = self.size - share * (info.num_workers - 1)
            mine = range(first) if info.id == 0 else range(first + share * (info.id - 1), first + share * info.id)
        for index in mine:
            yield torch.arange(length_of(index))


class Encoding(UserDict):
    """As the tokenizers of transformers give."""

    def __getattr__(self, name: str):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Holder:
    """A batch with attributes."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        self.input_ids = input_ids

    @property
    def longest(self) -> int:
        raise AssertionError("the agent computes nothing of the user's")


def padded(items) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(items), batch_first=True)


def as_dict(items):
    ids = padded(items)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "weights": torch.ones(len(items))}


def as_encoding(items):
    return Encoding(as_dict(items))


def as_tuple(items):
    return as_dict(items), torch.zeros(len(items))


def as_nested(items):
    return {"text": as_dict(items), "label": torch.zeros(len(items))}


def as_holder(items):
    return Holder(padded(items))


COLLATES = (as_dict, as_encoding, as_tuple, as_nested, as_holder)


def ids_of(batch) -> torch.Tensor:
    """What a script trains on."""
    if isinstance(batch, Holder):
        return batch.input_ids
    if isinstance(batch, tuple):
        batch = batch[0]
    return batch["text"]["input_ids"] if "text" in batch else batch["input_ids"]


class Uneven(BatchSampler):
    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])


class TokenTrainer:
    """A loop that counts the tokens of its batches."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.optimizer = optimizer([self.weight], lr=0.1)
        self.tokens = 0

    def step(self, batch) -> None:
        ids = ids_of(batch)
        (self.weight * ids.float().sum()).sum().backward()
        self.optimizer.step()
        self.tokens += ids.numel()

    def train(self, loader, epochs: int = 1, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for number, batch in enumerate(loader, 1):
                self.step(batch)
                if number == stop_after:
                    break
