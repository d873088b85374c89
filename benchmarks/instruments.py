"""The instruments that are compared in our own environment: bare loop, floor, telemetry, naive prometheus_client."""

from __future__ import annotations

import statistics
import tempfile
import time
from array import array
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from benchmarks import child, stand_in
from benchmarks.loops import (
    ColdLoop,
    EndlessLoader,
    Idle,
    IdleOptimizer,
    Instrument,
    hot_block,
    iterator_with,
    take_turns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

BARE: Final = "bare"
FLOOR: Final = "floor, array"
FLOOR_LIST: Final = "floor, list"
TELEMETRY: Final = "telemetry"
NEXT_ONLY: Final = "telemetry, next() only"
PROMETHEUS: Final = "prometheus_client"

_WORDS: Final = 4 * 8192

STAND_IN: Final = "stand-in"

_CLOCK_SECONDS: Final = 10.0
"""The agent sees within this time that a device is in use."""

_STEPS_A_SECOND: Final = 4000
"""Hot steps are limited to this rate, which fills half of the agent's ring between two ticks."""


def measure(
    *, hot_rounds: int, hot_steps: int, cold_rounds: int, cold_steps: int, device: str = "cpu"
) -> dict[str, Any]:
    """Measure all instruments of this environment, with the agent of this process running.

    On a GPU the figures are means: only some steps record events, so a median would not include them. With ``stand-in``
    as the device, they are medians: of the steps that record none.
    """
    import telemetry

    torch.set_num_threads(1)
    if device == STAND_IN:
        stand_in.install(torch)
    original = _BaseDataLoaderIter.__next__
    before = set(torch_optimizer._global_optimizer_post_hooks)
    cpu = device == "cpu"
    reduce = statistics.fmean if device == "cuda" else statistics.median
    loop = ColdLoop("cuda" if device == "cuda" else "cpu", sites=("next", "optimizer"), reduce=reduce)
    loader = EndlessLoader(loop.images)
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        agent: Any = telemetry.start(run_dir, port=0, start_line=False)
        try:
            ours = _telemetry(
                loader, [h for k, h in torch_optimizer._global_optimizer_post_hooks.items() if k not in before]
            )
            bare = Instrument(BARE, iterator_with(loader, original))
            result: dict[str, Any] = {}
            if cpu:
                array_floor = floor(original, array("q", [0] * _WORDS))
                others = [Instrument(FLOOR, iterator_with(loader, array_floor)), *ours]
                others.append(Instrument(FLOOR_LIST, iterator_with(loader, floor(original, [0] * _WORDS))))
                others.append(Instrument(PROMETHEUS, iterator_with(loader, prometheus(original))))
                result["hot"] = _hot([bare, *others], hot_rounds, hot_steps)
                others.remove(ours[1])
            else:
                others = ours[:1]
                end = time.monotonic() + _CLOCK_SECONDS
                while agent.tracker.gpu is None and time.monotonic() < end:
                    time.sleep(0.01)
            result["cold"] = take_turns([bare, *others], lambda each: loop.block(each, cold_steps), rounds=cold_rounds)
            return result | _health(agent)
        finally:
            telemetry.stop()


def floor(original: Callable[[Any], Any], words: MutableSequence[int]) -> Callable[[Any], Any]:
    """The least cost of recording a step: two stamps and a store into one preallocated array or list.

    The array takes less memory. A store into a list calls no function that the step has evicted from the caches.
    """
    mask = len(words) - 1
    head = 0

    def __next__(self: Any) -> Any:  # noqa: N807
        nonlocal head
        start = perf_counter_ns()
        batch = original(self)
        end = perf_counter_ns()
        slot = head & mask
        words[slot] = start
        words[slot + 1] = end
        head += 4
        return batch

    return __next__


def prometheus(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A naive implementation: a counter and two histograms, labels bound beforehand, on every step."""
    from prometheus_client import CollectorRegistry, Counter, Histogram

    registry = CollectorRegistry()
    labels = {"run": "benchmark", "rank": "0"}
    steps = Counter("steps", "Steps.", list(labels), registry=registry).labels(**labels)
    wait = Histogram("wait_seconds", "Wait.", list(labels), registry=registry).labels(**labels)
    step = Histogram("step_seconds", "Step.", list(labels), registry=registry).labels(**labels)
    last = perf_counter_ns()

    def __next__(self: Any) -> Any:  # noqa: N807
        nonlocal last
        start = perf_counter_ns()
        batch = original(self)
        end = perf_counter_ns()
        steps.inc()
        wait.observe((end - start) / 1e9)
        step.observe((start - last) / 1e9)
        last = start
        return batch

    return __next__


def _telemetry(loader: EndlessLoader, hooks: list[Any]) -> list[Instrument]:
    """The agent as it is, and without its optimizer hook. Both use one iterator, because the fast path follows one."""
    iterator = iter(loader)
    return [Instrument(TELEMETRY, iterator, post_hooks=hooks), Instrument(NEXT_ONLY, iterator)]


def _hot(instruments: list[Instrument], rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    model, optimizer = Idle(), IdleOptimizer()
    noted = sum(each.name in {TELEMETRY, NEXT_ONLY} for each in instruments) * steps
    return take_turns(
        instruments,
        lambda each: hot_block(each, model, optimizer, steps),
        rounds=rounds,
        pause_seconds=noted / _STEPS_A_SECOND,
    )


def _health(agent: Any) -> dict[str, Any]:
    """Whether the agent worked during the measurement: a broken or overrun one would be cheap."""
    return {
        "running": bool(agent.running),
        "dropped_steps": agent.tracker.ring.dropped,
        "hook_errors": agent.tracker.errors,
        "steps": agent.accounting.stats.steps,
        "gpu_pairs": agent.tracker.gpu.pairs if agent.tracker.gpu is not None else None,
    }


if __name__ == "__main__":
    child.answer(measure)
