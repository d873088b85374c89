"""Advice says what to change, and predicts what it is worth."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import structs

from telemetry.agent.stuck_monitor import StuckRank
from telemetry.diagnosis.causes import advise
from telemetry.model.records import FETCH_BUCKETS, Histogram
from tests.slice_cases import CASES, STARVED, a_slice, first, pace, with_workers
from tests.slices import evidence_over


def changed(part, **fields):
    """A slice with other figures, or with the case of that name; ``workers``: figures of its workers."""
    part = CASES[part] if isinstance(part, str) else part
    if isinstance(fields.get("workers"), dict):
        fields["workers"] = dataclasses.replace(part.workers, **fields["workers"])
    return dataclasses.replace(part, **fields)


def own(**fields):
    """A loader without workers that takes 60 ms of each step of 100 ms."""
    return a_slice(**dict(source="training_thread", process_cpu=1.0, cores=8.0) | STARVED | fields)


HELD = with_workers(busy=0.99, cpu=0.24, runnable=0.75, fetches=20, steps=20, wait=0.7, compute=0.3, cores=2.0)
PICTURES = own(wait=1.09, compute=0.224, process_cpu=0.336, timed_fetch=1.09, timed_fetch_cpu=0.104)
"""Five workers would fetch every 21.8 ms, for a compute of 22.4: the first hiccup would be waited for."""

TWO_LOADERS = with_workers(
    busy=0.99, blocked=0.99, fetches=20, batches=20, wait=0.9, compute=0.1, settings={"num_workers": 2}
)
"""20 fetches in 3.96 s of four workers; a step takes two of them, 400 ms, and 100 ms with four times as many."""

CROWDED = with_workers(
    busy=0.9, cpu=0.4, runnable=0.7, fetches=20, steps=20, batches=40, wait=0.0, compute=1.0, workers=10,
    own_runnable=0.5, process_cpu=0.1,
)  # fmt: skip
THREE = with_workers(busy=0.8, cpu=0.1, blocked=0.7, workers=3, fetches=10, wait=0.2, compute=0.8)
FETCHED_BY_IO = own(wait=0.8, compute=0.2, process_cpu=0.2, timed_fetch=1.0, host_cores=2, host_cpu_ratio=0.3, cores=2)
CROWDING = "workers_throttled, crowding out the training thread"
IN_COMPUTE, SENT, KEPT = "straggler, in its compute", "batch_transfer, matched", {"persistent_workers": True}
LOADER, THROTTLED, STARTUP = "loader_on_training_thread", "workers_throttled", "worker_startup"

# By cause and slice: the setting and value of the first advice, its predicted speed-up, and words of its text. Without
# advice: None.
ADVICE = {
    "as many workers as the compute hides": (LOADER, own(process_cpu=0.5), "num_workers=2", 2.5, ""),
    "workers with headroom": (LOADER, changed(PICTURES, cores=16.0), "num_workers=7", 131.4 / 22.4, ""),
    "with headroom as far as the cores go": (LOADER, changed(PICTURES, cores=2.0), "num_workers=6", 131.4 / 22.4, ""),
    # 100 ms of CPU time a step, 110 of several processes and 4 for the batch, on two cores: 57 ms, whatever the number.
    "no more workers than the cores run": (LOADER, own(cores=2.0), "num_workers=2", 100 / 57, ""),
    "one core wins nothing": (LOADER, own(cores=1.0), None, None, ""),
    "workers cost the cores something for each batch": (LOADER, own(cores=2.0, batches=40), None, 100 / 63, ""),
    "4 ms a step, then 4.4 + 4 on two cores": (LOADER, own(cores=2.0, steps=250, batches=250), None, None, ""),
    "at most 32 workers": (
        "workers_io_bound",
        with_workers(busy=1.0, blocked=1.0, wait=0.98, compute=0.02, workers=1, fetches=1, cores=128.0),
        "num_workers=32", None, "",
    ),
    "no short epochs, nothing kept": (LOADER, own(process_cpu=0.4), "num_workers=2", 2.5, "load batches"),
    "the first fetch of kept workers counts": (
        LOADER, own(process_cpu=0.4, boundaries=5), "num_workers=2", 1 / (0.4 + 5 * 0.06), "persistent_workers=True",
    ),
    "alone on the cores": (LOADER, FETCHED_BY_IO, None, 5.0, ""),
    # The other process uses 40 ms of CPU time in each of its steps: with 26 of this one's, 66 ms on two cores.
    "ranks that keep pace need the cores as often": (
        LOADER, changed(FETCHED_BY_IO, peers=(pace(1, compute=0.2, exposed=0.8),)), None, 100 / 33, "",
    ),
    "cores that nobody else uses": (LOADER, own(host_cores=8, host_cpu_ratio=1 / 8), "num_workers=2", 2.5, ""),
    "cores that others use": (LOADER, own(host_cores=8, host_cpu_ratio=1.0), None, None, ""),
    "a step takes a batch of each of two loaders": (
        "workers_io_bound", TWO_LOADERS, "num_workers=16", 100 / (396 / 32), "",  # of each: 32 for a step of 10 ms
    ),
    "throttled workers are not told to be more": (
        THROTTLED, changed("workers_throttled", cores=2.0), "", None, "more workers would not help",
    ),
    # A step takes 100 ms, half of it without a core. It needs 50 ms of CPU time, and a fetch 120, on two cores.
    "workers that crowd out the training thread": (THROTTLED, changed(CROWDING), "num_workers=2", 100 / 85, ""),
    "no more than the training thread lacked": (THROTTLED, changed(CROWDING, own_runnable=0.1), None, 1 / 0.9, ""),
    "fewer workers": (THROTTLED, changed(CROWDED, settings={"num_workers": 10}), "num_workers=7", None, ""),
    "fewer in each of two loaders": (THROTTLED, changed(CROWDED, settings={"num_workers": 5}), "num_workers=3", None, ""),
    "more workers": ("workers_io_bound", changed(THREE, settings={"num_workers": 3}), "num_workers=4", None, ""),
    "as many as there are already": ("workers_io_bound", changed(THREE, settings={"num_workers": 2}), "", None, ""),
    # A step takes 50 ms. It computes for 15, and a batch takes 48 ms of a core: on two of them 31.5.
    "workers pinned to a core": (
        THROTTLED, changed(HELD, workers={"allowed_cores": 1}, own_runnable=0.01), "", 50 / 31.5,
        "let the workers run on every core|they may run on 1 of 2 cores",
    ),
    "workers on all cores": (THROTTLED, changed(HELD, workers={"allowed_cores": 2}), "", None, "more CPU cores"),
    "an affinity wider than the free cores": (
        THROTTLED, changed(HELD, workers={"allowed_cores": 4}, cores=8.0, host_cores=8, host_cpu_ratio=0.9, process_cpu=0.3),
        "", None, "more CPU cores",
    ),
    # 70 ms of 100 lost to rank 1; rank 2, which waits for it as this one does, would do a step in 30 ms, too.
    "the slow rank": (
        "straggler",
        changed("straggler", peers=(pace(1, compute=0.3, exposed=0.7, cause="workers_io_bound"), pace(2))),
        "", 1 / 0.3, "rank 1 waits for data (workers_io_bound)",
    ),
    "the line of the slow rank": (
        "straggler",
        changed(IN_COMPUTE, peers=(pace(3, stack_samples=50, in_sync_samples=2, where="augment (train.py:41)"),)),
        "", None, "rank 3 takes longer to compute a step, mostly in augment (train.py:41)",
    ),
    # Its compute is short and has none of what the others spend waiting for it: that alone does not make it slow.
    "a rank that waits is not said to compute longer": (
        "straggler",
        changed(IN_COMPUTE, peers=(pace(1, compute=0.3, exposed=0.7, stack_samples=50, cause="workers_io_bound"),)),
        "", None, "rank 1 waits for data (workers_io_bound)|80.0 ms of every 100.0 ms",
    ),
    "a rank that computes longer, and waits": (
        "straggler", changed(IN_COMPUTE, peers=(pace(1, compute=0.8, exposed=0.2, stack_samples=50),)), "", None,
        "takes longer to compute",
    ),
    "functions that are compiled again for each size": (
        "recompiling", changed("recompiling"), "", None,
        r"compiled functions again 5 times, which took 0.4 s of 1.0 s; mostly forward at model.py:12",
    ),
    "an idle GPU wins so much at most": (
        "host_bound", a_slice(gpu_utilization_ratio=0.5), "", None, "2 times as fast at most",
    ),
    "an idle GPU, most of the time in one part": (
        "host_bound", a_slice(gpu_utilization_ratio=0.5, parts={"forward": 0.3, "backward": 0.6}), "", None,
        "backward takes 67 % of compute",
    ),
    "workers that start for each epoch": (
        STARTUP, changed(STARTUP), "persistent_workers=True", 1 / (0.45 + 2 * 0.12), "keep the workers",
    ),
    "workers of a loader that is made anew": (
        STARTUP, changed(STARTUP, settings={"loader_used_again": False}), "", 1 / (0.45 + 2 * 0.12), "make the DataLoader once",
    ),
    "workers that are kept already": (
        STARTUP, changed(STARTUP, settings=KEPT), "", 1 / (0.45 + 0.55 / 24), "go over the data 24 times in each epoch",
    ),
    "batches next to the edges are rarer, too": (
        STARTUP, changed(STARTUP, settings=KEPT, wait=0.75, compute=0.25, near_boundaries=0.15), "",
        1 / (0.30 + 0.70 / 45), "0.1 s for batches next to them",
    ),
    "pinning needs a GPU": ("batch_transfer", changed(SENT), "", None, "send less data"),
    "pinning": ("batch_transfer", changed(SENT, gpu_utilization_ratio=0.5), "pin_memory=True", None, ""),
    "a transfer": ("batch_transfer", changed(SENT, fetch_busy=0.1), "", 1 / 0.6, ""),
    # 30 ms of the 40 of compute, of steps of 100 ms
    "what it takes to free a batch is won with it": (
        "batch_transfer", changed(SENT, fetch_busy=0.1, release=0.06, releases=2), "", 1 / 0.3, "30.0 ms to be released",
    ),
    # For 40 % of the time it has no core. Half of what else runs is pickling.
    "so is the core that pickling takes": (
        "batch_transfer",
        changed(SENT, fetch_busy=0.1, release=0.06, releases=2, own_runnable=0.4, workers={"pickling_ratio": 0.5}),
        "", 1 / (0.3 - 0.4 * 0.5 * 0.1), "",
    ),
    # Four workers make a batch every 60 ms.
    "but no step is shorter than the supply": (
        "batch_transfer", changed(SENT, fetch_busy=2.4, release=0.06, releases=2), "", 1 / 0.6, "",
    ),
    # 30 MB each, 0.3 ns a byte
    "bytes of a pickled batch still have to come": (
        "batch_transfer", changed(SENT, workers={"written_bytes_per_second": 3e8}), "", 100 / (60 + 9),
        "9.0 ms remain for its 30.0 MB",
    ),
    "a few tensors in shared memory cannot be less": (
        "batch_transfer", changed(SENT, workers={"written_bytes_per_second": 4e3}), None, None, "",
    ),
    "nothing to win": ("batch_transfer", changed(SENT, workers={"written_bytes_per_second": 1e12}), None, None, ""),
    "an unknown cause": ("unknown", changed("unknown"), None, None, ""),
    "a cause of a newer version": ("of_a_newer_version", changed("unknown"), None, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_what_is_advised(case):
    cause, part, typed, gain, words = ADVICE[case]
    advice = advise(cause, evidence_over([part]))
    if typed is gain is None:
        assert advice == ()
        return
    told = advice[0]
    assert typed is None or told.typed == typed
    assert gain is None or told.predicted_speedup == pytest.approx(gain, rel=0.02)
    assert all(each in f"{told.action} {told.because}" for each in words.split("|"))


@pytest.mark.parametrize(
    ("cause", "part", "words"),
    [
        (LOADER, own(cores=1.0, timed_fetch=1.0, timed_fetch_cpu=0.9), "cheaper"),
        (LOADER, own(cores=1.0, timed_fetch=1.0, timed_fetch_cpu=0.1), "faster storage"),
        ("workers_cpu_bound", changed("workers_cpu_bound", gpu_utilization_ratio=0.5), "move augmentation to the GPU"),
        ("workers_cpu_bound", changed("workers_cpu_bound"), "decode at a smaller size, store"),
    ],
)
def test_the_last_advice_is_to_fetch_less_or_faster(cause, part, words):
    *_, last = advise(cause, evidence_over([part]))
    assert words in last.action
    assert last.predicted_speedup is None


@pytest.mark.parametrize("cause", [LOADER, "workers_cpu_bound"])
def test_what_the_process_took_to_start_is_in_no_step(cause):
    """Importing torch takes seconds of CPU time, which the first window of a run had in its steps."""
    part = own(cores=2.0)
    if cause == "workers_cpu_bound":
        part = with_workers(busy=1.0, cpu=1.0, **STARVED, workers=1, process_cpu=0.4, cores=2.0)
    start = a_slice(
        seconds=1.0, wait=0.1, compute=0.0, startup=0.9, steps=0, process_cpu=4.0, host_cpu_ratio=0.5, host_cores=2
    )
    (with_start, *_), (without, *_) = (advise(cause, evidence_over([*more, *[part] * 10])) for more in ([start], []))
    assert with_start.typed == without.typed
    assert with_start.predicted_speedup == pytest.approx(without.predicted_speedup, rel=0.03)


def test_the_cores_are_those_that_others_leave():
    shared = a_slice(**STARVED, process_cpu=0.9, cores=2.0, host_cpu_ratio=1.0, host_cores=2)
    start = changed(shared, seconds=0.01, wait=0.0, compute=0.0, startup=0.01, steps=0, process_cpu=3.0)
    assert evidence_over([start, *[shared] * 10]).cores == evidence_over([shared]).cores == 1.0
    # A pod with 8 cores on a machine of 128 that has 100 idle: another rank of the pod takes 6 of the 8.
    pod = own(host_cores=128, host_cpu_ratio=28 / 128, quota=8.0, quota_used=7.0)
    pod_alone = evidence_over([pod])
    assert (pod_alone.cores, pod_alone.cores_of_others) == (pytest.approx(2.0), pytest.approx(6.0))
    assert evidence_over([changed(pod, quota_used=1.0)]).cores == pytest.approx(8.0)


def test_a_checkpoint_step_begun_before_the_window_is_not_compared():
    part = a_slice(compute=0.5, checkpoint=0.5, steps=2, checkpoint_steps=1, checkpoint_steps_compute=0.9)
    assert evidence_over([part]).around_checkpoints_seconds == 0.0
    whole = changed(part, checkpoint_steps_compute=0.4)
    assert evidence_over([whole]).around_checkpoints_seconds == pytest.approx(0.3)


@pytest.mark.parametrize(("early", "each"), [(0.3, 0.3), (1.2, 1.2)])
def test_a_rare_checkpoint_takes_what_the_first_ones_did(early, each):
    """0.3 s each, five to a second of compute: 29 times less often they take a twentieth, if they take no longer."""
    part = a_slice(seconds=2.5, compute=1.0, checkpoint=1.5, steps=50, checkpoint_steps=5)
    advice = advise("checkpoint", evidence_over([part], early_checkpoint_seconds=early))[0]
    assert advice.value == "29"
    assert advice.predicted_speedup == pytest.approx(2.5 / (1 + 5 * each / 29), rel=0.01)
    assert ("the first of them took 1.2 s each" in advice.because) is (early > 1)


@pytest.mark.parametrize(
    ("cause", "lost"),
    [
        ("workers_io_bound", {}),
        ("gc_pause", {"garbage": 0.6, "source": "training_thread"}),
        ("checkpoint", {"checkpoint": 1.5, "checkpoint_steps": 2}),
        ("gpu_throttled", {"gpu_utilization_ratio": 1.0, "gpu_clock_ratio": 0.4, "gpu_throttled": ("hw_thermal",)}),
        ("host_bound", {"gpu_utilization_ratio": 0.5}),
    ],
)
def test_the_slowest_rank_decides_what_a_change_is_worth(cause, lost):
    part = a_slice(compute=1.0, samples=100, in_sync=50, **lost)
    if cause == "workers_io_bound":
        part = with_workers(busy=0.99, cpu=0.1, blocked=0.89, wait=0.8, compute=0.2, workers=1, samples=100, in_sync=5)
    assert cause == "host_bound" or first(cause, part).predicted_speedup > 1.6
    busy = structs.replace(
        pace(1, stack_samples=100, gpu_busy_ratio=0.5), seconds=part.seconds, compute_seconds=part.seconds
    )
    kept_up = advise(
        cause, evidence_over([changed(part, peers=(structs.replace(busy, on_gpu=cause == "host_bound"),))])
    )
    assert all(advice.predicted_speedup is None for advice in kept_up)  # none that would win nothing


def test_a_watched_iterable_is_still_as_fast_as_it_is_when_it_is_read_ahead():
    slow = a_slice(source="watched", wait=0.8, compute=0.2, timed_fetch=1.0, timed_fetch_cpu=0.0)
    workers, ahead = advise("source_slow", evidence_over([slow]))
    assert (workers.setting, workers.predicted_speedup) == ("num_workers", pytest.approx(5.0, rel=0.3))
    assert (ahead.setting, ahead.predicted_speedup) == (None, pytest.approx(1.0 / 0.8, rel=0.02))
    on_cpu = a_slice(source="watched", wait=0.5, compute=0.5, timed_fetch=1.0, timed_fetch_cpu=1.0)
    assert all(a.setting for a in advise("source_slow", evidence_over([on_cpu])))  # a thread would not help


def test_who_waits_for_a_rank_that_does_not_come_is_told_to_look_there():
    missing = pace(3, steps=0, where="read (data.py:7)")
    (advice,) = StuckRank("opened", "straggler", "compute", 42.0, "all_reduce", missing).advice()
    assert advice.action == "find out what rank 3 does"
    assert advice.because == "this rank has waited 42 s in a step for rank 3, which was last seen in read (data.py:7)"


OF_A_STEP = {LOADER, STARTUP, "uneven_batches", "batch_transfer", "source_slow", "straggler"}


@pytest.mark.parametrize("case", CASES)
def test_without_a_step_nothing_is_said_of_one(case):
    """Whatever is the cause, as in a window with a step that takes longer than it."""
    evidence = evidence_over([changed(case, steps=0, batches=0)])
    for cause in {case.partition(",")[0], *OF_A_STEP}:
        assert not advise(cause, evidence) or cause not in OF_A_STEP


def test_batches_of_loaders_without_workers_are_none_of_theirs():
    assert evidence_over([changed(TWO_LOADERS, batches=11)]).batches_per_step == 1.0  # a step that has not ended
    assert evidence_over([changed(TWO_LOADERS, fetches=12)]).batches_per_step == pytest.approx(1.2)


# -- batches that are late although fetches are fast enough on average -------------------------------------------------


def uneven(slowest_seconds=0.06, from_busy_seconds=None, cpu_ratio=None, **settings):
    """One second with ten steps: 50 ms of compute each, fetches of 100 ms in four workers, one of which may be slower.

    With ``from_busy_seconds``, a batch takes 2 ms from an idle worker, and so long from a busy one.
    """

    def at(fetches):
        fetched = {1: (fetches, 0.06 * fetches), 2: (fetches, slowest_seconds * fetches)}
        part = with_workers(
            busy=0.25, blocked=0.25, fetches=10, wait=0.5, compute=0.5, fetch_wait=0.4, transfer_wait=0.05
        )
        return changed(part, workers={"fetched": fetched}, settings={"in_order": True, "prefetch_factor": 2} | settings)

    evidence = evidence_over([at(10), at(20), at(30)])
    if from_busy_seconds is not None:
        evidence = structs.replace(evidence, transfer_seconds=0.002, transfer_from_busy_seconds=from_busy_seconds)
    return evidence if cpu_ratio is None else structs.replace(evidence, worker_cpu_ratio=cpu_ratio)


def test_prefetching_covers_the_longest_fetch():
    def part(*counts):
        counts += (0,) * (len(FETCH_BUCKETS) + 1 - len(counts))
        one = with_workers(busy=0.4, cpu=0.1, blocked=0.3, fetch_wait=0.4, workers=2, fetches=50, steps=50, **STARVED)
        return changed(one, workers={"fetch_duration": Histogram(FETCH_BUCKETS, counts, 1.0)})

    evidence = evidence_over([part(1), part(40, 0, 0, 0, 0, 0, 0, 0, 1)])
    assert evidence.longest_fetch_seconds == FETCH_BUCKETS[8]  # 268 ms, of steps of 8 ms: 34 batches ahead
    advice = advise("uneven_batches", evidence)[0]
    assert advice.setting == "prefetch_factor"
    assert 16 <= int(advice.value) <= 32
    assert advice.predicted_speedup == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("compute", [0.0, 1e-310])
def test_steps_that_compute_nothing_hide_no_fetch(compute):
    """No number of batches ahead is infinite, or is advised as such."""
    late = structs.replace(evidence_over([CASES["uneven_batches"]]), compute_seconds=compute)
    advice = advise("uneven_batches", structs.replace(late, longest_fetch_seconds=1.0))
    assert all(int(a.value) <= 64 for a in advice if a.setting == "prefetch_factor")


def test_no_prefetching_makes_up_for_a_worker_that_is_always_slower():
    advice = advise("uneven_batches", uneven(0.4))  # a batch of it every fourth step: a step takes 100 ms
    assert [a.setting for a in advice] == ["in_order", None]
    assert "one worker takes 400.0 ms a batch" in advice[0].because
    assert "give every worker an equal share" in advice[1].action
    assert advice[0].predicted_speedup == pytest.approx(100 / (50 + 5), rel=0.01)
    as_they_come = advise("uneven_batches", uneven(0.4, in_order=False))
    assert [a.setting for a in as_they_come] == ["prefetch_factor"]


def test_what_moving_a_batch_takes_is_left_when_no_batch_is_late():
    then = pytest.approx(100 / (50 + 5), rel=0.01)
    advice = advise("uneven_batches", uneven())
    assert [(a.setting, a.predicted_speedup) for a in advice] == [("prefetch_factor", then), ("in_order", then)]


def test_batches_that_a_busy_worker_hands_over_late_are_shared_by_file():
    """Prefetching alone was worth 2 % for such a loader, and with files 70 %."""
    advice = advise("uneven_batches", uneven(0.06, 0.05, 0.9, sharing_strategy="file_descriptor"))[0]
    assert advice.setting is None
    assert "set_sharing_strategy('file_system')" in advice.action
    assert "prefetch_factor=" in advice.action
    assert "takes 50.0 ms to transfer" in advice.because
    assert advice.predicted_speedup == pytest.approx(100 / (50 + 2), rel=0.01)


@pytest.mark.parametrize(
    ("from_busy", "cpu", "strategy"),
    [
        pytest.param(0.05, 0.2, "file_descriptor", id="the worker waits: its other thread has the GIL"),
        pytest.param(0.01, 0.9, "file_descriptor", id="hardly late"),
        pytest.param(0.05, 0.9, "file_system", id="shared by file already"),
    ],
)
def test_other_batches_are_not(from_busy, cpu, strategy):
    late = uneven(0.06, from_busy, cpu, sharing_strategy=strategy)
    assert advise("uneven_batches", late)[0].setting == "prefetch_factor"


def test_busier_workers_transfer_more_batches_late():
    """A step of 52 ms would find them in a fetch for nearly half of the time, so it is longer, and finds them less."""
    (ahead, _) = advise("uneven_batches", uneven(0.06, 0.05))
    then = 100 / ahead.predicted_speedup
    assert then == pytest.approx(52 + 48 * 25 / then, rel=0.01)  # a batch every 25 ms is what they make


@pytest.mark.parametrize(
    ("fetched", "slowest"),
    [
        pytest.param(
            [
                {1: (0, 0.0), 2: (0, 0.0)},
                {1: (2, 9.0), 2: (5, 1.0), 3: (25, 45.0)},
                {1: (4, 18.0), 2: (10, 2.0), 3: (50, 90.0)},
            ],
            1.8,
            id="one that has hardly fetched",
        ),
        pytest.param(
            [{1: (0, 0.0), 2: (0, 0.0)}, {1: (5, 10.0), 2: (5, 1.0)}, {1: (10, 11.0), 2: (10, 2.0)}],
            0.2,
            id="a single long fetch",
        ),
        pytest.param([{1: (0, 0.0)}], None, id="nothing to compare"),
    ],
)
def test_which_worker_is_called_slow(fetched, slowest):
    evidence = evidence_over([changed(HELD, workers={"fetched": each}) for each in fetched])
    assert evidence.slowest_fetch_seconds == slowest


def test_kept_workers_first_finish_the_batches_of_a_left_epoch():
    short = with_workers(busy=0.5, cpu=0.5, fetches=10, workers=2, boundary_wait=0.6, boundaries=4, left=4, **STARVED)
    assert evidence_over([short]).fetch_seconds == pytest.approx(0.1)
    whole = first(STARTUP, changed(short, left=0))
    assert whole.predicted_speedup == pytest.approx(1 / (0.4 + 0.4), rel=0.01)
    assert advise(STARTUP, evidence_over([short])) == ()  # three fetches to an edge are as long as it is
