"""The view of a job and its ranks: states, the verdict, the order of the ranks.

`run_folder` makes a `RankRow` of each rank; `job_view` adds its state and makes a `JobView` of them.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from msgspec import structs

from telemetry.diagnosis.hangs import ENDED, LEFT
from telemetry.diagnosis.verdict import BAD, GOOD, UNSURE, judge
from telemetry.log_lines import GpuLine, StallCloseLine, StallOpenLine, TotalsLine
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT, STARTUP
from telemetry.report.attempts import FAILED, FINISHED, KILLED, RUNNING, Attempt
from telemetry.report.process_log import ProcessLog, stalls_of, unix
from telemetry.report.summary import hang_of, run_facts
from telemetry.util.text import named, rough_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from telemetry.diagnosis.hangs import HangState
    from telemetry.diagnosis.verdict import RunEnd, Verdict
    from telemetry.log_lines import Heartbeat, StallLine
    from telemetry.records import StallRecord
    from telemetry.report.attempts import Life


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

_RECENT_STEPS: Final = 3
_RECENT_LONGEST_SECONDS: Final = 600.0
"""If steps are long, the last minute is longer until it has some steps, but at most this long."""

_SUMS: Final = (
    *("steps_total", "wall_seconds", "exposed_wait_total_seconds", "unseen_steps_total", "first_wait_seconds"),
    *("samples_total", "tokens_total"),
)
_SUMS_BY_NAME: Final = ("ledger_total_seconds", "stall_lost_total_seconds")
_KEPT: Final = (*_SUMS, *_SUMS_BY_NAME, "exposed_wait_absent")


# -- totals over the last minute ---------------------------------------------------------------------------------------


class RecentTotals:
    """The totals of one process over its last minute, as differences. ``from_start``: they are added from its start."""

    def __init__(self, *, from_start: bool) -> None:
        self._kept: deque[TotalsLine] = deque()
        self._from_start = from_start

    def add(self, totals: TotalsLine) -> None:
        """Add newer totals."""
        if not totals.ledger_total_seconds:
            return
        totals = TotalsLine(**{name: getattr(totals, name) for name in _KEPT})
        if self._kept and totals.wall_seconds < self._kept[-1].wall_seconds:
            self._kept.clear()  # another process
            self._from_start = False
        self._kept.append(totals)
        while len(self._kept) > 2 and _is_enough(difference(totals, self._kept[1])):
            self._kept.popleft()
            self._from_start = False

    def over(self, beat: Heartbeat | None = None) -> TotalsLine:
        """The totals over the minute up to the newest, or up to a heartbeat; empty if not known yet."""
        if not self._kept:
            return TotalsLine()
        now, before = self._kept[-1] if beat is None else beat.over(TotalsLine()), self._kept[0]
        if self._from_start:
            return now
        return difference(now, before) if now.wall_seconds > before.wall_seconds else TotalsLine()

    def newest(self) -> TotalsLine:
        """The difference of the last two totals; empty before there are two."""
        return difference(self._kept[-1], self._kept[-2]) if len(self._kept) > 1 else TotalsLine()


def difference(now: TotalsLine, before: TotalsLine) -> TotalsLine:
    """The difference of totals. A number that one of them lacks is absent; a sum by name begins at 0."""
    added: dict[str, Any] = {}
    for name in _SUMS:
        newer, older = getattr(now, name), getattr(before, name)
        added[name] = None if newer is None or older is None else newer - older
    for name in _SUMS_BY_NAME:
        values, old = getattr(now, name), getattr(before, name) or {}
        added[name] = values and {key: max(0.0, value - old.get(key, 0.0)) for key, value in values.items()}
    return TotalsLine(exposed_wait_absent=now.exposed_wait_absent, **added)


def _is_enough(added: TotalsLine) -> bool:
    seconds, steps = added.wall_seconds, added.steps_total or 0
    return seconds >= RECENT_SECONDS and (steps >= _RECENT_STEPS or seconds >= _RECENT_LONGEST_SECONDS)


def most_time(seconds: dict[str, float]) -> str:
    """The category of the ledger with most of the time; empty if none has any."""
    category = max(seconds, key=lambda name: seconds[name], default="")
    return category if category in CATEGORIES and seconds[category] > 0 else ""


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank on the screen.

    Attributes:
        log: its log so far: head, totals of the whole run, stalls, hangs. ``life``: what the report makes of it.
        how: how it ended, or `RUNNING`.
        seen: Unix time of its newest sign of life. ``silent_seconds``: time since then, by this machine's clocks.
        totals: newest totals of the whole run. ``recent``: those of the last minute, empty if not known.
            ``live``: those of the last minute up to a newer moment, perhaps without exposed wait.
        now_in: its present category of the ledger; empty if not known. ``where``: the line of code.
        gpu: its newest readings of the GPU. ``resident_memory_bytes``: of the training process.
        step_seconds: percentiles of its steps in the newest window.
        hang: its state while the job hangs.
        stalls: the stalls of ``report --json``, the newest last.
        state: its state. ``since``: Unix time at which it began, None if not known. ``finding``: it in a few words.
    """

    log: ProcessLog
    how: str = RUNNING
    seen: float = 0.0
    silent_seconds: float = 0.0
    totals: TotalsLine = TotalsLine()
    recent: TotalsLine = TotalsLine()
    live: TotalsLine = TotalsLine()
    now_in: str = ""
    where: str = ""
    gpu: GpuLine = GpuLine()
    resident_memory_bytes: float | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    hang: HangState | None = None
    life: Life | None = None
    stalls: tuple[StallRecord, ...] = ()
    state: State = State.OK
    since: float | None = None
    finding: str = "ok"

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.log.rank

    @property
    def node(self) -> str:
        """The name of the rank's node."""
        return self.log.head.node or ""

    @property
    def key(self) -> tuple[int, str, int]:
        """A key that no other rank has, even if two processes claim one number."""
        return self.rank, self.node, self.log.pid

    @property
    def in_trouble(self) -> bool:
        """Whether a person should look at it. A rank that waits for another one is all right."""
        return STATES.index(self.state) < STATES.index(State.WAITING)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, and is not silent: otherwise its newest readings are no longer true."""
        return self.how == RUNNING and self.state != State.SILENT

    def per_second(self, what: Literal["steps", "samples", "tokens"]) -> float | None:
        """A rate over the last minute without startup; None if it is not known."""
        totals = self.live if what == "steps" else self.recent
        count: int | None = getattr(totals, f"{what}_total")
        seconds = totals.wall_seconds - totals.ledger_total_seconds.get(STARTUP, 0.0)
        return count / seconds if self.is_alive and seconds > 0 and count is not None else None

    @property
    def wait_ratio(self) -> float | None:
        """The share of the training loop of the last minute that was exposed wait; None if it was not measured."""
        totals = self.recent if self.how == RUNNING else self.totals
        exposed, ledger = totals.exposed_wait_total_seconds, totals.ledger_total_seconds
        loop = ledger.get(DATA_WAIT, 0.0) + ledger.get(COMPUTE, 0.0)
        return min(1.0, exposed / loop) if exposed is not None and loop > 0 else None


def with_state(row: RankRow, now: float, suspects: dict[int, str], waits: Collection[int]) -> RankRow:
    """Add the stalls and the state of a rank, and leave out readings that are no longer true.

    ``suspects``: while the job hangs, the ranks that the others wait for, and their activities. ``waits``: the ranks
    that wait for them.
    """
    stalls = tuple(stalls_of(row.log)) if row.log.stalls else ()
    state, since, finding = _state(row, stalls, now, suspects, waits)
    found = replace(row, stalls=stalls, state=state, since=since, finding=finding)
    return found if found.is_alive else replace(found, now_in="", where="", gpu=GpuLine(), resident_memory_bytes=None)


def _state(  # noqa: PLR0911, one return for each state
    row: RankRow,
    stalls: tuple[StallRecord, ...],
    now: float,
    suspects: dict[int, str],
    waits: Collection[int],
) -> tuple[State, float | None, str]:
    hang = row.hang
    if row.how != RUNNING:
        return _end(row, now)
    hung_since = None if hang is None else now - hang.seconds
    if row.rank in suspects:
        return State.STUCK, hung_since, f"held up: {suspects[row.rank]}"
    stall = stalls[-1] if stalls and stalls[-1].closed is None else None
    opened = None if stall is None else unix(stall.opened or "")
    if row.rank in waits:
        return State.WAITING, opened, "waits for others"
    if stall is not None and stall.stuck_in is not None:
        return State.STUCK, opened, f"stuck in {stall.stuck_in.replace('_', ' ')}"
    if hang is not None and hang.stuck and hang.doing not in {LEFT, ENDED}:
        if hang.waits:
            return State.WAITING, hung_since, "waits for others"
        return State.STUCK, hung_since, f"stuck in {hang.doing.replace('_', ' ')}"
    if row.silent_seconds > SILENT_SECONDS:
        return State.SILENT, row.seen, f"silent for {rough_duration(row.silent_seconds)}"
    if stall is not None:
        if stall.cause == "straggler" and stall.straggler_rank is not None:
            return State.WAITING, opened, f"waits for rank {stall.straggler_rank}"
        return State.STALLED, opened, stall.cause
    if not row.totals.steps_total:
        return State.STARTING, unix(row.log.started), "no step yet"
    if (row.wait_ratio or 0.0) >= row.log.head.settings.stall_enter_ratio:
        return State.STARVED, None, "waits for data"
    return State.OK, None, "ok"


def _end(row: RankRow, now: float) -> tuple[State, float, str]:
    if row.how == FINISHED:
        return State.FINISHED, row.seen, "finished"
    if row.how == FAILED:
        why = row.log.end.exception or f"status {row.log.end.exit_status or 0:.0f}"
        return State.FAILED, row.seen, f"failed: {why}"
    return State.GONE, row.seen, f"gone for {rough_duration(max(0.0, now - row.seen))}"


# -- the job -----------------------------------------------------------------------------------------------------------

_RANK: Final = re.compile(r"\b[Rr]ank (\d+)\b(?! on )")


class Headline(NamedTuple):
    """The text of the first line, and its level: `GOOD`, `BAD` or `UNSURE`."""

    text: str
    level: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The whole contents of the screen.

    Attributes:
        rows: the ranks, in no order. ``nodes``: number of their nodes.
        notes: what is missing or cannot be read.
        seen: Unix time of this state.
        overdue: Unix time from which the next view is overdue; 0 if it is not known when it comes.
    """

    headline: Headline
    run: str = ""
    rows: tuple[RankRow, ...] = ()
    notes: tuple[str, ...] = ()
    running: bool = False
    seen: float = 0.0
    overdue: float = 0.0
    nodes: int = 0

    def newest_stall(self) -> tuple[RankRow, StallRecord] | None:
        """The newest open stall, or else the newest stall. Ranks that wait for another count only without others."""
        found = [(row, row.stalls[-1]) for row in self.rows if row.stalls]
        return max(
            found,
            key=lambda each: (each[1].closed is None, each[1].cause != "straggler", str(each[1].opened)),
            default=None,
        )


def waiting(text: str, now: float, notes: Sequence[str] = ()) -> JobView:
    """A view without ranks, while there is nothing to show."""
    return JobView(Headline(text, UNSURE), notes=tuple(notes), seen=now)


def job_view(rows: Sequence[RankRow], now: float, notes: Sequence[str] = (), whole: Verdict | None = None) -> JobView:
    """Make the view of a job from the processes that no later one has replaced, at least one.

    ``notes``: what cannot be read. ``whole``: the report's verdict, if the run has ended and its logs can be read.
    """
    running = any(each.how == RUNNING for each in rows)
    hang = hang_of([each.log for each in rows]) if running else None
    suspects = {s.rank: s.doing or "others wait" for s in hang.suspects if s.rank is not None} if hang else {}
    waits = {rank for group in hang.waiting for rank in group.ranks} if hang else set()
    return JobView(
        headline=_headline(rows, whole),
        run=rows[-1].log.run,
        rows=tuple(with_state(each, now, suspects, waits) for each in rows),
        notes=(*notes, *_missing(rows)) if running else tuple(notes),
        running=running,
        seen=now,
        nodes=len({each.node for each in rows}),
    )


def _missing(rows: Sequence[RankRow]) -> list[str]:
    size = max((each.log.head.world_size or 0 for each in rows), default=0)
    if size > 1 << 17:  # a damaged log
        return []
    unknown = set(range(size)) - {each.rank for each in rows}
    return [f"nothing is known of {named(unknown)}: the job has {size} ranks"] if unknown else []


def _headline(rows: Sequence[RankRow], whole: Verdict | None) -> Headline:
    """The verdict in the words of the report, with the node of the first rank that it names."""
    headline = _ended(rows, whole) if all(each.how != RUNNING for each in rows) else _going_on(rows)
    nodes = {each.rank: each.node for each in rows}
    if len(set(nodes.values())) == 1:
        return headline

    def on_node(found: re.Match[str]) -> str:
        node = nodes.get(int(found[1]))
        return f"{found[0]} on {node}" if node else found[0]

    return headline._replace(text=_RANK.sub(on_node, headline.text, count=1))


def _going_on(rows: Sequence[RankRow]) -> Headline:
    end = end_of(rows)
    recent = run_facts([_recent_log(each) for each in rows], end=end)
    if any(each.totals.steps_total for each in rows):
        most = Counter(each.now_in for each in rows if each.now_in).most_common(1)
        recent = replace(recent, last_seconds=RECENT_SECONDS, most_in=most[0][0] if most else "")
    found = judge(recent)
    return Headline(found.text, BAD if end is not None else found.level)


def _ended(rows: Sequence[RankRow], whole: Verdict | None) -> Headline:
    logs = [_log_with(each, each.totals, each.log.stalls) for each in rows]
    broke_off = any(each.how != FINISHED for each in rows)
    found = whole or judge(run_facts(logs, end=end_of(rows), broke_off=broke_off))
    if broke_off:
        return Headline(f"The run has ended. {found.text}", BAD)
    level = UNSURE if whole is None and found.level == GOOD else found.level  # stalls that are over may not be known
    who = "the rank has" if len(rows) == 1 else f"all {len(rows)} ranks have"
    when = clock(max(each.seen for each in rows))
    return Headline(f"The run has ended: {who} finished, at {when}. {found.text}", level)


def end_of(rows: Sequence[RankRow]) -> RunEnd | None:
    """How the ranks have ended that failed or were killed; None without any."""
    lives = [each.life for each in rows if each.life is not None and each.how in {FAILED, KILLED}]
    return Attempt(0, lives).run_end if lives else None


def _recent_log(row: RankRow) -> ProcessLog:
    """The log of a rank over the last minute for the report's functions: only the stall that is open."""
    totals = row.recent if row.recent.is_whole else row.totals
    ledger = totals.ledger_total_seconds
    if not ledger.get(DATA_WAIT) and row.totals.ledger_total_seconds.get(DATA_WAIT):
        # A minute of long steps has no wait. For the report, no wait at all means that the batches were not seen.
        totals = structs.replace(totals, ledger_total_seconds=ledger | {DATA_WAIT: 1e-9})
    stalls: list[StallLine] = []
    for line in row.log.stalls if row.how != KILLED else ():
        if isinstance(line, (StallOpenLine, StallCloseLine)):
            stalls.clear()
        if not isinstance(line, StallCloseLine):
            stalls.append(line)
    return _log_with(row, totals, stalls)


def _log_with(row: RankRow, totals: TotalsLine, stalls: list[StallLine]) -> ProcessLog:
    log = row.log
    return ProcessLog(log.rank, log.pid, log.head, totals, log.last_time, log.ended, stalls=stalls, hangs=log.hangs)


def clock(unix_seconds: float) -> str:
    """A time of day, such as ``03:12:45 UTC``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=timezone.utc):%H:%M:%S} UTC"


# -- which ranks are shown, and in which order -------------------------------------------------------------------------

WORST: Final = "worst first"


def _worst(row: RankRow) -> Any:
    # By whole percents, so that ranks which are alike do not change places all the time.
    return STATES.index(row.state), -round(100 * (row.wait_ratio or 0.0)), row.rank


def _known_first(value: float | None, row: RankRow) -> Any:
    return value is None, value, row.rank


SORTS: Final[dict[str, Callable[[RankRow], Any]]] = {
    WORST: _worst,
    "rank": lambda row: row.key,
    "node": lambda row: (row.node, row.rank),
    "slowest first": lambda row: _known_first(row.per_second("steps"), row),
    "wait": lambda row: _known_first(row.wait_ratio and -row.wait_ratio, row),
    "GPU, idle first": lambda row: _known_first(row.gpu.utilization_ratio, row),
    "memory": lambda row: _known_first(row.resident_memory_bytes and -row.resident_memory_bytes, row),
}
"""The orders by their names on the screen."""


@dataclass(slots=True)
class Choice:
    """The person's choice of ranks and their order.

    Attributes:
        sort: one of `SORTS`.
        trouble_only: leave out ranks that are all right.
        text: leave out ranks without this text in their number, node, state, finding or activity.
        selected: key of the rank under the cursor; None for the first row.
        whole_run: whether the bars show the whole run.
    """

    sort: str = WORST
    trouble_only: bool = False
    text: str = ""
    selected: tuple[int, str, int] | None = None
    whole_run: bool = False

    def rows(self, view: JobView) -> list[RankRow]:
        """The rows that are shown, in their order."""
        wanted = self.text.casefold()
        return sorted(
            (
                row
                for row in view.rows
                if (row.in_trouble or not self.trouble_only) and (not wanted or wanted in _searched(row).casefold())
            ),
            key=SORTS[self.sort],
        )

    def cursor(self, rows: Sequence[RankRow]) -> int:
        """The row of the cursor. It stays on its rank when the order changes."""
        return next((place for place, row in enumerate(rows) if row.key == self.selected), 0)


def _searched(row: RankRow) -> str:
    return f"rank {row.rank} {row.node} {row.state.value} {row.finding} {row.now_in.replace('_', ' ')}"
