"""What each script after a public report must have. The scripts themselves run with ``python -m tests.reports``."""

import ast

import pytest

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.findings import FINDINGS
from tests.campaign.specimen import MARK

from .cases import ALIKE, ALL, CONTROLS, REPORTED, SCRIPTS

FILES = sorted(path for path in SCRIPTS.glob("*.py") if path.name != "common.py")


def test_there_are_enough_of_each_kind_and_no_script_is_left_out():
    assert (len(REPORTED) >= 14, len(ALIKE) >= 10, len(CONTROLS) >= 6) == (True, True, True)
    assert len({case.name for case in ALL}) == len(ALL)
    assert {case.script for case in ALL} == set(FILES)
    assert all(case.about for case in REPORTED)
    assert not any(case.about for case in (*ALIKE, *CONTROLS) if case.script.stem == case.name)


def test_causes_and_findings_have_names_of_the_closed_sets():
    assert {kind for case in ALL for kind in case.causes} <= set(CAUSES) | set(FINDINGS)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_script_has_its_line_and_a_control_has_none(case):
    assert bool(case.marked) or not case.line
    assert not (case.healthy and case.marked and not case.arguments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_has_a_docstring_its_variants_and_a_pace(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert text.count(MARK) == sum(line.endswith(MARK) for line in text.splitlines())
    assert "common.FIXED" in text or path.name.startswith("healthy_")
    assert "pace.say()" in text
