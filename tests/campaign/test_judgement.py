"""How reports are judged, how advice is followed, and when a goal is missed."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.campaign import Journal, Load, RunError, judgement, runner
from tests.campaign.command import Campaign, result_of
from tests.campaign.judgement import Advised, Result, judge
from tests.campaign.runner import How
from tests.campaign.specimen import MARK, Specimen

HEALTHY = "Healthy: no rank waits."


SCRIPT = Path(__file__)
SLOW = 2  # <- slow
(MARKED,) = (n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith(MARK))


def specimen(name="starved", **truth):
    return Specimen(name=name, script=SCRIPT, **truth)


STARVED = specimen(causes=("workers_cpu_bound",))
CALM = specimen("calm")
JOB = specimen(causes=("straggler",), slow_rank=2, ranks=4, nodes=2, reason="takes longer")
REPORTED = specimen(
    causes=("empty_workers",), advice="shard", harmful="^num_workers", line=True, fixed=("fixed",), silent=True
)
ENDS = specimen(advice="larger", line=True, end="full /dev/shm", end_said="/dev/shm", fixed=("fixed",))


def report(verdict=HEALTHY, *stalls, **more):
    return {"verdict": verdict, "stalls": [*stalls], "changes": [], "ranks": [{"memory": None}]} | more


def at(line):
    return [] if line is None else [{"file": f"/home/me/{SCRIPT.name}", "line": line}]


def stall(cause, *, rank=0, lost=1.0, advice=(), line=None, **evidence):
    evidence = {"lost_seconds": {cause: lost}, "lines": at(line), **evidence}
    return {"rank": rank, "cause": cause, "exposed_wait_ratio": 0.5, "evidence": evidence, "advice": list(advice)}


def finding(kind, *advice, line=None):
    return {"kind": kind, "lines": at(line), "advice": list(advice)}


def advice(action="", setting=None, value=None, predicted=None, **more):
    return {"action": action, "setting": setting, "value": value, "predicted_speedup": predicted, "because": ""} | more


def more_workers(predicted, **changed):
    return advice(setting="num_workers", value="4", predicted=predicted) | changed


# -- one report --------------------------------------------------------------------------------------------------------


def test_the_cause_of_the_verdict_comes_first_then_what_cost_most_then_a_finding():
    stalls = [stall("workers_cpu_bound"), stall("gc_pause", lost=9)]
    result = judge(STARVED, report("Starved: rank 0. Cause: workers_cpu_bound; try less.", *stalls))
    assert (result.named, result.right, result.others) == ("workers_cpu_bound", True, ("gc_pause",))
    result = judge(STARVED, report("Not starved.", *stalls))
    assert (result.named, result.right) == ("gc_pause", False)
    assert judge(REPORTED, report(findings=[finding("empty_workers")])).named == "empty_workers"
    assert judge(STARVED, report()).named is None


def test_two_causes_may_both_have_to_be_named():
    both = dataclasses.replace(STARVED, causes=("gc_pause", "checkpoint"), both=True)
    assert not judge(both, report("Cause: gc_pause", stall("gc_pause"))).right
    assert judge(both, report("Cause: gc_pause", stall("gc_pause", also=[{"cause": "checkpoint"}]))).right


@pytest.mark.parametrize(
    ("told", "accused"),
    [
        (report(), False),
        (report("Starved: rank 0 spent 30 %."), True),
        (report(HEALTHY, stall("unknown")), True),
        (report(changes=[{"ratio": 1.2}]), True),
        (report(ranks=[{"memory": None}, {"memory": {"exhausted_in_seconds": 600.0}}]), True),
        (report(ranks=[{"memory": {"growth_bytes_per_hour": 1e6, "exhausted_in_seconds": None}}]), False),
    ],
)
def test_a_control_is_accused_by_a_stall_the_verdict_a_change_or_a_forecast(told, accused):
    assert judge(CALM, told).accused is accused
    assert judge(STARVED, told).accused is None


def test_of_a_control_after_a_public_report_no_finding_may_be_told():
    told = report(findings=[finding("gil_held")])
    assert judge(dataclasses.replace(CALM, silent=True), told).accused
    assert not judge(CALM, told).accused


@pytest.mark.parametrize(("rank", "slow", "right"), [(0, "rank 1", True), (1, "rank 1", False), (0, "rank 3", False)])
def test_a_straggler_is_right_when_a_peer_points_at_the_slow_rank(rank, slow, right):
    slowed = dataclasses.replace(STARVED, causes=("straggler",), slow_rank=1, ranks=2)
    told = report("Cause: straggler", stall("straggler", rank=rank, slow_rank=slow))
    assert judge(slowed, told).right is right


def waiting(rank, slow, node, reason):
    return stall("straggler", rank=rank, straggler_rank=slow, straggler_node=node, straggler_reason=reason)


@pytest.mark.parametrize(
    ("stalls", "right"),
    [
        ([waiting(0, 2, "n2", "takes longer to compute a step")], True),
        ([waiting(0, 2, "n2", "takes longer"), waiting(3, 2, "n2", "takes longer")], True),
        ([waiting(0, 2, "n1", "takes longer")], False),
        ([waiting(0, 3, "n2", "takes longer")], False),
        ([waiting(0, 2, "n2", "waits for data")], False),
        ([waiting(0, 2, "n2", "takes longer"), waiting(3, 1, "n1", "takes longer")], False),
        ([waiting(2, 2, "n2", "takes longer")], False),
    ],
)
def test_in_a_job_each_waiting_rank_must_name_rank_node_and_reason(stalls, right):
    assert judge(JOB, report("Cause: straggler", *stalls)).right is right


def test_each_rank_of_a_slow_node_may_be_named_and_another_is_slow_each_time():
    slow = dataclasses.replace(JOB, whole_node=True)
    assert judge(slow, report("Cause: straggler", waiting(0, 3, "n2", "takes longer"))).right
    again = slow.repeated(2)
    assert (slow.slow_ranks, again.slow_ranks, again.slow_node) == ((2, 3), (0, 1), "n1")
    assert runner.arguments_of(again, "pace")[-2:] == ["--odd-rank", "0"]
    assert STARVED.repeated(1) == STARVED


@pytest.mark.parametrize(
    ("kind", "suspects", "right"),
    [
        ("fetch", [(2, "n2")], True),
        ("compute", [(2, "n2")], False),
        ("fetch", [(2, "n1")], False),
        ("fetch", [(2, "n2"), (3, "n2")], False),
        (None, [], False),
    ],
)
def test_a_hang_is_right_with_its_kind_and_its_one_rank(kind, suspects, right):
    hung = dataclasses.replace(JOB, causes=(), hang="fetch")
    hang = kind and {"kind": kind, "suspects": [{"rank": rank, "node": node} for rank, node in suspects]}
    result = judge(hung, report("Hung before its end", hang=hang))
    assert (result.right, result.accused, result.detected) == (right, None, kind is not None)
    assert hung.truth == "hang: fetch"


@pytest.mark.parametrize(
    ("verdict", "right"),
    [
        (
            f"Failed: RuntimeError in main at {SCRIPT.name}:{MARKED}: /dev/shm was full. Make it larger.",
            (True, True, True),
        ),
        (f"Failed: RuntimeError in main at {SCRIPT.name}:1.", (False, False, False)),
        (f"Healthy: 7 % ... /dev/shm, {SCRIPT.name}:{MARKED}", (False, True, False)),
    ],
)
def test_how_a_run_ended_is_in_its_verdict(verdict, right):
    judged = judge(ENDS, report(verdict))
    assert (judged.right, judged.line, judged.advice) == right


def test_the_line_of_a_hang_may_be_in_its_stacks():
    ends = dataclasses.replace(ENDS, advice="", end_said="fetch")
    hang = {"kind": "fetch", "suspects": [{"doing": f'File "/home/me/{SCRIPT.name}", line {MARKED}, in __iter__'}]}
    judged = judge(ends, report("Hung before its end: a fetch", hang=hang))
    assert (judged.named, judged.right, judged.line, judged.advice) == ("hang: fetch", True, True, None)


def test_the_first_finding_may_say_why_there_is_a_stall():
    reason = finding("empty_workers", line=MARKED)
    waits = stall("workers_io_bound", advice=[advice("make more shards")], line=MARKED - 1)
    judged = judge(REPORTED, report(HEALTHY, waits, findings=[reason, finding("gil_held")]))
    assert (judged.named, judged.right, judged.line, judged.advice) == ("workers_io_bound", True, True, True)
    judged = judge(REPORTED, report(HEALTHY, waits, findings=[finding("gil_held"), reason]))
    assert (judged.right, judged.line) == (False, False)
    waits = stall("workers_io_bound", line=MARKED)
    io_bound = dataclasses.replace(REPORTED, causes=("workers_io_bound",))
    assert judge(io_bound, report(HEALTHY, waits, findings=[finding("gil_held")])).line


SHARDS = advice("make more shards")


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        pytest.param(report(findings=[finding("empty_workers", SHARDS, line=MARKED)]), "", id="all is right"),
        pytest.param(report(), "right line advice", id="nothing"),
        pytest.param(report(findings=[finding("gil_held", SHARDS, line=MARKED)]), "right", id="cause"),
        pytest.param(report(findings=[finding("empty_workers", SHARDS, line=MARKED - 1)]), "line", id="line"),
        pytest.param(
            report(findings=[finding("empty_workers", SHARDS, line=MARKED)], advice=[advice("buy disks"), SHARDS]),
            "advice",
            id="the first advice of the one list",
        ),
        pytest.param(
            report(
                HEALTHY,
                stall("workers_io_bound", also=[{"cause": "x", "advice": [advice("use more", "num_workers", "6")]}]),
                findings=[finding("empty_workers", SHARDS, line=MARKED)],
            ),
            "harmful",
            id="harmful, of a smaller cause",
        ),
    ],
)
def test_what_is_wrong_is_told_apart(told, wrong):
    judged = judge(REPORTED, told)
    answers = {name: getattr(judged, name) for name in ("right", "line", "advice")} | {"harmful": not judged.harmful}
    assert [name for name, answer in answers.items() if not answer] == wrong.split()
    assert judged.good == (not wrong)


IN_WORDS = {"setting": None, "value": None}
SELDOM = {"workers_cpu_bound": ("--seldom",)}


@pytest.mark.parametrize(
    ("given", "remedies", "followed"),
    [
        ([more_workers(None, **IN_WORDS), more_workers(1.5)], {}, (("--num-workers", "4"), 1.5, None)),
        ([more_workers(4.0, predicted_low=2.0)], {}, (("--num-workers", "4"), 4.0, 2.0)),
        ([more_workers(1.4, **IN_WORDS)], {}, None),
        ([more_workers(1.4, **IN_WORDS)], SELDOM, (("--seldom",), 1.4, None)),
    ],
)
def test_the_first_advice_that_predicts_and_can_be_followed_is_followed(given, remedies, followed):
    told = report("Cause: workers_cpu_bound", stall("workers_cpu_bound", advice=given))
    advised = judgement.advice_to_follow(dataclasses.replace(STARVED, remedies=remedies), told)
    assert (advised and (advised.arguments, advised.predicted, advised.low)) == followed


@pytest.mark.parametrize(
    ("first", "followed"),
    [
        (advice("", "num_workers", "2", 1.5), ((), {"WORKERS": "2"})),
        (advice("divide it; then load in workers (num_workers=3)", predicted=1.5), (("fixed",), {"WORKERS": "3"})),
        (advice("call it once", predicted=1.5), (("fixed",), {})),
        (advice("call it once"), None),
    ],
)
def test_the_first_advice_is_followed_by_the_variant_that_is_fixed_and_by_workers(first, followed):
    told = report(findings=[finding("empty_workers")], advice=[first, more_workers(1.4)])
    advised = judgement.advice_to_follow(REPORTED, told)
    assert (advised and (advised.arguments, advised.variables)) == followed


# -- how specimens are run ---------------------------------------------------------------------------------------------


def test_results_are_kept_for_a_campaign_that_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "zoo.jsonl"
    advised = Advised("gc_pause", None, None, ("--freeze",), 1.5)
    result = Result("starved", "gc_pause", ("unknown",), True, advised=advised, load=({"others_cores": 0.1},))
    runs = []

    def run(specimen, _):
        runs.append(specimen)
        return result

    def found(specimen, repetition):
        assert result_of(specimen, repetition, How(), Journal(path)) == result
        return len(runs)

    monkeypatch.setattr(runner, "run", run)
    assert [found(STARVED, 1), found(STARVED, 1), found(STARVED, 0)] == [1, 1, 2]
    assert found(dataclasses.replace(STARVED, arguments=("--batch-size", "7")), 1) == 3
    monkeypatch.setattr(runner, "_JUDGES", ("judge.py",))  # has the same effect as a change of the agent's code
    assert found(STARVED, 1) == 4
    assert (found(JOB, 1), runs[-1]) == (5, JOB.repeated(1))


def test_what_was_disturbed_is_run_again(monkeypatch):
    runs, loads = [], iter([2.0, 0.9, 0.1])

    def report_and_pace(*_):
        runs.append(1)
        if len(runs) == 2:
            raise RunError("killed")
        return report(), float(len(runs))

    monkeypatch.setattr(runner, "report_and_pace", report_and_pace)
    monkeypatch.setattr(Load, "since", lambda _: {"others_cores": next(loads)})
    result = runner.run(CALM, How(most_others=0.5))
    assert (result.error, result.steps_per_second, result.load) == (None, 3.0, ({"others_cores": 0.1},))


@pytest.mark.parametrize(
    ("paces", "before", "after", "realised"),
    [
        pytest.param([2.0, 4.0, 2.1], 2.0, 2.1, 4.0 / 2.05, id="steady"),
        pytest.param([2.0, 6.0, 3.0, 6.0, 3.1], 3.0, 3.1, 6.0 / 3.05, id="faster from the advice on"),
        pytest.param([2.0, 6.0, 3.0, 6.0, 2.0, 6.0, 3.0], 2.0, 3.0, 6.0 / 2.5, id="never steady"),
    ],
)
def test_advice_is_followed_between_two_runs_of_one_pace(paces, before, after, realised, monkeypatch):
    told = report("Cause: workers_cpu_bound", stall("workers_cpu_bound", advice=[more_workers(1.9)]))
    runs = []

    def report_and_pace(_specimen, _folder, advised, _settings):
        runs.append(advised is not None)
        return told, paces[len(runs) - 1]

    monkeypatch.setattr(runner, "report_and_pace", report_and_pace)
    result = runner.run(STARVED, How(steady=0.1))
    assert runs == [bool(number % 2) for number in range(len(paces))]
    assert (result.steps_per_second, result.pace_after) == (before, after)
    assert result.realised == pytest.approx(realised)
    assert (result.right, len(result.load)) == (True, len(paces))


def test_a_run_that_fails_says_so(tmp_path):
    broken = Specimen(name="broken", script=tmp_path / "no_such_script.py", seconds=1.0)
    result = runner.run(broken)
    assert (result.failed, result.accused) == (True, None)
    assert judgement.scores([broken], [result])[0].right == 0


def test_a_kept_report_is_judged_again(tmp_path):
    (tmp_path / "starved.json").write_text(json.dumps(report("Cause: workers_cpu_bound", stall("workers_cpu_bound"))))
    how = How(keep=tmp_path, again=True)
    assert runner.run(STARVED, how).right
    assert runner.run(CALM, how).error == "no report is kept"


# -- the goals and the table -------------------------------------------------------------------------------------------

CAMPAIGN = Campaign(
    name="zoo", title="The zoo", specimens=[STARVED, CALM], max_off=0.15,
    headings=("specimen", "is", "found", "right", "line", "advice", "predicted", "realised", "TraceML 0.5.0"),
)  # fmt: skip


def run_of(specimen, named, predicted=None, realised=None, low=None):
    told = report(f"Cause: {named}", stall(named)) if named else report()
    advised = None if predicted is None else Advised(named, "num_workers", "4", (), predicted, low)
    return dataclasses.replace(judge(specimen, told), advised=advised, realised=realised)


def table_of(*results, specimens=(STARVED, CALM)):
    scored = judgement.scores(specimens, results)
    return CAMPAIGN.table(defaultdict(str, load_average=[]), scored, {"starved": "INPUT-BOUND"})


def met(*results, **more):
    return "".join(str(int(goal.met)) for goal in table_of(*results, **more).goals)


GOOD, QUIET = run_of(STARVED, "workers_cpu_bound"), run_of(CALM, None)
FOLLOWED = run_of(STARVED, "workers_cpu_bound", 1.5, 1.4)
OTHER = run_of(STARVED, "gc_pause")


@pytest.mark.parametrize(
    ("results", "reached"),
    [
        ([FOLLOWED, FOLLOWED, QUIET], "1111"),
        ([GOOD, run_of(STARVED, None), QUIET], "010"),
        ([GOOD, run_of(CALM, "unknown")], "101"),
        ([*[GOOD] * 18, OTHER, QUIET], "110"),
        ([*[GOOD] * 19, OTHER, QUIET], "111"),
        ([run_of(STARVED, "workers_cpu_bound", 2.0, 1.5), QUIET], "1110"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 3.0, low=2.0), QUIET], "1111"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 1.6, low=2.0), QUIET], "1110"),
        ([run_of(STARVED, "workers_cpu_bound", 4.0, 5.0, low=2.0), QUIET], "1110"),
        ([GOOD, Result("starved", error="ended with 1"), QUIET], "010"),
        ([GOOD, Result("calm", error="ended with 1")], "101"),
        ([run_of(STARVED, "workers_cpu_bound", 2.0), QUIET], "1110"),
    ],
)
def test_each_goal_can_be_missed(results, reached):
    """Found, not accused, named rightly, predicted. A run that failed counts against each goal it could have met."""
    assert met(*results) == reached


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ({}, "11111"),
        ({"line": False}, "11011"),
        ({"advice": False}, "11101"),
        ({"harmful": "num_workers=4"}, "11110"),
    ],
)
def test_lines_and_advice_are_goals_where_they_are_asked(changed, reached):
    right = judge(REPORTED, report(findings=[finding("empty_workers", SHARDS, line=MARKED)]))
    assert met(dataclasses.replace(right, **changed), specimens=[REPORTED]) == reached
    assert met(Result("starved", error="ended with 1"), specimens=[REPORTED]) == "00000"


def test_the_table_shows_every_specimen(tmp_path):
    shown = table_of(FOLLOWED, QUIET)
    assert "INPUT-BOUND" in shown.text()
    assert "1.40 (7 % off)" in shown.text()
    assert "1.40 (7 % off, 2 runs)" in table_of(FOLLOWED, FOLLOWED, GOOD, QUIET).text()
    assert "failed" in table_of(run_of(STARVED, "workers_cpu_bound", 1.5), QUIET).text()
    ranged = run_of(STARVED, "workers_cpu_bound", 4.0, 3.0, low=2.0)
    assert "2.00 to 4.00" in table_of(ranged, QUIET).text()
    content = {"specimens": judgement.published(judgement.scores([STARVED, CALM], [FOLLOWED, QUIET]), {})}
    shown.write(tmp_path, "zoo-here", content)
    assert "| starved | workers_cpu_bound | 1/1 | 1/1 |" in (tmp_path / "zoo-here.md").read_text()
    written = json.loads((tmp_path / "zoo-here.json").read_text())
    assert written["goals"][1]["reached"] == "0 of 1 runs accused"
    assert written["specimens"][0]["runs"][0]["advised"]["predicted"] == 1.5


def test_specimens_are_chosen_by_the_beginning_of_their_names():
    assert CAMPAIGN.chosen(["star"]) == [STARVED]
    assert CAMPAIGN.chosen([]) == [STARVED, CALM]
    with pytest.raises(ValueError, match="nonsense"):
        CAMPAIGN.chosen(["star", "nonsense"])
