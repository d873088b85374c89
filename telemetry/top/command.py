"""``telemetry top RUN_DIR``: a live view of a run; without a terminal, one frame as text."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from telemetry.top.run_folder import RunFolder
from telemetry.top.text import Frame
from telemetry.util.text import complain, show

_DUMB: Final = ("dumb", "unknown")
"""Values of TERM for terminals that cannot place text and have no colours."""

_PRINTED_ROWS: Final = 64
_BEATS_SECONDS: Final = 1.2
"""One frame shows the difference of two heartbeats, which come once a second."""


def top(run_dir: str, *, once: bool) -> int:
    """Show the run in a folder. Returns the exit status: 1 without anything to show, or without Textual."""
    run = RunFolder(Path(run_dir))
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # None: it is closed
    frame = Frame(encoding, _shows_blocks(encoding), run_dir)
    try:
        if once or not _is_terminal():
            return _print(run, frame)
        if find_spec("textual") is None:
            complain("top needs textual: pip install 'torch-telemetry[top]'; `telemetry top --once` does without it")
            return 1
        from telemetry.top.app import Reader, SnapshotRequest, TopApp

        app = TopApp(Reader(run, f"Reading {run_dir}"), frame, SnapshotRequest(Path(run_dir)))
        for name in ("COLUMNS", "LINES"):  # Textual takes them for the terminal's size, and then follows no resize
            os.environ.pop(name, None)
        app.run(mouse=False)  # the mouse selects text, as in any other command
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return app.return_code or 0


def _is_terminal() -> bool:
    """Whether the view can be shown: Textual reads the standard input, and writes to the standard error."""
    streams = sys.__stdin__, sys.__stdout__, sys.__stderr__
    capable = os.environ.get("TERM", "") not in {"", *_DUMB}
    return capable and all(stream is not None and stream.isatty() for stream in streams)


def _shows_blocks(encoding: str) -> bool:
    """Whether bars can be made of blocks, which differ by their colours."""
    colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") not in _DUMB
    if not colours or sys.stdout is None or not sys.stdout.isatty():
        return False
    try:
        "\u2592\u2588\u259a".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def _print(run: RunFolder, frame: Frame) -> int:
    view = run.poll()
    if view.running:
        time.sleep(_BEATS_SECONDS)
        view = run.poll()
    width = min(max(80, shutil.get_terminal_size((100, 24)).columns), 200)
    text = frame.printed(view, width=width, now=time.time(), rows=_PRINTED_ROWS)
    return show(text) or (0 if view.rows else 1)
