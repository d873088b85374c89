"""Totals of simulated training loops, as the agent would have counted them, tick by tick.

The scatter of a step's duration is that of an autoregressive series over ticks: neighbours resemble each other, as they
do on a machine that others use too. To it comes what real loops have: first steps that take longer, a mix of sequence
lengths, pauses, epochs with a slow start, evaluations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from telemetry.model.totals import EpochTotals, SampledTotals, Totals, WorkerTotals

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

TICK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop.

    Attributes:
        step_seconds: mean duration of a step. ``wait_share``: of the wait in it.
        scatter: standard deviation of a tick's mean step, relative. ``memory``: correlation of neighbouring ticks.
        long_share: share of steps with sequences twice as long. ``long_seconds``: they come in stretches of this
            length; 0: at random.
        pause_every_seconds, pause_seconds: single pauses in compute; 0: no pauses.
        epoch_seconds, evaluation_seconds: length of an epoch, and of the evaluation after it; 0: one epoch.
        first: factor on the duration of the first steps. What is above 1 halves every 15 s.
        slower: factor on the duration of a step at a moment, by part: wait and compute.
    """

    step_seconds: float = 0.2
    wait_share: float = 0.1
    scatter: float = 0.03
    memory: float = 0.5
    long_share: float = 0.0
    long_seconds: float = 0.0
    pause_every_seconds: float = 0.0
    pause_seconds: float = 0.0
    epoch_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    first: float = 3.0
    slower: Callable[[float], tuple[float, float]] = lambda _: (1.0, 1.0)


def ticks(loop: Loop, seconds: float, rng: random.Random) -> Iterator[tuple[Totals, dict[str, float]]]:
    """The totals at each tick of ``seconds`` of training, and the sampled figures at it."""
    wall = wait = compute = evaluation = boundary_wait = steps = 0.0
    boundaries, fetches, fetch_seconds = 0, 0, 0.0
    state = rng.gauss(0, 1)
    next_epoch = loop.epoch_seconds or math.inf
    next_pause = rng.expovariate(1 / loop.pause_every_seconds) if loop.pause_every_seconds else math.inf
    epoch_began = 0.0
    while wall < seconds:
        state = loop.memory * state + math.sqrt(1 - loop.memory**2) * rng.gauss(0, 1)
        on_wait, on_compute = loop.slower(wall)
        noise = math.exp(loop.scatter * state) * _first(loop, wall) * _mix(loop, wall, rng)
        cold = 3.0 if wall - epoch_began < 4.0 and boundaries else 1.0  # the first batches of an epoch come late
        own_wait = loop.step_seconds * loop.wait_share * on_wait * cold
        own_compute = loop.step_seconds * (1 - loop.wait_share) * on_compute * noise
        done = TICK_SECONDS / (own_wait + own_compute)
        wall, steps = wall + TICK_SECONDS, steps + done
        wait, compute = wait + done * own_wait, compute + done * own_compute
        fetches += int(done)
        fetch_seconds += int(done) * (own_wait + 0.5 * loop.step_seconds)
        if wall >= next_pause:
            wall, compute = wall + loop.pause_seconds, compute + loop.pause_seconds
            next_pause = wall + rng.expovariate(1 / loop.pause_every_seconds)
        if wall >= next_epoch:
            boundaries += 1
            wall, evaluation = wall + loop.evaluation_seconds + 1.0, evaluation + loop.evaluation_seconds
            wait, boundary_wait = wait + 1.0, boundary_wait + 1.0
            next_epoch, epoch_began = wall + loop.epoch_seconds, wall
        yield (
            Totals(
                wall_seconds=wall,
                ledger_seconds={"data_wait": wait, "compute": compute, "evaluation": evaluation, "checkpoint": 0.0},
                open_step_seconds=steps % 1 * (own_wait + own_compute),
                steps=int(steps),
                epochs=EpochTotals(boundaries=boundaries, boundary_wait_seconds=boundary_wait),
                sampled=SampledTotals(workers=WorkerTotals(fetches=fetches, fetch_busy_seconds=fetch_seconds)),
            ),
            {"gpu_clock_hertz": 1.98e9 / on_compute},
        )


def _first(loop: Loop, wall: float) -> float:
    """How much longer the first steps take."""
    return 1 + (loop.first - 1) * math.pow(0.5, wall / 15)


def _mix(loop: Loop, wall: float, rng: random.Random) -> float:
    """How much longer the steps of a tick take because of long sequences."""
    if not loop.long_share:
        return 1.0
    if loop.long_seconds:
        period = loop.long_seconds / loop.long_share
        return 2.0 if wall % period > period - loop.long_seconds else 1.0
    count = max(1, round(TICK_SECONDS / loop.step_seconds))
    return 1 + sum(rng.random() < loop.long_share for _ in range(count)) / count
