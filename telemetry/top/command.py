"""``telemetry top RUN_DIR``: a live view of a run; without a terminal, one frame as text."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from telemetry.top.run_folder import RunFolder
from telemetry.top.text import printed
from telemetry.util.words import complain, show

_DUMB: Final = ("", "dumb", "unknown")
"""Values of TERM for terminals that cannot place text."""

_BEATS_SECONDS: Final = 1.2
"""One frame shows the difference of two heartbeats, which come once a second."""


def top(run_dir: str, *, once: bool) -> int:
    """Show the run in a folder. Returns the exit status: 1 without a folder, a run to show, or Textual."""
    if not Path(run_dir).is_dir():  # a wrong path would be waited for without end
        complain(f"there is no folder {run_dir}; the run makes it at its start")
        return 1
    try:
        if once or not _is_terminal():
            return _print(RunFolder(Path(run_dir)))
        if find_spec("textual") is None:
            complain("top needs textual: pip install 'torch-telemetry[top]'; `telemetry top --once` does without it")
            return 1
        from telemetry.top.app import TopApp

        for name in ("COLUMNS", "LINES"):  # Textual takes them for the terminal's size, and then follows no resize
            os.environ.pop(name, None)
        app = TopApp(Path(run_dir))
        app.run(mouse=False)  # the mouse selects text, as in any other command
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return app.return_code or 0


def _is_terminal() -> bool:
    """Whether the view can be shown: Textual reads the standard input, and writes to the standard error."""
    streams = sys.__stdin__, sys.__stdout__, sys.__stderr__
    capable = os.environ.get("TERM", "") not in _DUMB
    return capable and all(stream is not None and stream.isatty() for stream in streams)


def _print(run: RunFolder) -> int:
    view = run.poll()
    if view.running:
        time.sleep(_BEATS_SECONDS)
        view = run.poll()
    return show(printed(view, time.time())) or (0 if view.rows else 1)
