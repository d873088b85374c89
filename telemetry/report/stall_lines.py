"""The lines of code in the evidence of a stall, as the log tells them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from telemetry.report.process_log import ProcessLog

_FIELDS: Final = ("file", "line", "function", "calls", "share_ratio")
_MAX_LINES: Final = 10


def with_whole_lines(evidence: dict[str, Any]) -> dict[str, Any]:
    """The evidence. A line of code whose place is damaged is left out. ``calls`` is null if it called no function."""
    if "lines" not in evidence:
        return evidence
    found = [dict.fromkeys(_FIELDS) | {k: v for k, v in line.items() if k in _FIELDS} for line in evidence["lines"]]
    whole = [line for line in found if None not in {line["file"], line["line"], line["share_ratio"]}]
    return evidence | {"lines": whole[:_MAX_LINES]}


def lines_of_slow_ranks(stalls: list[dict[str, Any]], processes: Iterable[ProcessLog]) -> list[dict[str, Any]]:
    """The stalls. Those of ranks that waited for a slow rank get the lines of that rank's steps.

    A rank that is held up spends its time in a collective, so its own lines tell nothing.
    """
    slow = {process.rank: process.slow_steps for process in processes if process.slow_steps}
    for stall in stalls:
        told = slow.get(stall["evidence"].get("straggler_rank"), ())
        after = [line for line in told if str(line.get("time", "")) >= str(stall["opened"])]
        before_close = [line for line in after if not stall["closed"] or str(line.get("time")) <= stall["closed"]]
        for line in (before_close or after[:1])[-1:]:
            lines = with_whole_lines(line.get("evidence", {}))
            stall["evidence"] |= {name: lines[name] for name in _TAKEN if name in lines}
    return stalls


_TAKEN: Final = ("lines", "lines_of", "line_samples", "line_verdict")
