"""Findings: what is found beside stalls reaches the log, the last line, and each form of the report."""

from __future__ import annotations

import json
import time
from typing import get_args

import msgspec
import pytest
import torch
from msgspec import structs

import telemetry
from telemetry.cli import main
from telemetry.diagnosis.findings import FINDINGS, Finding, by_weight
from telemetry.log.reader import load
from telemetry.model.records import Advice, FindingKind, HotLine
from tests.report_logs import START, line, summarize, text_of, totals, window, write
from tests.running_agent import log_lines

THREADS = Finding(
    kind="threads_oversubscribed",
    share_ratio=0.8,
    text="The training process computes with 32 threads on 2 cores",
    lines=(HotLine(file="/home/me/train.py", line=7, function="step", calls="Linear.forward", share_ratio=0.9),),
    advice=(Advice("compute with as many threads as there are cores", "OMP_NUM_THREADS", "2", 7.8, "32 threads"),),
)
GROWS = Finding(kind="step_growth", share_ratio=0.3, text="Steps take 133 ms now, and took 13 ms at first")


def run_with_findings(tmp_path):
    """A run that computes. Two findings are told, each several times."""
    agent = telemetry.start(run_dir=tmp_path, port="off", start_line=False, interval_seconds=0.1, end_line=True)
    for _ in torch.utils.data.DataLoader(range(200)):
        time.sleep(0.002)
    for share in (0.2, 0.21, 0.3):
        agent.findings.tell(structs.replace(GROWS, share_ratio=share))
    agent.findings.tell(THREADS)
    agent.findings.tell(structs.replace(THREADS, text="The training process computes with 33 threads on 2 cores"))
    telemetry.stop()
    return agent


def test_a_finding_is_logged_when_it_is_new_and_when_it_has_changed(tmp_path):
    run = run_with_findings(tmp_path)
    found = [each for each in log_lines(run) if each["event"] == "finding"]
    told = [(each["kind"], each["share_ratio"], each["text"].split()[5]) for each in found]
    assert told == [
        ("step_growth", 0.2, "and"), ("step_growth", 0.3, "and"), ("threads_oversubscribed", 0.8, "32"),
        ("threads_oversubscribed", 0.8, "33"),
    ]  # fmt: skip
    assert found[2]["lines"] == [msgspec.to_builtins(THREADS.lines[0])]
    assert found[2]["advice"] == [structs.asdict(THREADS.advice[0])]


def test_the_last_line_and_the_report_say_it(tmp_path, capfd):
    run = run_with_findings(tmp_path)
    said = (
        "Not starved, but slower than need be: the training process computes with 33 threads on 2 cores.\n"
        "  cause:  threads_oversubscribed\n"
        "  do:     set OMP_NUM_THREADS=2: compute with as many threads as there are cores\n"
        "  expect: 7.8 times the steps per second"
    )
    assert main(["report", str(run.run_dir)]) == 0
    out, err = capfd.readouterr()
    assert said in out
    in_one_line = (
        "2 cores. Cause: threads_oversubscribed. Do: set OMP_NUM_THREADS=2: compute with as many threads as there are "
        f"cores. Expect: 7.8 times the steps per second; see: telemetry report {run.run_dir}"
    )
    assert in_one_line in err, "the loop was too short for a table"
    assert "found on rank 0: threads_oversubscribed (80 % of the time)" in out
    assert "90 % in Linear.forward at train.py:7" in out
    assert out.index("threads_oversubscribed") < out.index("step_growth")
    assert main(["report", str(run.run_dir), "--json"]) == 0
    first, second = json.loads(capfd.readouterr().out)["findings"]
    assert first == structs.asdict(THREADS) | {
        "text": "The training process computes with 33 threads on 2 cores",
        "lines": [msgspec.to_builtins(THREADS.lines[0])],
        "advice": [structs.asdict(THREADS.advice[0])],
    }
    assert (second["kind"], second["share_ratio"], second["rank"]) == ("step_growth", 0.3, 0)


def test_the_newest_line_of_a_kind_counts_and_damaged_ones_do_not(tmp_path):
    run_of = [line("run_start", **START), window(wait=1.0, compute=99.0, steps=100)]
    lines = [
        line("finding", kind="step_growth", text="old", advice=[{"action": "a"}]),
        line("finding", kind="step_growth", text="new"),
        line("finding", kind="step_growth", text="damaged", share_ratio=7),
        line("finding", kind="of_a_newer_version", text="other"),
        line("finding", kind="gil_held"),
    ]
    write(tmp_path, 0, *run_of, *lines)
    processes = load(tmp_path)
    (found,) = summarize(processes)["findings"]
    assert (found["text"], found["share_ratio"], *found["advice"]) == ("new", None)
    assert "found on rank 0: step_growth\n  new" in text_of(processes)


def test_the_finding_that_costs_most_is_first():
    held = structs.replace(GROWS, share_ratio=0.5)
    promised = Finding(kind="gil_held", text="t", advice=(Advice("a", predicted_speedup=3.0),))
    assert sorted([GROWS, held, promised, THREADS], key=by_weight) == [THREADS, promised, held, GROWS]


def test_each_kind_is_documented():
    assert set(FINDINGS) == set(get_args(FindingKind))
    assert all(text.endswith(".") for text in FINDINGS.values())


def test_all_advice_stands_in_one_list_the_largest_gain_first_and_once_for_each_setting(tmp_path):
    def advice(setting, value, gain):
        return dict(action=f"set {setting}", setting=setting, value=value, predicted_speedup=gain, because="why")

    lost = [dict(evidence={"lost_seconds": {"workers_cpu_bound": seconds}}) for seconds in (5.0, 50.0)]
    stalls = [
        line("stall_close", cause="workers_cpu_bound", opened=f"t{n}", closed=f"u{n}", advice=[advice("num_workers", n, 1.5)], **more)
        for n, more in zip("37", lost, strict=True)
    ]  # fmt: skip
    found = line("finding", kind="threads_oversubscribed", text="t", advice=[advice("OMP_NUM_THREADS", "2", 7.8)])
    sums = dict(wait=50.0, compute=50.0, steps=100)
    ended = line("run_end", **totals(**sums))
    write(tmp_path, 0, line("run_start", **START), window(**sums), *stalls, found, ended)
    told = summarize(load(tmp_path))["advice"]
    assert [(each["setting"], each["value"], each["about"]) for each in told] == [
        ("OMP_NUM_THREADS", "2", "against threads_oversubscribed"),
        ("num_workers", "7", "against workers_cpu_bound"),
    ]
    text = text_of(load(tmp_path))
    assert (
        text.index("  try OMP_NUM_THREADS=2: set") < text.index("  try num_workers=7: set") < text.index("\nrank  node")
    )
    assert "num_workers=3" not in text


@pytest.mark.parametrize(("share", "first"), [(0.7, "give it cores"), (0.3, "use a worker")])
def test_a_thread_without_a_core_for_most_of_the_time_is_behind_any_wait(tmp_path, share, first):
    worker = dict(action="use a worker", setting="num_workers", value="1", predicted_speedup=1.8, because="why")
    stall = line("stall_open", cause="loader_on_training_thread", opened="t", advice=[worker],
                 evidence={"lost_seconds": {"loader_on_training_thread": 50.0}})  # fmt: skip
    cores = worker | dict(action="give it cores", setting=None, value=None, predicted_speedup=1 / (1 - share))
    found = line("finding", kind="cores_missing", text="It has no core", share_ratio=share, advice=[cores])
    sums = dict(wait=50.0, compute=50.0, steps=100)
    write(tmp_path, 0, line("run_start", **START), window(**sums), stall, found, line("run_end", **totals(**sums)))
    report = summarize(load(tmp_path))
    assert report["advice"][0]["action"] == first
    assert len(report["advice"]) == (1 if share > 0.5 else 2)
    assert ("It has no core" in report["verdict"]) == (share > 0.5)


def test_a_setting_that_gains_enough_comes_before_a_change_of_the_code_and_is_what_the_verdict_says(tmp_path):
    """The line may be an augmentation that has to be random."""
    settings = [
        dict(action="use workers", setting="num_workers", value="2", predicted_speedup=gain) for gain in (1.5, 1.1)
    ]
    line_of = dict(action="take burn at train.py:3 out of the loader", predicted_speedup=20.0)
    sums = dict(wait=50.0, compute=50.0, steps=100)
    for rank, setting in enumerate(settings):
        folder = tmp_path / str(rank)
        folder.mkdir()
        stall = line("stall_open", cause="loader_on_training_thread", opened="t", advice=[setting, line_of])
        write(folder, 0, line("run_start", **START), window(**sums), stall, line("run_end", **totals(**sums)))
    first, second = (summarize(load(tmp_path / str(rank))) for rank in (0, 1))
    assert [each["setting"] for each in first["advice"]] == ["num_workers", None]
    assert "Do: set num_workers=2: use workers. Expect: 1.5 times" in first["verdict"]
    assert [each["setting"] for each in second["advice"]] == [None, "num_workers"]
    assert "Do: take burn" in second["verdict"]


def test_what_is_behind_a_wait_takes_the_place_of_the_advice_for_the_wait(tmp_path):
    less = dict(action="send less data", setting=None, value=None, predicted_speedup=1.6, because="why")
    stall = line("stall_open", cause="batch_transfer", opened="t", evidence={"lost_seconds": {"batch_transfer": 50.0}},
                 advice=[less])  # fmt: skip
    held = line("finding", kind="gil_held", text="The thread metrics holds the GIL", share_ratio=0.4,
                advice=[less | dict(action="do it in a process", predicted_speedup=1.3)])  # fmt: skip
    sums = dict(wait=50.0, compute=50.0, steps=100)
    write(tmp_path, 0, line("run_start", **START), window(**sums), stall, held, line("run_end", **totals(**sums)))
    report = summarize(load(tmp_path))
    assert "Cause: batch_transfer. The thread metrics holds the GIL. Do: do it in a process" in report["verdict"]
    assert [each["action"] for each in report["advice"]] == ["do it in a process"]
    assert [each["action"] for each in report["stalls"][0]["advice"]] == ["send less data"]
