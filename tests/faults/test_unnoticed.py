"""The hooks are invisible to the user's code: its exceptions, objects and imports are the same as without them."""

from __future__ import annotations

import pickle
import signal
import sys
import traceback

import pytest
import torch

import telemetry
from faults.processes import environment, python, run_script, write
from faults.small_run import BATCHES, Dataset


class Odd(BaseException):
    pass


class Failing(Dataset):
    def __init__(self, error, at=3):
        self.error, self.at = error, at

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return super().__getitem__(index)


class Source:
    """A data set of numbers. The fourth raises."""

    def __init__(self, error):
        self.error, self.number = error, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == 4:
            raise self.error
        return self.number


def files_of(error: BaseException) -> list[str]:
    """The files of the frames of its traceback."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, Odd, ValueError, StopIteration])
@pytest.mark.parametrize("how", ["loader", "watch", "steps"])
def test_the_user_s_exceptions_pass_unchanged_and_nothing_sticks(error, how, start):
    agent = start()
    mine = error("mine")
    if how == "watch":
        source = telemetry.watch(Source(mine))
    else:
        source = torch.utils.data.DataLoader(Failing(mine), batch_size=1)
    seen, caught = [], None
    try:
        for batch in source:
            with telemetry.step() if how == "steps" else telemetry.phase("part"):
                seen.append(batch)
    except BaseException as error_that_came:
        caught = error_that_came
    assert len(seen) == 3
    if error is StopIteration:  # the end of an iteration, as in plain Python
        assert caught is None
    else:
        assert caught is mine
        if how != "watch" and sys.version_info >= (3, 11):  # on 3.10 our frame cannot be removed
            assert not [file for file in files_of(mine) if "/telemetry/hooks/" in file]
    assert agent.tracker.waiting_since == 0

    telemetry.stop()
    again = start()
    for _ in torch.utils.data.DataLoader(Dataset(), batch_size=2):
        pass
    telemetry.stop()
    assert again.accounting.stats.steps == BATCHES


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_steps_go_on_after_an_exception_in_the_middle_of_an_epoch(error, start):
    agent = start()
    loader = torch.utils.data.DataLoader(Failing(error("mine")), batch_size=1)
    with pytest.raises(error):
        for _ in loader:
            pass
    for _ in torch.utils.data.DataLoader(Dataset(), batch_size=2):
        pass
    telemetry.stop()
    assert agent.accounting.stats.steps == 3 + BATCHES
    assert "hook" not in agent.errors.counts


@pytest.mark.parametrize("error", [KeyboardInterrupt, Odd, ValueError])
@pytest.mark.parametrize("name", ["evaluation", "checkpoint", "mine", "step"])
def test_an_exception_leaves_a_phase_or_step_closed(error, name, start):
    agent = start()
    with pytest.raises(error):
        with telemetry.step() if name == "step" else telemetry.phase(name):
            raise error
    assert agent.tracker.in_phase is False
    for _ in torch.utils.data.DataLoader(Dataset(), batch_size=2):
        with telemetry.step():
            pass
    telemetry.stop()
    assert agent.accounting.stats.steps == BATCHES + (name == "step")
    seconds = agent.accounting.ledger.seconds()
    assert sum(seconds.values()) == pytest.approx(agent.accounting.ledger.wall_seconds, abs=1e-6)


def test_an_exception_while_saving_passes_unchanged(start, tmp_path):
    agent = start()

    class Unpicklable:
        def __reduce__(self):
            raise Odd

    with pytest.raises(Odd):
        torch.save({"x": Unpicklable()}, tmp_path / "x.pt")
    assert agent.tracker.in_phase is False
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        torch.save({})


@pytest.mark.parametrize("inside", ["push", "delivered", "failed", "iterated"])
def test_ctrl_c_inside_a_hook_passes_and_nothing_sticks(inside, start, monkeypatch):
    """A signal can come at any bytecode, including the agent's."""
    agent = start()
    owner = type(agent.tracker.ring if inside == "push" else agent.tracker)
    loader = torch.utils.data.DataLoader(Dataset(), batch_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(owner, inside, lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                pass
    assert agent.tracker.waiting_since == 0
    before = agent.tracker.ring.head
    for _ in torch.utils.data.DataLoader(Dataset(), batch_size=2):
        pass
    assert agent.tracker.ring.head > before
    assert "hook" not in agent.errors.counts


def test_a_generator_that_is_watched_is_closed_as_it_would_be(start):
    start()
    closed = []

    def batches():
        try:
            yield from range(100)
        except GeneratorExit:
            closed.append(True)
            raise

    source = batches()
    watched = telemetry.watch(source)
    assert next(watched) == 0  # it was an iterator before and is one after
    assert iter(watched) is watched
    for item in watched:
        assert item == 1
        break
    watched.close()
    assert closed == [True]
    assert next(source, "ended") == "ended"
    assert list(watched) == []


def test_what_is_watched_behaves_as_what_it_holds(start):
    start()
    assert bool(telemetry.watch(range(3))) is True
    assert bool(telemetry.watch([])) is False
    assert len(telemetry.watch([1, 2])) == 2

    class Plain:
        def __iter__(self):
            return iter("ab")

    plain = telemetry.watch(Plain())
    assert bool(plain) is True, "an object without a length is true"
    assert list(plain) == ["a", "b"]
    assert list(zip(telemetry.watch(x for x in "ab"), plain, strict=True)) == [("a", "a"), ("b", "b")]


def test_saving_functions_can_still_be_pickled_by_name(start):
    save = torch.save
    start()
    assert torch.save is not save
    for function in (torch.save, torch.serialization.save):
        assert pickle.loads(pickle.dumps(function)) is function
    telemetry.stop()
    assert torch.save is torch.serialization.save is save


def test_a_module_searched_before_its_import_is_still_patched(tmp_path):
    """Libraries search for torch in this way to check whether it is installed."""
    done = run_script(
        """
        import importlib.util, sys
        import telemetry
        agent = telemetry.start("run", port="off", start_line=False)
        assert importlib.util.find_spec("torch") is not None
        assert importlib.util.find_spec("torch") is not None
        assert "torch" not in sys.modules
        import torch
        assert torch.__spec__.loader is torch.__loader__
        assert type(torch.__loader__).__module__ != "telemetry.hooks.patching"
        assert "telemetry" in torch.save.__code__.co_filename
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            pass
        telemetry.stop()
        assert agent.accounting.stats.steps == 3, agent.accounting.stats.steps
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("telemetry")]
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_compiled_optimizer_step_says_nothing_more_and_is_counted(tmp_path):
    """Dynamo traces global hooks, and would warn about parts of ours that it cannot trace."""
    script = write(
        tmp_path,
        "script.py",
        """
        import sys, torch, telemetry
        agent = telemetry.start("run", port="off", start_line=False) if "with" in sys.argv else None
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            parameter.grad = torch.ones(1)
            compiled()
        print(parameter.item(), agent and agent.tracker.optimizer_steps)
        """,
    )
    done = python(
        script, "with", cwd=tmp_path, env=environment(TORCH_LOGS="-all", TORCHDYNAMO_VERBOSE="0"), timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.25 3\n"
    assert "get_ident" not in done.stderr
    assert "telemetry" not in done.stderr
