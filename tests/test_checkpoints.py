"""Phases, checkpoints and where a training resumed, as the hooks tell of them."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent.attempt import Replay
from telemetry.log.reader import load
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER
from telemetry.seams.resume import holds_optimizer, step_of
from tests.data_sets import Numbers


class Training:
    def __init__(self, kind=torch.optim.Adam) -> None:
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = kind(self.net.parameters(), lr=0.1)

    def steps(self, number: int) -> None:
        for batch in torch.utils.data.DataLoader(torch.randn(number, 4)):
            self.step(batch)

    def step(self, batch) -> None:
        self.net(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


class Lazy(dict):
    """Loads what it contains when it is asked for."""

    def __contains__(self, key) -> bool:
        raise AssertionError("asked by the agent")

    values = __getitem__ = get = items = __contains__


# -- explicit steps and phases, and checkpoints ------------------------------------------------------------------------


def test_torch_save_is_a_checkpoint_and_no_part_of_the_step(observed, monkeypatch):
    class SlowFile(io.BytesIO):
        """Takes longer than any step does on a busy machine."""

        def flush(self):
            time.sleep(0.5)

    for index, _ in enumerate(DataLoader(Numbers(4), batch_size=1)):
        if index == 2:
            torch.save({"weights": torch.zeros(3)}, SlowFile())
    ledger = observed.read()
    assert ledger.ns[CHECKPOINT] >= 0.5e9
    assert len(observed.steps) == 4
    assert max(step.seconds for step in observed.steps) < 0.5
    assert [p.name for p in observed.phases] == [CHECKPOINT]


def test_phases_have_their_categories_and_are_no_part_of_a_step(agent):
    with telemetry.phase("evaluation"):
        list(DataLoader(Numbers(4, seconds=0.005), batch_size=1))
    with telemetry.phase("epoch"):  # training inside a named phase is training
        for _ in DataLoader(Numbers(3, seconds=0.005), batch_size=1):
            with telemetry.phase("logging"), telemetry.phase("checkpoint"):
                time.sleep(0.01)
    with telemetry.phase("warm-up"):
        time.sleep(0.01)
    agent.accounting.update()
    ledger = agent.accounting.ledger
    assert ledger.ns[EVALUATION] >= 4 * 0.005e9
    assert ledger.ns[CHECKPOINT] >= 3 * 0.01e9
    assert ledger.ns[DATA_WAIT] >= 3 * 0.005e9
    assert ledger.ns[OTHER] >= 0.01e9
    assert ledger.category == OTHER
    assert agent.accounting.stats.steps == 3
    assert agent.accounting.stats.histogram().total < 3 * 0.01 + 3 * 0.005


def test_explicit_steps(agent):
    between, began = 0.0, time.perf_counter()
    iterator = iter(DataLoader(Numbers(8, seconds=0.005), batch_size=1))
    for _ in range(4):
        with telemetry.step():
            next(iterator), next(iterator)
            time.sleep(0.005)
        left = time.perf_counter()
        time.sleep(0.01)  # between two steps
        between += time.perf_counter() - left
    whole = time.perf_counter() - began
    agent.accounting.update()
    ledger, stats = agent.accounting.ledger, agent.accounting.stats
    assert (stats.steps, ledger.batches) == (4, 8)
    assert 4 * 0.015 <= stats.histogram().total <= whole - between
    assert ledger.ns[DATA_WAIT] >= 8 * 0.005e9
    assert ledger.ns[OTHER] >= 4 * 0.01e9
    waited, computed = ledger.ns[DATA_WAIT], ledger.ns[COMPUTE]
    with telemetry.step():  # without any loader
        time.sleep(0.005)
    agent.accounting.update()
    assert (stats.steps, ledger.ns[DATA_WAIT]) == (5, waited)
    assert ledger.ns[COMPUTE] >= computed + 0.005e9


def test_of_many_phases_in_a_tick_the_longest_have_lines(tmp_path):
    telemetry.start(tmp_path, port="off", interval_seconds=30, start_line=False)
    for number in range(200):
        with telemetry.phase(f"part {number}"):
            time.sleep(0.02 if number % 50 == 0 else 0.0011)
    telemetry.stop()
    (file,) = (tmp_path / "logs").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = [line["name"] for line in lines if line["event"] == "phase"]
    assert 15 < len(names) < 60  # a tick may come in the middle
    assert {f"part {number}" for number in (0, 50, 100, 150)} < set(names)


def test_a_phase_must_have_a_name(agent):
    with pytest.raises(TypeError, match="not int"):
        telemetry.phase(3)


# -- what the hooks tell of checkpoints: what was saved, at which step, and whether it is complete ---------------------


@contextlib.contextmanager
def process_group_of_one():
    """Old versions of torch write asynchronous checkpoints only in a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def saves(observed) -> list:
    return [*observed.tracker.resume.saves]


def test_a_checkpoint_has_the_steps_that_it_contains(observed, tmp_path):
    training = Training()
    for batch in torch.utils.data.DataLoader(torch.randn(5, 4)):
        training.step(batch)
        if observed.tracker.optimizer_steps == 3:
            torch.save(training.state, tmp_path / "c.pt")
    torch.save(training.net.state_dict(), tmp_path / "net.pt")
    inside, after = saves(observed)
    assert (inside.optimizer_steps, inside.steps, inside.complete) == (3, 3, True)
    assert (after.optimizer_steps, after.steps) == (5, 5)
    assert (inside.holds_optimizer, after.holds_optimizer) == (True, False)
    observed.read()
    (first, _) = observed.phases
    assert inside.start_ns <= first.start_ns <= inside.end_ns
    assert sum(first.loop_seconds) > 0


def test_a_checkpoint_that_raises_is_not_complete(observed, tmp_path):
    with pytest.raises(RuntimeError):
        torch.save(f=tmp_path / "not there" / "c.pt", obj={})
    assert [save.complete for save in saves(observed)] == [False]
    torch.save({}, tmp_path / "c.pt")
    assert [save.complete for save in saves(observed)] == [False, True]


def test_a_phase_of_the_script_is_one_checkpoint_whatever_it_calls(agent, tmp_path):
    with telemetry.phase("checkpoint"):
        torch.save({}, tmp_path / "a.pt")
        torch.save(Training().state, tmp_path / "b.pt")
        time.sleep(0.002)
    with telemetry.phase("checkpoint"):
        pass  # however short it is, beside longer ones: the report takes the last one for the newest
    with telemetry.phase("checkpoint"):
        (tmp_path / "own format").write_bytes(bytes(1000))
        time.sleep(0.002)
    with pytest.raises(ZeroDivisionError), telemetry.phase("checkpoint"):
        time.sleep(0.002)
        raise ZeroDivisionError
    telemetry.stop()
    (process,) = load(agent.run_dir)
    told = [(save.complete, save.holds_optimizer) for save in process.saves]
    assert told == [(True, True), (True, True), (True, True), (False, True)]


def test_an_asynchronous_checkpoint_is_complete_when_it_is_written(observed, tmp_path, monkeypatch):
    written = threading.Event()
    writer = dcp.FileSystemWriter(tmp_path / "c")
    finish = writer.finish
    monkeypatch.setattr(writer, "finish", lambda *args, **named: (written.wait(60), finish(*args, **named))[1])
    training = Training()
    training.steps(3)
    with process_group_of_one():
        future = dcp.async_save({"net": training.net.state_dict()}, storage_writer=writer)
        training.steps(2)
        assert [(save.complete, save.optimizer_steps) for save in saves(observed)] == [(False, 3)]
        observed.read()
        assert [phase.name for phase in observed.phases] == ["checkpoint"], "only what blocks"
        written.set()
        getattr(future, "upload_completion", future).result(60)
    assert [(save.complete, save.background) for save in saves(observed)] == [(False, False), (True, True)]
    assert saves(observed)[1].optimizer_steps == 3, "not what has been trained meanwhile"


def test_a_checkpoint_written_on_a_thread_of_the_script(observed, tmp_path):
    training = Training()
    training.steps(2)
    thread = threading.Thread(target=torch.save, args=(training.state, tmp_path / "c.pt"))
    thread.start()
    thread.join()
    (save,) = saves(observed)
    assert (save.background, save.complete, save.holds_optimizer, save.optimizer_steps) == (True, True, True, 2)


class LazyList(list):
    def __iter__(self):
        raise AssertionError("asked by the agent")


def test_what_is_saved_is_not_made_to_load_anything():
    assert not holds_optimizer({"data": Lazy(rows=1), "list": LazyList([1])})
    assert holds_optimizer(Lazy(state={}, param_groups=[]))
    assert holds_optimizer(LazyList([{"state": {}, "param_groups": []}])), "Lightning keeps them in a list"


# -- what the hooks tell of where a training resumed: what was loaded, from which step on, what is replayed ------------


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_tells_where_it_resumes(request, steps, wrapped):
    first = Training()
    first.steps(steps)  # in the process before
    observed = request.getfixturevalue("observed")
    second = Training()
    if wrapped:  # and the state comes by a loading that torch does not see
        states = zip(second.net.parameters(), first.net.parameters(), strict=True)
        second.optimizer.state.update({mine: first.optimizer.state[theirs] for mine, theirs in states if steps})
        second.optimizer = Around(second.optimizer)
    else:
        second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.steps(3)
    observed.read()
    resume = observed.tracker.resume
    assert (resume.step, resume.source, resume.at_optimizer_steps) == (steps, "optimizer", 0)


def test_sgd_does_not_tell_where_it_resumes(observed):
    Training(torch.optim.SGD).steps(3)
    observed.read()
    assert (observed.tracker.resume.step, observed.tracker.resume.source) == (None, None)


class OfADevice(torch.Tensor):
    """Stands for a tensor whose value costs a wait: for the device, or for the other ranks as with a DTensor."""

    read = 0

    def __int__(self) -> int:
        OfADevice.read += 1
        return 7

    item = __float__ = __index__ = __int__


def on_device(state: dict) -> dict:
    return state | {number: each | {"step": each["step"].as_subclass(OfADevice)} for number, each in state.items()}


@pytest.mark.parametrize("when", ["before the first batch", "in the loop", "after a step"])
def test_a_count_on_a_device_is_never_waited_for(request, when):
    first = Training()
    first.steps(7)
    observed = request.getfixturevalue("observed")
    OfADevice.read = 0
    second = Training()
    if when == "in the loop":
        iter_of = iter(torch.utils.data.DataLoader(torch.randn(3, 4)))
        next(iter_of)
    saved = first.optimizer.state_dict()
    if when == "after a step":
        second.steps(1)
        second.optimizer.state.update(
            {p: on_device(saved["state"])[number] for number, p in enumerate(second.net.parameters())}
        )
    else:
        second.optimizer.load_state_dict(saved | {"state": on_device(saved["state"])})
    observed.read()
    assert OfADevice.read == 0
    assert observed.tracker.resume.source is None


def test_a_count_that_is_loaded_from_the_host_is_read_there(request):
    """As with Adam's ``fused`` or ``capturable``, which move it to the device."""
    first = Training()
    first.steps(7)
    saved = first.optimizer.state_dict()

    class Fused(torch.optim.Adam):
        def _process(self):
            for state in self.state.values():
                state["step"] = state["step"].to("meta")

    observed = request.getfixturevalue("observed")
    second = Fused(Training().net.parameters())
    second.register_load_state_dict_post_hook(Fused._process)
    second.load_state_dict(state_dict=saved)
    assert all(state["step"].device.type == "meta" for state in second.state.values())
    assert (observed.tracker.resume.step, observed.tracker.resume.source) == (7, "optimizer")


@pytest.mark.parametrize(
    ("counts", "step"),
    [
        ([], None),
        ([None], None),
        ([torch.tensor(5.0, device="meta"), torch.tensor(3.0)], 3),
        ([3, 4.0], 4),
        (["5"], None),
        ([True], None),
    ],
)
def test_only_numbers_on_the_host_are_counts(counts, step):
    assert step_of([{"step": count} for count in counts] + [7, None]) == step


@pytest.mark.parametrize("count", [float("inf"), float("nan"), torch.ones(2), "x", -1])
def test_a_count_that_makes_no_sense_is_none(observed, count):
    training = Training()
    training.steps(1)
    training.optimizer.state = {parameter: Lazy({"step": count}) for parameter in training.net.parameters()}
    observed.read()
    assert observed.tracker.resume.source is None


@pytest.mark.parametrize("how", ["a file", "in memory", "mapped", "weights only"])
def test_loading_is_as_without_the_agent(observed, tmp_path, how):
    content = {"weight": torch.arange(4.0)}
    path = tmp_path / "c.pt"
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getvalue())
    buffer.seek(0)
    if how == "in memory":
        loaded = torch.load(buffer)
    elif how == "a file":
        with path.open("rb") as file:
            loaded = torch.load(file)
    else:
        loaded = torch.load(path, weights_only=True, mmap=how == "mapped")
    assert torch.equal(loaded["weight"], content["weight"])
    assert observed.tracker.resume.restore_ns > 0
    path.write_bytes(pickle.dumps(Training()))
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert observed.tracker.resume.restoring_since == 0


def test_the_script_can_tell(agent):
    telemetry.resumed(step=120)
    assert (agent.tracker.resume.step, agent.tracker.resume.source) == (120, "told")
    for step in (np.int64(7), torch.tensor(7)):
        telemetry.resumed(step=step)
        assert (type(agent.tracker.resume.step), agent.tracker.resume.step) == (int, 7)
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error):
            telemetry.resumed(step=wrong)


def test_the_step_that_creates_an_optimizers_state_is_none(observed, tmp_path):
    """torch.distributed.checkpoint lets a new optimizer step with a learning rate of 0 to have a state to load into."""
    first = Training()
    first.steps(4)
    state = get_optimizer_state_dict(first.net, first.optimizer)
    steps, closed = observed.tracker.optimizer_steps, observed.tracker.ring.closed
    second = Training()
    set_optimizer_state_dict(second.net, second.optimizer, state)
    assert (observed.tracker.optimizer_steps, observed.tracker.ring.closed) == (steps, closed)


def test_loading_before_the_first_step_is_restoring(observed, tmp_path):
    training, resume = Training(), observed.tracker.resume
    torch.save(training.state, tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt")
    once = resume.restore_ns
    assert once > 0
    training.optimizer.load_state_dict(state["optimizer"])
    thread = threading.Thread(target=torch.load, args=(tmp_path / "c.pt",))
    before = resume.restore_ns
    assert before > once
    thread.start()
    thread.join()
    assert resume.restore_ns == before, "another thread's is not the training's"
    training.steps(2)
    torch.load(tmp_path / "c.pt")
    assert resume.restore_ns == before, "nor what is loaded later"
    assert observed.read().ns["startup"] > before, "in the ledger it is a part of the startup"


def test_replay_is_what_comes_before_the_first_step(observed):
    replay, training, seen = Replay(), Training(), 0
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(50, 4))):
        if number >= 30:
            training.step(batch)
        if number in {39, 49}:
            observed.read()
            replay.add(observed.steps[seen:])
            seen = len(observed.steps)
            replay.look(*observed.tracker.resume.counts, 0.0)
        observed.tracker.slow_path()
    assert replay.batches == 30


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, as SAM and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.inner.step(closure)


class OfTheBase(torch.optim.Adam):
    """Both its own step and that of its base class are hooked by torch."""

    def step(self, closure=None) -> None:
        super().step(closure)


def distributed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another class for the same parameters, as Horovod makes it."""
    cls = type(optimizer)
    made = type(cls.__name__, (cls,), {"step": lambda self, closure=None: cls.step(self, closure)})
    return made(optimizer.param_groups)


NESTED = {
    "wrapped": lambda parameters: Around(torch.optim.Adam(parameters)),
    "wrapped twice": lambda parameters: Around(Around(torch.optim.Adam(parameters))),
    "base class": OfTheBase,
    "distributed": lambda parameters: distributed(torch.optim.Adam(parameters)),
}


@pytest.mark.parametrize(("nested", "loader"), [("wrapped", False), *[(kind, True) for kind in NESTED]])
def test_a_step_within_a_step_counts_once(run, nested, loader):
    agent = telemetry.start()
    net = torch.nn.Linear(1, 1)
    optimizer = NESTED[nested](net.parameters())
    for _ in torch.utils.data.DataLoader(torch.ones(40, 1)) if loader else range(40):
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    tracker = agent.tracker
    assert tracker.optimizer_steps == 40
    assert tracker.resume.optimizers == 1
    assert run()["steps"] == 40


def test_a_step_that_raises_hides_no_later_one(observed):
    class Failing(Around):
        def step(self, closure=None) -> None:
            raise RuntimeError("no step")

    net = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(net.parameters())
    with pytest.raises(RuntimeError, match="no step"):
        Failing(inner).step()
    for _ in torch.utils.data.DataLoader(torch.ones(10, 1)):
        inner.step()
    assert observed.tracker.optimizer_steps == 10


def test_two_optimizers_beside_each_other_are_two(observed):
    optimizers = [torch.optim.SGD(torch.nn.Linear(1, 1).parameters()) for _ in range(2)]
    for _ in torch.utils.data.DataLoader(torch.ones(10, 1)):
        for optimizer in optimizers:
            optimizer.step()
    assert observed.tracker.optimizer_steps == 20
    assert observed.tracker.resume.optimizers == 2
