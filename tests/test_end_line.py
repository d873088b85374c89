"""The line that rank 0 writes when a run ends: what it says, and that the report says the same."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.end_line import RunEnd, end_line
from telemetry.agent.hangs import Hang
from telemetry.diagnosis.verdict import RankWaits, costliest
from telemetry.node.peers import PeerPaces
from telemetry.records import RankPace, Totals
from telemetry.report.command import report

OWN = RankWaits(
    rank=0, steps=100, wait_seconds=74.0, compute_seconds=26.0, first_wait_seconds=0.5, exposed_seconds=74.0
)
CALM = replace(OWN, wait_seconds=1.0, compute_seconds=99.0, exposed_seconds=1.0)
LEDGER = {"startup": 2.0, "data_wait": 1.0, "compute": 99.0, "evaluation": 20.0, "checkpoint": 0.1, "other": 0.0}
TOTALS = Totals(wall_seconds=122.1, ledger_seconds=LEDGER, steps=100)


def stall(cause: str, lost: float = 70.0, **advice) -> dict:
    return {"cause": cause, "evidence": {"lost_seconds": {cause: lost}}, "advice": [advice] if advice else []}


WORKERS = dict(action="load in worker processes", setting="num_workers", value="2", predicted_speedup=1.57)


def said(own=OWN, tmp="/r", **more) -> str:
    from pathlib import Path

    return end_line(RunEnd(own, TOTALS, **more), Path(tmp) if tmp else None)


def peer(rank: int, wait: float, cause: str | None = None, lost: float = 0.0) -> RankPace:
    return RankPace(
        rank, 30.0, 10, 1.0, 1.0, 0.0, last_step=100, run_wait_seconds=wait, run_loop_seconds=100.0,
        run_exposed_seconds=wait, run_cause=cause, run_lost_seconds=lost,
    )  # fmt: skip


def test_a_starved_run_has_its_cause_and_what_to_change():
    assert said(stall=stall("loader_on_training_thread", **WORKERS)) == (
        "telemetry: 74 % of the training loop waited for data (loader_on_training_thread); num_workers=2 is predicted "
        "to give 1.57x steps/s; see: telemetry report /r"
    )


def test_without_a_prediction_or_a_value_nothing_is_predicted():
    no_gain = WORKERS | {"predicted_speedup": None}
    assert "; try num_workers=2; see" in said(stall=stall("workers_cpu_bound", **no_gain))
    no_value = {"action": "decode fewer images", "predicted_speedup": 1.2}
    assert "; decode fewer images, predicted to give 1.2x steps/s; see" in said(stall=stall("x", **no_value))
    assert said(stall=stall("unknown")).endswith("waited for data (unknown); see: telemetry report /r")


def test_a_second_cause_has_its_share():
    both = stall("workers_cpu_bound")
    both["evidence"]["also"] = [{"cause": "gc_pause", "share_ratio": 0.123}]
    assert "(workers_cpu_bound, and gc_pause 12 %)" in said(stall=both)


def test_a_healthy_run_has_a_short_ledger():
    assert said(CALM) == (
        "telemetry: healthy: 1.0 % of the training loop waited for data; 100 steps in 2 min: 81 % compute, "
        "16 % evaluation, 1.6 % startup, 0.8 % data wait; see: telemetry report /r"
    )


def test_a_run_that_was_short_of_data_only_at_its_start_is_healthy():
    short = replace(OWN, steps=1, wait_seconds=10.0, compute_seconds=1.0, first_wait_seconds=10.0, exposed_seconds=10.0)
    assert "healthy: 0 % of the training loop waited for data after the first batch" in said(short)


def test_what_the_gpu_felt_is_not_claimed_without_events():
    line = said(replace(OWN, exposed_seconds=None, unmeasured="gpu_events is off"))
    assert "74 % of the training loop waited for data; how much of that the GPU felt was not measured" in line
    assert "gpu_events is off" in line


def test_a_wait_that_the_gpu_did_not_feel_is_not_in_the_line():
    assert "healthy: 3.0 %" in said(replace(OWN, exposed_seconds=3.0))


def test_unseen_batches_leave_it_open():
    line = said(replace(CALM, unseen_steps=90))
    assert "not known whether this run waits for data: the batches of 90 of 100 steps were not seen" in line
    assert "telemetry.watch()" in line and "healthy" not in line
    assert "not known whether" in said(replace(CALM, wait_seconds=0.0, exposed_seconds=0.0, first_wait_seconds=0.0))


def test_a_stall_without_starvation_is_named():
    assert "not starved, but it stalled (gc_pause); freeze the objects" in said(
        CALM, stall=stall("gc_pause", action="freeze the objects")
    )


def test_a_run_without_steps_says_so():
    assert said(replace(OWN, steps=0)) == "telemetry: no training step has ended; see: telemetry report /r"
    assert "in this process, which has started others" in said(replace(OWN, steps=0), children=2)


def test_a_stuck_run_says_in_what():
    hang = Hang("held", "worker_stuck", "data_wait", 65.0, "data.py:7 in read")
    assert said(CALM, hang=hang).startswith(
        "telemetry: stuck before its end: it was waiting for a batch for 65 s (worker_stuck) at data.py:7 in read; see"
    )
    saving = said(CALM, hang=replace(hang, cause="unknown", category="checkpoint", at=""))
    assert saving.startswith("telemetry: stuck before its end: it was in a checkpoint for 65 s (unknown); see")
    job = said(CALM, hang=hang, job_hang="rank 3 does not come", world_size=4)
    assert job.startswith("telemetry: hung before its end: rank 3 does not come; see")


def test_the_worst_rank_of_those_that_are_known_is_named():
    line = said(CALM, peers=(peer(5, 60.0, "workers_io_bound", 50.0), peer(6, 1.0)), world_size=8)
    assert "rank 5 spent about 60 % of its training loop waiting for data (workers_io_bound); see" in line
    every = said(OWN, peers=(peer(1, 80.0),), world_size=2)
    assert "every rank waits for data; the worst, rank 1, spent about 80 %" in every


def test_only_a_rank_of_this_node_is_known_to_have_ended():
    """Of other nodes only a few ranks are known at a time. What one of them said long ago is not how the run ended."""
    ticks = [
        (peer(1, 90.0), peer(2, 1.0), structs.replace(peer(77, 45.0), node="n2")),
        (peer(2, 2.0), structs.replace(peer(78, 1.0), node="n2")),
    ]
    paces = PeerPaces(iter(ticks).__next__)
    assert [paces.read() for _ in ticks] == ticks
    assert {pace.rank: pace.run_wait_seconds for pace in paces.of_run} == {1: 90.0, 2: 2.0, 78: 1.0}


def test_nothing_is_said_of_ranks_that_are_not_known():
    assert "healthy: rank 0 lost 1.0 % of its training loop" in said(CALM, world_size=8)
    unknown = structs.replace(peer(1, 90.0), run_exposed_seconds=None)
    assert "healthy: rank 0 lost 1.0 %" in said(CALM, peers=(unknown,), world_size=2)
    known = said(CALM, peers=(peer(1, 0.5),), world_size=2)
    assert "healthy: no rank lost more than 1.0 % of its training loop" in known


def test_a_rank_that_waits_for_a_slow_one_names_that_one():
    line = said(CALM, stall=stall("straggler", 40.0), peers=(peer(1, 1.0, "gc_pause", 10.0),), world_size=2)
    assert "not starved, but rank 1 stalled (gc_pause)" in line


def test_a_stall_of_its_own_is_named_before_a_longer_wait_for_a_rank():
    found = costliest([stall("straggler", 100.0), stall("checkpoint", 30.0), stall("straggler", 90.0)])
    line = said(CALM, stall=found, peers=(peer(1, 1.0, "gc_pause", 20.0),), world_size=2)
    assert "not starved, but rank 0 stalled (checkpoint)" in line


def test_the_folder_can_be_pasted_into_a_shell():
    assert said(tmp="/my runs/a").endswith("; see: telemetry report '/my runs/a'")
    assert "see:" not in said(tmp="")


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


def verdict(tmp_path, capfd) -> str:
    assert report(str(tmp_path / "run"), as_json=True) == 0
    return json.loads(capfd.readouterr().out)["verdict"]


def test_the_line_and_the_report_agree_on_a_starved_run(with_end_line, tmp_path, capfd):
    with_end_line(stall_window_seconds=1)
    train(Slow(0.01), 90)
    telemetry.stop()
    (line,) = ends(capfd)
    told = verdict(tmp_path, capfd)
    share, cause, workers, gain = re.fullmatch(
        r"telemetry: (\d+ %) of the training loop waited for data \((\w+)\); (\S+) is predicted to give ([\d.to ]+)x "
        r"steps/s; see: telemetry report .*/run",
        line,
    ).groups()
    assert told.startswith(f"Starved: rank 0 spent {share} of its training loop"), (line, told)
    assert f"Cause: {cause}; try {workers}, predicted {gain} times the steps per second" in told, (line, told)
    assert cause == "loader_on_training_thread"


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 60), (0.02, 3), (0.0, 1)])
def test_the_line_and_the_report_agree_on_other_runs(with_end_line, seconds, steps, tmp_path, capfd):
    with_end_line()
    train(Slow(seconds), steps, compute=0.02)
    telemetry.stop()
    (line,) = ends(capfd)
    told = verdict(tmp_path, capfd)
    share = re.search(r"([\d.]+ %) of the training loop waited for data", line)[1]
    assert f" {share} of its training loop" in told, (line, told)
    assert ("healthy" in line) is told.startswith("Healthy"), (line, told)


def test_a_line_for_each_stop_with_steps_and_none_for_others(with_end_line, capfd):
    for _ in range(2):
        with_end_line()
        train(Slow(0.0), 10, compute=0.0)
        telemetry.stop()
        telemetry.stop()
    with_end_line()
    telemetry.stop()
    assert len(ends(capfd)) == 2


def test_the_line_can_be_turned_off(with_end_line, capfd):
    with_end_line(end_line=False)
    train(Slow(0.0), 10)
    telemetry.stop()
    assert ends(capfd) == []


def test_other_ranks_write_no_line(with_end_line, monkeypatch, capfd):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with_end_line()
    train(Slow(0.0), 10)
    telemetry.stop()
    assert ends(capfd) == []
