"""The faster clock of the live alerts is the same clock for each number of the rules."""

import re

import yaml

from stack.cluster import shipped

PROMETHEUS = shipped.DEPLOY / "prometheus"
RULES = [yaml.safe_load((PROMETHEUS / f"telemetry.{name}.rules.yml").read_text()) for name in ("recording", "alerts")]


def test_seconds_without_a_unit_are_divided():
    """Numbers that large are times, but for divisors, which change a unit: who adds one has to say what it is."""
    large = re.compile(r"(?<![\w:.])(?<!/ )\d{3,}(?![\w:.])")
    numbers = {}
    for document in RULES:
        for old, new in zip(document["groups"], shipped.faster_rules(document)["groups"], strict=True):
            for before, after in zip(old["rules"], new["rules"], strict=True):
                if found := large.findall(re.sub(r"\[[^]]*\]", "", before["expr"])):
                    numbers[before.get("record") or before["alert"]] = (found, after["expr"])

    assert {name: found for name, (found, _) in numbers.items()} == {
        "run_rank:training_stuck:seconds": ["120"],
        "TrainingGpuUnhealthy": ["109"],
        "TrainingHostMemoryLow": ["3600"],
        "TrainingMemoryRunningOut": ["1800"],
    }
    assert "> 8)" in numbers["run_rank:training_stuck:seconds"][1]
    assert "!= 109" in numbers["TrainingGpuUnhealthy"][1], "the number of an Xid error"
    assert "[120s], 240) > 1" in numbers["TrainingHostMemoryLow"][1]
    assert "< 1800" in numbers["TrainingMemoryRunningOut"][1], "the agent's forecast, which is as long as ever"
