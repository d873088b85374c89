"""What the callbacks share, without their frameworks. The frameworks are tested in tests/frameworks/test_callbacks.py."""

from __future__ import annotations

import pytest
import torch

import telemetry
from telemetry import api
from telemetry.integrations import marked_phase
from telemetry.integrations.accelerate_helper import AccelerateTelemetry
from telemetry.integrations.marked_phase import MarkedPhase, prefixed
from tests.faults.processes import events


class Accelerator:
    def __init__(self) -> None:
        self.rows: list = []
        self.saved: list = []

    def log(self, values, step):
        self.rows.append((step, values))

    def save_state(self, folder, **options):
        self.saved.append((folder, options))
        return folder


def test_without_an_agent_nothing_is_logged_and_calls_go_through():
    accelerator = Accelerator()
    helper = AccelerateTelemetry(accelerator, every_steps=1)
    helper.log(1, tokens=5)
    assert helper.save_state("folder", safe_serialization=False) == "folder"
    assert accelerator.saved == [("folder", {"safe_serialization": False})]
    assert accelerator.rows == []
    phase = MarkedPhase()
    phase.begin("evaluation")
    phase.begin("checkpoint")
    phase.end()
    phase.end()
    assert prefixed() == {}


def test_figures_come_at_the_interval(agent):
    accelerator = Accelerator()
    helper = AccelerateTelemetry(accelerator, every_steps=3)
    for step in range(1, 8):
        helper.log(step)
    assert [step for step, _ in accelerator.rows] == [3, 6]
    assert all(key.startswith("telemetry/") for _, values in accelerator.rows for key in values)
    assert accelerator.rows[0][1]["telemetry/steps_total"] == 0


def test_interval_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        AccelerateTelemetry(Accelerator(), every_steps=0)


def test_tokens_are_told_once_a_step(monkeypatch):
    told: list = []
    monkeypatch.setattr(api, "tokens", told.append, raising=False)
    helper = AccelerateTelemetry(Accelerator())
    for step in range(3):
        helper.log(step, tokens=10 * step)
    assert told == [10, 20]


def test_a_tensor_of_tokens_is_refused_without_reading_it():
    class OnADevice(torch.Tensor):
        def __bool__(self):
            raise AssertionError("reading it waits for the device")

    with pytest.raises(TypeError, match="tokens are a whole number, not OnADevice"):
        AccelerateTelemetry(Accelerator()).log(1, tokens=torch.zeros(()).as_subclass(OnADevice))


def test_a_phase_ends_when_the_next_begins(monkeypatch):
    seen: list = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(f"{self.name} begins")

        def __exit__(self, *error):
            seen.append(f"{self.name} ends")

    monkeypatch.setattr(marked_phase, "phase", Recorded)
    phase = MarkedPhase()
    phase.begin("evaluation")
    phase.begin("checkpoint")
    phase.end()
    phase.end()
    assert seen == ["evaluation begins", "evaluation ends", "checkpoint begins", "checkpoint ends"]


def test_save_state_is_one_checkpoint(agent):
    AccelerateTelemetry(Accelerator()).save_state("folder")
    run_dir = agent.run_dir
    telemetry.stop()
    assert [line["name"] for line in events(run_dir, "phase")] == ["checkpoint"]
