"""The view of a job and its ranks: their states, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

from msgspec import structs

from telemetry.diagnosis.cores import CoreUse, cores_missing
from telemetry.diagnosis.findings import by_weight
from telemetry.diagnosis.verdict import BAD, UNSURE, RunFacts, judge
from telemetry.log.lines import GpuLine, HostLine, TotalsLine
from telemetry.log.process import unix
from telemetry.model.records import DATA_WAIT, STARTUP
from telemetry.report.attempt_list import FAILED, FINISHED, KILLED, RUNNING, Attempt
from telemetry.report.summary import MAX_RANKS, hang_of, waits_of
from telemetry.util.words import named, one_line, rough_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from telemetry.diagnosis.findings import Finding
    from telemetry.diagnosis.verdict import RankWaits, Verdict
    from telemetry.log.lines import Suspect
    from telemetry.model.records import StallRecord
    from telemetry.report.attempt_list import Life
    from telemetry.report.contract import HangRecord


class State(Enum):
    """The states of a rank, the worst first."""

    GONE = "gone"
    FAILED = "failed"
    STUCK = "stuck"
    SILENT = "silent"
    STALLED = "stalled"
    STARVED = "starved"
    """It waits for data, but no stall is open: not yet, or no longer."""
    WAITING = "waiting"
    """It waits for another rank, which causes the delay."""
    STARTING = "starting"
    OK = "ok"
    FINISHED = "finished"


STATES: Final = tuple(State)

SILENT_SECONDS: Final = 15.0
"""A rank without a sign of life for this time is shown as silent. Heartbeats come every second or two."""

RECENT_SECONDS: Final = 60.0
"""Length of the last minute."""


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank on the screen.

    Attributes:
        life: its process, as the report sees it: its log, its newest totals, and how it ended.
        silent_seconds: time since its newest sign of life, by this machine's clock.
        recent: totals of the last minute, empty if not known. ``live``: the same up to a newer moment, perhaps without
            exposed wait.
        now_in: its present category of the ledger; empty if not known.
        gpu, host: its newest readings. ``step_seconds``: percentiles of its steps in the newest window.
        stalls: the stalls of ``report --json``, the newest last.
        state: its state. ``since``: Unix time at which it began, None if not known. ``finding``: it in a few words.
    """

    life: Life
    silent_seconds: float = 0.0
    recent: TotalsLine = TotalsLine()
    live: TotalsLine = TotalsLine()
    now_in: str = ""
    gpu: GpuLine = GpuLine()
    host: HostLine = HostLine()
    step_seconds: dict[str, float] | None = None
    stalls: tuple[StallRecord, ...] = ()
    state: State = State.OK
    since: float | None = None
    finding: str = "ok"

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.life.rank

    @property
    def node(self) -> str:
        """The name of the rank's node."""
        return self.life.log.head.node or ""

    @property
    def key(self) -> tuple[int, str, int]:
        """A key that no other rank has, even if two processes claim one number."""
        return self.rank, self.node, self.life.log.pid

    @property
    def totals(self) -> TotalsLine:
        """Its newest totals of the whole run."""
        return self.life.totals

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.life.how == RUNNING

    @property
    def is_alive(self) -> bool:
        """Whether it runs, and is not silent: otherwise its newest readings are no longer true."""
        return self.is_running and self.state != State.SILENT

    @property
    def in_trouble(self) -> bool:
        """Whether a person should look at it. A rank that waits for another one is all right."""
        return STATES.index(self.state) < STATES.index(State.WAITING)

    def per_second(self, what: Literal["steps", "samples", "tokens"]) -> float | None:
        """A rate over the last minute without startup; None if it is not known."""
        totals = self.live if what == "steps" else self.recent
        count: int | None = getattr(totals, f"{what}_total")
        seconds = totals.wall_seconds - totals.ledger_total_seconds.get(STARTUP, 0.0)
        return count / seconds if self.is_alive and seconds > 0 and count is not None else None

    @property
    def wait_ratio(self) -> float | None:
        """The share of the training loop of the last minute that was exposed wait; None if it was not measured."""
        ratio = waits_of(self.life.log, self.recent if self.is_running else self.totals).exposed_ratio
        return None if ratio is None else min(1.0, ratio)

    @property
    def open_stall(self) -> StallRecord | None:
        """The stall that is open; None without one."""
        return self.stalls[-1] if self.stalls and self.stalls[-1].closed is None else None


def _with_state(row: RankRow, now: float, hang: HangRecord | None = None, waiting: Collection[int] = ()) -> RankRow:
    """Add the state of a rank, and leave out readings that are no longer true.

    ``hang``: why the job hangs. ``waiting``: the ranks that wait in it.
    """
    suspect = next((each for each in hang.suspects if each.rank == row.rank), None) if hang else None
    hung_since = unix(hang.since or "") if hang else None
    state, since, finding = _state(row, now, suspect, hung_since, waits=row.rank in waiting)
    found = replace(row, state=state, since=since, finding=finding)
    return found if found.is_alive else replace(found, now_in="", gpu=GpuLine(), host=HostLine())


def _state(  # noqa: PLR0911, one return for each state
    row: RankRow, now: float, suspect: Suspect | None, hung_since: float | None, *, waits: bool
) -> tuple[State, float | None, str]:
    if not row.is_running:
        return _end(row, now)
    stall = row.open_stall
    opened = None if stall is None else unix(stall.opened or "")
    if suspect is not None:
        return State.STUCK, hung_since, f"held up: {suspect.doing or 'others wait'}"
    if waits:
        return State.WAITING, hung_since, "waits for others"
    if stall is not None and (category := stall.details.stuck_in) is not None:
        return State.STUCK, opened, f"stuck in {category.replace('_', ' ')}"
    if row.silent_seconds > SILENT_SECONDS:
        return State.SILENT, row.life.end, f"silent for {rough_duration(row.silent_seconds)}"
    if stall is not None and stall.cause == "straggler" and (slow := stall.details.straggler_rank) is not None:
        return State.WAITING, opened, f"waits for rank {slow}"
    if stall is not None:
        return State.STALLED, opened, stall.cause
    if not (row.totals.steps_total or row.totals.waits_unseen):
        return State.STARTING, unix(row.life.log.started), "no step yet"
    if (row.wait_ratio or 0.0) >= row.life.log.head.settings.stall_enter_ratio:
        return State.STARVED, None, "waits for data"
    return State.OK, None, "ok"


def _end(row: RankRow, now: float) -> tuple[State, float, str]:
    end, at = row.life.log.end, row.life.end
    if row.life.how == FINISHED:
        return State.FINISHED, at, "finished"
    if row.life.how == FAILED:
        return State.FAILED, at, f"failed: {end.exception or f'status {end.exit_status or 0:.0f}'}"
    return State.GONE, at, f"gone for {rough_duration(max(0.0, now - at))}"


# -- the job -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobView:
    """All that is shown.

    Attributes:
        verdict: the first line. ``level``: `GOOD`, `BAD` or `UNSURE`.
        rows: the ranks, in no order.
        note: what is not known of the job; empty without anything.
        seen: Unix time of this state.
    """

    verdict: str
    seen: float
    level: str = UNSURE
    run: str = ""
    rows: tuple[RankRow, ...] = ()
    note: str = ""

    @property
    def running(self) -> bool:
        """Whether a rank has not ended."""
        return any(row.is_running for row in self.rows)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len({row.node for row in self.rows})


def running_view(rows: Sequence[RankRow], now: float) -> JobView:
    """The view of a job of which a process runs, with the verdict of the last minute."""
    ended = [row.life for row in rows if row.life.how in {FAILED, KILLED}]
    end = Attempt(0, ended).run_end if ended else None
    hang = hang_of([row.life.log for row in rows])
    stalls = [(stall, row.life.log.ended) for row in rows if (stall := row.open_stall) and row.life.how != KILLED]
    recent = [(row, row.recent if row.recent.is_whole else row.totals) for row in rows]
    ledger: Counter[str] = Counter()
    for _, totals in recent:
        ledger.update(totals.ledger_total_seconds)
    facts = RunFacts(
        ranks=[_recent_waits(row, totals) for row, totals in recent],
        stalls=[stall for stall, _ in stalls],
        hang=hang.verdict if hang is not None and hang.waiting else "",
        stuck=[(stall, over) for stall, over in stalls if stall.details.stuck_in is not None],
        end=end,
        ledger=ledger,
        findings=sorted(filter(None, (_short_of_cores(row, totals) for row, totals in recent)), key=by_weight),
    )
    if any(row.totals.steps_total or row.totals.waits_unseen for row in rows):
        most = Counter(row.now_in for row in rows if row.now_in).most_common(1)
        facts = replace(facts, last_seconds=RECENT_SECONDS, most_in=most[0][0] if most else "")
    verdict = judge(facts)
    level = BAD if end is not None else verdict.level
    waiting = {rank for group in hang.waiting for rank in group.ranks} if hang else set()
    shown = tuple(_with_state(row, now, hang, waiting) for row in rows)
    return JobView(_in_lines(verdict), now, level, rows[-1].life.log.run, shown, _missing(rows))


def _recent_waits(row: RankRow, totals: TotalsLine) -> RankWaits:
    waited = bool(row.totals.ledger_total_seconds.get(DATA_WAIT))  # a minute of long steps may have no wait
    return replace(waits_of(row.life.log, totals), waited_before=waited)


def _short_of_cores(row: RankRow, totals: TotalsLine) -> Finding | None:
    """That its training thread lacked a core in the last minute, because other processes use them."""
    cpu = totals.cpu_total_seconds or {}
    known = cpu.get("known", 0.0)
    others = cpu.get("others", 0.0) / known if known > 0 else 0.0
    found = cores_missing(CoreUse(cpu.get("thread_delay", 0.0), totals.wall_seconds, others))
    return None if found is None else structs.replace(found, rank=row.rank)


def ended_view(rows: Sequence[RankRow], now: float, verdict: Verdict) -> JobView:
    """The view of a run that has ended, with the report's verdict."""
    if any(row.life.how != FINISHED for row in rows):
        text, level = f"The run has ended. {_in_lines(verdict)}", BAD
    else:
        who = "the rank has" if len(rows) == 1 else f"all {len(rows)} ranks have"
        when = clock(max(row.life.end for row in rows))
        text, level = f"The run has ended: {who} finished, at {when}. {_in_lines(verdict)}", verdict.level
    shown = tuple(_with_state(row, now) for row in rows)
    return JobView(text, now, level, rows[-1].life.log.run, shown)


def _in_lines(verdict: Verdict) -> str:
    return "\n".join(one_line(line) for line in verdict.lines)


def _missing(rows: Sequence[RankRow]) -> str:
    size = max(row.life.log.head.world_size or 0 for row in rows)
    unknown = set(range(min(size, MAX_RANKS))) - {row.rank for row in rows}
    return f"nothing is known of {named(unknown)}: the job has {size} ranks" if unknown else ""


def clock(unix_seconds: float) -> str:
    """A time of day, such as ``03:12:45 UTC``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=timezone.utc):%H:%M:%S} UTC"
