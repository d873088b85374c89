"""The first line: whether the job is all right now, and which rank is to blame. In the words of the report."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.core.rank_ranges import named
from telemetry.core.run_verdict import HANGS, HEALTHY, HUNG, NO_STEPS, STALLED, STARVED, STUCK
from telemetry.records import DATA_WAIT
from telemetry.report.attempts import FAILED, FINISHED, KILLED, RUNNING
from telemetry.report.process_log import ProcessLog
from telemetry.report.summary import judged
from telemetry.top.recent_totals import SECONDS
from telemetry.util.text import rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.run_verdict import JudgedRun
    from telemetry.top.rank_row import RankFacts

GOOD: Final = "good"
BAD: Final = "bad"
UNSURE: Final = "unsure"

_LEVELS: Final = {HEALTHY: GOOD} | dict.fromkeys((STARVED, STALLED, STUCK, HANGS, HUNG), BAD)
"""By the kind of a verdict; the others are `UNSURE`."""

_RANK: Final = re.compile(r"\b[Rr]ank (\d+)\b(?! on )")


class Verdict(NamedTuple):
    """What the first line says, and how it is meant: `GOOD`, `BAD` or `UNSURE`."""

    text: str
    level: str


def verdict_now(facts: Sequence[RankFacts], now: float, whole: JudgedRun | None = None) -> Verdict:
    """The verdict on a run.

    Args:
        facts: of the processes that no later one has replaced, at least one.
        now: Unix time.
        whole: the report's verdict, if the run has ended and its logs can be read.
    """
    said = _ended(facts, now, whole) if all(each.how != RUNNING for each in facts) else _going_on(facts, now)
    nodes = {each.log.rank: each.node for each in facts}
    if len(set(nodes.values())) > 1:
        said = said._replace(text=_RANK.sub(lambda found: _on_node(found, nodes), said.text, count=1))
    return said


def clock(unix_seconds: float) -> str:
    """A time of day, such as ``03:12:45 UTC``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=timezone.utc):%H:%M:%S} UTC"


def _going_on(facts: Sequence[RankFacts], now: float) -> Verdict:
    kind, text = judged([recent_log(each) for each in facts])
    if kind == NO_STEPS and any(each.totals.get("steps_total") for each in facts):
        doing = Counter(each.now_in for each in facts if each.now_in).most_common(1)
        in_ = f"; most ranks are in {doing[0][0].replace('_', ' ')}" if doing else ""
        text = f"No training step has ended in the last {rough_duration(SECONDS)}{in_}."
    if kind in {HANGS, STUCK}:
        return Verdict(text, BAD)
    ended = _who_ended(facts, now)
    return Verdict(f"{ended} {text}", BAD) if ended else Verdict(text, _LEVELS.get(kind, UNSURE))


def _ended(facts: Sequence[RankFacts], now: float, whole: JudgedRun | None) -> Verdict:
    kind, said = whole or judged(
        [ProcessLog(each.log.rank, each.log.pid, each.log.head, each.totals, each.log.last_time, each.log.ended,
                    stalls=each.log.stalls, hangs=each.log.hangs) for each in facts]
    )  # fmt: skip
    level = _LEVELS.get(kind, UNSURE)
    if whole is None and level == GOOD:
        level = UNSURE  # stalls that are over may not be known
    if any(each.how != FINISHED for each in facts):
        return Verdict(f"The run has ended. {_who_ended(facts, now)} {said}", BAD)
    who = "the rank has" if len(facts) == 1 else f"all {len(facts)} ranks have"
    return Verdict(f"The run has ended: {who} finished, at {clock(max(each.seen for each in facts))}. {said}", level)


def _who_ended(facts: Sequence[RankFacts], now: float) -> str:
    """The rank that failed first, and those that are gone; empty without any. Others may fail because of it."""
    failed = [each for each in facts if each.how == FAILED]
    gone = [each for each in facts if each.how == KILLED]
    own = [each for each in failed if not each.log.end.get("lost_peer")]
    text = ""
    if own or (failed and not gone):
        first = min(own or failed, key=lambda each: each.seen)
        end = first.log.end
        why = end.get("exception") or f"exit status {end.get('exit_status', 0):.0f}"
        more = f"; {len(failed) - 1} more failed" if len(failed) > 1 else ""
        text = f"Rank {first.log.rank} failed at {clock(first.seen)} with {why}{more}."
    if gone:
        first = min(gone, key=lambda each: each.seen)
        who = named(each.log.rank for each in gone)
        ago = rough_duration(max(0.0, now - first.seen))
        said = f"{who[:1].upper()}{who[1:]} did not end by {'itself' if len(gone) == 1 else 'themselves'}"
        text += f"{' ' if text else ''}{said}; the newest sign of life is of {clock(first.seen)}, {ago} ago."
    return text


def recent_log(facts: RankFacts) -> ProcessLog:
    """A rank over the last minute, as the report takes it: only the stall that is open."""
    log, totals = facts.log, facts.recent or facts.totals
    gone = facts.how == KILLED
    ledger = totals.get("ledger_total_seconds", {})
    if not ledger.get(DATA_WAIT) and facts.totals.get("ledger_total_seconds", {}).get(DATA_WAIT):
        # No wait in a minute of long steps. The report takes no wait at all as batches that it cannot see.
        totals = totals | {"ledger_total_seconds": ledger | {DATA_WAIT: 1e-9}}
    return ProcessLog(
        log.rank,
        log.pid,
        log.head,
        totals,
        log.last_time,
        log.ended,
        stalls=[] if gone else open_lines(log),
        hangs=log.hangs,
    )


def open_lines(log: ProcessLog) -> list[dict[str, object]]:
    """The lines of the stall that is open."""
    lines: list[dict[str, object]] = []
    for line in log.stalls:
        if line.get("event") == "stall_open":
            lines = [line]
        elif line.get("event") == "stall_close":
            lines = []
        else:
            lines.append(line)
    return lines


def _on_node(found: re.Match[str], nodes: dict[int, str]) -> str:
    node = nodes.get(int(found[1]))
    return f"{found[0]} on {node}" if node else found[0]
