"""Judges the time between two loops: after an epoch's last batch, and before the first batch of the next one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.hot_lines import line_shares, whole_line
from telemetry.model.records import OTHER, STARTUP, Advice
from telemetry.util.profiles import STEP
from telemetry.util.words import duration, rounded_percent

if TYPE_CHECKING:
    from telemetry.model.totals import Totals
    from telemetry.util.profiles import StackProfile

_MIN_SHARE: Final = 0.1
"""Minimum share of the run that is worth a person's time."""

_MIN_SAMPLES: Final = 20
_MIN_GAPS: Final = 3

_MIN_GROWING: Final = 6
_MUCH_LONGER: Final = 1.5
"""The gaps grow if so many times as long in the last third of the run's epochs as in the first, of so many at least."""

_MAX_MARKS: Final = 96

_MODEL: Final = "torch.nn.modules."
_MODEL_SHARE: Final = 0.2
"""If a model runs for so much of the time, it is an evaluation, or collects data: a part of the training."""


class _Mark(NamedTuple):
    """The seconds between loops, and of the run without its startup, when so many epochs had ended."""

    gaps: int
    seconds: float
    run_seconds: float


class LoopGaps:
    """How long the gaps between loops have been over the run. Its memory is bounded."""

    def __init__(self) -> None:
        self._marks = [_Mark(0, 0.0, 0.0)]
        self._apart = 1  # so many epochs are from one mark to the next

    def add(self, totals: Totals) -> None:
        """Add the totals of a tick."""
        gaps, ledger = totals.epochs.boundaries, totals.ledger_seconds
        if gaps <= self._marks[-1].gaps:
            return
        if len(self._marks) > 1 and self._marks[-1].gaps - self._marks[-2].gaps < self._apart:
            del self._marks[-1]
        self._marks.append(_Mark(gaps, ledger.get(OTHER, 0.0), sum(ledger.values()) - ledger.get(STARTUP, 0.0)))
        if len(self._marks) > _MAX_MARKS:
            del self._marks[1:-1:2]
            self._apart *= 2

    @property
    def matter(self) -> bool:
        """Whether they take a share of the run that is worth a look."""
        gaps, seconds, run = self._marks[-1]
        return gaps >= _MIN_GAPS and seconds >= _MIN_SHARE * run

    @property
    def _growth(self) -> tuple[float, float] | None:
        """Seconds of a gap in the first and in the last third, if they become longer and longer; else None."""
        gaps = self._marks[-1].gaps
        if gaps < _MIN_GROWING:
            return None
        at = [min(self._marks, key=lambda mark: abs(mark.gaps - gaps * third / 3)) for third in range(4)]
        first, middle, last = ((b.seconds - a.seconds) / max(1, b.gaps - a.gaps) for a, b in pairwise(at))
        return (first, last) if first < middle < last and last >= _MUCH_LONGER * first else None

    def finding(self, profile: StackProfile | None) -> Finding | None:
        """What takes the time between loops, if that is worth a change. ``profile``: its samples."""
        if profile is None or not self.matter:
            return None
        gaps, seconds, run = self._marks[-1]
        share = seconds / run
        lines = line_shares(profile, STEP, least=_MIN_SAMPLES)
        modelled = sum(
            time.wall_ns for stack, time in profile.times.items() if any(s.module.startswith(_MODEL) for s in stack)
        )
        if not lines or modelled >= _MODEL_SHARE * profile.wall_ns:
            return None
        worst, growth = whole_line(lines), self._growth
        same = [line for line in lines if (line.file, line.function) == (worst.file, worst.function)]
        part = min(1.0, sum(line.share for line in same))
        where = f"{worst.function} at {worst.place}"
        text = f"{rounded_percent(share)} of the run is between the epochs, {rounded_percent(part)} of it in {where}"
        action = f"make {where} cheaper, do it after several epochs, or on another thread while the training goes on"
        if growth is not None:
            text += f", and it grows: {duration(growth[0])} for each epoch at first, {duration(growth[1])} now"
            action = (
                f"let {where} do only what is new: append to a file instead of writing all of it again, and keep sums "
                "instead of going through all that came before"
            )
        if worst.habit is not None:
            action = f"{worst.named}: {worst.habit.do}"
        gain, low = round(1 / (1 - share), 2), round(1 / (1 - share * part), 2)
        because = f"it takes {duration(seconds / gaps)} for each of {gaps} epochs"
        return Finding(
            kind="between_loops",
            share_ratio=round(share, 4),
            text=text,
            lines=tuple(line.told() for line in lines),
            advice=(Advice(action, None, None, gain, because, low if low < gain else None),),
        )
