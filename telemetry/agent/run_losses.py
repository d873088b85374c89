"""What restarts and hangs have cost the run so far, over all its attempts. Kept by rank 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.core.views import AttemptView
from telemetry.diagnose.replay import in_replay
from telemetry.job.run_state import (
    MAX_BYTES,
    NAME,
    REPLAY,
    RESTORE,
    STARTUP,
    STUCK,
    RunState,
    StuckTime,
    decoded,
    figure,
)
from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.records import STARTUP as LEDGER_STARTUP
from telemetry.util import processes as identities
from telemetry.util.clock import NS, now_ns
from telemetry.util.files import parse_object, read_small, replace_file
from telemetry.util.processes import process_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from telemetry.agent.attempt_log import AttemptLog
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

_WRITE_SECONDS: Final = 30.0
"""The file is written at most so often: the heartbeat tells what has happened since."""


class RunLosses:
    """Continues the totals of the run from its state file.

    Args:
        folder: the folder of the state file and the heartbeats.
        attempt: of this process.
        life: of this agent.
    """

    def __init__(self, folder: Path, attempt: AttemptLog, life: str, errors: ErrorLog) -> None:
        self._folder = folder
        self._attempt = attempt
        self._life = life
        self._errors = errors
        self._state: RunState | None = None
        self._written_ns = 0
        self._written_saves = 0
        self._stuck_before = self._stuck_now = self._stuck_told = 0.0
        self._stuck_since: float | None = None  # where the newest hang began, see `_hangs`
        self._hangs: list[tuple[float, float]] = []  # of the loop: the second at which they began, how long they were
        self._first_wait = 0.0  # so far, while it is in progress

    def tick(
        self,
        identity: Identity,
        ledger: Mapping[str, float],
        first_wait: float,
        *,
        has_batch: bool,
        stuck_for_seconds: float,
        stuck_in: str | None,
    ) -> None:
        """Bring it up to now. Write it if a checkpoint has been completed, and every 30 s while the run is stuck.

        Args:
            identity: rank 0 keeps the state of the run.
            ledger: seconds by category.
            first_wait: seconds waited for the first batch.
            has_batch: whether the first batch has come.
            stuck_for_seconds: for which the run has been stuck now; 0 if it is not.
            stuck_in: in which category it is stuck, or was until now.
        """
        self._follow_hang(ledger, stuck_for_seconds, stuck_in)
        if identity.rank != 0:
            self._state = None
            return
        if self._state is None:
            self._state = self._begin(identity)
            self._write()
        attempt = self._attempt
        figures = _Figures(
            ledger,
            first_wait,
            attempt.seconds_before,
            attempt.restore_seconds,
            attempt.replay_seconds,
            attempt.kept_seconds,
            attempt.saves_completed,
            attempt.in_replay,
        )
        if attempt.saves_completed:  # then it is known how long the replay was
            self._hangs = [hang for hang in self._hangs if hang[0] < figures.began or hang[0] >= figures.cut]
        self._first_wait = 0.0 if has_batch else first_wait
        self._stuck_told = 0.0 if attempt.stuck is None else attempt.stuck.seconds
        state = figures.of(self._state)
        attempt.stuck = stuck = StuckTime(
            seconds=self._stuck_before + self._stuck_now,
            in_startup=self._stuck_between(-math.inf, first_wait),
            in_replay=self._stuck_between(first_wait, figures.began),
            since_kept=self._stuck_between(figures.cut, math.inf),
            kept_seconds=state.kept_seconds,
        )
        self._state = state.with_stuck(stuck)
        new = attempt.saves_completed != self._written_saves or self._stuck_now > 0
        if new and now_ns() - self._written_ns >= _WRITE_SECONDS * NS:
            self._write()

    def end(self, *, finished: bool) -> None:
        """The process ends by itself; ``finished``: its work is done."""
        if self._state is not None:
            self._state = replace(self._state, finished=finished)
            self._write()

    def view(self) -> AttemptView | None:
        """For the endpoint; None on other ranks than 0.

        These counters never fall. So a first wait counts when it is over, because it may yet turn out to be a hang. And
        a hang counts once it is in the heartbeat: should this process be killed, the next one goes on from there.
        """
        state = self._state
        if state is None:
            return None
        lost = state.lost()
        lost[STARTUP] -= max(0.0, self._first_wait - state.stuck_within.get(STARTUP, 0.0))
        lost[STUCK] -= state.own.get(STUCK, 0.0) - self._stuck_told
        return AttemptView(state.attempt, 0 if state.progress else state.without_progress, lost)

    def _follow_hang(self, ledger: Mapping[str, float], stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Note where in the loop hangs begin, and how long they are. Those in other categories are no part of it."""
        if stuck_for_seconds < self._stuck_now:
            self._stuck_before += self._stuck_now
            if self._stuck_since is not None:
                self._hangs.append((self._stuck_since, self._stuck_now))
        if stuck_for_seconds > self._stuck_now:
            in_loop = stuck_in in {DATA_WAIT, COMPUTE}
            self._stuck_since = ledger[DATA_WAIT] + ledger[COMPUTE] - stuck_for_seconds if in_loop else None
        self._stuck_now = stuck_for_seconds

    def _stuck_between(self, first: float, last: float) -> float:
        """For how long the run was stuck in hangs that began between these seconds of its loop."""
        hangs = [*self._hangs, *([] if self._stuck_since is None else [(self._stuck_since, self._stuck_now)])]
        return sum(seconds for began, seconds in hangs if first <= began < last)

    def _begin(self, identity: Identity) -> RunState:
        started = identities.process_started(identity.pid)
        process = f"{identity.node}/{process_name(identity.pid)}"
        now = self._attempt.unix_now()
        before = self._read()
        if before is None or before.run != identity.run:
            return RunState(identity.run, 0, process, self._life, now)
        before = before.newer(self._beat_of(before))
        if before.process == process:  # it has been there longer, but that time is booked
            self._attempt.seconds_before = min(self._attempt.seconds_before, max(0.0, now - before.time))
        return before.next(process=process, life=self._life, started=now if started is None else started)

    def _read(self) -> RunState | None:
        try:
            return decoded(read_small(self._folder / NAME, MAX_BYTES))
        except OSError:
            return None

    def _beat_of(self, state: RunState) -> RunState:
        """The figures in the heartbeat of the process that wrote a state; the state itself without one."""
        if not state.life.isalnum():
            return state
        try:
            beat = parse_object(read_small(self._folder / f"{state.life}.beat").rstrip()) or {}
            resumption = beat["resumption"]
            figures = _Figures(
                {category: figure(seconds) for category, seconds in beat["ledger_total_seconds"].items()},
                figure(beat["first_wait_seconds"]),
                figure(beat["seconds_before"]),
                figure(resumption.get("restore_seconds", 0.0)),
                figure(resumption.get("replay_seconds", 0.0)),
                figure(beat["kept_seconds"]),
                int(figure(beat["saves_completed"])),
                in_replay(resumption, figure(beat["optimizer_steps_total"]), figure(beat["steps_total"])),
            )
            newer = figures.of(replace(state, time=figure(beat["unix_seconds"])))
            stuck = StuckTime.parsed(beat.get("stuck"))
            return newer if stuck is None else newer.with_stuck(stuck)
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return state

    def _write(self) -> None:
        if self._state is None:
            return
        self._state = replace(self._state, time=self._attempt.unix_now())
        self._written_ns, saves = now_ns(), self._attempt.saves_completed
        try:
            content = self._state.encoded()
            try:
                replace_file(self._folder / NAME, content, 0o644)
            except FileNotFoundError:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(self._folder / NAME, content, 0o644)
            self._written_saves = saves
        except OSError as error:
            self._errors.tell("attempts", f"the state of the run cannot be written: {error.strerror}")


@dataclass(frozen=True, slots=True)
class _Figures:
    """What an attempt has spent its time on, as its agent knows it or its heartbeat tells."""

    ledger: Mapping[str, float]
    first_wait: float
    before: float
    restore: float
    replay: float
    kept: float
    saves: int
    in_replay: bool

    @property
    def began(self) -> float:
        """The first seconds of the loop: no part of it that can be kept."""
        return self.first_wait + self.replay

    @property
    def cut(self) -> float:
        """Seconds of the loop up to the newest checkpoint, or up to the first step."""
        return max(self.began, self.kept if self.saves else 0.0)

    def of(self, state: RunState) -> RunState:
        """The state of the run with these figures of its attempt."""
        restore = self.restore if state.attempt else 0.0
        began = self.began
        own = {
            STARTUP: self.before + max(0.0, self.ledger[LEDGER_STARTUP] - restore) + self.first_wait,
            RESTORE: restore,
            REPLAY: self.replay,
        }
        return replace(
            state,
            own=own,
            loop_seconds=self.ledger[DATA_WAIT] + self.ledger[COMPUTE] - began,
            kept_seconds=max(0.0, self.kept - began) if self.saves else 0.0,
            progress=self.saves > 0,
            in_replay=self.in_replay,
        )
