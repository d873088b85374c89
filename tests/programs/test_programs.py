"""What the programs must have, and how a report is judged. The programs themselves run with ``python -m tests.programs``."""

import ast
import re

import pytest

from .cases import ALL, SCRIPTS, Program
from .judgement import judge

PROGRAM = Program(name="one", like="any", advice="^num_workers", unsaid=("stalled",))
TRUTH = {"steps": 10, "samples": 40, "evaluation_seconds": 2.0, "parts": {"wait": 1.0, "forward": 4.0, "rest": 5.0}}
RANK = {
    "steps": 10,
    "samples": 40,
    "epochs": None,
    "ledger": {"data_wait": 1.0, "compute": 9.0, "evaluation": 2.05},
    "compute_seconds": {"forward": 4.0, "other": 5.0},
}


def judged(said: str = "Healthy: no rank lost more than 1 %.", *, text: str = "", setting: str = "num_workers", **rank):
    advice = [{"setting": setting, "action": "set num_workers=2"}]
    return judge(PROGRAM, TRUTH, {"verdict": said, "advice": advice, "ranks": [RANK | rank]}, text)


def test_a_report_that_says_what_the_program_says_is_right():
    result = judged()
    assert (result.verdict_right, result.advice_right, result.wrong) == (True, True, [])
    assert all(result.figures.values())
    assert {*result.figures} == {"without stalled", "steps", "samples", "evaluation_seconds", "wait", "forward", "rest"}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"said": "Starved: rank 0"}, "verdict"),
        ({"setting": "pin_memory"}, "first advice"),
        ({"text": "rank 0 stalled"}, "says 'stalled'"),
        ({"steps": 11}, "steps 11, true 10"),
        ({"samples": None}, "samples -, true 40"),
        ({"ledger": RANK["ledger"] | {"evaluation": 2.2}}, "evaluation_seconds"),
        ({"ledger": RANK["ledger"] | {"data_wait": 2.0}}, "wait"),
        ({"compute_seconds": {}}, "forward -"),
        ({"compute_seconds": {"forward": 5.0, "other": 4.0}}, "forward"),
    ],
)
def test_one_wrong_answer_is_told(change, wrong):
    result = judged(**change)
    assert any(each.startswith(wrong) for each in result.wrong), result.wrong


def test_no_program_is_left_out_and_each_says_its_truth():
    files = {path for path in SCRIPTS.glob("*.py") if path.name != "truth.py"}
    assert {program.script for program in ALL} == files
    for path in files:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text))
        assert re.search(r"truth\.say\(", text)
