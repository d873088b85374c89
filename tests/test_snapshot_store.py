"""A trace is published whole or not at all, and nothing planted in the folder leads out of it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from telemetry.snapshot import protocol as p
from telemetry.snapshot.manifest import add_to_manifest
from telemetry.snapshot.private_folder import checked, open_folder
from telemetry.snapshot.store import StoreError, TraceStore, sweep, trace_name

CONTENT = b'{"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [' + b"1," * 100_000 + b"1]}"
NAME = trace_name(0, "node", 7, 1700000000000)


class Trace:
    """Stands for a recording."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.freed = False
        self.saved_to: Path | None = None

    def max_bytes(self) -> int:
        return len(self.content)

    def estimate(self) -> tuple[int, int, float]:
        return len(self.content), len(self.content), 0.001

    def save(self, path: Path) -> float:
        self.saved_to = path
        path.write_bytes(self.content)
        return 0.001

    def free(self) -> float:
        self.freed = True
        return 0.001


@pytest.fixture
def trace_store(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o700)
    return TraceStore(tmp_path / "run" / "snapshots", tmp_path / "shared", "node-7-99", 1 << 20, 1 << 20)


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_it_is_there_and_nothing_else(trace_store, tmp_path):
    trace = Trace()
    stored = trace_store.publish(trace, "request-step5", NAME)
    path = trace_store.snapshots / "request-step5" / NAME
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert (stored.raw_bytes, stored.size, stored.zero_ns) == (len(CONTENT), path.stat().st_size, 1700000000 * 10**9)
    assert trace.freed
    assert trace.saved_to.is_relative_to(trace_store.snapshots), "not in memory, which others need"
    assert tree(tmp_path) == sorted(
        ["shared", "run", "run/snapshots", "run/snapshots/request-step5", f"run/snapshots/request-step5/{NAME}"]
    )
    for folder in ("shared", "run/snapshots", "run/snapshots/request-step5"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_more_events_come_first(trace_store):
    events = [{"name": f"number {n}"} for n in range(10_000)]  # more than is read in one go
    content = b'{"baseTimeNanoseconds": 7, "traceEvents": [\n  ' + json.dumps(events)[1:].encode() + b"}"
    stored = trace_store.publish(
        Trace(content), "request-step5", NAME, extra_events=lambda zero: b'{"name": "at %d"},\n' % zero
    )
    text = gzip.decompress((trace_store.snapshots / "request-step5" / NAME).read_bytes())
    assert json.loads(text)["traceEvents"] == [{"name": "at 7"}, *events]
    assert stored.raw_bytes == len(text)


@pytest.mark.parametrize("content", [b'{"traceEvents": [{}]}', b'{"baseTimeNanoseconds": 7, "traceEvents": []}'])
def test_nothing_is_added_where_there_is_no_place_for_it(trace_store, content):
    trace_store.publish(Trace(content), "request-step5", NAME, extra_events=lambda _: b"{},")
    assert gzip.decompress((trace_store.snapshots / "request-step5" / NAME).read_bytes()) == content


@pytest.mark.parametrize(
    ("content", "why"),
    [(CONTENT[:-1], "to its end"), (b"", "to its end"), (b"{" + b" " * (1 << 20) + b"}", "snapshot_max_bytes")],
)
def test_what_is_not_whole_or_too_large_is_not_published(trace_store, content, why):
    trace = Trace(content)
    with pytest.raises(StoreError, match=why):
        trace_store.publish(trace, "request-step5", NAME)
    assert trace.freed
    assert tree(trace_store.snapshots) == []


def test_what_is_read_back_must_be_what_was_written(trace_store, monkeypatch):
    def corrupt(stage: str) -> None:
        if stage == "compressed":
            (path,) = trace_store.snapshots.glob(".partial-*/packed")
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    with pytest.raises(StoreError, match="read back"):
        trace_store.publish(Trace(), "request-step5", NAME, on_stage=corrupt)
    assert tree(trace_store.snapshots) == []


def old(trace_store: TraceStore, name: str, age: int, size: int = 400_000) -> Path:
    folder = trace_store.snapshots / name
    (folder / "about").mkdir(parents=True)
    (folder / "x.gz").write_bytes(b"x" * size)
    (folder / "about" / "snapshot.json").write_text("{}")
    os.utime(folder, (1.7e9 - age, 1.7e9 - age))
    return folder


def test_the_oldest_go_first(trace_store):
    trace_store.snapshots.mkdir(parents=True, mode=0o700)
    newer, oldest, newest = (
        old(trace_store, "request-step2", 20),
        old(trace_store, "request-step1", 30),
        old(trace_store, "request-step3", 1),
    )
    mine = trace_store.snapshots / "notes-step9"
    mine.mkdir()
    (mine / "file").write_bytes(b"x" * 1_000_000)
    trace_store.publish(Trace(), "request-step5", NAME)
    assert [path.exists() for path in (oldest, newer, newest, mine)] == [False, True, True, True]


def test_a_snapshot_larger_than_the_budget_removes_nothing(trace_store):
    small = TraceStore(trace_store.snapshots, None, trace_store.owner, 1 << 20, 300)
    trace_store.snapshots.mkdir(parents=True, mode=0o700)
    others = old(trace_store, "request-step5", 0, 250)
    with pytest.raises(StoreError, match="snapshot_disk_bytes"):
        small.publish(Trace(), "request-step5", NAME)
    assert (others / "x.gz").exists()


def test_links_are_removed_and_not_followed(trace_store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    trace_store.snapshots.mkdir(parents=True, mode=0o700)
    (trace_store.snapshots / ".partial-node-7-99").symlink_to(outside)
    folder = old(trace_store, "request-step1", 50, 2_000_000)
    (folder / "away").symlink_to(outside)
    (folder / "about" / "up").symlink_to("../../../../outside")
    (trace_store.snapshots / "request-step2").symlink_to(outside)
    trace_store.publish(Trace(), "request-step5", NAME)
    assert not folder.exists()
    assert (outside / "precious").read_text() == "x"
    assert sweep((trace_store.snapshots, trace_store.shared), lambda *_: True) == 0


def test_a_link_in_the_place_of_the_folder_is_refused(trace_store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    trace_store.snapshots.mkdir(parents=True, mode=0o700)
    (trace_store.snapshots / "request-step5").symlink_to(outside)
    with pytest.raises(OSError):
        trace_store.publish(Trace(), "request-step5", NAME)
    assert tree(outside) == []
    assert tree(trace_store.snapshots) == ["request-step5"]


@pytest.mark.parametrize("mode", [0o750, 0o777, 0o705])
def test_a_folder_that_others_may_enter_is_refused(tmp_path, mode):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(OSError, match="this user alone"), open_folder(folder):
        pass


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError), open_folder(tmp_path / "link"):
        pass


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\0b", "x" * 256])
def test_a_name_is_one_component(tmp_path, name):
    with pytest.raises(OSError):
        checked(name)
    with open_folder(tmp_path / "f", make=True) as folder:
        for call in (folder.read, folder.create, folder.remove, folder.size, lambda n: folder.write(n, b"")):
            with pytest.raises(OSError):
                call(name)


def test_what_the_gone_have_left_is_swept_and_nothing_else(trace_store, tmp_path):
    trace_store.snapshots.mkdir(parents=True, mode=0o700)
    for root in (trace_store.snapshots, trace_store.shared):
        for owner in ("node-1-5", "node-2-6"):
            (root / f".partial-{owner}" / "deep").mkdir(parents=True, mode=0o700)
            (root / f".partial-{owner}" / "deep" / "file").write_text("x")
        (root / "kept").mkdir()
    assert sweep((trace_store.snapshots, trace_store.shared), lambda owner, _: owner == "node-1-5") == 2
    for root in (trace_store.snapshots, trace_store.shared):
        assert sorted(os.listdir(root)) == [".partial-node-2-6", "kept"]


def test_a_description_has_the_parts_of_all_ranks(tmp_path):
    snapshots = tmp_path / "snapshots"
    plan = p.Plan(
        p.Request("1700000000000-a", p.STALL, "checkpoint", None, 5, "rank 1", {"cause": "checkpoint"}),
        None,
        3,
        7,
        (0, 1, 2),
        "checkpoint-step3",
        1,
    )
    with open_folder(snapshots, make=True) as folder, folder.sub(plan.folder, make=True):
        pass
    for rank, second in ((2, 0), (0, 1), (1, 9)):
        add_to_manifest(
            snapshots,
            plan,
            {"rank": rank, "started": f"2026-01-01T00:00:0{second}.000Z", "ended": f"2026-01-01T00:00:1{second}.000Z"},
        )
    (snapshots / plan.folder / "about" / "rank-9.json").write_text("{torn")
    add_to_manifest(
        snapshots, plan, {"rank": 1, "started": "2026-01-01T00:00:30.000Z", "ended": "2026-01-01T00:00:40.000Z"}
    )
    about = json.loads((snapshots / plan.folder / "about" / "snapshot.json").read_text())
    assert [part["rank"] for part in about["ranks"]] == [0, 1, 2]
    assert (about["reason"], about["stall"], about["ranks_expected"]) == (
        "checkpoint",
        {"cause": "checkpoint"},
        [0, 1, 2],
    )
    assert (about["log_from"], about["log_until"]) == ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:40.000Z")
    assert about["together"] is False
    assert not [name for name in os.listdir(snapshots / plan.folder) if name.endswith(".json")], (
        "Holistic Trace Analysis would take it for the trace of rank 0"
    )
