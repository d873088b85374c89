"""Growth that lasts is told from growth that ends, and the end of the memory is forecast from it."""

from __future__ import annotations

import math
import random

import pytest

from telemetry.diagnosis.memory_outlook import MAX_READINGS, MAX_SPACING_SECONDS, History, MemoryWatch
from telemetry.log.lines import MemoryForecast
from telemetry.model.records import CUDA, SHARED_MEMORY, TRAINING, WORKERS, GpuSample, MemorySample, TorchMemorySample

GB = 1e9
LIMIT = 64 * GB
HOUR = 3600.0


class Watched:
    """A watch that is fed with readings of a made-up run. Attributes that a test sets are functions of the time."""

    def __init__(self, **parts):
        self.parts = parts
        self.now = 0.0
        self.watch = MemoryWatch()

    def view(self):
        return self.watch.view(int(self.now * 1e9))

    def line_field(self):
        return self.watch.line_field(int(self.now * 1e9))

    def live(self, until, every=2.0):
        while self.now < until:
            at = {name: part(self.now) for name, part in self.parts.items()}
            used = at.get("others", 0.0) + at.get(TRAINING, 0.0) + at.get(WORKERS, 0.0) + at.get(SHARED_MEMORY, 0.0)
            gpu = allocator = None
            sample = MemorySample(
                training_bytes=int(at.get(TRAINING, 0.0)),
                workers_bytes=int(at[WORKERS]) if WORKERS in at else None,
                workers_shared_bytes=int(at["copyable"]) if "copyable" in at else None,
                shared_memory_bytes=int(at.get(SHARED_MEMORY, 0.0)),
                shared_memory_free_bytes=int(
                    at.get("shared_memory_size", LIMIT) - at.get(SHARED_MEMORY, 0.0) - at.get("shared by others", 0.0)
                ),
                memory_available_bytes=int(LIMIT - used),
                memory_limit_bytes=int(LIMIT),
            )
            if CUDA in at:
                allocated = int(at[CUDA])
                allocator = TorchMemorySample(allocated, allocated + 2 * 10**9)
                gpu = GpuSample(0, "u", "n", memory_used_bytes=allocated + 4 * 10**9, memory_total_bytes=80 * 10**9)
            now = int(self.now * 1e9)
            self.watch.tick(sample, gpu, allocator, now=now)
            self.now += every
        return self.view()


def flat(size):
    return lambda _: size


def line(start, per_hour):
    return lambda now: start + per_hour * now / HOUR


def noisy(shape, size, seed=1):
    chosen = random.Random(seed)
    return lambda now: shape(now) + chosen.uniform(-size, size)


def saw_tooth(size, seconds):
    return lambda now: size * (now % seconds) / seconds


HEALTHY = {
    "start-up": {TRAINING: lambda now: 12 * GB * min(1.0, now / 300)},
    "levels off": {TRAINING: lambda now: 40 * GB * (1 - math.exp(-now / 900))},
    "a cache that fills": {WORKERS: lambda now: min(20 * GB, 10 * GB * now / HOUR)},
    "one jump": {TRAINING: lambda now: 5 * GB if now < 2000 else 25 * GB},
    "workers that are started anew": {WORKERS: noisy(saw_tooth(20 * GB, 1200), 0.1 * GB)},
    "few long epochs": {WORKERS: saw_tooth(20 * GB, 3000)},
    "checkpoints": {TRAINING: lambda now: 4 * GB + (20 * GB if now % 600 < 20 else 0)},
    "others at random": {"others": noisy(flat(20 * GB), 15 * GB), TRAINING: flat(4 * GB)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_end_is_forecast_for_memory_that_does_not_run_out(name):
    run = Watched(**HEALTHY[name])
    for minutes in range(1, 240):
        growth = run.live(60.0 * minutes)
        if growth is not None and (name != "a cache that fills" or run.now > 3 * HOUR):
            assert growth.exhausted_in_seconds is None, f"after {minutes} min: {growth}"
            assert run.line_field() == MemoryForecast() or name == "a cache that fills" or growth.where is not None


LEAKS = {
    "with noise": (TRAINING, {TRAINING: noisy(line(4 * GB, 12 * GB), 1 * GB)}),
    "after a start-up": (TRAINING, {TRAINING: lambda now: 10 * GB * min(1.0, now / 60) + 10 * GB * now / HOUR}),
    "of workers": (WORKERS, {TRAINING: flat(4 * GB), WORKERS: line(1 * GB, 12 * GB)}),
    "in shared memory": (SHARED_MEMORY, {TRAINING: flat(4 * GB), SHARED_MEMORY: line(0.1 * GB, 12 * GB)}),
    "with a saw-tooth on it": (
        WORKERS,
        {WORKERS: lambda now: saw_tooth(2 * GB, 120)(now) + 12 * GB * now / HOUR, TRAINING: flat(4 * GB)},
    ),
    "beside checkpoints": (TRAINING, {TRAINING: lambda now: 4 * GB + 12 * GB * now / HOUR + 8 * GB * (now % 600 < 20)}),
    "while others come and go": (
        TRAINING,
        {TRAINING: line(4 * GB, 12 * GB), "others": lambda now: 8 * GB * (int(now / 900) % 2)},
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_the_end_is_forecast_at_half_of_the_run_s_life(name):
    where, parts = LEAKS[name]
    death = next(now for now in range(60, 10**6, 2) if sum(part(now) for part in parts.values()) > LIMIT)
    run = Watched(**parts)
    growth = run.live(death / 2)
    assert growth.where == where
    assert growth.exhausted == "memory"
    assert growth.exhausted_in_seconds == pytest.approx(death / 2, rel=0.25)


@pytest.mark.parametrize(("per_hour", "hours"), [(20, 1.5), (60, 0.5)])
def test_a_leak_that_begins_on_the_second_day_is_found(per_hour, hours):
    begins = 30 * HOUR
    run = Watched(**{TRAINING: lambda now: 4 * GB + max(0.0, now - begins) * per_hour * GB / HOUR})
    assert run.live(begins, every=60.0).where is None
    growth = run.live(begins + hours * HOUR, every=60.0)
    assert (growth.where, growth.exhausted) == (TRAINING, "memory")
    assert growth.exhausted_in_seconds == pytest.approx((60 / per_hour - hours) * HOUR, rel=0.25)
    run.now += 600
    assert run.view().exhausted_in_seconds == pytest.approx(growth.exhausted_in_seconds - 600), "it gets shorter"


def test_growth_without_an_end_in_sight_is_told_without_one():
    run = Watched(**{TRAINING: line(4 * GB, 1 * GB)})
    growth = run.live(2 * HOUR)
    assert growth.bytes_per_second[TRAINING] == pytest.approx(1 * GB / HOUR, rel=0.02)
    assert (growth.where, growth.exhausted_in_seconds) == (TRAINING, None)
    assert run.line_field().growth_bytes_per_hour == pytest.approx(1 * GB, rel=0.02)


def test_copies_of_a_list_are_told_from_a_cache_and_end_with_the_list():
    def copied(now):
        return 10 * GB * now / HOUR

    parts = {WORKERS: copied, TRAINING: flat(20 * GB), "copyable": lambda now: 60 * GB - copied(now)}
    growth = Watched(**parts).live(1.5 * HOUR)
    assert (growth.where, growth.copied_on_write, growth.exhausted) == (WORKERS, True, "memory")
    growth = Watched(**parts | {"copyable": lambda now: 20 * GB - copied(now)}).live(1.5 * HOUR)
    assert growth.exhausted_in_seconds is None, "all that can be copied fits"
    growth = Watched(**parts | {"copyable": flat(1 * GB)}).live(1.5 * HOUR)
    assert (growth.where, growth.copied_on_write) == (WORKERS, False)


def test_the_small_shared_memory_of_a_container_is_forecast():
    """16 MiB, or 1 % of the machine, is more than a /dev/shm of 64 MB can grow within a quarter of its end."""
    small = {"shared_memory_size": flat(64e6), TRAINING: flat(4 * GB)}
    view = Watched(**{SHARED_MEMORY: noisy(line(10e6, 0.36 * GB), 0.5e6)} | small).live(200)
    assert (view.exhausted, view.where) == (SHARED_MEMORY, SHARED_MEMORY)
    assert view.exhausted_in_seconds == pytest.approx((64e6 - 30e6) / 1e5, rel=0.15)
    still = Watched(**{SHARED_MEMORY: noisy(flat(10e6), 3e6)} | small).live(200)
    assert still.exhausted is None


def test_shared_memory_has_a_size_of_its_own():
    growth = Watched(
        **{SHARED_MEMORY: line(0.1 * GB, 2 * GB), "shared_memory_size": flat(8 * GB), TRAINING: flat(4 * GB)}
    ).live(1.5 * HOUR)
    assert (growth.where, growth.exhausted) == (SHARED_MEMORY, SHARED_MEMORY)
    assert growth.exhausted_in_seconds == pytest.approx((8 - 0.1 - 3) / 2 * HOUR, rel=0.05)


def test_growth_of_others_in_shared_memory_is_told_without_a_part():
    shared = {"shared by others": line(0.1 * GB, 2 * GB), "shared_memory_size": flat(8 * GB)}
    growth = Watched(**{SHARED_MEMORY: flat(0.5 * GB), TRAINING: flat(4 * GB)} | shared).live(1.5 * HOUR)
    assert (growth.where, growth.exhausted) == (None, SHARED_MEMORY)
    assert growth.exhausted_in_seconds == pytest.approx((8 - 0.5 - 0.1 - 3) / 2 * HOUR, rel=0.05)
    assert growth.bytes_per_second[SHARED_MEMORY] == 0


def test_the_gpu_has_what_others_leave_of_it():
    run = Watched(**{TRAINING: flat(4 * GB), CUDA: noisy(line(10 * GB, 10 * GB), 3 * GB)})
    growth = run.live(3 * HOUR)
    assert (growth.where, growth.exhausted) == (CUDA, CUDA)
    # 80 GB, of which other processes and the context have 2 GB.
    assert growth.exhausted_in_seconds == pytest.approx((80 - 2 - 40) / 10 * HOUR, rel=0.15)
    assert "loss.item()" in run.line_field().advice


def test_growth_of_others_is_told_without_a_part():
    growth = Watched(**{TRAINING: flat(4 * GB), "others": line(1 * GB, 12 * GB)}).live(2 * HOUR)
    assert (growth.where, growth.exhausted) == (None, "memory")
    assert growth.exhausted_in_seconds == pytest.approx((64 - 5 - 24) / 12 * HOUR, rel=0.1)


def test_what_was_not_measured_is_absent():
    run = Watched(**{TRAINING: flat(4 * GB)})
    assert run.live(4) is None
    assert run.live(16).bytes_per_second == {}
    assert set(run.live(120).bytes_per_second) == {TRAINING, SHARED_MEMORY}


def test_a_history_takes_a_fixed_amount_of_memory():
    history = History()
    for second in range(0, 200_000, 2):
        history.add(float(second), 3.0 * second)
        assert len(history.readings) <= MAX_READINGS
    seconds = [reading.seconds for reading in history.readings]
    assert seconds == sorted(seconds)
    assert all(reading.value == pytest.approx(3.0 * reading.seconds) for reading in history.readings)
    assert seconds[0] >= 200_000 - (MAX_READINGS + 1) * MAX_SPACING_SECONDS
