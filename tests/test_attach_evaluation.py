"""A loader iterated with gradients off is evaluation."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader

from telemetry.records import COMPUTE, EVALUATION, OTHER, STARTUP
from tests.data_sets import Numbers


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loader_iterated_with_gradients_off_is_evaluation(observed, mode):
    loader = DataLoader(Numbers(4), batch_size=1)
    list(loader)
    with mode():
        for _ in loader:
            time.sleep(0.005)
    list(loader)
    ledger = observed.read()
    assert len(observed.steps) == 8
    assert ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert [p.name for p in observed.phases] == [EVALUATION]


def test_evaluation_in_the_middle_of_an_epoch_is_no_part_of_the_step(observed):
    evaluation = DataLoader(Numbers(3, seconds=0.2), batch_size=1)
    for index, _ in enumerate(DataLoader(Numbers(6), batch_size=1)):
        if index == 3:
            with torch.no_grad():
                list(evaluation)
    observed.read()
    assert len(observed.steps) == 6
    assert max(step.seconds for step in observed.steps) < 0.2
    assert observed.ledger.ns[EVALUATION] >= 0.6e9


def test_evaluation_left_with_break_ends_when_training_goes_on(observed):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for index, _ in enumerate(DataLoader(Numbers(4), batch_size=1)):
        if index == 1:
            with torch.no_grad():
                for _ in DataLoader(Numbers(3), batch_size=1):
                    break
        weight.grad = torch.ones(1)
        optimizer.step()
        observed.read()
        assert observed.ledger.category == COMPUTE
        time.sleep(0.005)
    observed.read()
    assert len(observed.steps) == 4
    assert observed.ledger.ns[EVALUATION] < 0.005e9


def test_evaluation_before_training_ends_the_start_up(observed):
    observed.read()
    assert observed.ledger.category == STARTUP
    with torch.no_grad():
        list(DataLoader(Numbers(2), batch_size=1))
    observed.read()
    assert observed.ledger.category == OTHER
    assert observed.ledger.ns[EVALUATION] > 0
