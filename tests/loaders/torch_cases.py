"""Cases with torch's loaders."""

from __future__ import annotations

import copy
import pickle
import threading

from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_sets import Numbers
from tests.loaders.observe import EPOCHS, depth, raised
from tests.loaders.unusual_loaders import (
    FailingContext,
    Outer,
    PicklingContext,
    ReadsLoader,
    ThreadContext,
    TogetherContext,
)


def epochs(loader, count: int = EPOCHS) -> list:
    """The batches of each epoch, where they differ from those before; and how many epochs there were."""
    seen: list = []
    for _ in range(count):
        batches = [batch.tolist() for batch in loader]
        if not seen or seen[-1] != batches:
            seen.append(batches)
    return [count, seen]


def of(loader) -> list:
    """What a loader and its iterator look like."""
    iterator = iter(loader)
    init = vars(iterator).get("_worker_init_fn", "none")
    return [
        repr(loader.worker_init_fn),
        repr(init),
        sorted(vars(loader)),
        sorted(vars(iterator)),
        sorted(dir(loader)),
        len(loader),
        len(iterator),
        type(iterator).__name__,
        type(loader).__iter__.__qualname__,
        type(iterator).__next__.__doc__,
    ]


def note(worker_id: int) -> None:
    """A ``worker_init_fn`` that anybody can import."""
    assert get_worker_info() is not None


def begins(worker_id: int) -> None:
    """As `note`, for workers that are threads of several loaders: torch keeps one worker's info per process."""
    assert worker_id == 0


def fails(worker_id: int) -> None:
    raise KeyError(f"worker {worker_id} cannot begin")


def thread_workers():
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=2, multiprocessing_context=ThreadContext())
    return epochs(loader), of(loader)


def no_workers():
    loader = DataLoader(Numbers(4), batch_size=2)
    return epochs(loader), of(loader)


def process_workers():
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=note)
    return epochs(loader), of(loader)


def persistent_workers():
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=True)
    return epochs(loader), loader._iterator._shutdown_workers()


def two_threads_read_one_loader():
    loader = DataLoader(
        Numbers(4), batch_size=2, num_workers=1, multiprocessing_context=TogetherContext(), worker_init_fn=begins
    )
    seen: list = [None, None]

    def read(which: int) -> None:
        seen[which] = raised(lambda: epochs(loader))

    reading = [threading.Thread(target=read, args=(which,)) for which in (0, 1)]
    for thread in reading:
        thread.start()
    for thread in reading:
        thread.join()
    return seen, depth(loader.worker_init_fn), repr(loader.worker_init_fn)


def pickled_while_workers_start():
    context = PicklingContext()
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=context, worker_init_fn=note)
    context.loader = loader
    return epochs(loader, 3), context.seen


def copied_and_pickled():
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=0, worker_init_fn=note)
    list(loader)
    return [
        [sorted(vars(other)), repr(other.worker_init_fn), epochs(other, 2)]
        for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)))
    ]


def nested_loaders():
    inner = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=ThreadContext())
    outer = Outer(Numbers(4), num_workers=1, multiprocessing_context=ThreadContext(), worker_init_fn=note)
    outer.inner = inner
    reading = DataLoader(ReadsLoader(inner), batch_size=None)
    return epochs(outer), int(outer.first), of(outer), epochs(reading)


def failures():
    threads = ThreadContext()
    broken = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=FailingContext(), worker_init_fn=note)
    failing = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=threads, worker_init_fn=fails)
    local = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn", worker_init_fn=lambda _: 0)
    seen = [raised(lambda loader=loader: list(loader)) for loader in (broken, broken, failing)]
    seen.append(raised(lambda: iter(local))[:1])
    for workers in (0, 1):
        context = threads if workers else None
        bad = DataLoader(Numbers(4, fail_at=1), num_workers=workers, multiprocessing_context=context)
        seen.append(raised(lambda bad=bad: list(bad)))
    return seen, repr(broken.worker_init_fn), repr(failing.worker_init_fn), "lambda" in repr(local.worker_init_fn)


def stateful_loader():
    plain = StatefulDataLoader(Numbers(4), batch_size=2)
    threads = StatefulDataLoader(Numbers(4), batch_size=2, num_workers=2, multiprocessing_context=ThreadContext())
    forked = StatefulDataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=note)
    iterator = iter(forked)
    next(iterator)
    state = sorted(forked.state_dict())
    return epochs(plain), epochs(threads), of(threads), [b.tolist() for b in iterator], state, epochs(forked, 2)


CASES = {
    case.__name__: case
    for case in (
        no_workers,
        thread_workers,
        process_workers,
        persistent_workers,
        two_threads_read_one_loader,
        pickled_while_workers_start,
        copied_and_pickled,
        nested_loaders,
        failures,
        stateful_loader,
    )
}
