"""Unusual loaders and sources, as found in real code, for the scripts of this folder. They need torch only."""

from __future__ import annotations

import pickle
import queue
import threading
from multiprocessing.context import SpawnContext

import torch
from torch.utils.data import DataLoader, IterableDataset


class ReadsLoader(IterableDataset):
    """A data set that reads another loader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        yield from self.loader


# -- workers that are threads of the training process ---------------------------------------------------------------


class WorkerThread(threading.Thread):
    """A thread with the methods of a process that a DataLoader calls."""

    @property
    def pid(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class PlainQueue(queue.Queue):
    """A queue between threads with the methods of a multiprocessing queue that a DataLoader calls."""

    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class ThreadContext(SpawnContext):
    """A multiprocessing context that makes threads."""

    _name = "thread"
    Process = WorkerThread
    Queue = PlainQueue


class TogetherThread(WorkerThread):
    """A worker that starts while another thread starts one too: both are making an iterator."""

    together = threading.Barrier(2)

    def start(self) -> None:
        self.together.wait(30)
        super().start()


class TogetherContext(ThreadContext):
    Process = TogetherThread


class PicklingContext(ThreadContext):
    """Pickles its loader while workers are started, and keeps what ``worker_init_fn`` then was."""

    def __init__(self) -> None:
        super().__init__()
        self.loader: DataLoader | None = None
        self.seen: list[str] = []

    def Process(self, *args, **kwargs):  # noqa: N802
        init = vars(self.loader)["worker_init_fn"]
        self.seen += [repr(init), repr(self.loader.worker_init_fn), repr(pickle.loads(pickle.dumps(init)))]
        return WorkerThread(*args, **kwargs)


class FailingThread(WorkerThread):
    def start(self) -> None:
        raise OSError("no thread to be had")


class FailingContext(ThreadContext):
    Process = FailingThread


class Outer(DataLoader):
    """A loader that makes an iterator of another while it makes its own."""

    inner: DataLoader

    def _get_iterator(self):
        self.first = next(iter(self.inner))
        return super()._get_iterator()


# -- sources to watch -------------------------------------------------------------------------------------------------


class Resetting:
    """Its ``__iter__`` resets it and returns the object itself."""

    def __init__(self, items=(1, 2, 3)) -> None:
        self.items = list(items)
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]


class Measured(Resetting):
    """Has a length, is false, compares by its items and can be hashed."""

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measured) and self.items == other.items

    def __hash__(self) -> int:
        return hash(tuple(self.items))


class Reiterable:
    """Returns a new iterator each time, and has no length."""

    def __iter__(self):
        return iter([1, 2, 3])


class OldStyle:
    """A sequence of the old protocol."""

    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError(index)
        return index


class LikeALoader(Resetting):
    """Has the attributes of a DataLoader's iterator, with other things in them."""

    def __init__(self, items=(1, 2, 3)) -> None:
        super().__init__(items)
        self._workers = ["anything"]
        self._num_workers = 3
        self._index_sampler = self._dataset = self._data_queue = object()
        self._shutdown = True
        self._in_order = "no"
        self._profile_name = 7


class AnyAttribute(Resetting):
    """Has an attribute of every name."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: name


class RaisingAttribute(Resetting):
    """Raises an unusual exception when an attribute is read."""

    @property
    def _workers(self):
        raise RuntimeError("not yours")

    _num_workers = _index_sampler = _dataset = _data_queue = _shutdown = _profile_name = dataset = _workers


class Untrue(Reiterable):
    """Its ``bool()`` raises, as an array's does."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    def __len__(self) -> int:
        raise TypeError("no length today")

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")
