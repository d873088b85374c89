"""Stalls open and close as they should, their causes are named by their own evidence, and what is advised."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from telemetry.agent.stall_monitor import stall_record
from telemetry.diagnosis.advice import WORTH_IT
from telemetry.diagnosis.causes import CAUSES, advise, shares_of
from telemetry.diagnosis.costs import costs
from telemetry.diagnosis.stalls import DetectedStall, StallDetector
from telemetry.diagnosis.stragglers import held_up_by
from telemetry.model.records import Advice, Deliveries, GpuSample, ProcessSample, RankPace
from telemetry.model.totals import Tick, Totals, together
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.util.identity import identify
from tests.monitored_rank import Run
from tests.slice_cases import CASES, STARVED, a_slice, first, pace, slices, with_workers
from tests.slices import Detector, evidence_over
from tests.zoo.test_replay import RECORDED, evidence_of


@pytest.mark.parametrize("case", CASES)
def test_a_stall_opens_and_closes_with_the_cause_that_its_evidence_shows(case):
    cause, lost = case.partition(",")[0], costs(evidence_over([CASES[case]]))
    assert max(lost, key=lost.get) == cause
    machine = Detector(30)
    assert machine.play(*[CASES[case]] * 40).count("opened") == 1
    assert machine.stall.cause == cause
    assert machine.play(*[a_slice()] * 40)[-1] == "closed"
    assert machine.stall is None


QUIET = {
    "healthy": a_slice(wait=0.05, compute=0.95),
    "hidden wait": a_slice(wait=0.5, compute=0.5, exposed=0.01),
    "a peer that waits as long": a_slice(wait=0.1, compute=0.9, peers=(pace(1, compute=0.9, exposed=0.1),)),
    "a peer whose wait nobody feels": a_slice(peers=(pace(1, compute=0.3, exposed=0.02),)),
    "a peer with a pace of its own": a_slice(peers=(pace(1, steps=20, compute=0.3, exposed=0.7),)),
    "a peer that is in sync as long": a_slice(
        samples=50, in_sync=30, peers=(pace(1, stack_samples=50, in_sync_samples=28),)
    ),
    "a peer whose host waits for its own GPU": a_slice(
        samples=50,
        in_sync=40,
        gpu_utilization_ratio=0.99,
        peers=(pace(1, stack_samples=50, in_sync_samples=2, on_gpu=True, gpu_busy_ratio=0.97),),
    ),
    "a peer that was hardly looked at": a_slice(samples=50, in_sync=40, peers=(pace(1, stack_samples=3),)),
    "cores that others take": with_workers(
        busy=0.1, cpu=0.05, runnable=0.05, wait=0.0, compute=1.0, own_runnable=0.5, cores=2.0
    ),
    "cores that others take most of": with_workers(
        busy=0.9,
        cpu=0.3,
        runnable=0.6,
        wait=0.0,
        compute=1.0,
        own_runnable=0.5,
        process_cpu=0.5,
        cores=8.0,
        host_cores=8,
        host_cpu_ratio=7.7 / 8,
    ),  # fmt: skip
    "a peer whose host waits for an accelerator without utilisation": a_slice(
        samples=50, in_sync=40, peers=(pace(1, stack_samples=50, in_sync_samples=2, on_gpu=True),)
    ),
    "a GPU that is waited for": a_slice(gpu_utilization_ratio=0.95),
    "a GPU idle in an evaluation": a_slice(compute=0.5, evaluation=0.5, gpu_utilization_ratio=0.5),
    "a GPU at its power cap": a_slice(gpu_utilization_ratio=1.0, gpu_clock_ratio=0.7, gpu_throttled=("sw_power_cap",)),
    "evaluation": a_slice(wait=0.0, compute=0.05, evaluation=0.95, steps=0),
    "no steps": a_slice(**STARVED, steps=0),
    "exposure not known": a_slice(**STARVED, exposed=None),
    "one start of workers": a_slice(wait=0.05, compute=0.95, boundary_wait=0.05, boundaries=0),
    "start-up": a_slice(wait=0.0, compute=0.0, seconds=1.0, steps=0),
}


@pytest.mark.parametrize("what", QUIET)
def test_what_is_no_stall(what):
    assert Detector(30).play(*[QUIET[what]] * 100) == []


def test_the_first_batch_and_the_end_of_an_epoch_are_no_stall():
    first = a_slice(wait=12.0, compute=0.2, steps=1, boundary_wait=12.0, boundaries=1)
    end = a_slice(wait=4.0, compute=0.0, steps=0, boundary_wait=4.0, boundaries=1)
    assert Detector(30).play(first, *[a_slice()] * 60, end, *[a_slice()] * 60) == []


def test_a_machine_that_slept_is_no_stall():
    asleep = a_slice(wait=4000.0, compute=0.1)
    assert Detector(30).play(*[a_slice()] * 40, asleep, *[a_slice()] * 40) == []


SHARED = with_workers(
    busy=0.4, cpu=0.4, ready=3, fetch_wait=0.5, transfer_wait=0.5, outlier_wait=0.1, boundary_wait=0.1, boundaries=2,
    wait=0.3, compute=0.7,
)  # fmt: skip
"""A starving run: a tenth of it each for workers to start, for fetches, and for transfers."""


def test_waits_of_several_causes_are_one_stall():
    lost = costs(evidence_over([SHARED]))
    assert len(lost) == 3
    assert max(lost.values()) < 0.2 < sum(lost.values())
    machine = Detector()
    assert machine.play(*[SHARED] * 12)[0] == "opened"
    fewer = dataclasses.replace(SHARED, wait=0.15, exposed=0.15, boundary_wait=0.05, compute=0.85)
    assert machine.play(*[fewer] * 30) == ["held"] * 30, "none of the three costs a tenth any more"
    assert "closed" in machine.play(*[a_slice()] * 12)


def test_a_stall_closes_at_a_lower_share_than_it_opens_at():
    fifteen = a_slice(source="training_thread", wait=0.15, compute=0.85)
    machine = Detector()
    assert machine.play(*[fifteen] * 30) == []
    machine.play(*[CASES["loader_on_training_thread"]] * 12)
    assert machine.play(*[fifteen] * 30) == ["held"] * 30
    assert "closed" in machine.play(*[a_slice(source="training_thread", wait=0.05, compute=0.95)] * 12)


def test_a_stall_has_the_name_of_what_cost_most_of_it():
    machine = Detector()
    machine.play(*[CASES["workers_io_bound"]] * 12)
    assert machine.play(*[CASES["workers_cpu_bound"]] * 40).count("renamed") == 1
    assert machine.stall.cause == "workers_cpu_bound"


def test_a_stall_that_closes_still_has_the_evidence_it_had():
    """What to change is not read from the window in which the run has recovered."""
    machine = Detector()
    machine.play(*[CASES["loader_on_training_thread"]] * 12)
    closed = next(c for _ in range(12) if (c := machine.update(a_slice(source="training_thread"))).kind == "closed")
    assert closed.stall.evidence.wait_seconds >= 0.2 * closed.stall.evidence.loop_seconds


def test_steps_of_many_seconds_are_judged_as_others_are():
    """A step of 20 s, half of it waiting, in slices of a second: a window of 30 s never holds five of them."""
    waiting = a_slice(source="training_thread", wait=1.0, compute=0.0, steps=0)
    computing = [a_slice(source="training_thread", steps=int(last)) for last in [*[False] * 9, True]]
    machine = Detector(30)
    assert "opened" in machine.play(*[*[waiting] * 10, *computing] * 12)
    assert machine.stall.cause == "loader_on_training_thread"
    assert machine.stall.evidence.steps >= 9


@pytest.mark.parametrize(("between", "opened"), [(1800, 0), (60, 1)])
def test_a_checkpoint_costs_what_it_takes_of_the_time_between_two(between, opened):
    writing = a_slice(compute=0.0, checkpoint=1.0, steps=0)
    kinds = Detector(30).play(*[*[a_slice()] * between, *[writing] * 45] * 3)
    assert ("opened" in kinds) is bool(opened)


def test_what_the_first_checkpoints_of_a_run_took_is_remembered():
    """The first two take a second each, the others 0.4 s."""
    machine = Detector(30)
    for number in range(60):
        took = 1.0 if number < 2 else 0.4
        machine.update(a_slice(seconds=1 + took, compute=1.0, checkpoint=took, steps=10, checkpoint_steps=1))
    assert machine.stall.cause == "checkpoint"
    evidence = machine.stall.evidence
    assert evidence.checkpoint_seconds / evidence.checkpoints == pytest.approx(0.4)  # the window has forgotten them
    assert evidence.early_checkpoint_seconds == pytest.approx(1.0)


def test_a_tick_that_is_skipped_is_in_no_window():
    """A process that was stopped for 20 s in the middle of a stall: it goes on as if nothing had been."""
    with_it, without = Detector(), Detector()
    for second in range(20):
        if second == 12:
            with_it.skip(a_slice(source="training_thread", wait=0.0, compute=20.0, steps=0))
        for machine in (with_it, without):
            machine.update(CASES["loader_on_training_thread"])
    assert with_it.stall.lost_seconds == pytest.approx(without.stall.lost_seconds)
    assert with_it.stall.loop_seconds == pytest.approx(without.stall.loop_seconds)
    assert with_it.stall.evidence.window_seconds == pytest.approx(without.stall.evidence.window_seconds)


def test_it_takes_enough_of_a_window():
    machine = Detector(30)
    assert machine.play(*[a_slice(**STARVED)] * 14) == []
    assert machine.play(a_slice(**STARVED)) == ["opened"]


SLOW_READS = CASES["workers_io_bound"]


@pytest.mark.parametrize(
    ("window", "parts", "cause"),
    [
        pytest.param(30, [SLOW_READS] * 5, "workers_io_bound", id="judged by what there is of it"),
        pytest.param(30, [SLOW_READS, *[a_slice()] * 5], None, id="too little of it"),
        pytest.param(30, [a_slice(**STARVED, steps=40)], None, id="too short"),
        pytest.param(10, [*[SLOW_READS] * 12, *[a_slice()] * 12, *[SLOW_READS] * 3], None, id="closed before"),
    ],
)
def test_a_run_that_ends_early(window, parts, cause):
    machine = Detector(window)
    machine.play(*parts)
    change = machine.last()
    assert (change and (change.kind, change.stall.cause)) == (cause and ("opened", cause))


def test_peers_that_cannot_be_read_for_a_moment_do_not_end_a_stall():
    machine = Detector()
    machine.play(*[CASES["straggler"]] * 12)
    assert machine.play(a_slice()) == ["held"]


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("samples", "opens"), [(10, False), (100, True)])
def test_what_may_be_chance_in_the_samples_opens_no_stall(samples, opens, at_end):
    """Of this rank's samples 30 % are in synchronisation, of the other's 8 %: that is 22 %, more than 20 %."""
    peer = RankPace(1, 10.0, 100, 10.0, 0.0, 0.0, stack_samples=10 * samples, in_sync_samples=round(0.8 * samples))
    part = a_slice(steps=10, samples=samples, in_sync=round(0.3 * samples), peers=(peer,))
    machine = Detector(30 if at_end else 10)
    opened = [change for _ in range(12) if (change := machine.update(part)) is not None and change.kind == "opened"]
    assert machine.may_have_straggler, "so more samples are taken"
    opened += [machine.last()] if at_end else []
    assert [change.stall.cause for change in opened if change is not None] == ["straggler"] * opens


def test_the_ratio_is_that_of_the_stall():
    machine = Detector()
    machine.play(*[SLOW_READS] * 50)
    assert machine.stall.exposed_wait_ratio == pytest.approx(0.6)
    assert machine.stall.first_step == 0
    assert machine.stall.lost_seconds["workers_io_bound"] == pytest.approx(0.6 * 50, rel=0.1)


def test_a_share_that_rounds_below_zero_is_zero():
    stall = DetectedStall("checkpoint", 1, {"checkpoint": 1.0}, 10.0, -3.7e-291, evidence_over([a_slice()]))
    assert stall.exposed_wait_ratio == 0.0
    assert math.copysign(1, stall.exposed_wait_ratio) == 1


# -- properties that hold for any input --------------------------------------------------------------------------------


@given(st.lists(slices, min_size=1, max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_anything(pieces):
    machine = Detector(30)
    for part in pieces:
        change = machine.update(part)
        if change is not None:
            assert change.stall.cause in CAUSES
            assert change.stall.exposed_wait_ratio is None or 0 <= change.stall.exposed_wait_ratio <= 1
    evidence = evidence_over(pieces)
    assert set(costs(evidence)) <= set(CAUSES)
    for cause in CAUSES:
        for advice in advise(cause, evidence):
            gain = advice.predicted_speedup
            assert gain is None or (gain >= WORTH_IT and not math.isnan(gain))


GROWS = {
    "checkpoint": "checkpoint_seconds",
    "gc_pause": "garbage_seconds",
    "host_bound": "gpu_idle_seconds",
    "recompiling": "recompile_seconds",
    "gpu_throttled": "gpu_slowed_seconds",
    "worker_startup": "edge_wait_seconds",
    "batch_transfer": "transfer_wait_seconds",
    "uneven_batches": "fetch_wait_seconds",
    "worker_stuck": "long_fetches",
}
"""By cause, what its evidence is more of."""


@given(st.sampled_from(sorted(GROWS)), st.lists(slices, min_size=1, max_size=3), st.floats(0.0, 1e5))
@settings(max_examples=500, deadline=None)
def test_more_of_a_cause_s_evidence_never_turns_the_verdict_away_from_it(cause, pieces, more):
    """The case in which it is named, and whatever else there may be."""
    of_it = next(part for case, part in CASES.items() if case.partition(",")[0] == cause)
    for evidence in (evidence_over([of_it]), evidence_over(pieces)):
        lost = costs(evidence)
        if not lost or max(lost, key=lost.get) != cause:
            continue
        figure, seen = GROWS[cause], getattr(evidence, GROWS[cause])
        if cause in {"batch_transfer", "uneven_batches"} and not seen:
            continue  # it was named by other figures. A few matched waits leave the rest unknown
        then = (*seen, more) if isinstance(seen, tuple) else (seen or 0.0) + more
        grown = costs(structs.replace(evidence, **{figure: then}))
        assert max(grown.values()) == grown[cause]


def test_what_is_first_measured_after_skipped_time_is_counted():
    """As the energy of a GPU, and the parts of the compute."""
    detector = StallDetector(10, 0.2, 0.1, identify("r", None, {}))
    detector.skip(Tick(Totals(wall_seconds=5.0)))
    known = Totals(wall_seconds=6.0, gpu_energy_joules={"compute": 9.0}, compute_parts={"forward": 0.5})
    detector.update(Tick(known))
    assert detector._without_skipped(Tick(known)).totals.gpu_energy_joules == {"compute": 9.0}


@given(st.floats(0.01, 0.99), st.floats(0.0, 0.5))
def test_more_waiting_never_closes_a_stall(share, more):
    machine = Detector(30)
    machine.play(*[a_slice(source="training_thread", wait=share, compute=1 - share)] * 40)
    was_open = machine.stall is not None
    worse = min(0.99, share + more)
    machine.play(*[a_slice(source="training_thread", wait=worse, compute=1 - worse)] * 40)
    assert not was_open or machine.stall is not None


# -- across ranks, and what adds up ------------------------------------------------------------------------------------


def test_who_holds_up_ranks_that_are_stuck():
    here, there = (pace(rank, seconds_without_step=30.0, waits_for_ranks=True) for rank in (0, 1))
    elsewhere, for_data = (
        pace(2, seconds_without_step=29.0),
        pace(3, seconds_without_step=28.0, compute=0.0, exposed=1.0),
    )
    assert held_up_by(here, [there, elsewhere]) == elsewhere
    assert held_up_by(here, [there, for_data]) == for_data
    assert held_up_by(here, [there]) is None  # all have come: the network, or a rank of another node
    assert held_up_by(elsewhere, [here, there]) is None
    assert held_up_by(here, [pace(4, seconds_without_step=1.0)]) is None  # it goes on


# -- the monitor of a rank ---------------------------------------------------------------------------------------------


@pytest.fixture
def run():
    return Run(StepTracker(Ring()))


def test_waits_are_sampled_closely_while_they_take_the_share_that_opens_a_stall(run):
    run.wait_for_the_first_batch()
    matter = []
    for second, wait in ((10.0, 0.1), (11.0, 0.15), (12.0, 0.3), (13.0, 0.1)):
        run.request(second - wait, second)
        run.tick(second)
        matter.append(run.stall_monitor.waits_matter)
    assert matter == [False, False, True, False]


def ten_steps(run, second, wait=0.001):
    for tenth in range(10):
        run.request(second + tenth / 10, second + tenth / 10 + wait)


def opened_stall(run):
    """The fields of the only stall that has opened."""
    (fields,) = (fields for event, fields in run.lines if event == "stall_open")
    return fields


def test_the_first_batch_is_no_stall_however_long_it_is_waited_for(run):
    run.wait_for_the_first_batch()
    for second in range(9, 25):
        ten_steps(run, second - 0.4, 0.01)
        run.tick(second + 0.55)
    assert run.causes == []


def test_the_waits_for_batches_are_taken_apart_from_tick_to_tick(run):
    each = Deliveries(
        matched=1, fetch_wait_seconds=0.1, transfer_wait_seconds=0.5, from_busy=1,
        transfer_wait_busy_worker_seconds=0.4, transfer_wait_long_fetch_seconds=0.3, head_of_line_seconds=0.05,
    )  # fmt: skip
    deliveries = Deliveries()
    run.request(0.5, 0.6)
    for second in range(1, 12):
        run.request(second - 0.3, second + 0.5)
        deliveries = together(deliveries, each)
        run.tick(second + 0.6, deliveries=deliveries)
    evidence = opened_stall(run)["evidence"]
    ticks = round(evidence["fetch_wait_seconds"] / 0.1)
    assert ticks >= 5
    for name in ("fetch_wait", "transfer_wait", "transfer_wait_long_fetch"):
        assert evidence[f"{name}_seconds"] == pytest.approx(getattr(each, f"{name}_seconds") * ticks)
    assert evidence["head_of_line_seconds"] == pytest.approx(0.05 * ticks)
    assert evidence["transfer_from_busy_seconds"] == pytest.approx(0.4)


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
    capped = GpuSample(
        0,
        "GPU-1",
        "",
        utilization_ratio=1.0,
        sm_clock_max_hertz=2.0e9,
        sm_clock_hertz=1.4e9,
        throttled=("sw_power_cap",),
    )
    hot = dataclasses.replace(capped, sm_clock_hertz=0.7e9, throttled=("hw_thermal",))
    for second in range(1, 28):
        run.samples["gpus"] = (hot if second > 12 else capped,)
        ten_steps(run, second)
        run.tick(second + 0.95)
    assert opened_stall(run)["cause"] == "gpu_throttled"
    slowed = run.stall_monitor.open_record().evidence
    assert slowed["gpu_slowed_seconds"] == pytest.approx(0.5 * slowed["compute_seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("several", "figure", "value"), [(True, "batches_per_step", 2.0), (False, "fetch_seconds", 0.1)]
)
def test_fetches_are_counted_with_the_steps_and_the_ticks_that_they_belong_to(run, several, figure, value):
    """A step may take several batches. After the workers of an epoch were replaced, a tick has no busy time."""
    for second in range(1, 15):
        for fifth in range(5):
            begin = second + fifth / 5
            run.request(begin, begin + 0.1)
            if several:
                run.request(begin + 0.1, begin + 0.15, opens=False)
        run.tick(second + 0.99, fetches_total=10 * second, busy_ratio=None if second % 2 and not several else 1.0)
    assert opened_stall(run)["evidence"][figure] == pytest.approx(value, rel=0.1)


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


# -- two causes of similar size ----------------------------------------------------------------------------------------

TWO = Path(__file__).parent / "zoo" / "evidence" / "two-reads-checkpoints.json"


def recorded(path=TWO):
    return evidence_of(json.loads(path.read_text())["evidence"])


def fields_of(evidence, cause):
    stall = DetectedStall(cause, 0, costs(evidence), evidence.loop_seconds, None, evidence)
    return stall_record(stall, None, SimpleNamespace(rank=0, node="n"), "t").log_fields()


def test_both_are_named_and_the_first_stays_the_cause():
    fields = fields_of(recorded(), "checkpoint")
    (other,) = fields["evidence"]["also"]
    assert (fields["cause"], other["cause"]) == ("checkpoint", "loader_on_training_thread")
    assert fields["evidence"]["share_ratio"] == pytest.approx(0.40, abs=0.02)
    assert other["share_ratio"] == pytest.approx(0.33, abs=0.02)
    assert other["advice"][0]["setting"] == "num_workers"
    first = fields["advice"][0]
    after = other["share_ratio"] * first["predicted_speedup"]
    assert f"afterwards loader_on_training_thread with {100 * after:.0f} % of the time remain" in first["because"]


@pytest.mark.parametrize(
    ("checkpoints", "also"),
    [
        pytest.param({}, ["checkpoint"], id="costs more"),
        pytest.param({"checkpoint_seconds": 2.0}, [], id="less than half as much"),
    ],
)
def test_which_other_cause_is_named_beside_the_first(checkpoints, also):
    evidence = structs.replace(recorded(), **checkpoints)
    named = ["loader_on_training_thread", *also]
    assert list(shares_of("loader_on_training_thread", evidence)) == named
    assert ("also" in fields_of(evidence, "loader_on_training_thread")["evidence"]) == bool(also)


@pytest.mark.parametrize("path", [path for path in RECORDED if path != TWO], ids=lambda path: path.stem)
def test_no_second_cause_is_made_up_where_there_is_one(path):
    evidence = recorded(path)
    lost = costs(evidence)
    assert len(shares_of(max(lost, key=lost.get), evidence)) == 1


# -- a range where the measurements do not tell what storage can do ----------------------------------------------------

WORKERS = with_workers(
    busy=0.99, cpu=0.05, blocked=0.94, fetches=10, wait=0.8, compute=0.2, workers=1, process_cpu=0.2, cores=2.0,
    host_cores=2, host_cpu_ratio=0.3,
)  # fmt: skip
"""A step takes 100 ms, 20 of them on the CPU. Its fetch takes 5 ms of a core. Other processes use 0.35 cores."""

NO_WORKERS = a_slice(
    source="training_thread", wait=0.8, compute=0.2, process_cpu=0.2, cores=2.0, host_cores=2, host_cpu_ratio=0.3,
    timed_fetch=1.0, timed_fetch_cpu=0.0,
)  # fmt: skip


@pytest.mark.parametrize(("cause", "part"), [("workers_io_bound", WORKERS), ("loader_on_training_thread", NO_WORKERS)])
def test_storage_of_this_machine_may_need_cores_for_the_pace(cause, part):
    evidence = evidence_over([part])
    others = evidence.cores_of_others
    advice = first(cause, part)
    assert advice.predicted_low is not None
    # With all others at the new pace, the two cores are the limit: what they use in 100 ms comes to each step.
    step = 100 / advice.predicted_low
    assert 2 * step == pytest.approx(100 * others + 25, abs=3)
    assert 1 < advice.predicted_low < advice.predicted_speedup


@pytest.mark.parametrize(
    ("cause", "part"),
    [
        ("workers_io_bound", dataclasses.replace(WORKERS, cores=64.0, host_cores=64, host_cpu_ratio=0.01)),
        ("workers_io_bound", dataclasses.replace(WORKERS, host_cores=0, host_cpu_ratio=None)),
        ("loader_on_training_thread", dataclasses.replace(NO_WORKERS, timed_fetch_cpu=0.8)),
        ("workers_cpu_bound", WORKERS),
    ],
    ids=["plenty of cores", "others unknown", "fetches use the CPU", "not about storage"],
)
def test_there_is_no_range_without_reason(cause, part):
    assert first(cause, part).predicted_low is None


def test_the_low_end_is_no_slow_down():
    low = first("workers_io_bound", dataclasses.replace(WORKERS, host_cpu_ratio=0.9, process_cpu=0.9)).predicted_low
    assert low is None or low >= 1.0


def test_a_range_alone_is_no_prediction():
    assert Advice("a", predicted_low=1.2).gain == ""
