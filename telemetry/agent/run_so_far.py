"""The run so far: what all attempts have done and lost on this rank, for the endpoint and for the next attempt.

    RUN_DIR/attempts/rank-N.json    this state; written at the start and at the end of an attempt

After a kill, the heartbeat of that process is newer than this file, and the next attempt reads both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from telemetry.log.lines import Heartbeat, Seconds, read_heartbeat
from telemetry.model.records import DOWN, LOST, REDONE, REPLAY, RESTORE, STARTUP, STUCK, Count
from telemetry.node.metrics import AttemptView
from telemetry.safety.files import read_small, replace_file
from telemetry.safety.processes import process_name, process_started

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.agent.attempt import AttemptLog
    from telemetry.safety.errors import ErrorLog
    from telemetry.util.identity import Identity

_MIN_STEPS: Final = 3
"""A resumed attempt that was killed with fewer steps has replayed none: its loop may have read ahead."""


class RunState(msgspec.Struct, frozen=True):
    """What the attempts of a run have done and lost on one rank.

    Attributes:
        life: the agent that wrote this. Its heartbeat may be newer than ``newest``.
        process: node, pid and start of its process.
        newest: the newest state of its attempt.
        attempt: its number.
        without_progress: how many attempts in a row ended before it without a complete checkpoint.
        lost_before: seconds that earlier attempts lost, by category. Only rank 0 shows them.
        booked_seconds: seconds of this process before the agent's start in which an earlier agent ran in it.
        samples_before, tokens_before, steps_before: counts of earlier attempts. An unknown count adds nothing.
        finished: whether the process ended by itself with its work done.
    """

    run: str
    life: str
    process: str
    newest: Heartbeat
    attempt: Count = 0
    without_progress: Count = 0
    lost_before: dict[str, Seconds] = {}
    booked_seconds: Seconds = 0.0
    samples_before: Count = 0
    tokens_before: Count = 0
    steps_before: Count = 0
    finished: bool = False

    def lost(self, *, first_wait_over: bool = True) -> dict[str, float]:
        """Seconds lost in all attempts so far, by category. Stuck time counts only as stuck.

        Args:
            first_wait_over: whether the first batch has come. Until then the rank may turn out to be stuck.
        """
        beat = self.newest
        restore = beat.resumption.restore_seconds if self.attempt else 0.0  # the first attempt restores for no restart
        own = {
            STARTUP: beat.seconds_before
            - min(self.booked_seconds, beat.seconds_before)
            + max(0.0, beat.ledger_total_seconds.get(STARTUP, 0.0) - restore)
            + (beat.first_wait if first_wait_over else 0.0),
            RESTORE: restore,
            REPLAY: beat.replay,
            STUCK: sum(beat.stuck_total_seconds.values()),
        }
        return {name: self.lost_before.get(name, 0.0) + own.get(name, 0.0) for name in LOST}

    def attempts_without_progress(self) -> int:
        """How many attempts in a row have made no progress; 0 once this one has completed a checkpoint."""
        return 0 if self.newest.saves_completed else self.without_progress

    def next(self, *, process: str, first: Heartbeat, started: float) -> RunState:
        """The state that the next attempt starts from.

        Args:
            process: node, pid and start of the new process.
            first: the first state of the new attempt.
            started: Unix time at which the new process started.
        """
        beat, lost, number, stalled = self.newest, self.lost(), self.attempt, self.attempts_without_progress()
        # The same finished process: the agent was only stopped and started again. The same unfinished process has
        # executed another program, which is another attempt.
        if process != self.process or not self.finished:
            number += 1
            lost[DOWN] += max(0.0, started - beat.unix_seconds)
            if not self.finished:
                loaded_at = beat.resumption.resumed_at_optimizer_steps
                stepped = loaded_at is None or beat.optimizer_steps_total > loaded_at
                in_vain = REDONE if stepped or beat.steps_total < _MIN_STEPS else REPLAY
                lost[in_vain] += max(0.0, beat.loop_seconds - beat.cut)
            stalled = 0 if beat.saves_completed or self.finished else self.without_progress + 1
        return RunState(
            self.run,
            first.life,
            process,
            first,
            attempt=number,
            without_progress=stalled,
            lost_before=lost,
            booked_seconds=max(0.0, beat.unix_seconds - started) if process == self.process else 0.0,
            samples_before=self.samples_before + (beat.samples_total or 0),
            tokens_before=self.tokens_before + (beat.tokens_total or 0),
            steps_before=self.steps_before + beat.steps_total,
        )


_decode_state: Final = msgspec.json.Decoder(RunState).decode


def read_run_state(path: Path) -> RunState | None:
    """Read the file of a rank; None if it cannot be read or makes no sense."""
    try:
        return _decode_state(read_small(path))
    except (OSError, ValueError, RecursionError):
        return None


class RunSoFar:
    """Keeps the file of this rank, which adds up all attempts of the run.

    Args:
        folder: where that file and the heartbeats are.
        attempt: the current attempt.
        identity: this process. The rank may become known later.

    Attributes:
        samples_before, tokens_before, steps_before: counts of earlier attempts.
    """

    def __init__(self, folder: Path, attempt: AttemptLog, identity: Identity, errors: ErrorLog) -> None:
        self._folder = folder
        self._attempt = attempt
        self._identity = identity
        self._errors = errors
        self._rank = 0
        self._state: RunState | None = None
        self.samples_before = self.tokens_before = self.steps_before = 0

    def tick(self) -> None:
        """Take over the newest heartbeat. The first call reads the file and writes that this attempt has begun."""
        if self._state is None or self._rank != self._identity.rank:
            self._rank = self._identity.rank
            self._state = begun = self._begin(self._identity)
            self.samples_before, self.tokens_before = begun.samples_before, begun.tokens_before
            self.steps_before = begun.steps_before
            self._write()
        self._state = structs.replace(self._state, newest=self._attempt.newest)

    def end(self, *, finished: bool) -> None:
        """Write the last state, when the process ends by itself. ``finished``: its work is done."""
        if self._state is not None:
            self._state = structs.replace(self._state, newest=self._attempt.beat(), finished=finished)
            self._write()

    def view(self) -> AttemptView | None:
        """The counters for the endpoint; None on ranks other than 0.

        They never fall: they show what the heartbeat has, and after a kill the next attempt starts from that.
        """
        state = self._state
        if state is None or self._rank != 0:
            return None
        lost = state.lost(first_wait_over=self._attempt.has_batch)
        return AttemptView(state.attempt, state.attempts_without_progress(), lost)

    @property
    def _path(self) -> Path:
        return self._folder / f"rank-{self._rank}.json"

    def _begin(self, identity: Identity) -> RunState:
        first = self._attempt.newest
        process = f"{identity.node}/{process_name(identity.pid)}"
        before = read_run_state(self._path)
        if before is None or before.run != identity.run:
            return RunState(identity.run, first.life, process, first)
        if before.life == first.life:  # this agent had this rank before
            return before
        beat = read_heartbeat(self._folder, before.life)
        if beat is not None and beat.unix_seconds > before.newest.unix_seconds:
            before = structs.replace(before, newest=beat)
        started = process_started(identity.pid) or first.unix_seconds
        return before.next(process=process, first=first, started=started)

    def _write(self) -> None:
        content = msgspec.json.encode(self._state) + b"\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content, 0o644)
        except OSError as error:
            self._errors.tell("attempts", f"the state of the run cannot be written: {error.strerror}")
