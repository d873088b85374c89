"""The judgement of reports on real scripts, and what each script must have. The scripts themselves run with
``python -m tests.reports``."""

import ast
import dataclasses
from collections import defaultdict

import pytest

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.findings import FINDINGS

from .cases import ALIKE, ALL, CONTROLS, MARK, REPORTED, SCRIPTS, Case
from .judgement import judge, ranked, table

FILES = sorted(path for path in SCRIPTS.glob("*.py") if path.name != "common.py")


def report(*, stalls=(), findings=(), hang=None, verdict="Healthy", changes=()):
    rank = {"rank": 0, "ledger": {"data_wait": 5.0, "compute": 15.0}, "memory": {}}
    return {
        "verdict": verdict, "ranks": [rank], "stalls": list(stalls), "findings": list(findings), "hang": hang,
        "changes": list(changes),
    }  # fmt: skip


def advice(action, setting=None, value=None, predicted=None):
    return {"action": action, "setting": setting, "value": value, "predicted_speedup": predicted, "because": ""}


def stall(cause, lost, *given, line=None, also=()):
    lines = [] if line is None else [{"file": "/home/me/x.py", "line": line}]
    evidence = {"lost_seconds": {cause: lost}, "lines": lines, "also": list(also)}
    return {"rank": 0, "cause": cause, "evidence": evidence, "advice": list(given)}


def finding(kind, share, *given, line=None):
    lines = [] if line is None else [{"file": "scripts/one_shard.py", "line": line}]
    return {"kind": kind, "share_ratio": share, "text": f"found {kind}", "lines": lines, "advice": list(given)}


ONE_SHARD = Case("one_shard", ("empty_workers",), "shard", "^num_workers", line=True)
MARKED = min(ONE_SHARD.lines)


def test_what_the_verdict_names_comes_first_and_then_what_cost_most():
    found = [finding("host_work", 0.3), finding("gil_held", 0.1)]
    stalls = [stall("workers_io_bound", 4.0), stall("gc_pause", 12.0)]
    kinds = [each.kind for each in ranked(report(findings=found, stalls=stalls))]
    assert kinds == ["gc_pause", "host_work", "workers_io_bound", "gil_held"]
    starved = report(findings=found, stalls=stalls, verdict="Starved: .... Cause: workers_io_bound; try num_workers=2.")
    assert [each.kind for each in ranked(starved)] == ["workers_io_bound", "gc_pause", "host_work", "gil_held"]
    slowed = report(findings=found, stalls=stalls, verdict="Not starved. found gil_held.")
    assert [each.kind for each in ranked(slowed)][0] == "gil_held"


ENDS = Case("one_shard", advice="larger", line=True, end="full /dev/shm", end_said="/dev/shm")


@pytest.mark.parametrize(
    ("verdict", "right"),
    [
        (
            f"Failed: RuntimeError in main at one_shard.py:{MARKED}: /dev/shm was full. Make it larger.",
            (True, True, True),
        ),
        ("Failed: RuntimeError in main at one_shard.py:1.", (False, False, False)),
        (f"Healthy: 7 % ... /dev/shm, one_shard.py:{MARKED}", (False, True, False)),
    ],
)
def test_how_a_run_ended_is_in_its_verdict(verdict, right):
    judged = judge(ENDS, report(verdict=verdict))
    assert (judged.cause, judged.line, judged.advice) == right


def test_the_line_of_a_hang_may_be_in_its_stacks():
    case = dataclasses.replace(ENDS, advice="", end_said="fetch")
    hang = {"kind": "fetch", "suspects": [{"doing": f'File "/home/me/one_shard.py", line {MARKED}, in __iter__'}]}
    judged = judge(case, report(hang=hang, verdict="Hung before its end: a fetch"))
    assert (judged.named, judged.cause, judged.line, judged.advice) == ("hang: fetch", True, True, None)


def test_all_is_right():
    judged = judge(ONE_SHARD, report(findings=[finding("empty_workers", 0.5, advice("make more shards"), line=MARKED)]))
    assert (judged.cause, judged.line, judged.advice, judged.harmful, judged.right) == (True, True, True, "", True)


def test_the_first_finding_may_say_why_there_is_a_stall():
    reason = finding("empty_workers", 0.1, line=MARKED)
    waits = stall("workers_io_bound", 12.0, advice("make more shards"), line=MARKED - 1)
    judged = judge(ONE_SHARD, report(stalls=[waits], findings=[reason, finding("gil_held", 0.05)]))
    assert (judged.named, judged.cause, judged.line, judged.advice) == ("workers_io_bound", True, True, True)
    judged = judge(ONE_SHARD, report(stalls=[waits], findings=[finding("gil_held", 0.2), reason]))
    assert (judged.cause, judged.line) == (False, False)


def test_the_first_advice_is_that_of_the_one_list():
    entry = finding("empty_workers", 0.5, advice("make more shards"), line=MARKED)
    listed = report(findings=[entry]) | {"advice": [advice("buy disks"), advice("make more shards")]}
    assert judge(ONE_SHARD, listed).advice is False


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        pytest.param(report(), {"cause", "line", "advice"}, id="nothing"),
        pytest.param(
            report(findings=[finding("gil_held", 0.5, advice("make more shards"), line=MARKED)]), {"cause"}, id="cause"
        ),
        pytest.param(
            report(findings=[finding("empty_workers", 0.5, advice("make more shards"), line=MARKED - 1)]),
            {"line"},
            id="line",
        ),
        pytest.param(
            report(findings=[finding("empty_workers", 0.5, advice("buy disks"), advice("more shards"), line=MARKED)]),
            {"advice"},
            id="advice",
        ),
        pytest.param(
            report(
                findings=[finding("empty_workers", 0.5, advice("make more shards"), line=MARKED)],
                stalls=[stall("workers_io_bound", 1.0, also=[{"advice": [advice("use more", "num_workers", "6")]}])],
            ),
            {"harmful"},
            id="harmful, of a smaller cause",
        ),
    ],
)
def test_what_is_wrong_is_told_apart(said, wrong):
    judged = judge(ONE_SHARD, said)
    answers = {name: getattr(judged, name) for name in ("cause", "line", "advice")}
    assert {name for name, answer in answers.items() if not answer} | (
        {"harmful"} if judged.harmful else set()
    ) == wrong
    assert not judged.right


@pytest.mark.parametrize(
    ("predicted", "low", "real", "right"),
    [
        (2.0, None, 1.7, True),
        (2.0, None, 1.6, False),
        (2.0, None, 2.6, False),
        (3.0, 1.5, 2.0, True),
        (3.0, 1.5, 1.0, False),
    ],
)
def test_a_prediction_is_right_within_a_fifth_or_in_its_range(predicted, low, real, right):
    given = advice("make more shards", "num_workers", "2", predicted) | {"predicted_low": low}
    case = dataclasses.replace(ONE_SHARD, harmful="")
    judged = judge(case, report(findings=[finding("empty_workers", 0.5, given, line=MARKED)]))
    assert (judged.workers, judged.only_workers, judged.prediction) == (2, True, None)
    judged = dataclasses.replace(judged, speedup=real)
    assert (judged.prediction, judged.right) == (right, right)


def test_of_a_control_nothing_may_be_said():
    control = CONTROLS[0]
    assert judge(control, report()).right
    for said in (
        report(findings=[finding("gil_held", 0.05)]),
        report(stalls=[stall("unknown", 1.0)]),
        report(changes=[{"ratio": 1.2}]),
        report(verdict="Starved: ..."),
    ):
        assert not judge(control, said).right


def test_goals_count_only_what_was_asked():
    quiet, machine = CONTROLS[0], defaultdict(str, load_average=[])
    results = {"one_shard": judge(ONE_SHARD, report()), quiet.name: judge(quiet, report())}
    shown = table(machine, [ONE_SHARD, quiet], results)
    assert [(goal.reached, goal.of) for goal in shown.goals] == [(0, 1), (0, 1), (0, 1), (1, 1), (1, 1)]
    assert "| one_shard | huggingface/datasets#8669" in shown.markdown()


# -- the scripts -------------------------------------------------------------------------------------------------------


def test_there_are_enough_of_each_kind_and_no_script_is_left_out():
    assert (len(REPORTED) >= 14, len(ALIKE) >= 10, len(CONTROLS) >= 6) == (True, True, True)
    assert len({case.name for case in ALL}) == len(ALL)
    assert {case.path for case in ALL} == set(FILES)
    assert all(case.public for case in REPORTED)
    assert not any(case.public for case in (*ALIKE, *CONTROLS) if not case.script)


def test_causes_and_findings_have_names_of_the_closed_sets():
    assert {kind for case in ALL for kind in case.found} <= set(CAUSES) | set(FINDINGS)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_script_has_its_line_and_a_control_has_none(case):
    assert bool(case.lines) or not case.line
    assert not (case.healthy and case.lines and case.variant == "base")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_has_a_docstring_its_variants_and_a_pace(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert text.count(MARK) == sum(line.endswith(MARK) for line in text.splitlines())
    assert "common.FIXED" in text or path.name.startswith("healthy_")
    assert "pace.say()" in text
