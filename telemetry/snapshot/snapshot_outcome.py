"""How a snapshot ended on one rank, and the trace that was recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.clock import NS, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from telemetry.snapshot.protocol import Plan


_MAX_PER_SECOND: Final = 1 << 30
"""The most bytes of trace per second of recording. Measured: operators back to back on one thread make about 50 MB, GPU
kernels back to back with their launches about 800 MB."""

_MAX_WITHOUT_EVENTS: Final = 4 << 20
_MIN_PER_EVENT: Final = 150
_MAX_PER_EVENT: Final = 1536
"""Bytes of an event in the file without its name. Measured: 250 for an operator, 1,100 for a kernel with its launch."""

_MAX_OF_SHAPES: Final = 2560
"""More bytes of an event with the shapes of its inputs. Measured: 150 on average, 500 for an operator with many
arguments. torch leaves out lists of more than 30 tensors."""


class RecordedTrace:
    """A recording that has ended. It is saved at most once, and then freed.

    Args:
        profiler: a ``_KinetoProfile`` that has stopped; it holds the events.
        seconds: how long it recorded.
        quiet: the context in which it is saved, so that Kineto writes nothing to stderr.
        shapes: whether it has the shapes of inputs.
    """

    def __init__(
        self, profiler: Any, seconds: float, quiet: Callable[[], AbstractContextManager[None]], *, shapes: bool = False
    ) -> None:
        self._max_per_event = _MAX_PER_EVENT + (_MAX_OF_SHAPES if shapes else 0)
        self._profiler = profiler
        self._seconds = seconds
        self._quiet = quiet

    def max_bytes(self) -> int:
        """The most bytes that the saved file can have, by how long the recording took. Costs nothing."""
        return _MAX_WITHOUT_EVENTS + int(self._seconds * _MAX_PER_SECOND)

    def estimate(self) -> tuple[int, int, float]:
        """Count the events, which takes about as long as saving them.

        Returns:
            The least and the most bytes that the saved file can have, and for how many seconds this held the GIL.
        """
        start = now_ns()
        events = self._profiler.profiler.kineto_results.events()
        held = (now_ns() - start) / NS
        names = sum(len(event.name()) for event in events)
        least = len(events) * _MIN_PER_EVENT  # Kineto leaves out a name with characters that it cannot write
        return least, _MAX_WITHOUT_EVENTS + len(events) * self._max_per_event + 2 * names, held

    def save(self, path: Path) -> float:
        """Write it as a Chrome trace. Returns for how many seconds this held the GIL."""
        start = now_ns()
        with self._quiet():
            self._profiler.export_chrome_trace(str(path))
        return (now_ns() - start) / NS

    def free(self) -> float:
        """Free the memory of the events. Returns for how many seconds this held the GIL."""
        start = now_ns()
        self._profiler = None
        return (now_ns() - start) / NS


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """How a plan ended on the training thread.

    Attributes:
        result: one of `SNAPSHOT_RESULTS`.
        why: the reason in words, if there is no recording or it was cut short.
        first_step, last_step: the steps that were recorded in full; None without a recording.
        thread: native id of the training thread.
        started_ns, ended_ns: when the recording started and ended, monotonic.
        pauses: seconds that the training thread spent on ``prepare``, ``start`` and ``stop``.
        trace: the recording; None without one.
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
    trace: RecordedTrace | None = None
