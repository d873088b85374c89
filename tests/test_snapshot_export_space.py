"""An export begins only where its room is sure, and leaves nothing behind in any process."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from telemetry.snapshot import export_space, store
from telemetry.snapshot.export_owner import LocalProcesses
from telemetry.snapshot.private_folder import close_in_child
from telemetry.snapshot.store import StoreError, TraceStore, sweep

CONTENT = b'{"traceEvents": [' + b"1," * 50_000 + b"1]}"
MIB = 1 << 20


class Trace:
    """Stands for a recording: ``most`` by its duration, ``least`` and ``events`` by its events."""

    def __init__(self, most: int = MIB, least: int = 1000, events: int = MIB) -> None:
        self.most, self.least, self.events = most, least, events
        self.saved_to: Path | None = None
        self.while_saved = lambda: None

    def max_bytes(self) -> int:
        return self.most

    def estimate(self) -> tuple[int, int, float]:
        return self.least, self.events, 0.5

    def save(self, path: Path) -> float:
        self.saved_to = path
        path.write_bytes(CONTENT)
        self.while_saved()
        return 0.001

    def free(self) -> float:
        return 0.001


def make(tmp_path: Path, owner: str = "node-7-99-ns1", run: str = "run", most: int = 8 * MIB) -> TraceStore:
    gone = LocalProcesses("node", 1, {7: 99, 8: 5}.get).is_gone
    return TraceStore(tmp_path / run / "snapshots", tmp_path / "shared", owner, most, 64 * MIB, gone)


@pytest.fixture
def free(monkeypatch):
    """Sets how much is free."""

    def set_free(amount: int) -> None:
        monkeypatch.setattr(export_space, "free_bytes", lambda _: amount)

    return set_free


def everything(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


def test_more_than_the_limit_is_refused_before_anything_is_written(tmp_path, free):
    free(1 << 50)
    trace = Trace(most=1 << 40, least=90 * MIB, events=200 * MIB)
    with pytest.raises(StoreError, match="at least 94371840 bytes, more than snapshot_max_bytes"):
        make(tmp_path).publish(trace, "request-step5", "rank-0.gz")
    assert trace.saved_to is None
    assert everything(tmp_path) == []


def test_what_a_long_recording_of_little_may_take_is_counted(tmp_path, free):
    free(export_space.MIN_FREE_BYTES + 2 * MIB)
    stored = make(tmp_path).publish(Trace(most=1 << 40), "request-step5", "rank-0.gz")
    assert stored.held["count"] == 0.5
    assert everything(tmp_path) == ["rank-0.gz"]


def test_without_room_for_its_events_nothing_is_written(tmp_path, free):
    free(export_space.MIN_FREE_BYTES + MIB)  # not for what it is compressed to
    trace = Trace()
    with pytest.raises(StoreError, match="no room: it may take 1 MiB, 1024 MiB must stay free, and 1025 MiB are free"):
        make(tmp_path).publish(trace, "request-step5", "rank-0.gz")
    assert trace.saved_to is None
    assert everything(tmp_path) == []


@pytest.mark.parametrize("runs", [["run"] * 8, [f"run-{n}" for n in range(8)]], ids=["one run", "eight runs"])
def test_eight_at_once_never_hold_more_than_there_is(runs, tmp_path, free, monkeypatch):
    """Room for two: six have to wait for it, and all come to their turn."""
    monkeypatch.setattr(export_space, "_PAUSE_SECONDS", 0.01)
    free(export_space.MIN_FREE_BYTES + 3 * MIB)
    at_work: set[int] = set()
    most: list[int] = []
    met = threading.Event()
    results: dict[int, object] = {}

    def export(number: int) -> None:
        def note(stage: str) -> None:
            if stage == "saved":
                at_work.add(number)
                most.append(len(at_work))
                if len(at_work) == 2:
                    met.set()
                met.wait(10)  # the first waits for a second one: they do work side by side
            elif stage == "compressed":
                at_work.discard(number)

        trace_store = make(tmp_path, f"node-{100 + number}-1-ns2", runs[number])
        try:
            results[number] = trace_store.publish(Trace(), "request-step5", f"rank-{number}.gz", on_stage=note)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=export, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(results[n]) for n in range(8)] == [store.StoredTrace] * 8, results
    assert max(most) == 2
    assert everything(tmp_path) == [f"rank-{n}.gz" for n in range(8)]


def test_waiting_for_other_exports_times_out(tmp_path, free, monkeypatch):
    monkeypatch.setattr(export_space, "_WAIT_SECONDS", 0)
    free(export_space.MIN_FREE_BYTES + 2 * MIB)
    make(tmp_path).snapshots.mkdir(parents=True, mode=0o700)
    device = (tmp_path / "run").stat().st_dev
    (tmp_path / "shared").mkdir(mode=0o700)
    other = tmp_path / "shared" / f".claim-{MIB}-{device}-node-8-5-ns1"
    other.touch()
    with pytest.raises(StoreError, match="1 of them reserved by others"):
        make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz")
    assert other.exists()
    other.rename(other.with_name(f".claim-{MIB}-{device}-node-8-4-ns1"))  # that process 8 is gone
    make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz")
    (tmp_path / "run" / "snapshots" / f".claim-{MIB}-12345-other-8-5-ns1").touch()  # another node's, of the same disk
    with pytest.raises(StoreError, match="1 of them reserved by others"):
        make(tmp_path).publish(Trace(), "request-step5", "rank-1.gz")


def test_waiting_for_other_exports_draws_no_random_number_of_the_script(tmp_path, free, monkeypatch):
    """The script may have seeded ``random``. What it draws next must not depend on a snapshot."""
    free(export_space.MIN_FREE_BYTES + 2 * MIB)
    make(tmp_path).snapshots.mkdir(parents=True, mode=0o700)
    other = make(tmp_path).snapshots / f".claim-{MIB}-12345-node-8-5-ns1"
    other.touch()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        other.unlink()

    monkeypatch.setattr(export_space, "sleep", pause)
    before = random.getstate()
    make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz")
    assert len(pauses) == 1
    assert random.getstate() == before


def test_reservations_need_no_shared_folder(tmp_path, free):
    free(export_space.MIN_FREE_BYTES + 2 * MIB)
    (tmp_path / "shared").write_text("no folder")
    make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz")
    assert everything(tmp_path) == ["rank-0.gz", "shared"]


def test_a_slow_disk_is_not_written_to(tmp_path, monkeypatch):
    """torch holds the GIL while it writes, so the training would wait for the disk."""
    clock = iter(range(0, 10**12, 3 * 10**9))
    monkeypatch.setattr(store, "now_ns", lambda: next(clock))
    trace = Trace()
    with pytest.raises(StoreError, match="too slow"):
        make(tmp_path).publish(trace, "request-step5", "rank-0.gz")
    assert trace.saved_to is None
    assert everything(tmp_path) == []


@pytest.mark.parametrize("stage", ["begun", "saved", "compressing", "compressed"])
def test_a_child_forked_during_an_export_keeps_none_of_its_files(tmp_path, stage):
    """And those that it has for a moment hold no disk space: they are empty when the export is over."""
    before = set(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    found: dict[str, str] = {}

    def fork(at: str) -> None:
        if at != stage:
            return
        child = os.fork()
        if child == 0:
            try:
                close_in_child()
                links = []
                for number in os.listdir("/proc/self/fd"):
                    try:
                        links.append(os.readlink(f"/proc/self/fd/{number}"))
                    except OSError:
                        continue
                os.write(write, "\n".join(link for link in links if str(tmp_path) in link).encode() or b"none")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found["open"] = os.read(read, 65536).decode()

    make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz", on_stage=fork)
    os.close(read)
    os.close(write)
    assert found == {"open": "none"}
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_copy_of_the_raw_trace_elsewhere_holds_no_disk_space(tmp_path):
    copies: list[int] = []

    def copy(at: str) -> None:
        if at == "saved":
            raw = next(n for n in os.listdir("/proc/self/fd") if "trace.json" in readlink(n))
            copies.append(os.dup(int(raw)))

    make(tmp_path).publish(Trace(), "request-step5", "rank-0.gz", on_stage=copy)
    assert os.fstat(copies[0]).st_size == os.fstat(copies[0]).st_blocks == 0
    os.close(copies[0])


def readlink(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


PROCESSES = LocalProcesses("node", 1, {7: 99}.get)


@pytest.mark.parametrize(
    ("owner", "age", "gone"),
    [
        (PROCESSES.owner_name(7), 1e9, False),
        ("node-7-98-ns1", 0, True),
        ("node-8-99-ns1", 0, True),
        ("node-7-98", 0, True),  # an earlier version's
        ("node-7-99", 1e9, False),
        ("node-8-99-ns2", 0, False),  # another container's
        ("node-8-99-ns2", 4000, True),
        ("other-8-99-ns1", 0, False),  # another node's
        ("other-8-99-ns1", 4000, True),
        ("no owner", 0, False),
        ("no owner", 4000, True),
    ],
)
def test_who_is_gone(owner, age, gone):
    assert PROCESSES.is_gone(owner, age) is gone


def test_the_next_agent_sweeps_what_others_have_left_in_both_places(tmp_path):
    roots = [tmp_path / "snapshots", tmp_path / "shared"]
    for root in roots:
        root.mkdir(mode=0o700)
        for name in (".partial-node-7-98", ".partial-other-7-98", ".partial-node-7-99-ns1"):
            (root / name).mkdir(mode=0o700)
            (root / name / "trace.json").write_text("x")
        for name in (".claim-5-1-node-7-98-ns1", ".claim-5-1-node-7-99-ns1", ".claim-notes", "kept"):
            (root / name).touch()
        os.utime(root / ".partial-other-7-98", (1e9, 1e9))
    assert sweep(roots, PROCESSES.is_gone) == 6
    for root in roots:
        assert sorted(os.listdir(root)) == sorted(
            [".partial-node-7-99-ns1", ".claim-5-1-node-7-99-ns1", ".claim-notes", "kept"]
        )


def test_a_folder_in_memory_has_no_more_than_the_machine_has_to_give(tmp_path, monkeypatch):
    monkeypatch.setattr(export_space, "free_memory", lambda: iter([1234]))
    assert export_space.free_bytes(Path("/proc")) != 1234
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(export_space, "in_memory", lambda _: True)
    assert export_space.free_bytes(tmp_path) == min(1234, found.f_bavail * found.f_frsize)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_what_lies_in_memory_is_known():
    assert export_space.in_memory(Path("/dev/shm")) is True
    assert export_space.in_memory(Path("/proc")) is False
    assert all(amount > 0 for amount in export_space.free_memory())
    assert list(export_space.free_memory()), "at least what the machine has"
