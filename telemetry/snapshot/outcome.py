"""How a snapshot ended on one rank, and the trace that came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from telemetry.snapshot.plan import Plan


_MOST_PER_SECOND: Final = 1 << 30
"""Bytes of trace that a second of recording makes at most. Operators back to back make about 50 MB on one thread; GPU
kernels back to back, with their launches, about 800 MB."""

_MOST_WITHOUT_EVENTS: Final = 4 << 20
_LEAST_PER_EVENT: Final = 150
_MOST_PER_EVENT: Final = 1536
"""Bytes of an event in the file, without its name: 250 for an operator, 1,100 for a kernel with its launch."""


class Trace:
    """A recording that has ended: saved once, and then let go of.

    Args:
        profiler: holds the events, and can export them.
        seconds: for which it recorded.
        quiet: in which it is saved.
    """

    def __init__(self, profiler: Any, seconds: float, quiet: Callable[[], AbstractContextManager[None]]) -> None:
        self._profiler = profiler
        self._seconds = seconds
        self._quiet = quiet

    def most_bytes(self) -> int:
        """The size it cannot exceed when it is saved, by how long it recorded. Costs nothing."""
        return _MOST_WITHOUT_EVENTS + int(self._seconds * _MOST_PER_SECOND)

    def estimate(self) -> tuple[int, int, float]:
        """The least and the most bytes it has when it is saved, by its events.

        This takes about as long as saving it. The third figure is the seconds for which that held the interpreter.
        """
        start = now_ns()
        events = self._profiler.profiler.kineto_results.events()
        held = (now_ns() - start) / NS
        names = sum(len(event.name()) for event in events)
        least = len(events) * _LEAST_PER_EVENT + names
        return least, _MOST_WITHOUT_EVENTS + len(events) * _MOST_PER_EVENT + 2 * names, held

    def save(self, path: Path) -> float:
        """Write it as a Chrome trace. Returns the seconds for which that held the interpreter."""
        start = now_ns()
        with self._quiet():
            self._profiler.export_chrome_trace(str(path))
        return (now_ns() - start) / NS

    def free(self) -> float:
        """Let go of the memory. Returns the seconds for which that held the interpreter."""
        start = now_ns()
        self._profiler = None
        return (now_ns() - start) / NS


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan ended on the training thread.

    Attributes:
        result: one of `records.SNAPSHOT_RESULTS`.
        why: in words; also where a recording was cut short.
        first_step, last_step: recorded whole; None where nothing was.
        thread: native id of the training thread.
        started_ns, ended_ns: monotonic stamps of the recording.
        pauses: seconds of the training thread, by what it did: ``prepare``, ``start``, ``stop``.
        trace: None unless recorded.
    """

    plan: Plan
    result: str
    why: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    thread: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    pauses: dict[str, float] = field(default_factory=dict)
    trace: Trace | None = None
