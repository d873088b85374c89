"""The agent as a whole: what it publishes and logs of a run and of a stall, and that it ends and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import pdb  # noqa: T100 - a debugger is what is tested
import re
import signal
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.config import Config, SettingError
from telemetry.log.lines import Line
from telemetry.log.process import stalls_of
from telemetry.log.reader import load
from telemetry.model.records import FETCH_BUCKETS, Advice, GpuSample, StallRecord
from telemetry.safety import threads
from telemetry.safety import threads as own_threads
from telemetry.seams.loaders import LoaderRegistry
from telemetry.seams.ring import CAPACITY, STEP
from telemetry.seams.worker_block import WorkerCounters
from telemetry.sources.cgroup import PressureSource
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import GpuSource
from telemetry.sources.proc import HostSource
from telemetry.sources.workers import WorkersSource
from tests.data_sets import Numbers
from tests.full_views import page
from tests.report_logs import summarize
from tests.running_agent import log_lines, scrape, wait_for


def test_a_run_from_start_to_end(agent):
    for _ in DataLoader(Numbers(20, seconds=0.02), batch_size=1, num_workers=1):
        time.sleep(0.01)
    metrics = wait_for(lambda: (m := scrape(agent)).get(("training_steps_total",)) == 20 and m)
    ledger = {k[1]: v for k, v in metrics.items() if k[0] == "training_time_seconds_total"}
    assert set(ledger) == {"startup", "data_wait", "compute", "evaluation", "checkpoint", "other"}
    assert ledger["compute"] >= 0.2
    assert metrics["training_exposed_wait_seconds_total",] == pytest.approx(ledger["data_wait"])
    assert metrics["training_step_duration_seconds_count",] == metrics["training_wait_duration_seconds_count",] == 20
    assert metrics["training_wait_duration_seconds_sum",] < metrics["training_step_duration_seconds_sum",]
    assert metrics["training_wait_duration_seconds_bucket", "0.001"] < 20  # the loader takes twice as long as the loop
    assert metrics["telemetry_overhead_seconds_total", "training"] > 0
    assert metrics["telemetry_collector_up", "host"] == 1
    assert metrics["telemetry_collector_up", "nvml"] == 0
    assert not any("gpu" in name or "cuda" in name for name, *_ in metrics)  # not measured: absent, never 0
    assert metrics["training_run_ended",] == 0
    wait_for(lambda: any(line["event"] == "workers" for line in log_lines(agent)))

    telemetry.stop()
    lines = log_lines(agent)
    assert (lines[0]["event"], lines[-1]["event"]) == ("run_start", "run_end")
    assert {line["event"] for line in lines} <= {"run_start", "window", "host", "workers", "error", "run_end"}
    for line in lines:
        if "ledger_total_seconds" in line:
            assert sum(line["ledger_total_seconds"].values()) == pytest.approx(line["wall_seconds"], abs=1e-4)
    workers = [line for line in lines if line["event"] == "workers"]
    assert not any(isinstance(value, dict) for line in workers for value in line.values()), "no field for each worker"
    windows = [line for line in lines if line["event"] == "window"]
    assert sum(line["steps"] for line in windows) == 20
    (rank,) = summarize(load(agent.run_dir))["ranks"]
    assert rank["steps"] == 20
    assert 0.01 <= rank["step_seconds"]["p50"]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_fetch_is_counted_with_and_without_workers(agent, workers):
    for _ in DataLoader(Numbers(12, seconds=0.02), batch_size=2, num_workers=workers):
        time.sleep(0.001)
    name = "training_loader_fetch_duration_seconds"
    metrics = wait_for(lambda: (m := scrape(agent)).get((f"{name}_count",)) == 6 and m)
    assert metrics[f"{name}_sum",] >= 6 * 0.04
    assert metrics[f"{name}_bucket", repr(FETCH_BUCKETS[5])] == 0


def test_a_bad_setting_starts_nothing(tmp_path):
    before = threads.running(), threading.active_count()
    with pytest.raises(SettingError, match="interval_seconds"):
        telemetry.start(tmp_path / "run", interval_seconds=-1)
    assert (threads.running(), threading.active_count()) == before
    assert not (tmp_path / "run").exists()


def test_patch_and_port_off_leave_torch_alone_serve_nothing_and_watch_still_works(tmp_path):
    original = DataLoader.__iter__
    agent = telemetry.start(tmp_path / "run", port="off", patch=False, start_line=False)
    assert DataLoader.__iter__ is original
    assert agent.metrics_url is None
    assert "telemetry-endpoint" not in threads.running()
    loader = DataLoader(Numbers(4), batch_size=1)
    assert len(list(telemetry.watch(loader))) == 4
    agent.accounting.update()
    assert agent.accounting.stats.steps == 4


def test_a_million_steps_a_second_are_counted_if_not_kept(agent):
    """A ring that overflows drops steps and counts them. The ledger stays complete."""
    with agent.errors.contained("test"):
        ring = agent.tracker.ring
        for _ in range(CAPACITY + 500):
            ring.push(*(agent.accounting.ledger.at_ns,) * 2, STEP)
        assert ring.dropped >= 1
    telemetry.stop()
    (end,) = [line for line in log_lines(agent) if line["event"] == "run_end"]
    assert end["dropped_steps_total"] == ring.dropped
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


def test_a_rank_that_has_ended_is_shown_as_ended_while_others_run(tmp_path):
    """Two ranks of one run in two processes. The second ends, and the first still serves."""
    import os
    import subprocess
    import sys

    env = dict(os.environ, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)
    code = "import sys, telemetry; telemetry.start(sys.argv[1], port=0, start_line=False)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=env, check=True)

    def text() -> str:
        with urllib.request.urlopen(agent.metrics_url, timeout=10) as answer:
            return answer.read().decode()

    wait_for(lambda: 'training_run_ended{rank="1",run="run"} 1.0' in text())
    wait_for(lambda: 'training_process_threads{rank="1"' not in text())  # a process that is gone has no threads
    assert 'training_run_ended{rank="0",run="run"} 0.0' in text()
    assert 'training_run_ended{rank="1",run="run"} 1.0' in text()


def test_two_jobs_of_one_name_do_not_share_a_target_file(tmp_path):
    from telemetry.node.board import Board

    paths = {Board("r", *of, tmp_path / "boards").path for of in (("/a/r", "n"), ("/b/r", "n"), ("/b/r", "m"))}
    assert len(paths) == 3, "nor do two nodes that are one machine"
    agent = telemetry.start(tmp_path / "run", port=0, start_line=False, targets_dir=tmp_path / "targets")
    (file,) = (tmp_path / "targets").iterdir()
    (target,) = json.loads(file.read_text())
    assert target["targets"] == [agent.metrics_url.removeprefix("http://").removesuffix("/metrics")]
    telemetry.stop()
    assert not list((tmp_path / "targets").iterdir())


# -- no counter goes back; the ring is emptied every second ------------------------------------------------------------

FETCHES = ("training_loader_fetch_duration_seconds_count",)
ENERGY, NVML_UP = "training_gpu_energy_joules_total", ("telemetry_collector_up", "nvml")
OVERHEAD = ("telemetry_overhead_seconds_total", "agent")


def drained(ring) -> bool:
    return ring.tail == ring.head


def test_the_ring_is_emptied_long_before_the_next_sample(tmp_path):
    hour = {"interval_seconds": 3600, "stall_window_seconds": 3600}
    agent = telemetry.start(tmp_path / "run", port="off", start_line=False, **hour)
    ring = agent.tracker.ring
    wait_for(lambda: agent.event_log.file.path.exists() and agent.overhead.agent_thread_seconds)  # the first sample
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
    first._cpu[0] = 10.0
    wait_for(lambda: agent._node.endpoint not in {None, first})
    wait_for(lambda: scrape(agent)[OVERHEAD] >= 10)
    assert agent.overhead.seconds()["agent"] >= 10


def test_the_fetches_of_workers_stay_counted_when_their_collector_fails_and_at_the_end(agent, monkeypatch):
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
        return (GpuSample(3, "GPU-1", "a GPU", energy_joules=joules[0]),)

    def counted():
        found = scrape(agent)
        return sum(value for key, value in found.items() if key[0] == ENERGY), found.get(NVML_UP)

    monkeypatch.setattr(GpuSource, "read", read)
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
        head, workers = SimpleNamespace(iteration=0), 1

        def __init__(self) -> None:
            self.fetches = 0

        def read(self):
            counts = (self.fetches, *(0,) * len(FETCH_BUCKETS))
            return (WorkerCounters(pid=1, tid=1, fetches=self.fetches, wall_ns=self.fetches, histogram=counts),)

    source, block = WorkersSource(LoaderRegistry()), Block()
    seen = []
    for fetches in (5, 2, 3):
        block.fetches = fetches
        source._count(block)
        seen.append(sum(source.fetches.counts))
    assert seen == [5, 7, 8]


# -- a stall of a real loop --------------------------------------------------------------------------------------------

HEARD: list[dict] = []


def hear(stall: dict) -> None:
    HEARD.append(stall)


def starve(agent, until) -> None:
    for _ in DataLoader(Numbers(10_000, seconds=0.01), batch_size=1):
        if until():
            return
    raise AssertionError("no stall opened")


def start(tmp_path, **settings):
    defaults = dict(port=0, interval_seconds=0.1, log_interval_seconds=0.2, stall_window_seconds=1, start_line=False)
    return telemetry.start(tmp_path / "run", **defaults | settings)


@pytest.mark.parametrize("callback", [hear, "tests.test_agent.hear"], ids=["function", "dotted name"])
def test_a_stall_is_told(tmp_path, callback):
    import tests.test_agent as this

    this.HEARD.clear()
    HEARD.clear()
    agent = start(tmp_path, on_stall=callback)
    assert "telemetry-on-stall" not in own_threads.running()
    starve(agent, lambda: HEARD or this.HEARD)
    (stall,) = HEARD or this.HEARD
    assert stall["cause"] == "loader_on_training_thread"
    assert stall["exposed_wait_ratio"] > 0.9
    wait_for(lambda: "telemetry-on-stall" not in own_threads.running())
    wait_for(lambda: scrape(agent)["training_stall_active", "loader_on_training_thread"] == 1)
    assert scrape(agent)["training_stalls_total", "loader_on_training_thread"] == 1
    assert scrape(agent)["training_stall_lost_seconds_total", "loader_on_training_thread"] > 0
    telemetry.stop()
    opened, closed = [line for line in log_lines(agent) if line["event"].startswith("stall")]
    assert (opened["event"], closed["event"]) == ("stall_open", "stall_close")
    assert opened["opened"] == closed["opened"] < closed["closed"]
    assert closed["evidence"]["source"] == "training_thread"
    assert closed.keys() - {*Line.__struct_fields__, "event"} == {*StallRecord.__struct_fields__} - {"rank"}
    (read,) = stalls_of(load(agent.run_dir)[0])
    assert (read.cause, read.opened, read.closed) == (closed["cause"], closed["opened"], closed["closed"])
    assert read.evidence == opened["evidence"] | closed["evidence"]
    assert read.advice == [Advice(**each) for each in closed["advice"]]


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3)], ids=["error", "exit"])
def test_a_callback_that_fails_is_counted_and_nothing_else(tmp_path, error):
    threads = []

    def fail(stall):
        threads.append(own_threads.named(threading.get_ident()))
        raise error

    agent = start(tmp_path, on_stall=fail)
    starve(agent, lambda: agent.errors.counts.get("on_stall"))
    assert agent.errors.counts["on_stall"] == 1
    telemetry.stop()
    events = [line["event"] for line in log_lines(agent)]
    assert events.count("stall_open") == 1
    assert events[-1] == "run_end"
    assert threads == ["telemetry-on-stall"]


@pytest.mark.parametrize("value", ["notdotted", "a b.c", 3, "", "a.b()"])
def test_what_is_no_callback_is_refused(value):
    with pytest.raises(SettingError, match="on_stall"):
        Config.load({"on_stall": value}, {})


def test_a_debugger_s_pause_in_a_fetch_is_no_stall(tmp_path):
    """The batch is waited for as long as a person looks at how it is made."""
    reading, writing = os.pipe()
    debugger = None

    class Looked(Numbers):
        def __getitem__(self, index):
            if index == 200:
                threading.Timer(3.0, lambda: os.write(writing, b"continue\n")).start()
                debugger.set_trace()
            return super().__getitem__(index)

    agent = start(tmp_path, stall_window_seconds=3)
    with open(reading) as commands, open(os.devnull, "w") as nowhere:
        debugger = pdb.Pdb(stdin=commands, stdout=nowhere, nosigint=True, readrc=False)
        debugger.use_rawinput = False
        for _ in DataLoader(Looked(240), batch_size=1):
            time.sleep(0.01)
    os.close(writing)
    telemetry.stop()
    assert [line["event"] for line in log_lines(agent) if line["event"].startswith("stall")] == []


def test_a_callback_that_hangs_holds_nothing_up(tmp_path):
    """The stalls that open meanwhile are told to nobody, and are counted; the run ends without it."""
    release, told = threading.Event(), []

    def hang(stall):
        told.append(stall)
        release.wait(60)

    agent = start(tmp_path, on_stall=hang)
    try:
        starve(agent, lambda: told)
        (thread,) = [t for t in own_threads._running.values() if t.name == "telemetry-on-stall"]
        with open(f"/proc/self/task/{thread.native}/status") as status:
            (blocked,) = [line.split()[1] for line in status if line.startswith("SigBlk")]
        assert int(blocked, 16) >> signal.SIGINT - 1 & 1
        steps, before = agent.accounting.stats.steps, scrape(agent)["training_steps_total",]
        starve(agent, lambda: scrape(agent)["training_steps_total",] > max(steps, before))
        for _ in range(2):
            agent._stall_monitor._callback.tell(StallRecord(rank=0, cause="unknown"))
        assert agent.errors.counts["on_stall"] == 2
        telemetry.stop()
        assert not agent._thread.is_alive()
        lines = log_lines(agent)
        *_, end, waited = lines  # the end of the run is in the log before anything is waited for
        assert (end["event"], end["errors_total"]) == ("run_end", {"on_stall": 2})
        assert "has not returned" in waited["message"]
        said = [line["message"] for line in lines if line["event"] == "error" and line["source"] == "on_stall"]
        assert any("not told of a stall (unknown)" in text for text in said)
        assert len(told) == 1
    finally:
        release.set()
        thread.join()


# -- what is opened is given back --------------------------------------------------------------------------------------

CYCLES = 8


def descriptors() -> list[str]:
    """What is open in this process: the names of the files, without the numbers in them."""
    gc.collect()
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # that of the listing itself
            continue
    return sorted(found)


@pytest.mark.parametrize(("trouble", "workers"), [("none", 2), ("unusable run folder", 0), ("no port", 0)])
def test_descriptors_after_many_cycles_are_those_after_two(tmp_path, trouble, workers):
    settings = {"host": "203.0.113.7"} if trouble == "no port" else {}  # this machine does not have the address
    if trouble == "unusable run folder":
        (tmp_path / "run").write_text("a file where the folder should be")
    seen = []
    for cycle in range(CYCLES):
        telemetry.start(tmp_path / "run", **{"port": 0, "start_line": False, "interval_seconds": 0.1} | settings)
        for _ in DataLoader(Numbers(4), batch_size=1, num_workers=workers):
            pass
        telemetry.stop()
        if cycle in {1, CYCLES - 1}:
            seen.append(descriptors())
    assert seen[-1] == seen[0]
