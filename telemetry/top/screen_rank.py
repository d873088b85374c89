"""One rank, opened: all that is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.records import CATEGORIES
from telemetry.report.report_text import stall_section
from telemetry.top.live_verdict import clock
from telemetry.top.rank_table import STYLES
from telemetry.top.screen_text import SHORT
from telemetry.util.text import binary_size, duration, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from telemetry.top.rank_row import RankRow
    from telemetry.top.screen_text import Charset, ScreenLine

_STALLS: Final = 8


def rank_lines(row: RankRow, chars: Charset, width: int, now: float) -> list[ScreenLine]:
    """The lines on one rank, the newest stall first. There may be more than fit."""
    since = "" if row.since is None else f", since {clock(row.since)} ({rough_duration(max(0.0, now - row.since))})"
    pid = f", pid {row.pid}" if row.pid else ""
    head = f"rank {row.rank} on {row.node or 'an unknown node'}{pid}: {row.finding}{since}"
    lines: list[ScreenLine] = [((line, STYLES[row.state]),) for line in chars.wrapped(head, width, 3)]
    texts = []
    if row.now_in:
        where = f", at {row.where}" if row.where else ""
        texts.append(f"now        {row.now_in.replace('_', ' ')}{where}")
    steps = "-" if row.steps is None else str(row.steps)
    rate = "-" if row.steps_per_second is None else f"{row.steps_per_second:.2f}"
    times = ", ".join(f"{name} {duration(row.step_seconds.get(name))}" for name in ("p50", "p95", "p99", "max"))
    texts += [f"steps      {steps}, {rate} a second; a step takes {times}" if row.step_seconds else
              f"steps      {steps}, {rate} a second",
              f"wait       {percent(row.wait_ratio)} of the training loop was exposed wait"]  # fmt: skip
    texts += [*_throughput(row), *_gpu(row), *_memory(row), ""]
    lines += [((chars.cell(text, width), ""),) for text in texts]
    lines += _ledgers(row, chars, width)
    for stall in reversed(row.stalls[-_STALLS:]):
        lines.append(())
        for each in stall_section(stall):
            indent = len(each) - len(each.lstrip())
            style = "warn" if indent == 0 and stall["closed"] is None else ""
            lines += [
                ((" " * indent + part, style),) for part in chars.wrapped(each.strip(), max(8, width - indent), 6)
            ]
    return lines


def _throughput(row: RankRow) -> list[str]:
    rates = ((row.samples_per_second, "samples"), (row.tokens_per_second, "tokens"))
    known = [f"{plain_number(rate, 4)} {name} a second" for rate, name in rates if rate is not None]
    return [f"throughput {', '.join(known)}"] if known else []


def _gpu(row: RankRow) -> list[str]:
    get = row.figures.get
    if get("utilization_ratio") is None and get("memory_used_bytes") is None:
        return []
    used, total = get("memory_used_bytes"), get("memory_total_bytes")
    parts = [
        str(get("name") or ""),
        f"busy {percent(get('utilization_ratio'), 0)}" if get("utilization_ratio") is not None else "",
        f"SMs active {percent(get('sm_active_ratio'), 0)}" if get("sm_active_ratio") is not None else "",
        f"memory {binary_size(used)} of {binary_size(total)}" if used is not None and total is not None else "",
        f"{get('power_watts'):.0f} W" if get("power_watts") is not None else "",
        f"{get('temperature_celsius'):.0f} C" if get("temperature_celsius") is not None else "",
    ]
    return [f"GPU        {', '.join(part for part in parts if part)}"]


def _memory(row: RankRow) -> list[str]:
    resident = row.figures.get("process_resident_memory_bytes")
    grows, ends = row.memory.get("growth_bytes_per_hour"), row.memory.get("exhausted_in_seconds")
    texts = [] if resident is None else [f"resident {binary_size(resident)}"]
    if grows:
        texts.append(f"{row.memory.get('where', '')} grows by {binary_size(grows)} an hour".strip())
    if ends is not None:
        texts.append(f"exhausted in {rough_duration(ends)}")
    return [f"memory     {', '.join(texts)}"] if texts else []


def _ledgers(row: RankRow, chars: Charset, width: int) -> list[ScreenLine]:
    lines: list[ScreenLine] = [(("ledger          last minute     whole run", "strong"),)]
    recent, whole = sum(row.recent_ledger.values()), sum(row.ledger.values())
    for category in CATEGORIES:
        now, all_ = row.recent_ledger.get(category, 0.0), row.ledger.get(category, 0.0)
        shares = (percent(now / recent) if recent else "-", percent(all_ / whole) if whole else "-")
        size = round(max(0, min(30, width - 46)) * now / recent) if recent else 0
        bar = chars.bar({category: now}, size) if size else ()
        lines.append(((f"{SHORT[category]:<12}   {shares[0]:>12}{shares[1]:>14}   ", ""), *bar))
    return lines
