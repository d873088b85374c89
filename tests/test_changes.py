"""Lasting changes of the steps: found in series of real shape, and in a real run. Goldens have what the report says."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest

import telemetry
from benchmarks.change_series import CHANGES, STEADY, changes_in
from benchmarks.step_series import Loop, ticks
from telemetry.cli import main
from telemetry.diagnosis import changes as module
from tests.running_agent import log_lines, scrape, wait_for

HOUR = 3600.0
CHANGED = 5400.0
"""When the simulated loops change."""


def only(changes):
    (change,) = changes
    return change


# -- what is found ---------------------------------------------------------------------------------------------


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
    detector, found, before, compute = module.ChangeDetector(), [], None, 0.0
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
    assert [each.what for each in change.companions] == ["compute_seconds", "optimizer_seconds"]
    grown = [each.after - each.before for each in change.companions]
    assert grown[1] == pytest.approx(grown[0], rel=0.1)


def test_a_drift_over_hours_is_found():
    changes = changes_in(CHANGES["25 % longer over 4 hours"], 6 * HOUR, 4)
    assert changes
    assert all(fields["ratio"] > 1 for _, fields in changes)


def test_the_way_back_is_logged_too():
    loop = Loop(slower=lambda now: (1.0, 1.2) if CHANGED <= now < CHANGED + HOUR else (1.0, 1.0))
    (_, slower), (_, faster) = changes_in(loop, 4 * HOUR, 6)
    assert slower["ratio"] > 1.1 > 1 > faster["ratio"]


# -- what is no change -----------------------------------------------------------------------------------------


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
    detector = module.ChangeDetector()
    for number in range(5000):
        detector.add(module.LoopBlock(30.0 * number, 100 * number, 100, 1.0, 29.0))
    kept = len(detector._old) + len(detector._recent)
    assert kept <= module.MAX_OLD + module.MAX_RECENT
    assert detector.ratio == 1.0


# -- a real run ------------------------------------------------------------------------------------------------


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.2)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.2)


def test_a_real_loop_that_becomes_slower(tmp_path, short_blocks, capsys):
    """The log, the metric and the report tell it."""
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=1, start_line=False)
    pause = 0.005

    def ratio():
        return scrape(agent).get(("training_step_change_ratio",))

    try:
        assert ratio() is None  # nothing is known yet
        began = time.monotonic()
        for number, _ in enumerate(telemetry.watch(range(1_000_000))):
            time.sleep(pause)
            if number % 50 == 0 and pause == 0.005 and ratio() == 1:
                pause = 0.02
            if (number % 50 == 0 and (ratio() or 0) > 1.5) or time.monotonic() - began > 60:
                break
        assert ratio() > 1.5
        change = wait_for(lambda: [each for each in log_lines(agent) if each["event"] == "change"])[0]
    finally:
        telemetry.stop()
    assert change["part"] == "compute"
    assert change["ratio"] > 1.5
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["changes"][0]
    assert set(told) == {"at", "step", "rank", "ratio", "part", "with"}
    assert told["ratio"] == change["ratio"]
    assert told["at"].endswith("Z")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "slower: compute takes" in capsys.readouterr().out


def test_the_benchmark_gives_what_its_page_needs():
    from benchmarks import change_series

    figures = {
        "days": 1,
        "runs": 1,
        "false_per_day": {"quiet": change_series.steady(replace(STEADY["quiet"], step_seconds=20.0), 1)},
        "changes": {"lost": {"found": 0.0, "median_minutes": None, "p95_minutes": None, "median_ratio": None}},
    }
    assert "| quiet | 0.00 |" in change_series.text_of(figures)
