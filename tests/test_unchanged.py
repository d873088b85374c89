"""Loaders, iterators, warnings and tracebacks look as they do without the hooks, and `detach` restores everything."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torch.utils.data import dataloader as torch_dataloader
from torchdata.stateful_dataloader import stateful_dataloader

import telemetry
from tests.data_sets import Numbers
from tests.tracebacks import traceback_of

# -- loaders, iterators and tracebacks look as they do without the hooks, and `detach` restores everything -------------


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


FAILING = {
    "dataset": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1)),
    "dataset in a worker": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1, num_workers=1)),
    "end": lambda: next(iter(DataLoader(Numbers(0), batch_size=1))),
    "loader": lambda: iter(DataLoader(Numbers(2), batch_size=1, num_workers=1, timeout=-1)),
    "save": lambda: torch.save({}, "/nowhere/at/all.pt"),
}


@pytest.mark.parametrize("what", FAILING)
def test_tracebacks_stay_as_they_were(observed, what):
    attached = traceback_of(FAILING[what])
    observed.attachment.detach()
    plain = traceback_of(FAILING[what])
    assert attached == plain


def test_detach_puts_everything_back():
    def patched() -> tuple:
        import torch.distributed.checkpoint as dcp

        return (
            vars(torch_dataloader._BaseDataLoaderIter)["__next__"],
            *(
                vars(torch_dataloader._MultiProcessingDataLoaderIter)[name]
                for name in ("__init__", "_reset", "_shutdown_workers")
            ),
            *(vars(owner)["__iter__"] for owner in (DataLoader, stateful_dataloader.StatefulDataLoader)),
            stateful_dataloader._StatefulMultiProcessingDataLoaderIter.__init__,
            [*gc.callbacks],
            torch.save,
            torch.serialization.save,
            dcp.save,
            dcp.async_save,
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


# -- warnings of torch's loaders name torch's file, as they do without the agent ---------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator there is no such warning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_warning_of_the_iterator_names_no_file_of_ours(observed, workers):
    loader = DataLoader(torch.arange(4), pin_memory=True, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(loader)) == 4
    assert {warning.filename for warning in caught if "pin_memory" in str(warning.message)} == {dataloader.__file__}


# -- the agent leaves iterators as Python laid them out: one with a dictionary of its own makes each ``next()`` slower -


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
