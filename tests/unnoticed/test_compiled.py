"""What torch traces, compiles and dispatches is the same with the agent. All of it needs Dynamo, which takes seconds."""

from __future__ import annotations

import pytest
import torch

from tests.faults.processes import end_of
from tests.unnoticed.pairs import unchanged

CASES = {
    "nothing may be compiled again": """
        import torch
        from unnoticed.training import Training, looked_at, work

        @torch.compile(backend="eager")
        def backward(loss):
            torch.autograd.backward(loss)

        @torch.compile(backend="eager")
        def gradient(x):
            return torch.autograd.grad(training.model(x).sum(), [training.model.weight])[0]

        training = Training(optimizer=torch.optim.SGD)
        step = torch.compile(training.optimizer.step, backend="eager")
        backward(training.model(torch.ones(4, 8)).sum())
        step()
        gradient(torch.ones(4, 8))
        torch.compiler.set_stance("fail_on_recompile")
        for _ in looked_at():
            for x in training.loader:
                work()
                gradient(x)
                backward(training.model(x).sum())
                step()
        print("trained")
        """,
    "functions and operators that a mode sees": """
        import collections
        import torch
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode
        from unnoticed.training import Items, Training, looked_at

        class Texts(Items):
            def __getitem__(self, index):
                return {"input_ids": torch.ones(8, dtype=torch.long)}

        class Functions(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                calls[function.__name__, getattr(getattr(function, "__self__", None), "__name__", "")] += 1
                return function(*args, **(kwargs or {}))

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                calls[str(function)] += 1
                return function(*args, **(kwargs or {}))

        for mode in (Functions, Operators):
            for items in (Items(), Texts()):
                for workers in (0, 1):
                    training, seen = Training(items, workers=workers), set()
                    with mode():
                        for number in looked_at(3):
                            calls = collections.Counter()
                            for batch in training.loader:
                                training.step(batch["input_ids"].float() if type(batch) is dict else batch)
                            if number:  # the first step has no gradients to set to None
                                seen.add(frozenset(calls.items()))
                    print(mode.__name__, workers, type(items).__name__, sorted(map(sorted, seen)))
        """,
    "a loader inside what is compiled": """
        import warnings
        import torch
        from unnoticed.training import Training

        @torch.compile(backend="eager")
        def epoch():
            for x in training.loader:
                training.optimizer.zero_grad()
                training.model(x).sum().backward()
                training.optimizer.step()

        @torch.compile(backend="eager")
        def step(batches):
            return training.model(next(batches)).sum()

        @torch.compile(backend="eager", fullgraph=True)
        def whole(x):
            return training.model(x).sum()

        warnings.simplefilter("always")
        for workers in (0, 2):
            torch._dynamo.reset()
            training = Training(optimizer=torch.optim.SGD, workers=workers)
            for _ in range(3):
                epoch()
                batches = iter(training.loader)
                for _ in range(4):
                    step(batches)
                for x in training.loader:
                    whole(x)
            counters = torch._dynamo.utils.counters
            print(sorted(counters["stats"].items()), sorted(counters["recompiles"].items()))
            print(len(counters["graph_break"]), sum(counters["graph_break"].values()))
        """,
    "counters of Dynamo": """
        import torch
        from unnoticed.training import Training, looked_at, work

        @torch.compile(backend="eager")
        def step(x):
            training.optimizer.zero_grad()
            training.model(x).sum().backward()
            training.optimizer.step()

        training = Training(optimizer=torch.optim.SGD)
        for _ in looked_at():
            for x in training.loader:
                work()
                step(x)
        counters = torch._dynamo.utils.counters
        print(dict(counters["stats"]), sum(counters["graph_break"].values()))
        """,
}


@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_torch(source, tmp_path):
    if "set_stance" in source and not hasattr(torch.compiler, "set_stance"):
        pytest.skip("from torch 2.6 on")
    unchanged(tmp_path, source, preload="unnoticed.compiled_once")
    assert end_of(tmp_path / "ours-run")["optimizer_steps_total"] > 16, "those in a compiled function count, too"
