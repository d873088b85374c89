"""What a line is predicted to cost: the two what-ifs, and the sentence of the verdict."""

from __future__ import annotations

import dataclasses

import pytest

from telemetry.diagnosis import lines as work
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.lines import LineShare, line_advice, line_verdict
from tests.report_logs import START, line, totals, window, write
from tests.slice_cases import CASES, a_slice, with_workers
from tests.slices import evidence_over


def a_line(share: float, cpu_share: float | None = None, error: float = 0.0) -> LineShare:
    cpu_share = share if cpu_share is None else cpu_share
    return LineShare("/home/me/train.py", 42, "load", "Image.resize", share, cpu_share, error)


ONE_WORKER = evidence_over(
    [with_workers(busy=1.0, cpu=1.0, workers=1, fetches=10, steps=10, wait=0.6, compute=0.4, cores=8.0)]
)
"""Ten fetches of 100 ms in a second, with 40 ms of compute each."""


def test_the_what_ifs_of_a_fetch():
    removed, halved = line_advice(ONE_WORKER, work.FETCH, a_line(0.5), cause="workers_cpu_bound")
    assert "Image.resize at train.py:42" in removed.action
    assert removed.predicted_speedup == pytest.approx(2.0)  # 50 ms a fetch, 40 ms of compute
    assert halved.predicted_speedup == pytest.approx(1.33)
    assert removed.because == "50 % of each fetch is this line: 50.0 ms of 100.0 ms"


def test_a_fetch_cannot_become_faster_than_the_compute():
    removed, _ = line_advice(ONE_WORKER, work.FETCH, a_line(0.9), cause="workers_cpu_bound")
    assert removed.predicted_speedup == pytest.approx(2.5)


def test_a_line_that_waits_leaves_the_cpu_time_to_the_cores():
    """On one core, with 100 ms of CPU time for compute and fetch, a line that only waits cannot help further."""
    part = with_workers(
        busy=1.0,
        cpu=0.6,
        blocked=0.4,
        workers=1,
        fetches=10,
        steps=10,
        wait=0.6,
        compute=0.4,
        process_cpu=0.4,
        cores=1.0,
    )
    waits, computes = (a_line(0.4, 0.0), a_line(0.4, 0.66))
    evidence = evidence_over([part])
    advice = [line_advice(evidence, work.FETCH, each, cause="workers_io_bound") for each in (waits, computes)]
    assert advice[0] == ()  # 60 ms of fetch and 40 ms of compute still take the core for 100 ms
    assert advice[1][0].predicted_speedup > 1.5


def test_the_verdict_says_what_remains():
    assert line_verdict(ONE_WORKER, work.FETCH, a_line(0.61), cause="workers_cpu_bound") == (
        "61 % of each fetch is Image.resize at train.py:42; without it a fetch takes 39.0 ms, predicted 2.5 times the "
        "steps per second"
    )


def test_few_samples_predict_a_range():
    """In a step of 100 ms, 80 % may be 70 to 90 % as well."""
    line, evidence = a_line(0.8, error=0.05), evidence_over([CASES["gc_pause"]])
    removed, halved = line_advice(evidence, work.STEP, line, cause="gc_pause")
    low, high = (line_advice(evidence, work.STEP, a_line(share), cause="gc_pause")[0] for share in (0.7, 0.9))
    assert (removed.predicted_low, removed.predicted_speedup) == (low.predicted_speedup, high.predicted_speedup)
    assert (halved.predicted_low, halved.predicted_speedup) == (None, pytest.approx(1.67, abs=0.01))
    text = f"predicted {low.predicted_speedup:g} to {high.predicted_speedup:g} times the steps per second"
    assert line_verdict(evidence, work.STEP, line, cause="gc_pause").endswith(text)


def test_a_line_may_be_all_of_a_step():
    removed, _ = line_advice(evidence_over([CASES["gc_pause"]]), work.STEP, a_line(0.98, error=0.02), cause="gc_pause")
    assert 1 < removed.predicted_low < removed.predicted_speedup


def test_a_line_of_which_all_samples_are_has_its_what_ifs():
    """It takes at least 95 % of a step."""
    evidence, line = evidence_over([CASES["gc_pause"]]), a_line(1.0, error=0.025)
    removed, halved = line_advice(evidence, work.STEP, line, cause="gc_pause")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(20.0), pytest.approx(40.0))
    assert halved.predicted_speedup == pytest.approx(1.95, abs=0.01)


def fetches(number: int) -> Evidence:
    """So many in a second, on the CPU, of one worker."""
    in_all = dict(fetches=number, steps=number, wait=0.95, compute=0.05, cores=8.0, process_cpu=0.05)
    return evidence_over([with_workers(busy=1.0, cpu=1.0, workers=1, **in_all)])


SHORT_FETCHES = fetches(20)


def held(share: float, gil_ratio: float, rest_gil_ratio: float, error: float = 0.0) -> LineShare:
    """A line of fetches that hold the GIL for these parts of the time: in the line, and in the rest."""
    return dataclasses.replace(a_line(share, error=error), gil_ratio=gil_ratio, rest_gil_ratio=rest_gil_ratio)


def test_python_code_that_remains_takes_turns_with_the_sending_of_batches():
    """Without the line a fetch takes 10 ms, or 15. With half of it, sending still has time of its own."""
    line = held(0.8, 0.0, 1.0)
    removed, _ = line_advice(SHORT_FETCHES, work.FETCH, line, cause="workers_cpu_bound")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(50 / 15, abs=0.01), pytest.approx(5.0))
    _, halved = line_advice(fetches(50), work.FETCH, line, cause="workers_cpu_bound")
    assert (halved.predicted_low, halved.predicted_speedup) == (None, pytest.approx(1 / 0.6, abs=0.01))


@pytest.mark.parametrize(
    "line",
    [held(0.8, 1.0, 1.0), held(0.8, 0.0, 0.0), held(0.4, 0.0, 1.0)],
    ids=["they take turns already", "what remains releases it", "much remains"],
)
def test_else_sending_makes_no_range(line):
    removed, _ = line_advice(SHORT_FETCHES, work.FETCH, line, cause="workers_cpu_bound")
    assert removed.predicted_low is None
    assert removed.predicted_speedup == pytest.approx(1 / (1 - line.share), abs=0.01)


def test_few_samples_and_the_sending_of_batches_make_one_range():
    line = held(0.8, 0.0, 1.0, error=0.05)
    removed, _ = line_advice(SHORT_FETCHES, work.FETCH, line, cause="workers_cpu_bound")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(50 / 20, abs=0.01), pytest.approx(10.0))


def test_a_line_that_called_no_library_has_its_function():
    own = dataclasses.replace(a_line(0.3), calls=None)
    assert line_verdict(ONE_WORKER, work.FETCH, own, cause="workers_cpu_bound").startswith(
        "30 % of each fetch is load at"
    )


def test_the_what_ifs_of_the_training_threads_own_fetch():
    evidence = evidence_over([a_slice(source="training_thread", wait=0.6, compute=0.4)])
    removed, halved = line_advice(evidence, work.WAIT, a_line(0.5), cause="loader_on_training_thread")
    assert removed.predicted_speedup == pytest.approx(1 / 0.7, abs=0.01)
    assert halved.predicted_speedup == pytest.approx(1 / 0.85, abs=0.01)


def test_the_what_ifs_of_a_checkpoint():
    evidence = evidence_over([CASES["checkpoint"]])
    removed, _ = line_advice(evidence, work.CHECKPOINT, a_line(1.0), cause="checkpoint")
    whole = evidence.loop_and_checkpoint_seconds
    assert removed.predicted_speedup == pytest.approx(whole / (whole - evidence.checkpoint_seconds), abs=0.01)


@pytest.mark.parametrize(("cause", "part"), CASES.items(), ids=[*CASES])
def test_no_line_is_predicted_to_slow_a_run_down(cause, part):
    evidence = evidence_over([part])
    for kind in (work.FETCH, work.WAIT, work.SAMPLER, work.STEP, work.CHECKPOINT):
        for share in (0.05, 0.5, 1.0):
            advice = line_advice(evidence, kind, a_line(share), cause=cause.split(",")[0])
            assert all(each.predicted_speedup >= 1 for each in advice)
            assert line_verdict(evidence, kind, a_line(share), cause=cause.split(",")[0])


def test_ranks_that_wait_have_the_lines_of_the_slow_one(tmp_path):
    from telemetry.report.logs import load
    from tests.report_logs import summarize

    code = {"file": "/home/me/train.py", "line": 7, "function": "main", "calls": None, "share_ratio": 0.8}
    said = {"lines": [code], "lines_of": "step", "line_verdict": "80 % of each step of rank 1 is main at train.py:7"}
    run = window(seconds=[0.1] * 9, wait=1, compute=9, steps=9)
    opened = {"opened": "2026-01-01T00:00:05.000Z", "cause": "straggler", "evidence": {"straggler_rank": 1}}
    write(tmp_path, 0, line("run_start", **START), run, line("stall_open", **opened))
    of_slow = line("straggler_lines", 1, evidence=said)
    end = line("run_end", 1, **totals(wait=0, compute=10, steps=9))
    write(tmp_path, 1, line("run_start", 1, **START), of_slow, end)
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert stall["rank"] == 0
    assert stall["evidence"]["lines"] == [code]
