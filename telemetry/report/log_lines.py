"""The lines of a log file, parsed and checked. Of the lines that come with every window, some may be skipped unparsed.

A week of 64 ranks is 8 GB of logs. Parsing one line takes 10 us, skipping it 0.5 us.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import orjson

from telemetry.core.filesystem import open_regular
from telemetry.report.log_schema import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_BEFORE_EVENT: Final = b'Z","event":"'
_WHOLE: Final = b"}\n"
_EVENT_AT: Final = 44
_KIND_END: Final = _EVENT_AT + 4
"""Where the name of the event begins in a line that the agent has written: it is behind the time."""

WINDOW: Final = b"wind"
_SAMPLES: Final = frozenset({b'gpu"', b"host", b"work"})
_FREQUENT: Final = _SAMPLES | {WINDOW}
"""The first four bytes of the names of the events that come with every window."""

_MOST_SKIPPED: Final = 1 << 30
_BUFFER_BYTES: Final = 1 << 18
_MAX_HEAD_BYTES: Final = 1 << 20


class LineSelection:
    """Decides which lines of one file are parsed. All are, but for those of the frequent events.

    Of these, the first of each event is parsed, and then one in about ``spacing`` seconds.

    Args:
        spacing: returns the seconds between two lines of an event that are parsed.
        windows: whether windows may be skipped. Their sums are needed unless a later line of the process has them.

    Attributes:
        frequent: the first four bytes of the names of the events whose lines may be skipped.
        skipped_windows: whether a window was skipped.
    """

    __slots__ = ("_left", "_newest", "_spacing", "frequent", "skipped_windows")

    def __init__(self, spacing: Callable[[], float], *, windows: bool) -> None:
        self._spacing = spacing
        self.frequent = _FREQUENT if windows else _SAMPLES
        self._left: dict[bytes, int] = {}
        self._newest: dict[bytes, tuple[float, int]] = {}
        self.skipped_windows = False

    def skips(self, raw: bytes, kind: bytes) -> bool:
        """Whether a line of a frequent event is to be skipped.

        Args:
            raw: the line.
            kind: the first four bytes of the event's name.
        """
        if raw[_EVENT_AT - 12 : _EVENT_AT] != _BEFORE_EVENT:
            return False  # not written by the agent
        left = self._left.get(kind, 0)
        if left and raw.endswith(_WHOLE):  # a torn line is counted, so it is not skipped
            self._left[kind] = left - 1
            if kind == WINDOW:
                self.skipped_windows = True
            return True
        self._left[kind] = self._next(kind, raw)
        return False

    def keep_windows(self) -> None:
        """From now on, no window is skipped."""
        self.frequent = _SAMPLES

    def _next(self, kind: bytes, raw: bytes) -> int:
        """How many lines of an event to skip after this one, from the time since the last one."""
        spacing = self._spacing()
        if spacing == float("inf"):
            return _MOST_SKIPPED
        try:
            time = datetime.fromisoformat(raw[9:32].decode()).replace(tzinfo=timezone.utc).timestamp()
        except ValueError:
            return 0
        before, skipped = self._newest.get(kind, (time, 0))
        each = (time - before) / (skipped + 1)
        left = min(max(0, int(spacing / each) - 1), _MOST_SKIPPED) if each > 0 else 0
        self._newest[kind] = time, left
        return left


def parsed_lines(path: Path, selection: LineSelection) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """The lines of a file, None for a line that cannot be read; and how many fields of each were left out as wrong."""
    try:
        file = open_regular(path)
        if file is None:
            return
        skips = selection.skips
        with file:
            for raw in file:
                kind = raw[_EVENT_AT:_KIND_END]
                if kind in selection.frequent and skips(raw, kind):
                    continue
                try:
                    line = orjson.loads(raw)
                except ValueError:
                    if raw.strip():
                        yield None, 0
                    continue
                if isinstance(line, dict):
                    sound, wrong = checked(line)
                    yield sound, len(wrong)
    except OSError:
        yield None, 0  # rotated away or unreadable; the other files still count


def unchecked_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a small file; none if it cannot be read."""
    try:
        file = open_regular(path)
        if file is None:
            return []
        with file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for raw in lines:
        try:
            line = orjson.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def head_of(path: Path) -> dict[str, Any]:
    """The first line of a file, checked, if it is a ``run_start``; else an empty object."""
    try:
        file = open_regular(path)
        if file is None:
            return {}
        with file:
            line = orjson.loads(file.readline(_MAX_HEAD_BYTES))
    except (OSError, ValueError):
        return {}
    sound = checked(line)[0] if isinstance(line, dict) else {}
    return sound if sound.get("event") == "run_start" else {}
