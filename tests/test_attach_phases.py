"""Explicit steps and phases, and checkpoints."""

from __future__ import annotations

import io
import json
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from tests.data_sets import Numbers


def test_torch_save_is_a_checkpoint_and_no_part_of_the_step(observed, monkeypatch):
    class Slow(io.BytesIO):
        """Takes longer than any step does on a busy machine."""

        def flush(self):
            time.sleep(0.5)

    for index, _ in enumerate(DataLoader(Numbers(4), batch_size=1)):
        if index == 2:
            torch.save({"weights": torch.zeros(3)}, Slow())
    ledger = observed.read()
    assert ledger.ns[CHECKPOINT] >= 0.5e9
    assert len(observed.steps) == 4
    assert max(step.seconds for step in observed.steps) < 0.5
    assert [p.name for p in observed.phases] == [CHECKPOINT]


def test_errors_of_torch_save_stay_as_they_were(observed):
    stream = io.BytesIO()
    torch.save([1, 2], stream)
    stream.seek(0)
    assert torch.load(stream) == [1, 2]


def test_a_distributed_checkpoint_is_one_checkpoint(observed, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weights": torch.zeros(3)}, checkpoint_id=tmp_path / "checkpoint")
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
    agent.accounting.update()
    ledger = agent.accounting.ledger.seconds()
    assert ledger[EVALUATION] >= 0.01
    assert ledger[CHECKPOINT] >= 0.01
    assert ledger[OTHER] >= 0.01


def test_batches_in_an_evaluation_phase_are_evaluation(agent):
    with telemetry.phase("evaluation"):
        list(DataLoader(Numbers(4, seconds=0.005), batch_size=1))
    agent.accounting.update()
    assert agent.accounting.stats.steps == 0
    assert agent.accounting.ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert agent.accounting.ledger.ns[DATA_WAIT] == 0


def test_training_inside_a_named_phase_is_training(agent):
    with telemetry.phase("epoch"):
        for _ in DataLoader(Numbers(4, seconds=0.005), batch_size=1):
            time.sleep(0.005)
    agent.accounting.update()
    assert agent.accounting.stats.steps == 4
    assert agent.accounting.ledger.ns[DATA_WAIT] >= 4 * 0.005e9
    assert agent.accounting.ledger.ns[COMPUTE] >= 4 * 0.005e9
    assert agent.accounting.ledger.category == OTHER


def test_a_phase_in_a_step_is_no_part_of_it(agent):
    for _ in DataLoader(Numbers(3), batch_size=1):
        with telemetry.phase("logging"), telemetry.phase("checkpoint"):
            time.sleep(0.01)
    agent.accounting.update()
    assert agent.accounting.stats.steps == 3
    assert agent.accounting.stats.histogram().total < 0.01
    assert agent.accounting.ledger.ns[CHECKPOINT] >= 3 * 0.01e9


def test_of_many_phases_in_a_tick_the_longest_have_lines(tmp_path):
    telemetry.start(tmp_path, port="off", interval_seconds=30, start_line=False)
    for number in range(200):
        with telemetry.phase(f"part {number}"):
            time.sleep(0.02 if number % 50 == 0 else 0.0011)
    telemetry.stop()
    (file,) = (tmp_path / "logs").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = [line["name"] for line in lines if line["event"] == "phase"]
    assert 15 < len(names) < 60  # a tick may come in the middle
    assert {f"part {number}" for number in (0, 50, 100, 150)} < set(names)


def test_a_phase_lets_an_exception_through(agent):
    with pytest.raises(KeyError), telemetry.phase("checkpoint"):
        raise KeyError("mine")
    agent.accounting.update()
    assert agent.accounting.ledger.category == STARTUP


def test_a_phase_must_have_a_name(agent):
    with pytest.raises(TypeError, match="not int"):
        telemetry.phase(3)


def test_an_explicit_step(agent):
    between, began = 0.0, time.perf_counter()
    for _ in DataLoader(Numbers(4, seconds=0.005), batch_size=1):
        with telemetry.step():
            time.sleep(0.005)
        left = time.perf_counter()
        time.sleep(0.01)  # between two steps
        between += time.perf_counter() - left
    whole = time.perf_counter() - began
    agent.accounting.update()
    histogram = agent.accounting.stats.histogram()
    assert agent.accounting.stats.steps == 4
    assert 4 * 0.010 <= histogram.total <= whole - between
    assert agent.accounting.ledger.ns[DATA_WAIT] >= 4 * 0.005e9
    assert agent.accounting.ledger.ns[OTHER] >= 4 * 0.01e9


def test_an_explicit_step_may_fetch_inside(agent):
    iterator = iter(DataLoader(Numbers(6), batch_size=1))
    for _ in range(3):
        with telemetry.step():
            next(iterator)
            next(iterator)
    agent.accounting.update()
    assert agent.accounting.stats.steps == 3


def test_a_step_without_any_loader(agent):
    for _ in range(3):
        with telemetry.step():
            time.sleep(0.005)
    agent.accounting.update()
    assert agent.accounting.stats.steps == 3
    assert agent.accounting.ledger.ns[COMPUTE] >= 3 * 0.005e9
    assert agent.accounting.ledger.ns[DATA_WAIT] == 0


def test_all_of_it_does_nothing_without_an_agent():
    with telemetry.step(), telemetry.phase("evaluation"):
        pass
    telemetry.stop()
