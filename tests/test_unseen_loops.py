"""Loops that ask no loader for batches, or whose parameters no optimizer of torch updates."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.diagnosis.hot_lines import loop_lines
from telemetry.loop.ledger import Ledger
from telemetry.model.records import CATEGORIES, COMPUTE, DATA_WAIT, EVALUATION, STARTUP
from telemetry.model.totals import Totals
from telemetry.sources.code_lines import draws_ahead, evaluation_lines
from telemetry.sources.unseen_loop import BackwardPace
from telemetry.util.clock import NS
from telemetry.util.profiles import StackProfile, StackTime
from telemetry.util.stacks import Spot
from tests.full_views import full_view, page

ROOT = Path(__file__).parents[1]

# -- the lines that evaluate -------------------------------------------------------------------------------------------

EVALUATIONS = {
    "a function": (
        "def evaluate(model):\n  model.eval()\n  with torch.no_grad():\n    for x in data:\n      model(x)\n",
        {(2, 5, True)},
    ),
    "under a decorator": (
        "def estimate():\n  model.eval()\n  out = model(x)\n  model.train()\n  log(out)\n",
        {(2, 4, False)},
    ),
    "in the loop": (
        (
            "def main():\n  for x in data:\n    model.train()\n    model(x).backward()\n    model.eval()\n"
            "    with torch.inference_mode():\n      model(x)\n"
        ),
        {(5, 7, True)},
    ),
    "frozen layers": (
        "def train():\n  backbone.eval()\n  with torch.no_grad(): y = backbone(x)\n  head(y).backward()\n",
        set(),
    ),
    "the builtin": ("def f():\n  eval('1')\n  with torch.no_grad(): pass\n", set()),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_begins_with_eval_and_has_no_backward_pass(name):
    source, lines = EVALUATIONS[name]
    namespace: dict = {}
    exec(source, namespace)
    (function,) = [each for each in namespace.values() if hasattr(each, "__code__")]
    assert {tuple(each) for each in evaluation_lines(function.__code__)} == lines


def test_a_batch_for_the_next_step_is_no_part_of_this_forward_pass():
    source = "def step(x):\n  loss = model(x)\n  x, y = get_batch()\n  loss = loss * scale(loss)\n  loss.backward()\n"
    namespace: dict = {}
    exec(source, namespace)
    code = namespace["step"].__code__
    assert [draws_ahead(code, line, 5) for line in (2, 3, 4)] == [False, True, False]


def test_the_ledger_follows_what_samples_show():
    ledger = Ledger(0)
    ledger.advance(100)
    ledger.loop_runs()
    ledger.advance(200)
    ledger.sampled(150, evaluates=True)  # this was booked as compute
    ledger.advance(300)
    assert ledger.ns[EVALUATION] == 100, "time is booked once"
    ledger.sampled(320, evaluates=False)
    ledger.fold([(310, 310, STARTUP, STARTUP, False, False, False, False)])  # a hook that knows of no loop
    ledger.advance(500)
    assert (ledger.ns[STARTUP], ledger.ns[COMPUTE], ledger.ns[EVALUATION]) == (100, 230, 170)
    (span,) = ledger.take_phases()
    assert (span.name, span.start_ns, span.seconds) == (EVALUATION, 150, 170 / NS)


def test_an_evaluation_is_no_part_of_the_step_around_it():
    boundary = [COMPUTE, COMPUTE, True, True, True, False]
    ledger = Ledger(0)
    ledger.fold([(100, 100, *boundary), (200, 200, *boundary)])
    ledger.sampled(230, evaluates=True)
    ledger.sampled(930, evaluates=False)
    ledger.fold([(1000, 1000, *boundary)])
    assert [round(step.seconds * NS) for step in ledger.take_steps()] == [100, 100]
    assert ledger.ns[EVALUATION] == 700


def test_what_no_hook_saw_is_absent_and_not_zero():
    ledger = dict.fromkeys(CATEGORIES, 0.0) | {STARTUP: 2.0, COMPUTE: 8.0}
    by_hand = dataclasses.replace(full_view(), totals=Totals(ledger_seconds=ledger, exposed_wait_seconds=None))
    counted = dataclasses.replace(by_hand, totals=Totals(steps=5, unseen_steps=5, ledger_seconds=ledger))
    starting = dataclasses.replace(by_hand, totals=Totals(ledger_seconds=ledger | {COMPUTE: 0.0}))
    with_loader = dataclasses.replace(by_hand, totals=Totals(steps=5, ledger_seconds=ledger | {DATA_WAIT: 1e-6}))
    names = "training_steps_total", "training_wait_duration_seconds_sum"
    shown = {
        name: {
            line.partition("{")[0]
            for line in page(view).splitlines()
            if line.startswith(names) or (line.startswith("training_time_seconds_total") and "data_wait" in line)
        }
        for name, view in (("by hand", by_hand), ("counted", counted), ("starting", starting), ("loader", with_loader))
    }
    time = "training_time_seconds_total"
    assert shown == {
        "by hand": set(),
        "counted": {"training_steps_total"},
        "starting": {time, "training_steps_total", "training_wait_duration_seconds_sum"},
        "loader": {time, "training_steps_total", "training_wait_duration_seconds_sum"},
    }


# -- the number of steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [0.02, 0.05, 0.9])
def test_bursts_of_samples_show_how_often_a_backward_pass_begins(period):
    pace, now, late = BackwardPace(), 0.0, random.Random(1)
    while pace.period_seconds is None and now < 120:
        now += pace.gap_seconds * late.expovariate(1) if pace.due(now) else 0.1
        if pace.due(now):
            pace.take(int(now * NS), now, backward=now % period > 0.5 * period)
    assert pace.period_seconds == pytest.approx(period, rel=0.1)
    assert not pace.due(now), "the next burst comes much later"
    assert pace.steps(60.0) == pytest.approx(60 / period, rel=0.1)


def test_steps_that_are_too_short_for_samples_are_not_counted():
    pace, now = BackwardPace(), 0.0
    for _ in range(5000):
        now += pace.gap_seconds
        pace.take(int(now * NS), now, backward=int(now / 0.0007) % 2 == 0)
    assert pace.steps(60.0) is None


# -- the lines of the loop ---------------------------------------------------------------------------------------------


def at(line: int, function: str = "main", module: str = "__main__") -> Spot:
    return Spot(f"/src/{module}.py", line, function, module)


def test_the_lines_are_those_of_the_loop_and_shares_of_all_of_it():
    profile = StackProfile()
    main, layer = at(99, "<module>"), Spot("/l/torch/nn/modules/linear.py", 1, "forward", "torch.nn.modules.linear")
    for stack, times in (
        ((at(7, "step", "envs"), at(20, "collect", "ppo"), at(50), main), 30),
        ((layer, at(22, "collect", "ppo"), at(50), main), 21),
        ((layer, at(31, "update", "ppo"), at(51), main), 49),
    ):
        for _ in range(times):
            profile.add(stack, StackTime(10))
    lines = loop_lines(profile, lambda stack: "other" if stack[-2].line == 50 else "forward")
    assert [(each.named, each.share_ratio, each.part) for each in lines] == [
        ("ppo.collect at __main__.py:50", 0.51, "other"),
        ("ppo.update at __main__.py:51", 0.49, "forward"),
    ]


# -- real runs ---------------------------------------------------------------------------------------------------------

BY_HAND = """
import sys, time, torch
torch.set_num_threads(1)
model, x = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.Linear(900, 300)), torch.randn(512, 300)

def evaluate(until):
    model.eval()
    with torch.no_grad():
        while time.perf_counter() < until:
            model(x)

def train(until):
    model.train()
    steps = 0
    while time.perf_counter() < until:
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=1e-3)
        steps += 1
    return steps

steps = evaluated = 0
for _ in range(2):
    steps += train(time.perf_counter() + 4)
    begun = time.perf_counter()
    evaluate(begun + 2)
    evaluated += time.perf_counter() - begun
print(steps, evaluated)
"""


def run(folder: Path, script: str) -> tuple[list[str], dict]:
    """Run a script with the agent. Returns what it printed last, and its report."""
    path = folder / "train.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "telemetry", "run", "--run-dir", str(folder / "run"), "--port", "off"]
    printed = subprocess.run([*command, str(path)], env=environment, check=True, capture_output=True, text=True)
    command = [sys.executable, "-m", "telemetry", "report", str(folder / "run"), "--json"]
    report = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return printed.stdout.split(), json.loads(report.stdout)


def test_parameters_that_the_script_updates_itself(tmp_path):
    (_, evaluated), report = run(tmp_path, BY_HAND)
    (rank,) = report["ranks"]
    ledger = rank["ledger"]
    assert rank["steps"] is None, "none was counted"
    assert rank["estimated_steps"] > 0, "how good it is, `tests.programs` says on a quiet machine"
    assert ledger["data_wait"] == 0, "the ledger has all seconds, and adds up"
    assert rank["data_wait_seconds"]["p50"] is None
    assert ledger["evaluation"] == pytest.approx(float(evaluated), rel=0.5)
    assert ledger["compute"] == pytest.approx(8, rel=0.5)
    assert sum(ledger.values()) == pytest.approx(rank["wall_seconds"], abs=0.01)
    assert "steps, by stack samples" in report["verdict"]
    assert all(line["part"] for line in rank["step_lines"])
    assert "with telemetry.step(): around the body of the loop" in report["verdict"]
