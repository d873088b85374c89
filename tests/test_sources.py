"""What is polled: the machine, cgroups, memory, the flight recorder of torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.log.lines import GpuOutOfMemoryLine
from telemetry.model.records import Collective, TorchMemorySample
from telemetry.safety.errors import ErrorLog
from telemetry.seams import cuda_memory
from telemetry.seams.collectives import RecordedCollectives, recorded_collectives
from telemetry.seams.cuda_memory import FailedAllocations
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.sources import memory
from telemetry.sources.cgroup import MemoryLimits, PressureSource
from telemetry.sources.collector import CollectorError
from telemetry.sources.memory import MemorySource, shared_bytes
from telemetry.sources.proc import HostSource
from tests.data_sets import Numbers
from tests.quick_optimizers import QuickSGD
from tests.running_agent import log_lines, wait_for

# -- the machine -------------------------------------------------------------------------------------


def test_the_use_of_the_cores_between_two_readings_and_of_the_memory(tmp_path):
    """An idle core that waits for storage is not busy. The time of guests is in that of users."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemFree: 5 kB\nMemAvailable: 6000 kB\n")
    (tmp_path / "stat").write_text("cpu  100 1 20 400 50 6 7 3 40 0\ncpu0 100 1 20 400 50 6 7 3 40 0\n")
    source = HostSource(tmp_path)
    sample = source.read()
    assert (sample.cpu_ratio, sample.memory_used_bytes, sample.memory_total_bytes) == (None, 10240000, 16384000)
    (tmp_path / "stat").write_text("cpu  130 1 20 400 120 6 7 3 70 0\n")
    assert source.read().cpu_ratio == pytest.approx(30 / 100)
    sample = HostSource().read()
    assert (sample.cpu_count, sample.memory_total_bytes) == (psutil.cpu_count(), psutil.virtual_memory().total)


# -- cgroups, as the kernel has them -----------------------------------------------------------------------------------

MIB = 1 << 20
FOLDERS = ("", "job", "job/step")


def cgroup(tmp_path, version: int, controller: str, files):
    """A machine, and the groups of a process in ``job/step``: /proc, the mount, and the root of the controller.

    ``files``: gives the names and contents of the files of a folder.
    """
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    for folder in ("self", "pressure", "sys/kernel/random"):
        (proc / folder).mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16000 kB\nMemFree: 5 kB\nMemAvailable: 8000 kB\n")
    (proc / "sys/kernel/random/boot_id").write_text("0123abcd-4567-89ab-cdef-0123456789ab\n")
    (proc / "self/cgroup").write_text("0::/job/step\n" if version == 2 else f"4:{controller}:/job/step\n")
    root = mount if version == 2 else mount / controller
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
        if folder or version == 1:  # the root of version 2 has no such files
            for name, text in files(folder).items():
                (root / folder / name).write_text(f"{text}\n")
    return proc, mount, root


def pressure(tmp_path, version: int, quotas: dict[str, str]):
    """``quotas``: microseconds in 100 ms, by folder."""

    def files(folder):
        quota, stat = quotas.get(folder), {"cpu.stat": "nr_periods 0\nnr_throttled 0"}
        if version == 2:
            return stat | {"cpu.max": f"{quota or 'max'} 100000"}
        return stat | {"cpu.cfs_quota_us": quota or -1, "cpu.cfs_period_us": 100000}

    proc, mount, root = cgroup(tmp_path, version, "cpu", files)
    return PressureSource(proc, mount), root


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, None),
        ({"job/step": "150000"}, 1.5),
        ({"job": "200000"}, 2.0),  # ours says nothing: the one above it does
        ({"job": "200000", "job/step": "400000"}, 2.0),
    ],
)
def test_the_least_quota_of_all_groups_above_is_the_limit(tmp_path, version, limits, cores):
    source, _ = pressure(tmp_path, version, limits)
    assert source.read().cgroup_cpu_limit == cores


@pytest.mark.parametrize("version", [1, 2])
def test_how_often_the_quota_was_used_up_is_told_by_the_group_that_has_it(tmp_path, version):
    source, root = pressure(tmp_path, version, {"job": "200000"})
    source.read()
    (root / "job" / "cpu.stat").write_text("nr_periods 40\nnr_throttled 30\nthrottled_usec 5\n")
    assert source.read().cgroup_throttled_ratio == 0.75


@pytest.mark.parametrize("version", [1, 2])
def test_what_all_of_the_group_has_used_of_its_quota(tmp_path, version, monkeypatch):
    """Other ranks of a pod share it: two cores of three, over ten seconds."""
    source, root = pressure(tmp_path, version, {"job": "300000"})
    now = [1_000_000_000]
    monkeypatch.setattr("telemetry.sources.cgroup.now_ns", lambda: now[0])

    def use(seconds):
        if version == 2:
            (root / "job" / "cpu.stat").write_text(f"usage_usec {seconds * 10**6}\nnr_periods 0\nnr_throttled 0\n")
        else:
            (root / "job" / "cpuacct.usage").write_text(f"{seconds * 10**9}\n")

    use(5)
    assert source.read().cgroup_cpu_used is None
    use(25)
    now[0] += 10_000_000_000
    assert source.read().cgroup_cpu_used == 2.0


def memory_limits(tmp_path, version: int, limits) -> MemoryLimits:
    """``limits``: bytes of limit, use, file cache and shmem, by folder."""

    def files(folder):
        limit, used, cache, shmem = limits.get(folder, (None, 0, 0, 0))
        if version == 2:
            stat = f"anon 1\nshmem {shmem}\ninactive_file {cache}\nslab_reclaimable 0"
            return {"memory.max": "max" if limit is None else limit, "memory.current": used, "memory.stat": stat}
        none = 9223372036854771712
        return {
            "memory.limit_in_bytes": none if limit is None else limit,
            "memory.usage_in_bytes": used,
            "memory.stat": f"shmem 1\ninactive_file 1\ntotal_shmem {shmem}\ntotal_inactive_file {cache}",
        }

    return MemoryLimits(*cgroup(tmp_path, version, "memory", files)[:2])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (8000 * 1024, 16000 * 1024)),  # the machine's
        ({"job/step": (10 * MIB, 9 * MIB, 0, 0)}, (1 * MIB, 10 * MIB)),
        ({"job/step": (10 * MIB, 9 * MIB, 5 * MIB, 0)}, (6 * MIB, 10 * MIB)),  # page cache is given back
        ({"job": (6 * MIB, 4 * MIB, 0, 0), "job/step": (10 * MIB, 4 * MIB, 0, 0)}, (2 * MIB, 6 * MIB)),
        ({"job/step": (99 * MIB, 1 * MIB, 0, 0)}, (8000 * 1024, 16000 * 1024)),  # more than the machine has
    ],
)
def test_the_limit_that_leaves_least_counts(tmp_path, version, limits, expected):
    assert memory_limits(tmp_path, version, limits).tightest() == expected


@pytest.mark.parametrize("version", [1, 2])
def test_shared_memory_is_that_of_the_own_group(tmp_path, version):
    limits = memory_limits(tmp_path, version, {"job/step": (None, 9 * MIB, 0, 3 * MIB)})
    assert limits.shared_memory() == 3 * MIB


def test_without_any_limit_that_can_be_read_nothing_is_said(tmp_path):
    limits = MemoryLimits(tmp_path / "proc", tmp_path / "cgroup")
    assert (limits.tightest(), limits.shared_memory()) == (None, None)
    sample = MemorySource(tuple, proc=tmp_path / "proc", cgroups=tmp_path, shared_memory=str(tmp_path / "no")).read()
    assert sample.training_bytes > MIB
    assert {
        sample.memory_available_bytes, sample.memory_limit_bytes, sample.shared_memory_bytes, sample.workers_bytes,
        sample.shared_memory_free_bytes,
    } == {None}  # fmt: skip


def rollup(**lines):
    return b"55-7f [rollup]\n" + b"".join(f"{name}:   {kib} kB\n".encode() for name, kib in lines.items())


@pytest.mark.parametrize(
    ("lines", "kib"),
    [
        ({"Anonymous": 100, "Private_Dirty": 30, "Pss_Anon": 65}, 70),
        ({"Anonymous": 100, "Private_Dirty": 130, "Pss_Anon": 100}, 0),  # it maps 30 KiB of shared memory alone
        ({"Anonymous": 100, "Private_Dirty": 30}, 70),  # kernels before 5.4 have no Pss_Anon
        ({}, 0),
    ],
)
def test_shared_pages_from_a_rollup(lines, kib):
    assert shared_bytes(rollup(**lines)) == kib * 1024


class Forked:
    """A child that copies some of its parent's memory, or takes some of its own, when it is told to."""

    def __init__(self, inherited: bytearray):
        ask, self._tell = os.pipe()
        self._done, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            kept = []
            while order := os.read(ask, 1):
                if order == b"c":
                    inherited[::4096] = bytes(len(inherited[::4096]))
                else:
                    kept.append(b"x" * 32 * MIB)
                os.write(said, b".")
            os._exit(0)

    def does(self, order: bytes) -> None:
        os.write(self._tell, order)
        assert os.read(self._done, 1) == b"."

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def read_at_once(monkeypatch):
    for name in ("READ_SECONDS", "_AGE_RATIO"):
        monkeypatch.setattr(memory, name, 0.0)
    monkeypatch.setattr(memory, "_MAX_PROBE_RATIO", 1e9)


def test_workers_that_copy_on_write_and_that_take_memory(read_at_once):
    inherited = bytearray(b"x" * 48 * MIB)
    workers = [Forked(inherited) for _ in range(2)]
    try:
        source = MemorySource(lambda: [worker.pid for worker in workers])
        before = source.read()
        assert before.workers_shared_bytes > 2 * 48 * MIB
        for worker in workers:
            worker.does(b"c")
        copied = source.read()
        assert copied.workers_bytes - before.workers_bytes == pytest.approx(2 * 48 * MIB, rel=0.1)
        assert before.workers_shared_bytes - copied.workers_shared_bytes == pytest.approx(2 * 48 * MIB, rel=0.1)
        workers[1].does(b"t")
        taken = source.read()
        assert taken.workers_bytes - copied.workers_bytes == pytest.approx(32 * MIB, rel=0.1)
        assert taken.workers_shared_bytes == pytest.approx(copied.workers_shared_bytes, rel=0.05)
        assert taken.training_bytes == pytest.approx(before.training_bytes, abs=8 * MIB)
    finally:
        for worker in workers:
            worker.end()
    assert source.read().workers_bytes is None, "there are none any more"


def test_the_costly_file_is_read_of_workers_alone_and_seldom(monkeypatch):
    read = []

    def slow(path):
        read.append(path)
        for _ in range(200_000):  # on this thread's clock
            pass
        return rollup(Anonymous=100, Private_Dirty=30)

    monkeypatch.setattr(memory, "read_small", slow)
    monkeypatch.setattr(memory, "READ_SECONDS", 0.0)
    monkeypatch.setattr(memory, "_AGE_RATIO", 0.0)
    worker = Forked(bytearray(MIB))
    try:
        source = MemorySource(lambda: [worker.pid])
        for _ in range(20):
            source.read()
    finally:
        worker.end()
    assert read == [f"/proc/{worker.pid}/smaps_rollup"], "the next one is due when the first was worth its time"


# -- the newest collective of a process, from torch's flight recorder --------------------------------------------------


def entry(number: int, name: str = "gloo:all_reduce", *, retired: bool = False, **fields) -> dict:
    told = dict(
        collective_seq_id=number, p2p_seq_id=0, is_p2p=False, profiling_name=name, process_group=["0", "default_pg"]
    )
    return told | dict(input_sizes=[[4, 8]], input_dtypes=["Float"], retired=retired) | fields


def status(enqueued: int, completed: int) -> dict:
    return {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}


class Torch:
    """Stands in for torch.distributed, whose recorder has these contents."""

    def __init__(
        self, monkeypatch, pg_status=None, entries=(), *, backend="gloo", on_cuda=True, has_recorder=True, count=7
    ) -> None:
        self.asked: list[tuple[bool, bool]] = []
        self.content = {"pg_status": pg_status or {}, "entries": list(entries)}
        world = SimpleNamespace(_get_sequence_number_for_group=lambda: count)
        dist = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_backend_config=lambda: backend,
            group=SimpleNamespace(WORLD=world),
        )  # fmt: skip
        name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: on_cuda)))
        c10d = SimpleNamespace(**{name: self.dump} if has_recorder else {})
        monkeypatch.setitem(sys.modules, "torch.distributed", dist)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)

    def dump(self, collectives: bool, only_active: bool) -> bytes:
        self.asked.append((collectives, only_active))
        shown = self.content if collectives else {"pg_status": self.content["pg_status"]}
        return json.dumps(shown, separators=(",", ":")).encode()


def test_the_collective_that_has_not_ended_is_the_oldest_of_those(monkeypatch):
    Torch(monkeypatch, {"0": status(9, 7)}, [entry(7, retired=True), entry(8, "gloo:broadcast"), entry(9)])
    read = recorded_collectives()
    assert read.newest == Collective("broadcast", 8, "0", "4x8 Float")
    assert (read.pending, read.off) == (True, False)


def test_the_list_is_read_only_while_a_collective_has_not_ended(monkeypatch):
    torch = Torch(monkeypatch, {"0": status(9, 9)}, [entry(9, retired=True)])
    assert recorded_collectives() == RecordedCollectives(Collective("", 9, "0"), pending=False)
    assert torch.asked == [(False, False)]
    torch.content = {"pg_status": {"0": status(10, 9)}, "entries": [entry(10)]}
    assert recorded_collectives().newest.name == "all_reduce"
    assert torch.asked[1:] == [(False, False), (True, False)]


def test_of_nccl_only_the_state_of_the_groups_is_read(monkeypatch):
    torch = Torch(monkeypatch, {"0": status(12, 9)}, [entry(10)], backend="cpu:gloo,cuda:nccl")
    read = recorded_collectives()
    assert read.newest == Collective("", 10, "0"), "the first that has not ended"
    assert read.pending
    assert torch.asked == [(False, False)], "the list would ask CUDA for the state of events"


def test_a_group_for_each_kind_of_device_that_computes_on_the_host(monkeypatch):
    """`init_process_group()` without a backend makes them on every machine with NCCL."""
    torch = Torch(monkeypatch, {"0": status(12, 9)}, backend="cpu:gloo,cuda:nccl", on_cuda=False)
    monkeypatch.setattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json", torch.dump, raising=False)
    monkeypatch.delattr(sys.modules["torch._C._distributed_c10d"], "_dump_nccl_trace_json")
    assert recorded_collectives().pending


def test_of_several_groups_the_one_that_waits_counts(monkeypatch):
    Torch(monkeypatch, {"0": status(500, 500), "1": status(3, 2)}, [entry(3, process_group=["dp", "x"])])
    assert recorded_collectives().newest == Collective("all_reduce", 3, "dp", "4x8 Float")


def test_point_to_point_has_numbers_of_its_own(monkeypatch):
    sent = entry(4, "gloo:recv 0<-1", is_p2p=True, p2p_seq_id=11, input_sizes=[[], [2]], input_dtypes=["Int", "Int"])
    Torch(monkeypatch, {"0": status(4, 3)}, [sent])
    assert recorded_collectives().newest == Collective("recv 0<-1", 11, "0", "scalar Int and 1 more")


@pytest.mark.parametrize(("has_recorder", "off"), [(True, True), (False, False)])
def test_without_a_recorder_torch_counts_all_the_same(monkeypatch, has_recorder, off):
    Torch(monkeypatch, has_recorder=has_recorder)
    read = recorded_collectives()
    assert (read.newest, read.pending, read.off) == (Collective("", 7), None, off)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"pg_status":{"0":{"last_enqueued_collective":"x"}}}', b'{"pg_status":1}']
)
def test_whatever_torch_answers_nothing_is_raised(monkeypatch, content):
    torch = Torch(monkeypatch)
    torch.dump = None
    monkeypatch.setitem(
        sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=lambda *_: content)
    )
    assert recorded_collectives() is None


def test_without_torch_distributed_there_is_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert recorded_collectives() is None


# -- the allocator of torch --------------------------------------------------------------------------------------------


GIB = 1 << 30


@pytest.fixture
def allocator(monkeypatch):
    """CUDA's allocator on its fourth device. ``fail`` does what it does before it raises."""
    observers = []

    def dump(path: str) -> None:
        if path.startswith("/proc/"):
            raise OSError("no such folder")
        Path(path).write_bytes(b"a snapshot")

    blocks = [("active_allocated", 60), ("inactive", 3), ("inactive", 5), ("active_awaiting_free", 7)]
    segments = [
        {"device": 3, "blocks": [{"state": state, "size": size * GIB} for state, size in blocks]},
        {"device": 0, "blocks": [{"state": "inactive", "size": 70 * GIB}]},
    ]
    found = SimpleNamespace(
        is_initialized=lambda: True,
        allocated=60 * GIB,
        memory_snapshot=lambda: segments,
        memory=SimpleNamespace(_dump_snapshot=dump),
        current_device=lambda: 3,
        device_count=lambda: 1,
        fail=lambda gib: [observer(3, gib * GIB, 80 * GIB, 1 * GIB) for observer in observers],
    )
    monkeypatch.setattr(torch, "cuda", found)
    statistics = lambda device: {
        f"{name}_bytes": {"all": {"current": size}}
        for name, size in (("allocated", found.allocated), ("reserved", 75 * GIB))
    }
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", statistics, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    return found


def test_the_training_thread_reads_the_allocator_between_two_steps(observed, allocator):
    """On another thread a reading would stop the process while any thread waits for memory of the GPU."""
    tracker, asked = observed.tracker, []
    read = torch._C._cuda_memoryStats
    torch._C._cuda_memoryStats = lambda device: asked.append((device, threading.get_ident())) or read(device)
    tracker.device = 3
    assert tracker.allocator.read() is None
    graph = Numbers()  # stands for one that is captured
    tracker.captures.graphs[graph] = None
    batches = iter(DataLoader(Numbers(8), batch_size=1))
    next(batches)
    assert asked == []
    tracker.captures.graphs.clear()
    list(batches)
    assert asked == [(3, threading.get_ident())]
    assert tracker.allocator.read() == TorchMemorySample(60 * GIB, 75 * GIB)


def test_without_a_loader_it_is_read_at_the_steps_of_the_optimizer(observed, allocator):
    optimizer = QuickSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    observed.tracker.allocator.read()
    optimizer.step()
    assert observed.tracker.allocator.read() == TorchMemorySample(60 * GIB, 75 * GIB)


def test_an_allocator_of_the_script_s_own_has_no_figures(observed, allocator, monkeypatch):
    figures = observed.tracker.allocator
    monkeypatch.delattr(torch._C, "_cuda_memoryStats")
    figures.read()
    list(DataLoader(Numbers(4), batch_size=1))
    with pytest.raises(CollectorError, match="_cuda_memoryStats"):
        figures.read()


def failed_allocations(file: Path | None = None) -> tuple[FailedAllocations, StepTracker, ErrorLog]:
    tracker, errors = StepTracker(Ring()), ErrorLog()
    return FailedAllocations(tracker.allocator, errors, file), tracker, errors


def test_an_allocation_that_fails_is_noted_at_that_moment(allocator, tmp_path):
    watch, tracker, _ = failed_allocations(tmp_path / "memory.pickle")
    watch.attach()
    watch.attach()
    tracker.allocator.wanted = 3
    tracker.boundary_passed()
    allocator.allocated = 68 * GIB
    for gib in (16, 8, 4):  # looks for a batch that fits
        assert len(allocator.fail(gib)) == 1, "it is attached once"
    (noted,) = watch.take()
    assert noted == GpuOutOfMemoryLine(
        gpu=3, tried_bytes=16 * GIB, total_bytes=80 * GIB, free_bytes=1 * GIB, allocated_bytes=68 * GIB,
        reserved_bytes=75 * GIB, largest_free_bytes=5 * GIB, allocated_before_bytes=60 * GIB, failed_total=1,
        file="memory.pickle",
    )  # fmt: skip
    assert (tmp_path / "memory.pickle").read_bytes() == b"a snapshot"
    assert watch.take() == []


def test_a_torch_that_tells_no_failures_is_told_once(allocator, monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    watch, _, errors = failed_allocations()
    watch.attach()
    watch.attach()
    (note,) = errors.take_notes()
    assert "allocations that fail on the GPU are not seen: AttributeError" in note.message
    assert errors.counts == {}


def test_a_snapshot_of_the_memory_that_cannot_be_written_does_not_change_what_torch_raises(allocator):
    watch, _, _ = failed_allocations(Path("/proc/1/memory.pickle"))
    watch.attach()
    allocator.fail(16)
    assert [noted.file for noted in watch.take()] == [None]


@pytest.mark.parametrize("switch", ["on", "off"])
def test_allocations_that_fail_are_in_the_log(allocator, monkeypatch, tmp_path, switch):
    monkeypatch.setattr(cuda_memory, "_NOTED_EVERY_NS", 0)
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False, oom_snapshot=switch)
    try:
        wait_for(lambda: allocator.fail(16))
    finally:
        telemetry.stop()
    allocator.fail(2)
    assert agent._collectors.take_failed_allocations() == [], "torch calls it for ever"
    (line,) = [each for each in log_lines(agent) if each["event"] == "gpu_out_of_memory"]
    assert (line["gpu"], line["tried_bytes"], line["largest_free_bytes"]) == (3, 16 * GIB, 5 * GIB)
    assert [line["file"]] * (switch == "on") == [path.name for path in (tmp_path / "run").glob("gpu-memory-rank-0.*")]
