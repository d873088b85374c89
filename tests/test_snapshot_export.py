"""A trace is published whole or not at all, and only where there is room for it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from telemetry.seams.worker_block import WorkerCounters
from telemetry.snapshot import export
from telemetry.snapshot.export import sweep
from tests.snapshot_recording import SavedAs, exported

CONTENT = b'{"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [' + b"1," * 100_000 + b"1]}"
NAME = "request-step5/rank-3.n_1.1700000000000.pt.trace.json.gz"
MIB = 1 << 20


@pytest.fixture
def snapshots(tmp_path):
    return tmp_path / "run" / "snapshots"


@pytest.fixture
def content(snapshots):
    """What is read from the trace that was published."""
    return lambda: gzip.decompress((snapshots / NAME).read_bytes())


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_it_is_there_and_nothing_else(snapshots, content):
    trace = SavedAs(CONTENT)
    stored = exported(snapshots, trace).stored
    assert content() == CONTENT
    assert (stored.path, stored.trace_bytes) == (f"snapshots/{NAME}", len(CONTENT))
    assert stored.size_bytes == (snapshots / NAME).stat().st_size
    assert stored.held_seconds == {"save": 0.001, "free": 0.001}
    assert trace.freed
    assert trace.path.is_relative_to(snapshots), "not in memory, which others need"
    assert tree(snapshots) == ["request-step5", NAME]
    assert {folder.stat().st_mode & 0o777 for folder in (snapshots, snapshots / "request-step5")} == {0o700}


def test_the_fetches_of_the_workers_come_first_where_there_is_a_place_for_them(snapshots, content):
    worker = WorkerCounters(pid=7, tid=8, worker=1, ended=1)
    worker.recent_started_ns[0], worker.recent_finished_ns[0] = 1000, 3000
    events = [{"name": f"number {n}"} for n in range(10_000)]  # more than is read in one go
    whole = b'{"baseTimeNanoseconds": 7, "traceEvents": [\n  ' + json.dumps(events)[1:].encode() + b"}"
    stored = exported(snapshots, SavedAs(whole), workers=(worker,)).stored
    name, fetch, *others = json.loads(content())["traceEvents"]
    assert name["args"] == {"name": "DataLoader worker 1"}
    assert (fetch["dur"], fetch["args"]) == (2, {"worker": 1, "number": 0})
    assert others == events
    assert stored.trace_bytes == len(content())
    for other in (b'{"traceEvents": [{}]}', b'{"baseTimeNanoseconds": 7, "traceEvents": []}'):
        exported(snapshots, SavedAs(other), workers=(worker,))
        assert content() == other


@pytest.mark.parametrize("before", [0, export._CHUNK - 70])
def test_whether_a_kernel_ran_on_the_gpu_is_known(snapshots, before):
    """Also where the two pieces that are read have a half of the word each."""
    events = b'{"traceEvents": [' + b" " * before + b'{"ph": "X", "cat": "%s", "name": "gemm"}]}'
    assert exported(snapshots, SavedAs(events % b"kernel")).stored.kernels
    assert not exported(snapshots, SavedAs(events % b"cpu_op")).stored.kernels


def slow_disk(monkeypatch):
    """torch holds the GIL while it writes, so the training would wait for the disk."""
    clock = iter(range(0, 10**12, 3 * 10**9))
    monkeypatch.setattr(export, "now_ns", lambda: next(clock))


@pytest.mark.parametrize(
    ("content", "broken", "why", "saved"),
    [
        (CONTENT[:-1], None, "to its end", True),
        (b"", None, "to its end", True),
        (CONTENT, slow_disk, "too slow", False),
    ],
)
def test_what_is_not_whole_or_has_no_place_is_not_published(snapshots, monkeypatch, content, broken, why, saved):
    if broken:
        broken(monkeypatch)
    trace = SavedAs(content)
    assert why in exported(snapshots, trace).error
    assert trace.freed
    assert (trace.path is not None) == saved
    assert tree(snapshots) == []


def test_a_copy_of_the_raw_trace_in_a_forked_worker_holds_no_disk_space(snapshots, monkeypatch):
    copies: list[int] = []
    original = os.ftruncate
    monkeypatch.setattr(export.os, "ftruncate", lambda raw, size: copies.append(os.dup(raw)) or original(raw, size))
    exported(snapshots, SavedAs(CONTENT))
    assert os.fstat(copies[0]).st_size == os.fstat(copies[0]).st_blocks == 0
    os.close(copies[0])


# -- what is removed -----------------------------------------------------------------------------------------------


def old(snapshots: Path, name: str, age: int, size: int = 400_000) -> Path:
    folder = snapshots / name
    folder.mkdir(parents=True)
    (folder / "x.gz").write_bytes(b"x" * size)
    os.utime(folder, (1.7e9 - age, 1.7e9 - age))
    return folder


def test_the_oldest_go_first(snapshots):
    newer, oldest, newest = (old(snapshots, f"request-step{n}", age) for n, age in ((2, 20), (1, 30), (3, 1)))
    mine = snapshots / "notes-step9"
    mine.mkdir()
    (mine / "file").write_bytes(b"x" * 1_000_000)
    exported(snapshots, SavedAs(CONTENT))
    assert [path.exists() for path in (oldest, newer, newest, mine)] == [False, True, True, True]


def test_a_snapshot_larger_than_the_limit_removes_nothing(snapshots):
    others = old(snapshots, "request-step5", 0, 250), old(snapshots, "request-step4", 0, 40)
    assert "snapshot_disk_bytes" in exported(snapshots, SavedAs(CONTENT), disk_bytes=300).error
    assert all((folder / "x.gz").exists() for folder in others)


def test_links_are_not_followed(snapshots, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("x")
    folder = old(snapshots, "request-step1", 50, 2_000_000)
    (folder / "away").symlink_to(tmp_path / "outside")
    (snapshots / "request-step2").symlink_to(tmp_path / "outside")
    exported(snapshots, SavedAs(CONTENT))
    assert not folder.exists()
    assert (tmp_path / "outside" / "precious").read_text() == "x"


def test_what_a_killed_process_of_the_run_has_left_is_removed_after_minutes(snapshots):
    for name in (".export.n1.7.ab.tmp", ".export.n2.7.cd.tmp", "kept"):
        (snapshots / name).mkdir(parents=True)
        (snapshots / name / "trace.json").write_text("x")
    os.utime(snapshots / ".export.n1.7.ab.tmp", (1e9, 1e9))
    sweep(snapshots)
    assert sorted(os.listdir(snapshots)) == [".export.n2.7.cd.tmp", "kept"]
