"""Where the books of a run take the time from in which it was stuck, in logs written by hand."""

from __future__ import annotations

import pytest

from telemetry.report.log_reader import load
from telemetry.report.stuck_time import stuck_in_saves
from tests.test_report_attempts import Process, at, job


class StuckOnce(Process):
    """Steps of a second from five seconds on, a tenth of it wait, and 100 s after 15 of them without progress."""

    category = "compute"

    def stuck(self, category: str, *, begin=20.0):
        when = dict(opened=at(begin + 30), cause="unknown", first_step=15)
        when["evidence"] = {"stuck_in": category, "stuck_for_seconds": 30.0}
        self.category = category
        self._line("stall_open", begin + 30, **when)
        self._line("stall_close", begin + 100, closed=at(begin + 100), last_step=16, **when)
        return self

    def totals(self, seconds, steps):
        found = super().totals(seconds if seconds <= 20 else seconds - 100, steps)
        if seconds > 20:
            found["ledger_total_seconds"][self.category] += 100
            found |= dict(wall_seconds=seconds - 1)
        return found

    def until(self, event, seconds: float):
        steps = int(seconds - 105)
        self._line(event, seconds, **self.totals(seconds, steps))
        return self

    def saved(self, step: int, seconds: float):
        loop = self.totals(seconds, step)["ledger_total_seconds"]
        self._line("phase", seconds, name="checkpoint", started=at(seconds), seconds=0.0, complete=True, steps_total=step,
                   optimizer_steps_total=step, loop_seconds={c: loop[c] for c in ("data_wait", "compute")})  # fmt: skip
        return self


STUCK = dict.fromkeys(["productive", "data_wait", "redone", "stuck", "startup"], 0.0) | dict(stuck=100.0, startup=5.0)
OF_100_KEPT_60_LOST = STUCK | dict(productive=90.0, data_wait=10.0, redone=60.0)


def booked(folder) -> dict[str, float]:
    seconds = job(folder)["goodput"]["seconds"]
    return {category: round(seconds[category], 3) for category in STUCK}


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_that_ends_is_no_wait_and_no_compute(tmp_path, category):
    StuckOnce(tmp_path, begin=0, pid=1).window(20).stuck(category).until("run_end", 220).write()
    assert booked(tmp_path) == STUCK | dict(productive=103.5, data_wait=11.5)


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_before_the_newest_checkpoint_takes_nothing_from_redone(tmp_path, category):
    process = StuckOnce(tmp_path, begin=0, pid=1).window(20).stuck(category)
    process.saved(100, 205).until("window", 265).write()
    assert booked(tmp_path) == OF_100_KEPT_60_LOST


@pytest.mark.parametrize("category", ["data_wait", "compute"])
def test_a_hang_after_the_newest_checkpoint_is_taken_from_redone(tmp_path, category):
    process = StuckOnce(tmp_path, begin=0, pid=1).saved(15, 20).window(20).stuck(category)
    process.until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=13.5, data_wait=1.5, redone=145.0)


def test_a_hang_in_the_step_of_the_checkpoint_before_it(tmp_path):
    process = StuckOnce(tmp_path, begin=0, pid=1).stuck("compute")
    process.saved(16, 121).until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=14.4, data_wait=1.6, redone=144.0)


def test_a_hang_in_the_step_of_the_checkpoint_after_it(tmp_path):
    process = StuckOnce(tmp_path, begin=0, pid=1).saved(16, 20).stuck("compute")
    process.until("window", 265).write()
    assert booked(tmp_path) == STUCK | dict(productive=13.5, data_wait=1.5, redone=145.0)


def test_a_hang_of_the_first_batch_is_no_startup(tmp_path):
    process = Process(tmp_path, begin=0, pid=1)
    evidence = {"stuck_in": "data_wait", "stuck_for_seconds": 540.0}
    process._line("stall_open", 545, opened=at(545), cause="unknown", evidence=evidence, first_step=0)
    process._line("stall_close", 605, opened=at(545), closed=at(605), evidence=evidence, first_step=0, last_step=1)
    totals = process.totals(705, 100)
    totals["ledger_total_seconds"] |= dict(data_wait=610.0, compute=90.0)
    process._line("run_end", 705, first_wait_seconds=600.0, **totals)
    process.write()
    assert booked(tmp_path) == dict(stuck=600.0, startup=5.0, productive=90.0, data_wait=10.0, redone=0.0)


@pytest.mark.parametrize(("closes", "seconds"), [(True, 0.5), (False, 30.5)])
def test_a_hang_in_a_checkpoint_that_went_on_is_no_usual_cost_of_one(tmp_path, closes, seconds):
    """One that was killed in it has written no checkpoint, so that its time is not in their sum."""
    process = Process(tmp_path, begin=0, pid=1).window(20)
    evidence = {"stuck_in": "checkpoint", "stuck_for_seconds": 20.0}
    process._line("stall_open", 40, opened=at(40), cause="unknown", evidence=evidence, first_step=15)
    if closes:
        process._line("stall_close", 50, opened=at(40), closed=at(50), cause="unknown", evidence=evidence)
    process.checkpoint(15)
    process.lines[-1]["seconds"] = 30.5
    process.window(60).write()
    (log,) = load(tmp_path)
    assert log.save_seconds - stuck_in_saves(log) == pytest.approx(seconds)
