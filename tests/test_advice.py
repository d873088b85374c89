"""Advice says what to change, and predicts what it is worth."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs

from telemetry.agent.stuck import StuckRank
from telemetry.diagnosis.causes import advise
from telemetry.diagnosis.stalls import MIN_STEPS
from telemetry.hooks.worker_block import FETCH_BUCKETS
from telemetry.records import Histogram
from tests.slice_cases import CASES, STARVED, a_slice, first, pace, with_workers
from tests.slices import evidence_over, with_part

# -- windows and a short function for the tests of advice --------------------------------------------------------------


HELD = with_workers(busy=0.99, cpu=0.24, runnable=0.75, fetches=20, steps=20, wait=0.7, compute=0.3, cores=2.0)


def uneven(slowest_seconds: float, **settings):
    """One second with ten steps: 50 ms of compute each, fetches of 100 ms in four workers, one of which may be slower."""

    def at(fetches):
        fetched = {1: (fetches, 0.06 * fetches), 2: (fetches, slowest_seconds * fetches)}
        part = with_workers(
            busy=0.25, blocked=0.25, fetches=10, wait=0.5, compute=0.5, fetch_wait=0.4, transfer_wait=0.05
        )
        sample = dataclasses.replace(part.workers, fetched=fetched)
        return dataclasses.replace(part, workers=sample, settings={"in_order": True, "prefetch_factor": 2} | settings)

    return evidence_over([at(10), at(20), at(30)])


# -- advice says what to change, and predicts what it is worth ---------------------------------------------------------


def test_workers_are_advised_as_many_as_the_compute_hides():
    part = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=0.5, cores=8.0)
    advice = first("loader_on_training_thread", part)
    assert (advice.setting, advice.value) == ("num_workers", "2")
    assert advice.predicted_speedup == pytest.approx(1.0 / 0.4, rel=0.01)


@pytest.mark.parametrize(("cores", "workers"), [(16.0, "7"), (2.0, "6")])
def test_workers_are_advised_with_headroom_as_far_as_the_cores_go(cores, workers):
    """Five would fetch every 21.8 ms, for a compute of 22.4: the first hiccup would be waited for."""
    part = a_slice(
        source="training_thread", wait=1.09, compute=0.224, steps=10, process_cpu=0.336, cores=cores,
        timed_fetch=1.09, timed_fetch_cpu=0.104,
    )  # fmt: skip
    advice = first("loader_on_training_thread", part)
    assert (advice.setting, advice.value) == ("num_workers", workers)
    assert advice.predicted_speedup == pytest.approx(131.4 / 22.4, rel=0.01)


def test_no_more_workers_than_the_cores_can_run():
    part = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=2.0)
    advice = first("loader_on_training_thread", part)
    # 100 ms of CPU time a step, 110 of several processes and 4 for the batch, on two cores: 57 ms, whatever the number.
    assert advice.value == "2"
    assert advice.predicted_speedup == pytest.approx(100 / 57, rel=0.01)
    starved = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=1.0)
    assert advise("loader_on_training_thread", evidence_over([starved])) == ()  # one core: workers would gain nothing


def test_workers_cost_the_cores_something_for_every_batch():
    """Four batches a step, or steps so short that the cost of their batch is all that workers would win."""
    starved = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=2.0)
    several = dataclasses.replace(starved, batches=40)
    assert first("loader_on_training_thread", several).predicted_speedup == pytest.approx(100 / 63, rel=0.01)
    short = dataclasses.replace(starved, steps=250, batches=250)  # 4 ms each, then 4.4 + 4 on two cores
    assert advise("loader_on_training_thread", evidence_over([short])) == ()


@pytest.mark.parametrize(("on_core", "then"), [(0.9, "cheaper"), (0.1, "faster storage")])
def test_where_workers_win_nothing_a_shorter_fetch_does(on_core, then):
    """One core: what is left is to fetch less, or from what answers sooner."""
    part = a_slice(
        source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=1.0,
        timed_fetch=1.0, timed_fetch_cpu=on_core,
    )  # fmt: skip
    *_, last = advise("loader_on_training_thread", evidence_over([part]))
    assert then in last.action
    assert last.predicted_speedup is None


@pytest.mark.parametrize("cause", ["loader_on_training_thread", "workers_cpu_bound"])
def test_what_the_process_took_to_start_is_in_no_step(cause):
    """Importing torch takes seconds of CPU time, which the first window of a run had in its steps."""
    if cause == "workers_cpu_bound":
        part = with_workers(busy=1.0, cpu=1.0, wait=0.6, compute=0.4, steps=10, workers=1, process_cpu=0.4, cores=2.0)
    else:
        part = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=2.0)
    first_slices = [
        a_slice(
            seconds=0.01,
            wait=0.0,
            compute=0.0,
            startup=0.01,
            steps=0,
            process_cpu=3.0,
            host_cpu_ratio=0.5,
            host_cores=2,
        ),
        a_slice(
            seconds=1.0, wait=0.1, compute=0.0, startup=0.9, steps=0, process_cpu=1.0, host_cpu_ratio=0.5, host_cores=2
        ),
    ]
    (with_start, *_), (without, *_) = (
        advise(cause, evidence_over([*before, *[part] * 10])) for before in (first_slices, [])
    )
    assert (with_start.setting, with_start.value) == (without.setting, without.value)
    assert with_start.predicted_speedup == pytest.approx(without.predicted_speedup, rel=0.03)


def test_what_the_process_took_to_start_hides_no_others_on_the_cores():
    shared = a_slice(wait=0.6, compute=0.4, process_cpu=0.9, cores=2.0, host_cpu_ratio=1.0, host_cores=2)
    start = dataclasses.replace(shared, seconds=0.01, wait=0.0, compute=0.0, startup=0.01, steps=0, process_cpu=3.0)
    assert evidence_over([start, *[shared] * 10]).cpu.cores == evidence_over([shared]).cpu.cores == 1.0


def test_a_checkpoint_step_begun_before_the_window_is_not_compared():
    part = a_slice(compute=0.5, checkpoint=0.5, steps=2, checkpoint_steps=1, checkpoint_steps_compute=0.9)
    assert evidence_over([part]).checkpoints.around_seconds == 0.0
    whole = dataclasses.replace(part, checkpoint_steps_compute=0.4)
    assert evidence_over([whole]).checkpoints.around_seconds == pytest.approx(0.3)


def test_a_rare_checkpoint_takes_what_the_first_ones_did():
    """0.3 s each, five to a second of compute: 29 times less often they take a twentieth, if they take no longer."""
    part = a_slice(seconds=2.5, compute=1.0, checkpoint=1.5, steps=50, checkpoint_steps=5)
    alike = advise("checkpoint", evidence_over([part], early_checkpoint_seconds=0.3))[0]
    assert alike.predicted_speedup == pytest.approx(2.5 / (1 + 1.5 / 29), rel=0.01)
    assert "first of them" not in alike.because
    longer = advise("checkpoint", evidence_over([part], early_checkpoint_seconds=1.2))[0]
    assert (longer.value, longer.action) == (alike.value, alike.action)
    assert longer.predicted_speedup == pytest.approx(2.5 / (1 + 5 * 1.2 / 29), rel=0.01)
    assert "the first of them took 1.2 s each" in longer.because


@pytest.mark.parametrize("compute", [0.0, 1e-310])
def test_steps_that_compute_nothing_hide_no_fetch(compute):
    """No number of batches ahead is infinite, or is advised as such."""
    uneven = evidence_over([CASES["uneven_batches"]])
    evidence = with_part(structs.replace(uneven, compute_seconds=compute), "fetches", longest_seconds=1.0)
    ahead = [a.value for a in advise("uneven_batches", evidence) if a.setting == "prefetch_factor"]
    assert all(int(batches) <= 64 for batches in ahead)


def test_throttled_workers_are_not_told_to_be_more():
    on_two = evidence_over([dataclasses.replace(CASES["workers_throttled"], cores=2.0)])
    advice = advise("workers_throttled", on_two)
    assert not [a for a in advice if a.setting == "num_workers"]
    assert "more workers would not help" in advice[0].action


def test_workers_that_crowd_out_the_training_thread_are_told_to_be_fewer():
    part = CASES["workers_throttled, crowding out the training thread"]
    advice = first("workers_throttled", part)
    assert advice.setting == "num_workers"
    # A step now takes 100 ms, half of it without a core; it needs 50 ms of CPU time, and a fetch 120, on two cores.
    assert (advice.value, advice.predicted_speedup) == ("2", pytest.approx(100 / 85, rel=0.01))


def test_the_slow_rank_is_named_to_those_who_wait_for_it():
    waiting = CASES["straggler"]
    told = dataclasses.replace(waiting, peers=(pace(1, compute=0.3, exposed=0.7, cause="workers_io_bound"), pace(2)))
    advice = first("straggler", told)
    assert "rank 1 waits for data (workers_io_bound)" in advice.because
    # 70 ms of 100 lost to rank 1; rank 2, which waits for it as this one does, would do a step in 30 ms too.
    assert advice.predicted_speedup == pytest.approx(1 / 0.3, rel=0.01)
    slow = dataclasses.replace(
        CASES["straggler, in its compute"],
        peers=(pace(3, samples=50, in_sync_samples=2, where="augment (train.py:41)"),),
    )
    assert "rank 3 takes longer to compute a step, mostly in augment (train.py:41)" in first("straggler", slow).because


def test_a_rank_that_waits_for_data_is_not_said_to_compute_longer():
    waiting = dataclasses.replace(CASES["straggler, in its compute"], samples=50, in_sync=40)
    # Its compute is short and has none of what the others spend waiting for it: that alone does not make it slow.
    other = pace(1, compute=0.3, exposed=0.7, samples=50, in_sync_samples=0, cause="workers_io_bound")
    advice = first("straggler", dataclasses.replace(waiting, peers=(other,)))
    assert "rank 1 waits for data (workers_io_bound)" in advice.because
    assert "80.0 ms of every 100.0 ms" in advice.because
    both = pace(1, compute=0.8, exposed=0.2, samples=50, in_sync_samples=0)
    assert "takes longer to compute" in first("straggler", dataclasses.replace(waiting, peers=(both,))).because


def test_the_slowest_rank_decides_what_a_change_is_worth():
    alone = with_workers(busy=0.99, cpu=0.1, blocked=0.89, wait=0.8, compute=0.2, workers=1)
    assert first("workers_io_bound", alone).predicted_speedup == pytest.approx(5.0, rel=0.1)
    busy = pace(
        1, compute=1.0, exposed=0.0, samples=100, in_sync_samples=40
    )  # half of it its own, whatever this rank does
    own = dataclasses.replace(alone, peers=(busy,), samples=100, in_sync=5)
    assert first("workers_io_bound", own).predicted_speedup < 2.5


@pytest.mark.parametrize(
    ("cause", "lost"),
    [
        ("gc_pause", {"garbage": 0.6, "source": "training_thread"}),
        ("checkpoint", {"checkpoint": 1.5, "checkpoint_steps": 2}),
        ("gpu_throttled", {"gpu_utilization_ratio": 1.0, "gpu_clock_ratio": 0.4, "gpu_throttled": ("hw_thermal",)}),
    ],
)
def test_the_slowest_rank_decides_that_whatever_the_cause(cause, lost):
    part = a_slice(compute=1.0, samples=100, in_sync=50, **lost)
    assert first(cause, part).predicted_speedup > 1.6
    busy = structs.replace(pace(1, samples=100), seconds=part.seconds, compute_seconds=part.seconds)
    kept_up = advise(cause, evidence_over([dataclasses.replace(part, peers=(busy,))]))
    assert all(advice.predicted_speedup is None for advice in kept_up)  # none that would win nothing


def test_what_an_idle_gpu_could_win_at_most_is_no_prediction():
    advice = first("host_bound", a_slice(compute=1.0, gpu_utilization_ratio=0.5))
    assert advice.predicted_speedup is None
    assert "2 times as fast at most" in advice.because
    busy = structs.replace(pace(1, samples=100, gpu_busy_ratio=0.5), on_gpu=True, compute_seconds=1.0)
    kept_up = a_slice(compute=1.0, gpu_utilization_ratio=0.5, samples=100, in_sync=50, peers=(busy,))
    assert advise("host_bound", evidence_over([kept_up])) == ()


def test_the_first_fetch_of_kept_workers_is_counted():
    one = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=0.4, cores=8.0, boundaries=0)
    short = dataclasses.replace(one, boundaries=5)
    assert "persistent_workers" not in first("loader_on_training_thread", one).action
    advice = first("loader_on_training_thread", short)
    assert "persistent_workers=True" in advice.action
    assert advice.predicted_speedup == pytest.approx(1.0 / (0.4 + 5 * 0.06), rel=0.02)


def test_only_who_has_a_gpu_is_told_to_move_work_to_it():
    *_, on_cpu = advise("workers_cpu_bound", evidence_over([CASES["workers_cpu_bound"]]))
    *_, on_gpu = advise(
        "workers_cpu_bound", evidence_over([dataclasses.replace(CASES["workers_cpu_bound"], gpu_utilization_ratio=0.5)])
    )
    assert "GPU" not in on_cpu.action
    assert "GPU" in on_gpu.action


def test_nobody_is_told_to_start_hundreds_of_workers():
    slow = with_workers(
        busy=1.0, cpu=0.0, blocked=1.0, wait=0.98, compute=0.02, steps=10, workers=1, fetches=1, cores=128.0
    )
    assert int(first("workers_io_bound", slow).value) <= 32


def test_a_source_that_is_read_ahead_is_still_as_fast_as_it_is():
    slow = a_slice(source="watched", wait=0.8, compute=0.2, timed_fetch=1.0, timed_fetch_cpu=0.0)
    ahead = [a for a in advise("source_slow", evidence_over([slow])) if a.setting is None]
    assert ahead[0].predicted_speedup == pytest.approx(1.0 / 0.8, rel=0.02)
    workers = first("source_slow", slow)
    assert (workers.setting, workers.predicted_speedup) == ("num_workers", pytest.approx(5.0, rel=0.3))
    on_cpu = a_slice(source="watched", wait=0.5, compute=0.5, timed_fetch=1.0, timed_fetch_cpu=1.0)
    assert all(a.setting for a in advise("source_slow", evidence_over([on_cpu])))  # a thread would not help


def test_ranks_that_keep_pace_need_the_cores_as_often():
    alone = a_slice(
        source="training_thread", wait=0.8, compute=0.2, process_cpu=0.2, host_cores=2, host_cpu_ratio=0.3, cores=2.0,
        timed_fetch=1.0, timed_fetch_cpu=0.0,
    )  # fmt: skip
    assert first("loader_on_training_thread", alone).predicted_speedup == pytest.approx(5.0, rel=0.01)
    together = dataclasses.replace(alone, peers=(pace(1, compute=0.2, exposed=0.8),))
    # The other process uses 40 ms of CPU time in each of its steps: with 26 of this one's, 66 ms on two cores.
    assert first("loader_on_training_thread", together).predicted_speedup == pytest.approx(100 / 33, rel=0.01)


def test_cores_that_others_use_are_no_cores_to_put_workers_on():
    part = a_slice(source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=8.0)
    alone = evidence_over([dataclasses.replace(part, host_cores=8, host_cpu_ratio=1.0 / 8)])
    assert alone.cpu.cores == pytest.approx(8.0)
    crowded = evidence_over([dataclasses.replace(part, host_cores=8, host_cpu_ratio=1.0)])
    assert crowded.cpu.cores == pytest.approx(1.0)
    assert advise("loader_on_training_thread", alone)
    assert not advise("loader_on_training_thread", crowded)


def test_cores_of_a_quota_that_other_ranks_use_are_none_either():
    """A pod with 8 cores on a machine of 128 that has 100 idle: another rank of the pod takes 6 of the 8."""
    part = a_slice(
        source="training_thread", wait=0.6, compute=0.4, steps=10, process_cpu=1.0, cores=8.0, host_cores=128,
        host_cpu_ratio=28 / 128, quota=8.0, quota_used=7.0,
    )  # fmt: skip
    shared = evidence_over([part])
    assert (shared.cpu.cores, shared.cpu.cores_of_others) == (pytest.approx(2.0), pytest.approx(6.0))
    assert evidence_over([dataclasses.replace(part, quota_used=1.0)]).cpu.cores == pytest.approx(8.0)


def test_who_waits_for_a_rank_that_does_not_come_is_told_to_look_there():
    missing = pace(3, steps=0, where="read (data.py:7)")
    (advice,) = StuckRank("opened", "straggler", "compute", 42.0, "all_reduce", missing).advice()
    assert advice.action == "find out what rank 3 does"
    assert advice.because == "this rank has waited 42 s in a step for rank 3, which was last seen in read (data.py:7)"


def test_an_unknown_cause_has_no_advice():
    assert advise("unknown", evidence_over([CASES["unknown"]])) == ()
    assert advise("of_a_newer_version", evidence_over([CASES["unknown"]])) == ()


OF_A_STEP = {
    "loader_on_training_thread", "worker_startup", "uneven_batches", "batch_transfer", "source_slow", "straggler",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_without_a_step_nothing_is_said_of_one(case):
    """Whatever is the cause, as in a window with a step that takes longer than it."""
    evidence = evidence_over([dataclasses.replace(CASES[case], steps=0, batches=0)])
    for cause in {case.partition(",")[0], *OF_A_STEP}:
        assert not advise(cause, evidence) or cause not in OF_A_STEP


def test_a_step_is_wait_and_compute():
    assert evidence_over([a_slice(wait=0.5, compute=0.5, steps=10)]).step_seconds == pytest.approx(0.1)
    assert MIN_STEPS > 1


# -- what the workers' share of a step is ---------------------------------------------------------------------------


def test_a_step_that_takes_a_batch_of_each_of_two_loaders_needs_both():
    # 20 fetches in 3.96 s of four workers; a step takes two of them, 400 ms, and 100 ms with four times as many.
    part = with_workers(busy=0.99, cpu=0.0, blocked=0.99, fetches=20, steps=10, batches=20, wait=0.9, compute=0.1)
    advice = first("workers_io_bound", dataclasses.replace(part, settings={"num_workers": 2}))
    assert (advice.setting, advice.value) == ("num_workers", "16")  # of each: 32 for a step of 10 ms
    assert advice.predicted_speedup == pytest.approx(100 / (396 / 32), rel=0.01)
    evidence = evidence_over([dataclasses.replace(part, batches=11)])
    assert evidence.batches_per_step == 1.0  # the newest is of a step that has not ended
    one_without_workers = evidence_over([dataclasses.replace(part, fetches=12)])
    assert one_without_workers.batches_per_step == pytest.approx(1.2)


def test_workers_pinned_to_a_core_are_unpinned_not_reduced():
    held = dataclasses.replace(HELD, workers=dataclasses.replace(HELD.workers, allowed_cores=1), own_runnable=0.01)
    advice = advise("workers_throttled", evidence_over([held]))
    assert [a.setting for a in advice] == [None, None]
    assert "let the workers run on every core" in advice[0].action
    assert "they may run on 1 of 2 cores" in advice[0].because
    # A step takes 50 ms. It computes for 15, and a batch takes 48 ms of a core: on two of them 31.5.
    assert advice[0].predicted_speedup == pytest.approx(50 / 31.5, rel=0.02)
    free = dataclasses.replace(HELD, workers=dataclasses.replace(HELD.workers, allowed_cores=2))
    assert "give the job more CPU cores" in advise("workers_throttled", evidence_over([free]))[0].action


def test_an_affinity_wider_than_the_free_cores_is_no_limit():
    """Others use six of eight cores, and the workers may run on four."""
    workers = dataclasses.replace(HELD.workers, allowed_cores=4)
    crowded = dataclasses.replace(HELD, workers=workers, cores=8.0, host_cores=8, host_cpu_ratio=0.9, process_cpu=0.3)
    assert evidence_over([crowded]).cpu.cores == pytest.approx(2.0, abs=0.2)
    assert "give the job more CPU cores" in advise("workers_throttled", evidence_over([crowded]))[0].action


def test_fewer_workers_are_fewer_in_each_of_two_loaders():
    part = with_workers(
        busy=0.9, cpu=0.4, runnable=0.7, fetches=20, steps=20, batches=40, wait=0.0, compute=1.0, workers=10,
        own_runnable=0.5, process_cpu=0.1, cores=8.0,
    )  # fmt: skip
    one = first("workers_throttled", dataclasses.replace(part, settings={"num_workers": 10}))
    each = first("workers_throttled", dataclasses.replace(part, settings={"num_workers": 5}))
    assert (one.setting, one.value) == ("num_workers", "7")
    assert (each.setting, each.value) == ("num_workers", "3")  # four would be more than seven


def test_fewer_workers_win_no_more_than_the_training_thread_lacked():
    part = dataclasses.replace(CASES["workers_throttled, crowding out the training thread"], own_runnable=0.1)
    assert first("workers_throttled", part).predicted_speedup == pytest.approx(1 / 0.9, rel=0.01)


def test_no_number_of_workers_is_advised_that_is_there_already():
    """Two loaders, of two workers and of one: four workers would be two of each."""
    part = with_workers(busy=0.8, cpu=0.1, blocked=0.7, workers=3, fetches=10, wait=0.2, compute=0.8)
    more = first("workers_io_bound", dataclasses.replace(part, settings={"num_workers": 3}))
    assert (more.setting, more.value) == ("num_workers", "4")
    assert first("workers_io_bound", dataclasses.replace(part, settings={"num_workers": 2})).setting is None


# -- advice for batches that are late although fetches are fast enough on average --------------------------------------


def test_persistent_workers_are_not_advised_to_who_has_them():
    part = dataclasses.replace(CASES["worker_startup"], settings={"persistent_workers": True})
    (longer,) = advise("worker_startup", evidence_over([part]))
    assert longer.setting is None
    assert longer.action.startswith("make epochs 24 times as long")
    assert longer.predicted_speedup == pytest.approx(1 / (0.45 + 0.55 / 24), rel=0.02)
    late = dataclasses.replace(part, wait=0.75, compute=0.25, near_boundaries=0.15)  # next to the edges: rare too, then
    (longer,) = advise("worker_startup", evidence_over([late]))
    assert longer.predicted_speedup == pytest.approx(1 / (0.30 + 0.70 / 45), rel=0.02)
    assert "0.1 s for batches next to them" in longer.because
    advice = first("worker_startup", CASES["worker_startup"])
    assert (advice.setting, advice.value) == ("persistent_workers", "True")
    assert advice.predicted_speedup > 1.4


def test_prefetching_covers_the_longest_fetch():
    def sample(counts):
        return Histogram(FETCH_BUCKETS, (*counts, *(0,) * (len(FETCH_BUCKETS) + 1 - len(counts))), 1.0)

    def uneven(counts):
        part = with_workers(
            busy=0.4,
            cpu=0.1,
            blocked=0.3,
            fetch_wait=0.4,
            transfer_wait=0.0,
            workers=2,
            fetches=50,
            steps=50,
            **STARVED,
        )
        return dataclasses.replace(part, workers=dataclasses.replace(part.workers, fetch_duration=sample(counts)))

    evidence = evidence_over([uneven((1,)), uneven((40, 0, 0, 0, 0, 0, 0, 0, 1))])
    assert (
        evidence.fetches.longest_seconds == FETCH_BUCKETS[8]
    )  # 268 ms, of steps of 8 ms: 34 batches of two workers ahead
    advice = advise("uneven_batches", evidence)[0]
    assert advice.setting == "prefetch_factor"
    assert 16 <= int(advice.value) <= 32
    assert advice.predicted_speedup == pytest.approx(2.5, rel=0.1)


def test_pinning_is_not_advised_to_who_has_no_gpu():
    part = CASES["batch_transfer, matched"]
    assert [a.setting for a in advise("batch_transfer", evidence_over([part]))] == [None]
    on_gpu = dataclasses.replace(part, gpu_utilization_ratio=0.5)
    assert first("batch_transfer", on_gpu).setting == "pin_memory"


def test_what_it_takes_to_free_a_batch_is_won_with_it():
    """And the core that the training thread lacks while workers pack; but pinning wins neither."""
    part = dataclasses.replace(CASES["batch_transfer, matched"], fetch_busy=0.1)
    (moved,) = advise("batch_transfer", evidence_over([part]))
    assert moved.predicted_speedup == pytest.approx(1 / 0.6, rel=0.01)
    freed = dataclasses.replace(part, release=0.06, releases=2)  # 30 ms of the 40 of compute, of steps of 100
    (advice,) = advise("batch_transfer", evidence_over([freed]))
    assert advice.predicted_speedup == pytest.approx(1 / 0.3, rel=0.01)
    assert "and 30.0 ms to be released" in advice.because
    # For 40 % of the time it has no core; half of what else runs is packing.
    workers = dataclasses.replace(part.workers, pickling_ratio=part.workers.cpu_ratio)
    crowded = dataclasses.replace(freed, workers=workers, own_runnable=0.4)
    (advice,) = advise("batch_transfer", evidence_over([crowded]))
    assert advice.predicted_speedup == pytest.approx(1 / (0.3 - 0.4 * 0.5 * 0.1), rel=0.01)
    (limited,) = advise("batch_transfer", evidence_over([dataclasses.replace(crowded, fetch_busy=2.4)]))
    assert limited.predicted_speedup == pytest.approx(1 / 0.6, rel=0.01)  # four workers make a batch every 60 ms
    on_gpu = dataclasses.replace(crowded, gpu_utilization_ratio=0.5)
    pinned, sent = advise("batch_transfer", evidence_over([on_gpu]))
    assert pinned.predicted_speedup == moved.predicted_speedup
    assert sent.predicted_speedup == advice.predicted_speedup


def test_the_bytes_of_a_pickled_batch_still_have_to_come():
    """However few objects they are in. A second has 10 steps, and 40 ms of each to move a batch."""
    part = CASES["batch_transfer, matched"]

    def sending(written: float):
        workers = dataclasses.replace(part.workers, written_bytes_per_second=written)
        return advise("batch_transfer", evidence_over([dataclasses.replace(part, workers=workers, fetches=10)]))

    (large,), (small,) = sending(3e8), sending(1e7)
    assert large.predicted_speedup == pytest.approx(100 / (60 + 9), rel=0.01)  # 30 MB each, 0.3 ns a byte
    assert "9.0 ms remain for its 30.0 MB" in large.because
    assert small.predicted_speedup == pytest.approx(100 / (60 + 0.3), rel=0.01)
    assert "remain" not in small.because
    assert sending(1e12) == ()  # nothing to win


def test_workers_of_a_loader_that_is_made_anew_are_not_kept_by_a_setting():
    part = dataclasses.replace(CASES["worker_startup"], settings={"loader_used_again": False})
    advice = first("worker_startup", part)
    assert advice.setting is None
    assert "make the DataLoader once" in advice.action
    assert advice.predicted_speedup == first("worker_startup", CASES["worker_startup"]).predicted_speedup


def handed_over_in(from_busy_seconds: float, cpu_ratio: float | None = None, **settings):
    """The same, with batches that take 2 ms to transfer from an idle worker."""
    evidence = uneven(0.06, **settings)
    cpu = evidence.workers.cpu_ratio if cpu_ratio is None else cpu_ratio
    moved = with_part(evidence, "transfer", seconds=0.002, from_busy_seconds=from_busy_seconds)
    return with_part(moved, "workers", cpu_ratio=cpu)


def test_no_prefetching_makes_up_for_a_worker_that_is_always_slower():
    advice = advise("uneven_batches", uneven(0.4))  # a batch of it every fourth step: a step takes 100 ms
    assert [a.setting for a in advice] == ["in_order", None]
    assert "one worker takes 400.0 ms a batch" in advice[0].because
    assert "give every worker an equal share" in advice[1].action
    assert advice[0].predicted_speedup == pytest.approx(100 / (50 + 5), rel=0.01)
    as_they_come = advise("uneven_batches", uneven(0.4, in_order=False))
    assert [a.setting for a in as_they_come] == ["prefetch_factor"]


def test_what_moving_a_batch_takes_is_left_when_no_batch_is_late():
    advice = advise("uneven_batches", uneven(0.06))
    assert [(a.setting, a.predicted_speedup) for a in advice] == [
        ("prefetch_factor", pytest.approx(100 / (50 + 5), rel=0.01)),
        ("in_order", pytest.approx(100 / (50 + 5), rel=0.01)),
    ]


def test_batches_that_a_busy_worker_hands_over_late_are_shared_by_file():
    """Prefetching alone was worth 2 % for such a loader, and with files 70 %."""
    busy = handed_over_in(0.05, 0.9, sharing_strategy="file_descriptor")
    advice = advise("uneven_batches", busy)[0]
    assert advice.setting is None
    assert "set_sharing_strategy('file_system')" in advice.action
    assert "prefetch_factor=" in advice.action
    assert "takes 50.0 ms to transfer" in advice.because
    assert advice.predicted_speedup == pytest.approx(100 / (50 + 2), rel=0.01)
    for other in (
        handed_over_in(0.05, 0.2, sharing_strategy="file_descriptor"),  # the worker waits: its other thread has the GIL
        handed_over_in(0.01, 0.9, sharing_strategy="file_descriptor"),
        handed_over_in(0.05, 0.9, sharing_strategy="file_system"),
    ):
        assert advise("uneven_batches", other)[0].setting == "prefetch_factor"


def test_busier_workers_transfer_more_batches_late():
    """A step of 52 ms would find them in a fetch for nearly half of the time, and so be longer, and so find them less."""
    busy = handed_over_in(0.05)
    (ahead, _) = advise("uneven_batches", busy)
    then = 100 / ahead.predicted_speedup
    assert then == pytest.approx(52 + 48 * 25 / then, rel=0.01)  # a batch every 25 ms is what they make


def test_a_worker_that_has_hardly_fetched_is_not_called_slow():
    assert (
        slowest(
            {1: (0, 0.0), 2: (0, 0.0)},
            {1: (2, 9.0), 2: (5, 1.0), 3: (25, 45.0)},
            {1: (4, 18.0), 2: (10, 2.0), 3: (50, 90.0)},
        )
        == 1.8
    )
    assert slowest({1: (0, 0.0)}) is None


def test_a_worker_is_not_called_slow_for_one_long_fetch():
    assert slowest({1: (0, 0.0), 2: (0, 0.0)}, {1: (5, 10.0), 2: (5, 1.0)}, {1: (10, 11.0), 2: (10, 2.0)}) == 0.2


def slowest(*fetched):
    return evidence_over(
        [dataclasses.replace(HELD, workers=dataclasses.replace(HELD.workers, fetched=f)) for f in fetched]
    ).fetches.slowest_seconds


def test_kept_workers_first_finish_the_batches_of_a_left_epoch():
    short = with_workers(
        busy=0.5, cpu=0.5, fetches=10, workers=2, boundary_wait=0.6, boundaries=4, wait=0.6, compute=0.4, left=4
    )
    fetch = evidence_over([short]).fetches.seconds
    assert fetch == pytest.approx(0.1)
    assert advise("worker_startup", short_of(short, left=0))[0].predicted_speedup == pytest.approx(
        1 / (0.4 + 0.4), rel=0.01
    )
    assert advise("worker_startup", evidence_over([short])) == ()  # three fetches to an edge are as long as it is


def short_of(part, **fields):
    return evidence_over([dataclasses.replace(part, **fields)])
