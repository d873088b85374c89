"""What the hooks tell of where a training resumed: what was loaded, from which step on, what is replayed."""

from __future__ import annotations

import io
import pickle
import threading

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import telemetry
from telemetry.agent.restarts import ReplayWatch
from telemetry.hooks.resume import step_of
from tests.small_training import Lazy, Training


def test_adam_tells_where_it_resumes(request):
    first = Training()
    first.steps(7)  # in the process before
    observed = request.getfixturevalue("observed")
    second = Training()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert (observed.tracker.resume.step, observed.tracker.resume.source) == (7, "optimizer")


class OfADevice(torch.Tensor):
    """Stands for a tensor whose value costs a wait: for the device, or for the other ranks as with a DTensor."""

    read = 0

    def __int__(self) -> int:
        OfADevice.read += 1
        return 7

    item = __float__ = __index__ = __int__


def on_device(state: dict) -> dict:
    return state | {number: each | {"step": each["step"].as_subclass(OfADevice)} for number, each in state.items()}


@pytest.mark.parametrize("when", ["before the first batch", "in the loop", "as it steps"])
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
    if when == "as it steps":
        second.optimizer.state.update(
            {p: on_device(saved["state"])[number] for number, p in enumerate(second.net.parameters())}
        )
        observed.tracker.resume.stepped(second.optimizer, 1)
    else:
        second.optimizer.load_state_dict(saved | {"state": on_device(saved["state"])})
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


def test_an_optimizer_without_a_state_loads_as_ever(observed):
    empty = torch.optim.SGD(Training().net.parameters(), lr=0.1)
    empty.load_state_dict(torch.optim.SGD(Training().net.parameters(), lr=0.1).state_dict())
    assert observed.tracker.resume.source is None
    with pytest.raises((TypeError, AttributeError, KeyError)):
        empty.load_state_dict(None)
    assert observed.tracker.errors == 0


@pytest.mark.parametrize("count", [float("inf"), float("nan"), torch.tensor(float("nan")), torch.ones(2), "x", -1])
def test_a_count_that_makes_no_sense_is_none(observed, count):
    training = Training()
    training.optimizer.state = {parameter: Lazy({"step": count}) for parameter in training.net.parameters()}
    observed.tracker.resume.stepped(training.optimizer, 1)
    assert observed.tracker.resume.source is None or observed.tracker.resume.step == 0
    assert observed.tracker.errors == 0


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


def test_a_new_adam_begins_at_nothing(observed):
    Training().steps(3)
    assert (observed.tracker.resume.step, observed.tracker.resume.source) == (0, "optimizer")


def test_sgd_does_not_tell(observed):
    Training(torch.optim.SGD).steps(3)
    assert observed.tracker.resume.source is None


def test_the_script_can_tell(agent):
    telemetry.resumed(step=120)
    assert (agent.tracker.resume.step, agent.tracker.resume.source) == (120, "told")
    telemetry.resumed(step=np.int64(7))
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


def test_replay_is_what_comes_before_the_first_step_and_computes_nothing(observed):
    watch = ReplayWatch()
    training = Training()
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(40, 4))):
        if number >= 30:
            torch.randn(300, 300) @ torch.randn(300, 300)
            training.step(batch)
    observed.read()
    watch.add(observed.steps, observed.tracker.optimizer_steps)
    watch.settle(observed.tracker.optimizer_steps, 0.0, most=30)
    assert watch.settled
    assert watch.batches == 30


def test_gradient_accumulation_is_no_replay(observed):
    watch = ReplayWatch()
    training = Training()
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(64, 4))):
        training.net(batch).sum().backward()
        if number % 8 == 7:
            training.optimizer.step()
        before = len(observed.steps)
        observed.read()
        watch.add(observed.steps[before:], observed.tracker.optimizer_steps)
        watch.settle(observed.tracker.optimizer_steps, 0.0, most=number + 1 - observed.tracker.optimizer_steps)
    assert watch.settled
    assert watch.batches == 0


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


@pytest.mark.parametrize("loader", [True, False], ids=["a loader", "no loader"])
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED)
def test_a_step_within_a_step_counts_once(run, nested, loader):
    agent = telemetry.start()
    net = torch.nn.Linear(1, 1)
    optimizer = nested(net.parameters())
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


@pytest.mark.parametrize("steps", [0, 7])
def test_a_wrapped_optimizer_tells_where_it_resumes(request, steps):
    first = Training()
    first.steps(steps)
    observed = request.getfixturevalue("observed")
    second = Training()
    second.optimizer.state.update(first.optimizer.state)  # as a loading that torch does not see
    for mine, theirs in zip(second.net.parameters(), first.net.parameters(), strict=True):
        if steps:
            second.optimizer.state[mine] = first.optimizer.state[theirs]
    second.optimizer = Around(second.optimizer)
    second.steps(3)
    assert (observed.tracker.resume.step, observed.tracker.resume.at_optimizer_steps) == (steps, 0)
