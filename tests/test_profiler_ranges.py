"""Profiler ranges: in a trace while it is recorded, and as NVTX ranges all the time with the setting ``nvtx``."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.seams.attachment import Attachment
from telemetry.seams.ring import Ring
from telemetry.seams.tracker import StepTracker
from telemetry.seams.watch import wrap
from tests.data_sets import Numbers
from tests.snapshot_recording import Taken


def ranges(taken: Taken, outcome) -> list[str]:
    return [
        e["name"] for e in sorted(taken.events(outcome), key=lambda e: e["ts"]) if e.get("cat") == "user_annotation"
    ]


def iterate_with_phases(observed, name: str, steps: int) -> None:
    """Iterate a watched list, with a phase of this name in each step."""
    for _ in wrap(list(range(steps)), lambda: observed.tracker):
        before = observed.tracker.enter_phase(name)
        observed.tracker.exit_phase(name, before, 0)


def test_a_trace_shows_steps_phases_and_waits_for_a_watched_iterable(taken, observed):
    taken.arm(3, 4)
    iterate_with_phases(observed, "my phase", 6)
    wait = "enumerate(DataLoader)#list_iterator.__next__"
    step = [wait, "my phase"]
    assert ranges(taken, taken.outcome()) == ["ProfilerStep#3", *step, "ProfilerStep#4", *step]
    assert observed.tracker.profiler_ranges.makers == ()


def test_a_wait_for_a_data_loader_is_marked_once_by_torch(taken):
    taken.arm(3, 4)
    for _ in DataLoader(Numbers(6)):
        pass
    wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert ranges(taken, taken.outcome()) == ["ProfilerStep#3", wait, "ProfilerStep#4", wait]


class Nvtx:
    """Stands for ``torch.cuda.nvtx``, which a torch without CUDA does not have; it writes its calls to a file."""

    def __init__(self, path) -> None:
        self.path = path
        self.open: dict[int, str] = {}

    def write(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(line + "\n")

    def range_start(self, name: str) -> int:
        self.open[len(self.open)] = name
        self.write(f"start {name}")
        return len(self.open) - 1

    def range_end(self, number: int) -> None:
        self.write(f"end {self.open[number]}")

    def range_push(self, name: str) -> None:
        self.write(f"push {name}")

    def range_pop(self) -> None:
        self.write("pop")

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


@pytest.fixture
def nvtx(tmp_path, monkeypatch):
    stand_in = Nvtx(tmp_path / "nvtx")
    for name in ("range_start", "range_end", "range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, getattr(stand_in, name))
    return stand_in


@pytest.fixture
def marked(nvtx):
    errors: list = []
    tracker = StepTracker(Ring())
    attachment = Attachment(tracker, errors.append, nvtx=True)
    attachment.attach()
    yield tracker
    attachment.detach()
    assert errors == []
    assert tracker.errors == 0, tracker.last_error


def test_steps_waits_and_phases_are_nvtx_ranges_all_the_time(marked, nvtx):
    for _ in DataLoader(Numbers(3)):
        before = marked.enter_phase("mine")
        marked.exit_phase("mine", before, 0)
    wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    body = [f"start {wait}", f"end {wait}", "start mine", "end mine"]
    expected = ["start telemetry", "end telemetry"]
    for step in (1, 2, 3):
        expected += [f"start step {step}", *body, f"end step {step}"]
    lines = nvtx.lines()
    assert lines[: len(expected)] == expected
    assert sum(line.startswith("start") for line in lines) == sum(line.startswith("end") for line in lines)
    assert marked.ring.closed == 3


class Ran:
    def __init__(self, path) -> None:
        self.path = path

    def __call__(self, worker: int) -> None:
        self.path.write_text(str(worker))


@pytest.mark.parametrize(("context", "fetches"), [("fork", 4), ("spawn", 0)], ids=["fork", "spawn, without NVTX there"])
def test_fetches_in_workers_are_ranges_and_the_user_s_own_function_runs(marked, nvtx, tmp_path, context, fetches):
    if context == "spawn" and torch.cuda.is_available():
        pytest.skip("this torch has NVTX")
    ran = Ran(tmp_path / "ran")
    loader = DataLoader(Numbers(4), num_workers=1, worker_init_fn=ran, multiprocessing_context=context)
    assert len(list(loader)) == 4
    assert loader.worker_init_fn is ran
    assert (tmp_path / "ran").read_text() == "0"
    lines = nvtx.lines()
    assert lines.count("push fetch, worker 0") == fetches
    assert lines.count("pop") == (fetches + 1 if fetches else 0)


def test_a_torch_without_nvtx_is_an_error_and_changes_nothing_else(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", fail)  # a CUDA build has them without a GPU too
    agent = telemetry.start(tmp_path / "run", port=0, nvtx=True, interval_seconds=0.1, start_line=False)
    assert len(list(DataLoader(Numbers(5)))) == 5
    deadline = time.monotonic() + 20
    while agent.accounting.stats.steps < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    telemetry.stop()
    assert agent.errors.counts == {"attach": 1}
