"""The screen as lines of styled text, for a terminal and for a pipe. It does not depend on the terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.verdict import BAD, GOOD
from telemetry.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.report.process_log import unix
from telemetry.report.text import advice_lines, compute_shares, stall_section
from telemetry.top.view import STATES, Choice, State, clock
from telemetry.util.text import binary_size, byte_size, duration, one_line, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.log_lines import GpuLine
    from telemetry.top.view import JobView, RankRow

Styled = tuple[tuple[str, str], ...]
"""Texts, each with its style as Rich spells it; empty for none."""

GOOD_STYLE: Final = "green"
BAD_STYLE: Final = "bold red"
WARN_STYLE: Final = "yellow"
CURSOR_STYLE: Final = "reverse"

LIST: Final = "list"
RANK: Final = "rank"
HELP: Final = "help"
"""The pages."""

SHORT: Final = {category: category.replace("_", " ") for category in CATEGORIES} | {EVALUATION: "eval"}

_STATE_STYLES: Final = (
    dict.fromkeys((State.GONE, State.FAILED, State.STUCK), BAD_STYLE)
    | dict.fromkeys((State.SILENT, State.STALLED, State.STARVED), WARN_STYLE)
    | dict.fromkeys((State.WAITING, State.STARTING), "dim")
    | dict.fromkeys((State.OK, State.FINISHED), GOOD_STYLE)
)

_PARTS: Final = {
    DATA_WAIT: ("w", "\u2592", "red"),  # each bar begins with the most important category
    STARTUP: ("s", "\u2591", "yellow"),
    COMPUTE: ("#", "\u2588", "green"),
    EVALUATION: ("e", "\u2593", "cyan"),
    CHECKPOINT: ("c", "\u259a", "blue"),
    OTHER: (".", "\u00b7", "dim white"),
}
"""The form of a category in a bar: a letter, or a block of a colour."""

_COUNTED: Final = ("samples", "tokens")
_BAR_COLUMNS: Final = (8, 48)
_WIDE_COLUMNS: Final = 110
"""Least width for some columns."""

_TALL_LINES: Final = 29
"""Least height for a long verdict with more lines."""

_OLD_SECONDS: Final = 10.0
"""From this age on, the screen shows the age of its data."""

_MAX_STALLS: Final = 8
"""The most stalls on the page of a rank."""

KEYS: Final = (
    ("s", "sort"), ("f", "trouble"), ("/", "find"), ("enter", "open"), ("t", "bars"), ("n", "snapshot"),
    ("h", "help"), ("q", "quit"),
)  # fmt: skip

HELP_LINES: Final = (
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


# -- the columns of the table ----------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One column of the table.

    Attributes:
        name: its heading. ``width``: its least width. ``right``: whether it is aligned to the right.
        text: makes the text of a row.
        gpu: whether it needs the figures of a GPU. ``wide``: whether it needs a wide terminal.
    """

    name: str
    width: int
    right: bool
    text: Callable[[RankRow], str]
    gpu: bool = False
    wide: bool = False


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * min(ratio, 1.0):.0f}%"


def _rate(row: RankRow) -> str:
    rate = row.per_second("steps")
    return "-" if rate is None else f"{rate:.2f}" if rate < 100 else f"{rate:.0f}"


def _memory_used(row: RankRow) -> str:
    used, total = row.gpu.memory_used_bytes, row.gpu.memory_total_bytes
    return _percent(used / total if used is not None and total else None)


def _resident_memory(row: RankRow) -> str:
    return "-" if row.resident_memory_bytes is None else byte_size(row.resident_memory_bytes)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


_COLUMNS: Final = (
    Column("rank", 4, True, lambda row: str(row.rank)),
    Column("node", 8, False, lambda row: row.node),
    Column("state", 18, False, lambda row: row.finding),
    Column("now", 10, False, lambda row: SHORT.get(row.now_in, "-")),
    Column("step/s", 6, True, _rate),
    Column("wait", 4, True, lambda row: _percent(row.wait_ratio)),
    Column("gpu", 4, True, lambda row: _percent(row.gpu.utilization_ratio), gpu=True),
    Column("mem", 4, True, _memory_used, gpu=True),
    Column("watt", 4, True, lambda row: _whole(row.gpu.power_watts), gpu=True, wide=True),
    Column("C", 3, True, lambda row: _whole(row.gpu.temperature_celsius), gpu=True, wide=True),
    Column("rss", 7, True, _resident_memory, wide=True),
)


def _columns(width: int, rows: Sequence[RankRow]) -> list[Column]:
    """The columns that fit, without GPU columns if no rank has a figure for them."""
    gpu, wide = any(row.gpu.utilization_ratio is not None for row in rows), width >= _WIDE_COLUMNS
    found = [column for column in _COLUMNS if (gpu or not column.gpu) and (wide or not column.wide)]
    found[0] = found[0]._replace(width=max(4, len(str(max((row.rank for row in rows), default=0)))))
    spare = width - 1 - sum(column.width + 1 for column in found) - _BAR_COLUMNS[0]
    for place, longest, room in (
        (1, max((len(row.node) for row in rows), default=0), spare // 2),
        (2, max((len(row.finding) for row in rows), default=0), None),
    ):
        more = max(0, min(longest - found[place].width, spare - 4 if room is None else room))
        spare -= more
        found[place] = found[place]._replace(width=found[place].width + more)
    return found


# -- the frame ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """Makes the lines of a screen.

    Attributes:
        encoding: encoding of the terminal. Characters that it lacks are escaped.
        blocks: whether bars are made of blocks. Without colours, letters are easier to distinguish.
        place: the run folder, as a person gave it.
    """

    encoding: str
    blocks: bool
    place: str = ""

    def page(
        self, kind: str, view: JobView, choice: Choice, scrolled: int = 0, *, width: int, height: int, now: float
    ) -> list[Styled]:
        """The verdict, and below it the page: exactly ``height`` lines, none wider than ``width``.

        Args:
            kind: `LIST`, the ranks and the newest stall; `RANK`, all that is known of the selected rank; or `HELP`.
            view: the job.
            choice: the ranks to show, and their order.
            scrolled: number of lines of an opened rank above the page.
            width: columns of the terminal.
            height: lines of the terminal.
            now: Unix time.
        """
        head = self._head(view, width, 3 if height < _TALL_LINES else 5, now)
        room = max(0, height - len(head))
        body: list[Styled] = []
        if kind == HELP:
            body = [((self._cell(text, width), ""),) for text in HELP_LINES]
        elif kind == RANK:
            row = next((row for row in view.rows if row.key == choice.selected), None)
            if row is None:
                body = [(("this rank is no longer there; q goes back", WARN_STYLE),)]
            else:
                body = self.rank_lines(row, width, now)
                body = body[min(scrolled, max(0, len(body) - room)) :]
        elif view.rows:
            body = self._list(view, choice, width, room, now)
        return [self._cut(line, width) for line in [*head, *body, *[()] * room][:height]]

    def _list(self, view: JobView, choice: Choice, width: int, room: int, now: float) -> list[Styled]:
        """The ranks around the cursor, the legend and the newest stall, in at least ``room`` lines."""
        rows = choice.rows(view)
        panel = self._stall(view, width, min(max(3 if room < 26 else 8, room - len(rows) - 2), 16), now)
        visible = max(1, min(len(rows), room - len(panel) - 2))  # the headings and the legend
        at = choice.cursor(rows)
        first = max(0, min(at - visible // 2, len(rows) - visible))
        shown = rows[first : first + visible]
        lines = self._table(shown, at - first, view, width, whole_run=choice.whole_run or not view.running)
        if not rows:
            lines.append((("no rank is like that; esc shows all", WARN_STYLE),))
        lines += [()] * (room - len(lines) - len(panel) - 1)
        where = f"{first + 1}-{first + len(shown)} of {len(rows)}  " if len(rows) > visible else ""
        return [*lines, ((where, "dim"), *self._legend()), *panel]

    def printed(self, view: JobView, *, width: int, now: float, rows: int) -> str:
        """One frame as plain text: the whole verdict, and the worst ranks."""
        lines = self._head(view, width, 20, now)
        shown = sorted(view.rows, key=lambda row: row.rank)
        if len(shown) > rows:
            shown = Choice().rows(view)[:rows]
        if shown:
            lines += self._table(shown, -1, view, width, whole_run=not view.running)
            if len(shown) < len(view.rows):
                lines.append(((f"the worst {len(shown)} of {len(view.rows)} ranks", "dim"),))
            lines += self._stall(view, width, 20, now)
        return "".join(f"{''.join(text for text, _ in line).rstrip()}\n" for line in lines)

    def foot(self, choice: Choice, width: int) -> Styled:
        """The keys and the current choice."""
        chosen = f"{choice.sort}{', trouble only' if choice.trouble_only else ''}"
        chosen += f", find {choice.text}" if choice.text else ""
        keys = [span for key, does in KEYS for span in ((key, "bold"), (f" {does} ", "dim"))]
        return self._cut((*keys, (f" {chosen}", "dim")), width)

    def note(self, text: str, width: int) -> Styled:
        """A question or a message, in place of the foot."""
        return ((self._cell(text, width), CURSOR_STYLE),)

    def _head(self, view: JobView, width: int, most: int, now: float) -> list[Styled]:
        """The verdict in at most ``most`` lines, a summary of the ranks, and notes."""
        style = {GOOD: GOOD_STYLE, BAD: BAD_STYLE}.get(view.headline.level, WARN_STYLE)
        lines: list[Styled] = [((line, style),) for line in self._wrapped(view.headline.text, width, most)]
        if view.rows:
            lines.append(((self._cell(_summary(view, now), width), "dim"),))
        age = now - view.seen
        if age > _OLD_SECONDS:
            late = now > view.overdue
            why = f"{self.place} does not answer" if late else "a look takes long, so there are few"
            old = self._cell(f"what is shown is {rough_duration(age)} old: {why}", width)
            lines.append(((old, BAD_STYLE if late else "dim"),))
        return lines + [((self._cell(note, width), WARN_STYLE),) for note in view.notes[:2]]

    def _table(self, rows: Sequence[RankRow], at: int, view: JobView, width: int, *, whole_run: bool) -> list[Styled]:
        """The headings, and a line for each of ``rows``; the cursor is at the row ``at``."""
        columns = _columns(width, view.rows)
        bar_width = max(0, min(width - 1 - sum(column.width + 1 for column in columns), _BAR_COLUMNS[1]))
        headings = "".join(f"{self._in_column(column.name, column)} " for column in columns)
        bars = "whole run" if whole_run else "last minute"
        lines: list[Styled] = [((self._cell(f" {headings}{bars}", width), "bold"),)]
        for place, row in enumerate(rows):
            style = CURSOR_STYLE if place == at else ""
            spans = [(">" if style else " ", style)]
            for column in columns:
                state = _STATE_STYLES[row.state] if column.name == "state" else style
                spans.append((f"{self._in_column(column.text(row), column)} ", state))
            lines.append((*spans, *self._bar((row.totals if whole_run else row.live).ledger_total_seconds, bar_width)))
        return lines

    def _stall(self, view: JobView, width: int, most: int, now: float) -> list[Styled]:
        """The newest stall with its advice, at most ``most`` lines; one line if there was none."""
        found = view.newest_stall()
        if found is None:
            return [(("no stall in what was read", "dim"),)]
        row, stall = found
        opened, closed = unix(stall.opened or ""), unix(stall.closed or "")
        began, ended = ("-" if at is None else clock(at) for at in (opened, closed))
        when, style = f"{began} to {ended}", "dim"
        if stall.closed is None:
            when, style = "open", WARN_STYLE
            if opened is not None:
                when += f" for {rough_duration(max(0.0, now - opened))} (since {began.removesuffix(' UTC')})"
        on = f" on {row.node}" if row.node and view.nodes > 1 else ""
        title = f"newest stall: rank {row.rank}{on}: {stall.cause}, {when}"
        lines: list[Styled] = [((self._cell(title, width), style),)]
        texts = [text.strip() for text in advice_lines(stall.advice)]
        for text in [*texts, stall.line_verdict] if stall.line_verdict else texts:
            if len(lines) < most:
                lines += [((f"  {part}", ""),) for part in self._wrapped(text, width - 2, most - len(lines))]
        return lines

    def rank_lines(self, row: RankRow, width: int, now: float) -> list[Styled]:
        """All that is known of one rank, the newest stall first. There may be more lines than fit."""
        since = "" if row.since is None else f", since {clock(row.since)} ({rough_duration(max(0.0, now - row.since))})"
        pid = f", pid {row.log.pid}" if row.log.pid else ""
        title = f"rank {row.rank} on {row.node or 'an unknown node'}{pid}: {row.finding}{since}"
        lines: list[Styled] = [((line, _STATE_STYLES[row.state]),) for line in self._wrapped(title, width, 3)]
        lines += [((self._cell(text, width), ""),) for text in _facts(row)]
        lines += [(), (("ledger          last minute     whole run", "bold"),)]
        ledgers = row.live.ledger_total_seconds, row.totals.ledger_total_seconds
        recent, whole = (sum(ledger.values()) for ledger in ledgers)
        for category in CATEGORIES:
            now_in, all_in = (ledger.get(category, 0.0) for ledger in ledgers)
            shares = percent(now_in / recent) if recent else "-", percent(all_in / whole) if whole else "-"
            size = round(max(0, min(30, width - 46)) * now_in / recent) if recent else 0
            figures = f"{SHORT[category]:<12}   {shares[0]:>12}{shares[1]:>14}   "
            lines.append(((figures, ""), *(self._bar({category: now_in}, size) if size else ())))
        parts, compute = row.totals.compute_total_seconds, row.totals.ledger_total_seconds.get(COMPUTE, 0.0)
        if parts and compute:
            lines.append(((self._cell(compute_shares(parts, compute), width), ""),))
        for stall in reversed(row.stalls[-_MAX_STALLS:]):
            lines.append(())
            for text in stall_section(stall):
                indent = len(text) - len(text.lstrip())
                style = WARN_STYLE if indent == 0 and stall.closed is None else ""
                for part in self._wrapped(text.strip(), width - indent, 6):
                    lines.append(((" " * indent + part, style),))
        return lines

    def _safe(self, text: str) -> str:
        """A text from a log as one line without control characters, in the terminal's encoding."""
        shown = text if text.isascii() and text.isprintable() else one_line(text)
        return shown if shown.isascii() else shown.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def _cell(self, text: str, width: int) -> str:
        """A text of exactly this width; a longer text is cut and ends in two dots."""
        shown, width = self._safe(text), max(0, width)
        return f"{shown[: width - 2]}.." if len(shown) > width > 3 else shown[:width].ljust(width)

    def _in_column(self, text: str, column: Column) -> str:
        return text.rjust(column.width)[: column.width] if column.right else self._cell(text, column.width)

    def _wrapped(self, text: str, width: int, most: int) -> list[str]:
        """A text in at most ``most`` lines; the last one ends in dots if something is missing."""
        return textwrap.wrap(
            self._safe(text), max(8, width), max_lines=most, placeholder=" ...", break_on_hyphens=False
        ) or [""]

    def _bar(self, seconds: dict[str, float], width: int) -> Styled:
        """A ledger as a bar. A category that takes less than a column may be left out."""
        total = sum(each for each in seconds.values() if each > 0)
        spans: list[tuple[str, str]] = []
        done, at = 0.0, 0
        for category, (letter, block, style) in _PARTS.items() if total > 0 else ():
            done += max(0.0, seconds.get(category, 0.0))
            until = round(width * done / total)
            if until > at:
                spans.append(((block if self.blocks else letter) * (until - at), style))
                at = until
        return (*spans, (" " * (width - at), "")) if at < width else tuple(spans)

    def _legend(self) -> Styled:
        return tuple(
            span
            for category, (letter, block, style) in _PARTS.items()
            for span in ((block if self.blocks else letter, style), (f" {SHORT[category]}  ", "dim"))
        )

    def _cut(self, line: Styled, width: int) -> Styled:
        spans: list[tuple[str, str]] = []
        for text, style in line:
            spans.append((self._safe(text)[:width], style))
            width -= len(spans[-1][0])
            if width <= 0:
                break
        return tuple(spans)


def _summary(view: JobView, now: float) -> str:
    """The line under the verdict: the run, its ranks by state, steps, rates, the time."""
    rows = view.rows
    counts = Counter(row.state for row in rows)
    trouble = [row.node for row in rows if row.in_trouble]
    states = ", ".join(f"{counts[state]} {state.value}" for state in STATES if counts[state])
    if view.nodes > 1 and len(trouble) > 1 and len(set(trouble)) == 1:
        states += f" (trouble on {trouble[0]} alone)"
    steps = [row.totals.steps_total for row in rows if row.totals.steps_total is not None]
    running = [row for row in rows if row.per_second("steps") is not None]
    rates = sorted(row.per_second("steps") or 0.0 for row in running)
    parts = [
        f"run {view.run}",
        f"{len(rows)} rank{'s' if len(rows) > 1 else ''} on {view.nodes} node{'s' if view.nodes > 1 else ''}",
        states,
        f"step {max(steps)}" if steps else "",
        f"{rates[len(rates) // 2]:.2f} steps/s" if rates else "",
    ]
    for name in _COUNTED:
        known = [rate for row in running if (rate := row.per_second(name)) is not None]
        if known and len(known) == len(running):  # the sum of some ranks would look like that of the job
            parts.append(f"{plain_number(sum(known), 4)} {name}/s")
    return "  ".join(part for part in [*parts, clock(now).removesuffix(" UTC")] if part)


def _facts(row: RankRow) -> list[str]:
    """The figures of an opened rank, a line for each topic that is known."""
    steps, pace = row.totals.steps_total, row.per_second("steps")
    rate = "-" if pace is None else f"{pace:.2f}"
    times = ", ".join(f"{name} {duration(row.step_seconds.get(name))}" for name in ("p50", "p95", "p99", "max"))
    rates = ((row.per_second(name), name) for name in _COUNTED)
    throughput = [f"{plain_number(rate, 4)} {name} a second" for rate, name in rates if rate is not None]
    topics = {
        "now": [row.now_in.replace("_", " "), f"at {row.where}" if row.where else ""] if row.now_in else [],
        "steps": [f"{'-' if steps is None else steps}, {rate} a second"
                  + (f"; a step takes {times}" if row.step_seconds else "")],
        "wait": [f"{percent(row.wait_ratio)} of the training loop was exposed wait"],
        "throughput": throughput,
        "GPU": _gpu(row.gpu),
        "memory": _memory(row),
    }  # fmt: skip
    return [f"{topic:<10} {', '.join(filter(None, parts))}" for topic, parts in topics.items() if parts]


def _gpu(gpu: GpuLine) -> list[str]:
    busy, active, watts, celsius = (
        gpu.utilization_ratio, gpu.sm_active_ratio, gpu.power_watts, gpu.temperature_celsius,
    )  # fmt: skip
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if busy is None and used is None:
        return []
    return [
        gpu.name or "",
        "" if busy is None else f"busy {percent(busy, 0)}",
        "" if active is None else f"SMs active {percent(active, 0)}",
        "" if used is None or total is None else f"memory {binary_size(used)} of {binary_size(total)}",
        "" if watts is None else f"{watts:.0f} W",
        "" if celsius is None else f"{celsius:.0f} C",
    ]


def _memory(row: RankRow) -> list[str]:
    resident = row.resident_memory_bytes
    grows, ends = row.totals.memory.growth_bytes_per_hour, row.totals.memory.exhausted_in_seconds
    texts = [] if resident is None else [f"resident {binary_size(resident)}"]
    if grows:
        texts.append(f"{row.totals.memory.where or ''} grows by {binary_size(grows)} an hour".strip())
    if ends is not None:
        texts.append(f"exhausted in {rough_duration(ends)}")
    return texts
