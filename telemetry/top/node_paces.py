"""What the nodes of a job report of their ranks in the run folder: phase, line of code, and the state in a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.job.node_report import MAX_BYTES, decoded
from telemetry.util.files import read_small

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.core.hang_records import HangState
    from telemetry.records import RankPace

_READ_SECONDS: Final = 5.0
"""Nodes write as often."""

_ALIVE_SECONDS: Final = 45.0
"""A report that has not changed for this time says nothing about now."""

_MAX_FILES: Final = 4096


class NodePaces:
    """The newest reports.

    Args:
        folder: ``job`` in the run folder; a job on one node has none.
        monotonic: this machine's clock. A report has no time that can be compared with it.
    """

    def __init__(self, folder: Path, monotonic: Callable[[], float]) -> None:
        self._folder = folder
        self._monotonic = monotonic
        self._next = 0.0
        self._sequences: dict[str, tuple[int, float]] = {}  # by file: its sequence, and when that was first seen
        self._paces: dict[int, RankPace] = {}
        self._hang: dict[int, HangState] = {}

    def read(self) -> None:
        """Read the reports, if it is time."""
        now = self._monotonic()
        if now < self._next:
            return
        self._next = now + _READ_SECONDS
        self._paces, self._hang = {}, {}
        try:
            names = sorted(path.name for path in self._folder.iterdir())[:_MAX_FILES]
        except OSError:
            return
        for name in names:
            if not (name.startswith("node-") and name.endswith(".json")):
                continue
            try:
                report = decoded(read_small(self._folder / name, MAX_BYTES))
            except OSError:
                continue
            if report is None:
                continue
            before = self._sequences.get(name)
            if before is None or before[0] != report.sequence:
                before = self._sequences[name] = report.sequence, now
            if now - before[1] <= _ALIVE_SECONDS:
                self._paces |= {pace.rank: pace for pace in report.ranks}
                self._hang |= {state.rank: state for state in report.hang}

    def of(self, rank: int) -> tuple[RankPace | None, HangState | None]:
        """The pace of a rank and, while the job hangs, its state."""
        return self._paces.get(rank), self._hang.get(rank)
