"""`telemetry.metrics()`: the flat table of figures, its sources, and the moments at which it may be asked."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import DataLoader

import telemetry
from telemetry.model.records import CATEGORIES, Histogram
from telemetry.model.totals import LogWindow, Totals
from telemetry.node.metrics import RunView
from telemetry.sinks.figures import METRIC_FIGURES, STATE_FIGURES, WINDOW_FIGURES, figures
from tests.full_views import page
from tests.running_agent import log_lines, wait_for

NAMES = [figure.name for figure in (*WINDOW_FIGURES, *STATE_FIGURES, *METRIC_FIGURES)]


@pytest.fixture
def agent(tmp_path):
    agent = telemetry.start(
        tmp_path / "run", port=0, interval_seconds=0.1, log_interval_seconds=0.2, start_line=False, sinks=""
    )
    yield agent
    telemetry.stop()


def train(steps: int = 20) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for batch in DataLoader(torch.zeros(steps, 1)):
        time.sleep(0.01)
        (weight * batch).sum().backward()
        optimizer.step()


def empty_view(**changes) -> RunView:
    none = Histogram((), (0,), 0.0)
    values = {
        "info": {},
        "started_unix_seconds": 0.0,
        "ended": False,
        "totals": Totals(exposed_wait_seconds=None),
        "step_duration": none,
        "wait_duration": none,
        "last_step_unix_seconds": None,
        "errors": {},
    }
    return RunView(**(values | changes))


def test_before_the_first_step_nothing_is_invented(agent):
    found = telemetry.metrics()
    telemetry.metrics()["steps_total"] = -1.0  # the result is the caller's own
    assert found["steps_total"] == 0
    assert not [
        name for name in found if name.startswith(("steps_per_second", "step_seconds", "data_wait_ratio", "gpu_"))
    ]


def test_figures_of_a_run_are_numbers_and_documented(agent):
    train()
    wait_for(lambda: telemetry.metrics().get("steps_total") == 20)
    found = wait_for(lambda: telemetry.metrics() if telemetry.metrics().get("steps_per_second", 0) > 0 else None)
    assert set(found) <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in NAMES)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert all(
        0 <= value <= 1 for name, value in found.items() if name.endswith("_ratio") and name != "step_change_ratio"
    )


def test_figures_agree_with_the_endpoint(agent):
    train()

    wait_for(lambda: telemetry.metrics().get("steps_total") == 20)
    view = agent._view()
    text = page(view)
    shown = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"run", "rank"} and (k, v) != ("node", "n1")}
            shown[(sample.name, *labels.values())] = sample.value
    found = figures(view, None)
    for figure in METRIC_FIGURES:
        assert found.get(figure.name) == shown.get((f"training_{figure.name}",)), figure
    for category in CATEGORIES:
        assert found[f"{category}_seconds_total"] == shown["training_time_seconds_total", category]
    assert found["stalls_total"] == sum(v for key, v in shown.items() if key[0] == "training_stalls_total")


def test_figures_agree_with_the_newest_window(agent):
    train()
    wait_for(lambda: telemetry.metrics().get("steps_total") == 20)
    newest = agent.event_log.newest_window
    telemetry.stop()
    window = [line for line in log_lines(agent) if line["event"] == "window"][-1]
    found = agent.figures.newest
    assert agent.event_log.newest_window is not newest, "the end writes one more window"
    assert found.get("exposed_wait_ratio") == pytest.approx(window["exposed_wait_ratio"], abs=1e-5) or (
        found.get("exposed_wait_ratio") is None and window["exposed_wait_ratio"] is None
    )
    assert found["steps_per_second"] == pytest.approx(window["steps"] / window["window_seconds"], rel=1e-3)


def test_what_was_not_measured_is_absent_and_no_value_is_infinite():
    view = empty_view(step_change_ratio=math.inf)
    assert not set(figures(view, None)) & {"exposed_wait_seconds_total", "step_change_ratio"}
    found = figures(view, LogWindow(Totals(wall_seconds=4.0, exposed_wait_seconds=None, samples=10), None, None))
    assert (found["steps_per_second"], found["samples_per_second"]) == (0, 2.5)
    unknown = {"data_wait_ratio", "exposed_wait_ratio", "step_seconds_p50", "tokens_per_second"}
    assert not set(found) & unknown
    assert "steps_per_second" not in figures(view, LogWindow(Totals(wall_seconds=0.0), None, None))


def test_a_busy_agent_does_not_hold_the_caller_up(agent):
    """It takes no lock of the agent: the agent thread is stopped inside its publication."""
    inside, go_on = threading.Event(), threading.Event()
    publish = agent._node.publish

    def slow(*args, **kwargs):
        inside.set()
        go_on.wait(20)
        return publish(*args, **kwargs)

    agent._node.publish = slow
    assert inside.wait(20)
    assert telemetry.metrics()["steps_total"] == 0
    go_on.set()


def test_there_are_none_in_a_forked_child_nor_without_an_agent(agent, tmp_path):
    child = os.fork()
    if child == 0:
        (tmp_path / "child.json").write_text(json.dumps(telemetry.metrics()))
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / "child.json").read_text()) == {}
    assert telemetry.metrics()
    telemetry.stop()
    assert telemetry.metrics() == {}
