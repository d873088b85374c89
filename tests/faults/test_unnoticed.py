"""The agent is invisible to the user's code: its exceptions, objects, warnings and compiled steps are as without it."""

from __future__ import annotations

import pickle
import re
import sys
import traceback

import pytest
import torch
from torch.utils.data import DataLoader

import telemetry
from tests.data_sets import Numbers
from tests.faults.processes import both, end_of, python, quiet, run, write


class Odd(BaseException):
    pass


class Failing(Numbers):
    """A data set whose fourth number raises."""

    def __init__(self, error):
        super().__init__(12)
        self.error = error

    def __getitem__(self, index):
        if index == 3:
            raise self.error
        return index

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


def train(agent_is_marked: bool = False) -> None:
    """Six steps."""
    for _ in DataLoader(Numbers(12), batch_size=2):
        if agent_is_marked:
            with telemetry.step():
                pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, Odd, ValueError, StopIteration])
@pytest.mark.parametrize("how", ["loader", "watch", "steps"])
def test_the_user_s_exceptions_pass_unchanged_and_nothing_sticks(error, how, start, tmp_path):
    agent = start()
    mine = error("mine")
    source = telemetry.watch(iter(Failing(mine))) if how == "watch" else DataLoader(Failing(mine), batch_size=1)
    seen, caught = [], None
    try:
        for batch in source:
            with telemetry.step() if how == "steps" else telemetry.phase("part"):
                seen.append(batch)
    except BaseException as error_that_came:
        caught = error_that_came
    assert len(seen) == 3
    assert caught is (None if error is StopIteration else mine), "the end of an iteration, as in plain Python"
    if caught and how != "watch" and sys.version_info >= (3, 11):  # on 3.10 our frame cannot be removed
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(mine.__traceback__)]
        assert not [file for file in files if "/telemetry/hooks/" in file]
    assert agent.tracker.waiting_since == 0
    train(agent_is_marked=how == "steps")
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["steps_total"] == 3 + 6
    assert "hook" not in end["errors_total"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Odd, ValueError])
@pytest.mark.parametrize("name", ["evaluation", "checkpoint", "mine", "step"])
def test_an_exception_leaves_a_phase_or_step_closed(error, name, start, tmp_path):
    agent = start()
    with pytest.raises(error):
        with telemetry.step() if name == "step" else telemetry.phase(name):
            raise error
    assert agent.tracker.in_phase is False
    train(agent_is_marked=True)
    telemetry.stop()
    end = end_of(tmp_path / "run")
    assert end["steps_total"] == 6 + (name == "step")
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


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
    source = """
        import importlib.util, sys
        import telemetry
        telemetry.start("run")
        assert importlib.util.find_spec("torch") is not None
        assert importlib.util.find_spec("torch") is not None
        assert "torch" not in sys.modules
        import torch
        while "telemetry" not in torch.save.__code__.co_filename:
            pass
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            pass
        telemetry.stop()
        """
    run(tmp_path, source)
    assert end_of(tmp_path / "run")["steps_total"] == 3


# -- what is compiled, and warned of: bare and with the agent ------------------------------------------------------

_STAMP = re.compile(r"^W\d{4} [\d:.]+ +\d+ ", re.MULTILINE)
"""What torch writes before its warnings: the time, and the process."""


def agreed(folder, source: str, *arguments: object) -> str:
    """What a script prints, which must be the same with the agent and without it."""
    bare, ours, _ = both(folder, write(folder, "script.py", source), *arguments)
    assert (ours.out, ours.code) == (bare.out, bare.code), ours.err
    assert _STAMP.sub("", ours.err) == _STAMP.sub("", bare.err)
    return bare.out


COMPILED = """
    import re, sys, warnings
    import torch, torch._dynamo
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("always")
    shown = []
    warnings.showwarning = lambda message, category, file, line, *_: shown.append(
        re.sub(r"pid=\\d+", "", f"{category.__name__} {message}")[:90])
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=8, num_workers=int(sys.argv[1]),
                        multiprocessing_context="fork" if sys.argv[1] != "0" else None)

    @torch.compile(backend="eager")
    def epoch():
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    @torch.compile(backend="eager")
    def step(batches):
        (x,) = next(batches)
        return model(x).sum()

    @torch.compile(backend="eager", fullgraph=True)
    def whole(x):
        return model(x).sum()

    for _ in range(3):
        epoch()
        batches = iter(loader)
        for _ in range(4):
            step(batches)
        for (x,) in loader:
            whole(x)
    counters = torch._dynamo.utils.counters
    print(sorted(counters["stats"].items()), sorted(counters["recompiles"].items()))
    print(len(counters["graph_break"]), sum(counters["graph_break"].values()))
    print(*sorted(shown), sep="\\n")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_compiled_loops_are_compiled_as_without_us(tmp_path, workers):
    agreed(tmp_path, COMPILED, workers)


def test_compiled_loops_are_compiled_as_before(tmp_path):
    source = """
        import torch, torch._dynamo, telemetry
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=8)
        counters = torch._dynamo.utils.counters

        def graphs():
            torch._dynamo.reset()
            counters.clear()

            @torch.compile(backend="eager")
            def step(x):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            @torch.compile(backend="eager")
            def penalty(x):
                loss = model(x).sum()
                (gradient,) = torch.autograd.grad(loss, [model.weight])
                return gradient.square().sum()

            @torch.compile(backend="eager")
            def epoch():  # the loader, and so our hooks, are called inside a compiled frame
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()

            epoch()
            for (x,) in loader:
                step(x)
                penalty(x)
            assert not counters["recompiles"]
            return sorted(counters["stats"].items()), len(counters["graph_break"])

        graphs()  # Torch itself changes optimizers when it first compiles
        bare = graphs()
        telemetry.start("run", port="off", start_line=False)
        print(graphs() == bare)
        """
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path, env=quiet(TORCH_LOGS="-all"))
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_a_compiled_optimizer_step_says_nothing_more_and_is_counted(tmp_path):
    """Dynamo traces global hooks, and would warn about parts of ours that it cannot trace."""
    source = """
        import torch, telemetry
        agent = telemetry.start("run")
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(3):
            parameter.grad = torch.ones(1)
            compiled()
        print(parameter.item(), agent.tracker.optimizer_steps)
        """
    env = quiet(TORCH_LOGS="-all", TORCHDYNAMO_VERBOSE="0")
    done = python(write(tmp_path, "script.py", source), cwd=tmp_path, env=env)
    assert done.stdout == "0.25 3\n", done.stderr
    assert "get_ident" not in done.stderr
    assert "telemetry" not in done.stderr


WARNED = """
    import warnings
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    import telemetry

    class Longer(IterableDataset):
        def __len__(self): return 2
        def __iter__(self): return iter(range(4))

    class Warning_(Dataset):
        def __len__(self): return 1
        def __getitem__(self, index):
            for level in range(1, 5):  # 5 is this file on some versions of Python, 6 what runs it
                warnings.warn(f"item {level}", stacklevel=level)
            return index

    def collate(items):
        warnings.warn("collate", stacklevel=2)
        return items

    def watched():
        yield 1
        warnings.warn("watched", stacklevel=2)

    def places(message, category, file, line, *_):
        print(file.rpartition("/")[2], line, str(message)[:40])
    warnings.showwarning = places
    warnings.simplefilter("always")
    for _ in DataLoader(Longer()): pass
    for _ in DataLoader(Longer(), num_workers=9, multiprocessing_context="fork"): break
    for _ in DataLoader(Warning_()): pass
    for _ in DataLoader([1], collate_fn=collate): pass
    for _ in telemetry.watch(watched()): pass

    class Saved:
        def __reduce__(self):
            for level in range(1, 5):
                warnings.warn(f"saved {level}", stacklevel=level)
            return int, ()
    torch.save(Saved(), "saved.pt")
"""


def test_warnings_name_the_same_lines(tmp_path):
    assert "watched" in agreed(tmp_path, WARNED)
