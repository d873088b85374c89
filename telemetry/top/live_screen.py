"""The loop: reads keys, and shows ten frames a second."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from telemetry.top.screen import Frame
from telemetry.top.screen_state import ScreenState, press, shown_rows
from telemetry.top.terminal_mode import HangUpError, TerminalMode

if TYPE_CHECKING:
    from telemetry.top.painter import Painter
    from telemetry.top.poller import ViewPoller
    from telemetry.top.snapshot_request import SnapshotRequest

FRAME_SECONDS: Final = 0.1

NO_FOLDER: Final = "a snapshot is requested through the run folder: telemetry snapshot RUN_DIR"


def show_live(make_painter: type[Painter], poller: ViewPoller, source: str, snapshots: SnapshotRequest | None) -> None:
    """Show the run until the person quits or the terminal is gone.

    Args:
        make_painter: `Painter`.
        poller: has the newest view.
        source: the run folder or the endpoints, as a person gave them.
        snapshots: None where no snapshot can be requested.
    """
    encoding = sys.stdout.encoding or "ascii"
    try:
        with TerminalMode(encoding) as terminal:
            painter = make_painter(sys.stdout, terminal.write)
            _loop(painter, terminal, poller, Frame(painter.charset(), source), snapshots)
    except HangUpError:
        pass
    finally:
        if snapshots is not None:
            snapshots.close()


def _loop(
    painter: Painter,
    terminal: TerminalMode,
    poller: ViewPoller,
    frame: Frame,
    snapshots: SnapshotRequest | None,
) -> None:
    state = ScreenState()
    while True:
        if terminal.suspended:
            terminal.suspend()
            painter.forget()
        began = time.monotonic()
        width, height = size = terminal.size()
        view = poller.view()
        news = "" if snapshots is None else snapshots.news()
        if news:
            state = replace(state, message=news)
        painter.paint(frame.lines(view, state, width=width, height=height, now=time.time()), size)
        for key in terminal.wait_for_keys(max(0.0, began + FRAME_SECONDS - time.monotonic())):
            pressed = press(
                state,
                key,
                shown_rows(state, view.rows),
                page_rows=frame.list_rows(height),
                no_snapshot=NO_FOLDER if snapshots is None else "",
            )
            state = pressed.state
            if pressed.quit:
                return
            if pressed.snapshot is not None and snapshots is not None:
                state = replace(state, message=snapshots.begin(pressed.snapshot))
