"""The view as lines and columns of text, for the terminal and for a pipe."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from telemetry.log.process import unix
from telemetry.model.records import CATEGORIES, CHECKPOINT, COMPUTE, DATA_WAIT, EVALUATION, OTHER, STARTUP
from telemetry.report.as_text import MAX_ROWS, advice_lines, compute_shares, memory_line, stall_section
from telemetry.top.view import SILENT_SECONDS, STATES, clock
from telemetry.util.words import binary_size, byte_size, duration, percent, plain_number, rough_duration, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.log.lines import GpuLine, TotalsLine
    from telemetry.top.view import JobView, RankRow

_MAX_STALLS: Final = 8
"""The most stalls of an opened rank."""

_FITTED: Final = ("rank", "node", "state")
_NAME_COLUMNS: Final = 40
"""Some columns are as wide as their longest text, but at most so wide."""

_COUNTED: Final = ("samples", "tokens")

WORST: Final = "worst first"


# -- the table ---------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """How a category looks in a bar: in print and on the screen."""

    letter: str
    block: str
    style: str


BARS: Final = {  # each bar begins with the most important category
    DATA_WAIT: Bar("w", "\u2592", "red"),
    STARTUP: Bar("s", "\u2591", "yellow"),
    COMPUTE: Bar("#", "\u2588", "green"),
    EVALUATION: Bar("e", "\u2593", "cyan"),
    CHECKPOINT: Bar("c", "\u259a", "blue"),
    OTHER: Bar(".", "\u00b7", "dim white"),
}
_BAR_COLUMNS: Final = 16


def _bar(totals: TotalsLine) -> str:
    """Where the time went, in letters. A category that takes less than a column may be left out."""
    seconds = totals.ledger_total_seconds
    total = sum(seconds.get(category, 0.0) for category in BARS)
    text, done = "", 0.0
    for category, look in BARS.items() if total > 0 else ():
        done += seconds.get(category, 0.0)
        text = text.ljust(round(_BAR_COLUMNS * done / total), look.letter)
    return text


class Column(NamedTuple):
    """A column of the table. ``gpu``: whether it needs figures of a GPU. ``bar``: whether it has letters of `BARS`."""

    name: str
    width: int
    text: Callable[[RankRow], str]
    justify: Literal["left", "right"] = "right"
    gpu: bool = False
    bar: bool = False


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * min(ratio, 1.0):.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _rate(row: RankRow) -> str:
    rate = row.per_second("steps")
    return "-" if rate is None else f"{rate:.2f}" if rate < 100 else f"{rate:.0f}"


def _gpu_memory(row: RankRow) -> str:
    used, total = row.gpu.memory_used_bytes, row.gpu.memory_total_bytes
    return _share(used / total if used is not None and total else None)


def _resident(row: RankRow) -> str:
    resident = row.host.process_resident_memory_bytes
    return "-" if resident is None else byte_size(resident)


_COLUMNS: Final = (
    Column("rank", 4, lambda row: str(row.rank)),
    Column("node", 8, lambda row: row.node, justify="left"),
    Column("state", 18, lambda row: row.finding, justify="left"),
    Column("now", 10, lambda row: row.now_in.replace("_", " ") or "-", justify="left"),
    Column("step/s", 6, _rate),
    Column("wait", 4, lambda row: _share(row.wait_ratio)),
    Column("last minute", _BAR_COLUMNS, lambda row: _bar(row.live), justify="left", bar=True),
    Column("gpu", 4, lambda row: _share(row.gpu.utilization_ratio), gpu=True),
    Column("mem", 4, _gpu_memory, gpu=True),
    Column("watt", 4, lambda row: _number(row.gpu.power_watts), gpu=True),
    Column("C", 3, lambda row: _number(row.gpu.temperature_celsius), gpu=True),
    Column("rss", 7, _resident),
)


_WHOLE_RUN: Final = Column("whole run", _BAR_COLUMNS, lambda row: _bar(row.totals), justify="left", bar=True)


def columns(rows: Sequence[RankRow], *, whole_run: bool) -> list[Column]:
    """The columns for some ranks, without those of GPUs if no rank has a figure for them.

    ``whole_run``: whether the bars are of the whole run.
    """
    gpu = any(row.gpu.utilization_ratio is not None for row in rows)
    found = []
    for column in (_WHOLE_RUN if column.bar and whole_run else column for column in _COLUMNS if gpu or not column.gpu):
        longest = max((len(column.text(row)) for row in rows), default=0) if column.name in _FITTED else 0
        found.append(column._replace(width=max(column.width, min(longest, _NAME_COLUMNS))))
    return found


# -- which ranks are shown, and in which order -------------------------------------------------------------------------


def _worst(row: RankRow) -> Any:
    # By whole percents, so that ranks which are alike do not change places all the time.
    return STATES.index(row.state), -round(100 * (row.wait_ratio or 0.0)), row.rank


def _known_first(value: float | None, row: RankRow) -> Any:
    return value is None, value, row.rank


def _most_memory(row: RankRow) -> Any:
    resident = row.host.process_resident_memory_bytes
    return _known_first(resident and -resident, row)


SORTS: Final[dict[str, Callable[[RankRow], Any]]] = {
    WORST: _worst,
    "rank": lambda row: row.key,
    "node": lambda row: (row.node, row.rank),
    "slowest first": lambda row: _known_first(row.per_second("steps"), row),
    "wait": lambda row: _known_first(row.wait_ratio and -row.wait_ratio, row),
    "GPU, idle first": lambda row: _known_first(row.gpu.utilization_ratio, row),
    "memory": _most_memory,
}
"""The orders by their names on the screen."""


def chosen(rows: Sequence[RankRow], order: str, *, trouble_only: bool = False, find: str = "") -> list[RankRow]:
    """The ranks in an order of `SORTS`.

    ``find``: a text in their number, node, state, finding or activity; empty for all. ``trouble_only``: without those
    that are all right.
    """

    def has_text(row: RankRow) -> bool:
        text = f"rank {row.rank} {row.node} {row.state.value} {row.finding} {row.now_in.replace('_', ' ')}"
        return find.casefold() in text.casefold()

    found = [row for row in rows if (row.in_trouble or not trouble_only) and (not find or has_text(row))]
    return sorted(found, key=SORTS[order])


# -- lines -------------------------------------------------------------------------------------------------------------


def summary(view: JobView, now: float) -> str:
    """The line under the verdict."""
    return f"{figures(view)}  {seen(view, now)}"


def seen(view: JobView, now: float) -> str:
    """The time; of an old view, when that was."""
    age = now - view.seen
    return clock(now) if age < SILENT_SECONDS else f"{clock(view.seen)}, {rough_duration(age)} ago"


def figures(view: JobView) -> str:
    """The run, its ranks by state, steps and rates."""
    rows, nodes = view.rows, view.nodes
    counts = Counter(row.state for row in rows)
    trouble = [row.node for row in rows if row.in_trouble]
    states = ", ".join(f"{counts[state]} {state.value}" for state in STATES if counts[state])
    if nodes > 1 and len(trouble) > 1 and len(set(trouble)) == 1:
        states += f" (trouble on {trouble[0]} alone)"
    steps = [row.totals.steps_total for row in rows if row.totals.steps_total is not None]
    going_on = [row for row in rows if row.per_second("steps") is not None]
    rates = sorted(row.per_second("steps") or 0.0 for row in going_on)
    parts = [
        f"run {view.run}",
        f"{len(rows)} rank{'s' if len(rows) > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}",
        states,
        f"step {max(steps)}" if steps else "",
        f"{rates[len(rates) // 2]:.2f} steps/s" if rates else "",
    ]
    for name in _COUNTED:
        known = [rate for row in going_on if (rate := row.per_second(name)) is not None]
        if known and len(known) == len(going_on):  # the sum of some ranks would look like that of the job
            parts.append(f"{plain_number(sum(known), 4)} {name}/s")
    return "  ".join(filter(None, parts))


def newest_stall(view: JobView, now: float) -> list[str]:
    """The newest open stall with its advice, or else the newest one. Ranks that wait for others count last."""
    found = [(row, row.stalls[-1]) for row in view.rows if row.stalls]
    if not found:
        return ["no stall in what was read"]
    row, stall = max(
        found, key=lambda each: (each[1].closed is None, each[1].cause != "straggler", str(each[1].opened))
    )
    began, ended = unix(stall.opened or ""), unix(stall.closed or "")
    times = ["-" if at is None else clock(at) for at in (began, ended)]
    if stall.closed is not None:
        when = " to ".join(times)
    else:
        when = "open" if began is None else f"open for {rough_duration(max(0.0, now - began))} (since {times[0]})"
    on = f" on {row.node}" if row.node and view.nodes > 1 else ""
    line = [f"  {verdict}"] if (verdict := stall.details.line_verdict) else []
    return [f"newest stall: rank {row.rank}{on}: {stall.cause}, {when}", *advice_lines(stall.advice), *line]


def rank_lines(row: RankRow, now: float) -> list[str]:
    """All that is known of one rank, the newest stall first."""
    since = "" if row.since is None else f", since {clock(row.since)} ({rough_duration(max(0.0, now - row.since))})"
    lines = [f"rank {row.rank} on {row.node or 'an unknown node'}, pid {row.life.log.pid}: {row.finding}{since}"]
    lines += _facts(row)
    ledgers = row.live.ledger_total_seconds, row.totals.ledger_total_seconds
    recent, whole = (sum(ledger.values()) for ledger in ledgers)
    lines += ["", "ledger          last minute     whole run"]
    for category in CATEGORIES:
        now_in, all_in = (ledger.get(category, 0.0) for ledger in ledgers)
        shares = percent(now_in / recent) if recent else "-", percent(all_in / whole) if whole else "-"
        if category == DATA_WAIT and row.totals.waits_unseen:
            shares = "-", "-"
        lines.append(f"{category.replace('_', ' '):<12}   {shares[0]:>12}{shares[1]:>14}")
    parts, compute = row.totals.compute_total_seconds, row.totals.ledger_total_seconds.get(COMPUTE, 0.0)
    if parts and compute:
        lines.append(compute_shares(parts, compute))
    lines += filter(None, [memory_line(row.life.log, over=not row.is_running)])
    for stall in reversed(row.stalls[-_MAX_STALLS:]):
        lines += ["", *stall_section(stall)]
    return lines


def _facts(row: RankRow) -> list[str]:
    """The figures of an opened rank, a line for each topic that is known."""
    pace = row.per_second("steps")
    times, resident = row.step_seconds or {}, row.host.process_resident_memory_bytes
    takes = ", ".join(f"{name} {duration(times.get(name))}" for name in ("p50", "p95", "p99", "max"))
    rates = ((name, row.per_second(name)) for name in _COUNTED)
    topics = {
        "now": [row.now_in.replace("_", " ")],
        "steps": [
            f"{_steps(row)}, {'-' if pace is None else f'{pace:.2f}'} a second",
            f"in the log's newest window a step takes {takes}" if times else "",
        ],
        "wait": [f"{percent(row.wait_ratio)} of the training loop was exposed wait"],
        "throughput": [f"{plain_number(rate, 4)} {name} a second" for name, rate in rates if rate is not None],
        "GPU": _gpu(row.gpu),
        "memory": [] if resident is None else [f"resident {binary_size(resident)}"],
    }
    return [f"{topic:<10} {', '.join(filter(None, parts))}" for topic, parts in topics.items() if any(parts)]


def _steps(row: RankRow) -> str:
    steps, about = row.totals.steps_total, row.totals.estimated_steps_total
    return f"~{about}" if about is not None else "-" if steps is None else str(steps)


def _gpu(gpu: GpuLine) -> list[str]:
    busy, active, used, total = (
        gpu.utilization_ratio, gpu.sm_active_ratio, gpu.memory_used_bytes, gpu.memory_total_bytes,
    )  # fmt: skip
    if busy is None and used is None:
        return []
    return [
        gpu.name or "",
        "" if busy is None else f"busy {percent(busy, 0)}",
        "" if active is None else f"SMs active {percent(active, 0)}",
        "" if used is None or total is None else f"memory {binary_size(used)} of {binary_size(total)}",
        "" if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
        "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f} C",
    ]


def printed(view: JobView, now: float) -> str:
    """All of it as plain text, with the worst ranks."""
    lines = [view.verdict]
    if view.rows:
        by_rank = chosen(view.rows, "rank")
        rows = by_rank if len(by_rank) <= MAX_ROWS else chosen(view.rows, WORST)[:MAX_ROWS]
        lines += [summary(view, now), *filter(None, [view.note]), *_table(rows, whole_run=not view.running)]
        if len(rows) < len(by_rank):
            lines.append(f"the worst {len(rows)} of {len(by_rank)} ranks")
        lines += newest_stall(view, now)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _table(rows: Sequence[RankRow], *, whole_run: bool) -> list[str]:
    cells: list[list[str]] = []
    for column in columns(rows, whole_run=whole_run):
        texts = (shortened(text, column.width) for text in (column.name, *map(column.text, rows)))
        cells.append(
            [text.rjust(column.width) if column.justify == "right" else text.ljust(column.width) for text in texts]
        )
    return ["  ".join(line) for line in zip(*cells, strict=True)]
