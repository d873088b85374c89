"""A trace is published whole or not at all, only where there is room for it, and with its manifest."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from telemetry.snapshot import agree, store
from telemetry.snapshot.agree import Plan, Request
from telemetry.snapshot.store import MIN_FREE_BYTES, RankPart, StoreError, TraceStore, add_to_manifest, trace_name
from telemetry.util.processes import pid_namespace, start_ticks

CONTENT = b'{"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [' + b"1," * 100_000 + b"1]}"
NAME = trace_name(0, "node", 7, 1700000000000)
MIB = 1 << 20


def plan_of(ranks: tuple[int, ...] = (0,), stall: dict | None = None) -> Plan:
    request = Request("1700000000000-a", agree.STALL, "checkpoint", None, 5, "rank 1", stall)
    return Plan(request, None, 3, 7, ranks, "request-step5", 1)


class Trace:
    """Stands for a recording."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.freed = False
        self.saved_to: Path | None = None

    def save(self, path: Path) -> float:
        self.saved_to = path
        path.write_bytes(self.content)
        return 0.001

    def free(self) -> float:
        self.freed = True
        return 0.001


@pytest.fixture
def snapshots(tmp_path):
    return tmp_path / "run" / "snapshots"


@pytest.fixture
def trace_store(snapshots):
    return TraceStore(snapshots, "node", max_bytes=MIB, disk_bytes=MIB)


@pytest.fixture
def free(monkeypatch):
    """Sets how much is free."""
    return lambda amount: monkeypatch.setattr(store, "_free_bytes", lambda _: amount)


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_it_is_there_and_nothing_else(trace_store, snapshots):
    trace = Trace()
    stored = trace_store.publish(trace, plan_of(), NAME, most_bytes=MIB)
    path = snapshots / "request-step5" / NAME
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert (stored.raw_bytes, stored.size, stored.zero_ns) == (len(CONTENT), path.stat().st_size, 1700000000 * 10**9)
    assert stored.held == {"save": 0.001, "free": 0.001}
    assert trace.freed
    assert trace.saved_to.is_relative_to(snapshots), "not in memory, which others need"
    assert tree(snapshots) == ["request-step5", f"request-step5/{NAME}"]
    for folder in (snapshots, snapshots / "request-step5"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_more_events_come_first(trace_store, snapshots):
    events = [{"name": f"number {n}"} for n in range(10_000)]  # more than is read in one go
    content = b'{"baseTimeNanoseconds": 7, "traceEvents": [\n  ' + json.dumps(events)[1:].encode() + b"}"
    stored = trace_store.publish(
        Trace(content), plan_of(), NAME, most_bytes=MIB, extra_events=lambda zero: b'{"name": "at %d"},\n' % zero
    )
    text = gzip.decompress((snapshots / "request-step5" / NAME).read_bytes())
    assert json.loads(text)["traceEvents"] == [{"name": "at 7"}, *events]
    assert stored.raw_bytes == len(text)


@pytest.mark.parametrize("content", [b'{"traceEvents": [{}]}', b'{"baseTimeNanoseconds": 7, "traceEvents": []}'])
def test_nothing_is_added_where_there_is_no_place_for_it(trace_store, snapshots, content):
    trace_store.publish(Trace(content), plan_of(), NAME, most_bytes=MIB, extra_events=lambda _: b"{},")
    assert gzip.decompress((snapshots / "request-step5" / NAME).read_bytes()) == content


@pytest.mark.parametrize(
    ("content", "why"),
    [(CONTENT[:-1], "to its end"), (b"", "to its end"), (b"{" + b" " * MIB + b"}", "snapshot_max_bytes")],
)
def test_what_is_not_whole_or_too_large_is_not_published(trace_store, snapshots, content, why):
    trace = Trace(content)
    with pytest.raises(StoreError, match=why):
        trace_store.publish(trace, plan_of(), NAME, most_bytes=MIB)
    assert trace.freed
    assert tree(snapshots) == []


def test_what_is_read_back_must_be_what_was_written(trace_store, snapshots, monkeypatch):
    original = store._unpacked_size

    def corrupted(path: Path) -> int:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return original(path)

    monkeypatch.setattr(store, "_unpacked_size", corrupted)
    with pytest.raises(StoreError, match="read back"):
        trace_store.publish(Trace(), plan_of(), NAME, most_bytes=MIB)
    assert tree(snapshots) == []


def test_a_copy_of_the_raw_trace_in_a_forked_worker_holds_no_disk_space(trace_store, monkeypatch):
    copies: list[int] = []
    original = store._deflate
    monkeypatch.setattr(
        store, "_deflate", lambda begin, raw, file: copies.append(os.dup(raw)) or original(begin, raw, file)
    )
    trace_store.publish(Trace(), plan_of(), NAME, most_bytes=MIB)
    assert os.fstat(copies[0]).st_size == os.fstat(copies[0]).st_blocks == 0
    os.close(copies[0])


# -- room ----------------------------------------------------------------------------------------------------------


def test_without_room_nothing_is_written(trace_store, snapshots, free):
    free(MIN_FREE_BYTES + MIB)  # not for what it is compressed to
    trace = Trace()
    with pytest.raises(StoreError, match="no room: it may take 1 MiB, 1024 MiB must stay free, and 1025 MiB are free"):
        trace_store.publish(trace, plan_of(), NAME, most_bytes=MIB)
    assert trace.saved_to is None
    assert trace.freed
    assert tree(snapshots) == []


def test_there_must_be_room_for_the_traces_of_all_ranks(trace_store, free):
    free(MIN_FREE_BYTES + 5 * MIB)
    trace_store.publish(Trace(), plan_of((0, 1, 2, 3)), NAME, most_bytes=MIB)
    with pytest.raises(StoreError, match="1 MiB, and so may those of 4 other ranks, 1024 MiB must stay free"):
        trace_store.publish(Trace(), plan_of((0, 1, 2, 3, 4)), NAME, most_bytes=MIB)


def test_a_slow_disk_is_not_written_to(trace_store, snapshots, monkeypatch):
    """torch holds the GIL while it writes, so the training would wait for the disk."""
    clock = iter(range(0, 10**12, 3 * 10**9))
    monkeypatch.setattr(store, "now_ns", lambda: next(clock))
    trace = Trace()
    with pytest.raises(StoreError, match="too slow"):
        trace_store.publish(trace, plan_of(), NAME, most_bytes=MIB)
    assert trace.saved_to is None
    assert tree(snapshots) == []


def test_a_folder_in_memory_has_no_more_than_the_machine_has_to_give(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "free_memory", lambda: 1234)
    monkeypatch.setattr(store, "file_system_of", lambda _: "ext4")
    on_disk = store._free_bytes(tmp_path)
    monkeypatch.setattr(store, "file_system_of", lambda _: "tmpfs")
    assert store._free_bytes(tmp_path) == min(1234, on_disk)


# -- what is removed -----------------------------------------------------------------------------------------------


def old(snapshots: Path, name: str, age: int, size: int = 400_000) -> Path:
    folder = snapshots / name
    (folder / "about").mkdir(parents=True)
    (folder / "x.gz").write_bytes(b"x" * size)
    (folder / "about" / "snapshot.json").write_text("{}")
    os.utime(folder, (1.7e9 - age, 1.7e9 - age))
    return folder


def test_the_oldest_go_first(trace_store, snapshots):
    newer, oldest, newest = (old(snapshots, f"request-step{n}", age) for n, age in ((2, 20), (1, 30), (3, 1)))
    mine = snapshots / "notes-step9"
    mine.mkdir()
    (mine / "file").write_bytes(b"x" * 1_000_000)
    trace_store.publish(Trace(), plan_of(), NAME, most_bytes=MIB)
    assert [path.exists() for path in (oldest, newer, newest, mine)] == [False, True, True, True]


def test_a_snapshot_larger_than_the_limit_removes_nothing(snapshots):
    small = TraceStore(snapshots, "node", max_bytes=MIB, disk_bytes=300)
    others = old(snapshots, "request-step5", 0, 250), old(snapshots, "request-step4", 0, 40)
    with pytest.raises(StoreError, match="snapshot_disk_bytes"):
        small.publish(Trace(), plan_of(), NAME, most_bytes=MIB)
    assert all((folder / "x.gz").exists() for folder in others)


def test_links_are_not_followed(trace_store, snapshots, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("x")
    folder = old(snapshots, "request-step1", 50, 2_000_000)
    (folder / "away").symlink_to(tmp_path / "outside")
    (snapshots / "request-step2").symlink_to(tmp_path / "outside")
    trace_store.publish(Trace(), plan_of(), NAME, most_bytes=MIB)
    assert not folder.exists()
    assert (tmp_path / "outside" / "precious").read_text() == "x"


def test_what_ended_processes_of_the_run_have_left_is_removed(trace_store, snapshots):
    ours, namespace = f"{os.getpid()}-{start_ticks(os.getpid())}", pid_namespace()
    gone = [f"node-{namespace}-{os.getpid()}-1", f"node-{namespace}-{2**22 + 1}-5", "other-1-5-5", "no owner"]
    kept = [f"node-{namespace}-{ours}", "other-1-6-5", f"node-{namespace + 1}-7-7"]
    for owner in gone + kept:
        (snapshots / f".partial-{owner}").mkdir(parents=True)
        (snapshots / f".partial-{owner}" / "trace.json").write_text("x")
    for owner in gone[2:]:  # of another machine or container: nobody knows, so they are removed after an hour
        os.utime(snapshots / f".partial-{owner}", (1e9, 1e9))
    (snapshots / "kept").mkdir()
    trace_store.sweep()
    assert sorted(os.listdir(snapshots)) == sorted([f".partial-{owner}" for owner in kept] + ["kept"])


# -- the manifest --------------------------------------------------------------------------------------------------


def part(rank: int, started: int) -> RankPart:
    return RankPart(
        rank=rank, local_rank=rank, node="node", pid=7, tid=7, file="x.gz", size_bytes=1, trace_bytes=2,
        trace_zero_unix_seconds=None, first_step=3, last_step=7, why=None,
        started=f"2026-01-01T00:00:{started:02}.000Z", ended=f"2026-01-01T00:00:{started + 10:02}.000Z",
        log="../x", pause_seconds={}, held_seconds={},
    )  # fmt: skip


def test_a_manifest_has_the_parts_of_all_ranks(snapshots):
    plan = plan_of((0, 1, 2), {"cause": "checkpoint"})
    folder = snapshots / plan.folder
    folder.mkdir(parents=True)
    for rank, second in ((2, 0), (0, 1), (1, 9)):
        add_to_manifest(snapshots, plan, part(rank, second))
    (folder / "about" / "rank-9.json").write_text("{torn")
    add_to_manifest(snapshots, plan, part(1, 30))
    about = json.loads((folder / "about" / "snapshot.json").read_text())
    assert [each["rank"] for each in about["ranks"]] == [0, 1, 2]
    assert about["reason"] == "checkpoint"
    assert about["stall"] == {"cause": "checkpoint"}
    assert about["ranks_expected"] == [0, 1, 2]
    assert (about["log_from"], about["log_until"]) == ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:40.000Z")
    assert about["together"] is False
    assert not [*folder.glob("*.json")], "Holistic Trace Analysis would take it for the trace of rank 0"
