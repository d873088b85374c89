"""An error in a hook: the training does not see it, it is counted, and the rest goes on."""

from __future__ import annotations

import multiprocessing
import sys
import weakref

import pytest
import torch

import telemetry
from faults.processes import events
from faults.small_run import BATCHES, Dataset, train
from telemetry.hooks.device import DeviceStream
from tests.faults.broken_seams import HOOKS, break_, break_seam, counted


@pytest.fixture(scope="module")
def unharmed():
    """The result of the loop without the agent."""
    assert telemetry.api._agent is None
    return {steps: train(epochs=2, steps=steps) for steps in (False, True)}


@pytest.mark.parametrize("steps", [False, True], ids=["batches", "steps"])
@pytest.mark.parametrize("seam", HOOKS)
def test_an_error_in_a_hook_stays_there(seam, steps, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    needs_steps = seam.endswith("_step")
    with monkeypatch.context() as patch:
        break_seam(patch, agent, seam)
        assert train(epochs=2, steps=steps, saved=tmp_path / "saved.pt") == unharmed[steps]
    assert torch.load(tmp_path / "saved.pt").keys() == {"weight", "bias"}
    if (needs_steps and not steps) or seam == "tracker.mark_request":  # only called with a GPU's clock
        return
    assert counted(agent, "hook") >= 1
    assert any("Broken" in line["message"] for line in events(tmp_path / "run", "error"))

    before = agent.tracker.optimizer_steps
    assert train(epochs=2, steps=steps) == unharmed[steps]
    assert agent.tracker.optimizer_steps == before + 2 * BATCHES
    assert agent.tracker.waiting_since == 0


def test_an_error_as_the_workers_of_a_loader_are_stopped_stays_there(start, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        break_seam(patch, agent, "tracker.leaving")
        for _ in torch.utils.data.DataLoader(Dataset(), num_workers=1):
            workers = multiprocessing.active_children()
            break
    assert [worker.is_alive() for worker in workers] == [False]
    assert counted(agent, "hook") == 1


def test_an_error_that_is_kept_keeps_nothing_of_the_training_alive(start, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        break_seam(patch, agent, "tracker.delivered")

        def epoch():
            model = torch.nn.Linear(2, 1)
            for batch in torch.utils.data.DataLoader(Dataset(), batch_size=2):
                model(batch)
            return weakref.ref(model)

        model = epoch()
    assert agent.tracker.errors > 0
    assert model() is None


def test_errors_in_a_hook_leave_the_other_steps_counted(start, monkeypatch):
    """One failure costs at most the measurement of its own step, and does not turn measuring off."""
    agent = start()
    failing = iter([True, False, True] + [False] * 1000)
    delivered = type(agent.tracker).delivered

    def sometimes(*arguments):
        if next(failing):
            break_()
        delivered(*arguments)

    monkeypatch.setattr(type(agent.tracker), "delivered", sometimes)
    train(epochs=3)
    telemetry.stop()
    assert 3 * BATCHES - 3 <= agent.accounting.stats.steps <= 3 * BATCHES
    assert agent.errors.counts == {"hook": 2} | {k: n for k, n in agent.errors.counts.items() if k != "hook"}


def test_an_error_of_gradients_or_device_stays_there(start, unharmed, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        patch.setattr(agent.tracker, "grad_enabled", break_)
        patch.setattr(agent.tracker, "_current_device", break_)
        assert train(epochs=2) == unharmed[False]
    assert counted(agent, "hook") >= 1


class BrokenEvents:
    """CUDA events that fail at one of their calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def make(self):
        if self.at == "new":
            break_()
        return self

    def record(self):
        if self.at == "record":
            break_()

    def query(self):
        if self.at == "query":
            break_()
        return True

    def elapsed_time(self, _after):
        if self.at == "elapsed":
            break_()
        return 0.0

    def event(self):
        return self.make()

    def begin(self):
        if self.at == "usable":
            break_()
        return DeviceStream(0, 0)

    def end(self):
        pass


@pytest.mark.parametrize("at", ["new", "record", "query", "elapsed", "usable"])
def test_a_gpu_clock_that_fails_costs_its_own_figure_and_no_step(at, start, unharmed):
    from telemetry.hooks.device import GpuClock

    agent = start()
    agent.tracker.gpu = GpuClock(BrokenEvents(at))
    assert train(epochs=2) == unharmed[False]
    assert counted(agent, "hook") >= 1
    telemetry.stop()
    assert agent.accounting.stats.steps == 2 * BATCHES
    assert agent.errors.counts["hook"] == 1, "a clock that failed is not asked again"


@pytest.mark.parametrize("seam", ["DataLoader.__iter__", "torch.save", "optimizer", "_BaseDataLoaderIter.__next__"])
def test_a_hook_that_cannot_be_placed_leaves_the_others(seam, start, unharmed, monkeypatch, tmp_path):
    """A version of torch in which one of them has another place."""
    from telemetry.hooks import patching

    replace = patching.Patches.replace

    def moved(self, owner, name, wrap):
        if f"{owner.__name__}.{name}" == seam:
            raise AttributeError(f"no {name}")
        replace(self, owner, name, wrap)

    with monkeypatch.context() as patch:
        patch.setattr(patching.Patches, "replace", moved)
        if seam == "optimizer":
            patch.setattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook", break_)
        agent = start()
    assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False]
    assert counted(agent, "attach") == 1
    assert (agent.tracker.optimizer_steps > 0) is (seam != "optimizer")
    telemetry.stop()
    assert agent.accounting.stats.steps >= (0 if "__next__" in seam else 2 * BATCHES - 2)
    loader = torch.utils.data.dataloader
    assert loader.DataLoader.__iter__.__module__ == loader._BaseDataLoaderIter.__next__.__module__ == loader.__name__
    assert "telemetry" not in torch.save.__code__.co_filename
