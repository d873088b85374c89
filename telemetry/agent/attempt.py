"""What the log and the heartbeat have of this attempt.

RUN_DIR/attempts/LIFE.beat      the newest state of a process, while it is there or if it was killed
"""

from __future__ import annotations

import math
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from telemetry.agent.phases import PhaseLog
from telemetry.agent.process_end import EndEvidence
from telemetry.agent.replay import ReplayWatch
from telemetry.log_lines import ABSENT, Heartbeat, Resumption, RunStartLine, StuckTime
from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.sources.cgroup import OomCounter
from telemetry.util import processes
from telemetry.util.clock import NS, iso_time, now_ns
from telemetry.util.files import Descriptor, opened, remove_file

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import Step
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog

FOLDER: Final = "attempts"
"""The folder's name in the run folder."""

BEAT_BYTES: Final = 1024
"""Every heartbeat is padded to this size, so that it covers the one before."""

_RETRY_SECONDS: Final = 30
"""The agent tries a failed heartbeat again after this time."""


class StuckTimes:
    """Remembers where in the loop an attempt was stuck, and for how long."""

    def __init__(self) -> None:
        self._times: list[tuple[float | None, float]] = []  # None: not in the loop. The last one may still go on
        self._now = 0.0

    def follow(self, loop_seconds: float, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Take the current state.

        Args:
            loop_seconds: seconds in the training loop so far.
            stuck_for_seconds: how long the process is stuck now; 0 if it is not.
            stuck_in: the category in which the process is stuck.
        """
        if stuck_for_seconds < self._now:
            self._now = 0.0  # it went on
        if self._now:
            self._times[-1] = (self._times[-1][0], stuck_for_seconds)
        elif stuck_for_seconds:
            began = loop_seconds - stuck_for_seconds if stuck_in in {DATA_WAIT, COMPUTE} else None
            self._times.append((began, stuck_for_seconds))
        self._now = stuck_for_seconds

    def so_far(self, beat: Heartbeat) -> StuckTime:
        """Add up the times by the part of the loop in which they began."""

        def between(first: float, last: float) -> float:
            return sum(seconds for began, seconds in self._times if began is not None and first <= began < last)

        return StuckTime(
            seconds=round(sum(seconds for _, seconds in self._times), 6),
            in_startup=round(between(-math.inf, beat.first_wait_seconds), 6),
            in_replay=round(between(beat.first_wait_seconds, beat.began), 6),
            since_kept=round(between(beat.cut, math.inf), 6),
        )


class AttemptLog:
    """Collects what the log and the heartbeat need about this attempt: its resumption, phases, stuck times and end.

    Attributes:
        life: names this agent in its log and in its heartbeat.
        newest: the state in the newest heartbeat.
        seconds_before: how long the process had run when the agent started.
        end: what is known of the end of this process.
        phases: the phases and checkpoints.
    """

    def __init__(
        self,
        run_dir: Path,
        pid: int,
        tracker: StepTracker,
        accounting: Accounting,
        *,
        wall: WallClock,
        errors: ErrorLog,
    ) -> None:
        self._resume = tracker.resume
        self._tracker = tracker
        self._accounting = accounting
        self._wall = wall
        self._errors = errors
        self.life = secrets.token_hex(8)
        self._replay = ReplayWatch()
        self._stuck = StuckTimes()
        self._path = run_dir / FOLDER / f"{self.life}.beat"
        self._file: Descriptor | None = None
        self._next_beat_ns = 0
        self._told = False
        self._started = processes.process_started(pid)
        # Read once: the clock may be stepped later.
        began = wall.unix_seconds(accounting.ledger.start_ns)
        self.seconds_before = 0.0 if self._started is None else max(0.0, began - self._started)
        self._launch, self._restarts = processes.launch_of()
        self._oom = OomCounter()
        self.end = EndEvidence()
        self.phases = PhaseLog(tracker.resume.saves, wall)
        self.newest = self.beat()

    @property
    def has_batch(self) -> bool:
        """Whether the first batch has come."""
        return self._accounting.ledger.batches > 0

    def add_steps(self, steps: list[Step]) -> None:
        """Look for replay in steps that have closed."""
        if not self._replay.settled:
            self._replay.add(steps, self._tracker.optimizer_steps)

    def tick(self, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Write a heartbeat. Called when everything up to now has been counted. See `StuckTimes` for the arguments."""
        self._settle_replay()
        if self._replay.settled:
            self._accounting.batches.settle(self._replay.batches)
        ledger = self._accounting.ledger.ns
        self._stuck.follow((ledger[DATA_WAIT] + ledger[COMPUTE]) / NS, stuck_for_seconds, stuck_in)
        self.newest = self.beat()
        if now_ns() < self._next_beat_ns:
            return
        try:
            self._write(msgspec.json.encode(self.newest))
        except (OSError, ValueError) as error:
            self._next_beat_ns = now_ns() + _RETRY_SECONDS * NS  # the cause, such as a full disk, may last
            if not self._told:
                self._told = True
                self._errors.tell("heartbeat", f"no heartbeats: {error}; the log tells when this process was killed")

    def _write(self, content: bytes) -> None:
        """Overwrite the heartbeat with one system call, which needs no new block on the disk.

        Raises:
            OSError: the file cannot be written.
            ValueError: the heartbeat is too long.
        """
        if len(content) >= BEAT_BYTES:
            raise ValueError(f"a heartbeat has at most {BEAT_BYTES - 1} bytes, not {len(content)}")
        if self._file is None or not self._file.is_in_place():
            self.forget()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = Descriptor(opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
        os.pwrite(self._file.number, content.ljust(BEAT_BYTES - 1) + b"\n", 0)

    def _settle_replay(self, *, ended: bool = False) -> None:
        self._replay.settle(
            self._tracker.optimizer_steps,
            self._accounting.ledger.first_wait_ns / NS,
            most=self._accounting.steps_without_optimizer,
            ended=ended,
        )

    def end_replay(self) -> None:
        """Decide about the replay now, because no more steps will come. The other samples count as trained."""
        self._settle_replay(ended=True)
        self._accounting.batches.settle(self._replay.batches)

    def close(self) -> None:
        """Remove the heartbeat, because the process ends by itself and the log is complete."""
        if self._file is not None:
            remove_file(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the heartbeat's file. A forked child calls this for its copy."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def head(self) -> RunStartLine:
        """What the first line of a log file has of this attempt."""
        without = self._oom.path is None
        return RunStartLine(
            process_started=None if self._started is None else iso_time(self._started),
            launch=self._launch,
            restarts=self._restarts,
            memory_group=ABSENT if without else self._oom.group,
            memory_events=ABSENT if without else self._oom.path,
        )

    def oom_kills(self) -> int | None:
        """How many processes of this cgroup the OOM killer has killed; None if the kernel does not report it."""
        return self._oom.count()

    def resumption(self) -> Resumption:
        """How this attempt began."""
        resume, replay = self._resume, self._replay
        since, restored = resume.restoring_since, resume.source is not None
        return Resumption(
            optimizers=resume.optimizers if resume.optimizers > 1 else None,
            restore_seconds=round((resume.restore_ns + (now_ns() - since if since else 0)) / NS, 6),
            resumed_from=resume.source,
            resumed_at_optimizer_steps=resume.at_optimizer_steps if restored else None,
            resumed_step=resume.step if restored else None,
            replayed_batches=replay.batches,
            replay_seconds=round(replay.seconds, 6),
            replay_wait_seconds=round(replay.wait_seconds, 6),
        )

    def beat(self) -> Heartbeat:
        """Read the current state of this process."""
        accounting, ledger = self._accounting, self._accounting.ledger
        beat = Heartbeat(
            life=self.life,
            unix_seconds=round(self._wall.unix_seconds(accounting.updated_ns), 6),
            wall_seconds=round(ledger.wall_seconds, 6),
            steps_total=accounting.steps_total,
            optimizer_steps_total=self._tracker.optimizer_steps,
            ledger_total_seconds={category: round(ns / NS, 6) for category, ns in ledger.ns.items()},
            first_wait_seconds=round(ledger.first_wait_ns / NS, 6),
            seconds_before=round(self.seconds_before, 6),
            kept_seconds=round(self.phases.kept_seconds, 6),
            saves_completed=self.phases.saves_completed,
            resumption=self.resumption(),
            samples_total=accounting.trained_samples(),
            tokens_total=accounting.tokens(),
            oom_kills_total=self._oom.count(),
        )
        return structs.replace(beat, stuck=self._stuck.so_far(beat))
