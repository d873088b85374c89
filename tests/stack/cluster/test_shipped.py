"""The faster clock is the same clock: every duration of the rules is divided, by one factor, and nothing else changes."""

import re

import pytest
import yaml

from stack.cluster import shipped

PROMETHEUS = shipped.DEPLOY / "prometheus"
RULES = [yaml.safe_load((PROMETHEUS / f"telemetry.{name}.rules.yml").read_text()) for name in ("recording", "alerts")]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


@pytest.mark.parametrize("document", RULES, ids=["recording", "alerts"])
def test_every_duration_of_the_rules_is_divided(document):
    faster = shipped.faster_rules(document)

    assert [group["name"] for group in faster["groups"]] == [group["name"] for group in document["groups"]]
    pairs = []
    for old_group, new_group in zip(document["groups"], faster["groups"], strict=True):
        for old, new in zip(old_group["rules"], new_group["rules"], strict=True):
            assert old.keys() == new.keys()
            changed = {key for key in old if old[key] != new[key]}
            assert changed <= {"expr", "for", "keep_firing_for"}
            assert changed >= {"for", "keep_firing_for"} & old.keys()
            pairs += [(old[key], new[key]) for key in changed - {"expr"}]
            ranges = [re.findall(r"\[([^]]*)\]", rule["expr"]) for rule in (old, new)]
            pairs += zip(*ranges, strict=True)
            assert re.sub(r"\[[^]]*\]|\d+", "", old["expr"]) == re.sub(r"\[[^]]*\]|\d+", "", new["expr"])
    assert len(pairs) > 10
    assert all(seconds(new) == pytest.approx(seconds(old) / shipped.SPEED, abs=0.001) for old, new in pairs)


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
