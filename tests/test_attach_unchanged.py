"""Loaders, iterators and tracebacks look as they do without the hooks, and `detach` restores everything."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader

import telemetry
from tests.data_sets import Numbers
from tests.tracebacks import traceback_of


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


def test_a_failing_fetch_off_the_training_thread_has_its_own_traceback(observed):
    traces = []
    for attached in (True, False):
        if not attached:
            observed.attachment.detach()
        thread = threading.Thread(target=lambda: traces.append(traceback_of(FAILING["dataset"])))
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
    assert len(observed.tracker.loaders.live()) == 1
    del iterator
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()
    assert not observed.tracker.loaders.live()
