"""Evaluations and their own loader: waits and compute are told apart, and a finding has what another setting brings."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import telemetry
from telemetry.agent.evaluations import EvaluationMonitor
from telemetry.cli import main
from telemetry.diagnosis.evaluation import EvaluationTimes, evaluation_finding, small_batches
from telemetry.diagnosis.hot_lines import LineShare
from telemetry.loop.evaluation_waits import EvaluationWaits
from telemetry.model.totals import Conditions, Tick, Totals
from telemetry.seams.loaders import BatchSource
from telemetry.seams.ring import BEGINS, S_COMPUTE, S_DATA_WAIT, S_EVALUATION, STEP, code
from telemetry.sources import sampler
from tests.report_logs import START, line, totals, write
from tests.running_agent import log_lines, wait_for

ON_THREAD = {"num_workers": 0}
RUN = Totals(ledger_seconds={"data_wait": 1.0, "compute": 17.0, "evaluation": 37.0})


def times(**changed):
    """Ten evaluations of 100 batches: 32 ms of waiting and 5 ms of compute for each."""
    usual = {
        "kind": "training_thread", "settings": ON_THREAD, "evaluations": 10, "batches": 1000, "seconds": 37.0,
        "wait_seconds": 32.0, "cpu_ratio": 0.1, "cores": 2.0, "place": "train.py:49",
    }  # fmt: skip
    return EvaluationTimes(**usual | changed)


# -- what is found -----------------------------------------------------------------------------------------------------


def test_a_loader_without_workers_is_found_with_its_line_and_prediction():
    fetch = LineShare("/home/me/train.py", 23, "__getitem__", None, 0.97, 0.1)
    finding = evaluation_finding(times(), RUN, [fetch])
    assert "3.20 s are waits for its own loader (num_workers=0, read at train.py:49)" in finding.text
    assert "500.0 ms compute" in finding.text
    assert "67 % of the time" in finding.text
    assert "97 % of each wait for a batch is __getitem__ at train.py:23" in finding.text
    (advice,) = finding.advice
    assert advice.setting == "num_workers"
    assert int(advice.value) >= 4
    assert "persistent_workers=True" in advice.action
    assert advice.predicted_speedup == pytest.approx(55 / (18 + 6), rel=0.1)
    assert finding.share_ratio == pytest.approx(1 - 1 / advice.predicted_speedup, abs=0.01)


def test_fetches_that_compute_gain_what_the_cores_give():
    on_two = evaluation_finding(times(cpu_ratio=1.0), RUN).advice[0].predicted_speedup
    assert 1.2 < on_two < 1.6
    assert evaluation_finding(times(cpu_ratio=1.0, cores=8.0), RUN).advice[0].predicted_speedup > 1.9
    assert evaluation_finding(times(cpu_ratio=1.0, cores=1.0), RUN) is None, "there is no core for a worker"
    (advice,) = evaluation_finding(times(cpu_ratio=None), RUN).advice
    assert (advice.setting, advice.predicted_speedup) == ("num_workers", None), (
        "without the CPU time there is no number"
    )
    few = {"num_workers": 1, "persistent_workers": True}
    (advice,) = evaluation_finding(times(kind="workers", settings=few), RUN).advice
    assert (advice.setting, advice.predicted_speedup) == ("num_workers", None), "nor for workers that are too few"


def test_workers_that_start_in_each_evaluation_are_to_be_kept():
    anew = {"num_workers": 4, "persistent_workers": False}
    finding = evaluation_finding(times(kind="workers", settings=anew, wait_seconds=1.0, start_seconds=30.0), RUN)
    (advice,) = finding.advice
    assert advice.typed == "persistent_workers=True"
    assert advice.predicted_speedup == pytest.approx(55 / 26, rel=0.1)
    assert "num_workers=4" in finding.text
    slow_first = times(kind="workers", settings=anew, batches=20, seconds=37.0, wait_seconds=1.0, start_seconds=30.0)
    assert evaluation_finding(slow_first, RUN).advice[0].predicted_speedup is None, "or it is the fetch"


@pytest.mark.parametrize(
    "quiet",
    [
        {"wait_seconds": 2.0},  # it computes
        {"seconds": 3.7, "wait_seconds": 3.2},  # it is short
        {"batches": 5},
    ],
)
def test_a_validation_that_is_small_or_computes_is_no_finding(quiet):
    run = Totals(ledger_seconds=RUN.ledger_seconds | {"evaluation": quiet.get("seconds", 37.0), "compute": 60.0})
    assert evaluation_finding(times(**quiet), run) is None


SMALL = {"kind": "workers", "settings": {"num_workers": 1}, "wait_seconds": 1.0, "batch_size": 1, "trained_size": 16}


def test_an_evaluation_of_one_sample_after_another_is_found_with_its_line():
    run = Totals(steps=600, ledger_seconds={"data_wait": 1.0, "compute": 18.0, "evaluation": 37.0})
    line = LineShare("/home/me/train.py", 23, "main", None, 0.9, 0.1)
    finding = small_batches(times(**SMALL), run, [line])
    assert "Their batches have 1 sample and compute for 36.0 ms" in finding.text
    assert "those of the training have 16 and compute for 30.0 ms" in finding.text
    assert "90 % of an evaluation's compute is main at train.py:23" in finding.text
    (advice,) = finding.advice
    assert (advice.typed, advice.predicted_speedup) == ("batch_size=16", None)
    assert "a sample takes 36.0 ms in an evaluation and 1.9 ms in a training step" in advice.because


@pytest.mark.parametrize(
    "quiet",
    [
        {"batch_size": 16},
        {"batch_size": None},
        {"trained_size": None},
        {"batch_size": 8, "seconds": 16.0},  # a sample takes no longer than in a training step
    ],
)
def test_an_evaluation_whose_batches_are_large_enough_is_no_finding(quiet):
    run = Totals(steps=600, ledger_seconds={"data_wait": 1.0, "compute": 18.0, "evaluation": 37.0})
    assert small_batches(times(**SMALL | quiet), run) is None


# -- how it is measured ------------------------------------------------------------------------------------------------

IN_EVALUATION = code(S_EVALUATION, S_EVALUATION)


def test_the_spans_of_an_evaluation_are_waits_starts_and_the_rest():
    waits, own, workers = (
        EvaluationWaits(),
        BatchSource("training_thread", ON_THREAD),
        BatchSource("workers", {"num_workers": 2}),
    )
    waits.fold([
        (0, 10, STEP, None),
        (20, 20, IN_EVALUATION, None),  # it begins
        (20, 21, IN_EVALUATION, None),  # iter(loader)
        (21, 31, IN_EVALUATION, own),
        (33, 43, IN_EVALUATION, own),
        (45, 46, code(S_EVALUATION, S_COMPUTE), None),  # its end
        (50, 60, IN_EVALUATION | BEGINS, workers),
        (60, 90, IN_EVALUATION, workers),
        (95, 97, IN_EVALUATION, workers),
        (99, 104, code(S_EVALUATION, S_COMPUTE), None),
        (110, 200, code(S_DATA_WAIT, S_COMPUTE), own),
    ])  # fmt: skip
    first, second = waits.loaders.values()
    assert (first.kind, first.batches, first.iterations, first.wait_ns, first.start_ns) == (
        "training_thread",
        2,
        1,
        21,
        0,
    )
    assert (second.batches, second.iterations, second.wait_ns, second.start_ns) == (2, 1, 2, 45)
    assert waits.costliest is second


def test_one_evaluation_before_the_training_is_not_judged_until_the_end():
    waits = EvaluationWaits()
    monitor = EvaluationMonitor(waits, SimpleNamespace(run={}))
    source = BatchSource("training_thread", ON_THREAD)
    waits.fold([(n * 40_000_000, n * 40_000_000 + 32_000_000, IN_EVALUATION, source) for n in range(100)])
    totals = Totals(wall_seconds=4.0, ledger_seconds={"evaluation": 4.0}, process_cpu_seconds=0.4)
    assert monitor.tick(Tick(totals, Conditions(cores=2.0)), 1) is None
    assert monitor.tick(Tick(totals, Conditions(cores=2.0)), 2).kind == "evaluation_loader"
    assert monitor.judge(totals) is not None


def test_the_cpu_time_of_an_evaluation_is_known_from_a_tick_that_it_fills():
    waits = EvaluationWaits()
    monitor = EvaluationMonitor(waits, SimpleNamespace(run={}))
    source = BatchSource("training_thread", ON_THREAD)
    waits.fold([(n * 40_000_000, n * 40_000_000 + 32_000_000, IN_EVALUATION, source) for n in range(100)])
    predicted = []
    for wall, evaluated, cpu in ((1.0, 0.0, 1.0), (2.0, 0.5, 2.0), (5.5, 4.0, 2.4)):
        ledger = {"compute": wall - evaluated, "evaluation": evaluated}
        totals = Totals(wall_seconds=wall, ledger_seconds=ledger, process_cpu_seconds=cpu)
        monitor.tick(Tick(totals, Conditions(cores=2.0)), 0)
        finding = monitor.judge(totals)
        predicted.append(finding and finding.advice[0].predicted_speedup)
    assert predicted[:2] == [None, None], "half of the tick was training"
    assert predicted[2] > 1.5


class Files(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if self.seconds:  # to sleep for no time would give the core to others
            time.sleep(self.seconds)
        return torch.full((4,), float(index))


def ended(agent) -> tuple[list[dict], list[dict]]:
    """Ends the run; its log, and the findings about loaders of evaluations in it."""
    telemetry.stop()
    lines = log_lines(agent)
    return lines, [each for each in lines if each["event"] == "finding" and each["kind"] == "evaluation_loader"]


@pytest.mark.parametrize("quietly", [False, True])
def test_a_real_validation(agent, quietly):
    """One reads slowly, the other has its rows in memory and computes."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        for batch in DataLoader(Files(0.0), batch_size=4):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
        with torch.no_grad():
            for batch in DataLoader(Files(0.0 if quietly else 0.01), batch_size=4):
                model(batch)
                time.sleep(0.05 if quietly else 0.002)
    lines, found = ended(agent)
    epochs = lines[-1]["epochs"]
    assert epochs["count"] == 3
    assert epochs["seconds"] > (0.45 if quietly else 0.75), "an epoch has its evaluation"
    if quietly:
        assert not found
        return
    assert "num_workers=0" in found[-1]["text"]
    assert found[-1]["advice"][0]["setting"] == "num_workers"
    assert found[-1]["advice"][0]["predicted_speedup"] > 1.2


def score(model, batch):
    time.sleep(0.02)
    return model(batch)


def test_a_real_validation_of_one_sample_after_another(agent, monkeypatch):
    monkeypatch.setattr(sampler, "_CALM", ((float("inf"), 0.05),))
    monkeypatch.setattr(sampler, "_MAX_SHARE", 1.0)
    model = torch.nn.Linear(4, 1)
    training = DataLoader(Files(0.0), batch_size=10, num_workers=1, persistent_workers=True)
    validation = DataLoader(Files(0.0), batch_size=1, num_workers=1, persistent_workers=True)
    for _ in range(4):
        for batch in training:
            model(batch).sum().backward()
            time.sleep(0.01)
        with torch.no_grad():
            for batch in validation:
                score(model, batch)
    _, found = ended(agent)
    assert found[-1]["advice"][0]["setting"] == "batch_size"
    assert found[-1]["lines"][0]["line"] == score.__code__.co_firstlineno + 1


def slow_start(_worker):
    time.sleep(0.4)


def test_a_real_validation_whose_workers_start_anew(agent):
    """The wait for the first batch is seen, although it is the first of its reading of the ring."""
    model = torch.nn.Linear(4, 1)
    for _ in range(2):
        for batch in DataLoader(Files(0.0), batch_size=4):
            model(batch).sum().backward()
            time.sleep(0.01)
        with torch.no_grad():
            for batch in DataLoader(Files(0.0), batch_size=4, num_workers=1, worker_init_fn=slow_start):
                model(batch)
    assert wait_for(lambda: agent.accounting.evaluations.costliest.batches == 30)
    waits = agent.accounting.evaluations.costliest
    assert waits.iterations == 2
    assert waits.start_ns >= 0.7e9
    _, found = ended(agent)
    assert found[-1]["advice"][0]["setting"] == "persistent_workers"


def test_the_report_says_how_long_an_epoch_takes_and_the_trend(tmp_path, capsys):
    ended = totals(wait=1.0, compute=99.0, steps=1000) | {
        "epochs": {"count": 9, "seconds": 5.5},
        "step_trend": {"kind": "grows", "before_seconds": 0.02, "after_seconds": 0.024, "loop_seconds": 300.0},
    }
    write(tmp_path, 0, line("run_start", 0, **START, world_size=1), line("run_end", 0, **ended))
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "epochs: 9 of 5.50 s each\n" in text
    assert "steps: they became slower and slower in 5 min of training: 20.0 ms at first, 24.0 ms at last" in text
    assert main(["report", str(tmp_path), "--json"]) == 0
    rank = json.loads(capsys.readouterr().out)["ranks"][0]
    assert rank["epochs"] == ended["epochs"]
    assert rank["step_trend"] == ended["step_trend"]
