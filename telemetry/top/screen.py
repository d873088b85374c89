"""The frame: what stands on the screen, line by line, for a view, a state and a size."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from telemetry.top.live_verdict import BAD, GOOD, clock
from telemetry.top.rank_row import STATES
from telemetry.top.rank_table import RankTable
from telemetry.top.screen_rank import rank_lines
from telemetry.top.screen_state import CONFIRM, HELP, RANK, TYPING, ScreenState, cursor, shown_rows
from telemetry.top.stall_panel import stall_lines
from telemetry.util.text import plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.top.job_view import JobView
    from telemetry.top.rank_row import RankRow
    from telemetry.top.screen_text import Charset, ScreenLine

_LEVELS: Final = {GOOD: "good", BAD: "bad"}
_OLD_SECONDS: Final = 10.0
"""From this age on, the screen says how old its data is."""

_KEYS: Final = (
    ("s", "sort"), ("f", "trouble"), ("/", "find"), ("enter", "open"), ("t", "bars"), ("n", "snapshot"),
    ("h", "help"), ("q", "quit"),
)  # fmt: skip

_HELP: Final = (
    "up, down, page up, page down, home, end   move (also k, j, space, g, G)",
    "enter    open the rank under the cursor; again, or q, goes back",
    "s, S     the next or the last order of the ranks",
    "f        only ranks in trouble, or all",
    "/        find ranks: a text in their number, node, state or activity; esc: all",
    "t        bars over the last minute, or over the whole run",
    "n        request a snapshot of this rank or of all; it asks first",
    "q        quit",
    "",
    "rank, node    a node is one machine",
    "state         worst first: gone, failed, stuck, silent, the cause of a stall,",
    "              waits for another rank, no step yet, ok, finished",
    "now           the category of the ledger that the rank is in",
    "step/s        steps per second over the last minute; the line above has the median,",
    "              and samples and tokens per second of all ranks, where they are known",
    "wait          exposed wait, as a share of the training loop of the last minute;",
    "              - where it was not measured",
    "gpu, mem      share of time in which the GPU ran something; memory in use",
    "bar           where the time went, the last minute or the whole run",
)


class Frame:
    """Makes frames.

    Args:
        charset: what the terminal can show.
        source: the run folder or the endpoints, as a person gave them.
    """

    def __init__(self, charset: Charset, source: str) -> None:
        self._chars = charset
        self._source = source
        self._table = RankTable(charset)

    def lines(self, view: JobView, state: ScreenState, *, width: int, height: int, now: float) -> list[ScreenLine]:
        """The lines of a screen: exactly ``height``, none wider than ``width``.

        Args:
            view: the job.
            state: what the person has chosen.
            width: columns of the terminal.
            height: its lines.
            now: Unix time.
        """
        head = self._head(view, width, 3 if height < 30 else 5, now)
        foot = [self._foot(state, width)]
        room = max(0, height - len(head) - len(foot))
        body: list[ScreenLine]
        if state.page == HELP:
            body = [((self._chars.cell(line, width), ""),) for line in _HELP]
        elif state.page == RANK:
            body = self._opened(view, state, width, room, now)
        else:
            body = self._list(view, state, width, room, now)
        body = body[:room] + [()] * (room - len(body))
        return [_cut(line, width, self._chars) for line in (head + body + foot)[:height]]

    def list_rows(self, height: int) -> int:
        """About how many rows of the list fit, for the keys that move by a page."""
        return max(1, height - 10)

    def plain(self, view: JobView, *, width: int, now: float, rows: int) -> list[ScreenLine]:
        """One frame to print: the verdict whole, and the worst ranks."""
        lines = self._head(view, width, 20, now)
        shown = sorted(view.rows, key=lambda row: row.rank)
        if len(shown) > rows:
            shown = shown_rows(ScreenState(), view.rows)[:rows]
        if not shown:
            return lines
        lines += self._table.lines(shown, -1, width=width, whole_run=not view.running, figures_of=view.rows)
        if len(shown) < len(view.rows):
            lines.append(((f"the worst {len(shown)} of {len(view.rows)} ranks", "dim"),))
        return lines + stall_lines(view, self._chars, width, 20, now)

    def _head(self, view: JobView, width: int, most: int, now: float) -> list[ScreenLine]:
        style = _LEVELS.get(view.verdict.level, "warn")
        lines: list[ScreenLine] = [((line, style),) for line in self._chars.wrapped(view.verdict.text, width, most)]
        if view.rows:
            lines.append(self._summary(view, width, now))
        age = now - view.seen
        if age > _OLD_SECONDS:
            late = now > view.overdue
            why = f"{self._source} does not answer" if late else "a look takes long, so there are few"
            old = self._chars.cell(f"what is shown is {rough_duration(age)} old: {why}", width)
            lines.append(((old, "bad" if late else "dim"),))
        return lines + [((self._chars.cell(note, width), "warn"),) for note in view.notes[:2]]

    def _summary(self, view: JobView, width: int, now: float) -> ScreenLine:
        rows = view.rows
        counts = Counter(row.state for row in rows)
        trouble = {row.node for row in rows if row.in_trouble}
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        if view.nodes > 1 and len(trouble) == 1 and sum(row.in_trouble for row in rows) > 1:
            states += f" (trouble on {min(trouble)} alone)"
        steps = [row.steps for row in rows if row.steps is not None]
        rates = [row.steps_per_second for row in rows if row.steps_per_second is not None]
        parts = [
            f"run {view.run}",
            f"{len(rows)} rank{'s' if len(rows) > 1 else ''} on {view.nodes} node{'s' if view.nodes > 1 else ''}",
            states,
            f"step {max(steps)}" if steps else "",
            f"{sorted(rates)[len(rates) // 2]:.2f} steps/s" if rates else "",
            *_throughput(rows),
            clock(now).removesuffix(" UTC"),
        ]
        return ((self._chars.cell("  ".join(part for part in parts if part), width), "dim"),)

    def _list(self, view: JobView, state: ScreenState, width: int, room: int, now: float) -> list[ScreenLine]:
        shown = shown_rows(state, view.rows)
        if not view.rows:
            return []
        free = room - len(shown) - 2
        panel = stall_lines(view, self._chars, width, min(max(3 if room < 26 else 8, free), 16), now)
        visible = max(1, room - len(panel) - 2)  # the headings and the legend
        if len(shown) < visible:
            visible = max(1, len(shown))
        at = cursor(state, shown)
        first = max(0, min(at - visible // 2, len(shown) - visible))
        lines = self._table.lines(
            shown[first : first + visible], at - first, width=width, whole_run=state.whole_run or not view.running,
            figures_of=view.rows,
        )  # fmt: skip
        if not shown:
            lines.append((("no rank is like that; esc shows all", "warn"),))
        lines += [()] * (room - len(lines) - len(panel) - 1)
        where = f"{first + 1}-{first + len(lines[1:][:visible])} of {len(shown)}  " if len(shown) > visible else ""
        return [*lines, ((where, "dim"), *self._chars.legend()), *panel]

    def _opened(self, view: JobView, state: ScreenState, width: int, room: int, now: float) -> list[ScreenLine]:
        row = next((row for row in view.rows if row.key == state.selected), None)
        if row is None:
            return [(("this rank is no longer there; q goes back", "warn"),)]
        lines = rank_lines(row, self._chars, width, now)
        start = min(state.scrolled, max(0, len(lines) - room))
        return lines[start : start + room]

    def _foot(self, state: ScreenState, width: int) -> ScreenLine:
        if state.mode == CONFIRM and state.selected is not None:
            ask = f"Request a snapshot? y: of rank {state.selected[0]}   a: of all ranks   any other key: no"
            return ((self._chars.cell(ask, width), "cursor"),)
        if state.mode == TYPING:
            return ((self._chars.cell(f"find: {state.text}_   enter: done   esc: all", width), "cursor"),)
        if state.message:
            return ((self._chars.cell(state.message, width), "cursor"),)
        chosen = f"{state.sort}{', trouble only' if state.trouble_only else ''}"
        chosen += f", find {state.text}" if state.text else ""
        keys: list[tuple[str, str]] = []
        for key, does in _KEYS:
            keys += [(key, "strong"), (f" {does} ", "dim")]
        return _cut((*keys, (f" {chosen}", "dim")), width, self._chars)


def _throughput(rows: Sequence[RankRow]) -> list[str]:
    """Samples and tokens a second, all ranks that run together; nothing where one of them does not know."""
    running = [row for row in rows if row.steps_per_second is not None]
    found = []
    for name, rates in (
        ("samples", [row.samples_per_second for row in running]),
        ("tokens", [row.tokens_per_second for row in running]),
    ):
        known = [rate for rate in rates if rate is not None]
        if known and len(known) == len(rates):
            found.append(f"{plain_number(sum(known), 4)} {name}/s")
    return found


def _cut(line: Sequence[tuple[str, str]], width: int, chars: Charset) -> ScreenLine:
    """A line that is no wider than the screen."""
    spans: list[tuple[str, str]] = []
    for text, style in line:
        shown = chars.safe(text)
        columns = chars.columns(shown)
        if columns > width:
            shown, columns = chars.fit(shown, width), width
        spans.append((shown, style))
        width -= columns
        if width <= 0:
            break
    return tuple(spans)
