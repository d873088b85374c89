"""One rank as the live view shows it, made from what a source knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.hang_records import ENDED, LEFT
from telemetry.core.run_verdict import STARVED_RATIO
from telemetry.records import COMPUTE, DATA_WAIT, STARTUP
from telemetry.report.attempts import FAILED, FINISHED, RUNNING, unix
from telemetry.report.summary import stalls_of
from telemetry.util.text import rough_duration

if TYPE_CHECKING:
    from telemetry.core.hang_records import HangState
    from telemetry.report.process_log import ProcessLog

GONE: Final = "gone"
STUCK: Final = "stuck"
SILENT: Final = "silent"
STALLED: Final = "stalled"
STARVED: Final = "starved"
"""It waits for data, and no stall is open: not yet, or no longer."""

WAITING: Final = "waiting"
"""For another rank, which is to blame."""

STARTING: Final = "starting"
OK: Final = "ok"

STATES: Final = (GONE, FAILED, STUCK, SILENT, STALLED, STARVED, WAITING, STARTING, OK, FINISHED)
"""The worst first."""

SILENT_SECONDS: Final = 15.0
"""A rank without a sign of life for this time is shown as silent. Heartbeats come every second or two."""


@dataclass(slots=True)
class RankFacts:
    """What a source knows of one rank.

    Attributes:
        log: its log so far: head, totals of the whole run, stalls, hangs.
        how: how it ended, or `RUNNING`.
        seen: Unix time of its newest sign of life. ``silent_seconds``: how long ago that is, by this machine's clocks.
        totals: of the whole run, as new as they are known. ``recent``: those of the last minute, empty if not known.
            ``live``: the same up to a newer moment, perhaps without exposed wait.
        now_in: the category of the ledger that it is in; empty if not known. ``where``: the line of code.
        figures: its newest GPU and memory readings, by the names of log fields.
        step_seconds: percentiles of its steps in the newest window.
        hang: its state while the job hangs.
    """

    log: ProcessLog
    how: str = RUNNING
    seen: float = 0.0
    silent_seconds: float = 0.0
    totals: dict[str, Any] = field(default_factory=dict)
    recent: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    now_in: str = ""
    where: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    hang: HangState | None = None

    @property
    def node(self) -> str:
        """Where it runs."""
        return str(self.log.head.get("node") or "")


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank.

    Attributes:
        state: from `STATES`. ``since``: Unix time from which it is in it, None if not known.
        finding: the state in a few words.
        now_in: the category of the ledger that it is in; empty if not known or no longer. ``where``: the line of code.
        steps: that have ended, in the whole run; None before the first reading.
        steps_per_second, samples_per_second, tokens_per_second: over the last minute, without startup.
        wait_ratio: exposed wait of its training loop over the last minute; None if not known.
        recent_ledger: seconds by category over the last minute. ``ledger``: over the whole run.
        figures, step_seconds: as in `RankFacts`.
        stalls: as ``report --json`` has them, the newest last.
        memory: how it grows, as the log has it.
    """

    rank: int
    node: str
    pid: int
    state: str
    since: float | None
    finding: str
    now_in: str = ""
    where: str = ""
    steps: int | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    wait_ratio: float | None = None
    recent_ledger: dict[str, float] = field(default_factory=dict)
    ledger: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    stalls: tuple[dict[str, Any], ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, int]:
        """Tells it from other rows, also where two processes claim one rank."""
        return self.rank, self.node, self.pid

    @property
    def in_trouble(self) -> bool:
        """Whether a person should look at it. A rank that waits for another one is all right."""
        return STATES.index(self.state) < STATES.index(WAITING)


def row_of(
    facts: RankFacts, now: float, suspects: dict[int, str] | None = None, waits: frozenset[int] = frozenset()
) -> RankRow:
    """The row of a rank.

    Args:
        facts: of this rank.
        now: Unix time.
        suspects: while the job hangs, the ranks that the others wait for, and what each does.
        waits: the ranks that wait for them.
    """
    log, live = facts.log, facts.live
    stalls = tuple(stalls_of(log)) if log.stalls else ()
    state, since, finding = _state(facts, stalls, now, suspects or {}, waits)
    running = facts.how == RUNNING and state != SILENT
    return RankRow(
        rank=log.rank,
        node=facts.node,
        pid=log.pid,
        state=state,
        since=since,
        finding=finding,
        now_in=facts.now_in if running else "",
        where=facts.where if running else "",
        steps=facts.totals.get("steps_total"),
        steps_per_second=_rate(live, "steps_total") if running else None,
        samples_per_second=_rate(facts.recent, "samples_total") if running else None,
        tokens_per_second=_rate(facts.recent, "tokens_total") if running else None,
        wait_ratio=wait_ratio(facts.recent) if facts.how == RUNNING else wait_ratio(facts.totals),
        recent_ledger=live.get("ledger_total_seconds", {}),
        ledger=facts.totals.get("ledger_total_seconds", {}),
        figures=facts.figures if running else {},
        step_seconds=facts.step_seconds,
        stalls=stalls,
        memory=facts.totals.get("memory", {}),
    )


def _rate(totals: dict[str, Any], name: str) -> float | None:
    """How many per second, without startup; None if it is not known."""
    wall = totals.get("wall_seconds", 0.0) - totals.get("ledger_total_seconds", {}).get(STARTUP, 0.0)
    return totals[name] / wall if wall > 0 and name in totals else None


def wait_ratio(totals: dict[str, Any]) -> float | None:
    """The share of the training loop that was exposed wait; None if it was not measured."""
    exposed, ledger = totals.get("exposed_wait_total_seconds"), totals.get("ledger_total_seconds", {})
    loop = ledger.get(DATA_WAIT, 0.0) + ledger.get(COMPUTE, 0.0)
    return min(1.0, exposed / loop) if exposed is not None and loop > 0 else None


def open_stall(stalls: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
    """The stall that is open."""
    return stalls[-1] if stalls and stalls[-1]["closed"] is None else None


def _state(  # noqa: PLR0911, one return for each state
    facts: RankFacts,
    stalls: tuple[dict[str, Any], ...],
    now: float,
    suspects: dict[int, str],
    waits: frozenset[int],
) -> tuple[str, float | None, str]:
    if facts.how != RUNNING:
        return _end(facts, now)
    if facts.log.rank in suspects:
        since = None if facts.hang is None else now - facts.hang.seconds
        return STUCK, since, f"held up: {suspects[facts.log.rank]}"
    stall = open_stall(stalls)
    if facts.log.rank in waits:
        return WAITING, None if stall is None else unix(str(stall["opened"])), "waits for others"
    if stall is not None and "stuck_in" in stall["evidence"]:
        since = unix(str(stall["opened"]))
        return STUCK, since, f"stuck in {str(stall['evidence']['stuck_in']).replace('_', ' ')}"
    if facts.hang is not None and facts.hang.stuck and facts.hang.doing not in {LEFT, ENDED}:
        since = now - facts.hang.seconds
        if facts.hang.waits:
            return WAITING, since, "waits for others"
        return STUCK, since, f"stuck in {facts.hang.doing.replace('_', ' ')}"
    if facts.silent_seconds > SILENT_SECONDS:
        return SILENT, facts.seen, f"silent for {rough_duration(facts.silent_seconds)}"
    if stall is not None:
        slow = stall["evidence"].get("straggler_rank")
        opened = unix(str(stall["opened"]))
        if stall["cause"] == "straggler" and isinstance(slow, int):
            return WAITING, opened, f"waits for rank {slow}"
        return STALLED, opened, str(stall["cause"])
    if not facts.totals.get("steps_total"):
        return STARTING, unix(facts.log.started), "no step yet"
    enter = facts.log.head.get("settings", {}).get("stall_enter_ratio", STARVED_RATIO)
    if (wait_ratio(facts.recent) or 0.0) >= enter:
        return STARVED, None, "waits for data"
    return OK, None, "ok"


def _end(facts: RankFacts, now: float) -> tuple[str, float, str]:
    if facts.how == FINISHED:
        return FINISHED, facts.seen, "finished"
    if facts.how == FAILED:
        why = facts.log.end.get("exception") or f"status {facts.log.end.get('exit_status', 0):.0f}"
        return FAILED, facts.seen, f"failed: {why}"
    return GONE, facts.seen, f"gone for {rough_duration(max(0.0, now - facts.seen))}"
