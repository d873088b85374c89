"""Exposed wait by event pairs, with events that follow a simulated GPU."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from telemetry.hooks import dataloader, state, tracker
from telemetry.hooks import device as gpu_clock
from telemetry.hooks.device import BUDGET_RATIO, DeviceStream, GpuClock
from tests.data_sets import Numbers

MS = 1_000_000


class Gpu:
    """A GPU with one stream and a simulated host clock. Work is queued and runs in order."""

    def __init__(self, monkeypatch) -> None:
        self.host_ns = 1_000 * MS
        self.busy_until_ns = 0
        self.capturing = False
        self.initialised = True
        self.events = 0
        self.call_ns = 0
        self.place = DeviceStream(0, 0)
        for module in (
            gpu_clock, dataloader, tracker, tracker, tracker, state, tracker,
        ):  # fmt: skip
            monkeypatch.setattr(module, "now_ns", self.now)

    def now(self) -> int:
        return self.host_ns

    def work(self, milliseconds: float) -> None:
        """Queue a kernel. The host does not wait for it."""
        self.busy_until_ns = max(self.busy_until_ns, self.host_ns) + int(milliseconds * MS)

    def sleep(self, milliseconds: float) -> None:
        self.host_ns += int(milliseconds * MS)

    def begin(self) -> DeviceStream | None:
        return self.place if self.initialised and not self.capturing else None

    def end(self) -> None:
        pass

    def event(self):
        gpu = self
        gpu.events += 1

        class Event:
            at_ns = device = None

            def record(self) -> None:
                assert not gpu.capturing, "recorded into a capture"
                assert self.device in {None, gpu.place.device}, "recorded on another device"
                self.device = gpu.place.device
                gpu.host_ns += gpu.call_ns
                self.at_ns = max(gpu.busy_until_ns, gpu.host_ns)

            def query(self) -> bool:
                assert not gpu.capturing, "queried during a capture"
                return self.at_ns <= gpu.host_ns

            def elapsed_time(self, other) -> float:
                assert self.query() and other.query()
                assert self.device == other.device, "events of two devices"
                return (other.at_ns - self.at_ns) / MS

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def run(gpu: Gpu, clock: GpuClock, steps: int, *, work: float, wait: float, host: float = 0.0) -> None:
    """Training steps: wait for a batch, queue work for the GPU, do something on the host."""
    for _ in range(steps):
        clock.step_ended()
        start = gpu.now()
        gpu.sleep(wait)
        clock.batch_arrived(start, gpu.now())
        gpu.work(work)
        gpu.sleep(host)


def ratio(clock: GpuClock) -> float:
    return clock.sampled_ns[0] / clock.sampled_ns[1]


def test_a_wait_that_the_gpu_works_through_is_hidden(gpu):
    clock = GpuClock(gpu)
    gpu.work(30)
    run(gpu, clock, 50, work=30, wait=10)
    gpu.sleep(10_000)
    clock.epoch_boundary()  # reads what is left
    assert clock.pairs > 5
    assert clock.sampled_ns[0] == 0
    assert clock.distrusted == 0


def test_a_wait_with_an_idle_gpu_is_exposed(gpu):
    clock = GpuClock(gpu)
    run(gpu, clock, 50, work=5, wait=30, host=10)
    assert clock.pairs > 5
    assert ratio(clock) == 1.0


def test_a_wait_is_exposed_from_the_moment_the_gpu_is_done(gpu):
    clock = GpuClock(gpu)
    run(gpu, clock, 50, work=10, wait=30)  # 10 of the 30 ms are worked through
    assert ratio(clock) == pytest.approx(20 / 30, abs=0.02)


@pytest.mark.parametrize(("step_ms", "call_us"), [(100, 5), (10, 5), (1, 5), (1, 50)])
def test_timing_is_thinned_out_to_its_budget(gpu, step_ms, call_us):
    gpu.call_ns = call_us * 1000
    clock = GpuClock(gpu)
    run(gpu, clock, 3000, work=step_ms / 2, wait=step_ms)  # enough for the first estimates to be replaced
    began, before = gpu.now(), clock.pairs
    run(gpu, clock, 5000, work=step_ms / 2, wait=step_ms)
    spent = (clock.pairs - before) * 2 * gpu.call_ns
    assert clock.pairs > before
    assert spent <= 1.5 * BUDGET_RATIO * (gpu.now() - began)


def test_nothing_is_touched_while_a_graph_is_captured(gpu):
    clock = GpuClock(gpu)
    run(gpu, clock, 5, work=5, wait=200)
    pairs = clock.pairs
    gpu.capturing = True
    run(gpu, clock, 5, work=5, wait=200)
    assert clock.pairs == pairs
    gpu.capturing = False
    clock.step_ended()
    gpu.capturing = True  # begun inside the loader
    clock.batch_arrived(gpu.now(), gpu.now())
    gpu.capturing = False
    run(gpu, clock, 5, work=5, wait=200)
    assert clock.pairs > pairs


def test_nothing_is_touched_before_cuda_is_in_use(gpu):
    gpu.initialised = False
    clock = GpuClock(gpu)
    run(gpu, clock, 5, work=5, wait=200)
    assert gpu.events == 0


def test_a_pair_that_contradicts_the_host_clock_is_dropped(gpu):
    clock = GpuClock(gpu)
    for _ in range(20):
        clock.step_ended()
        start = gpu.now()
        gpu.sleep(50)
        clock.batch_arrived(start, start + 10 * MS)  # the host says 10 ms, the GPU 50
    assert clock.pairs == 0
    assert clock.distrusted > 0
    assert clock.sampled_ns == (0, 0)


def test_a_gpu_far_behind_does_not_pile_up_events(gpu):
    clock = GpuClock(gpu)
    run(gpu, clock, 500, work=500, wait=100)
    assert gpu.events <= 2 * 10


def test_the_start_of_an_epoch_is_timed_each_time(gpu):
    clock = GpuClock(gpu)
    for _ in range(3):
        clock.epoch_boundary()
        start = gpu.now()
        gpu.sleep(500)
        clock.batch_arrived(start, gpu.now())
        gpu.work(1)
        run(gpu, clock, 3, work=1, wait=2)
    clock.epoch_boundary()  # reads what is left
    assert clock.boundary_ns[1] == 3 * 500 * MS
    assert clock.boundary_ns[0] == pytest.approx(3 * 500 * MS, rel=0.01)


def test_the_hooks_drive_the_clock(observed, gpu):
    clock = observed.tracker.gpu = GpuClock(gpu)

    class Loader(Numbers):
        def __getitem__(self, index):
            gpu.sleep(200)
            return index

    for _ in range(2):
        for _ in DataLoader(Loader(6), batch_size=1):
            gpu.work(50)
    observed.tracker.errors = 0
    assert clock.pairs >= 12
    assert ratio(clock) == pytest.approx(150 / 200, abs=0.02)


def test_a_wait_in_a_side_stream_is_not_counted(gpu):
    clock = GpuClock(gpu)
    for _ in range(30):
        clock.worked()
        gpu.place = DeviceStream(0, 7)  # where nothing else runs
        run(gpu, clock, 1, work=0, wait=200)
        gpu.place = DeviceStream(0, 0)
        gpu.work(200)
    assert clock.pairs == 0
    assert clock.skipped >= 20
    assert clock.on_another_stream


def test_a_pair_that_ends_in_another_stream_is_not_counted(gpu):
    clock = GpuClock(gpu)
    for _ in range(5):
        clock.step_ended()
        gpu.place = DeviceStream(0, 7)
        gpu.sleep(200)
        clock.batch_arrived(gpu.now() - 200 * MS, gpu.now())
        gpu.place = DeviceStream(0, 0)
    run(gpu, clock, 3, work=5, wait=200)
    clock.epoch_boundary()
    assert clock.skipped == 5
    assert clock.pairs == 3
    assert gpu.events <= 2 * 3


def test_events_are_used_again_on_their_own_device_only(gpu):
    clock = GpuClock(gpu)
    for device in (0, 1, 0, 1):
        gpu.place = DeviceStream(device, 0)
        run(gpu, clock, 5, work=5, wait=200)
    clock.epoch_boundary()
    assert clock.pairs == 20
    assert clock.distrusted == 0


def test_a_replay_without_an_optimizer_is_timed_in_its_own_stream(gpu):
    clock = GpuClock(gpu)
    gpu.place = DeviceStream(0, 7)  # warming up before a capture
    clock.worked()
    gpu.place = DeviceStream(0, 0)
    run(gpu, clock, 5, work=5, wait=200)
    clock.epoch_boundary()
    assert clock.pairs == 4


def test_requests_without_an_arrival_do_not_pile_up_events(gpu):
    clock = GpuClock(gpu)
    for _ in range(100):
        clock.epoch_boundary()
    assert gpu.events <= 2
