"""What the hooks tell of checkpoints: what was saved, at which step, and whether it is complete."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import telemetry
from telemetry.hooks.resume import holds_optimizer
from telemetry.report.logs import load
from tests.small_training import Lazy, Training


@contextlib.contextmanager
def process_group_of_one():
    """Old versions of torch write asynchronous checkpoints only in a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def saves(observed) -> list:
    return [*observed.tracker.resume.saves]


def test_a_checkpoint_has_the_steps_that_it_contains(observed, tmp_path):
    training = Training()
    for batch in torch.utils.data.DataLoader(torch.randn(5, 4)):
        training.step(batch)
        if observed.tracker.optimizer_steps == 3:
            torch.save(training.state, tmp_path / "c.pt")
    torch.save(training.net.state_dict(), tmp_path / "net.pt")
    inside, after = saves(observed)
    assert (inside.optimizer_steps, inside.steps, inside.complete) == (3, 3, True)
    assert (after.optimizer_steps, after.steps) == (5, 5)
    assert (inside.holds_optimizer, after.holds_optimizer) == (True, False)
    observed.read()
    (first, _) = observed.phases
    assert inside.start_ns <= first.start_ns <= inside.end_ns
    assert sum(first.loop_seconds) > 0


def test_lightning_keeps_the_optimizers_in_a_list(observed, tmp_path):
    training = Training()
    torch.save({"state_dict": {}, "optimizer_states": [training.optimizer.state_dict()]}, tmp_path / "c.pt")
    assert saves(observed)[0].holds_optimizer


def test_a_checkpoint_that_raises_is_not_complete(observed, tmp_path):
    with pytest.raises(RuntimeError):
        torch.save({}, tmp_path / "not there" / "c.pt")
    assert [save.complete for save in saves(observed)] == [False]
    torch.save({}, tmp_path / "c.pt")
    assert [save.complete for save in saves(observed)] == [False, True]


def test_a_phase_of_the_script_is_one_checkpoint_whatever_it_calls(agent, tmp_path):
    with telemetry.phase("checkpoint"):
        torch.save({}, tmp_path / "a.pt")
        torch.save(Training().state, tmp_path / "b.pt")
    with telemetry.phase("checkpoint"):
        (tmp_path / "own format").write_bytes(bytes(1000))
        time.sleep(0.002)
    with pytest.raises(ZeroDivisionError), telemetry.phase("checkpoint"):
        time.sleep(0.002)
        raise ZeroDivisionError
    telemetry.stop()
    (process,) = load(agent.run_dir)
    told = [(save.complete, save.holds_optimizer) for save in process.saves]
    assert told == [(True, True), (True, True), (False, True)]


def test_a_short_checkpoint_keeps_its_place_in_the_log(agent):
    """The report takes the last one for the newest."""
    with telemetry.phase("checkpoint"):
        pass
    with pytest.raises(ZeroDivisionError), telemetry.phase("checkpoint"):
        time.sleep(0.002)
        raise ZeroDivisionError
    telemetry.stop()
    (process,) = load(agent.run_dir)
    assert [save.complete for save in process.saves] == [True, False]


def test_an_asynchronous_checkpoint_is_complete_when_it_is_written(observed, tmp_path, monkeypatch):
    written = threading.Event()
    writer = dcp.FileSystemWriter(tmp_path / "c")
    finish = writer.finish
    monkeypatch.setattr(writer, "finish", lambda *args, **named: (written.wait(60), finish(*args, **named))[1])
    training = Training()
    training.steps(3)
    with process_group_of_one():
        future = dcp.async_save({"net": training.net.state_dict()}, storage_writer=writer)
        training.steps(2)
        assert [(save.complete, save.optimizer_steps) for save in saves(observed)] == [(False, 3)]
        written.set()
        getattr(future, "upload_completion", future).result(60)
    assert [(save.complete, save.background) for save in saves(observed)] == [(False, False), (True, True)]
    assert saves(observed)[1].optimizer_steps == 3, "not what has been trained meanwhile"


def test_a_checkpoint_written_on_a_thread_of_the_script(observed, tmp_path):
    training = Training()
    training.steps(2)
    thread = threading.Thread(target=torch.save, args=(training.state, tmp_path / "c.pt"))
    thread.start()
    thread.join()
    (save,) = saves(observed)
    assert (save.background, save.complete, save.holds_optimizer, save.optimizer_steps) == (True, True, True, 2)


class LazyList(list):
    def __iter__(self):
        raise AssertionError("asked by the agent")


def test_what_is_saved_is_not_made_to_load_anything():
    assert not holds_optimizer({"data": Lazy(rows=1), "list": LazyList([1])})
    assert holds_optimizer(Lazy(state={}, param_groups=[]))
    assert holds_optimizer(LazyList([{"state": {}, "param_groups": []}]))


def test_a_checkpoint_saved_by_keywords_is_one(observed, tmp_path):
    torch.save(obj=Training().state, f=tmp_path / "c.pt")
    torch.save(f=tmp_path / "net.pt", obj={})
    assert [save.holds_optimizer for save in saves(observed)] == [True, False]
