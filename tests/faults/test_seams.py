"""An error anywhere in the agent: the training does not see it, it is counted, and the rest goes on."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import weakref
from collections import OrderedDict

import pytest
import torch

import telemetry
from telemetry.seams.device import DeviceStream, GpuClock
from tests.faults.processes import HANG, end_of, events, fetch, told, value, wait_for

BATCHES = 6


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0])


def train(epochs: int = 1, steps: bool = False, saved=None) -> list[list[float]]:
    """Run a real loop with everything that is hooked. Returns what it has seen and learned."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Pairs(), batch_size=2)
    seen = []
    for _ in range(epochs):
        for batch in loader:
            with telemetry.step() if steps else telemetry.phase("a part"):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            seen.append(batch.flatten().tolist())
        evaluation = torch.utils.data.DataLoader(Pairs(), batch_size=4)
        with torch.no_grad():
            seen += [model(batch).flatten().tolist() for batch in evaluation]
            with telemetry.phase("evaluation"):
                seen += [model(batch).flatten().tolist() for batch in evaluation]
        if saved is not None:
            torch.save(model.state_dict(), saved)
    return [*seen, [p for parameter in model.parameters() for p in parameter.flatten().tolist()]]


@pytest.fixture(scope="module")
def unharmed():
    """The result of the loop without the agent."""
    assert not telemetry.metrics()
    return {steps: train(epochs=2, steps=steps) for steps in (False, True)}


class Broken(Exception):
    """The error that is raised in a part of the agent."""


def break_(*_, **__):
    raise Broken("injected")


def break_seam(monkeypatch, agent, seam: str) -> None:
    """Replace one method by `break_`. If the object has slots, its class is replaced."""
    owner: object = agent
    *path, name = seam.split(".")
    for part in path:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    monkeypatch.setattr(owner if hasattr(owner, "__dict__") else type(owner), name, break_)


def counted(agent, source: str, before: int = 0) -> int:
    """Wait until a failure of this source more than before is counted. Returns the count."""
    return wait_for(
        lambda: (count := agent.errors.counts.get(source, 0)) > before and count,
        f"an error of {source}, in {agent.errors.counts}",
    )


def shown(agent, source: str) -> int:
    """Wait until the metrics count a failure of this source. Returns the count."""
    return wait_for(lambda: value(fetch(agent.metrics_url), "telemetry_errors_total", source=source), source)


def ticked(agent, times: int = 2) -> None:
    """Wait until the agent has made some ticks."""
    for _ in range(times):
        before = agent.accounting.ledger.at_ns
        wait_for(lambda before=before: agent.accounting.ledger.at_ns > before, "the agent's next tick")


# -- on the training thread ----------------------------------------------------------------------------------------

HOOKS = [
    "tracker._enter_evaluation", "tracker.request", "tracker.delivered", "tracker.failed", "tracker.iteration",
    "tracker.iterated", "tracker.loaders.register", "tracker.loaders.delivered", "tracker.loaders.known",
    "tracker.mark_request", "tracker.ring.push", "attachment.optimizer.stepped", "tracker.enter_phase",
    "tracker.exit_phase", "tracker.enter_step", "tracker.exit_step", "tracker.switch",
]  # fmt: skip
"""The first is called until the loader is known to be one of an evaluation."""


@pytest.mark.parametrize("steps", [False, True], ids=["batches", "steps"])
def test_an_error_in_a_hook_stays_there(steps, start, unharmed, monkeypatch, tmp_path):
    agent = start()
    for seam in HOOKS:
        before = agent.errors.counts.get("hook", 0)
        with monkeypatch.context() as patch:
            break_seam(patch, agent, seam)
            assert train(epochs=2, steps=steps, saved=tmp_path / "saved.pt") == unharmed[steps], seam
        assert torch.load(tmp_path / "saved.pt").keys() == {"weight", "bias"}, seam
        called = (steps or not seam.endswith("_step")) and seam != "tracker.mark_request"  # that one with a GPU's clock
        assert not called or counted(agent, "hook", before), seam

        before = agent.tracker.optimizer_steps
        assert train(epochs=2, steps=steps) == unharmed[steps], seam
        assert agent.tracker.optimizer_steps == before + 2 * BATCHES, seam
        assert agent.tracker.waiting_since == 0, seam
    assert shown(agent, "hook")
    assert any("Broken" in message for message in told(tmp_path / "run", "hook", running=True))


def test_hooks_of_other_threads_pass_through_whatever_fails(start, unharmed, monkeypatch):
    agent = start()
    for seam in HOOKS:
        break_seam(monkeypatch, agent, seam)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(train(epochs=2)))
    thread.start()
    thread.join(HANG)
    assert seen == [unharmed[False]]


def test_an_error_as_the_workers_of_a_loader_are_stopped_stays_there(start, monkeypatch):
    agent = start()
    with monkeypatch.context() as patch:
        break_seam(patch, agent, "tracker.leaving")
        for _ in torch.utils.data.DataLoader(Pairs(), num_workers=1):
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
            for batch in torch.utils.data.DataLoader(Pairs(), batch_size=2):
                model(batch)
            return weakref.ref(model)

        model = epoch()
    assert agent.tracker.errors > 0
    assert model() is None


class BrokenEvents:
    """CUDA events that fail at one of their calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def reach(self, what: str):
        if self.at == what:
            break_()
        return self

    def event(self):
        return self.reach("new")

    def record(self):
        self.reach("record")

    def query(self):
        return bool(self.reach("query"))

    def elapsed_time(self, _after):
        return 0.0 if self.reach("elapsed") else None

    def begin(self):
        return self.reach("usable") and DeviceStream(0, 0)

    def end(self):
        pass


@pytest.mark.parametrize("at", ["new", "record", "query", "elapsed", "usable"])
def test_a_gpu_clock_that_fails_costs_its_own_figure_and_no_step(at, start, unharmed, tmp_path):
    agent = start()
    agent.tracker.gpu = GpuClock(BrokenEvents(at), agent.tracker)
    assert train(epochs=2) == unharmed[False]
    assert counted(agent, "hook")
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert (end["steps_total"], end["errors_total"]["hook"]) == (2 * BATCHES, 1), (
        "a clock that failed is not asked again"
    )


@pytest.mark.parametrize("seam", ["DataLoader.__iter__", "torch.save", "optimizer", "_BaseDataLoaderIter.__next__"])
def test_a_hook_that_cannot_be_placed_leaves_the_others(seam, start, unharmed, monkeypatch, tmp_path):
    """A version of torch in which one of them has another place."""
    from telemetry.seams import patching

    replace = patching.Patches.replace

    def moved(self, owner, name, wrap):
        if f"{owner.__name__}.{name}" == seam:
            raise AttributeError(f"no {name}")
        replace(self, owner, name, wrap)

    if seam == "optimizer":  # without the hook that an agent before has left there
        monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    with monkeypatch.context() as patch:
        patch.setattr(patching.Patches, "replace", moved)
        if seam == "optimizer":
            patch.setattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook", break_)
        agent = start()
        ticked(agent)
    assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False]
    assert counted(agent, "attach") == 1
    assert (agent.tracker.optimizer_steps > 0) is (seam != "optimizer")
    telemetry.stop()
    assert end_of(tmp_path / "run")["steps_total"] >= (0 if "__next__" in seam else 2 * BATCHES - 2)
    loader = torch.utils.data.dataloader
    assert loader.DataLoader.__iter__.__module__ == loader._BaseDataLoaderIter.__next__.__module__ == loader.__name__
    assert "telemetry" not in torch.save.__code__.co_filename


# -- on the agent's threads ----------------------------------------------------------------------------------------

AGENT_SEAMS = {
    "attempt._replay.add": "ledger",
    "_collectors._pollers.gpus.source.read": "nvml",
    "_wall.resync": "clock",
    "tracker.ring.drain": "ledger",
    "accounting.ledger.fold": "ledger",
    "accounting.ledger.advance": "ledger",
    "accounting.ledger.take_steps": "ledger",
    "accounting.ledger.take_phases": "jsonl",
    "accounting.stats.add": "ledger",
    "accounting.batches.fold": "ledger",
    "accounting.exposed.host": "ledger",
    "accounting.stats.take_window": "jsonl",
    "accounting.stats.commit": "jsonl",
    "_collectors.poll": "collect",
    "_collectors.take_log_fields": "jsonl",
    "event_log.file.write": "jsonl",
    "event_log.file._append": "jsonl",
    "event_log.window": "jsonl",
    "attempt.tick": "heartbeat",
    "attempt.beat": "heartbeat",
    "attempt.resumption": "jsonl",
    "attempt.phases.lines": "jsonl",
    "_run_so_far.tick": "attempts",
    "_run_so_far.view": "exposition",
    "job_hang.tick": "diagnose",
    "_tick": "agent",
    "_lead": "agent",
    "_collectors._pollers.host.source.read": "host",
    "_collectors._pollers.process.source.read": "process",
    "_collectors._pollers.workers.source.read": "workers",
    "_collectors._pollers.pressure.source.read": "pressure",
    "_collectors._pollers.torch_memory.source.read": "torch_memory",
    "_collectors._pollers.host.poll": "collect",
}
"""Where an error is counted. The first two are called soon after the start, and seldom later."""


def test_an_error_on_the_agent_s_thread_stays_there(start, unharmed, monkeypatch, tmp_path):
    agent = start()
    ticked(agent)
    for seam, source in AGENT_SEAMS.items():
        before = agent.errors.counts.get(source, 0)
        with monkeypatch.context() as patch:
            break_seam(patch, agent, seam)
            assert train(epochs=2, saved=tmp_path / "saved.pt") == unharmed[False], seam
            assert counted(agent, source, before), seam
            assert agent._thread.is_alive(), seam
        ticked(agent, 1)
    for source in set(AGENT_SEAMS.values()):
        assert shown(agent, source), source
    assert train(epochs=2) == unharmed[False]
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["errors_total"].keys() >= set(AGENT_SEAMS.values())
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


@pytest.mark.parametrize("seam", ["_view", "_node.board.publish"])
def test_an_error_in_the_rendering_leaves_the_log(seam, start, unharmed, monkeypatch, tmp_path):
    def windows() -> int:
        return len(events(tmp_path / "run", "window", running=True))

    agent = start()
    ticked(agent)
    with monkeypatch.context() as patch:
        break_seam(patch, agent, seam)
        assert train(epochs=2) == unharmed[False]
        counted(agent, "exposition")
        lines = windows()
        wait_for(lambda: windows() > lines, "the log goes on")
        assert value(fetch(agent.metrics_url), "training_run_info") == 1, "the newest state that there is"
    assert shown(agent, "exposition")


# -- in its start and its end --------------------------------------------------------------------------------------


def test_an_error_in_the_trend_leaves_the_end_of_the_log(start, unharmed, monkeypatch, tmp_path):
    agent = start()
    assert train(epochs=2) == unharmed[False]
    monkeypatch.setattr(type(agent._growth), "trend", lambda _: 1 / 0)
    telemetry.stop()
    assert end_of(tmp_path / "run")["errors_total"]["diagnose"] == 1


@pytest.mark.parametrize("part", ["attach", "board", "endpoint", "run_start", "atexit", "line"])
def test_an_error_in_the_start_leaves_the_rest(part, start, unharmed, monkeypatch, tmp_path, capfd):
    import atexit

    from telemetry.agent import agent as module
    from telemetry.agent import event_log as log

    owner, name = {
        "attach": (module.Attachment, "attach"),
        "board": (module, "Board"),
        "endpoint": (module.NodeService, "lead_if_vacant"),
        "run_start": (log.LogFile, "write"),
        "atexit": (atexit, "register"),
        "line": (sys, "stderr"),
    }[part]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, None if part == "line" else break_)
        agent = start(start_line=part == "line")
    assert train(epochs=2) == unharmed[False]
    if part == "atexit":  # without atexit nothing would end the agent: it does not start, and reports that
        assert agent.running is False
        assert capfd.readouterr().err == "telemetry: cannot start (Broken: injected); the run goes on without it\n"
        return
    counted(agent, {"run_start": "jsonl", "line": "start_line"}.get(part, part))
    telemetry.stop()
    assert end_of(tmp_path / "run")["steps_total"] == (0 if part == "attach" else 2 * BATCHES)


ENDS = [
    "accounting.update", "accounting.close", "snapshots.end", "snapshots.wait", "_stall_monitor.wait_for_callback",
    "_run_so_far.tick", "_run_so_far.end", "event_log.file.forget", "attempt.close", "_job.close", "event_log.window",
    "event_log.end", "event_log.emit", "_publish", "_collectors.close", "_node.leave", "attachment.detach",
]  # fmt: skip


@pytest.mark.parametrize("part", ENDS)
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
    assert len(events(tmp_path / "run", "run_end")) == (0 if part in {"event_log.end", "event_log.emit"} else 1)
    assert train(epochs=2) == unharmed[False]
