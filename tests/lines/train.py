"""A training script with a planted hot line, and timers of its own around it.

    python -m tests.lines.train KIND [--without] [--seconds S] [--answer FILE]

``# hot: KIND`` marks the planted line. The rest of a batch takes about half as long. With ``--without`` the hot line is
left out. The answer has the steps per second, and the hot line's share of a fetch (or of the waits, the sampler, the
step, a checkpoint), both by the script's own clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import telemetry
from tests.lines import hot_helpers

if TYPE_CHECKING:
    from collections.abc import Iterator

clock = time.perf_counter
CHANCE = random.Random(1)
NUMBERS = CHANCE.sample(range(10_000_000), 150_000)
NOISE = bytes(CHANCE.choices(range(64), k=1_400_000))
WARM_UP_SECONDS = 3.0


def quiet(milliseconds: float) -> None:
    """The rest of a batch: waiting."""
    time.sleep(milliseconds / 1e3)


def busy(rounds: int) -> int:
    """The rest of a batch: Python."""
    return sum([number * number % 7 for number in range(rounds)])


class Kind(Dataset):  # type: ignore[misc]
    """Batches of `item`. Each is (seconds of the hot line, seconds of all)."""

    workers = 1
    start_method = "fork"
    batch_size: int | None = None
    collate: Any = None

    def __init__(self, *, without: bool) -> None:
        self.without = without

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        began = clock()
        spent = self.item(index)
        return torch.tensor([spent, clock() - began], dtype=torch.float64)

    def item(self, index: int) -> float:
        """Make a batch. Returns the seconds of the hot line."""
        raise NotImplementedError


class PythonLoop(Kind):
    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            sum(number * number % 7 for number in range(600_000))  # hot: python_loop
        spent = clock() - began
        quiet(15)
        return spent


class Spawned(Kind):
    start_method = "spawn"

    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            sum(number * number % 7 for number in range(600_000))  # hot: spawn
        spent = clock() - began
        quiet(15)
        return spent


class ForkServer(Kind):
    start_method = "forkserver"

    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            sorted(NUMBERS)  # hot: forkserver
        spent = clock() - began
        quiet(15)
        return spent


class HoldsTheGil(Kind):
    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            sorted(NUMBERS)  # hot: c_holds_gil
        spent = clock() - began
        busy(200_000)
        quiet(5)
        return spent


class ReleasesTheGil(Kind):
    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            zlib.compress(NOISE, 6)  # hot: c_releases_gil
        spent = clock() - began
        busy(200_000)
        return spent


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

    def item(self, index: int) -> float:
        self.near.send(index)
        began = clock()
        if not self.without:
            self.near.recv()  # hot: read
        spent = clock() - began
        busy(120_000)
        return spent


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

    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            self.lock.acquire()  # hot: lock
            self.lock.release()
        spent = clock() - began
        busy(80_000)
        return spent


class Helper(Kind):
    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            hot_helpers.prepare(NOISE)
        spent = clock() - began
        quiet(15)
        return spent


def slow_collate(items: list[torch.Tensor]) -> torch.Tensor:
    """Sums the timers of the items, and adds its own."""
    began = clock()
    if not slow_collate.without:  # type: ignore[attr-defined]
        sorted(NUMBERS)  # hot: collate
    spent = clock() - began
    whole = torch.stack(items).sum(0)
    whole += torch.tensor([spent, spent], dtype=torch.float64)
    return whole


class Collate(Kind):
    batch_size = 4
    collate = staticmethod(slow_collate)

    def item(self, index: int) -> float:
        busy(50_000)
        return 0.0


class MainCollate(Collate):
    workers = 0


class MainProcess(Kind):
    workers = 0

    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            sum(number * number % 7 for number in range(600_000))  # hot: main_process
        spent = clock() - began
        quiet(15)
        return spent


class MainRead(Kind):
    workers = 0

    def item(self, index: int) -> float:
        began = clock()
        if not self.without:
            time.sleep(0.03)  # hot: main_wait
        spent = clock() - began
        busy(120_000)
        return spent


class Split(Kind):
    """Decoding against augmentation, 70 to 30."""

    packed = zlib.compress(NOISE * 6)
    picture = torch.rand(3, 600, 600)

    def item(self, index: int) -> float:
        torch.set_num_threads(1)
        began = clock()
        if not self.without:
            zlib.decompress(self.packed)  # hot: split
        spent = clock() - began
        end = clock() + 0.3 / 0.7 * 0.028
        while clock() < end:
            self.picture.flip(-1)
        return spent


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
    workers = 1

    def item(self, index: int) -> float:
        return 0.0


class Stepping(Kind):
    workers = 0

    def item(self, index: int) -> float:
        return 0.0


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
}


def stream(*, without: bool) -> Iterator[torch.Tensor]:
    """A data source that is not a DataLoader."""
    while True:
        began = clock()
        if not without:
            sorted(NUMBERS)  # hot: watched
        spent = clock() - began
        busy(200_000)
        yield torch.tensor([spent, clock() - began], dtype=torch.float64)


def main() -> None:
    """Train for some seconds, and write the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--answer", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = KINDS[options.kind](without=options.without)
    slow_collate.without = options.without  # type: ignore[attr-defined]
    sampler = SlowSampler(without=options.without) if options.kind == "sampler" else None
    batches: Any = DataLoader(
        kind,
        batch_size=kind.batch_size,
        num_workers=kind.workers,
        sampler=sampler,
        collate_fn=kind.collate,
        multiprocessing_context=kind.start_method if kind.workers else None,
    )
    if options.kind == "watched":
        batches = telemetry.watch(stream(without=options.without))
    weights = torch.rand(300, 300, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.0)
    hot = whole = 0.0
    steps, began, steady = 0, clock(), 0.0
    kept = [[number] for number in range(1_000)] if options.kind == "gc_step" else []
    with tempfile.TemporaryDirectory() as folder:
        started = clock()
        for batch in batches:
            for _ in range(2):
                loss = (weights @ weights).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            at = clock()
            if options.kind == "gc_step" and not options.without:
                gc.collect()  # hot: gc_step
            if options.kind == "checkpoint":
                with telemetry.phase("checkpoint"):
                    if not options.without:
                        sorted(NUMBERS)  # hot: checkpoint
                    spent = clock() - at
                    torch.save(weights, os.path.join(folder, "state.pt"))
                    quiet(15)
                hot, whole = hot + spent, whole + clock() - at
            elif options.kind == "gc_step":
                hot, whole = hot + clock() - at, whole + clock() - started
            else:
                hot, whole = hot + float(batch[0]), whole + float(batch[1])
            started = clock()
            steps += 1
            if not steady and started - began >= WARM_UP_SECONDS:
                steady, steps = started, 0
                hot = whole = 0.0
            if started - began >= options.seconds:
                break
    if sampler is not None:
        hot, whole = sampler.spent, sampler.whole
    del kept
    answer = {"steps_per_second": steps / (started - steady), "share": hot / whole if whole else None}
    if options.answer is not None:
        options.answer.write_text(json.dumps(answer), encoding="utf-8")
    print(answer)


if __name__ == "__main__":
    main()
