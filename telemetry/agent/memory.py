"""Follows memory that grows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.memory import MEMORY, MemoryReadings, ReadingHistory, memory_advice, memory_outlook
from telemetry.log_lines import MemoryForecast
from telemetry.records import CUDA, SHARED_MEMORY, TRAINING, WORKERS, MemoryGrowth, MemorySample
from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from telemetry.agent.collectors import Samples
    from telemetry.records import GpuSample, TorchMemorySample


READ_SECONDS: Final = 2.0
"""Readings that come faster are merged."""

_SPANS: Final = (1350.0, 64.0)
"""Maximum seconds between two readings, for the two histories of each figure: they reach back a day and an hour."""

_JUDGE_SECONDS: Final = 5.0

_MAX_MISSED: Final = 3
"""A forecast is withdrawn only after this many judgements without one, because a busy machine changes the pace."""

_USED_MEMORY: Final = "used"
_COPYABLE: Final = "copyable"
_USED_SHARED_MEMORY: Final = "shared_memory_used"
_USED: Final = frozenset({_USED_MEMORY, _USED_SHARED_MEMORY})
"""For these figures peaks count. Each is minus the bytes that are left."""


class MemoryWatch:
    """Keeps the memory histories of one rank, and judges them."""

    def __init__(self) -> None:
        self._histories: tuple[dict[str, ReadingHistory], ...] = tuple({} for _ in _SPANS)
        self._last: MemorySample | None = None
        self._free: dict[str, float] = {}
        self._limit: int | None = None
        self._changed = False
        self._judged_ns = 0
        self._growth: MemoryGrowth | None = None
        self._missed = 0

    def tick(self, samples: Samples, *, workers_end: bool, now: int | None = None) -> None:
        """Take a new reading, if there is one, and judge the histories if they have changed.

        Do not call it before the first step has ended: what a run needs at its start is not growth.

        Args:
            samples: the newest samples.
            workers_end: the workers start anew in each epoch, and the first epoch has not ended.
            now: monotonic nanoseconds.
        """
        if samples.memory is None or samples.memory is self._last:
            return
        self._last = samples.memory
        now = now_ns() if now is None else now
        for name, value in self._values(samples.memory, samples.nvml, samples.torch_memory).items():
            for histories, span in zip(self._histories, _SPANS, strict=True):
                history = histories.get(name)
                if history is None:
                    history = histories[name] = ReadingHistory(READ_SECONDS, span, highest=name in _USED)
                self._changed |= history.add(now / NS, value)
        if self._changed and now - self._judged_ns >= _JUDGE_SECONDS * NS:
            self._changed = False
            self._take(self._judge(workers_end=workers_end), now)

    def view(self, now: int | None = None) -> MemoryGrowth | None:
        """The growth as of now; None before the first judgement."""
        growth = self._growth
        if growth is None or growth.exhausted_in_seconds is None:
            return growth
        passed = ((now_ns() if now is None else now) - self._judged_ns) / NS
        return replace(growth, exhausted_in_seconds=max(0.0, growth.exhausted_in_seconds - passed))

    def line_field(self, now: int | None = None) -> MemoryForecast:
        """The growth for the log; empty if no memory grows for good."""
        growth = self.view(now)
        if growth is None or growth.where_bytes_per_second is None:
            return MemoryForecast()
        return MemoryForecast(
            growth_bytes_per_hour=round(growth.where_bytes_per_second * 3600),
            where=growth.where,
            exhausted_in_seconds=growth.exhausted_in_seconds,
            exhausted=growth.exhausted,
            copied_on_write=growth.copied_on_write,
            advice=memory_advice(growth) or None,
        )

    def _values(
        self, sample: MemorySample, gpu: GpuSample | None, allocator: TorchMemorySample | None
    ) -> dict[str, float]:
        """The measured values, by the name of their history. Notes the bytes that are left, too."""
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
            # Tensors can also use what the allocator holds and does not use.
            others = (gpu.memory_used_bytes or 0) - allocator.reserved_bytes
            free[CUDA] = max(0, (gpu.memory_total_bytes or 0) - max(0, others) - allocator.allocated_bytes)
        self._free = {name: float(value) for name, value in free.items() if value is not None}
        self._limit = sample.memory_limit_bytes
        return {name: float(value) for name, value in values.items() if value is not None}

    def _take(self, growth: MemoryGrowth, now: int) -> None:
        forecast = self._growth is not None and self._growth.exhausted_in_seconds is not None
        self._missed = self._missed + 1 if forecast and growth.exhausted_in_seconds is None else 0
        self._growth = self.view(now) if 0 < self._missed <= _MAX_MISSED else growth
        self._judged_ns = now

    def _judge(self, *, workers_end: bool) -> MemoryGrowth:
        """Judge the longer history, or the shorter one if growth began only lately."""
        found = MemoryGrowth()
        for histories in self._histories:
            kept = {name: history.readings for name, history in histories.items()}
            readings = MemoryReadings(
                used=kept.pop(_USED_MEMORY, ()),
                shared_memory_used=kept.pop(_USED_SHARED_MEMORY, ()),
                workers_shared=kept.pop(_COPYABLE, ()),
                parts=kept,
                free=self._free,
                limit_bytes=self._limit,
                workers_end=workers_end,
            )
            found = memory_outlook(readings)
            if found.where_bytes_per_second is not None:
                break
        return found


def _minus(value: int | None) -> int | None:
    return None if value is None else -value
