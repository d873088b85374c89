"""What a killed export has left in another run's folder is removed, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from telemetry.snapshot import export_space, leftovers
from telemetry.snapshot.export_owner import LocalProcesses
from telemetry.snapshot.store import TraceStore, sweep
from telemetry.util.errors import ErrorLog

GONE, LIVING, ELSEWHERE = "node-7-98-ns1", "node-7-99-ns1", "other-8-5-ns1"
IS_GONE = LocalProcesses("node", 1, {7: 99}.get).is_gone


class KilledError(Exception):
    """Stands for SIGKILL: nothing of the export runs any more."""


class Trace:
    def max_bytes(self) -> int:
        return 1000

    def save(self, path: Path) -> float:
        path.write_text("gigabytes")
        raise KilledError

    def free(self) -> float:
        return 0.0


@pytest.fixture
def shared(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def killed(tmp_path, shared, monkeypatch):
    """Kill an export in a run folder, by default `a`. Returns the unfinished export."""
    monkeypatch.setattr(export_space, "free_bytes", lambda _: 1 << 50)

    def kill(owner: str = GONE, run: str = "a") -> Path:
        snapshots = tmp_path / run / "snapshots"
        with monkeypatch.context() as patched:
            # Nothing is removed after the kill. What is removed before it does not exist.
            patched.setattr(export_space.Folder, "remove", lambda *_: None)
            with pytest.raises(KilledError):
                TraceStore(snapshots, shared, owner, 1 << 30, 1 << 30).publish(Trace(), "request-step5", "rank-0.gz")
        return snapshots / f".partial-{owner}"

    return kill


def claims(shared: Path) -> list[str]:
    return sorted(os.listdir(shared))


def swept(tmp_path: Path, shared: Path) -> None:
    """What an agent does that starts in the run folder `b`."""
    errors = ErrorLog()
    sweep((tmp_path / "b" / "snapshots", shared), IS_GONE)
    thread = leftovers.start_sweep(shared, IS_GONE, errors)
    if thread is not None:
        thread.join()
    assert errors.counts == {}


def test_it_is_removed_with_its_reservation(tmp_path, shared, killed):
    partial = killed()
    assert (partial / "trace.json").read_text() == "gigabytes"
    swept(tmp_path, shared)
    assert not partial.exists()
    assert claims(shared) == []
    assert leftovers.start_sweep(shared, IS_GONE, ErrorLog()) is None, "there is nothing to do any more"


@pytest.mark.parametrize("owner", [LIVING, ELSEWHERE])
def test_that_of_a_process_that_may_live_stays(tmp_path, shared, killed, owner):
    partial = killed(owner)
    swept(tmp_path, shared)
    assert partial.exists()
    assert len(claims(shared)) == 1
    if owner == ELSEWHERE:  # its reservation is old, but what it writes is not
        os.utime(shared / claims(shared)[0], (1e9, 1e9))
        swept(tmp_path, shared)
        assert partial.exists()
        assert len(claims(shared)) == 1, "a later agent tries again"


def test_a_folder_that_is_gone_leaves_no_reservation(tmp_path, shared, killed):
    partial = killed()
    partial.parent.rename(tmp_path / "moved")
    swept(tmp_path, shared)
    assert (tmp_path / "moved" / partial.name).exists()
    assert claims(shared) == []


def test_a_file_system_that_is_not_mounted_now_keeps_its_reservation(tmp_path, shared, killed):
    partial = killed(run="mounted/runs/a")
    (tmp_path / "mounted" / "runs").rename(tmp_path / "disk")
    swept(tmp_path, shared)
    assert len(claims(shared)) == 1, "a later agent tries again"
    (tmp_path / "disk").rename(tmp_path / "mounted" / "runs")
    swept(tmp_path, shared)
    assert not partial.exists()
    assert claims(shared) == []


def test_a_folder_that_is_not_this_users_alone_is_left(tmp_path, shared, killed):
    partial = killed()
    partial.parent.chmod(0o755)
    swept(tmp_path, shared)
    assert partial.exists()
    assert len(claims(shared)) == 1, "a later agent tries again"


def test_a_link_to_the_folder_is_not_followed(tmp_path, shared, killed):
    partial = killed()
    partial.parent.rename(tmp_path / "moved")
    partial.parent.symlink_to(tmp_path / "moved")
    swept(tmp_path, shared)
    assert (tmp_path / "moved" / partial.name / "trace.json").exists()


def test_a_link_in_the_folder_is_not_followed(tmp_path, shared, killed):
    partial = killed()
    partial.rename(tmp_path / "target")
    partial.symlink_to(tmp_path / "target")
    swept(tmp_path, shared)
    assert not partial.is_symlink()
    assert (tmp_path / "target" / "trace.json").exists()


@pytest.mark.parametrize("content", [b"", b"a/snapshots", b"/\0", b"\xff"])
def test_a_reservation_that_names_no_folder_is_only_removed(tmp_path, shared, killed, content, monkeypatch):
    partial = killed()
    (shared / claims(shared)[0]).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    swept(tmp_path, shared)
    assert partial.exists()
    assert claims(shared) == []
