"""A capture on the real hooks, for tests that record steps of a real loop."""

from __future__ import annotations

import json

import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader

from telemetry.config import Config
from telemetry.safety.processes import Identity
from telemetry.snapshot.budget import Budget
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.plan import REQUEST, Plan, Request
from tests.data_sets import Numbers

ME = Identity("a run", 3, 3, 4, "n", 1, "plain")


def plan(first: int, last: int) -> Plan:
    request = Request("1700000000000-0000000a", REQUEST, None, last - first + 1, "a test")
    return Plan(request, first)


class Taken:
    """A capture on the real hooks, armed for some steps."""

    def __init__(self, observed, tmp_path) -> None:
        self.observed = observed
        self.path = tmp_path / "trace.json"
        profilers = observed.attachment.profilers
        self.capture = Capture(observed.tracker, profilers, Config(snapshot_max_seconds=30), ME)
        profilers.before_theirs = self.capture.give_way

    def arm(self, first: int, last: int) -> None:
        self.budget = Budget(Config(), 1)
        self.capture.arm(plan(first, last), self.budget)

    def outcome(self):
        outcome = self.capture.take()
        self.observed.read()
        return outcome

    def events(self, outcome) -> list[dict]:
        if not self.path.exists():
            outcome.trace.save(self.path)
        self.trace = json.loads(self.path.read_text())
        return self.trace["traceEvents"]

    def steps(self, outcome) -> list[int]:
        names = [event["name"] for event in self.events(outcome)]
        return sorted(int(n.removeprefix("ProfilerStep#")) for n in names if n.startswith("ProfilerStep#"))


def mark(step: int) -> None:
    """What a trace shows of a step's work."""
    with record_function(f"work {step}"):
        torch.ones(4).sum()


def marks(events: list[dict]) -> list[int]:
    names = {event["name"] for event in events if event.get("ph") == "X"}
    return sorted(int(name.removeprefix("work ")) for name in names if name.startswith("work "))


def train(length: int, start: int = 0, loader=None) -> None:
    for step, _ in enumerate(loader or DataLoader(Numbers(length)), start + 1):
        mark(step)
