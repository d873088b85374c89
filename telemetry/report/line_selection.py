"""Which lines of a log are read: of those that come with every window, some are skipped unparsed.

A week of 64 ranks is 8 GB of logs. Parsing one line takes 10 us, reading and skipping it 0.5 us.
"""

from __future__ import annotations

from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from telemetry.report.log_lines import parsed
from telemetry.util.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from telemetry.report.lines_by_process import LinesOfFile
    from telemetry.report.process_log import ProcessLog

_BEFORE_EVENT: Final = b'Z","event":"'
_WHOLE: Final = b"}\n"
_EVENT_AT: Final = 44
_KIND_END: Final = _EVENT_AT + 4
"""Where the name of the event begins in a line that the agent has written: it is behind the time."""

WINDOW: Final = b"wind"
_SAMPLES: Final = frozenset({b'gpu"', b"host", b"work"})
_FREQUENT: Final = _SAMPLES | {WINDOW}
"""The first four bytes of the names of the events that come with every window."""

WINDOW_SECONDS: Final = 300.0
"""Time between two windows that are read if nobody else needs them. Between them a process is taken to go on evenly."""

_MAX_SKIPPED: Final = 1 << 30
_MAX_HEAD_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 1 << 24
_BUFFER_BYTES: Final = 1 << 17
"""With 8 KiB, a line that is skipped took half as long again: 0.97 us and not 0.61."""


class LineSelection:
    """Decides which lines of one file are parsed. All are, but for those of the frequent events.

    Of these, the first of each event is parsed, and then one in about ``spacing`` seconds.

    Args:
        spacing: returns the seconds between two lines of an event that are parsed, by the first four bytes of its name.
        windows: whether windows may be skipped. Their sums are needed unless a later line of the process has them.

    Attributes:
        frequent: the first four bytes of the names of the events whose lines may be skipped.
        left: how many of the next lines of an event to skip, by these four bytes.
        skipped_windows: whether a window was skipped. ``newest_skipped``: the newest window, if it was; else empty.
    """

    __slots__ = ("_newest", "_spacing", "frequent", "left", "newest_skipped", "skipped_windows")

    def __init__(self, spacing: Callable[[bytes], float], *, windows: bool) -> None:
        self._spacing = spacing
        self.frequent = _FREQUENT if windows else _SAMPLES
        self.left: dict[bytes, int] = {}
        self._newest: dict[bytes, tuple[float, int]] = {}
        self.skipped_windows = False
        self.newest_skipped = b""

    def note_parsed(self, raw: bytes, kind: bytes) -> None:
        """A line of a frequent event is parsed: decide how many after it are skipped.

        Args:
            raw: the line.
            kind: the first four bytes of the event's name.
        """
        if raw[_EVENT_AT - 12 : _EVENT_AT] == _BEFORE_EVENT:  # else the agent has not written it
            self.left[kind] = self._next(kind, raw)
            if kind == WINDOW:
                self.newest_skipped = b""

    def keep_windows(self) -> None:
        """From now on, no window is skipped."""
        self.frequent = _SAMPLES
        self.left.pop(WINDOW, None)

    def _next(self, kind: bytes, raw: bytes) -> int:
        """How many lines of an event to skip after this one, from the time since the last one."""
        spacing = self._spacing(kind)
        if spacing == float("inf"):
            return _MAX_SKIPPED
        try:
            time = datetime.fromisoformat(raw[9:32].decode()).replace(tzinfo=timezone.utc).timestamp()
        except ValueError:
            return 0
        before, skipped = self._newest.get(kind, (time, 0))
        each = (time - before) / (skipped + 1)
        left = min(max(0, int(spacing / each) - 1), _MAX_SKIPPED) if each > 0 else 0
        self._newest[kind] = time, left
        return left


class LineObserver(Protocol):
    """Sees the lines while they are read, so that nobody has to read the logs a second time."""

    def begin(self, ranks: int) -> None:
        """Called before the first line, with the number of ranks that have a log. If called again, all begins anew."""

    def spacing_seconds(self) -> float:
        """Time between two windows, or two samples, that it needs to see."""

    def take(self, line: dict[str, Any], log: ProcessLog) -> None:
        """A checked line of a process, which `load` has taken in already."""

    def part(self, ranks: int) -> Self:
        """An observer of some logs, for another process.

        It is pickled twice: before its first line, and after its last.

        Args:
            ranks: how many of the ranks these logs are of.
        """

    def add(self, part: Self) -> None:
        """Take all that a part has seen. It is not used any more after that."""


def read_log(
    file: LinesOfFile,
    paths: Sequence[Path],
    observer: LineObserver | None,
    run: str = "",
    *,
    all_windows: bool = False,
) -> None:
    """Read one log.

    Args:
        file: takes all lines.
        paths: its file and those that were rotated away from it, the oldest first.
        observer: is shown the lines of one run.
        run: the name of that run.
        all_windows: whether every window is read. Otherwise some are skipped if a later line has their sums.
    """
    spacing = _for_sums_alone if observer is None else partial(_for_observer, observer)
    skipped = False
    for path, later in zip(paths, [*paths[1:], None], strict=True):
        selection = LineSelection(spacing, windows=not all_windows and _has_sums_of(later, path))
        for line, wrong in _selected_lines(path, selection):
            before = file.newest
            file.add(line, wrong)
            if line is None:
                continue
            if file.newest is not before and before is not file.unused:
                selection.keep_windows()  # of several processes in one file
            if skipped and line.get("event") == "run_start":
                file.newest.take_sums(line)
                skipped = False
            if observer is not None and file.newest.run == run:
                observer.take(line, file.newest)
        skipped = selection.skipped_windows


def _for_sums_alone(kind: bytes) -> float:
    return WINDOW_SECONDS if kind == WINDOW else float("inf")


def _for_observer(observer: LineObserver, _kind: bytes) -> float:
    return observer.spacing_seconds()


def _selected_lines(path: Path, selection: LineSelection) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """The lines of a file that are not skipped, each as `parsed` returns it; a torn one if it cannot be read."""
    try:
        file = open_regular(path, buffer_bytes=_BUFFER_BYTES)
        if file is None:
            return
        left = selection.left
        with file:
            for raw in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
                kind = raw[_EVENT_AT:_KIND_END]
                # Here and not in a method: a week of 64 ranks has millions of lines. A torn line is counted.
                if left.get(kind) and raw.endswith(_WHOLE) and raw[_EVENT_AT - 12 : _EVENT_AT] == _BEFORE_EVENT:
                    left[kind] -= 1
                    if kind == WINDOW:
                        selection.skipped_windows, selection.newest_skipped = True, raw
                    continue
                if len(raw) == _MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    yield None, 0  # damaged, as a sparse file is; the rest counts as one torn line
                    return
                if kind in selection.frequent:
                    selection.note_parsed(raw, kind)
                found = parsed(raw)
                if found is not None:
                    yield found
        newest = parsed(selection.newest_skipped) if selection.newest_skipped else None
        if newest is not None:  # the next file may have no window yet, and its head no totals
            yield newest
    except OSError:
        yield None, 0  # rotated away or unreadable; the other files still count


def _has_sums_of(later: Path | None, path: Path) -> bool:
    """Whether the head of a later file has the sums of the windows of a file: it is of the same process."""
    if later is None:
        return False
    life, head = head_of(path).get("life"), head_of(later)
    return life is not None and head.get("life") == life and {"step_sketch", "data_wait_sketch"} <= head.keys()


def head_of(path: Path) -> dict[str, Any]:
    """The first line of a file, checked, if it is a ``run_start``; else an empty object."""
    try:
        file = open_regular(path)
        if file is None:
            return {}
        with file:
            found = parsed(file.readline(_MAX_HEAD_BYTES))
    except OSError:
        return {}
    head = (found and found[0]) or {}
    return head if head.get("event") == "run_start" else {}
