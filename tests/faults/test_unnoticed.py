"""The agent is invisible to the user's code: its exceptions, objects, warnings and compiled steps are as without it."""

from __future__ import annotations

import gc
import pickle
import re
import sys
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torchdata.stateful_dataloader import stateful_dataloader

import telemetry
from telemetry.seams.table import SEAMS
from tests.data_sets import Numbers
from tests.faults.processes import end_of, run


class Odd(BaseException):
    pass


class Failing(Numbers):
    """A data set whose fourth number raises."""

    def __init__(self, error):
        super().__init__(12)
        self.error = error

    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return index

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


def train(agent_is_marked: bool = False) -> None:
    """Six steps."""
    for _ in DataLoader(Numbers(12), batch_size=2):
        if agent_is_marked:
            with telemetry.step():
                pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Odd, StopIteration])
@pytest.mark.parametrize("how", ["loader", "watch", "steps"])
def test_the_user_s_exceptions_pass_unchanged_and_nothing_sticks(error, how, start, tmp_path):
    agent = start()
    mine = error("mine")
    source = telemetry.watch(iter(Failing(mine))) if how == "watch" else DataLoader(Failing(mine), batch_size=1)
    seen, caught = [], None
    try:
        for batch in source:
            with telemetry.step() if how == "steps" else telemetry.phase("part"):
                seen.append(batch)
    except BaseException as error_that_came:
        caught = error_that_came
    assert len(seen) == 3
    assert caught is (None if error is StopIteration else mine), "the end of an iteration, as in plain Python"
    if caught and how != "watch" and sys.version_info >= (3, 11):  # on 3.10 our frame cannot be removed
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(mine.__traceback__)]
        assert not [file for file in files if "/telemetry/seams/" in file]
    assert agent.tracker.waiting_since == 0
    train(agent_is_marked=how == "steps")
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["steps_total"] == 3 + 6
    assert "hook" not in end["errors_total"]


@pytest.mark.parametrize("name", ["evaluation", "checkpoint", "mine", "step"])
def test_an_exception_leaves_a_phase_or_step_closed(name, start, tmp_path):
    agent = start()
    with pytest.raises(Odd):
        with telemetry.step() if name == "step" else telemetry.phase(name):
            raise Odd
    assert agent.tracker.in_phase is False
    train(agent_is_marked=True)
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["steps_total"] == 6 + (name == "step")
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


def test_an_exception_while_saving_passes_unchanged(start, tmp_path):
    agent = start()

    class Unpicklable:
        def __reduce__(self):
            raise Odd

    with pytest.raises(Odd):
        torch.save({"x": Unpicklable()}, tmp_path / "x.pt")
    assert agent.tracker.in_phase is False
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        torch.save({})


def test_saving_functions_can_still_be_pickled_by_name(start):
    save = torch.save
    start()
    assert torch.save is not save
    for function in (torch.save, torch.serialization.save):
        assert pickle.loads(pickle.dumps(function)) is function
    telemetry.stop()
    assert torch.save is torch.serialization.save is save


def test_a_module_searched_before_its_import_is_still_patched(tmp_path):
    """Libraries search for torch in this way to check whether it is installed."""
    source = """
        import importlib.util, sys
        import telemetry
        telemetry.start("run")
        assert importlib.util.find_spec("torch") is not None
        assert importlib.util.find_spec("torch") is not None
        assert "torch" not in sys.modules
        import torch
        while "telemetry" not in torch.save.__code__.co_filename:
            pass
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            pass
        telemetry.stop()
        """
    run(tmp_path, source)
    assert end_of(tmp_path / "run")["steps_total"] == 3


# -- tracebacks, iterators, and what is put back ---------------------------------------------------------------------


OURS = re.compile(r'  File "[^"]*/telemetry/seams/[^"]*", line .*\n    .*\n')
"""A frame of ours, which Python 3.10 cannot remove."""


def traceback_of(action) -> str:
    """The traceback of what an action raises, without addresses."""
    try:
        action()
    except BaseException:
        text = re.sub(r"\b0x[0-9a-f]+", "0x", traceback.format_exc())
        return OURS.sub("", text) if sys.version_info < (3, 11) else text
    raise AssertionError("nothing was raised")


def fail(worker_id: int) -> None:
    raise KeyError(f"worker {worker_id} cannot begin")


FAILING = {
    "dataset": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1)),
    "dataset in a worker": lambda: list(DataLoader(Numbers(4, fail_at=2), batch_size=1, num_workers=1)),
    "init": lambda: list(DataLoader(Numbers(2), num_workers=1, worker_init_fn=fail)),
    "pickle": lambda: iter(
        DataLoader(Numbers(2), num_workers=1, worker_init_fn=lambda _: 0, multiprocessing_context="spawn")
    ),
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
            vars(dataloader._BaseDataLoaderIter)["__next__"],
            *(
                vars(dataloader._MultiProcessingDataLoaderIter)[name]
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


def test_each_patch_is_in_the_table_of_seams(observed):
    listed = {(seam.module, name) for seam in SEAMS if seam.patched for name in seam.names}
    for owner, name, _, _ in observed.attachment._patches._undo:
        where = (owner.__module__, f"{owner.__name__}.{name}") if isinstance(owner, type) else (owner.__name__, name)
        assert where in listed


def test_a_patch_over_ours_stays(observed):
    ours = torch.save
    torch.save = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = torch.save
    try:
        assert observed.attachment.detach() == ["torch.save"]
        assert torch.save is theirs
    finally:
        torch.save = torch.serialization.save


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
