"""The live view in a terminal. Only this file uses Textual."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, HelpPanel, Input, Static

from telemetry.diagnosis.verdict import BAD, GOOD
from telemetry.top.run_folder import RunFolder
from telemetry.top.text import BARS, SORTS, WORST, chosen, columns, figures, newest_stall, rank_lines, seen
from telemetry.top.view import JobView, State
from telemetry.util.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console, ConsoleOptions
    from textual.app import ComposeResult

    from telemetry.top.text import Column
    from telemetry.top.view import RankRow

_IDLE_FACTOR: Final = 50.0
_MAX_REST_SECONDS: Final = 10.0
"""After each look at the run, its thread rests for so many times its duration, but at most so long."""

_TOLD_SECONDS: Final = 30.0
"""How long it shows what a snapshot has told."""

_GOOD_STYLE: Final = "green"
_BAD_STYLE: Final = "bold red"
_WARN_STYLE: Final = "yellow"
_STATE_STYLES: Final = (
    dict.fromkeys((State.GONE, State.FAILED, State.STUCK), _BAD_STYLE)
    | dict.fromkeys((State.SILENT, State.STALLED, State.STARVED), _WARN_STYLE)
    | dict.fromkeys((State.WAITING, State.STARTING), "dim")
    | dict.fromkeys((State.OK, State.FINISHED), _GOOD_STYLE)
)

_BLOCKS: Final = {look.letter: (look.block, look.style) for look in BARS.values()}

_HELP: Final = """\
**state**, worst first: gone, failed, stuck, silent, the cause of a stall, waits for data, waits for another rank, no
step yet, ok, finished.

**now**: the category of the ledger that the rank is in.

**step/s**: steps per second over the last minute.

**wait**: exposed wait, as a share of the training loop of the last minute; `-` where it was not measured.

**gpu**, **mem**: share of time in which the GPU ran something; its memory in use. **rss**: memory of the process.
"""


def _lines(texts: Iterable[str], style: str = "", first: str = "") -> Text:
    """Lines without control characters, and not taken for markup; the first one in a style of its own."""
    lines = [*map(one_line, texts)]
    return Text("\n").join(Text(line, style=style if at else first or style) for at, line in enumerate(lines))


class Lines(Widget):
    """Some lines of text."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._text = Text()

    def show(self, text: Text) -> None:
        """Show a text. The whole screen is laid out and drawn anew only if its length has changed."""
        if text != self._text:
            before, self._text = self._text, text
            self.refresh(layout=len(text) != len(before))

    def render(self) -> Text:
        """The text."""
        return self._text


class _Cell:
    """A cell of the table. Its text is made when it is drawn, which most cells of thousands of ranks never are."""

    def __init__(self, app: TopApp, place: int, column: Column) -> None:
        self._app, self._place, self._column = app, place, column

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        row, column = self._app.shown[self._place], self._column
        text = one_line(column.text(row))
        if column.bar:
            yield Text.assemble(*(_BLOCKS[letter] for letter in text))
        else:
            style = _STATE_STYLES[row.state] if column.name == "state" else ""
            yield Text(text, style, justify=column.justify, no_wrap=True, overflow="ellipsis")


class RankTable(DataTable[_Cell]):
    """The ranks."""

    HELP = _HELP
    BINDINGS: ClassVar = [
        Binding("enter", "select_cursor", "open"),
        Binding("s", "app.sort(1)", "sort"),
        Binding("S", "app.sort(-1)", show=False),
        Binding("f", "app.trouble", "trouble"),
        Binding("slash", "app.find", "find"),
        Binding("t", "app.bars", "bars"),
        Binding("n", "app.snapshot", "snapshot"),
        Binding("q", "app.quit", "quit"),
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("space", "page_down", show=False),
        Binding("home,g", "scroll_top", show=False),
        Binding("end,G", "scroll_bottom", show=False),
    ]


class RankScreen(Screen[None]):
    """All that is known of one rank."""

    BINDINGS: ClassVar = [
        Binding("escape,q,enter,left,backspace", "app.pop_screen", "back"),
        Binding("n", "app.snapshot", "snapshot"),
    ]

    def __init__(self, row: RankRow) -> None:
        super().__init__()
        self.row = row
        self._body = Lines()

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        yield VerticalScroll(self._body)
        yield Footer()

    def on_mount(self) -> None:
        """Show the rank."""
        self.show(self.row)

    def show(self, row: RankRow) -> None:
        """Show its newest state."""
        self._body.show(_lines(rank_lines(row, time.time()), first=_STATE_STYLES[row.state]))


class SnapshotScreen(ModalScreen[str]):
    """Asks whether to request a snapshot of a rank. The answer is its number, ``all``, or empty for no."""

    CSS = "SnapshotScreen { align: center middle; } SnapshotScreen Static { width: auto; padding: 1 2; border: round; }"
    BINDINGS: ClassVar = [
        Binding("y", "this_rank", "this rank"),
        Binding("a", "dismiss('all')", "all ranks"),
        Binding("n,q,enter,escape", "dismiss('')", "no"),
    ]

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        yield Static(f"Request a snapshot of rank {self._rank}?")
        yield Footer()

    def action_this_rank(self) -> None:
        """Answer with the rank."""
        self.dismiss(str(self._rank))


class TopApp(App[None]):
    """The screen: the verdict, the ranks, and the newest stall.

    Attributes:
        shown: the ranks in the table, in its order.
    """

    CSS = """
    #verdict, #stall { max-height: 25%; }
    RankTable { height: 1fr; }
    #find { display: none; height: 1; border: none; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("h,question_mark", "help", "help"),
        Binding("escape", "all", show=False),
        Binding("ctrl+c", f"leave({signal.SIGINT:d})", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, run_dir: Path) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours
        self._run_dir = run_dir
        self._over = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._view = JobView(f"Reading {run_dir}", time.time())
        self._order, self._trouble_only, self._find, self._whole_run = WORST, False, "", False
        self._columns: list[Column] = []
        self._figures = ""
        self.shown: list[RankRow] = []

    # -- the life of the screen ----------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The parts of the screen, which are kept: a query would look on the screen that is on top."""
        self._verdict, self._summary = Lines(id="verdict"), Lines()
        self._legend, self._stall = Lines(), Lines(id="stall")
        self._table = RankTable(cursor_type="row")
        self._input = Input(id="find", placeholder="a text in the number, node, state or activity")
        yield from (self._verdict, self._summary, self._table, self._legend, self._stall, self._input, Footer())

    def on_load(self) -> None:
        """Handle signals in the loop, so that the terminal is restored. This runs before Textual changes it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.action_leave, number)

    def on_mount(self) -> None:
        """Begin to look at the run."""
        self._table.focus()
        # Not Textual's own workers: it waits for their end, and a dead file system may hold a look for ever.
        threading.Thread(target=self._look, name="telemetry-top", daemon=True).start()
        self.set_interval(1.0, self._draw_times)
        # After Ctrl-Z and fg the terminal is empty, but Textual does not draw it again.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))
        self._draw()

    def on_unmount(self) -> None:
        """End the looks, and withdraw a request that no rank has answered yet, as Ctrl-C does."""
        self._over.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def _look(self) -> None:
        run = RunFolder(self._run_dir)
        while not self._over.is_set():
            began = time.monotonic()
            try:
                view = run.poll()
            except Exception as error:
                # A log can hold anything. The view goes on, and shows the error.
                view = replace(self._view, note=f"cannot be read: {type(error).__name__}: {error}")
            self.call_later(self._take, view)
            took = time.monotonic() - began
            self._over.wait(max(run.pause_seconds, min(_IDLE_FACTOR * took, _MAX_REST_SECONDS)))

    def _take(self, view: JobView) -> None:
        self._view = view
        self._draw()
        for screen in self.screen_stack:
            if isinstance(screen, RankScreen):
                for row in view.rows:
                    if row.key == screen.row.key:
                        screen.show(row)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        style = {GOOD: _GOOD_STYLE, BAD: _BAD_STYLE}.get(self._view.level, _WARN_STYLE)
        self._verdict.show(_lines(self._view.verdict.splitlines(), style))
        self._figures = figures(self._view) if self._view.rows else ""
        self._draw_times()
        self._legend.show(self._made_legend())
        self._draw_table()

    def _draw_times(self) -> None:
        """Draw what changes with the time alone."""
        view, now = self._view, time.time()
        told = f"{self._figures}  {seen(view, now)}" if view.rows else ""
        self._summary.show(_lines([told, *filter(None, [view.note])], "dim"))
        self._stall.show(_lines(newest_stall(view, now) if view.rows else (), first=_WARN_STYLE))

    def _made_legend(self) -> Text:
        parts = [self._order, "trouble only" if self._trouble_only else "", f"find {self._find}" if self._find else ""]
        legend = Text(f"{', '.join(filter(None, parts))}  ", style="bold", no_wrap=True)
        for category, look in BARS.items():
            legend.append(look.block, look.style).append(f" {category.replace('_', ' ')} ", "dim")
        return legend

    def _draw_table(self) -> None:
        """Show the ranks. The cursor stays on its rank when the order changes, unless it is on the first row."""
        at = self._table.cursor_row
        selected = self.shown[at].key if 0 < at < len(self.shown) else None
        rows = chosen(self._view.rows, self._order, trouble_only=self._trouble_only, find=self._find)
        columns_now = columns(self._view.rows, whole_run=self._whole_run or not self._view.running)
        before, self.shown = len(self.shown), rows
        if len(rows) != before or columns_now != self._columns:
            self._columns = columns_now
            self._table.clear(columns=True)
            for column in columns_now:
                self._table.add_column(Text(column.name, justify=column.justify), width=column.width)
            for place in range(len(rows)):
                self._table.add_row(*(_Cell(self, place, column) for column in columns_now))
        elif rows:  # one cell that is updated makes the table draw all that is visible
            self._table.update_cell_at(Coordinate(0, 0), _Cell(self, 0, columns_now[0]))
        place = next((place for place, row in enumerate(rows) if row.key == selected), 0)
        if place != self._table.cursor_row:
            self._table.move_cursor(row=place, animate=False)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def action_leave(self, number: int) -> None:
        """End with the exit status of a signal; of several, the first counts."""
        if self.return_code is None:
            self.exit(return_code=128 + number)

    def on_data_table_row_selected(self) -> None:
        """Open the rank under the cursor."""
        if self._table.cursor_row < len(self.shown):
            self.push_screen(RankScreen(self.shown[self._table.cursor_row]))

    def action_sort(self, steps: int) -> None:
        """Choose the next or the previous order."""
        orders = list(SORTS)
        self._order = orders[(orders.index(self._order) + steps) % len(orders)]
        self._to_first_row()

    def action_trouble(self) -> None:
        """Switch between ranks in trouble and all ranks."""
        self._trouble_only = not self._trouble_only
        self._to_first_row()

    def action_bars(self) -> None:
        """Switch the bars between the whole run and the last minute."""
        self._whole_run = not self._whole_run
        self._draw()

    def action_help(self) -> None:
        """Show the keys and the columns, or hide them."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def action_find(self) -> None:
        """Ask for a text to find ranks by."""
        self._input.display = True
        self._input.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the ranks with the text so far."""
        self._find = event.value
        self._to_first_row()

    def on_input_submitted(self) -> None:
        """Go back to the ranks."""
        self._input.display = False
        self._table.focus()

    def action_all(self) -> None:
        """Show all ranks."""
        self._trouble_only, self._input.value = False, ""
        self.on_input_submitted()
        self._to_first_row()

    def _to_first_row(self) -> None:
        self._table.move_cursor(row=0, animate=False)
        self._draw()

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def action_snapshot(self) -> None:
        """Ask whether to request a snapshot."""
        if isinstance(self.screen, RankScreen):
            self.push_screen(SnapshotScreen(self.screen.row.rank), self._request)
        elif self.shown:
            self.push_screen(SnapshotScreen(self.shown[self._table.cursor_row].rank), self._request)

    def _request(self, ranks: str | None) -> None:
        """Run ``telemetry snapshot``, and show what it prints."""
        if not ranks:
            return
        if self._child is not None and self._child.poll() is None:
            self.notify("another snapshot is being taken")
            return
        self.notify(f"snapshot of {'all ranks' if ranks == 'all' else f'rank {ranks}'} requested")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "telemetry", "snapshot", str(self._run_dir), "--rank", ranks],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,  # a Ctrl-C here is not for it
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(self._child,), name="telemetry-top-snapshot", daemon=True).start()

    def _listen(self, child: subprocess.Popen[str]) -> None:
        with child:
            for line in child.stdout or ():
                said = one_line(line.strip()).replace(f"{self._run_dir}/", "").removeprefix("telemetry: ")
                self.notify(f"snapshot: {said}", timeout=_TOLD_SECONDS, markup=False)
