"""No counter goes back when one of its parts is replaced or goes down; and the ring is emptied every second."""

from __future__ import annotations

import os
import threading
import time

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.hooks.worker_block import FETCH_BUCKETS, WorkerCounters
from telemetry.records import GpuSample
from telemetry.sources.cgroup import PressureSource
from telemetry.sources.collector import CollectorError
from telemetry.sources.nvml import NvmlSource
from telemetry.sources.proc import HostSource
from telemetry.sources.workers import WorkersSource
from tests.data_sets import Numbers
from tests.full_views import page
from tests.running_agent import log_lines, scrape, wait_for

FETCHES = ("training_loader_fetch_duration_seconds_count",)
ENERGY, NVML_UP = "training_gpu_energy_joules_total", ("telemetry_collector_up", "nvml")
OVERHEAD = ("telemetry_overhead_seconds_total", "agent")


def drained(ring) -> bool:
    return ring.tail == ring.head


def test_the_ring_is_emptied_long_before_the_next_sample(tmp_path):
    hour = {"interval_seconds": 3600, "stall_window_seconds": 3600}
    agent = telemetry.start(tmp_path / "run", port="off", start_line=False, **hour)
    ring = agent.tracker.ring
    wait_for(lambda: agent.event_log.log.file.path.exists() and agent.overhead.agent_thread_seconds)  # the first sample
    for round_ in range(3):
        for _ in telemetry.watch(range(3000)):
            pass
        wait_for(lambda: drained(ring))
        assert agent.accounting.stats.steps >= 3000 * (round_ + 1) - 1
    telemetry.stop()
    assert log_lines(agent)[-1]["dropped_steps_total"] == 0


def test_the_ring_is_emptied_between_slow_collectors(agent, monkeypatch):
    """A slow collector delays the next collector, but the accounting does not wait until all of them are read."""
    ring, pushed, seen = agent.tracker.ring, [], []
    read_host, read_pressure = HostSource.read, PressureSource.read

    def slow(source):
        time.sleep(0.6)
        pushed.append(ring.push(agent.accounting.ledger.at_ns, agent.accounting.ledger.at_ns, 0))
        return read_host(source)

    def after(source):
        if pushed:
            seen.append(drained(ring))
        return read_pressure(source)

    with monkeypatch.context() as patched:
        patched.setattr(HostSource, "read", slow)
        patched.setattr(PressureSource, "read", after)
        wait_for(lambda: seen)
        telemetry.stop()
    assert seen[0]


def test_the_cost_of_an_endpoint_that_was_replaced_stays_counted(agent):
    first = agent._node.endpoint
    os.close(first._listening.number)  # as a library that closes all descriptors does
    first.cpu_seconds += 10
    wait_for(lambda: agent._node.endpoint not in {None, first})
    wait_for(lambda: scrape(agent)[OVERHEAD] >= 10)
    assert agent.overhead.seconds()["agent"] >= 10


@pytest.mark.parametrize("way", ["fails", "run ends"])
def test_the_fetches_of_workers_stay_counted(agent, monkeypatch, way):
    for _ in DataLoader(Numbers(8), batch_size=1, num_workers=2):
        pass
    wait_for(lambda: scrape(agent).get(FETCHES) == 8)
    published = []
    original = agent._node.publish

    def publish(rank, view, **more):
        published.append(page(view))
        return original(rank, view, **more)

    def fail(source):
        raise OSError("no /proc")

    monkeypatch.setattr(agent._node, "publish", publish)
    if way == "fails":
        monkeypatch.setattr(WorkersSource, "read", fail)
        wait_for(lambda: scrape(agent).get(("telemetry_collector_up", "workers")) == 0)
        assert scrape(agent)[FETCHES] == 8
    telemetry.stop()
    counts = [line.split()[-1] for line in published[-1].splitlines() if line.startswith(FETCHES[0] + "{")]
    assert [float(count) for count in counts] == [8]


def test_the_energy_of_the_gpu_stays_counted_while_nvml_is_down(agent, monkeypatch):
    """It is not lower afterwards, and what the GPU used meanwhile is in it."""
    joules, reading = [1000.0], threading.Event()
    reading.set()

    def read(source):
        if not reading.is_set():
            raise CollectorError("the driver is gone")
        joules[0] += 1.0
        return GpuSample(3, "GPU-1", "a GPU", energy_joules=joules[0])

    def counted():
        found = scrape(agent)
        return sum(value for key, value in found.items() if key[0] == ENERGY), found.get(NVML_UP)

    monkeypatch.setattr(NvmlSource, "read", read)
    wait_for(lambda: counted()[0] >= 2)
    reading.clear()
    wait_for(lambda: counted()[1] == 0)
    while_down = counted()[0]
    assert while_down >= 2
    assert {key[2:] for key in scrape(agent) if key[0] == ENERGY} == {("3", "GPU-1")}
    joules[0] += 100.0
    reading.set()
    wait_for(lambda: counted()[1] == 1 and counted()[0] >= while_down + 100)


def test_another_worker_in_the_same_place_takes_no_fetch_away():
    """Memory is used again, and so are pids: counters that are smaller than before are another worker's."""

    class Block:
        def __init__(self) -> None:
            self.fetches = 0

        def read(self):
            counts = (self.fetches, *(0,) * len(FETCH_BUCKETS))
            return (WorkerCounters(pid=1, tid=1, fetches=self.fetches, wall_ns=self.fetches, histogram=counts),)

    source, block = WorkersSource(tuple, tuple), Block()
    seen = []
    for fetches in (5, 2, 3):
        block.fetches = fetches
        source._count(block)
        seen.append(sum(source.fetches.counts))
    assert seen == [5, 7, 8]
