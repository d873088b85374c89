"""How a snapshot ended on one rank, and the trace that came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from telemetry.clock import NS, now_ns

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.snapshot.plan import Plan


class Trace:
    """A recording that has ended: saved once, and then let go of.

    Args:
        profiler: holds the events, and can export them.
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    def save(self, path: Path) -> float:
        """Write it as a Chrome trace. Returns the seconds for which that held the interpreter."""
        start = now_ns()
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
