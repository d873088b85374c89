"""Follows what changes slowly: memory that grows, and steps that became slower or faster for good."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.changes import BlockBuilder, ChangeDetector
from telemetry.diagnosis.memory import MEMORY, MemoryReadings, ReadingHistory, memory_advice, memory_outlook
from telemetry.records import CUDA, SHARED_MEMORY, TRAINING, WORKERS, MemoryGrowth, MemorySample, rounded
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.records import GpuSample, PressureSample, StepChange, TorchMemorySample, Totals


# -- follows the memory of the run: keeps the histories, judges them now and then, and shows the result ----------------

READ_SECONDS: Final = 2.0
"""Readings that come faster are merged."""

_SPANS: Final = (1350.0, 64.0)
"""Maximum seconds between two readings of the two histories of each figure: they reach back a day, and an hour."""

_JUDGE_SECONDS: Final = 5.0

_MAX_MISSED: Final = 3
"""A forecast is only withdrawn after this many judgements without one. A busy machine changes the pace for a while."""

_USED_MEMORY: Final = "used"
_COPYABLE: Final = "copyable"
_USED_SHARED_MEMORY: Final = "shared_memory_used"
_USED: Final = frozenset({_USED_MEMORY, _USED_SHARED_MEMORY})
"""Figures of which the peaks count: minus the bytes that are left."""


class MemoryWatch:
    """The histories of one rank. Used by the agent thread.

    Args:
        newest: returns the newest sample of a collector; None while it is down.
        training_begun: whether the first step has ended. What a run needs at its start is not growth.
        workers_end: whether the workers are started anew in each epoch, and the first epoch has not ended.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        newest: Callable[[str], Any],
        training_begun: Callable[[], bool],
        workers_end: Callable[[], bool],
        *,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._newest = newest
        self._training_begun = training_begun
        self._workers_end = workers_end
        self._clock = clock
        self._histories: tuple[dict[str, ReadingHistory], ...] = tuple({} for _ in _SPANS)
        self._last: MemorySample | None = None
        self._free: dict[str, float] = {}
        self._limit: int | None = None
        self._changed = False
        self._judged_ns = 0
        self._growth: MemoryGrowth | None = None
        self._missed = 0

    def tick(self) -> None:
        """Take the newest reading, if there is a new one, and judge the histories if they have changed."""
        sample: MemorySample | None = self._newest("memory")
        if sample is None or sample is self._last or not self._training_begun():
            return
        self._last = sample
        now = self._clock()
        for name, value in self._values(sample).items():
            for histories, span in zip(self._histories, _SPANS, strict=True):
                history = histories.get(name)
                if history is None:
                    history = histories[name] = ReadingHistory(READ_SECONDS, span, highest=name in _USED)
                self._changed |= history.add(now / NS, value)
        if self._changed and now - self._judged_ns >= _JUDGE_SECONDS * NS:
            self._changed = False
            self._take(self._judge(), now)

    def view(self) -> MemoryGrowth | None:
        """The growth as of now; None before the first judgement."""
        growth = self._growth
        if growth is None or growth.exhausted_in_seconds is None:
            return growth
        passed = (self._clock() - self._judged_ns) / NS
        return replace(growth, exhausted_in_seconds=max(0.0, growth.exhausted_in_seconds - passed))

    def log_field(self) -> dict[str, Any] | None:
        """The growth for the log; None if no memory grows for good. What is not known is left out."""
        growth = self.view()
        if growth is None or growth.where_bytes_per_second is None:
            return None
        field: dict[str, Any] = {
            "growth_bytes_per_hour": round(growth.where_bytes_per_second * 3600),
            "where": growth.where,
            "exhausted_in_seconds": growth.exhausted_in_seconds,
            "exhausted": growth.exhausted,
            "copied_on_write": growth.copied_on_write or None,
            "advice": memory_advice(growth) or None,
        }
        return {name: value for name, value in field.items() if value is not None}

    def _values(self, sample: MemorySample) -> dict[str, float]:
        """What was measured, by the name of its history. Also notes what is left."""
        gpu: GpuSample | None = self._newest("nvml")
        allocator: TorchMemorySample | None = self._newest("torch_memory")
        values = {
            TRAINING: sample.training_bytes,
            WORKERS: sample.workers_bytes,
            SHARED_MEMORY: sample.shared_memory_bytes,
            CUDA: None if allocator is None else allocator.allocated_bytes,
            _COPYABLE: sample.workers_shared_bytes,
            _USED_MEMORY: _minus(sample.memory_available_bytes),
            _USED_SHARED_MEMORY: _minus(sample.shared_memory_free_bytes),
        }
        free = {MEMORY: sample.memory_available_bytes, SHARED_MEMORY: sample.shared_memory_free_bytes}
        if allocator is not None and gpu is not None and None not in (gpu.memory_total_bytes, gpu.memory_used_bytes):
            # What the allocator holds but does not use is free for tensors, too.
            others = (gpu.memory_used_bytes or 0) - allocator.reserved_bytes
            free[CUDA] = max(0, (gpu.memory_total_bytes or 0) - max(0, others) - allocator.allocated_bytes)
        self._free = {name: float(value) for name, value in free.items() if value is not None}
        self._limit = sample.memory_limit_bytes
        return {name: float(value) for name, value in values.items() if value is not None}

    def _take(self, growth: MemoryGrowth, now: int) -> None:
        forecast = self._growth is not None and self._growth.exhausted_in_seconds is not None
        self._missed = self._missed + 1 if forecast and growth.exhausted_in_seconds is None else 0
        if 0 < self._missed <= _MAX_MISSED:
            self._growth = self.view()  # as of now
        else:
            self._growth = growth
        self._judged_ns = now

    def _judge(self) -> MemoryGrowth:
        """By the longer history, or by the shorter one if growth only began lately."""
        found = MemoryGrowth()
        for histories in self._histories:
            found = memory_outlook(self._readings(histories))
            if found.where_bytes_per_second is not None:
                break
        return found

    def _readings(self, histories: dict[str, ReadingHistory]) -> MemoryReadings:
        kept = {name: history.readings for name, history in histories.items()}
        return MemoryReadings(
            used=kept.pop(_USED_MEMORY, ()),
            shared_memory_used=kept.pop(_USED_SHARED_MEMORY, ()),
            workers_shared=kept.pop(_COPYABLE, ()),
            parts=kept,
            free=self._free,
            limit_bytes=self._limit,
            workers_end=self._workers_end(),
        )


def _minus(value: int | None) -> int | None:
    return None if value is None else -value


# -- follows whether the steps of this rank became slower or faster for good, and logs it ------------------------------

_DIGITS = 6


class ChangeMonitor:
    """Used by the agent thread.

    Args:
        newest: returns the newest sample of a collector, for what changed together with the steps.
        emit: writes a line of the log.
        timestamp: returns a moment as ISO-8601; the argument is the wall clock of `Totals` at it.
    """

    def __init__(
        self,
        newest: Callable[[str], Any],
        emit: Callable[[str, dict[str, Any]], Any],
        timestamp: Callable[[float], str],
    ) -> None:
        self._newest = newest
        self._emit = emit
        self._timestamp = timestamp
        self._blocks = BlockBuilder()
        self._detector = ChangeDetector()

    def tick(self, totals: Totals) -> None:
        """Add a tick. Logs a change that is confirmed by it."""
        block = self._blocks.add(totals, self._signals())
        change = None if block is None else self._detector.add(block)
        if change is not None:
            self._emit("change", change_fields(change, self._timestamp(change.at_seconds)))

    @property
    def ratio(self) -> float | None:
        """Step time now over step time before the slow-down that holds on, see `ChangeDetector`."""
        return self._detector.ratio

    def _signals(self) -> dict[str, float]:
        """Figures of the machine that no counter has. What was not measured is missing."""
        gpu: GpuSample | None = self._newest("nvml")
        pressure: PressureSample | None = self._newest("pressure")
        found: dict[str, float | None] = {}
        if gpu is not None:
            found["gpu_clock_hertz"] = gpu.sm_clock_hertz
            found["gpu_temperature_celsius"] = gpu.temperature_celsius
        if pressure is not None:
            found |= {f"{name}_pressure_ratio": ratio for name, ratio in pressure.pressure_ratio.items()}
        return {name: value for name, value in found.items() if value is not None}


def change_fields(change: StepChange, at: str) -> dict[str, Any]:
    """The fields of the log event ``change``.

    Args:
        change: the change.
        at: when it happened, ISO-8601.
    """
    return {
        "at": at,
        "first_step": change.step,
        "ratio": round(change.ratio, 4),
        "part": change.part,
        "step_before_seconds": round(change.before_seconds, _DIGITS),
        "step_after_seconds": round(change.after_seconds, _DIGITS),
        "with": [
            {"what": each.what, "before": rounded(each.before), "after": rounded(each.after)}
            for each in change.companions
        ],
    }
