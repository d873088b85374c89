"""The verdict of the report: one sentence on what the run lost most to."""

from __future__ import annotations

import pytest

from telemetry.report.log_reader import load
from telemetry.report.report_text import render
from telemetry.report.summary import summarize
from tests.report_logs import START, line, totals, write

VERDICTS = {
    "starved alone": ([dict(wait=8, compute=2)], "Starved: rank 0 spent 80 %", "5.0 times"),
    "one of four": (
        [dict(wait=1, compute=9)] * 3 + [dict(wait=6, compute=4)],
        "Starved: rank 3",
        "the other ranks wait for it",
    ),
    "all of them": (
        [dict(wait=6, compute=4), dict(wait=7, compute=3)],
        "every rank waits for data; the worst, rank 1",
        "",
    ),
    "healthy": ([dict(wait=0.3, compute=9.7)], "Healthy: no rank lost more than 3.0 %", ""),
    "not seen": ([dict(wait=0.0, compute=10)], "Not known whether this run waits for data", "telemetry.watch()"),
    "not measured": ([dict(wait=5, compute=5, exposed=None)], "Rank 0 spent 50 %", "was not measured"),
    "hidden": ([dict(wait=5, compute=5, exposed=0.1)], "Healthy", ""),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(tmp_path, name):
    ranks, *wanted = VERDICTS[name]
    for rank, spent in enumerate(ranks):
        write(tmp_path, rank, line("run_start", rank, **START), line("run_end", rank, **totals(steps=10, **spent)))
    verdict = summarize(load(tmp_path))["verdict"]
    assert all(part in verdict for part in wanted), verdict


def test_a_stall_that_is_no_starvation_is_in_the_verdict(tmp_path):
    evidence = {"lost_seconds": {"checkpoint": 30.0}}
    advice = [
        {
            "action": "write checkpoints less often",
            "setting": None,
            "value": None,
            "predicted_speedup": 1.4,
            "because": "x",
        }
    ]
    opened = line("stall_open", cause="checkpoint", opened="t1", first_step=5, evidence=evidence, advice=advice)
    write(tmp_path, 0, line("run_start", **START), opened, line("run_end", **totals(wait=0.1, compute=10, steps=100)))
    verdict = summarize(load(tmp_path))["verdict"]
    assert verdict.startswith("Not starved, but rank 0 stalled. Cause: checkpoint; write checkpoints less often")
    assert "predicted 1.4 times" in verdict


def test_the_slow_rank_is_named_before_those_that_wait_for_it(tmp_path):
    def stalled(rank, cause, because):
        evidence = {"lost_seconds": {cause: 40.0 - rank}}
        advice = [
            {"action": "look there", "setting": None, "value": None, "predicted_speedup": 2.0, "because": because}
        ]
        return line("stall_open", rank, cause=cause, opened="t1", first_step=5, evidence=evidence, advice=advice)

    waits = stalled(0, "straggler", "rank 1 is busy outside of its steps")
    busy = stalled(1, "checkpoint", "checkpoints took 8 s of 10 s")
    end = line("run_end", **totals(wait=0.1, compute=10, steps=100))
    write(tmp_path, 0, line("run_start", **START), waits, end)
    alone = summarize(load(tmp_path))["verdict"]
    assert "rank 0 stalled. Cause: straggler; look there (rank 1 is busy outside of its steps)" in alone
    write(tmp_path, 1, line("run_start", 1, **START), busy, end | {"rank": 1})
    report = summarize(load(tmp_path))
    assert "rank 1 stalled. Cause: checkpoint" in report["verdict"]
    assert "GPU-hours lost in stalls, over all ranks: straggler 0.011, checkpoint 0.011" in render(report)


def test_the_wait_for_the_first_batch_is_not_starvation(tmp_path):
    end = line("run_end", **totals(wait=4.0, compute=10.0, steps=100)) | {"first_wait_seconds": 3.9}
    write(tmp_path, 0, line("run_start", **START), end)
    report = summarize(load(tmp_path))
    assert report["ranks"][0]["exposed_wait_ratio"] == pytest.approx(4 / 14)
    assert report["verdict"].startswith("Healthy")
