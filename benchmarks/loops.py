"""The training loops in which instruments are compared: hot and cold.

Instruments take turns in blocks of steps, in a new random order each round. An instrument adds the difference to the
bare loop of the same round. So drift of the machine affects all of them equally.

This module also runs in TraceML's environment: it imports torch, and nothing of telemetry.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Final

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

STEP_MS: Final = 7.0
"""Duration of a step of the cold loop. The size of its batch is adjusted to it."""

_RUN: Final = 20  # steps that are timed together in a hot block: its figure is the median run, unaffected by preemption
_COLD_SKIPPED: Final = 2  # first steps of a cold block, which settle the caches after the previous instrument
_BATCH: Final = 32  # images; scaled until a step takes STEP_MS

Samples = dict[str, list[dict[str, float]]]
"""For each instrument one reading per round: nanoseconds by site."""

Hook = Callable[..., None]


class EndlessLoader(DataLoader[Any]):  # type: ignore[misc]
    """A DataLoader whose iterators return the same batch forever.

    Everything except the fetch is torch's own code, so that the cost added to ``next`` is visible.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__([0], batch_size=None)
        self.batch = batch

    def _get_iterator(self) -> EndlessIterator:
        return EndlessIterator(self)


class EndlessIterator(_BaseDataLoaderIter):  # type: ignore[misc]
    """An iterator of `EndlessLoader`."""

    def __init__(self, loader: EndlessLoader) -> None:
        super().__init__(loader)
        self._batch = loader.batch

    def _next_data(self) -> Any:
        return self._batch


def iterator_with(loader: EndlessLoader, next_method: Callable[[Any], Any]) -> Iterator[Any]:
    """An iterator with the given ``__next__``, found in the same way as torch's own."""
    kind = type("EndlessIterator", (EndlessIterator,), {"__next__": next_method})
    made: Iterator[Any] = kind(loader)
    return made


class Idle(nn.Module):  # type: ignore[misc]
    """A model that does nothing."""

    def forward(self, batch: Any) -> Any:
        return batch


class IdleOptimizer(torch_optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer that only runs the hooks."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], {})

    def step(self, closure: Any = None) -> None:
        del closure


class ConvNet(nn.Module):  # type: ignore[misc]
    """A small convolutional network that records when its forward and its backward begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.ended = self.backward_began = self.backward_ended = 0
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
        for parameter in self.layers[0].parameters():  # these get their gradients last
            parameter.register_post_accumulate_grad_hook(self._backward_ends)

    def forward(self, images: Any) -> Any:
        self.began = perf_counter_ns()
        loss = self.layers(images).square().mean()
        loss.register_hook(self._backward_begins)
        self.ended = perf_counter_ns()
        return loss

    def _backward_begins(self, _: Any) -> None:
        self.backward_began = perf_counter_ns()

    def _backward_ends(self, _: Any) -> None:
        self.backward_ended = perf_counter_ns()


@dataclass
class Instrument:
    """One implementation that is compared.

    Attributes:
        name: its name in the table.
        iterator: the iterator that the loop requests batches from.
        step: makes the context manager around a step; None for none.
        pre_hooks: hooks before an optimizer's step.
        post_hooks: hooks after it.
        attributes: (owner, name, value): attributes of torch that are set while it runs.
    """

    name: str
    iterator: Iterator[Any]
    step: Callable[[Any], AbstractContextManager[Any]] | None = None
    pre_hooks: Sequence[Hook] = ()
    post_hooks: Sequence[Hook] = ()
    attributes: Sequence[tuple[Any, str, Any]] = ()


class HookStamps:
    """Two hooks that run before and after an instrument's own hooks. The time between them is the cost of its hooks."""

    def __init__(self) -> None:
        self._ns = self._at = 0

    def before(self, *_: Any) -> None:
        self._at = perf_counter_ns()

    def after(self, *_: Any) -> None:
        self._ns += perf_counter_ns() - self._at

    def take(self) -> int:
        """Nanoseconds since the last call."""
        taken, self._ns = self._ns, 0
        return taken


@contextlib.contextmanager
def installed(instrument: Instrument, stamps: HookStamps | None = None) -> Iterator[None]:
    """Set an instrument's hooks and attributes. torch's global hooks are replaced as a whole."""
    places = (
        (torch_optimizer._global_optimizer_pre_hooks, instrument.pre_hooks),
        (torch_optimizer._global_optimizer_post_hooks, instrument.post_hooks),
    )
    kept = [dict(place) for place, _ in places]
    for place, hooks in places:
        ordered = [stamps.before, *hooks, stamps.after] if stamps is not None else hooks
        place.clear()
        place.update(enumerate(ordered))
    for owner, name, value in instrument.attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (place, _), before in zip(places, kept, strict=True):
            place.clear()
            place.update(before)


def take_turns(
    instruments: Sequence[Instrument],
    block: Callable[[Instrument], dict[str, float]],
    *,
    rounds: int,
    pause_seconds: float = 0.0,
) -> Samples:
    """Run every instrument's block once a round, in random order.

    Args:
        instruments: the first is the one that the others are compared with.
        block: runs some steps with an instrument and returns their durations.
        rounds: number of rounds.
        pause_seconds: pause between rounds, in which background threads can empty their queues. No instrument is made
            for loops of 100,000 steps a second, and a full queue takes another path through its code.
    """
    samples: Samples = {instrument.name: [] for instrument in instruments}
    for _ in range(rounds):
        for instrument in random.sample(instruments, len(instruments)):
            samples[instrument.name].append(block(instrument))
        time.sleep(pause_seconds)
    return samples


# -- hot -------------------------------------------------------------------------------------------------------------


def hot_block(instrument: Instrument, model: nn.Module, optimizer: IdleOptimizer, steps: int) -> dict[str, float]:
    """A tight loop: a batch, a model and an optimizer that do nothing. Nanoseconds a step."""
    run = _hot_plain if instrument.step is None else _hot_stepped
    took = []
    with installed(instrument):
        run(instrument, model, optimizer, _RUN)
        for _ in range(max(1, steps // _RUN)):
            start = perf_counter_ns()
            run(instrument, model, optimizer, _RUN)
            took.append((perf_counter_ns() - start) / _RUN)
    return {"cost": statistics.median(took)}


def _hot_plain(instrument: Instrument, model: nn.Module, optimizer: IdleOptimizer, steps: int) -> None:
    iterator = instrument.iterator
    for _ in range(steps):
        model(next(iterator))
        optimizer.step()


def _hot_stepped(instrument: Instrument, model: nn.Module, optimizer: IdleOptimizer, steps: int) -> None:
    iterator, step = instrument.iterator, instrument.step
    if step is None:
        return
    for _ in range(steps):
        batch = next(iterator)
        with step(model):
            model(batch)
            optimizer.step()


# -- cold ------------------------------------------------------------------------------------------------------------


@dataclass
class ColdLoop:
    """A real training step, and the time that an instrument takes at each site where it can act.

    Sites: ``next`` (the request for a batch), ``around`` (entering and leaving a step's context), ``forward`` and
    ``backward`` (the calls, without what runs inside them) and ``optimizer`` (hooks). ``whole`` is the step itself. Its
    noise hides small costs.

    Attributes:
        sites: the sites that ``cost`` sums.
        step_ms: target duration of a step.
        reduce: function that reduces a block's steps to one figure.
    """

    device: str
    sites: Sequence[str]
    reduce: Callable[[Sequence[float]], float] = statistics.median
    step_ms: float = STEP_MS
    images: Any = None
    stamps: HookStamps = field(default_factory=HookStamps)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.net = ConvNet().to(self.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        count = _BATCH
        for _ in range(2):  # at first, memory and caches are still being set up
            self.images = self._images(count)
            count = max(1, round(count * self.step_ms / self._measure_ms()))
        self.images = self._images(count)

    def block(self, instrument: Instrument, steps: int) -> dict[str, float]:
        """Run some steps. Returns one figure for each site."""
        readings: list[dict[str, float]] = []
        with installed(instrument, self.stamps):
            for _ in range(_COLD_SKIPPED + steps):
                readings.append(self._step(instrument))  # noqa: PERF401 - each step is timed as it stands in a loop
        readings = readings[_COLD_SKIPPED:]
        for reading in readings:
            reading["cost"] = sum(reading[site] for site in self.sites)
        reduced = {site: self.reduce([reading[site] for reading in readings]) for site in readings[0]}
        return reduced | {"peak": max(reading["cost"] for reading in readings)}

    def _step(self, instrument: Instrument) -> dict[str, float]:
        iterator, step, net, optimizer = instrument.iterator, instrument.step, self.net, self.optimizer
        manager = None
        self.stamps.take()
        t0 = perf_counter_ns()
        batch = next(iterator)
        t1 = perf_counter_ns()
        if step is not None:
            manager = step(net)
            manager.__enter__()
        t2 = perf_counter_ns()
        optimizer.zero_grad()
        t3 = perf_counter_ns()
        loss = net(batch)
        t4 = perf_counter_ns()
        loss.backward()
        after_backward = perf_counter_ns()
        optimizer.step()
        t5 = perf_counter_ns()
        if manager is not None:
            manager.__exit__(None, None, None)
        t6 = perf_counter_ns()
        return {
            "next": t1 - t0,
            "around": t2 - t1 + t6 - t5,
            "forward": net.began - t3 + t4 - net.ended,
            "backward": net.backward_began - t4 + after_backward - net.backward_ended,
            "optimizer": self.stamps.take(),
            "whole": t6 - t0,
        }

    def _images(self, count: int) -> Any:
        return torch.randn(count, 3, 32, 32, device=self.device)

    def _measure_ms(self) -> float:
        """Median duration of a step with the current images, after a few steps to warm up."""
        took = []
        for _ in range(12):
            start = perf_counter_ns()
            self.optimizer.zero_grad()
            self.net(self.images).backward()
            self.optimizer.step()
            if self.device != "cpu":
                torch.cuda.synchronize()
            took.append((perf_counter_ns() - start) / 1e6)
        return statistics.median(took[4:])
