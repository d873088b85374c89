"""Changes of the steps, in series of real shape and in a real run: lasting ones in hours, and growth within minutes."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import pytest

import telemetry
from benchmarks.change_series import CHANGES, STEADY, changes_in
from benchmarks.step_series import Loop, ticks
from telemetry.agent.step_monitor import StepMonitor
from telemetry.cli import main
from telemetry.diagnosis import changes as module
from telemetry.diagnosis.changes import Block, ChangeDetector, GrowthDetector
from telemetry.diagnosis.habits import habit_in
from telemetry.diagnosis.hot_lines import LineShare
from telemetry.diagnosis.step_time import growth_finding
from telemetry.model.records import FASTER, GROWS, SLOWER, UNCLEAR
from telemetry.model.records import STEADY as STEADY_TREND
from telemetry.util.profiles import StackProfile, StackTime
from telemetry.util.stacks import Spot
from tests.running_agent import log_lines, scrape, wait_for

MINUTE = 60.0
HOUR = 3600.0
CHANGED = 5400.0
"""When the simulated loops change."""
BEGIN = 5 * MINUTE
"""When the simulated loops begin to grow."""


def ramp(factor, seconds, *, begin=BEGIN):
    return lambda now: 1 + (factor - 1) * min(1.0, max(0.0, (now - begin) / seconds))


def computes(factor):
    return lambda now: (1.0, factor(now))


def only(changes):
    (change,) = changes
    return change


# -- lasting changes ---------------------------------------------------------------------------------------------------


def test_a_slow_down_is_found_with_its_moment_and_part():
    now, change = only(changes_in(CHANGES["compute 12 % longer"], 2 * HOUR, 1))
    assert now - CHANGED < 600
    assert abs(float(change["at"]) - CHANGED) < 120
    assert change["part"] == "compute"
    assert 1.08 < change["ratio"] < 1.14
    assert change["with"][0]["what"] == "compute_seconds"
    assert change["with"][0]["after"] > change["with"][0]["before"]


def test_longer_waits_come_with_longer_fetches():
    loop = Loop(wait_share=0.2, slower=lambda now: (2.0, 1.0) if now >= CHANGED else (1.0, 1.0))
    _, change = only(changes_in(loop, 2 * HOUR, 2))
    assert change["part"] == "data_wait"
    assert [each["what"] for each in change["with"]] == ["data_wait_seconds", "fetch_seconds"]


def test_a_lower_clock_of_the_gpu_is_named():
    _, change = only(changes_in(CHANGES["GPU clock 1980 to 1410 MHz"], 2 * HOUR, 3))
    clock = next(each for each in change["with"] if each["what"] == "gpu_clock_hertz")
    assert (round(clock["before"] / 1e6), round(clock["after"] / 1e6)) == (1980, 1410)


def test_the_part_of_the_compute_that_takes_longer_is_named():
    """All that a step takes longer is the optimizer's."""
    detector, found, before, compute = ChangeDetector(), [], None, 0.0
    for totals, _ in ticks(CHANGES["compute 12 % longer"], 2 * HOUR, random.Random(1)):
        compute = totals.ledger_seconds["compute"]
        before = compute if totals.wall_seconds < CHANGED else before
        usual = before + (compute - before) / 1.12
        parts = {
            "forward": 0.3 * usual,
            "backward": 0.5 * usual,
            "optimizer": compute - 0.9 * usual,
            "other": 0.1 * usual,
        }
        found.append(detector.tick(replace(totals, compute_parts=parts | {"compile": 0.0}), {}))
    change = only([change for change in found if change is not None])
    assert [each.what for each in change.figures] == ["compute_seconds", "optimizer_seconds"]
    grown = [each.after - each.before for each in change.figures]
    assert grown[1] == pytest.approx(grown[0], rel=0.1)


@pytest.mark.parametrize("begin", [0.0, CHANGED])
def test_a_drift_over_hours_is_found(begin):
    changes = changes_in(Loop(slower=computes(ramp(1.25, 4 * HOUR, begin=begin))), 6 * HOUR, 4)
    assert changes
    assert all(fields["ratio"] > 1 for _, fields in changes)


def test_the_way_back_is_logged_too():
    """Also if the steps were slow only just long enough to be told."""
    loop = Loop(slower=lambda now: (1.0, 1.2) if CHANGED <= now < CHANGED + HOUR else (1.0, 1.0))
    (_, slower), (_, faster) = changes_in(loop, 4 * HOUR, 6)
    assert slower["ratio"] > 1.1 > 1 > faster["ratio"]
    detector = ChangeDetector()
    seconds = [1.0] * 40 + [2.0] * 6 + [1.0] * 40
    found = [detector.add(Block(30.0 * at, 30.0 * at, at, 1, 0.0, each)) for at, each in enumerate(seconds)]
    assert [change.ratio for change in found if change is not None] == [2.0, 0.5]
    assert detector.ratio == 1.0


def test_faster_steps_are_the_measure_from_then_on():
    """Told after some stretches, because nothing has to be done soon. Then the old pace is a slow-down."""
    loop = Loop(slower=lambda now: (1.0, 0.8) if CHANGED <= now < CHANGED + 2 * HOUR else (1.0, 1.0))
    (now, faster), (_, slower) = changes_in(loop, 5 * HOUR, 6)
    assert CHANGED + 15 * MINUTE < now < CHANGED + 30 * MINUTE
    assert faster["ratio"] < 0.9 < 1.1 < slower["ratio"]


@pytest.mark.parametrize("name", [name for name in STEADY if name != "long sequences, 5 of 25 minutes"])
def test_a_loop_that_does_not_change_logs_nothing(name):
    assert changes_in(STEADY[name], 2 * HOUR, 1) == []


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_what_the_run_has_done_before_is_no_change(seed):
    """Long sequences come in stretches. The first are told; later not, when blocks are longer than a stretch, too."""
    changes = changes_in(STEADY["long sequences, 5 of 25 minutes"], 24 * HOUR, seed)
    assert changes
    assert max(now for now, _ in changes) < 5 * HOUR


def test_a_stretch_long_ago_hides_no_change():
    """Slow for 10 minutes once: a day later that is no measure of what is usual."""
    loop = Loop(slower=lambda now: (1.0, 1.3) if CHANGED <= now < CHANGED + 600 or now >= 24 * HOUR else (1.0, 1.0))
    changes = changes_in(loop, 25 * HOUR, 11)
    assert [fields["ratio"] > 1 for now, fields in changes if now > 24 * HOUR] == [True]


def test_a_small_change_is_none():
    loop = Loop(slower=lambda now: (1.0, 1.03) if now >= CHANGED else (1.0, 1.0))
    assert changes_in(loop, 3 * HOUR, 10) == []
    assert changes_in(Loop(pause_every_seconds=1800, pause_seconds=300), 3 * HOUR, 7) == [], "single pauses"


def test_the_memory_of_a_long_run_is_bounded():
    detector, growth = ChangeDetector(), GrowthDetector()
    for totals, _ in ticks(Loop(step_seconds=2.0), 12 * HOUR, random.Random(1)):
        detector.tick(totals, {})
        growth.tick(totals, {})
    assert len(detector._stretches) == module.MAX_STRETCHES
    assert len(detector._newest) < 2 * module.STRETCH
    assert len(growth._blocks) <= module.MAX_SHORT
    assert detector.ratio == 1.0


# -- growth within minutes ---------------------------------------------------------------------------------------------


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
    assert abs(growth.at.at_seconds - begin) < max(90, 0.4 * seconds)


def kept_graph(**signals):
    """A run like one that keeps the graph of all earlier steps."""
    loop = Loop(step_seconds=0.013, wait_share=0.01, first=1.0, slower=computes(lambda now: 1 + now / 5))
    return Run(loop, 44, **signals)


def test_a_run_that_grows_from_its_first_step_is_told_in_half_a_minute():
    now, growth = kept_graph().found[0]
    assert now <= 30
    assert growth.before_seconds == pytest.approx(0.020, rel=0.25), "the mean of the first block"


def test_waits_that_grow():
    loop = Loop(wait_share=0.3, slower=lambda now: (ramp(4, 200)(now), 1.0))
    _, growth = Run(loop, BEGIN + 5 * MINUTE).found[0]
    assert growth.part == "data_wait"
    assert growth.figures[0].after > 1.2 * growth.figures[0].before


def test_growth_that_goes_on_is_one_growth_from_its_begin():
    run = Run(Loop(slower=computes(ramp(20, HOUR))), BEGIN + HOUR)
    first, last = run.found[0][1], run.found[-1][1]
    assert abs(last.at.at_seconds - first.at.at_seconds) < 2 * MINUTE
    assert last.before_seconds == pytest.approx(0.2, rel=0.15)
    assert last.ratio > 10
    assert last.grew_seconds > 0.8 * HOUR


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


def test_steps_that_scatter_on_a_loaded_machine_do_not_grow():
    """Milliseconds of a step in the blocks of a run that became slower while the load of the machine went up."""
    recorded = [13, 13, 16, 16, 13, 15, 14, 16, 16, 17, 19, 17, 21, 19, 15, 32]
    assert not module.grows(recorded)


# -- growth in words ---------------------------------------------------------------------------------------------------


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
    assert finding.share_ratio == pytest.approx(1 - steps_then / run.totals.loop_seconds, abs=0.2)


@pytest.mark.parametrize("followed", [False, True])
def test_the_line_that_grows_is_named_and_not_the_longest(followed):
    """As in a step that sleeps for 8 ms, and goes through a list that becomes longer and longer."""
    sleeps = (Spot("/home/me/train.py", 25, "main", "__main__"),)
    sums = (Spot("/home/me/train.py", 33, "main", "__main__"),)

    def part(first, second):
        profile = StackProfile()
        for stack, samples in ((sleeps, first), (sums, second)):
            for _ in range(samples):
                profile.add(stack, StackTime(1_000_000, 1_000_000))
        return profile

    newest = part(60, 60) if followed else None
    parts = [part(60, 12), part(54, 18), part(48, 30), part(42, 36)][: 2 if followed else 4]
    sampler, told = SimpleNamespace(parts=parts, newest=newest, follow=lambda: None), []
    loop = Loop(step_seconds=0.010, wait_share=0.01, first=1.0, slower=computes(lambda now: 1 + now / 44))
    run = Run(loop, 44)
    StepMonitor(None, sampler, SimpleNamespace(tell=told.append), None).tell_growth(run.detector.growth, run.totals)
    assert "of each step is main at train.py:33 now" in told[-1].text
    assert [line.line for line in told[-1].lines] == [33, 25]


def test_other_growth_has_other_advice():
    run = kept_graph(training_bytes=lambda now: 3e8)
    metric = LineShare("/home/me/train.py", 40, "log", "numpy.mean", 0.8, 0.8)
    finding = growth_finding(run.detector.growth, run.totals, [metric])
    assert "numpy.mean at train.py:40" in finding.text
    assert "memory" not in finding.text
    assert "each step adds to" in finding.advice[0].action
    drawn = replace(metric, calls="random.sample", habit=habit_in((Spot("/lib/random.py", 400, "sample", "random"),)))
    known = growth_finding(run.detector.growth, run.totals, [drawn]).advice[0].action
    assert known.startswith("random.sample at train.py:40: draw from a list or an array")
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
        (lambda now: 1 + 0.2 * (now > BEGIN) + 0.8 * random.Random(int(now / 6)).random(), UNCLEAR),
    ],
)
def test_a_short_run_gets_a_verdict_on_its_trend(slower, kind):
    trend = Run(Loop(first=1.0, slower=computes(slower)), 500).trend
    assert trend.kind == kind
    if kind != UNCLEAR:
        assert trend.after_seconds / trend.before_seconds == pytest.approx(slower(450) / slower(130), rel=0.06)


def test_a_long_run_and_a_very_short_one_get_none():
    assert Run(Loop(), 1000).trend is None
    assert Run(Loop(), 12).trend is None


def test_a_trend_of_any_length_is_told():
    """Also of half a minute, of which each end has two blocks."""
    loop = Loop(first=1.0, scatter=0.1, slower=computes(lambda now: 1 + now / 200))
    trends = [Run(loop, seconds, seed=seed).trend for seconds in range(12, 60, 3) for seed in range(10)]
    assert {None if trend is None else trend.kind for trend in trends} >= {None, GROWS, SLOWER, UNCLEAR}


# -- a real run --------------------------------------------------------------------------------------------------------


def test_a_real_loop_that_becomes_slower(tmp_path, monkeypatch, capsys):
    """The log, the metric and the report tell it."""
    monkeypatch.setattr(module, "LONG_SECONDS", 0.2)
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=1, start_line=False)
    pause, slower = 0.005, None

    def ratio():
        return scrape(agent).get(("training_step_change_ratio",))

    try:
        assert ratio() is None  # nothing is known yet
        began = time.monotonic()
        for number, _ in enumerate(telemetry.watch(range(1_000_000))):
            time.sleep(pause)
            if number % 50 == 0 and pause == 0.005 and ratio() == 1:
                pause = 0.04
            if number % 50 == 0 and pause == 0.04:
                slower = ratio()
            if (slower or 0) > 1.5 or time.monotonic() - began > 60:
                break
        assert slower > 1.5
        logged = wait_for(lambda: [each for each in log_lines(agent) if each["event"] == "change"])
        change = max(logged, key=itemgetter("ratio"))  # others may use the cores, too
    finally:
        telemetry.stop()
    assert change["part"] == "compute"
    assert change["ratio"] > 1.5
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    told = max(json.loads(capsys.readouterr().out)["changes"], key=itemgetter("ratio"))
    assert set(told) == {"at", "step", "rank", "ratio", "part", "with"}
    assert told["ratio"] == change["ratio"]
    assert told["at"].endswith("Z")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "slower: compute takes" in capsys.readouterr().out
