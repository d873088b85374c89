"""The newest stall of the job, with its advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.report.attempts import unix
from telemetry.report.report_text import advice_lines
from telemetry.top.live_verdict import clock
from telemetry.util.text import rough_duration

if TYPE_CHECKING:
    from telemetry.top.job_view import JobView
    from telemetry.top.screen_text import Charset, ScreenLine


def stall_lines(view: JobView, chars: Charset, width: int, most: int, now: float) -> list[ScreenLine]:
    """The newest stall, at most ``most`` lines; one line if there was none."""
    found = view.newest_stall()
    if found is None:
        return [(("no stall in what was read", "dim"),)]
    row, stall = found
    opened, closed = unix(str(stall["opened"])), unix(str(stall["closed"] or ""))
    if stall["closed"] is None:
        age = (
            ""
            if opened is None
            else f" for {rough_duration(max(0.0, now - opened))} (since {clock(opened).removesuffix(' UTC')})"
        )
        when, style = f"open{age}", "warn"
    else:
        when, style = f"{_clock(opened)} to {_clock(closed)}", "dim"
    on = f" on {row.node}" if row.node and view.nodes > 1 else ""
    head = f"newest stall: rank {row.rank}{on}: {stall['cause']}, {when}"
    lines: list[ScreenLine] = [((chars.cell(head, width), style),)]
    for advice in advice_lines(stall["advice"]):
        room = most - len(lines)
        if room <= 0:
            break
        lines += [((f"  {line}", ""),) for line in chars.wrapped(advice.strip(), width - 2, room)]
    line = stall["evidence"].get("line_verdict")
    if isinstance(line, str) and len(lines) < most:
        lines += [((f"  {each}", ""),) for each in chars.wrapped(line, width - 2, most - len(lines))]
    return lines


def _clock(unix_seconds: float | None) -> str:
    return "-" if unix_seconds is None else clock(unix_seconds)
