"""Where the measurements do not tell what storage can do, advice predicts a range."""

from __future__ import annotations

import dataclasses
import json

import pytest

from telemetry.cli import main
from telemetry.diagnosis.advice import advise
from telemetry.diagnosis.verdict import recommended
from telemetry.records import Advice
from tests.advice_cases import first
from tests.report_logs import START, line, totals, write
from tests.slice_cases import a_slice, with_workers
from tests.slices import evidence_over

WORKERS = with_workers(
    busy=0.99, cpu=0.05, blocked=0.94, fetches=10, wait=0.8, compute=0.2, workers=1, process_cpu=0.2, cores=2.0,
    host_cores=2, host_cpu_ratio=0.3,
)  # fmt: skip
"""A step takes 100 ms, 20 of them on the CPU. Its fetch takes 5 ms of a core. Other processes use 0.35 cores."""

NO_WORKERS = a_slice(
    source="training_thread", wait=0.8, compute=0.2, process_cpu=0.2, cores=2.0, host_cores=2, host_cpu_ratio=0.3,
    timed_fetch=1.0, timed_fetch_cpu=0.0,
)  # fmt: skip


@pytest.mark.parametrize(("cause", "part"), [("workers_io_bound", WORKERS), ("loader_on_training_thread", NO_WORKERS)])
def test_storage_of_this_machine_may_need_cores_for_the_pace(cause, part):
    evidence = evidence_over([part])
    others = evidence.cores_of_others
    advice = first(cause, part)
    assert advice.predicted_low is not None
    # With all others at the new pace, the two cores are the limit: what they use in 100 ms comes to each step.
    step = 100 / advice.predicted_low
    assert 2 * step == pytest.approx(100 * others + 25, abs=3)
    assert 1 < advice.predicted_low < advice.predicted_speedup


@pytest.mark.parametrize(
    ("cause", "part"),
    [
        ("workers_io_bound", dataclasses.replace(WORKERS, cores=64.0, host_cores=64, host_cpu_ratio=0.01)),
        ("workers_io_bound", dataclasses.replace(WORKERS, host_cores=0, host_cpu_ratio=None)),
        ("loader_on_training_thread", dataclasses.replace(NO_WORKERS, timed_fetch_cpu=0.8)),
        ("workers_cpu_bound", WORKERS),
    ],
)
def test_there_is_no_range_without_reason(cause, part):
    """Cores are plenty, others are not known, or fetches use the CPU: storage is not the question."""
    assert first(cause, part).predicted_low is None


def test_the_low_end_is_no_slow_down():
    busy = dataclasses.replace(WORKERS, host_cpu_ratio=0.9, process_cpu=0.9)
    (advice, *_) = advise("workers_io_bound", evidence_over([busy]))
    assert advice.predicted_low is None or advice.predicted_low >= 1.0


# -- the report ------------------------------------------------------------------------------------------------

RANGE = dict(action="use more workers", setting="num_workers", value="8", predicted_speedup=4.1, because="why")


def reported(tmp_path, capsys, advice, *options):
    stall = line("stall_open", cause="workers_io_bound", first_step=1, evidence={}, advice=[advice])
    ended = line("run_end", **totals(wait=50.0, compute=50.0, steps=100))
    write(tmp_path, 0, line("run_start", **START), stall, ended)
    assert main(["report", str(tmp_path), *options]) == 0
    return capsys.readouterr().out


def test_the_report_writes_the_range(tmp_path, capsys):
    text = reported(tmp_path, capsys, RANGE | {"predicted_low": 1.0})
    assert "try num_workers=8: use more workers, predicted 1 to 4.1 times the steps per second (why)" in text
    assert text.count("predicted 1 to 4.1 times the steps per second") == 2, "the verdict has it too"


def test_the_page_writes_the_range(tmp_path, capsys):
    page = tmp_path / "page.html"
    reported(tmp_path, capsys, RANGE | {"predicted_low": 1.0}, "--html", str(page))
    assert "<strong>1 to 4.1×</strong> <span>steps per second, predicted</span>" in page.read_text()


@pytest.mark.parametrize("low", [None, 4.1, "much"])
def test_without_a_range_the_report_writes_one_factor(tmp_path, capsys, low):
    text = reported(tmp_path, capsys, RANGE | {"predicted_low": low})
    assert "use more workers, predicted 4.1 times the steps per second (why)" in text


def test_the_report_as_json_has_both_ends(tmp_path, capsys):
    told = json.loads(reported(tmp_path, capsys, RANGE | {"predicted_low": 1.0}, "--json"))
    assert told["stalls"][0]["advice"][0] == RANGE | {"predicted_low": 1.0}


def test_an_old_log_has_no_range(tmp_path, capsys):
    told = json.loads(reported(tmp_path, capsys, RANGE, "--json"))
    assert told["stalls"][0]["advice"][0]["predicted_low"] is None


def test_a_range_alone_is_no_prediction():
    assert recommended({"predicted_low": 1.2}).gain == ""
    assert Advice("a", None, None, 2.0, "b").predicted_low is None
