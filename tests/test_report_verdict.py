"""The verdict of the report: one sentence on what the run lost most to."""

from __future__ import annotations

import pytest

from telemetry.report.log_reader import load
from telemetry.report.report_text import render
from telemetry.report.summary import judged, summarize
from tests.report_logs import START, line, totals, window, write

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


KINDS = {
    "starved alone": "starved",
    "healthy": "healthy",
    "not seen": "unknown",
    "not measured": "unmeasured",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_verdict_has_its_kind(tmp_path, name):
    for rank, spent in enumerate(VERDICTS[name][0]):
        write(tmp_path, rank, line("run_start", rank, **START), line("run_end", rank, **totals(steps=10, **spent)))
    logs = load(tmp_path)
    found = judged(logs)
    assert (found.kind, found.text) == (KINDS[name], summarize(logs)["verdict"])
    assert "kind" not in summarize(logs)  # not in the JSON contract


@pytest.mark.parametrize("ended", [False, True])
def test_a_hang_and_a_stuck_rank_have_their_kinds(tmp_path, ended):
    stuck = {"lost_seconds": {"straggler": 9.0}, "stuck_in": "compute"}
    opened = line("stall_open", cause="straggler", opened="t1", first_step=5, evidence=stuck)
    end = [line("run_end", stuck_for_seconds=60.0, **totals(wait=1, compute=9, steps=9))] if ended else []
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9), opened, *end)
    assert judged(load(tmp_path)).kind == "stuck"
    hanging(tmp_path, hang(), ended=ended)
    assert judged(load(tmp_path)).kind == ("hung" if ended else "hangs")


@pytest.mark.parametrize(
    ("category", "words"),
    [
        ("data_wait", "is waiting for a batch"),
        ("checkpoint", "is in a checkpoint"),
        ("evaluation", "is in an evaluation"),
    ],
)
def test_a_stuck_rank_says_in_what(tmp_path, category, words):
    evidence = {"lost_seconds": {"unknown": 9.0}, "stuck_in": category}
    opened = line("stall_open", cause="unknown", opened="t1", first_step=5, evidence=evidence)
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=9, steps=9), opened)
    assert judged(load(tmp_path)).text.startswith(f"Stuck: rank 0 {words} and has not gone on since before t1.")


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


def test_a_stall_of_its_own_is_named_before_a_longer_wait_for_a_rank(tmp_path):
    def stalled(rank, cause, lost, opened="t1"):
        evidence = {"lost_seconds": {cause: lost}}
        return line("stall_open", rank, cause=cause, opened=opened, first_step=5, evidence=evidence, advice=[])

    end = totals(wait=0.1, compute=200, steps=100)
    both = stalled(0, "straggler", 100.0), stalled(0, "checkpoint", 30.0, opened="t2")
    write(tmp_path, 0, line("run_start", **START), *both, line("run_end", **end))
    write(tmp_path, 1, line("run_start", 1, **START), stalled(1, "gc_pause", 20.0), line("run_end", 1, **end))
    assert "rank 0 stalled. Cause: checkpoint" in summarize(load(tmp_path))["verdict"]


def test_the_wait_for_the_first_batch_is_not_starvation(tmp_path):
    end = line("run_end", **totals(wait=4.0, compute=10.0, steps=100)) | {"first_wait_seconds": 3.9}
    write(tmp_path, 0, line("run_start", **START), end)
    report = summarize(load(tmp_path))
    assert report["ranks"][0]["exposed_wait_ratio"] == pytest.approx(4 / 14)
    assert report["verdict"].startswith("Healthy")


# -- a job that hangs ---------------------------------------------------------------------------------------------


def hang(rank: int = 0, second: int = 20, **fields) -> dict:
    told = dict(
        since="2026-01-01T00:00:00.000Z",
        verdict="ranks 0, 2-3 have waited in all_reduce #7 since 00:00:00; rank 1 on n1 is in a fetch at data.py:88 (read)",
        kind="fetch",
        suspects=[{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}],
        suspects_total=1,
        waiting=[{"ranks": [[0, 0], [2, 3]], "collective": "all_reduce", "sequence": 7}],
        silent_ranks=0,
    )
    return line("hang", rank, **told | {"time": f"2026-01-01T00:00:{second}.000Z"} | fields)


def hanging(tmp_path, *lines, ended=False) -> dict:
    steps = dict(wait=1, compute=9, steps=100)
    end = [line("run_end", **totals(**steps))] if ended else []
    write(tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 100, **steps), *lines, *end)
    return summarize(load(tmp_path))


def test_a_job_that_hangs_is_the_verdict(tmp_path):
    report = hanging(tmp_path, hang())
    assert report["verdict"] == (
        "Hangs: ranks 0, 2-3 have waited in all_reduce #7 since 00:00:00; rank 1 on n1 is in a fetch at data.py:88 (read)."
    )
    assert report["hang"] == {
        "since": "2026-01-01T00:00:00.000Z",
        "verdict": report["verdict"].removeprefix("Hangs: ").removesuffix("."),
        "kind": "fetch",
        "suspects": [{"rank": 1, "node": "n1", "where": "data.py:88 (read)", "doing": "in a fetch"}],
        "waiting": [{"ranks": [0, 2, 3], "collective": "all_reduce", "sequence": 7}],
    }


def test_a_hang_that_is_over_is_none(tmp_path):
    report = hanging(tmp_path, hang(), line("hang", kind="fetch", over=True, time="2026-01-01T00:00:30.000Z"))
    assert report["hang"] is None
    assert report["verdict"].startswith("Healthy")


def test_a_hang_after_one_that_is_over(tmp_path):
    over = line("hang", kind="fetch", over=True, time="2026-01-01T00:00:30.000Z")
    assert hanging(tmp_path, hang(), over, hang(second=40, kind="rank_gone"))["hang"]["kind"] == "rank_gone"


def test_the_line_that_knows_all_ranks_counts(tmp_path):
    report = hanging(tmp_path, hang(second=30), hang(second=40, silent_ranks=2, kind="unknown", suspects=[]))
    assert report["hang"]["kind"] == "fetch"


def test_a_hang_that_was_the_end_of_the_run(tmp_path):
    assert hanging(tmp_path, hang(), ended=True)["verdict"].startswith("Hung before its end: ranks 0, 2-3 have waited")
