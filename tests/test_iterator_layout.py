"""The agent leaves iterators as Python laid them out: one with a dictionary of its own makes each ``next()`` slower."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

ITEMS = TensorDataset(torch.zeros(40, 4))
LOADERS = {
    "plain": lambda: DataLoader(ITEMS, batch_size=4),
    "shuffled": lambda: DataLoader(ITEMS, batch_size=4, shuffle=True, drop_last=True),
    "no batches": lambda: DataLoader(ITEMS, batch_size=None),
    "workers": lambda: DataLoader(ITEMS, batch_size=4, num_workers=1),
}


def has_dictionary(loader: DataLoader) -> bool:
    """Whether the attributes of the loader's iterator are in a dictionary, after some steps."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    iterator = iter(loader)
    for _ in range(8):
        (weight * sum(part.sum() for part in next(iterator))).sum().backward()
        optimizer.step()
    return any(type(part) is dict for part in gc.get_referents(iterator) if part is not type(iterator))


@pytest.mark.parametrize("kind", LOADERS)
def test_an_iterator_has_no_dictionary_because_of_the_agent(kind, request):
    bare = has_dictionary(LOADERS[kind]())
    request.getfixturevalue("agent")
    assert has_dictionary(LOADERS[kind]()) == bare
