"""The snapshots of a run in its report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from telemetry.report.command import report
from tests.report_logs import START, line, totals, write

TRACE = Path(__file__).parent / "traces" / "v100_resnet50_workers0.json.gz"


def snapshot(path: str) -> dict:
    return line("snapshot", result="recorded", reason="workers_io_bound", first_step=5, last_step=9, path=path)


def reported(tmp_path, capsys, *, as_json: bool) -> str:
    assert report(str(tmp_path), as_json=as_json) == 0
    return capsys.readouterr().out


def test_a_snapshot_is_read_for_the_report_and_its_verdict(tmp_path, capsys):
    folder = tmp_path / "snapshots" / "workers_io_bound-step5"
    folder.mkdir(parents=True)
    shutil.copy(TRACE, folder / "rank-0.node_10.1.pt.trace.json.gz")
    end = line("run_end", **totals(wait=4.0, compute=10.0, steps=100))
    taken = snapshot("snapshots/workers_io_bound-step5/rank-0.node_10.1.pt.trace.json.gz")
    write(tmp_path, 0, line("run_start", **START), taken, end)
    whole = json.loads(reported(tmp_path, capsys, as_json=True))
    (shown,) = whole["snapshots"]
    assert shown["breakdown"]["DataLoader"] == pytest.approx(0.34, abs=0.02)
    assert sum(shown["breakdown"].values()) == pytest.approx(1.0, abs=0.001)
    assert "The trace of steps 5 to 9 on rank 0 shows Kernel 5" in whole["verdict"]
    assert "  rank 0: Kernel 5" in reported(tmp_path, capsys, as_json=False)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../trace.json.gz", "lies outside of the run folder"),
        ("/etc/trace.json.gz", "lies outside of the run folder"),
        ("snapshots/gone.json.gz", "gone.json.gz"),
        ("snapshots/link.json.gz", "link.json.gz"),
    ],
)
def test_a_snapshot_that_cannot_be_read_is_listed_and_says_why(tmp_path, capsys, path, why):
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "link.json.gz").symlink_to(TRACE)
    write(
        tmp_path,
        0,
        line("run_start", **START),
        snapshot(path),
        line("run_end", **totals(wait=1.0, compute=9.0, steps=9)),
    )
    assert json.loads(reported(tmp_path, capsys, as_json=True))["snapshots"][0]["breakdown"] == {}
    assert why in reported(tmp_path, capsys, as_json=False)
