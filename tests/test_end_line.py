"""What rank 0 writes when a run ends: the verdict, which is the report's, and where the time of a step went."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.end_line import end_lines, end_table, own_waits, with_peers
from telemetry.diagnosis.verdict import RankWaits, RunFacts, costliest, judge
from telemetry.log.lines import HostLine
from telemetry.model.records import (
    Advice,
    GpuSample,
    OtherCause,
    RankPace,
    Samples,
    StallRecord,
)
from telemetry.model.totals import Conditions, CpuTotals, GpuTotals, Sampled, SampledTotals, Tick, Totals
from telemetry.report.report_command import report

OWN = RankWaits(
    rank=0,
    steps=100,
    wait_seconds=74.0,
    compute_seconds=26.0,
    first_wait_seconds=0.5,
    exposed_seconds=74.0,
    starved_ratio=0.2,
)
CALM = replace(OWN, wait_seconds=1.0, compute_seconds=99.0, exposed_seconds=1.0)
LEDGER = {"startup": 2.0, "data_wait": 1.0, "compute": 99.0, "evaluation": 20.0, "checkpoint": 0.1, "other": 0.0}


def stall(cause: str, lost: float = 70.0, **advice) -> StallRecord:
    evidence = {"lost_seconds": {cause: lost}}
    return StallRecord(rank=0, cause=cause, evidence=evidence, advice=[Advice(**advice)] if advice else [])


def said(own=OWN, folder: str | None = "/r", peers=(), **more) -> str:
    facts = RunFacts([own], ledger=LEDGER, ledger_in_full=True, ended=True, **more)
    return "\n".join(end_lines(judge(with_peers(facts, peers)), [], folder and Path(folder)))


def peer(rank: int, wait: float, cause: str | None = None, lost: float = 0.0) -> RankPace:
    return RankPace(
        rank, 30.0, 10, 1.0, 1.0, 0.0, last_step=100, run_wait_seconds=wait, run_loop_seconds=100.0,
        run_exposed_seconds=wait, run_cause=cause, run_lost_seconds=lost,
    )  # fmt: skip


def test_a_starved_run_has_its_cause_and_what_to_change():
    workers = dict(action="load in worker processes", setting="num_workers", value="2", predicted_speedup=1.57)
    both = stall("loader_on_training_thread", **workers)
    both.evidence["also"] = [OtherCause("gc_pause", 0.123)]
    assert said(stalls=[both]) == (
        "telemetry: Starved: rank 0 spent 74 % of its training loop waiting for data; see: telemetry report /r\n"
        "  cause:  loader_on_training_thread: the training thread makes the batches itself\n"
        "  do:     set num_workers=2: load in worker processes\n"
        "  expect: 1.57 times the steps per second\n"
        "  At the same time gc_pause takes 12 % of the time."
    )
    bare = said(stalls=[stall("loader_on_training_thread", action="load in worker processes")])
    assert "expect: at most 3.8 times the steps per second, if no step had to wait" in bare


def test_a_healthy_run_has_a_short_ledger():
    assert said(CALM) == (
        "telemetry: Healthy: no rank lost more than 1.0 % of its training loop waiting for data; see: telemetry report /r\n"
        "  100 steps in 2 min: 81 % compute, 16 % evaluation, 1.6 % startup, 0.8 % data wait."
    )


SHORT = replace(OWN, steps=1, wait_seconds=10.0, compute_seconds=1.0, first_wait_seconds=10.0, exposed_seconds=10.0)


@pytest.mark.parametrize(
    ("own", "more", "told"),
    [
        pytest.param(
            SHORT,
            {},
            "than 0 % of its training loop waiting for data after the first batch; see: telemetry report /r\n  1 step in",
            id="start",
        ),
        pytest.param(replace(OWN, exposed_seconds=3.0), {}, "no rank lost more than 3.0 %", id="not felt by the GPU"),
        pytest.param(
            replace(OWN, exposed_seconds=None, unmeasured="gpu_events is off"),
            {},
            "data; how much of that the GPU felt was not measured: gpu_events is off; see",
            id="not measured",
        ),
        pytest.param(
            replace(CALM, unseen_steps=90),
            {},
            "On rank 0, 90 of 100 steps took their batch from code that the agent does not see",
            id="unseen",
        ),
        pytest.param(
            replace(CALM, wait_seconds=0.0, exposed_seconds=0.0, first_wait_seconds=0.0),
            {},
            "telemetry: Not known whether this run waits for data",
            id="no wait at all",
        ),
        pytest.param(
            CALM,
            {"stalls": [stall("gc_pause", action="freeze the objects")]},
            "do:     freeze the objects",
            id="stalled",
        ),
        pytest.param(replace(OWN, steps=0), {}, "telemetry: No training step has ended yet; see", id="no step"),
        pytest.param(replace(OWN, steps=0), {"children": 2}, "has started 2 processes", id="no step, but children"),
    ],
)
def test_other_runs(own, more, told):
    assert told in said(own, **more)


def test_a_stuck_run_says_in_what():
    evidence = {"stuck_in": "data_wait", "stuck_at": "data.py:7"}
    held = StallRecord(rank=0, cause="worker_stuck", opened="t1", evidence=evidence)
    assert said(CALM, stuck=[(held, True)]) == (
        "telemetry: Stuck before its end: rank 0 was waiting for a batch and had not gone on since before t1; see: "
        "telemetry report /r\n"
        "  cause:  worker_stuck: a worker does not go on\n"
        "  line:   it stood at data.py:7"
    )
    assert said(folder="/my runs/a").splitlines()[0].endswith("; see: telemetry report '/my runs/a'"), (
        "to be pasted into a shell"
    )
    assert "see:" not in said(folder=None)
    job = said(CALM, stuck=[(held, True)], hang="rank 3 does not come", world_size=4)
    assert job == "telemetry: Hung before its end: rank 3 does not come; see: telemetry report /r"


def test_the_worst_rank_of_those_that_are_known_is_named():
    line = said(CALM, peers=(peer(5, 60.0, "workers_io_bound", 50.0), peer(6, 1.0)), world_size=8)
    assert "Starved: rank 5 spent 60 %" in line and "\n  cause:  workers_io_bound" in line
    every = said(OWN, peers=(peer(1, 80.0),), world_size=2)
    assert "every rank waits for data; the worst, rank 1, spent 80 %" in every


def test_nothing_is_said_of_ranks_that_are_not_known():
    assert "Healthy: rank 0 lost 1.0 % of its training loop" in said(CALM, world_size=8)
    unknown = structs.replace(peer(1, 90.0), run_exposed_seconds=None)
    assert "Healthy: rank 0 lost 1.0 %" in said(CALM, peers=(unknown,), world_size=2)
    unmeasured = said(replace(CALM, exposed_seconds=None), peers=(peer(1, 0.5),), world_size=2)
    assert "Healthy: rank 1 lost 0.5 %" in unmeasured
    assert "every rank" not in said(OWN, peers=(peer(1, 80.0),), world_size=8)
    known = said(CALM, peers=(peer(1, 0.5),), world_size=2)
    assert "Healthy: no rank lost more than 1.0 % of its training loop" in known


def test_a_stall_of_its_own_is_named_before_a_longer_wait_for_a_rank():
    line = said(CALM, stalls=[stall("straggler", 40.0)], peers=(peer(1, 1.0, "gc_pause", 10.0),), world_size=2)
    assert "Not starved, but rank 1 stalled; see: telemetry report /r\n  cause:  gc_pause" in line
    found = costliest([stall("straggler", 100.0), stall("checkpoint", 30.0), stall("straggler", 90.0)])
    line = said(CALM, stalls=[found], peers=(peer(1, 1.0, "gc_pause", 20.0),), world_size=2)
    assert "Not starved, but rank 0 stalled; see: telemetry report /r\n  cause:  checkpoint" in line


# -- the table ---------------------------------------------------------------------------------------------------

PARTS = {"forward": 2.0, "backward": 4.0, "optimizer": 1.0, "compile": 0.5}
LOOP = Totals(
    steps=100,
    ledger_seconds={"startup": 1.0, "data_wait": 2.0, "compute": 8.0},
    exposed_wait_seconds=2.0,
    compute_parts=PARTS,
    sampled=SampledTotals(cpu=CpuTotals(used_cores=Sampled(12.0, 8.0), other_cores=Sampled(2.0, 8.0))),
)


def shown(totals=LOOP, samples=Samples(), *, host=HostLine(), on_gpu=False, several=False) -> list[str]:
    tick = Tick(totals, Conditions(cores=2, on_gpu=on_gpu))
    return end_table(own_waits(totals, 0, 0.2, None), tick, samples, host, several=several)


def test_the_table_has_the_mean_step_and_what_it_used():
    host = HostLine(process_resident_memory_bytes=512_000_000, workers_bytes=40_000_000)
    assert shown(host=host) == [
        "  100 steps in 11 s: 73 % compute, 18 % data wait, 9.1 % startup.",
        "  a step        mean  share",
        "  wait       20.0 ms   20 %",
        "  forward    20.0 ms   20 %",
        "  backward   40.0 ms   40 %",
        "  optimizer  10.0 ms   10 %",
        "  rest       10.0 ms   10 %",
        "  CPU        1.5 of 2 cores; other programs 0.2",
        "  memory     552 MB, of that workers 40 MB",
    ]


def test_a_long_wait_for_the_first_batch_is_left_out_as_in_the_verdict():
    ledger = {"data_wait": 12.0, "compute": 8.0}
    late = replace(LOOP, ledger_seconds=ledger, exposed_wait_seconds=12.0, first_wait_seconds=11.0)
    assert shown(late)[1:3] == [
        "  a step after the first batch     mean  share",
        "  wait                          10.0 ms   11 %",
    ]


def test_what_was_not_measured_is_a_dash_or_absent():
    bare = replace(LOOP, ledger_seconds={"data_wait": 0.0, "compute": 8.0}, compute_parts=None, sampled=SampledTotals())
    unseen = replace(bare, steps=0, estimated_steps=100, exposed_wait_seconds=0.0)
    assert shown(unseen) == [
        "  about 100 steps in 8 s: 100 % compute.",
        "  a step      mean  share",
        "  wait           -      -",
        "  compute  80.0 ms  100 %",
    ]
    assert shown(replace(LOOP, steps=0)) == shown(replace(LOOP, ledger_seconds={"compute": 0.5})) == []


def test_a_table_with_all_of_it_has_less_than_15_lines():
    busy = replace(LOOP.sampled, gpu=GpuTotals(utilization_ratio=Sampled(4.0, 8.0)))
    gpu = GpuSample(0, "u", "H100", memory_used_bytes=10**10, memory_total_bytes=8 * 10**10)
    totals = replace(LOOP, compute_parts=PARTS | {"copy": 0.2, "other": 0.1}, sampled=busy)
    lines = shown(totals, Samples(gpus=(gpu,)), on_gpu=True, several=True)
    assert lines[1] == "  a step of rank 0, on the host     mean  share"
    assert lines[-1] == "  GPU                            busy 50 %; 10.0 GB of 80.0 GB"
    assert len(lines) == 10


# -- on real loops -----------------------------------------------------------------------------------------------


class Slow(Dataset):
    def __init__(self, seconds: float, size: int = 200) -> None:
        self.seconds, self.size = seconds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(4)


def train(data: Dataset, steps: int, compute: float = 0.01) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(DataLoader(data, batch_size=2)):
        if number == steps:
            return
        time.sleep(compute)
        model(batch).sum().backward()
        optimizer.step()


@pytest.fixture
def with_end_line(monkeypatch, tmp_path):
    monkeypatch.delenv("TELEMETRY_END_LINE")

    def start(**settings):
        return telemetry.start(
            tmp_path / "run", **({"port": "off", "interval_seconds": 0.1, "start_line": False} | settings)
        )

    return start


def ends(capfd) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("telemetry: ")]


@pytest.mark.parametrize(
    ("seconds", "steps", "form"), [(0.01, 90, "table"), (0.01, 90, "short"), (0.0, 60, True), (0.0, 1, "table")]
)
def test_the_line_says_what_the_report_says(with_end_line, seconds, steps, form, tmp_path, capfd):
    with_end_line(stall_window_seconds=1, end_line=form)
    train(Slow(seconds), steps, compute=0.01 if steps == 90 else 0.02)
    telemetry.stop()
    said = capfd.readouterr().err
    line, *more = said.splitlines()
    assert any(each.endswith("mean  share") for each in more) is (form != "short" and steps > 1), more
    assert len(more) < 15
    assert report(str(tmp_path / "run"), as_json=True) == 0
    told = json.loads(capfd.readouterr().out)["verdict"]
    assert re.match(r"[^:]*: [^.]*", told)[0] in line, (line, told)
    if steps == 90:
        assert line.startswith("telemetry: Starved: rank 0 spent ")
        told = r"Do: set .*Expect: " if form == "short" else r"\n  do:     set num_workers=\d+: .*\n  expect: "
        assert re.search(rf"{told}[\d.to ]+ times the steps per second", said), said


def test_a_line_for_each_stop_with_steps_and_none_for_others(with_end_line, capfd):
    for _ in range(2):
        with_end_line()
        train(Slow(0.0), 10, compute=0.0)
        telemetry.stop()
        telemetry.stop()
    with_end_line()
    telemetry.stop()
    assert len(ends(capfd)) == 2


def test_the_line_can_be_turned_off_and_other_ranks_write_none(with_end_line, monkeypatch, capfd):
    with_end_line(end_line=False)
    train(Slow(0.0), 10)
    telemetry.stop()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with_end_line()
    train(Slow(0.0), 10)
    telemetry.stop()
    assert ends(capfd) == []
