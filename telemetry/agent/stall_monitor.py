"""Whether this rank stalls, and why: ticks in, stalls with a cause and advice out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from telemetry.agent.hang_monitor import HangMonitor
from telemetry.agent.stall_callback import StallCallback
from telemetry.agent.stall_report import slow_rank, stall_fields
from telemetry.core.interval import Tick
from telemetry.core.labels import CHECKPOINT, EVALUATION
from telemetry.core.views import StallView
from telemetry.diagnose.hang_detector import paused
from telemetry.diagnose.stall_detector import StallDetector
from telemetry.diagnose.straggler import held_up_by, mostly_in_sync

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.agent.accounting import Accounting
    from telemetry.agent.hang_monitor import Stuck
    from telemetry.agent.stall_report import StallCounts
    from telemetry.attach.step_tracker import StepTracker
    from telemetry.config import Config
    from telemetry.core.errors import ErrorLog
    from telemetry.core.interval import RankPace
    from telemetry.core.totals import Totals
    from telemetry.diagnose.stall_detector import Stall

_WORTH_TIMING: Final = 0.02
_TIMED_WAITS: Final = 32
"""Where waits take this share of the loop, so many of the next batches are timed in parts, and not one: a sampler may
do its work once in a few batches. At 5 µs each that is less than a fifth of a millisecond in a second."""

_SAMPLE_SECONDS: Final = 0.1
_CLOSE_SAMPLE_SECONDS: Final = 0.02
"""How far apart samples of the training thread are: usually, and while one rank holds the others up. A sample costs the
agent thread 0.12 ms, its wake-up included. From ten a second, what a rank that pauses for 60 ms of a step of 71 costs
is known so roughly that predictions were up to 42 % off; with fifty a second, up to 15 %."""


class StallMonitor:
    """Follows one rank through its stalls.

    Args:
        config: window and ratios.
        tracker: knows what the training thread does now.
        counts: of stalls, kept here.
        errors: told when the user's callback fails, or is still busy.
        emit: writes a line of the log.
        timestamp: of now, ISO-8601.
        rank: whose stalls these are.
        node: name of this node.
    """

    def __init__(
        self,
        config: Config,
        tracker: StepTracker,
        counts: StallCounts,
        *,
        errors: ErrorLog,
        emit: Callable[[str, dict[str, Any]], Any],
        timestamp: Callable[[], str],
        rank: int = 0,
        node: str = "",
    ) -> None:
        self._detector = StallDetector(
            config.stall_window_seconds, config.stall_enter_ratio, config.stall_exit_ratio, rank
        )
        self._hang_monitor = HangMonitor(config, tracker)
        self._stuck: Stuck | None = None
        self._phase: str | None = None
        self._one_is_slow = False
        self._last = Tick()
        self._last_step = Tick()  # the newest tick in which a step has ended
        self._waits_matter = False
        self._interval = config.interval_seconds
        self._errors = errors
        self._callback = StallCallback(config.on_stall, errors)
        self._emit = emit
        self._timestamp = timestamp
        self._opened = ""
        self._counts = counts
        self._node = node

    def tick(self, tick: Tick, accounting: Accounting) -> None:
        """Take in what happened since the last tick; log a stall that opens or closes."""
        self._callback.note_failures()
        added, peers = tick.totals - self._last.totals, tick.conditions.peers
        did_not_run = paused(added.wall_seconds, self._interval, added.process_cpu_seconds)
        category = accounting.ledger.category
        self._phase = category if category in {CHECKPOINT, EVALUATION} else None
        if not added.steps and not did_not_run:
            did_not_run = any(peer.phase for peer in peers) or self._hang_monitor.in_debugger()
        self._last = tick
        if added.steps:
            self._last_step = tick
        self._waits_matter = added.wait_seconds >= _WORTH_TIMING * added.loop_seconds > 0
        stuck = self._stuck = self._hang_monitor.tick(
            0.0 if did_not_run else added.loop_seconds, tick.conditions.source, accounting
        )
        if stuck is not None and stuck.kind != "held":
            self._take_stuck(stuck, tick)
        elif did_not_run:
            self._detector.skip(tick)
        else:
            self._take(tick)
        stall = self._detector.stall
        self._one_is_slow = "straggler" in {stall and stall.cause, *(peer.cause for peer in peers)}

    @property
    def waits_to_time(self) -> int:
        """How many of the next batches are worth timing in parts: more where waits matter."""
        return _TIMED_WAITS if self._waits_matter else 1

    @property
    def stuck_seconds(self) -> float:
        """For how long the run has been stuck now; 0 if it is not."""
        return 0.0 if self._stuck is None else self._stuck.seconds

    @property
    def sample_seconds(self) -> float:
        """How long after one sample of the training thread to take the next, on average.

        Sooner while this rank waits for a slow one, or a peer does: the slow one is sampled as often.
        """
        return _CLOSE_SAMPLE_SECONDS if self._one_is_slow else _SAMPLE_SECONDS

    def _take(self, tick: Tick) -> None:
        before = self._detector.stall
        change = self._detector.update(tick)
        if change is None:
            return
        self._count_lost(change.stall, before)
        if change.kind == "opened":
            self._opened_now(change.stall)
        elif change.kind == "closed":
            self._close(change.stall)

    def _take_stuck(self, stuck: Stuck, tick: Tick) -> None:
        """One stall at a time: a run that is stuck takes the place of what was open."""
        before = self._detector.stall
        if before is not None:
            self._close(before)
        if stuck.kind == "closed":
            self._detector.close_stuck(tick)
            return
        pace = self.pace()
        missing = held_up_by(pace, tick.conditions.peers) if stuck.cause == "unknown" and pace is not None else None
        if missing is not None:
            stuck = self._stuck = self._hang_monitor.blame(stuck, missing)
        stall = self._detector.open_stuck(stuck.cause, stuck.seconds, tick)
        self._count_lost(stall, None)
        self._opened_now(stall, with_stacks=True)

    def adopt(self, rank: int) -> None:
        """The rank of this process is another one than was known so far."""
        self._detector.rank = rank

    def end(self, totals: Totals) -> None:
        """The run ends, and with it the stall that is open."""
        self._last = replace(self._last, totals=totals)
        change = self._detector.last()
        if change is not None:
            self._count_lost(change.stall, None)
            self._opened_now(change.stall)
        stall = self._detector.stall
        if stall is not None:
            self._close(stall)

    def wait_for_callback(self, seconds: float) -> None:
        """Let the user's callback come to its end, for so many seconds at most."""
        self._callback.wait(seconds)

    def pace(self) -> RankPace | None:
        """What the other ranks of this node may know of this one."""
        pace = self._detector.pace()
        if pace is None:
            return None
        now, then = self._last.totals, self._last_step.totals
        return replace(
            pace,
            phase=self._phase,
            seconds_without_step=(now.wall_seconds - then.wall_seconds) - (now.startup_seconds - then.startup_seconds),
            waits_for_ranks=mostly_in_sync(
                now.own.samples - then.own.samples, now.own.in_sync_samples - then.own.in_sync_samples
            ),
        )

    def view(self) -> StallView:
        """For the endpoint."""
        stall = self._detector.stall
        cause = None if stall is None else stall.cause
        slow = None if stall is None else slow_rank(stall, self._stuck)
        return StallView(cause, dict(self._counts.opened), dict(self._counts.lost_seconds), slow.rank if slow else None)

    def stall_fields(self) -> dict[str, Any] | None:
        """Fields of the stall that is open, as in the log; None without one."""
        stall = self._detector.stall
        return None if stall is None else stall_fields(stall, self._stuck, self._node) | {"opened": self._opened}

    def _count_lost(self, stall: Stall, before: Stall | None) -> None:
        for cause, seconds in stall.lost_seconds.items():
            self._counts.lost_seconds[cause] += seconds - (
                before.lost_seconds.get(cause, 0.0) if before is not None else 0.0
            )

    def _opened_now(self, stall: Stall, *, with_stacks: bool = False) -> None:
        self._opened = self._timestamp()
        self._counts.opened[stall.cause] += 1
        fields = stall_fields(stall, self._stuck, self._node) | {"opened": self._opened}
        if with_stacks:
            with self._errors.contained("stacks"):
                fields["evidence"]["stacks"] = self._hang_monitor.stacks()
        self._emit("stall_open", fields)
        self._callback.tell(fields)

    def _close(self, stall: Stall) -> None:
        when = {"opened": self._opened, "closed": self._timestamp()}
        self._emit(
            "stall_close", stall_fields(stall, self._stuck, self._node) | when | {"last_step": self._last.totals.steps}
        )
