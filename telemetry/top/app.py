"""The live view in a terminal: a Textual app that shows the lines of a `Frame`. Only this file uses Textual."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.binding import Binding
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from telemetry.top.text import HELP, LIST, RANK
from telemetry.top.view import SORTS, Choice, waiting
from telemetry.util.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.events import Key

    from telemetry.top.run_folder import RunFolder
    from telemetry.top.text import Frame, Styled
    from telemetry.top.view import JobView

_LOOK_SECONDS: Final = 0.1
"""Time between two looks for a newer view. The app reacts to a key at once."""

_IDLE_FACTOR: Final = 5.0
"""After each poll the reader rests for so many times its duration: it takes at most a sixth of a core."""

_GRACE_SECONDS: Final = 10.0
_GRACE_FACTOR: Final = 2.0
"""A view is overdue so long after its poll began, in seconds or in durations of the last poll."""

_HANG_UP_SECONDS: Final = 3.0
"""Textual waits for ever for a terminal that takes no output. After a hang-up the process ends after this time."""

_MAX_SAID: Final = 4096
_MAX_FIND: Final = 40


class Reader(threading.Thread):
    """Reads the run on a thread of its own, so that keys stay quick while a file system is slow.

    Args:
        run: the run folder, which only this thread uses.
        begin: text before the first view.

    Attributes:
        closed: set it to end the thread. Do not wait for it: a dead file system may hold it.
    """

    def __init__(self, run: RunFolder, begin: str) -> None:
        super().__init__(name="telemetry-top", daemon=True)
        self._run = run
        self.view = waiting(begin, time.time())
        self.closed = threading.Event()

    def run(self) -> None:
        """Poll until the view is closed."""
        pause, known = 1.0, self.view
        while not self.closed.is_set():
            began, note = time.monotonic(), ""
            try:
                known = self._run.poll()
                pause = self._run.pause_seconds
            except Exception as error:
                # A log can hold anything. The view goes on, and shows the error.
                note = one_line(f"cannot be read: {type(error).__name__}: {error}")
            took = time.monotonic() - began
            rest = max(pause, _IDLE_FACTOR * took)
            overdue = time.time() + rest + max(_GRACE_SECONDS, _GRACE_FACTOR * took)
            self.view = replace(known, notes=(note, *known.notes) if note else known.notes, overdue=overdue)
            self.closed.wait(rest)


class SnapshotRequest:
    """Requests snapshots by running ``telemetry snapshot``, one at a time. The last line of its output is shown.

    Args:
        run_dir: the run folder.

    Attributes:
        said: newest line of the command that was not shown yet; empty without one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._child: subprocess.Popen[str] | None = None
        self.said = ""

    def begin(self, rank: str) -> str:
        """Request a snapshot of a rank, or of ``all``. Returns a message for the person."""
        if self._child is not None and self._child.poll() is None:
            return "another snapshot is being taken"
        command = [sys.executable, "-m", "telemetry", "snapshot", str(self._run_dir), "--rank", rank]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,  # a Ctrl-C here is not for it
            )  # fmt: skip
        except OSError as error:
            return f"a snapshot cannot be requested: {error}"
        threading.Thread(target=self._listen, args=(self._child,), name="telemetry-top-snapshot", daemon=True).start()
        return f"snapshot of {'all ranks' if rank == 'all' else f'rank {rank}'} requested; waiting for an answer"

    def close(self) -> None:
        """Withdraw a request that no rank has answered yet, as Ctrl-C does."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def _listen(self, child: subprocess.Popen[str]) -> None:
        with child:
            while child.stdout is not None and (line := child.stdout.readline(_MAX_SAID)):
                text = one_line(line.strip()).replace(f"{self._run_dir}/", "").removeprefix("telemetry: ")
                if text:
                    self.said = f"snapshot: {text}"


class StyledLines(Widget):
    """Lines of styled text. Only lines that changed are drawn again."""

    _lines: Sequence[Styled] = ()

    def show(self, lines: Sequence[Styled]) -> None:
        """Show these lines in place of the current ones."""
        before, self._lines = self._lines, lines
        changed = [place for place, line in enumerate(lines) if place >= len(before) or before[place] != line]
        if changed:
            self.refresh(*(Region(0, place, self.size.width, 1) for place in changed))

    def render_line(self, y: int) -> Strip:
        """One line for Textual."""
        line = self._lines[y] if y < len(self._lines) else ()
        return Strip([Segment(text, Style.parse(style)) for text, style in line]).adjust_cell_length(self.size.width)


class TopApp(App[None]):
    """The screen: a frame, and below it one line: the keys, a question, a message, or the text to find.

    It starts and ends the reader.
    """

    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    #frame { height: 1fr; }
    #foot { height: 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("ctrl+c", f"leave({128 + signal.SIGINT})", priority=True),
        Binding("ctrl+backslash", f"leave({128 + signal.SIGQUIT})", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
        Binding("q", "close_page('quit')"),
        Binding("escape", "close_page('all')"),
        Binding("left,backspace", "close_page"),
        Binding("enter,right", "open"),
        Binding("h,question_mark", "help"),
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("home,g", "move(-1000000000)"),
        Binding("end,G", "last"),
        Binding("s", "sort(1)"),
        Binding("S", "sort(-1)"),
        Binding("f", "trouble"),
        Binding("t", "bars"),
        Binding("slash", "find"),
        Binding("n", "snapshot"),
    ]

    def __init__(self, reader: Reader, frame: Frame, snapshots: SnapshotRequest) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours
        self._reader, self._frame, self._snapshots = reader, frame, snapshots
        self._choice = Choice()
        self._page = LIST
        self._scrolled = 0
        self._message = ""
        self._asked = self._typing = False
        self._drawn: tuple[JobView, int] | None = None

    # -- the life of the screen ----------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        # Kept: while the screen ends, a query finds none, but the timer may still draw.
        self._body, self._line = StyledLines(id="frame"), StyledLines(id="foot")
        yield self._body
        yield self._line

    def on_load(self) -> None:
        """Handle signals in the loop, so that the terminal is restored. This runs before Textual changes it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self.action_leave, 128 + number)

    def on_mount(self) -> None:
        """Start the reader and the timer that looks for newer views."""
        self._reader.start()
        self.set_interval(_LOOK_SECONDS, self._look)
        # After Ctrl-Z and fg the terminal is empty, but Textual does not draw it again.
        self.app_resume_signal.subscribe(self, lambda _: self.query(StyledLines).refresh())
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def on_unmount(self) -> None:
        """End the reader and the snapshot requests."""
        self._reader.closed.set()
        self._snapshots.close()

    def _look(self) -> None:
        if self._snapshots.said:
            self._message, self._snapshots.said = self._snapshots.said, ""
            self.draw()
        elif self._drawn != (self._reader.view, int(time.time())):
            self.draw()  # something is new, or a second has passed

    def draw(self) -> None:
        """Show the newest view."""
        now, view = time.time(), self._reader.view
        self._drawn = view, int(now)
        width, height = self._body.size
        lines = self._frame.page(self._page, view, self._choice, self._scrolled, width=width, height=height, now=now)
        self._body.show(lines)
        self._line.show([self._foot(width)])

    def _foot(self, width: int) -> Styled:
        if self._asked and self._choice.selected is not None:
            ask = f"Request a snapshot? y: of rank {self._choice.selected[0]}   a: of all ranks   any other key: no"
            return self._frame.note(ask, width)
        if self._typing:
            return self._frame.note(f"find: {self._choice.text}_   enter: done   esc: all", width)
        return self._frame.note(self._message, width) if self._message else self._frame.foot(self._choice, width)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """Handle keys before the bindings: any key answers a question, and what can be typed goes into a text."""
        message, self._message = self._message, ""
        if self._asked:
            event.prevent_default()
            self._asked = False
            rank = {"y": str((self._choice.selected or (0,))[0]), "a": "all"}.get(event.key)
            if rank is None:
                self._message = "no snapshot was requested"
            else:
                self._message = self._snapshots.begin(rank)
            self.draw()
        elif self._typing:
            event.prevent_default()
            text = self._choice.text
            self._typing = event.key not in {"enter", "escape"}
            if event.key == "escape":
                self._choice.text = ""
            elif event.key == "backspace":
                self._choice.text = text[:-1]
            elif event.is_printable and event.character is not None:
                self._choice.text = (text + event.character)[:_MAX_FIND]
            self._to_first_row()
        elif message:
            self.draw()

    def action_leave(self, code: int = 0) -> None:
        """End with an exit status; if called again, the first status counts."""
        if self.return_code is not None:
            return
        if code == 128 + signal.SIGHUP:
            end = threading.Timer(_HANG_UP_SECONDS, os._exit, (code,))
            end.daemon = True
            end.start()
        self.exit(return_code=code)

    def action_close_page(self, otherwise: str = "") -> None:
        """Go back to the list. From the list, end (``quit``), or show all ranks (``all``)."""
        if self._page != LIST:
            self._page = LIST
        elif otherwise == "quit":
            self.exit()
        elif otherwise == "all":
            self._choice.trouble_only, self._choice.text, self._choice.selected = False, "", None
        self.draw()

    def action_open(self) -> None:
        """Open the rank under the cursor, or go back."""
        rows = self._choice.rows(self._reader.view)
        if self._page == LIST and rows:
            self._page, self._scrolled = RANK, 0
            self._choice.selected = rows[self._choice.cursor(rows)].key
        else:
            self._page = LIST
        self.draw()

    def action_help(self) -> None:
        """Show the help, or go back."""
        self._page = HELP if self._page == LIST else LIST
        self.draw()

    def action_move(self, steps: int) -> None:
        """Move the cursor, or scroll an opened rank."""
        rows = self._choice.rows(self._reader.view)
        if self._page == RANK:
            self._scrolled = max(0, self._scrolled + steps)
        elif self._page == LIST and rows:
            place = min(max(0, self._choice.cursor(rows) + steps), len(rows) - 1)
            self._choice.selected = rows[place].key if place else None
        self.draw()

    def action_last(self) -> None:
        """Move the cursor to the last row."""
        if self._page == LIST:
            self.action_move(len(self._reader.view.rows))

    def action_page(self, pages: int) -> None:
        """Move the cursor by about a screen."""
        self.action_move(pages * max(1, self.size.height - 10))

    def action_sort(self, steps: int) -> None:
        """Choose the next or the previous order."""
        names = list(SORTS)
        self._choice.sort = names[(names.index(self._choice.sort) + steps) % len(names)]
        self._to_first_row()

    def action_trouble(self) -> None:
        """Switch between ranks in trouble and all ranks."""
        self._choice.trouble_only = not self._choice.trouble_only
        self._to_first_row()

    def action_bars(self) -> None:
        """Switch the bars between the whole run and the last minute."""
        self._choice.whole_run = not self._choice.whole_run
        self.draw()

    def action_find(self) -> None:
        """Ask for a text to find ranks by."""
        self._typing = True
        self._to_first_row()

    def _to_first_row(self) -> None:
        self._page, self._choice.selected = LIST, None
        self.draw()

    def action_snapshot(self) -> None:
        """Ask whether to request a snapshot."""
        rows = self._choice.rows(self._reader.view)
        if not rows:
            self._message = "there is no rank to take a snapshot of"
        else:
            # The question stays about this rank, even if the order changes before the answer.
            self._asked, self._choice.selected = True, rows[self._choice.cursor(rows)].key
        self.draw()
