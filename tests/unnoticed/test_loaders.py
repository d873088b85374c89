"""Data sets, samplers, loaders, iterators and batches are touched only as torch touches them."""

from __future__ import annotations

import sys

import pytest

from tests.faults.processes import end_of
from tests.unnoticed.pairs import ITSELF, unchanged

CASES = {
    "properties of a loader": """
        from torch.utils.data import DataLoader
        from unnoticed.training import Items, Training, looked_at

        reads, seen = [], set()

        def noting(name):
            def get(self):
                reads.append(name)
                return vars(self)["_" + name + "_"]
            return property(get, lambda self, value: vars(self).__setitem__("_" + name + "_", value))

        class Loader(DataLoader):
            dataset, sampler, batch_sampler = map(noting, ("dataset", "sampler", "batch_sampler"))
            num_workers, collate_fn, pin_memory = map(noting, ("num_workers", "collate_fn", "pin_memory"))
            batch_size, worker_init_fn = map(noting, ("batch_size", "worker_init_fn"))

        for workers in (0, 1):
            training = Training()
            context = "fork" if workers else None
            training.loader = Loader(Items(), batch_size=4, num_workers=workers, multiprocessing_context=context)
            for _ in looked_at():
                reads.clear()
                training.epoch()
                seen.add((workers, *sorted(reads)))
        print(sorted(seen))
        """,
    "a data set that counts what is asked of it": """
        import torch
        from unnoticed.training import Training, looked_at

        class Counting:
            def __init__(self):
                vars(self)["seen"] = []

            def __getattr__(self, name):
                self.seen.append(name)
                raise AttributeError(name)

            def __getitem__(self, index):
                return torch.ones(8)

            def __bool__(self):
                self.seen.append("bool")
                return True

            def __eq__(self, other):
                self.seen.append("==")
                return self is other

            def __hash__(self):
                self.seen.append("hash")
                return 1

            def __iter__(self):
                self.seen.append("iter")
                return iter(range(64))

            def __len__(self):
                self.seen.append("len")
                return 64

        for workers in (0, 1):
            for sampled in (False, True):
                items, order, seen = Counting(), Counting(), set()
                options = {"sampler": order} if sampled else {"shuffle": True}
                training = Training(items, workers=workers, **options)
                for _ in looked_at(3):
                    items.seen.clear()
                    order.seen.clear()
                    training.epoch()
                    seen.add((*items.seen, "|", *order.seen))
                print(workers, sampled, [[(name, one.count(name)) for name in sorted({*one})] for one in seen])
        """,
    "batches of any kind": """
        import collections
        import torch
        from torch.utils.data import DataLoader, IterableDataset
        from unnoticed.training import Training, looked_at

        touched = set()

        class Mapping(dict):
            def __getitem__(self, key): touched.add("getitem"); return super().__getitem__(key)
            def __contains__(self, key): touched.add("in"); return super().__contains__(key)
            def __iter__(self): touched.add("iter"); return super().__iter__()
            def __len__(self): touched.add("len"); return super().__len__()
            def items(self): touched.add("items"); return super().items()

        class Record:
            __hash__ = None
            def __getattr__(self, name): touched.add(name); raise AttributeError(name)
            def __bool__(self): touched.add("bool"); return True
            def __len__(self): touched.add("len"); return 1
            def __eq__(self, other): touched.add("=="); return False

        class Lazy(collections.UserDict):
            def __getitem__(self, key): touched.add("getitem"); return super().__getitem__(key)

        class Slots:
            __slots__ = ("x",)

        class Mine(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                touched.add(getattr(function, "__name__", "a function"))
                return super().__torch_function__(function, types, args, kwargs or {})

        ids = torch.ones(2, dtype=torch.long)
        makers = [
            lambda: Mapping(input_ids=ids), Record, lambda: Lazy(input_ids=ids), Slots, lambda: None, dict,
            lambda: ids.as_subclass(Mine), lambda: {"input_ids": ids.as_subclass(Mine)}, lambda: torch.ones(0),
            lambda: torch.ones(2, device="meta"), lambda: torch.sparse_coo_tensor((2, 2)),
            lambda: torch.nested.nested_tensor([torch.ones(2)]), lambda: torch.ones(2, requires_grad=True) * 2,
        ]
        training, x = Training(), torch.ones(8)
        for make in makers:
            class Stream(IterableDataset):
                def __iter__(self):
                    return (make() for _ in range(8))

            for _ in looked_at(1):
                for batch in DataLoader(Stream(), batch_size=None, collate_fn=lambda batch: batch):
                    training.step(x)
        print(touched)
        """,
    "swapped tensors of a batch, a data set and a model": """
        import torch
        from unnoticed.training import Training, looked_at

        data, kinds = torch.ones(64, 8), (torch.float64, torch.float32)
        torch.__future__.set_swap_module_params_on_conversion(True)
        for items, workers in ((None, 0), (None, 1), (data, 0)):
            training = Training(items, workers=workers)
            for number in looked_at():
                training.model.to(kinds[number % 2])
                for x in training.loader:
                    if items is None:
                        torch.utils.swap_tensors(x, torch.zeros_like(x))
                    training.step(x.to(kinds[number % 2]))
                    torch.utils.swap_tensors(data, torch.zeros_like(data))
        print("trained")
        """,
    "references to tensors": """
        import sys, weakref
        import torch
        from unnoticed.training import Training, looked_at

        data, seen = torch.ones(64, 8), set()
        for workers in (0, 1):
            training = Training(data, workers=workers, collate_fn=torch.stack)
            for _ in looked_at():
                for x in training.loader:
                    training.step(x)
                    counts = [(weakref.getweakrefcount(one), sys.getrefcount(one)) for one in (x, data)]
                    seen.add((workers, *counts))
        print(sorted(seen))
        """,
    "objects end when they are let go": """
        import gc, weakref
        from unnoticed.training import Items, Training, looked_at

        gone = []
        for workers in (0, 1):
            training = Training(items := Items(), workers=workers)
            training.run()
            gc.collect()
            gc.disable()
            iterator = iter(training.loader)
            training.step(next(iterator))
            for one in (iterator, items, training.optimizer, training.loader, training.model):
                weakref.finalize(one, gone.append, type(one).__name__)
            del iterator, one
            print(gone)
            del training.loader, items
            print(gone)
            del training.optimizer
            print(gone)
            del training.model
            print(gone)
            gc.enable()
        """,
    "who calls a data set, a sampler and a collate function": """
        import sys
        import torch
        from torch.utils.data import IterableDataset
        from unnoticed.training import Items, Training, looked_at

        callers = set()

        def note(what):
            callers.add((what, sys._getframe(2).f_code.co_name))

        class Noting(Items):
            def __getitem__(self, index):
                note("item")
                return super().__getitem__(index)

        class Stream(IterableDataset):
            def __iter__(self):
                for _ in range(64):
                    note("stream")
                    yield torch.ones(8)

        class Order:
            def __iter__(self):
                for index in range(64):
                    note("order")
                    yield index

        def collate(items):
            note("collate")
            return torch.stack(items)

        for options in ({"items": Noting(), "sampler": Order()}, {"items": Stream()}):
            Training(collate_fn=collate, **options).run()
        print(sorted(callers))
        """,
    "copies of what an iterator has": """
        import copy, pickle
        import torch
        from torch.utils.data import IterableDataset
        from unnoticed.training import Items, Training, looked_at

        class Stream(IterableDataset):
            def __iter__(self):
                return iter([torch.ones(8)] * 64)

        class Texts(Items):
            def __getitem__(self, index):
                return {"input_ids": torch.ones(8, dtype=torch.long)}

        for items in (Items(), Texts()):
            training, failed, fetchers = Training(items), set(), set()
            for _ in looked_at(3):
                iterator = iter(training.loader)
                for batch in iterator:
                    training.step(torch.ones(8))
                    for one in (iterator._dataset, iterator._dataset_fetcher, iterator._collate_fn, training.loader):
                        for do in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
                            try:
                                do(one)
                            except Exception as error:
                                failed.add(repr(error))
                fetchers.add((*sorted(vars(iterator._dataset_fetcher)), iterator._dataset_fetcher.collate_fn.__name__))
            print(failed, fetchers)
        """,
    "states of a stateful loader": """
        import pickle
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader
        from data_sets import Stream
        from unnoticed.training import Items

        class Texts(Items):
            def __getitem__(self, index):
                return {"input_ids": torch.full((8,), index)}

        for items in (Texts(), Stream()):
            for workers in (0, 1):
                options = {"batch_size": 2, "num_workers": workers, "multiprocessing_context": "fork" if workers else None}
                loader = StatefulDataLoader(items, **options)
                for number, batch in enumerate(loader):
                    if number == 2:
                        break
                state = pickle.dumps(loader.state_dict())
                other = StatefulDataLoader(items, **options)
                other.load_state_dict(pickle.loads(state))
                print(len(state), b"telemetry" in state, str(next(iter(other))))
        """,
    "objects with slots": """
        import torch
        from torch.utils.data import DataLoader
        import telemetry
        from unnoticed.training import Items, QuickSGD, Training, looked_at

        class Slotted:
            __slots__ = ("extra",)

            def __len__(self):
                return 64

            def __getitem__(self, index):
                return torch.ones(8)

        class Order:
            __slots__ = ()

            def __iter__(self):
                return iter(range(64))

        class Loader(DataLoader):
            __slots__ = ("extra",)

        class Optimizer(QuickSGD):
            __slots__ = ("extra",)

        class Plain:
            __slots__ = ()

            def __iter__(self):
                return iter([torch.ones(4, 8)] * 16)

        training = Training(Slotted(), sampler=Order(), optimizer=Optimizer)
        for loader in (training.loader, Loader(Slotted(), batch_size=4), telemetry.watch(Plain())):
            training.loader = loader
            training.run(2)
        print("trained")
        """,
    "generators that are closed late": """
        import torch
        from torch.utils.data import IterableDataset
        import telemetry
        from unnoticed.training import Training

        class Stream(IterableDataset):
            def __iter__(self):
                try:
                    for _ in range(64):
                        yield torch.ones(8)
                finally:
                    print("closed")

        def batches():
            try:
                yield from training.loader
            finally:
                print("left")

        training = Training(Stream())
        for drawn in range(4):
            one = batches()
            for _ in range(drawn):
                training.step(next(one))
            del one
            print("next")
        watched = telemetry.watch(batches())
        training.step(next(watched))
        kept = iter(training.loader)
        training.step(next(kept))
        del watched
        print("watched")
        del kept
        print("end")
        """,
    "a data set that trains, saves and reads another loader": """
        import io
        import torch
        import telemetry
        from unnoticed.training import Items, Training

        class Busy(Items):
            def __getitem__(self, index):
                if index % 4 == 0:
                    torch.save(next(iter(inner.loader)), io.BytesIO())
                elif index % 4 == 1:
                    with telemetry.phase("evaluation"):
                        inner.model(torch.ones(8))
                elif index % 4 == 2:
                    inner.step(torch.ones(8))
                else:
                    with telemetry.step():
                        pass
                return super().__getitem__(index)

        inner = Training()
        for workers in (0, 1):
            Training(Busy(), workers=workers).run(2)
        print("trained")
        """,
    "exceptions and their frames": """
        import traceback
        from unnoticed.training import Items, Training, looked_at

        class Failing(Items):
            def __getitem__(self, index):
                if index == 33:
                    raise kind("mine")
                return super().__getitem__(index)

        seen = set()
        for kind in (ValueError, StopIteration, KeyboardInterrupt, GeneratorExit):
            training = Training(Failing())
            for _ in looked_at(2):
                try:
                    training.epoch()
                except BaseException as error:
                    frames = traceback.extract_tb(error.__traceback__)
                    seen.add((repr(error), repr(error.__context__), *((frame.name, frame.lineno) for frame in frames)))
        for one in sorted(seen):
            print(*one)
        """,
    "lines that warnings name": """
        import warnings
        import torch
        from torch.utils.data import DataLoader, Dataset, IterableDataset
        import telemetry
        from unnoticed.training import Training

        class Longer(IterableDataset):
            def __len__(self):
                return 2

            def __iter__(self):
                return iter(range(4))

        class Warns(Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                for level in range(1, 5):  # 5 is this file on some versions of Python, 6 what runs it
                    warnings.warn(f"item {level}", stacklevel=level)
                return index

        class Saved:
            def __reduce__(self):
                for level in range(1, 5):
                    warnings.warn(f"saved {level}", stacklevel=level)
                return int, ()

        def collate(items):
            warnings.warn("collate", stacklevel=2)
            return items

        def watched():
            yield 1
            warnings.warn("watched", stacklevel=2)

        def place(message, category, file, line, *_):
            print(file.rpartition("/")[2], line, str(message)[:40])

        warnings.showwarning = place
        warnings.simplefilter("always")
        Training().epoch()
        for _ in DataLoader(Longer()):
            pass
        for workers in (0, 1):
            for _ in DataLoader(torch.arange(4), pin_memory=True, num_workers=workers):
                pass
        for _ in DataLoader(Longer(), num_workers=9, multiprocessing_context="fork"):
            break
        for _ in DataLoader(Warns()):
            pass
        for _ in DataLoader([1], collate_fn=collate):
            pass
        for _ in telemetry.watch(watched()):
            pass
        torch.save(Saved(), "saved.pt")
        """,
    "functions that cannot be pickled": """
        from unnoticed.training import Training

        for how in ("spawn", "forkserver"):
            for name in ("worker_init_fn", "collate_fn"):
                try:
                    Training(workers=1, multiprocessing_context=how, **{name: lambda given: given}).epoch()
                except Exception as error:
                    print(repr(error), getattr(error, "__notes__", None))
        """,
}


GROUP = """
    import sys
    from tests.loaders.observe import main
    main(sys.argv[1])
"""


@pytest.mark.parametrize("group", ["torch_cases", "watch_cases"])
def test_unusual_loaders_and_sources(group, tmp_path):
    """Whatever is done with them, they do the same and leave the same behind."""
    unchanged(tmp_path, GROUP, group, under=ITSELF)
    end = end_of(tmp_path / "ours-run")
    assert "hook" not in end["errors_total"]
    assert end["steps_total"] > 300


@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_a_loader(source, tmp_path):
    if "extract_tb" in source and sys.version_info < (3, 11):
        pytest.skip("our frame cannot be removed")
    unchanged(tmp_path, source)
