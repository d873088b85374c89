"""An error on the agent's threads: the training does not see it, it is counted, and the rest goes on."""

from __future__ import annotations

import sys
import threading

import pytest

import telemetry
from faults.processes import HANG, events, fetch, value, wait_for
from faults.small_run import BATCHES, train
from telemetry.node import endpoint, prometheus
from tests.faults.broken_seams import HOOKS, break_, break_seam, counted


@pytest.fixture(scope="module")
def unharmed():
    """The result of the loop without the agent."""
    assert telemetry.api._agent is None
    return {steps: train(epochs=2, steps=steps) for steps in (False, True)}


def ticked(agent, times: int = 2) -> None:
    """Wait until the agent has made some ticks."""
    before = agent.accounting.ledger.at_ns
    for _ in range(times):
        wait_for(lambda: agent.accounting.ledger.at_ns > before, "the agent's next tick")
        before = agent.accounting.ledger.at_ns


# -- on the agent's threads --------------------------------------------------------------------------------------

AGENT_SEAMS = {
    "_wall.resync": "clock",
    "tracker.ring.drain": "ledger",
    "accounting.ledger.fold": "ledger",
    "accounting.ledger.advance": "ledger",
    "accounting.ledger.take_steps": "ledger",
    "accounting.ledger.take_phases": "jsonl",
    "accounting.stats.add": "ledger",
    "accounting.samples.fold": "ledger",
    "accounting.exposed.host": "ledger",
    "accounting.stats.take_window": "jsonl",
    "accounting.stats.commit": "jsonl",
    "_collectors.poll": "collect",
    "_collectors.take_log_fields": "jsonl",
    "event_log.log.emit": "jsonl",
    "event_log.log.file._append": "jsonl",
    "event_log.window": "jsonl",
    "attempt.tick": "heartbeat",
    "attempt._state": "heartbeat",
    "attempt._replay.add": "ledger",
    "attempt.fields": "jsonl",
    "attempt.phase_lines": "jsonl",
    "_losses.tick": "attempts",
    "_counts.tick": "attempts",
    "_losses.view": "exposition",
    "job_hang.tick": "diagnose",
    "_tick": "agent",
    "_lead": "agent",
    "_collectors._pollers.host.source.read": "host",
    "_collectors._pollers.process.source.read": "process",
    "_collectors._pollers.workers.source.read": "workers",
    "_collectors._pollers.pressure.source.read": "pressure",
    "_collectors._pollers.torch_memory.source.read": "torch_memory",
    "_collectors._pollers.nvml.source.read": "nvml",
    "_collectors._pollers.host.poll": "collect",
}


@pytest.mark.parametrize("seam", AGENT_SEAMS)
def test_an_error_on_the_agent_s_thread_stays_there(seam, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    ticked(agent)
    nvml_before = agent.errors.counts.get("nvml", 0)
    with monkeypatch.context() as patch:
        break_seam(patch, agent, seam)
        assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False]
        source = AGENT_SEAMS[seam]
        wait_for(
            lambda: agent.errors.counts.get(source, 0) > (nvml_before if source == "nvml" else 0),
            f"an error of {source}, in {agent.errors.counts}",
        )
        assert agent._thread.is_alive()
    assert counted(agent, source) >= 1  # the metrics are served and count it
    ticked(agent)
    assert train(epochs=2) == unharmed[False]
    telemetry.stop()
    (end,) = events(tmp_path / "run", "run_end")
    assert end["errors_total"][source] >= 1
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


@pytest.mark.parametrize("seam", ["view", "board"])
def test_an_error_in_the_rendering_leaves_the_log(seam, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    ticked(agent)
    places = {
        "view": (agent, "_view"),
        "board": (agent._node.board, "publish"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[seam], break_)
        assert train(epochs=2) == unharmed[False]
        wait_for(lambda: agent.errors.counts.get("exposition"), "an error in the exposition")
        lines = len(events(tmp_path / "run", "window", running=True))
        wait_for(lambda: len(events(tmp_path / "run", "window", running=True)) > lines, "the log goes on")
        assert value(fetch(agent.metrics_url), "training_run_info") == 1, "the newest state that there is"
    assert counted(agent, "exposition") >= 1


def test_a_board_that_cannot_be_read_is_an_error_of_one_request(start, monkeypatch):
    import urllib.error

    agent = start()
    with monkeypatch.context() as patch:
        patch.setattr(prometheus, "rendered", break_)
        with pytest.raises(urllib.error.HTTPError) as failed:
            fetch(agent.metrics_url)
        assert failed.value.code == 500
        assert b"Broken" not in failed.value.read(), "nothing of the inside is told"
    assert counted(agent, "endpoint") == 1
    assert "training_run_info" in fetch(agent.metrics_url)


@pytest.mark.parametrize("part", ["attach", "board", "endpoint", "run_start", "atexit", "line"])
def test_an_error_in_the_start_leaves_the_rest(part, start, unharmed, monkeypatch, tmp_path, capfd):
    import atexit

    import telemetry.agent.agent as module
    from telemetry.agent import agent as parts
    from telemetry.agent import log

    places = {
        "attach": (parts.Attachment, "attach"),
        "board": (module, "Board"),
        "endpoint": (module.NodeService, "lead_if_vacant"),
        "run_start": (log.JsonLog, "emit"),
        "atexit": (atexit, "register"),
        "line": (sys, "stderr"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[part], None if part == "line" else break_)
        agent = start(start_line=part == "line")
    assert train(epochs=2) == unharmed[False]
    if part == "atexit":  # without atexit nothing would end the agent: it does not start, and reports that
        assert agent.running is False
        assert capfd.readouterr().err == "telemetry: cannot start (Broken: injected); the run goes on without it\n"
        return
    source = {"run_start": "jsonl", "line": "start_line"}.get(part, part)
    wait_for(lambda: agent.errors.counts.get(source), f"an error of {source}")
    telemetry.stop()
    (end,) = events(tmp_path / "run", "run_end")
    assert end["steps_total"] == (0 if part == "attach" else 2 * BATCHES)


ENDS = [
    "accounting.update",
    "accounting.close",
    "snapshots.end",
    "snapshots.wait",
    "_stall_monitor.wait_for_callback",
    "_losses.tick",
    "_losses.end",
    "event_log.close",
    "attempt.close",
    "_job.close",
    "event_log.window",
    "event_log.end_fields",
    "event_log.emit",
    "_publish",
    "_collectors.close",
    "_node.leave",
]


@pytest.mark.parametrize("part", [*ENDS, "attachment.detach"])
def test_an_error_in_the_end_leaves_the_rest(part, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    assert train(epochs=2) == unharmed[False]
    ticked(agent)
    with monkeypatch.context() as patch:
        break_seam(patch, agent, part)
        telemetry.stop()
        agent._thread.join(HANG)
    assert not agent._thread.is_alive()
    if part == "attachment.detach":
        agent.attachment.detach()
    if part == "_node.leave":
        agent._node.leave()
    assert agent._node.endpoint is None
    assert len(events(tmp_path / "run", "run_end")) == (0 if part in {"event_log.end_fields", "event_log.emit"} else 1)
    assert train(epochs=2) == unharmed[False]


def test_the_same_failure_at_every_step_does_not_flood_the_log(start, unharmed, monkeypatch, tmp_path):
    agent = start()
    monkeypatch.setattr(type(agent.tracker), "request", break_)
    for _ in range(20):
        train()
    assert counted(agent, "hook") >= 20
    ticked(agent, 3)
    assert len([line for line in events(tmp_path / "run", "error") if line["source"] == "hook"]) == 1


def test_hooks_of_other_threads_pass_through_whatever_fails(start, unharmed, monkeypatch):
    agent = start()
    for seam in HOOKS:
        break_seam(monkeypatch, agent, seam)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(train(epochs=2)))
    thread.start()
    thread.join(HANG)
    assert seen == [unharmed[False]]


def test_metrics_that_cannot_be_read_are_an_error_of_the_agent_alone(start, monkeypatch):
    agent = start()
    monkeypatch.setattr(endpoint, "numbers_of", break_)
    ticked(agent)
    wait_for(lambda: agent.errors.counts.get("exposition"), "an error in the exposition")
    assert agent._thread.is_alive()
