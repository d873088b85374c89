"""What is read of the memory of a run: limits of cgroups, real workers that copy on write, /dev/shm."""

from __future__ import annotations

import os
import signal

import pytest

from telemetry.sources import memory
from telemetry.sources.cgroup import MemoryLimits
from telemetry.sources.memory import MemorySource, shared_bytes

MIB = 1 << 20


def machine(tmp_path, available=8000, total=16000):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {total} kB\nMemFree: 5 kB\nMemAvailable: {available} kB\n")
    return proc


def groups(tmp_path, proc, version, limits):
    """Memory cgroups as the kernel shows them. ``limits``: bytes of limit, use, file cache and shmem, by folder."""
    mount = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n")
    root = mount if version == 2 else mount / "memory"
    for folder in ("", "job", "job/step"):
        at = root / folder
        at.mkdir(parents=True, exist_ok=True)
        limit, used, cache, shmem = limits.get(folder, (None, 0, 0, 0))
        if version == 2 and folder:
            (at / "memory.max").write_text("max" if limit is None else str(limit))
            (at / "memory.current").write_text(str(used))
            (at / "memory.stat").write_text(f"anon 1\nshmem {shmem}\ninactive_file {cache}\nslab_reclaimable 0\n")
        elif version == 1:
            (at / "memory.limit_in_bytes").write_text(str(9223372036854771712 if limit is None else limit))
            (at / "memory.usage_in_bytes").write_text(str(used))
            (at / "memory.stat").write_text(
                f"shmem 1\ninactive_file 1\ntotal_shmem {shmem}\ntotal_inactive_file {cache}\n"
            )
    return mount


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
    proc = machine(tmp_path)
    assert MemoryLimits(proc, groups(tmp_path, proc, version, limits)).tightest() == expected


@pytest.mark.parametrize("version", [1, 2])
def test_shared_memory_is_that_of_the_own_group(tmp_path, version):
    proc = machine(tmp_path)
    mount = groups(tmp_path, proc, version, {"job/step": (None, 9 * MIB, 0, 3 * MIB)})
    assert MemoryLimits(proc, mount).shared_memory() == 3 * MIB


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
    for name in ("READ_SECONDS", "_AGE_RATIO", "_MIN_PROBE_SECONDS"):
        monkeypatch.setattr(memory, name, 0.0)
    monkeypatch.setattr(memory, "_MAX_PROBE_RATIO", 1e9)


def test_workers_that_copy_on_write_and_that_take_memory(read_at_once):
    inherited = bytearray(b"x" * 48 * MIB)
    workers = [Forked(inherited) for _ in range(2)]
    try:
        source = MemorySource(lambda: [worker.pid for worker in workers])

        def read():
            for _ in workers:
                sample = source.read()
            return sample

        before = read()
        assert before.workers_shared_bytes > 2 * 48 * MIB
        workers[0].does(b"c")
        copied = read()
        assert copied.workers_bytes - before.workers_bytes == pytest.approx(48 * MIB, rel=0.1)
        assert before.workers_shared_bytes - copied.workers_shared_bytes == pytest.approx(48 * MIB, rel=0.1)
        workers[1].does(b"t")
        taken = read()
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


def test_a_reading_is_kept_until_the_next_is_due():
    source = MemorySource(tuple)
    assert source.read() is source.read()
