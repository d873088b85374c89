"""Turns ticks into stalls of this rank, with a cause and advice."""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs, to_builtins

from telemetry.agent.stuck_monitor import StuckMonitor, paused, phase_seconds
from telemetry.diagnosis.advice import CHEAPER, WHOLE_BATCHES
from telemetry.diagnosis.causes import CAUSES, advise, shares_of, with_what_remains
from telemetry.diagnosis.evidence import evidence_field
from telemetry.diagnosis.misuse import mended_first, misuse
from telemetry.diagnosis.stalls import MIN_STEPS, StallDetector
from telemetry.diagnosis.stragglers import absent_rank, held_up_by, short_of_cores, straggler
from telemetry.diagnosis.verdict import batches_unseen, costliest, weight
from telemetry.model.records import CHECKPOINT, DATA_WAIT, DEBUGGED, EVALUATION, OtherCause, StallDetails, StallRecord
from telemetry.model.totals import Tick
from telemetry.node.metrics import StallView
from telemetry.safety.errors import kind_of
from telemetry.safety.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from telemetry.agent.event_log import EventLog
    from telemetry.agent.line_monitor import LineMonitor, StallLines
    from telemetry.agent.step_monitor import FindingLog
    from telemetry.agent.stuck_monitor import StuckRank
    from telemetry.config import Config
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.stalls import DetectedStall, StallCounts
    from telemetry.diagnosis.stragglers import Straggler
    from telemetry.loop.ledger import Accounting
    from telemetry.model.records import Advice, RankPace
    from telemetry.model.totals import Totals
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.tracker import StepTracker
    from telemetry.sinks.output import FigureOutput
    from telemetry.util.clock import WallClock
    from telemetry.util.identity import Identity


# -- calls the user's callback on a thread of its own, one call at a time ----------------------------------------------

_SOURCE: Final = "on_stall"


class StallCallback:
    """Calls the user's function for each stall. The caller never waits for it.

    A thread exists only during a call. A stall that opens meanwhile gets no call: that counts as an error, and the log
    names the stall. An exception in the function counts as an error, too.

    Args:
        callback: the function, or its dotted name, which is resolved at the first stall; None if it is not set.
        errors: counts failed and skipped calls. Used only on the caller's thread.
    """

    def __init__(self, callback: Callable[[dict[str, Any]], Any] | str | None, errors: ErrorLog) -> None:
        self._callback = callback
        self._errors = errors
        self._thread: OwnThread | None = None
        self._failed: deque[str] = deque()

    def tell(self, stall: StallRecord) -> None:
        """Start a call of the function with the record as a dictionary. Returns at once."""
        if self._callback is None:
            return
        self.note_failures()
        if self._thread is not None and self._thread.is_alive():
            text = f"not told of a stall ({stall.cause}): the call for an earlier one has not returned"
            self._errors.note(_SOURCE, text)
            return
        thread = OwnThread(self._call, self._callback, stall.log_fields(), name="telemetry-on-stall")
        with self._errors.contained(_SOURCE):  # no thread can be started
            thread.start()
            self._thread = thread

    def note_failures(self) -> None:
        """Count the calls that have failed since the last time."""
        while self._failed:
            self._errors.note(_SOURCE, self._failed.popleft())

    def wait(self, seconds: float) -> None:
        """Wait for the call in progress, at most this many seconds."""
        thread = self._thread
        if thread is None:
            return
        thread.join(seconds)
        self.note_failures()
        if thread.is_alive():
            self._errors.tell(_SOURCE, "the run has ended, and the call for a stall has not returned")

    def _call(self, callback: Callable[[dict[str, Any]], Any] | str, stall: dict[str, Any]) -> None:
        try:
            _resolve(callback)(stall)
        except BaseException as error:  # includes sys.exit(): Python would print other exceptions to stderr
            self._failed.append(kind_of(error))


def _resolve(callback: Callable[[dict[str, Any]], Any] | str) -> Callable[[dict[str, Any]], Any]:
    """Import a callback that is given by its dotted name. At the first stall its module has long been imported."""
    if not isinstance(callback, str):
        return callback
    module, _, name = callback.rpartition(".")
    found: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found


# -- the record of a stall: for the log, the user's callback and the trace of a snapshot ------------------------------


def stall_record(
    stall: DetectedStall,
    stuck: StuckRank | None,
    identity: Identity,
    opened: str,
    lines: StallLines | None = None,
    *,
    stacks: Sequence[str] = (),
) -> StallRecord:
    """The cause, evidence and advice of a stall as it is now. ``stuck``: this rank, if it is stuck."""
    ratio, stuck = stall.exposed_wait_ratio, stuck if stall.is_stuck else None
    lost = {cause: round(seconds, 3) for cause, seconds in stall.lost_seconds.items()}
    details = StallDetails(lost_seconds=lost, stacks=[*stacks])
    slow = slow_rank(stall, stuck)
    if slow is not None:
        details.straggler_rank, details.straggler_node = slow.rank, slow.node or identity.node
        details.straggler_reason = slow.why
    advice = advise(stall.cause, stall.evidence)
    shares = shares_of(stall.cause, stall.evidence) if stuck is None else {}
    if len(shares) > 1:
        details.share_ratio = round(shares.pop(stall.cause), 4)
        details.also = [OtherCause(cause, round(s, 4), [*advise(cause, stall.evidence)]) for cause, s in shares.items()]
        advice = with_what_remains(advice, shares)
    if stuck is not None:
        details.stuck_for_seconds, details.stuck_in = round(stuck.seconds, 3), stuck.category
        details.stuck_at, details.worker_at = stuck.at, stuck.worker_at
        advice = (*advice, *stuck.advice_on_locks()) if stall.cause == "worker_stuck" else stuck.advice()
    if lines is not None:
        # A loader that is used in a wrong way has to be mended first.
        wrong = mended_first(stall.evidence) if stall.evidence.steps and CAUSES[stall.cause].is_wait else []
        advice = advice if wrong else _with_lines(advice, lines)
    told = to_builtins(details) | ({} if lines is None else to_builtins(lines.code))
    return StallRecord(
        rank=identity.rank,
        cause=stall.cause,
        opened=opened,
        first_step=stall.first_step,
        exposed_wait_ratio=None if ratio is None else round(ratio, 4),
        evidence=evidence_field(stall.evidence) | told,
        advice=[*advice],
    )


def _with_lines(advice: Sequence[Advice], lines: StallLines) -> tuple[Advice, ...]:
    """The advice on a cause with that on its line, which says better what to make cheaper."""
    if lines.is_known:
        return (*lines.advice[:1], *(each for each in advice if not each.action.startswith(CHEAPER)), *lines.advice[1:])
    if any(each.action == WHOLE_BATCHES for each in advice):
        return tuple(advice)  # a row is fetched by one line, and nothing in it could be done once, or twice as fast
    if lines.advice:
        advice = [each for each in advice if not each.action.startswith(CHEAPER)]
    return (*advice, *lines.advice)


def slow_rank(stall: DetectedStall, stuck: StuckRank | None) -> Straggler | None:
    """The rank that causes this stall, if the stall is a straggler; else None."""
    if stall.cause != "straggler":
        return None
    if stall.is_stuck:
        return absent_rank(stuck.missing) if stuck is not None and stuck.missing is not None else None
    evidence = stall.evidence
    return straggler(evidence.pace, evidence.peers, evidence.earlier_paces)


# -- turns ticks into stalls -------------------------------------------------------------------------------------------

_MOSTLY_IN_SYNC: Final = 0.8
"""A rank that stands still has waited for the others if this share of its samples is in calls that wait for them."""


class StallMonitor:
    """Follows the stalls of one rank.

    The log and the sinks get each stall, and ``findings`` what is wrong about the use of the loader.

    Attributes:
        stuck_monitor: finds out whether this rank is stuck, and where.
        waits_matter: whether the waits since the tick before took a share that opens a stall.
        costliest: the closed stall that cost most.
        closed_stuck: the newest closed stall in which the rank was stuck.
    """

    def __init__(
        self,
        config: Config,
        tracker: StepTracker,
        counts: StallCounts,
        *,
        errors: ErrorLog,
        event_log: EventLog,
        wall: WallClock,
        lines: LineMonitor | None = None,
        sinks: FigureOutput | None = None,
        findings: FindingLog | None = None,
    ) -> None:
        self._detector = StallDetector(
            config.stall_window_seconds, config.stall_enter_ratio, config.stall_exit_ratio, event_log.identity
        )
        self.stuck_monitor = StuckMonitor(config, tracker)
        self._phase: str | None = None
        self._config = config
        self._one_is_slow = self._peer_is_stuck = False
        self._last = Tick()
        self._last_step = Tick()  # the newest tick in which a step ended
        self._errors = errors
        self._callback = StallCallback(config.on_stall, errors)
        self._event_log = event_log
        self._wall = wall
        self._sinks = sinks
        self._findings = findings
        self._lines = lines
        self._opened = ""
        self._counts = counts
        self.waits_matter = False
        self.costliest: StallRecord | None = None
        self.closed_stuck: StallRecord | None = None

    def tick(self, tick: Tick, accounting: Accounting, *, intervals: int = 1) -> None:
        """Add a tick, which was due ``intervals`` after the last one, and log a stall that opens or closes."""
        self._callback.note_failures()
        added, peers = tick.totals.passed_since(self._last.totals), tick.conditions.peers
        self._peer_is_stuck = any(peer.stuck for peer in peers)
        did_not_run = paused(
            added.seconds, self._config.interval_seconds, added.process_cpu_seconds, intervals=intervals
        )
        category = accounting.ledger.category
        self._phase = category if category in {CHECKPOINT, EVALUATION} else None
        in_phase = [peer.still_seconds for peer in peers if peer.phase in {CHECKPOINT, EVALUATION}]
        longest = max(in_phase, default=None)
        waits_for_phase = longest is not None and longest < phase_seconds(self._config.stuck_seconds)
        if not added.steps and not did_not_run:
            debugged = self.stuck_monitor.in_debugger()
            did_not_run = debugged or any(peer.phase == DEBUGGED for peer in peers)
            self._phase = DEBUGGED if debugged else self._phase
        self._last = tick
        if added.steps:
            self._last_step = tick
        self.waits_matter = added.wait_seconds >= self._config.stall_enter_ratio * added.loop_seconds > 0
        stuck = self.stuck_monitor.tick(
            None if did_not_run else added,
            tick.conditions.source,
            accounting,
            peers=peers,
            all_known=len(peers) == self._event_log.identity.world_size - 1,
            waits_for_far_ranks=any(peer.node is not None for peer in peers) and self._waits_for_ranks(),
            peer_phase_seconds=longest,
        )
        if stuck is not None and stuck.kind != "held":
            self._take_stuck(stuck, tick)
        elif did_not_run or (waits_for_phase and not added.steps):
            self._detector.skip(tick)
        else:
            self._take(tick)
        self._one_is_slow = "straggler" in {self.active_cause, *(peer.cause for peer in peers)}

    @property
    def stuck_time(self) -> tuple[float, str | None]:
        """How long this rank is stuck, or was until the newest tick, and in which category; else 0 and None."""
        stuck = self.stuck_monitor.stuck
        return (0.0, None) if stuck is None else (stuck.seconds, stuck.category)

    @property
    def samples_closely(self) -> bool:
        """Whether the training thread is to be sampled often.

        It is while this rank, or a peer, waits for a slow rank, so that the slow rank samples itself as often. And it
        is as soon as this rank seems to wait: with ten samples a second over 10 s, a rank that was 12 % slower seemed
        to cost 23 %.
        """
        return self._one_is_slow or self._detector.may_have_straggler

    @property
    def stuck(self) -> StuckRank | None:
        """This rank, if it is stuck at the newest tick."""
        stuck = self.stuck_monitor.stuck
        return stuck if stuck is not None and stuck.kind != "closed" else None

    @property
    def job_hangs(self) -> bool:
        """Whether this rank or one of its peers is stuck."""
        return self._peer_is_stuck or self.stuck is not None

    def _waits_for_ranks(self) -> bool:
        """Whether this rank has spent the time since its newest step in calls that wait for other ranks."""
        now, then = self._last.totals.stacks, self._last_step.totals.stacks
        samples, in_sync = now.samples - then.samples, now.in_sync - then.in_sync
        return samples > 0 and in_sync >= _MOSTLY_IN_SYNC * samples

    def _take(self, tick: Tick) -> None:
        before = self._detector.stall
        change = self._detector.update(tick)
        window = self._detector.evidence
        if window is not None and window.steps >= MIN_STEPS and self._findings is not None:
            for finding in misuse(window):
                self._findings.tell(finding)
        if change is None:
            if self._detector.stall is None and window is not None:
                self._tell_lack_of_cores(window)
            return
        self._count_lost(change.stall, before)
        if change.kind == "opened":
            self._opened_now(change.stall)
        elif change.kind == "closed":
            self._close(change.stall)

    def _tell_lack_of_cores(self, window: Evidence) -> None:
        """Log why no straggler is named although this rank waits for one."""
        own = window.pace
        slow = short_of_cores(own, window.peers, window.earlier_paces)
        if slow is None or slow.lost * own.steps < self._config.stall_enter_ratio * own.seconds:
            return
        text = f"no straggler is named: {slow.name} {slow.why}; run less on that machine, or give it more cores"
        self._errors.tell("diagnose", text)

    def _take_stuck(self, stuck: StuckRank, tick: Tick) -> None:
        """Open or close the stall of a stuck rank. Only one stall is open at a time, so it replaces an open one."""
        before = self._detector.stall
        if before is not None:
            self._close(before)
        if stuck.kind == "closed":
            self._detector.close_stuck(tick)
            return
        pace = self.pace()
        named = stuck.cause != "unknown" or self._phase is not None
        missing = held_up_by(pace, tick.conditions.peers) if pace is not None and not named else None
        if missing is not None:
            stuck = self.stuck_monitor.blame(stuck, missing)
        stall = self._detector.open_stuck(stuck.cause, stuck.seconds, tick)
        self._count_lost(stall, None)
        self._opened_now(stall, with_stacks=True)

    def end(self, totals: Totals, *, timed_out: bool = False) -> None:
        """Close the open stall at the end of the run. ``timed_out``: it was stuck, and no stall has told so yet."""
        self._last = replace(self._last, totals=totals)
        if timed_out:
            self._take_stuck(self.stuck_monitor.timed_out(first_batch=not totals.batches), self._last)
        change = self._detector.last()
        if change is not None:
            self._count_lost(change.stall, None)
            self._opened_now(change.stall)
        stall = self._detector.stall
        if stall is not None:
            self._close(stall)

    def wait_for_callback(self, seconds: float) -> None:
        """Wait for a call of the user's callback in progress, at most this many seconds."""
        self._callback.wait(seconds)

    def pace(self) -> RankPace | None:
        """The pace of this rank, which the other ranks read."""
        pace = self._detector.pace()
        if pace is None:
            return None
        now, then, stall, closed = self._last.totals, self._last_step.totals, self._detector.stall, self.costliest
        found = [] if closed is None else [(closed.cause, closed.cost_seconds)]
        found += [] if stall is None else [(stall.cause, stall.lost_seconds.get(stall.cause, 0.0))]
        cause, lost = max(found, key=lambda each: weight(*each), default=(None, 0.0))
        return structs.replace(
            pace,
            phase=self._phase,
            seconds_without_step=(now.wall_seconds - then.wall_seconds) - (now.startup_seconds - then.startup_seconds),
            stuck=self.stuck is not None,
            still_seconds=round(self.stuck_monitor.seconds, 1),
            awaits=self.stuck_monitor.awaits,
            waits_for_ranks=self._waits_for_ranks() or self.stuck_monitor.awaits is not None,
            run_wait_seconds=now.ledger_seconds.get(DATA_WAIT, 0.0),
            run_loop_seconds=now.loop_seconds + now.first_wait_seconds,
            run_first_wait_seconds=now.first_wait_seconds,
            run_exposed_seconds=None if batches_unseen(now.unseen_steps, now.steps) else now.exposed_wait_seconds,
            run_cause=cause,
            run_lost_seconds=lost,
        )

    def stuck_at_end(self, steps: int) -> StuckRank | None:
        """This rank, if it is stuck when the run ends after ``steps`` steps; None if a step has ended since."""
        return (self.stuck or self.stuck_monitor.left) if steps == self._last_step.totals.steps else None

    @property
    def open_stall(self) -> DetectedStall | None:
        """The stall that is open now, if any."""
        return self._detector.stall

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of the newest window; None before the second tick."""
        return self._detector.evidence

    @property
    def active_cause(self) -> str | None:
        """The cause of the open stall, if any."""
        return None if self._detector.stall is None else self._detector.stall.cause

    def view(self) -> StallView:
        """The stalls so far, for the endpoint."""
        stall, cause = self._detector.stall, self.active_cause
        slow = None if stall is None else slow_rank(stall, self.stuck_monitor.stuck)
        return StallView(cause, dict(self._counts.opened), dict(self._counts.lost_seconds), slow.rank if slow else None)

    @property
    def holds_others_up(self) -> bool:
        """Whether this rank may be the slow rank: a peer waits for one, and this rank has no stall itself."""
        return self._detector.stall is None and self._one_is_slow

    def open_record(self) -> StallRecord | None:
        """The open stall with its lines; None without one."""
        stall = self._detector.stall
        return None if stall is None else self._record(stall)

    def log_hot_lines(self) -> None:
        """Log the lines of the open stall now, because a run that is killed logs no close."""
        record = self.open_record()
        if record is not None and record.details.lines:
            self._event_log.emit("stall_lines", record.log_fields())

    def _record(self, stall: DetectedStall) -> StallRecord:
        lines = None if self._lines is None else self._lines.lines_of(stall)
        return stall_record(stall, self.stuck_monitor.stuck, self._event_log.identity, self._opened, lines)

    def _count_lost(self, stall: DetectedStall, before: DetectedStall | None) -> None:
        for cause, seconds in stall.lost_seconds.items():
            self._counts.lost_seconds[cause] += seconds - (
                before.lost_seconds.get(cause, 0.0) if before is not None else 0.0
            )

    def _opened_now(self, stall: DetectedStall, *, with_stacks: bool = False) -> None:
        self._opened = self._wall.iso()
        self._counts.opened[stall.cause] += 1
        stacks: list[str] = []
        if with_stacks:
            with self._errors.contained("stacks"):
                stacks = self.stuck_monitor.stacks()
        record = stall_record(stall, self.stuck_monitor.stuck, self._event_log.identity, self._opened, stacks=stacks)
        if self._sinks is not None:
            self._sinks.stall_opened(record)
        self._event_log.emit("stall_open", record.log_fields())
        self._callback.tell(record)

    def _close(self, stall: DetectedStall) -> None:
        record = self._record(stall)
        record.closed, record.last_step = self._wall.iso(), self._last.totals.steps
        self.costliest = costliest([record] if self.costliest is None else [self.costliest, record])
        if stall.is_stuck:
            self.closed_stuck = record
        self._event_log.emit("stall_close", record.log_fields())
