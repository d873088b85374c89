"""Steps and phases that are said, checkpoints that are seen."""

from __future__ import annotations

import io
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from tests.test_attach_loaders import Numbers


def test_torch_save_is_a_checkpoint_and_no_part_of_the_step(observed, monkeypatch):
    class Slow(io.BytesIO):
        def write(self, data):
            time.sleep(0.005)
            return super().write(data)

    for index, _ in enumerate(DataLoader(Numbers(4), batch_size=1)):
        if index == 2:
            torch.save({"weights": torch.zeros(3)}, Slow())
    ledger = observed.read()
    assert ledger.ns[CHECKPOINT] >= 0.005e9
    assert len(observed.steps) == 4
    assert max(step.seconds for step in observed.steps) < 0.005
    assert [p.name for p in observed.phases] == [CHECKPOINT]


def test_torch_save_says_what_it_always_said(observed):
    stream = io.BytesIO()
    torch.save([1, 2], stream)
    stream.seek(0)
    assert torch.load(stream) == [1, 2]


def test_a_distributed_checkpoint_is_one_checkpoint(observed, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weights": torch.zeros(3)}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    observed.read()
    assert [p.name for p in observed.phases] == [CHECKPOINT]


def test_an_asynchronous_checkpoint_counts_only_what_blocks(observed, tmp_path):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        future = dcp.async_save({"weights": torch.zeros(3)}, checkpoint_id=tmp_path / "checkpoint")
        observed.read()
        assert [p.name for p in observed.phases] == [CHECKPOINT]
        assert observed.ledger.category == STARTUP  # the call has returned; the writing goes on elsewhere
        future.result()
        observed.read()
        assert len(observed.phases) == 1
    finally:
        dist.destroy_process_group()


def test_phases_have_their_categories(agent):
    for name in ("evaluation", "checkpoint", "warm-up"):
        with telemetry.phase(name):
            time.sleep(0.01)
    agent.accounts.update()
    ledger = agent.accounts.ledger.seconds()
    assert ledger[EVALUATION] >= 0.01
    assert ledger[CHECKPOINT] >= 0.01
    assert ledger[OTHER] >= 0.01


def test_batches_in_an_evaluation_phase_are_evaluation(agent):
    with telemetry.phase("evaluation"):
        list(DataLoader(Numbers(4, seconds=0.005), batch_size=1))
    agent.accounts.update()
    assert agent.accounts.stats.steps == 0
    assert agent.accounts.ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert agent.accounts.ledger.ns[DATA_WAIT] == 0


def test_training_inside_a_named_phase_is_training(agent):
    with telemetry.phase("epoch"):
        for _ in DataLoader(Numbers(4, seconds=0.005), batch_size=1):
            time.sleep(0.005)
    agent.accounts.update()
    assert agent.accounts.stats.steps == 4
    assert agent.accounts.ledger.ns[DATA_WAIT] >= 4 * 0.005e9
    assert agent.accounts.ledger.ns[COMPUTE] >= 4 * 0.005e9
    assert agent.accounts.ledger.category == OTHER


def test_a_phase_in_a_step_is_no_part_of_it(agent):
    for _ in DataLoader(Numbers(3), batch_size=1):
        with telemetry.phase("logging"), telemetry.phase("checkpoint"):
            time.sleep(0.01)
    agent.accounts.update()
    assert agent.accounts.stats.steps == 3
    assert agent.accounts.stats.histogram().total < 0.01
    assert agent.accounts.ledger.ns[CHECKPOINT] >= 3 * 0.01e9


def test_a_phase_lets_an_exception_through(agent):
    with pytest.raises(KeyError), telemetry.phase("checkpoint"):
        raise KeyError("mine")
    agent.accounts.update()
    assert agent.accounts.ledger.category == STARTUP


def test_a_phase_must_have_a_name(agent):
    with pytest.raises(TypeError, match="not int"):
        telemetry.phase(3)


def test_a_step_that_is_said(agent):
    for _ in DataLoader(Numbers(4, seconds=0.005), batch_size=1):
        with telemetry.step():
            time.sleep(0.005)
        time.sleep(0.01)  # between two steps
    agent.accounts.update()
    histogram = agent.accounts.stats.histogram()
    assert agent.accounts.stats.steps == 4
    assert 4 * 0.010 <= histogram.total < 4 * 0.015
    assert agent.accounts.ledger.ns[DATA_WAIT] >= 4 * 0.005e9
    assert agent.accounts.ledger.ns[OTHER] >= 4 * 0.01e9


def test_a_step_that_is_said_may_fetch_inside(agent):
    iterator = iter(DataLoader(Numbers(6), batch_size=1))
    for _ in range(3):
        with telemetry.step():
            next(iterator)
            next(iterator)
    agent.accounts.update()
    assert agent.accounts.stats.steps == 3


def test_a_step_without_any_loader(agent):
    for _ in range(3):
        with telemetry.step():
            time.sleep(0.005)
    agent.accounts.update()
    assert agent.accounts.stats.steps == 3
    assert agent.accounts.ledger.ns[COMPUTE] >= 3 * 0.005e9
    assert agent.accounts.ledger.ns[DATA_WAIT] == 0


def test_all_of_it_does_nothing_without_an_agent():
    with telemetry.step(), telemetry.phase("evaluation"):
        pass
    telemetry.stop()
