"""FLOPs of a snapshot of our own run, against torch's own counter, and what the report says of them."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import telemetry
from telemetry.config import Config
from telemetry.report.command import report
from telemetry.trace.reader import read_trace
from tests.data_sets import Numbers
from tests.report_logs import START, line, totals
from tests.report_logs import write as write_log

TRACES = Path(__file__).parent / "traces"
RESNET = "v100_resnet50_workers0.json.gz"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 4, 2, stride=2)
        )
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(self.attention(self.convolutions(images).flatten(2).transpose(1, 2))).sum()


def test_a_snapshot_with_shapes_has_the_flops_that_torch_counts(tmp_path, capfd):
    torch.manual_seed(0)
    net, images = Net(), torch.randn(2, 1, 16, 16)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        net(images).backward()
    agent = telemetry.start(tmp_path / "run", port="off", interval_seconds=0.1, start_line=False, snapshot_shapes=True)
    for number, _ in enumerate(DataLoader(Numbers(100_000)), 1):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            net(images).backward()
        if number == 10:
            assert telemetry.request_snapshot(steps=2)
        if sum(agent.snapshots.counts.values()):
            break
    telemetry.stop()
    (path,) = (tmp_path / "run" / "snapshots").glob("request-*/*.json.gz")
    found = read_trace(path).flops
    assert found.per_step == counter.get_total_flops()
    assert found.absent == "no kernel ran on a GPU"
    assert capfd.readouterr().err == ""


def test_snapshots_have_no_shapes_unless_they_are_asked_for(taken):
    assert not Config.load({}, {}).snapshot_shapes
    taken.arm(2, 3)
    for _ in DataLoader(Numbers(6)):
        torch.ones(3, 5) @ torch.ones(5, 7)
    taken.events(taken.outcome())
    assert not any("Input Dims" in event.get("args", {}) for event in taken.trace["traceEvents"])


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
    assert with_shapes["flops"]["mfu_ratio"] == pytest.approx(0.274, abs=0.001)
    assert without["flops"]["per_step"] is None
    assert report(str(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert "FLOPs of rank 0: 778 GFLOP a step; MFU 27.4 % of the dense peak (float32 15.7 TFLOP/s)" in text
    assert "FLOPs of rank 1: not known: the trace has no shapes of inputs" in text
