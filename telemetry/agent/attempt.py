"""This attempt of the run: its replay, the times in which it was stuck, and its heartbeat.

    RUN_DIR/attempts/LIFE.beat      the newest state of a process, while it is there or if it was killed

A life is one agent in one process.
"""

from __future__ import annotations

import os
import secrets
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.agent.ending import EndEvidence
from telemetry.agent.phase_log import PhaseLog
from telemetry.log.lines import ABSENT, Heartbeat, Resumption, RunStartLine
from telemetry.model.records import COMPUTE, DATA_WAIT, REPLAY, STARTUP
from telemetry.safety.files import Descriptor, opened, remove_file
from telemetry.safety.processes import process_started
from telemetry.sources.cgroup import OomCounter
from telemetry.util.clock import NS, iso_time, now_ns
from telemetry.util.identity import launch_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from telemetry.loop.ledger import Accounting
    from telemetry.model.records import Step
    from telemetry.safety.errors import ErrorLog
    from telemetry.seams.tracker import StepTracker
    from telemetry.util.clock import WallClock


# -- replay: batches that a resumed run draws and throws away to come to where its checkpoint was written --------------

_MIN_BATCHES: Final = 3
"""A loop that reads one or two batches ahead does not throw them away."""

_MAX_BATCHES: Final = 1 << 18
"""With so many batches and no end in sight, there is no replay."""


class Replay:
    """Counts the batches of a resumed run without an optimizer step, and adds up their seconds.

    How many batches an optimizer step takes shows in two looks at both counts, after the first optimizer step. The
    batches that are left were thrown away.

    Attributes:
        settled: whether the replay has been decided, or cannot be any more.
        batches: batches thrown away; None before that is known. ``seconds``, ``wait_seconds``: what they took in the
            loop, and in its waits.
    """

    def __init__(self) -> None:
        self.settled = False
        self.batches: int | None = None
        self.seconds = self.wait_seconds = 0.0
        self._seconds, self._waits = array("d"), array("d")  # of each closed step
        self._first_look: tuple[int, int] | None = None

    def add(self, steps: Sequence[Step]) -> None:
        """Add closed steps."""
        if self.settled:
            return
        self._seconds.extend(step.seconds for step in steps)
        self._waits.extend(step.wait_seconds for step in steps)
        if len(self._seconds) > _MAX_BATCHES:
            self.settle(0, 0.0)

    def look(self, batches: int, optimizer_steps: int, first_wait_seconds: float) -> None:
        """Decide how much was replay, if that is possible.

        Args:
            batches: those of steps that had closed at a moment.
            optimizer_steps: steps of the whole model until then, since its state was loaded.
            first_wait_seconds: the wait for the first batch, which is no replay.
        """
        if self.settled or optimizer_steps < 1 or batches > len(self._seconds):
            return
        before, steps = self._first_look = self._first_look or (batches, optimizer_steps)
        if optimizer_steps == steps:
            return
        each = max(1, round((batches - before) / (optimizer_steps - steps)))
        if optimizer_steps - steps >= 2 * each - 1:  # else the count of an open group may hide what a step takes
            left = min(batches - each * optimizer_steps, before - each * steps)
            self.settle(left if left >= _MIN_BATCHES else 0, first_wait_seconds)

    def settle(self, batches: int, first_wait_seconds: float) -> None:
        """Decide that so many batches were replay."""
        self.settled, self.batches = True, batches
        if batches:
            self.seconds = max(0.0, sum(self._seconds[:batches]) - first_wait_seconds)
            self.wait_seconds = max(0.0, sum(self._waits[:batches]) - first_wait_seconds)
        self._seconds, self._waits = array("d"), array("d")


# -- the heartbeat of this process, and what the log has of its attempt ------------------------------------------------

FOLDER: Final = "attempts"
"""The folder's name in the run folder."""

_BEAT_BYTES: Final = 1024
"""Every heartbeat is padded to this size, so that it covers the one before."""

_RETRY_SECONDS: Final = 30
"""The agent tries a failed heartbeat again after this time."""


class StuckTimes:
    """Adds up how long an attempt has been stuck, by place: see ``stuck_total_seconds`` of a `TotalsLine`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._place = ""
        self._now = 0.0

    def follow(self, stuck_for_seconds: float, place: str) -> None:
        """Take how long the process is stuck now, and where; 0 if it is not stuck."""
        if stuck_for_seconds < self._now:
            self._now = 0.0  # it went on
        if stuck_for_seconds and not self._now:
            self._place = place
        if stuck_for_seconds:
            so_far = self.seconds.get(self._place, 0.0) + stuck_for_seconds - self._now
            self.seconds[self._place] = round(so_far, 6)
        self._now = stuck_for_seconds


class AttemptLog:
    """Collects what the log and the heartbeat need about this attempt: its resumption, phases, stuck times and end.

    Attributes:
        life: names this agent in its log and in its heartbeat.
        newest: the state in the newest heartbeat.
        seconds_before: how long the process had run when the agent started.
        end: what is known of the end of this process.
        oom: counts the processes of this cgroup that the OOM killer has killed.
        phases: the phases and checkpoints.
        stuck: how long it has been stuck.
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
        self._tracker = tracker
        self._accounting = accounting
        self._wall = wall
        self._errors = errors
        self.life = secrets.token_hex(8)
        self._replay = Replay()
        self.stuck = StuckTimes()
        self._path = run_dir / FOLDER / f"{self.life}.beat"
        self._file: Descriptor | None = None
        self._next_beat_ns = 0
        self._told = False
        self._started = process_started(pid)
        # Read once: the clock may be stepped later.
        began = wall.unix_seconds(accounting.ledger.start_ns)
        self.seconds_before = 0.0 if self._started is None else max(0.0, began - self._started)
        self._launch, self._restarts = launch_of()
        self.oom = OomCounter()
        self.end = EndEvidence()
        self.phases = PhaseLog(tracker.resume.saves, wall)
        self.newest = self.beat()

    @property
    def has_batch(self) -> bool:
        """Whether the first batch has come."""
        return self._accounting.ledger.batches > 0

    @property
    def _restored(self) -> bool:
        """Whether a state was loaded that has had steps, or that may have had some.

        Accelerate loads the state of an optimizer that is new, too.
        """
        resume = self._tracker.resume
        return bool(resume.restore_ns if resume.step is None else resume.step)

    def add_steps(self, steps: list[Step]) -> None:
        """Look for replay in steps that have closed."""
        self._replay.add(steps)

    def tick(self, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Write a heartbeat. Called when everything up to now has been counted. See `follow_stuck`."""
        self.settle_replay()
        self.follow_stuck(stuck_for_seconds, stuck_in)
        self.newest = self.beat()
        if now_ns() < self._next_beat_ns:
            return
        try:
            self._write(msgspec.json.encode(self.newest))
        except (OSError, ValueError) as error:
            self._next_beat_ns = now_ns() + int(_RETRY_SECONDS * NS)  # the cause, such as a full disk, may last
            if not self._told:
                self._told = True
                self._errors.tell("heartbeat", f"no heartbeats: {error}; the log tells when this process was killed")

    def _write(self, content: bytes) -> None:
        """Overwrite the heartbeat with one system call, which needs no new block on the disk.

        Raises:
            OSError: the file cannot be written.
            ValueError: the heartbeat is too long.
        """
        if len(content) >= _BEAT_BYTES:
            raise ValueError(f"a heartbeat has at most {_BEAT_BYTES - 1} bytes, not {len(content)}")
        if self._file is None or not self._file.is_in_place():
            self.forget()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = Descriptor(opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
        os.pwrite(self._file.number, content.ljust(_BEAT_BYTES - 1) + b"\n", 0)

    def follow_stuck(self, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Take how long the process is stuck now, and in which category of the ledger; 0 and None if it is not."""
        resume, place = self._tracker.resume, stuck_in or ""
        if place in {DATA_WAIT, COMPUTE} and not self.has_batch:
            place = STARTUP
        elif place in {DATA_WAIT, COMPUTE} and self._restored:
            place = place if self._tracker.optimizer_steps > resume.at_optimizer_steps else REPLAY
        self.stuck.follow(stuck_for_seconds, place)

    def settle_replay(self, *, ended: bool = False) -> None:
        """Decide about the replay, if that is possible. ``ended``: no more steps will come."""
        resume, first_wait = self._tracker.resume, self._accounting.ledger.first_wait_ns / NS
        batches, steps = resume.counts
        self._replay.look(batches, (steps - resume.at_optimizer_steps) // max(1, resume.optimizers), first_wait)
        if self._tracker.optimizer_steps and not self._replay.settled:
            if self._restored:
                self._tracker.slow_path()  # counts both again
            else:
                self._replay.settle(0, first_wait)
        if self._replay.settled or ended:  # the other samples count as trained
            steps = self._accounting.steps_total + self._accounting.ledger.step_is_open
            self._accounting.batches.settle((self.resumption().replayed_batches or 0) / max(1, steps))

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
        without = self.oom.path is None
        return RunStartLine(
            life=self.life,
            process_started=None if self._started is None else iso_time(self._started),
            launch=self._launch,
            restarts=self._restarts,
            memory_group=ABSENT if without else self.oom.group,
            memory_events=ABSENT if without else self.oom.path,
        )

    def resumption(self) -> Resumption:
        """How this attempt began."""
        resume, replay = self._tracker.resume, self._replay if self._restored else Replay()
        since, known = resume.restoring_since, resume.source is not None
        return Resumption(
            optimizers=resume.optimizers if resume.optimizers > 1 else None,
            restore_seconds=round((resume.restore_ns + (now_ns() - since if since else 0)) / NS, 6),
            resumed_from=resume.source,
            resumed_at_optimizer_steps=resume.at_optimizer_steps if known else None,
            resumed_step=resume.step if known else None,
            replayed_batches=replay.batches,
            replay_seconds=round(replay.seconds, 6),
            replay_wait_seconds=round(replay.wait_seconds, 6),
        )

    def beat(self) -> Heartbeat:
        """Read the current state of this process."""
        accounting, ledger = self._accounting, self._accounting.ledger
        return Heartbeat(
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
            oom_kills_total=self.oom.count(),
            stuck_total_seconds=dict(self.stuck.seconds),
        )
