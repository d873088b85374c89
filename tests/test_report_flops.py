"""What the report says of the FLOPs of snapshots."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from telemetry.report.command import report
from tests.report_logs import START, line, totals
from tests.report_logs import write as write_log

TRACES = Path(__file__).parent / "traces"
RESNET = "v100_resnet50_workers0.json.gz"


def test_the_report_has_the_flops_of_a_snapshot(tmp_path, capsys):
    folder = tmp_path / "snapshots" / "a-step5"
    folder.mkdir(parents=True)
    with gzip.open(TRACES / RESNET) as whole:
        bare = json.load(whole)
    for event in bare["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    (folder / "rank-1.json").write_text(json.dumps(bare))
    shutil.copy(TRACES / RESNET, folder / "rank-0.json.gz")
    more = {"result": "recorded", "reason": "request", "first_step": 5, "last_step": 7}
    for rank, name in enumerate(("rank-0.json.gz", "rank-1.json")):
        taken = line("snapshot", rank, path=f"snapshots/a-step5/{name}", **more)
        end = line("run_end", rank, **totals(wait=4.0, compute=10.0, steps=100))
        write_log(tmp_path, rank, line("run_start", rank, **START, world_size=2), taken, end)
    assert report(str(tmp_path), as_json=True) == 0
    with_shapes, without = json.loads(capsys.readouterr().out)["snapshots"]
    assert with_shapes["flops"]["per_step"] == pytest.approx(
        393e6, rel=0.01
    )  # convolutions of so old a trace do not count
    assert without["flops"]["per_step"] is None
    assert report(str(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert "FLOPs of rank 0: 393 MFLOP a step (at least: " in text
    assert "FLOPs of rank 1: not known: the trace has no shapes of inputs" in text
