"""Steps that differ because their batches differ in length."""

import random

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, TensorDataset

from telemetry.diagnosis.uneven_steps import uneven_steps
from telemetry.model.records import LoaderTraits
from telemetry.seams.loaders import traits_of
from telemetry.util.sketch import Sketch
from tests.slice_cases import a_slice
from tests.slices import evidence_over

PADDED = LoaderTraits(shuffled=True, batch_size=16, own_collate=True)
CALM = structs.replace(evidence_over([a_slice(steps=100, wait=0.2, compute=9.8, seconds=10.0)]), traits=PADDED)
CHANCE = random.Random(1)
LENGTHS = [CHANCE.lognormvariate(0.0, 0.7) for _ in range(5000)]


def sketch_of(values) -> Sketch:
    sketch = Sketch()
    sketch.add([*values])
    return sketch


def padded(steps: int = 400, power: float = 1.0, fixed: float = 0.0) -> list[float]:
    """Seconds of steps of 16 random samples, by the longest of them."""
    return [0.02 * max(CHANCE.sample(LENGTHS, 16)) ** power + fixed for _ in range(steps)]


@pytest.mark.parametrize(("power", "fixed"), [(1.0, 0.0), (1.5, 0.0), (1.0, 0.01)])
def test_the_gain_of_groups_is_in_the_predicted_range(power, fixed):
    """Whatever the time of a step is by its length. The truth: each sample in a batch of its own length."""
    steps = padded(power=power, fixed=fixed)
    finding = uneven_steps(sketch_of(steps), CALM, 0.02)
    alone = sum(0.02 * length**power + fixed for length in LENGTHS) / len(LENGTHS)
    (advice,) = finding.advice
    assert advice.predicted_low * 0.95 <= sum(steps) / len(steps) / alone <= advice.predicted_speedup * 1.05
    assert advice.predicted_speedup <= 1.6 * advice.predicted_low
    assert finding.text.startswith("Steps of the same code take ")
    assert "group samples by length" in advice.action
    assert finding.share_ratio == pytest.approx(1 - 1 / advice.predicted_low, abs=0.01)


@pytest.mark.parametrize(
    ("traits", "wait", "delay"),
    [
        ({"shuffled": False}, 0.2, 0.0),  # in an order that has a reason
        ({"own_collate": False}, 0.2, 0.0),  # torch's own stacks what has one length
        ({"batch_size": None}, 0.2, 0.0),  # a batch_sampler of the script's
        ({}, 2.0, 0.0),
        ({}, 0.2, 0.3),
    ],
)
def test_what_may_have_another_reason_is_not_told(traits, wait, delay):
    evidence = structs.replace(CALM, traits=structs.replace(PADDED, **traits), wait_seconds=wait)
    assert uneven_steps(sketch_of(padded()), evidence, delay) is None


@pytest.mark.parametrize(
    "steps",
    [
        padded(50),  # too few
        [CHANCE.uniform(0.1, 0.15) for _ in range(400)],  # they hardly differ
        [0.1, 0.1, 0.1, 0.4] * 100,  # each fourth updates the weights
        [0.1 + 0.1 * (number % 2) + CHANCE.uniform(0, 0.002) for number in range(400)],
        [CHANCE.uniform(*((1e-4, 4e-4), (0.04, 0.09))[number % 4 > 0]) for number in range(400)],  # asked for at once
        [CHANCE.uniform(*((1e-4, 4e-4), (0.03, 0.09))[number % 5 > 2]) for number in range(400)],  # most of them are
    ],
)
def test_steps_that_differ_in_another_way_are_not_told(steps):
    assert uneven_steps(sketch_of(steps), CALM, 0.0) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_whether_a_loader_makes_its_batches_by_code_of_the_script(workers):
    data = TensorDataset(torch.zeros(8, 2))
    own = [
        traits_of(iter(DataLoader(data, batch_size=size, num_workers=workers, collate_fn=function))).own_collate
        for size, function in ((4, None), (4, list), (None, None))
    ]
    assert own == [False, True, False]
