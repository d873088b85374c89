"""What the callbacks share, without their frameworks. The frameworks are tested in tests/frameworks/test_callbacks.py."""

from __future__ import annotations

import pytest
import torch

import telemetry
from telemetry import api
from telemetry.integrations import MarkedPhase, prefixed
from telemetry.integrations.accelerate_helper import AccelerateTelemetry
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
    phase.end()
    phase.end()
    assert prefixed() == {}
    with pytest.raises(ValueError, match="at least 1"):
        AccelerateTelemetry(accelerator, every_steps=0)


def test_figures_come_at_the_interval_and_save_state_is_one_checkpoint(agent):
    accelerator, run_dir = Accelerator(), agent.run_dir
    helper = AccelerateTelemetry(accelerator, every_steps=3)
    for step in range(1, 8):
        helper.log(step)
    assert [step for step, _ in accelerator.rows] == [3, 6]
    assert all(key.startswith("telemetry/") for _, values in accelerator.rows for key in values)
    assert accelerator.rows[0][1]["telemetry/steps_total"] == 0
    helper.save_state("folder")
    telemetry.stop()
    assert [line["name"] for line in events(run_dir, "phase")] == ["checkpoint"]


def test_tokens_are_told_once_a_step_and_a_tensor_is_refused_without_reading_it(monkeypatch):
    class OnADevice(torch.Tensor):
        def __bool__(self):
            raise AssertionError("reading it waits for the device")

    helper = AccelerateTelemetry(Accelerator())
    with pytest.raises(TypeError, match="tokens are a whole number, not OnADevice"):
        helper.log(1, tokens=torch.zeros(()).as_subclass(OnADevice))
    told: list = []
    monkeypatch.setattr(api, "tokens", told.append)
    for step in range(3):
        helper.log(step, tokens=10 * step)
    assert told == [10, 20]


def test_a_phase_ends_when_the_next_begins(monkeypatch):
    seen: list = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(f"{self.name} begins")

        def __exit__(self, *error):
            seen.append(f"{self.name} ends")

    monkeypatch.setattr(api, "phase", Recorded)
    phase = MarkedPhase()
    phase.begin("evaluation")
    phase.begin("checkpoint")
    phase.end()
    phase.end()
    assert seen == ["evaluation begins", "evaluation ends", "checkpoint begins", "checkpoint ends"]
