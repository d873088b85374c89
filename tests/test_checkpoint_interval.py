"""The advised interval between checkpoints, followed in a simulation with seeded failures."""

from __future__ import annotations

import random

import pytest

from telemetry.report.checkpoint_interval import Experience, best_interval, ettr

FAILURES = 200


def simulated(interval: float, cost: float, mean: float, restart: float, seed: int) -> tuple[float, float]:
    """Effective training time and productive time, as shares of the wall clock, of a run with so many failures."""
    chance = random.Random(seed)
    effective = productive = wall = 0.0
    for _ in range(FAILURES):
        until = chance.expovariate(1 / mean)
        kept = until // (interval + cost)
        effective += kept * (interval + cost)
        productive += kept * interval
        wall += until + restart
    return effective / wall, productive / wall


CASES = [
    pytest.param(30.0, 3600.0, 300.0, id="usual"),
    pytest.param(2.0, 40000.0, 60.0, id="rare failures"),
    pytest.param(120.0, 1200.0, 200.0, id="many failures"),
    pytest.param(300.0, 700.0, 30.0, id="expensive checkpoints"),
]


@pytest.mark.parametrize(("cost", "mean", "restart"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_predicted_effective_time_comes_true(cost, mean, restart, seed):
    interval = best_interval(cost, mean)
    effective, _ = simulated(interval, cost, mean, restart, seed)
    assert ettr(interval, cost, mean, restart) == pytest.approx(effective, abs=0.05)


@pytest.mark.parametrize(("cost", "mean", "restart"), CASES)
def test_no_other_interval_is_much_better(cost, mean, restart):
    best = best_interval(cost, mean)
    productive = simulated(best, cost, mean, restart, 3)[1]
    others = [simulated(best * factor, cost, mean, restart, 3)[1] for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert productive >= max(others) - 0.02


def test_the_advice_learned_from_a_run_comes_true_in_the_next():
    cost, mean, restart, interval = 20.0, 3000.0, 240.0, 3600.0
    chance = random.Random(7)
    loop = checkpoints = 0.0
    for _ in range(FAILURES):
        until = chance.expovariate(1 / mean)
        loop += until
        checkpoints += until // (interval + cost)
    told = Experience(FAILURES, loop, int(checkpoints), cost, restart)
    advised = told.best_interval_seconds
    assert advised is not None and told.gain is not None
    assert advised < interval / 5
    effective, productive = simulated(advised, cost, mean, restart, 8)
    assert told.predicted(advised) == pytest.approx(effective, abs=0.05)
    assert productive > simulated(interval, cost, mean, restart, 8)[1] + 0.2


def test_nothing_is_advised_that_is_not_known():
    assert Experience(1, 1000.0, 10, 5.0, 60.0).as_json() is None, "one failure tells no rate"
    assert Experience(5, 1000.0, 0, None, 60.0).as_json() is None, "no checkpoint tells no cost"
    good = Experience(10, 36000.0, 80, 30.0, 60.0)
    assert good.as_json() is not None
    assert good.gain is None, "it is close to the best already"
