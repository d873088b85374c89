"""torchdata's StatefulDataLoader, which makes its iterators and workers itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import stateful_dataloader as module

from telemetry.records import DATA_WAIT
from tests.data_sets import Numbers

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


def test_detaching_puts_it_back(observed):
    places = [
        (module.StatefulDataLoader, "__iter__"),
        (module._StatefulMultiProcessingDataLoaderIter, "__init__"),
        (module._StatefulMultiProcessingDataLoaderIter, "_shutdown_workers"),
    ]
    assert all(hasattr(vars(owner)[name], "__wrapped__") for owner, name in places)
    assert "_worker_init_fn" in vars(places[1][0])
    observed.attachment.detach()
    assert "_worker_init_fn" not in vars(places[1][0])
    assert not any(hasattr(vars(owner)[name], "__wrapped__") for owner, name in places)


def test_it_is_not_imported_by_the_agent(tmp_path):
    code = "import sys, torch, telemetry; telemetry.start(sys.argv[1], port='off'); print('torchdata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", done.stderr
