"""Growth within minutes: found soon, with the part that grows, and not where a run does something else."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.change_series import STEADY
from benchmarks.step_series import Loop, ticks
from telemetry.agent.findings import ChangeMonitor
from telemetry.diagnosis.growth import GrowthDetector, growth_finding
from telemetry.diagnosis.lines import LineShare
from telemetry.records import FASTER, GROWS, SLOWER, UNCLEAR
from telemetry.records import STEADY as STEADY_TREND
from telemetry.util.profiles import StackProfile
from telemetry.util.stacks import Spot

MINUTE = 60.0
HOUR = 3600.0
BEGIN = 5 * MINUTE
"""When the simulated loops begin to grow."""


class Run:
    """A simulated run. ``found``: the growth whenever it was found, or found to go on, with the seconds since the start."""

    def __init__(self, loop, seconds, *, seed=1, core_wait=lambda _now: 0.0, **signals):
        self.detector = GrowthDetector()
        self.found = []
        delay = steps = 0.0
        for totals, _ in ticks(loop, seconds, random.Random(seed)):
            delay, steps = delay + (totals.steps - steps) * core_wait(totals.wall_seconds), totals.steps
            gauges = {name: value(totals.wall_seconds) for name, value in signals.items()}
            before = self.detector.growth
            self.detector.tick(replace(totals, run_queue_delay_seconds=delay), gauges)
            if self.detector.growth is not before:
                self.found.append((totals.wall_seconds, self.detector.growth))
            self.totals = totals

    @property
    def trend(self):
        return self.detector.trend()


def ramp(factor, seconds, *, begin=BEGIN):
    return lambda now: 1 + (factor - 1) * min(1.0, max(0.0, (now - begin) / seconds))


def computes(factor):
    return lambda now: (1.0, factor(now))


@pytest.mark.parametrize(
    ("begin", "factor", "seconds"),
    [(BEGIN, 10, 40), (BEGIN, 1.4, 120), (BEGIN, 1.5, 600), (2 * HOUR, 2, 180)],
)
def test_growth_is_told_within_two_minutes(begin, factor, seconds):
    run = Run(Loop(slower=computes(ramp(factor, seconds, begin=begin))), begin + seconds + 3 * MINUTE)
    now, growth = run.found[0]
    by_30_percent = begin + seconds * 0.3 / (factor - 1)
    assert begin < now < by_30_percent + 2 * MINUTE
    assert growth.part == "compute"
    assert growth.ratio >= 1.3
    assert growth.before_seconds == pytest.approx(0.2, rel=0.3)
    assert abs(growth.at_seconds - begin) < max(90, 0.4 * seconds)


def test_a_run_that_grows_from_its_first_step_is_told_in_half_a_minute():
    loop = Loop(step_seconds=0.013, wait_share=0.01, first=1.0, slower=computes(lambda now: 1 + now / 5))
    now, growth = Run(loop, 44).found[0]
    assert now <= 30
    assert growth.before_seconds == pytest.approx(0.013, rel=0.25)


def test_waits_that_grow():
    loop = Loop(wait_share=0.3, slower=lambda now: (ramp(4, 200)(now), 1.0))
    _, growth = Run(loop, BEGIN + 5 * MINUTE).found[0]
    assert growth.part == "data_wait"
    assert growth.part_after_seconds > 1.2 * growth.part_before_seconds


def test_growth_that_goes_on_is_one_growth_from_its_begin():
    run = Run(Loop(slower=computes(ramp(20, HOUR))), BEGIN + HOUR)
    first, last = run.found[0][1], run.found[-1][1]
    assert abs(last.at_seconds - first.at_seconds) < 2 * MINUTE
    assert last.before_seconds == pytest.approx(0.2, rel=0.15)
    assert last.ratio > 10
    assert last.loop_seconds > 0.8 * HOUR


# -- what is no growth -------------------------------------------------------------------------------------------------

QUIET = STEADY | {
    "a single jump": Loop(slower=computes(lambda now: 2.0 if now > BEGIN else 1.0)),
    "two jumps": Loop(slower=computes(lambda now: 1 + 0.4 * (now > BEGIN) + 0.4 * (now > BEGIN + 100))),
    "a warm-up": Loop(slower=computes(lambda now: 1 + 4 * 0.5 ** (now / 60))),
    "a warm-up that becomes steadier": Loop(scatter=0.2, slower=computes(lambda now: 1 + 0.5 ** (now / 30))),
    "slightly slower": Loop(slower=computes(ramp(1.2, 300))),
    "faster": Loop(slower=computes(ramp(0.5, 300))),
    "slow and back": Loop(slower=computes(lambda now: 1.5 if int(now / 90) % 3 == 1 else 1.0)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_growth(name):
    assert Run(QUIET[name], HOUR / 2).found == []


def test_the_same_order_of_batches_in_each_epoch_grows_only_once():
    """Batches that are sorted by length: the first epoch grows, and the later ones are as slow as it was."""
    run = Run(Loop(slower=computes(lambda now: 1 + (now % 400) / 400)), HOUR)
    assert max(now for now, _ in run.found) < 800


def test_time_that_others_take_is_no_growth():
    slower = computes(ramp(1.6, 200))
    assert Run(Loop(slower=slower), BEGIN + 400, gpu_clock_hertz=lambda now: 1.98e9).found
    assert not Run(Loop(slower=slower), BEGIN + 400, gpu_clock_hertz=lambda now: 1.98e9 / slower(now)[1]).found
    assert not Run(Loop(slower=slower), BEGIN + 400, core_wait=lambda now: 0.18 * (slower(now)[1] - 1)).found
    assert not Run(Loop(slower=slower), BEGIN + 400, other_cores=lambda now: slower(now)[1]).found
    grows = Run(Loop(slower=computes(ramp(4, 200))), BEGIN + 400, other_cores=ramp(1.6, 200))
    assert grows.found, "others cannot make a run four times slower that has its core"


# -- in words ----------------------------------------------------------------------------------------------------------


def kept_graph(**signals):
    """A run like one that keeps the graph of all earlier steps, and its newest totals."""
    loop = Loop(step_seconds=0.013, wait_share=0.01, first=1.0, slower=computes(lambda now: 1 + now / 5))
    return Run(loop, 44, **signals)


def test_a_kept_graph_is_told_with_its_line_and_its_memory():
    run = kept_graph(training_bytes=lambda now: 3e8 + 5e6 * now)
    backward = LineShare("/home/me/train.py", 33, "main", "tensor.backward", 0.9, 0.9)
    finding = growth_finding(run.detector.growth, run.totals, [backward])
    assert finding.kind == "step_growth"
    assert "90 % of each step is tensor.backward at train.py:33" in finding.text
    assert "the memory of the training process has grown by" in finding.text
    assert finding.lines[0].line == 33
    (advice,) = finding.advice
    assert "loss.item()" in advice.action
    steps_then = run.totals.steps * 0.013
    assert advice.predicted_speedup is None, "it would depend on how long the run goes on"
    assert finding.share_ratio == pytest.approx(1 - steps_then / run.totals.loop_seconds, abs=0.05)


@pytest.mark.parametrize("followed", [False, True])
def test_the_line_that_grows_is_named_and_not_the_longest(followed):
    """As in a step that sleeps for 8 ms, and goes through a list that becomes longer and longer."""
    sleeps = (Spot("/home/me/train.py", 25, "main", "__main__"),)
    sums = (Spot("/home/me/train.py", 33, "main", "__main__"),)

    def part(first, second):
        profile = StackProfile()
        for stack, samples in ((sleeps, first), (sums, second)):
            for _ in range(samples):
                profile.add(stack, 1_000_000, 1_000_000)
        return profile

    newest = part(60, 60) if followed else None
    parts = [part(60, 12), part(54, 18), part(48, 30), part(42, 36)][: 2 if followed else 4]
    sampler, told = SimpleNamespace(parts=parts, newest=newest, follow=lambda: None), []
    monitor = ChangeMonitor(sampler, SimpleNamespace(tell=told.append))
    loop = Loop(step_seconds=0.010, wait_share=0.01, first=1.0, slower=computes(lambda now: 1 + now / 44))
    for totals, _ in ticks(loop, 44, random.Random(1)):
        monitor.tick(totals, SimpleNamespace(gpu=None, pressure=None, memory=None, torch_memory=None))
    monitor.tell(totals)
    assert "of each step is main at train.py:33 now" in told[-1].text
    assert [line.line for line in told[-1].lines] == [33, 25]


def test_other_growth_has_other_advice():
    run = kept_graph(training_bytes=lambda now: 3e8)
    metric = LineShare("/home/me/train.py", 40, "log", "numpy.mean", 0.8, 0.8)
    finding = growth_finding(run.detector.growth, run.totals, [metric])
    assert "numpy.mean at train.py:40" in finding.text
    assert "memory" not in finding.text
    assert "each step adds to" in finding.advice[0].action
    small = LineShare("/home/me/train.py", 50, "log", None, 0.1, 0.1)
    assert "train.py:50" not in growth_finding(run.detector.growth, run.totals, [small]).text
    run = Run(Loop(wait_share=0.5, slower=lambda now: (ramp(4, 200)(now), 1.0)), BEGIN + 5 * MINUTE)
    finding = growth_finding(run.detector.growth, run.totals, [metric])
    assert "waiting for data has grown" in finding.text
    assert "the data set adds to" in finding.advice[0].action
    assert not finding.lines, "they are of the steps, and not of the fetches"


# -- the trend of a short run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "kind"),
    [
        (lambda _now: 1.0, STEADY_TREND),
        (ramp(1.15, 500, begin=0), GROWS),
        (ramp(0.7, 500, begin=0), FASTER),
        (lambda now: 1.5 if now > BEGIN else 1.0, SLOWER),
    ],
)
def test_a_short_run_gets_a_verdict_on_its_trend(slower, kind):
    trend = Run(Loop(first=1.0, slower=computes(slower)), 500).trend
    assert trend.kind == kind
    assert trend.after_seconds / trend.before_seconds == pytest.approx(slower(450) / slower(130), rel=0.06)


def test_steps_that_scatter_too_much_did_not_keep_their_pace():
    uneven = computes(lambda now: 1 + 0.2 * (now > BEGIN) + 0.8 * random.Random(int(now / 6)).random())
    assert Run(Loop(first=1.0, slower=uneven), 500).trend.kind == UNCLEAR


def test_a_long_run_and_a_very_short_one_get_none():
    assert Run(Loop(), 1000).trend is None
    assert Run(Loop(), 12).trend is None


def test_a_trend_of_any_length_is_told():
    """Also of half a minute, of which each end has three blocks."""
    kinds = set()
    for seconds in range(12, 60):
        for seed in range(20):
            trend = Run(
                Loop(first=1.0, scatter=0.1, slower=computes(lambda now: 1 + now / 200)), seconds, seed=seed
            ).trend
            kinds.add(None if trend is None else trend.kind)
    assert kinds >= {None, GROWS, SLOWER, UNCLEAR}


def test_the_memory_of_a_long_run_is_bounded():
    assert len(Run(Loop(), 2 * HOUR).detector._blocks) <= 128
