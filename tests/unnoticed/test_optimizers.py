"""Optimizers step as they do without the agent, whatever their hooks and other threads do meanwhile."""

from __future__ import annotations

import pytest

from tests.unnoticed.pairs import ITSELF, unchanged

HOOK = """
    import io, sys
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    import telemetry
    from unnoticed.training import Training

    def phase(*_):
        with telemetry.phase("mine"):
            pass

    def save(*_):
        torch.save(training.model.state_dict(), io.BytesIO())

    def validate(*_):
        with torch.no_grad():
            for x in other.loader:
                other.model(x)

    def draw(*_):
        next(iter(other.loader))

    for act in (phase, save, validate, draw):
        training, other = Training(), Training(workers=0)
        hooks = {
            "pre": training.optimizer.register_step_pre_hook, "post": training.optimizer.register_step_post_hook,
            "pre of all": register_optimizer_step_pre_hook, "post of all": register_optimizer_step_post_hook,
        }
        handles = [hooks[sys.argv[1]](act), hooks[sys.argv[1]](lambda *_: None)]
        try:
            training.run()
            print(act.__name__, "trained")
        except RuntimeError as error:
            print(act.__name__, error)
        for handle in handles:
            handle.remove()
"""


@pytest.mark.parametrize("which", ["pre", "post", "pre of all", "post of all"])
def test_a_hook_may_do_what_it_wants(which, tmp_path):
    unchanged(tmp_path, HOOK, which)


CASES = {
    "stop and start in a hook": """
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        import telemetry
        from unnoticed.training import Training

        def start(*_):
            telemetry.start(port="off")

        def stop(*_):
            telemetry.stop()

        training = Training()
        for before, act in ((start, stop), (stop, start)):
            for register in (training.optimizer.register_step_pre_hook, training.optimizer.register_step_post_hook,
                             register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                before()
                training.step(torch.ones(8))
                handles = [register(act), register(lambda *_: None)]
                training.step(torch.ones(8))
                for handle in handles:
                    handle.remove()
        telemetry.stop()
        print("trained")
        """,
    "another thread steps the same optimizer": """
        import threading
        import torch
        from unnoticed.training import Training

        training, failed = Training(), []
        main, inside, over = threading.get_ident(), threading.Event(), threading.Event()

        def hook(*_):
            if threading.get_ident() != main:
                inside.set()
                over.wait()

        def step():
            try:
                training.optimizer.step()
            except RuntimeError as error:
                failed.append(error)

        training.optimizer.register_step_pre_hook(hook)
        training.optimizer.register_step_pre_hook(lambda *_: None)
        training.step(torch.ones(8))
        other = threading.Thread(target=step)
        other.start()
        inside.wait()
        training.run()
        over.set()
        other.join()
        print(failed)
        """,
    "a fork in a hook": """
        import os
        from unnoticed.training import Training, looked_at

        training, child, ends = Training(), False, set()

        def fork(*_):
            global child
            pid = os.fork()
            child = pid == 0
            if pid:
                ends.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        training.optimizer.register_step_pre_hook(fork)
        training.optimizer.register_step_pre_hook(lambda *_: None)
        try:
            for _ in looked_at(2, bare=1):
                for x in training.loader:
                    training.step(x)
                    if child:
                        os._exit(0)
        except RuntimeError:
            os._exit(1)
        print(ends)
        """,
    "a hook that raises": """
        import torch
        from unnoticed.training import Training, looked_at

        training, caught, numbers = Training(), set(), iter(range(10**9))

        def hook(*_):
            if next(numbers) % 3 == 0:
                raise KeyboardInterrupt("mine")

        training.optimizer.register_step_pre_hook(hook)
        training.optimizer.register_step_post_hook(hook)
        for _ in looked_at():
            for x in training.loader:
                try:
                    training.step(x)
                except KeyboardInterrupt as error:
                    caught.add((str(error), error.__context__ is None))
        print(caught, len(training.optimizer._optimizer_step_pre_hooks))
        """,
    "copies have no hook of ours": """
        import copy, pickle
        from unnoticed.training import QuickSGD, Training, looked_at

        class Whole(QuickSGD):
            def __getstate__(self):
                return self.__dict__.copy()

            def __setstate__(self, state):
                self.__dict__.update(state)

        for kind in (QuickSGD, Whole):
            training, seen = Training(optimizer=kind), set()
            for _ in looked_at():
                for x in training.loader:
                    training.step(x)
                    for one in (copy.deepcopy(training.optimizer), pickle.loads(pickle.dumps(training.optimizer))):
                        hooks = one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks
                        seen.add((*map(len, hooks), *sorted(vars(one))))
            print(seen)
        """,
    "properties of an optimizer": """
        from unnoticed.training import QuickSGD, Training, looked_at

        reads, seen = [], set()

        class Optimizer(QuickSGD):
            @property
            def param_groups(self):
                reads.append("param_groups")
                return vars(self)["groups"]

            @param_groups.setter
            def param_groups(self, value):
                vars(self)["groups"] = value

            @property
            def state(self):
                reads.append("state")
                return vars(self)["states"]

            @state.setter
            def state(self, value):
                vars(self)["states"] = value

            def __eq__(self, other):
                reads.append("==")
                return self is other

            def __hash__(self):
                reads.append("hash")
                return 3

            def __bool__(self):
                reads.append("bool")
                return True

        training = Training(optimizer=Optimizer)
        reads.clear()
        for _ in looked_at():
            training.epoch()
            seen.add(tuple(reads))
            reads.clear()
        print(len(seen), {name: next(iter(seen)).count(name) for name in next(iter(seen))})
        """,
    "the functions that step stay the same objects": """
        import torch
        from unnoticed.training import Training, looked_at, work

        training, seen = Training(), {}
        for _ in looked_at():
            for x in training.loader:
                work()
                training.optimizer.zero_grad()
                loss = training.model(x).sum()
                for owner, name in ((torch.autograd, "backward"), (torch.autograd, "_engine_run_backward"),
                                    (torch.autograd, "grad"), (torch.Tensor, "backward"), (type(training.optimizer), "step")):
                    seen.setdefault(name, set()).add(id(getattr(owner, name)))
                loss.backward()
                training.optimizer.step()
        print({name: len(each) for name, each in seen.items()})
        """,
    "the numbers are the same": """
        import random
        import numpy, torch
        from unnoticed.training import Items, Training

        class Noise(Items):
            def __getitem__(self, index):
                return torch.rand(8) + random.random() + numpy.random.rand() + index

        for workers in (0, 1):
            for seed in (torch.manual_seed, random.seed, numpy.random.seed):
                seed(3)
            training = Training(Noise(), workers=workers, shuffle=True)
            training.model = torch.nn.Sequential(training.model, torch.nn.Dropout(0.3))
            for _ in range(4 if workers else 20):
                training.epoch()
            print(training.model[0].weight.tolist(), random.random(), numpy.random.rand(), torch.rand(2))
        """,
}


@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_an_optimizer(source, tmp_path):
    itself = "telemetry.start" in source
    unchanged(tmp_path, source, **({"under": ITSELF} if itself else {}))
