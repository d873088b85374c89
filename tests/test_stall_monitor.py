"""From the accounting to stalls: which part of a wait counts, with the clock of the host or of the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from telemetry.hooks.ring import Ring
from telemetry.hooks.tracker import StepTracker
from telemetry.records import Deliveries, ProcessSample
from tests.monitored_rank import Run


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


def test_the_first_batch_is_no_stall_however_long_it_is_waited_for(run):
    run.wait_for_the_first_batch()
    for second in range(9, 25):
        for tenth in range(10):
            run.request(second - 0.4 + tenth / 10, second - 0.39 + tenth / 10)
        run.tick(second + 0.55)
    assert run.causes == []


def test_the_waits_for_batches_are_taken_apart_from_tick_to_tick(run):
    run.request(0.5, 0.6)
    for second in range(1, 12):
        run.request(second - 0.3, second + 0.5)
        taken_apart = dict(fetch_wait=0.1, transfer_wait=0.5, transfer_wait_long_fetch=0.3, head_of_line=0.05)
        deliveries = Deliveries(
            batches=second,
            fetch_wait_seconds=taken_apart["fetch_wait"] * second,
            transfer_wait_seconds=taken_apart["transfer_wait"] * second,
            from_busy=second,
            transfer_wait_busy_worker_seconds=0.4 * second,
            transfer_wait_long_fetch_seconds=taken_apart["transfer_wait_long_fetch"] * second,
            head_of_line_wait_seconds=taken_apart["head_of_line"] * second,
        )
        run.tick(second + 0.6, deliveries=deliveries)
    ((_, stall),) = [line for line in run.lines if line[0] == "stall_open"]
    evidence = stall["evidence"]
    ticks = round(evidence["fetch_wait_seconds"] / 0.1)
    assert ticks >= 5
    for name in taken_apart:
        assert evidence[f"{name}_seconds"] == pytest.approx(taken_apart[name] * ticks)
    assert evidence["moving_from_busy_seconds"] == pytest.approx(0.4)


def test_a_later_batch_that_is_waited_for_as_long_is_one(run):
    run.request(0.5, 0.6)
    for second in range(1, 12):
        run.tick(second, waiting_since=0.7, fetching_seconds=second - 0.7)
    assert run.causes == ["worker_stuck"]


@pytest.mark.parametrize("felt", [pytest.param(8.0, id="all of it"), pytest.param(1.0, id="little of it")])
def test_the_first_wait_is_none_either_where_the_gpu_tells_of_it_later(run, felt):
    run.exposed = 0.0
    run.wait_for_the_first_batch()
    run.request(9.0, 9.01)
    run.tick(9.5)
    run.exposed = felt  # its events have been read
    for second in range(10, 20):
        run.request(second, second + 0.01)
        run.tick(second + 0.5)
    assert run.causes == []
    for second in range(20, 32):  # and what is exposed from now on is no first wait
        for half in (0.0, 0.5):
            run.request(second + half, second + half + 0.3)
        run.exposed += 0.6
        run.tick(second + 0.99)
    assert run.causes == ["workers_io_bound"]


@pytest.mark.parametrize("cpu", [0.0, 20.0], ids=["stopped", "running"])
def test_time_in_which_the_process_was_stopped_is_no_wait(run, cpu):
    """Ticks that come four seconds late: nothing ran meanwhile, or a thread did that kept the interpreter."""
    used = 0.0
    for second in range(1, 40, 4):
        for tenth in range(8):
            run.request(second + tenth / 10, second + 0.05 + tenth / 10)
        run.request(second + 0.8, second + 4.0)
        used += cpu
        run.samples["process"] = ProcessSample(used, 0, 1)
        run.tick(second + 3.99)
    assert run.causes == (["workers_io_bound"] if cpu else [])


def test_a_clock_is_low_by_what_it_is_in_this_run(run):
    """At its power cap a GPU never has its highest clock: heat costs what it takes from there."""
    gpu = dict(utilization_ratio=1.0, sm_clock_max_hertz=2.0e9)
    for second in range(1, 28):
        held_back = second > 12
        run.samples["nvml"] = SimpleNamespace(
            **gpu,
            energy_joules=None,
            sm_clock_hertz=0.7e9 if held_back else 1.4e9,
            throttled=("hw_thermal",) if held_back else ("sw_power_cap",),
        )
        for tenth in range(10):
            run.request(second + tenth / 10, second + 0.001 + tenth / 10)
        run.tick(second + 0.95)
    (stall,) = (fields for event, fields in run.lines if event == "stall_open")
    assert stall["cause"] == "gpu_throttled"
    slowed = run.stall_monitor.stall_fields()["evidence"]
    assert slowed["gpu_slowed_seconds"] == pytest.approx(0.5 * slowed["compute_seconds"], rel=0.05)


def test_how_many_batches_a_step_takes_is_in_the_evidence(run):
    for second in range(1, 15):
        for tenth in range(5):
            begin = second + tenth / 5
            run.request(begin, begin + 0.1)
            run.request(begin + 0.1, begin + 0.15, opens=False)
        run.tick(second + 0.99, fetches_total=10 * second)
    opened = next(fields for event, fields in run.lines if event == "stall_open")
    assert opened["evidence"]["batches_per_step"] == pytest.approx(2.0, rel=0.1)


def test_fetches_of_a_tick_without_busy_time_move_to_no_other_tick(run):
    """As after the workers of an epoch have been replaced."""
    for second in range(1, 15):
        for tenth in range(5):
            run.request(second + tenth / 5, second + tenth / 5 + 0.1)
        run.tick(second + 0.99, fetches_total=10 * second, busy_ratio=None if second % 2 else 1.0)
    opened = next(fields for event, fields in run.lines if event == "stall_open")
    assert opened["evidence"]["fetch_seconds"] == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("renaming", "predicted"), [pytest.param(0.2, 1 / 0.526, id="renamed"), pytest.param(0.0, 1 / 0.733, id="written")]
)
def test_what_steps_with_a_checkpoint_take_besides_is_won_with_it(run, renaming, predicted):
    """Ten steps a second, and a checkpoint of 0.3 s after the tenth; then a rename that frees the last one's file."""
    step = (0.7 - renaming) / 10
    for second in range(1, 14):
        for number in range(10):
            run.request(second + number * step, second + number * step)
            if not number:  # the last step has ended
                run.tick(second + step / 2)
        run.checkpoint(second + 0.7 - renaming, second + 1 - renaming)
    ((event, stall),) = run.lines
    advice, _ = stall["advice"]
    assert (event, stall["cause"]) == ("stall_open", "checkpoint")
    assert advice["predicted_speedup"] == pytest.approx(predicted, rel=0.05)
    assert advice["action"] == f"write a checkpoint every {190 if renaming else 90} steps, not every 10"
    assert ("more than other steps" in advice["because"]) is (renaming > 0)
