"""DALI's iterators, by a stand-in with their shape: threads below Python make the batches."""

from __future__ import annotations

import importlib
import sys

import pytest

from telemetry.records import DATA_WAIT, STARTUP

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


class DALIRaggedIterator(_DaliBaseIterator):
    def __init__(self, batches, seconds):
        super().__init__(batches, seconds)
        self._first_batch = None
        self._first_batch = DALIRaggedIterator.__next__(self)

    def __next__(self):
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        return self._get_outputs()
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
    yield importlib.import_module("nvidia.dali.plugin.pytorch")
    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["DALIGenericIterator", "DALIClassificationIterator", "DALIRaggedIterator"])
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


def test_its_classes_are_as_they_were_after_the_agent(dali, observed):
    observed.attachment.detach()
    for kind in (dali.DALIGenericIterator, dali.DALIRaggedIterator):
        assert not hasattr(kind.__next__, "__wrapped__")
        assert not hasattr(kind.__init__, "__wrapped__")
