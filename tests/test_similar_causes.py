"""Two causes of similar size are both named, with shares, advice, and what remains after the first is mended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from telemetry.agent.stalls import stall_fields
from telemetry.diagnosis.causes import costs, shares_of
from telemetry.diagnosis.stalls import Stall
from telemetry.report.logs import load
from tests.report_logs import START, line, summarize, text_of, window, write
from tests.zoo.test_replay import RECORDED, evidence_of

TWO = Path(__file__).parent / "zoo" / "evidence" / "two-reads-checkpoints.json"


def recorded(path=TWO):
    return evidence_of(json.loads(path.read_text())["evidence"])


def fields_of(evidence, cause):
    return stall_fields(Stall(cause, 0, costs(evidence), evidence.loop_seconds, None, evidence), None, "n")


def test_both_are_named_and_the_first_stays_the_cause():
    fields = fields_of(recorded(), "checkpoint")
    (other,) = fields["evidence"]["also"]
    assert (fields["cause"], other["cause"]) == ("checkpoint", "loader_on_training_thread")
    assert fields["evidence"]["share_ratio"] == pytest.approx(0.40, abs=0.02)
    assert other["share_ratio"] == pytest.approx(0.33, abs=0.02)
    assert other["advice"][0]["setting"] == "num_workers"


def test_advice_for_the_first_says_what_remains_afterwards():
    fields = fields_of(recorded(), "checkpoint")
    first = fields["advice"][0]
    after = fields["evidence"]["also"][0]["share_ratio"] * first["predicted_speedup"]
    assert f"afterwards loader_on_training_thread with {100 * after:.0f} % of the time remain" in first["because"]


def test_the_cause_of_a_stall_stays_first_if_another_costs_more():
    shares = shares_of("loader_on_training_thread", recorded())
    assert [share.cause for share in shares] == ["loader_on_training_thread", "checkpoint"]


def test_a_cause_that_costs_less_than_half_of_the_first_is_not_named():
    evidence = recorded()
    small = dataclasses.replace(evidence, checkpoint_seconds=2.0)
    assert [share.cause for share in shares_of("loader_on_training_thread", small)] == ["loader_on_training_thread"]
    assert "also" not in fields_of(small, "loader_on_training_thread")["evidence"]


@pytest.mark.parametrize("path", [path for path in RECORDED if path != TWO], ids=lambda path: path.stem)
def test_no_second_cause_is_made_up_where_there_is_one(path):
    evidence = recorded(path)
    lost = costs(evidence)
    assert len(shares_of(max(lost, key=lost.get), evidence)) == 1


def test_the_report_names_both(tmp_path):
    fields = fields_of(recorded(), "checkpoint")
    write(tmp_path, 0, line("run_start", **START), window(wait=1, compute=99, steps=9), line("stall_open", **fields))
    report = summarize(load(tmp_path))
    assert "Cause: checkpoint" in report["verdict"]
    assert "At the same time loader_on_training_thread takes 33 % of the time." in report["verdict"]
    text = text_of(load(tmp_path))
    assert "stall on rank 0: checkpoint (40 % of the time), since" in text
    assert "\n  at the same time loader_on_training_thread (33 % of the time)\n  try num_workers=2: load" in text
