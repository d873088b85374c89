"""The snapshot command where nodes see files late. The test sets the clock, so nobody waits."""

from __future__ import annotations

import json

import pytest

from telemetry.snapshot import command
from telemetry.snapshot import protocol as p
from telemetry.snapshot.command import SnapshotOptions, snapshot
from telemetry.snapshot.rendezvous import Position, Rendezvous


class Clock:
    """Stands for the module `time` of the command. A rank of the job polls whenever the command sleeps."""

    def __init__(self) -> None:
        self.now = 1.7e9
        self.on_sleep = lambda: None

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 10 * seconds
        self.on_sleep()


@pytest.mark.parametrize(("caches", "status"), [(True, 0), (False, 1)], ids=["nfs", "local disk"])
def test_the_command_waits_for_nodes_that_see_files_late(tmp_path, monkeypatch, capsys, caches, status):
    """The second rank never answers. So the first one writes the plan only when it can be sure: after 90 s."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.1.jsonl").write_text(
        json.dumps({"event": "run_start", "settings": {"interval_seconds": 1.0}}) + "\n"
    )
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir(mode=0o700)
    clock = Clock()
    rank = Rendezvous(
        snapshots, rank=0, world_size=2, tick_seconds=1.0, refuses=lambda _: None, clock=clock.time, far=lambda: True
    )

    def poll() -> None:
        plan = rank.poll(lambda: Position(100, 0.5))
        if plan is not None:
            rank.report(plan, p.Result(0, "recorded", None, "snapshots/trace.gz", plan.first_step, plan.last_step))

    clock.on_sleep = poll
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(command, "caches_folders", lambda _: caches)
    clock.now += 1
    said: list[str] = []
    assert snapshot(str(tmp_path), SnapshotOptions.parse("all", "5", "300"), said.append) == status
    error = capsys.readouterr().err
    if caches:
        assert error == ""
        assert "agreed on by rank 0" in said[0]
        assert said[1].endswith("snapshots/trace.gz")
    else:
        assert "rank 0 answered, but wrote no plan" in error
