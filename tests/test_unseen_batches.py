"""Batches that reach the training thread another way: the verdict does not call such a run healthy."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from telemetry.report.logs import load
from tests.data_sets import Numbers
from tests.report_logs import START, line, summarize, totals, write


def read_on_a_thread(batches):
    """A generator that hands out what a thread of its own reads."""
    ready: queue.Queue = queue.Queue(1)

    def fill() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    yield from iter(ready.get, None)


class Threaded(DataLoader):
    """A loader that nobody knows, whose iteration reads on a thread."""

    def __iter__(self):
        yield from read_on_a_thread(super().__iter__())


class Training:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def step(self, batch) -> None:
        (self.weight * float(batch)).sum().backward()
        self.optimizer.step()


def finished(agent) -> dict:
    run_dir = agent.run_dir
    telemetry.stop()
    return summarize(load(run_dir))


def test_a_thread_behind_a_generator_is_not_called_healthy(agent):
    """The loader's iteration begins on the training thread, so a little waiting is seen; none of the rest is."""
    training = Training()
    for batch in Threaded(Numbers(20, 0.002), batch_size=None):
        training.step(batch)
    report = finished(agent)
    (rank,) = report["ranks"]
    assert rank["ledger"]["data_wait"] > 0
    assert rank["steps"] == 20
    assert rank["exposed_wait_ratio"] is None, "what was not measured is absent"
    assert report["verdict"].startswith("Not known whether this run waits for data.")
    assert "20 of 20 steps" in report["verdict"]
    assert "telemetry.watch()" in report["verdict"]


def test_a_step_of_the_users_without_a_batch_is_unseen(agent):
    for index in range(10):
        if index < 6:
            next(iter(DataLoader(Numbers(1))))
        with telemetry.step():
            pass
    assert agent.accounting.unseen_steps == 4
    assert "4 of 10 steps" in finished(agent)["verdict"]


def test_going_over_to_a_thread_is_noticed(agent):
    """After ordinary epochs, whose iterator is alive still, another thread requests the batches."""
    training = Training()
    iterator = iter(DataLoader(Numbers(10_000), batch_size=None))
    for _ in range(5):
        training.step(next(iterator))
    deadline = time.monotonic() + 60
    steps = 0
    for batch in read_on_a_thread(DataLoader(Numbers(1_000_000, 0.001), batch_size=None)):
        training.step(batch)
        steps += 1
        if agent.accounting.unseen_steps >= 50 or time.monotonic() > deadline:
            break
    assert agent.accounting.unseen_steps >= 50
    report = finished(agent)
    assert report["verdict"].startswith("Not known")
    assert report["ranks"][0]["steps"] >= 50


class Pipeline:
    """Like DALI's iterators: threads below Python make the batches, and nothing of torch is in it."""

    def __init__(self, batches: int) -> None:
        self.batches, self.taken = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.batches:
            self.taken = 0
            raise StopIteration
        self.taken += 1
        return [{"data": torch.ones(1)}]


def epochs(agent, training: Training, pipeline: Pipeline, steps: int) -> None:
    """Train on it until the agent has seen that these batches come in another way, and then so many steps more."""
    deadline, known = time.monotonic() + 60, None
    while known is None or agent.tracker.optimizer_steps < known + steps:
        for batch in pipeline:
            training.step(batch[0]["data"])
        if known is None and agent.accounting.unseen_steps:
            known = agent.tracker.optimizer_steps
        assert time.monotonic() < deadline, "it was not noticed"


@pytest.mark.parametrize("before", ["nothing", "an epoch", "one batch", "an evaluation"])
def test_a_pipeline_without_torch_is_not_called_healthy(agent, before):
    """Whatever a DataLoader was used for before: statistics, a warm-up, initialising by a batch."""
    training = Training()
    loader = DataLoader(Numbers(4), batch_size=None)
    if before == "an epoch":
        for batch in loader:
            training.step(batch)
    if before == "one batch":
        training.step(next(iter(loader)))
    if before == "an evaluation":
        with torch.no_grad():
            list(loader)
    epochs(agent, training, Pipeline(50), steps=2000)
    report = finished(agent)
    assert report["ranks"][0]["steps"] >= 2000
    assert report["verdict"].startswith("Not known whether this run waits for data."), report["verdict"]
    assert "telemetry.watch()" in report["verdict"]


def test_a_few_steps_after_the_end_of_a_loop_are_no_other_batches(agent):
    """As with gradient accumulation, whose last step comes after the last batch."""
    training = Training()
    for _ in range(3):
        for batch in DataLoader(Numbers(40), batch_size=None):
            training.step(batch)
        for _ in range(3):
            training.step(batch)
        agent.accounting.update()
        agent.accounting.update()
    assert agent.accounting.unseen_steps == 0
    assert finished(agent)["ranks"][0]["steps"] == 120


def test_many_optimizer_steps_for_one_batch_are_one_step(agent):
    """No other thread requests batches, so the loop is taken to use each of them many times."""
    training = Training()
    for batch in DataLoader(Numbers(4), batch_size=None):
        for _ in range(100):
            training.step(batch)
        agent.accounting.update()
    assert agent.accounting.unseen_steps == 0
    report = finished(agent)
    assert report["ranks"][0]["steps"] == 4
    assert "Not known" not in report["verdict"]


def test_a_loader_that_iterates_in_its_own_way_can_be_watched(agent):
    training, loader = Training(), Threaded(Numbers(20, 0.005), batch_size=None)
    assert telemetry.watch(loader) is loader, "it stays a DataLoader"
    for batch in loader:
        training.step(batch)
    report = finished(agent)
    assert agent.accounting.unseen_steps == 0
    assert report["ranks"][0]["steps"] == 20
    assert report["verdict"].startswith("Starved"), report["verdict"]
    assert not hasattr(Threaded.__iter__, "__wrapped__"), "the class is as it was when the agent has stopped"


VERDICTS = {
    "all unseen": (dict(wait=0.1, compute=10, exposed=None), 10, ["Not known", "10 of 10 steps"]),
    "some unseen": (dict(wait=0.1, compute=10), 1, ["Not known", "1 of 10 steps"]),
    "starved in what was seen": (dict(wait=8, compute=2), 5, ["Starved: rank 0", "5 of 10 steps", "telemetry.watch()"]),
    "none unseen": (dict(wait=0.1, compute=10), 0, ["Healthy"]),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_says_what_was_not_seen(tmp_path, name):
    spent, unseen, wanted = VERDICTS[name]
    end = line("run_end", **totals(steps=10, **spent)) | {"unseen_steps_total": unseen}
    write(tmp_path, 0, line("run_start", **START), end)
    verdict = summarize(load(tmp_path))["verdict"]
    assert all(part in verdict for part in wanted), verdict
