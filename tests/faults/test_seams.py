"""An error at each seam of ours: the training does not see it, it is counted, and the rest goes on."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import weakref

import pytest
import torch

import telemetry
from faults.processes import HANG, events, fetch, value, wait_for
from faults.small_run import BATCHES, Dataset, train
from telemetry.attach.accelerator import Place
from telemetry.publish import exposition


class Broken(Exception):
    """Raised at a seam."""


def break_(*_, **__):
    raise Broken("injected")


@pytest.fixture(scope="module")
def unharmed():
    """What the loop gives without us."""
    assert telemetry.api._agent is None
    return {steps: train(epochs=2, steps=steps) for steps in (False, True)}


def counted(agent, source: str) -> int:
    """Wait until a failure of this source is on the page of metrics; how many."""
    return wait_for(
        lambda: value(fetch(agent.metrics_url), "telemetry_errors_total", source=source),
        f"errors of {source} are counted, of {agent.faults.counts}",
    )


def ticked(agent, times: int = 2) -> None:
    """Wait until the agent has gone on for some ticks."""
    before = agent.accounts.ledger.at_ns
    for _ in range(times):
        wait_for(lambda: agent.accounts.ledger.at_ns > before, "the agent's next tick")
        before = agent.accounts.ledger.at_ns


def break_seam(monkeypatch, agent, seam: str) -> None:
    """Put `break_` in the place of one method. A slotted object's class is changed."""
    owner: object = agent
    *path, name = seam.split(".")
    for part in path:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    target = owner if hasattr(owner, "__dict__") else type(owner)
    monkeypatch.setattr(target, name, break_)


# -- on the training thread --------------------------------------------------------------------------------------

HOOKS = [
    "tracker.request",
    "tracker.delivered",
    "tracker.failed",
    "tracker.iteration",
    "tracker.iterated",
    "tracker.sources.register",
    "tracker.sources.delivered",
    "tracker.sources.known",
    "tracker.mark_request",
    "tracker.ring.push",
    "tracker.optimizer_stepped",
    "tracker.enter_phase",
    "tracker.exit_phase",
    "tracker.enter_step",
    "tracker.exit_step",
    "tracker._switch",
    "tracker._enter_evaluation",
]


@pytest.mark.parametrize("steps", [False, True], ids=["batches", "steps"])
@pytest.mark.parametrize("seam", HOOKS)
def test_an_error_in_a_hook_stays_there(seam, steps, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    needs_steps = seam.endswith("_step")
    with monkeypatch.context() as patch:
        break_seam(patch, agent, seam)
        assert train(epochs=2, steps=steps, saved=tmp_path / "saved.pt") == unharmed[steps]
    assert torch.load(tmp_path / "saved.pt").keys() == {"weight", "bias"}
    if (needs_steps and not steps) or seam == "tracker.mark_request":  # only called with a GPU's clock
        return
    assert counted(agent, "hook") >= 1
    assert any("Broken: injected" in line["message"] for line in events(tmp_path / "run", "error"))

    before = agent.tracker.optimizer_steps
    assert train(epochs=2, steps=steps) == unharmed[steps]
    assert agent.tracker.optimizer_steps == before + 2 * BATCHES
    assert agent.tracker.waiting_since == 0


def test_an_error_as_the_workers_of_a_loader_are_stopped_stays_there(start, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        break_seam(patch, agent, "tracker.leaving")
        for _ in torch.utils.data.DataLoader(Dataset(), num_workers=1):
            workers = multiprocessing.active_children()
            break
    assert [worker.is_alive() for worker in workers] == [False]
    assert counted(agent, "hook") == 1


def test_an_error_that_is_kept_keeps_nothing_of_the_training_alive(start, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        break_seam(patch, agent, "tracker.delivered")

        def epoch():
            model = torch.nn.Linear(2, 1)
            for batch in torch.utils.data.DataLoader(Dataset(), batch_size=2):
                model(batch)
            return weakref.ref(model)

        model = epoch()
    assert agent.tracker.errors > 0
    assert model() is None


def test_errors_in_a_hook_leave_the_other_steps_counted(start, monkeypatch):
    """One failure costs its own step at most, and does not switch the measuring off."""
    agent = start()
    failing = iter([True, False, True] + [False] * 1000)
    delivered = type(agent.tracker).delivered

    def sometimes(*arguments):
        if next(failing):
            break_()
        delivered(*arguments)

    monkeypatch.setattr(type(agent.tracker), "delivered", sometimes)
    train(epochs=3)
    telemetry.stop()
    assert 3 * BATCHES - 3 <= agent.accounts.stats.steps <= 3 * BATCHES
    assert agent.faults.counts == {"hook": 2} | {k: n for k, n in agent.faults.counts.items() if k != "hook"}


def test_an_error_of_gradients_or_device_stays_there(start, unharmed, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        patch.setattr(agent.tracker, "_grad_enabled", break_)
        patch.setattr(agent.tracker, "_current_device", break_)
        assert train(epochs=2) == unharmed[False]
    assert counted(agent, "hook") >= 1


class BrokenEvents:
    """CUDA events that fail at one of their calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def make(self):
        if self.at == "new":
            break_()
        return self

    def record(self):
        if self.at == "record":
            break_()

    def query(self):
        if self.at == "query":
            break_()
        return True

    def elapsed_time(self, _after):
        if self.at == "elapsed":
            break_()
        return 0.0

    def event(self):
        return self.make()

    def begin(self):
        if self.at == "usable":
            break_()
        return Place(0, 0)

    def end(self):
        pass


@pytest.mark.parametrize("at", ["new", "record", "query", "elapsed", "usable"])
def test_a_gpu_clock_that_fails_costs_its_own_figure_and_no_step(at, start, unharmed):
    from telemetry.attach.gpu_clock import GpuClock

    agent = start()
    agent.tracker.gpu = GpuClock(BrokenEvents(at))
    assert train(epochs=2) == unharmed[False]
    assert counted(agent, "hook") >= 1
    telemetry.stop()
    assert agent.accounts.stats.steps == 2 * BATCHES
    assert agent.faults.counts["hook"] == 1, "a clock that failed is not asked again"


@pytest.mark.parametrize("seam", ["DataLoader.__iter__", "torch.save", "optimizer", "_BaseDataLoaderIter.__next__"])
def test_a_hook_that_cannot_be_placed_leaves_the_others(seam, start, unharmed, monkeypatch, tmp_path):
    """A version of torch that has moved one of them."""
    from telemetry.attach import patches

    replace = patches.Patches.replace

    def moved(self, owner, name, wrap):
        if f"{owner.__name__}.{name}" == seam:
            raise AttributeError(f"no {name}")
        replace(self, owner, name, wrap)

    with monkeypatch.context() as patch:
        patch.setattr(patches.Patches, "replace", moved)
        if seam == "optimizer":
            patch.setattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook", break_)
        agent = start()
    assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False]
    assert counted(agent, "attach") == 1
    assert (agent.tracker.optimizer_steps > 0) is (seam != "optimizer")
    telemetry.stop()
    assert agent.accounts.stats.steps >= (0 if "__next__" in seam else 2 * BATCHES - 2)
    loader = torch.utils.data.dataloader
    assert loader.DataLoader.__iter__.__module__ == loader._BaseDataLoaderIter.__next__.__module__ == loader.__name__
    assert "telemetry" not in torch.save.__code__.co_filename


# -- on the agent's threads --------------------------------------------------------------------------------------

AGENT_SEAMS = {
    "_wall.resync": "clock",
    "tracker.ring.drain": "ledger",
    "accounts.ledger.fold": "ledger",
    "accounts.ledger.advance": "ledger",
    "accounts.ledger.take_steps": "ledger",
    "accounts.ledger.take_phases": "jsonl",
    "accounts.stats.add": "ledger",
    "accounts.exposed.host": "ledger",
    "accounts.stats.take_window": "jsonl",
    "accounts.stats.commit": "jsonl",
    "_sampler.poll": "collect",
    "_sampler.take_log_fields": "jsonl",
    "logbook.log.emit": "jsonl",
    "logbook.log.file._append": "jsonl",
    "logbook.window": "jsonl",
    "_tick": "agent",
    "_lead": "agent",
    "_sampler._pollers.host.source.read": "host",
    "_sampler._pollers.process.source.read": "process",
    "_sampler._pollers.workers.source.read": "workers",
    "_sampler._pollers.pressure.source.read": "pressure",
    "_sampler._pollers.torch_memory.source.read": "torch_memory",
    "_sampler._pollers.nvml.source.read": "nvml",
    "_sampler._pollers.host.poll": "collect",
}


@pytest.mark.parametrize("seam", AGENT_SEAMS)
def test_an_error_on_the_agent_s_thread_stays_there(seam, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    ticked(agent)
    nvml_before = agent.faults.counts.get("nvml", 0)
    with monkeypatch.context() as patch:
        break_seam(patch, agent, seam)
        assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False]
        source = AGENT_SEAMS[seam]
        wait_for(
            lambda: agent.faults.counts.get(source, 0) > (nvml_before if source == "nvml" else 0),
            f"an error of {source}, in {agent.faults.counts}",
        )
        assert agent._thread.is_alive()
    assert counted(agent, source) >= 1  # the page is served, and it is there
    ticked(agent)
    assert train(epochs=2) == unharmed[False]
    telemetry.stop()
    (end,) = events(tmp_path / "run", "run_end")
    assert end["errors_total"][source] >= 1
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


@pytest.mark.parametrize("seam", ["view", "families", "render", "board"])
def test_an_error_in_the_rendering_leaves_the_log(seam, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    ticked(agent)
    places = {
        "view": (agent, "_view"),
        "families": (agent._families, "_loop"),
        "render": (agent._renderer, "render"),
        "board": (agent._node._board, "publish"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[seam], break_)
        assert train(epochs=2) == unharmed[False]
        wait_for(lambda: agent.faults.counts.get("exposition"), "an error in the exposition")
        lines = len(events(tmp_path / "run", "window", running=True))
        wait_for(lambda: len(events(tmp_path / "run", "window", running=True)) > lines, "the log goes on")
        assert value(fetch(agent.metrics_url), "training_run_info") == 1, "the newest state that there is"
    assert counted(agent, "exposition") >= 1


def test_a_board_that_cannot_be_read_is_an_error_of_one_request(start, monkeypatch):
    import urllib.error

    from telemetry.publish import endpoint

    agent = start()
    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "join", break_)
        with pytest.raises(urllib.error.HTTPError) as failed:
            fetch(agent.metrics_url)
        assert failed.value.code == 500
        assert b"Broken" not in failed.value.read(), "nothing of the inside is told"
    assert agent._node.endpoint.failures == 1
    assert "training_run_info" in fetch(agent.metrics_url)


@pytest.mark.parametrize("part", ["attach", "board", "endpoint", "run_start", "atexit", "line"])
def test_an_error_in_the_start_leaves_the_rest(part, start, unharmed, monkeypatch, tmp_path, capfd):
    import atexit

    import telemetry.agent as module
    from telemetry import logbook

    places = {
        "attach": (module.Attachment, "attach"),
        "board": (module, "Board"),
        "endpoint": (module.NodeService, "lead_if_vacant"),
        "run_start": (logbook.JsonLog, "emit"),
        "atexit": (atexit, "register"),
        "line": (module.sys, "stderr"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[part], None if part == "line" else break_)
        agent = start(start_line=part == "line")
    assert train(epochs=2) == unharmed[False]
    if part == "atexit":  # without it nothing would end the agent: it is not started, and says so
        assert agent.running is False
        assert "cannot start (Broken: injected)" not in capfd.readouterr().err, "start_line is off"
        return
    source = {"run_start": "jsonl", "line": "start_line"}.get(part, part)
    wait_for(lambda: agent.faults.counts.get(source), f"an error of {source}")
    telemetry.stop()
    (end,) = events(tmp_path / "run", "run_end")
    assert end["steps_total"] == (0 if part == "attach" else 2 * BATCHES)


ENDS = [
    "accounts.update",
    "logbook.window",
    "logbook.end_fields",
    "logbook.emit",
    "_publish",
    "_sampler.close",
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
    assert len(events(tmp_path / "run", "run_end")) == (0 if part in {"logbook.end_fields", "logbook.emit"} else 1)
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


def test_a_family_that_cannot_be_rendered_is_an_error_of_the_agent_alone(start, monkeypatch):
    agent = start()
    monkeypatch.setattr(exposition, "generate_latest", break_)
    ticked(agent)
    wait_for(lambda: agent.faults.counts.get("exposition"), "an error in the exposition")
    assert agent._thread.is_alive()
