"""A capture on the real hooks, for tests that record steps of a real loop, and an export of what stands for a recording.

Some of the scripts that import it do without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from telemetry.config import Config
from telemetry.model.records import RECORDED
from telemetry.snapshot.budget import Budget
from telemetry.snapshot.capture import Capture
from telemetry.snapshot.export import Export, Outcome
from telemetry.snapshot.plan import REQUEST, Plan, Request
from telemetry.util.identity import Identity

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
        self.outcomes = []
        self.budget = Budget(Config(), 1)
        export = SimpleNamespace(plan=plan(first, last), budget=self.budget, submit=self.outcomes.append)
        self.capture.arm(export)

    def outcome(self):
        (outcome,) = self.outcomes
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
    import torch
    from torch.profiler import record_function

    with record_function(f"work {step}"):
        torch.ones(4).sum()


def marks(events: list[dict]) -> list[int]:
    names = {event["name"] for event in events if event.get("ph") == "X"}
    return sorted(int(name.removeprefix("work ")) for name in names if name.startswith("work "))


def train(length: int, start: int = 0) -> None:
    from torch.utils.data import DataLoader

    from tests.data_sets import Numbers

    for step, _ in enumerate(DataLoader(Numbers(length)), start + 1):
        mark(step)


class SavedAs:
    """Stands for a recording that torch saves as ``content``."""

    def __init__(self, content: bytes) -> None:
        self.content, self.freed = content, False
        self.path: Path | None = None

    def save(self, path: Path) -> float:
        self.path = path
        path.write_bytes(self.content)
        return 0.001

    def free(self) -> float:
        self.freed = True
        return 0.001


def exported(snapshots: Path, trace: SavedAs, disk_bytes: int = 1 << 20, workers: tuple = ()) -> Export:
    """An export of a recording of step 5, once it has ended."""
    loader = SimpleNamespace(block=SimpleNamespace(read=lambda: workers))
    config, loaders = Config(snapshot_disk_bytes=disk_bytes), SimpleNamespace(live=lambda: [loader])
    export = Export(plan(5, 5), Budget(config, 1), snapshots=snapshots, config=config, identity=ME, loaders=loaders)
    export.budget.end()
    export.submit(Outcome(RECORDED, started_ns=0, ended_ns=1 << 62, trace=trace))
    export.thread.join(60)
    return export
