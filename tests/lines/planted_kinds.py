"""Data sets of which each has a planted hot line, marked ``# hot: KINDS``, and times it and the whole batch itself.

The second line of `Split` is marked ``# second: split``.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from tests.lines import hot_helpers

if TYPE_CHECKING:
    from collections.abc import Iterator

clock = time.perf_counter
CHANCE = random.Random(1)
NUMBERS = CHANCE.sample(range(10_000_000), 150_000)
NOISE = bytes(CHANCE.choices(range(64), k=1_400_000))


def quiet(milliseconds: float) -> None:
    """The rest of a batch: waiting."""
    time.sleep(milliseconds / 1e3)


def busy(rounds: int) -> int:
    """The rest of a batch: Python."""
    return sum([number * number % 7 for number in range(rounds)])


class Kind(Dataset):  # type: ignore[misc]
    """Batches of a hot line and the rest. Each is (seconds of the hot line, of all, of the second line)."""

    workers = 1
    start_method = "fork"
    batch_size: int | None = None
    collate: Any = None
    second = 0.0
    """Seconds of the second line in the newest batch, if that line is marked."""

    def __init__(self, *, without: bool) -> None:
        self.without = without

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        began = clock()
        if not self.without:
            self.hot()
        spent = clock() - began
        self.rest()
        return torch.tensor([spent, clock() - began, self.second], dtype=torch.float64)

    def hot(self) -> None:
        """The hot line."""

    def rest(self) -> None:
        """The rest of a batch."""
        quiet(15)


class PythonLoop(Kind):
    def hot(self) -> None:
        sum(number * number % 7 for number in range(600_000))  # hot: python_loop


class Spawned(Kind):
    start_method = "spawn"

    def hot(self) -> None:
        sum(number * number % 7 for number in range(600_000))  # hot: spawn


class ForkServer(Kind):
    start_method = "forkserver"

    def hot(self) -> None:
        sorted(NUMBERS)  # hot: forkserver


class HoldsTheGil(Kind):
    def hot(self) -> None:
        sorted(NUMBERS)  # hot: c_holds_gil

    def rest(self) -> None:
        busy(200_000)
        quiet(5)


class ReleasesTheGil(Kind):
    def hot(self) -> None:
        zlib.compress(NOISE, 6)  # hot: c_releases_gil

    def rest(self) -> None:
        busy(200_000)


def _storage(connection: Any) -> None:
    while True:
        connection.recv()
        time.sleep(0.03)
        connection.send(b"page")


class BlockingRead(Kind):
    def __init__(self, *, without: bool) -> None:
        super().__init__(without=without)
        self.near, far = multiprocessing.Pipe()
        multiprocessing.Process(target=_storage, args=(far,), daemon=True).start()

    def hot(self) -> None:
        self.near.send(0)
        self.near.recv()  # hot: read

    def rest(self) -> None:
        busy(120_000)


def _holder(lock: Any) -> None:
    while True:
        with lock:
            time.sleep(0.04)
        time.sleep(0.005)


class Locked(Kind):
    def __init__(self, *, without: bool) -> None:
        super().__init__(without=without)
        self.lock = multiprocessing.Lock()
        multiprocessing.Process(target=_holder, args=(self.lock,), daemon=True).start()

    def hot(self) -> None:
        self.lock.acquire()  # hot: lock
        self.lock.release()

    def rest(self) -> None:
        busy(80_000)


class Helper(Kind):
    def hot(self) -> None:
        hot_helpers.prepare(NOISE)


def slow_collate(items: list[torch.Tensor]) -> torch.Tensor:
    """Sums the timers of the items, and adds its own."""
    began = clock()
    if not slow_collate.without:  # type: ignore[attr-defined]
        sorted(NUMBERS)  # hot: collate, main_collate
    spent = clock() - began
    whole = torch.stack(items).sum(0)
    whole += torch.tensor([spent, spent, 0.0], dtype=torch.float64)
    return whole


class Collate(Kind):
    batch_size = 4
    collate = staticmethod(slow_collate)

    def rest(self) -> None:
        busy(50_000)


class MainCollate(Collate):
    workers = 0


class MainProcess(Kind):
    workers = 0

    def hot(self) -> None:
        sum(number * number % 7 for number in range(600_000))  # hot: main_process


class MainRead(Kind):
    workers = 0

    def hot(self) -> None:
        time.sleep(0.03)  # hot: main_wait

    def rest(self) -> None:
        busy(120_000)


class Split(Kind):
    """Decoding against augmentation, 70 to 30. Both run by the clock, so that the load does not change their shares."""

    packed = zlib.compress(NOISE[:140_000])
    picture = torch.rand(3, 200, 200)

    def hot(self) -> None:
        end = clock() + 0.028
        while clock() < end:
            zlib.decompress(self.packed)  # hot: split

    def rest(self) -> None:
        torch.set_num_threads(1)
        began = clock()
        while clock() < began + 0.012:
            self.picture.flip(-1)  # second: split
        self.second = clock() - began


class SlowSampler(Sampler):  # type: ignore[misc]
    """Draws each index slowly, on the training thread."""

    def __init__(self, *, without: bool) -> None:
        self.without = without
        self.spent = self.whole = 0.0

    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            began = clock()
            if not self.without:
                sorted(NUMBERS)  # hot: sampler
            self.spent += clock() - began
            busy(200_000)
            self.whole += clock() - began
            index += 1
            yield index


class Sampled(Kind):
    def rest(self) -> None:
        pass


class Stepping(Sampled):
    workers = 0


KINDS: dict[str, type[Kind]] = {
    "python_loop": PythonLoop,
    "spawn": Spawned,
    "forkserver": ForkServer,
    "c_holds_gil": HoldsTheGil,
    "c_releases_gil": ReleasesTheGil,
    "read": BlockingRead,
    "lock": Locked,
    "helper": Helper,
    "collate": Collate,
    "main_collate": MainCollate,
    "main_process": MainProcess,
    "main_wait": MainRead,
    "split": Split,
    "sampler": Sampled,
    "watched": MainRead,
    "gc_step": Stepping,
    "checkpoint": Stepping,
    "straggler": Stepping,
}
RANKS: dict[str, int] = {"straggler": 2}
"""The kinds that are jobs of several ranks. The last rank has the hot line in its steps, and the others wait for it."""
