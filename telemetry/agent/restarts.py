"""Attempts of a run: what one attempt leaves for the next, and what restarts and hangs cost.

    RUN_DIR/attempts/LIFE.beat      the newest state of a process, while it is there or if it was killed
    RUN_DIR/attempts/run.json       the number of the attempt, and what the run has lost so far; written by rank 0
    RUN_DIR/attempts/rank-N.json    the steps, samples and tokens of a rank

The last two are written when an attempt starts, when a checkpoint is complete and when the process ends. If it is
killed, its heartbeat is newer, and the next attempt continues from both. A life is one agent of a process.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, structs

from telemetry.node.metrics import AttemptView
from telemetry.records import CHECKPOINT, COMPUTE, DATA_WAIT, OTHER, PhaseSpan, phase
from telemetry.records import STARTUP as LEDGER_STARTUP
from telemetry.sources.cgroup import OomCounter
from telemetry.util import processes as identities
from telemetry.util.clock import NS, iso_time, now_ns
from telemetry.util.files import Descriptor, opened, read_small, remove_file, replace_file
from telemetry.util.processes import process_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import SavedCheckpoint, Step, Totals
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

FOLDER: Final = "attempts"
"""Of the run folder."""

RUN_FILE: Final = "run.json"

BEAT_BYTES: Final = 1024
"""Size of a heartbeat. Each is filled up to it, so that nothing of a longer one before is left behind it."""

WRITTEN: Final = "checkpoint_write"
"""Name of the phase of a checkpoint that was completed on another thread."""

_MAX_BYTES: Final = 8192

_RETRY_SECONDS: Final = 30
"""After this time a heartbeat that could not be written is tried again."""

_WRITE_SECONDS: Final = 30.0
"""The state of the run is written at most so often: the heartbeat has what has happened since."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""Shorter phases are in the ledger, but no line of the log. If they are checkpoints, the newest one of a tick is."""

_MAX_PHASE_LINES: Final = 20
"""If more phases have ended since the tick before, the longest have lines. Each line is a write, after which the
agent thread waits for the GIL. Beside 250 phases a second, whose C calls held the GIL, it had no time for a tick."""

_SAME_SECONDS: Final = 0.01
"""A heartbeat has rounded figures. No checkpoint is so soon after another one."""

REDONE: Final = "redone"
RESTORE: Final = "restore"
REPLAY: Final = "replay"
STARTUP: Final = "startup"
STUCK: Final = "stuck"
DOWN: Final = "down"

LOST: Final = (REDONE, RESTORE, REPLAY, STARTUP, STUCK, DOWN)
"""What restarts and hangs cost: the values of the ``category`` label."""

Figure = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds. No run has more of them, and no clock shows more: a larger number is damaged."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


# -- what one attempt leaves for the next ------------------------------------------------------------------------------


class StuckTime(msgspec.Struct, frozen=True, array_like=True):
    """For how long an attempt has been stuck.

    Attributes:
        seconds: in all.
        in_startup: in hangs that began in the first wait; ``in_replay``: in the replay.
        since_kept: in hangs that began after the newest complete checkpoint. ``kept_seconds``: of the loop up to that.
    """

    seconds: Figure = 0.0
    in_startup: Figure = 0.0
    in_replay: Figure = 0.0
    since_kept: Figure = 0.0
    kept_seconds: Figure = 0.0


class Resumption(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an attempt began. What did not happen is absent.

    Attributes:
        optimizers: how many have stepped, if more than one.
        restore_seconds: time in loading functions before the first step.
        resumed_step: optimizer steps that the loaded state contains. ``resumed_from``: what told so.
        resumed_at_optimizer_steps: optimizer steps of the process when it was loaded.
        replayed_batches: batches that were thrown away. ``replay_seconds``, ``replay_wait_seconds``: their part of the
            loop's time, and of its waits.
    """

    optimizers: Count | None = None
    restore_seconds: Figure = 0.0
    resumed_step: Count | None = None
    resumed_from: str | None = None
    resumed_at_optimizer_steps: Count | None = None
    replayed_batches: Count = 0
    replay_seconds: Figure = 0.0
    replay_wait_seconds: Figure = 0.0


class Beat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The newest state of a process, which shows when it was killed and what it had done by then.

    Attributes:
        unix_seconds: time of this state. ``wall_seconds``: since the agent started.
        ledger_total_seconds: seconds by category. ``first_wait_seconds``: waited for the first batch.
        seconds_before: how long the process had been there when the agent started.
        saves_completed: checkpoints that can be resumed from; ``kept_seconds``: of the training loop up to the newest.
        samples_total, tokens_total: None if they are unknown.
        oom_kills_total: of the cgroup; None if it has no such counter.
        stuck: None if it was not stuck, and on other ranks than 0.
    """

    life: str
    unix_seconds: Figure
    wall_seconds: Figure
    steps_total: Count
    optimizer_steps_total: Count
    ledger_total_seconds: dict[str, Figure]
    first_wait_seconds: Figure
    seconds_before: Figure
    kept_seconds: Figure
    saves_completed: Count
    resumption: Resumption
    samples_total: Count | None = None
    tokens_total: Count | None = None
    oom_kills_total: Count | None = None
    stuck: StuckTime | None = None

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.ledger_total_seconds.get(DATA_WAIT, 0.0) + self.ledger_total_seconds.get(COMPUTE, 0.0)

    @property
    def began(self) -> float:
        """The first seconds of the loop: no part of it that can be kept."""
        return self.first_wait_seconds + self.resumption.replay_seconds

    @property
    def cut(self) -> float:
        """Seconds of the loop up to the newest checkpoint, or up to the first step."""
        return max(self.began, self.kept_seconds if self.saves_completed else 0.0)

    @property
    def in_replay(self) -> bool:
        """Whether the process resumed from an optimizer's state, draws batches, and its optimizer has not stepped."""
        loaded_at = self.resumption.resumed_at_optimizer_steps
        return loaded_at is not None and self.optimizer_steps_total <= loaded_at and self.steps_total >= _MIN_BATCHES


class RunState(msgspec.Struct, frozen=True):
    """The state of a run, kept by rank 0.

    Attributes:
        run: its name.
        attempt: number of the attempt that wrote this.
        process: tells the process of rank 0 from others; ``life``: its agent, whose heartbeat may be newer.
        time: Unix time of this state.
        finished: whether the attempt has ended by itself, and its work is done.
        progress: whether the attempt has completed a checkpoint.
        without_progress: how many attempts directly before this one have ended without one.
        loop_seconds: of the attempt's training loop; ``kept_seconds``: up to its newest complete checkpoint.
        stuck_since_kept: the part of it after that in which the run was stuck.
        in_replay: whether its optimizer has not stepped since it was loaded, although batches were drawn.
        carried: seconds lost in earlier attempts, by category; ``own``: in this one.
        stuck_within: the part of ``own`` in which the run was stuck, by category. It counts only as stuck.
    """

    run: str
    attempt: Count = 0
    process: str = ""
    life: str = ""
    time: Figure = 0.0
    finished: bool = False
    progress: bool = False
    without_progress: Count = 0
    loop_seconds: float = 0.0
    kept_seconds: Figure = 0.0
    stuck_since_kept: Figure = 0.0
    in_replay: bool = False
    carried: dict[str, Figure] = {}
    own: dict[str, Figure] = {}
    stuck_within: dict[str, Figure] = {}

    def lost(self) -> dict[str, float]:
        """Seconds lost so far, by category."""
        return {
            name: self.carried.get(name, 0.0) + max(0.0, self.own.get(name, 0.0) - self.stuck_within.get(name, 0.0))
            for name in LOST
        }

    def with_beat(self, beat: Beat) -> RunState:
        """With the figures of its attempt, except for how long that was stuck."""
        restore = beat.resumption.restore_seconds if self.attempt else 0.0
        startup = max(0.0, beat.ledger_total_seconds.get(LEDGER_STARTUP, 0.0) - restore)
        own = {
            STARTUP: beat.seconds_before + startup + beat.first_wait_seconds,
            RESTORE: restore,
            REPLAY: beat.resumption.replay_seconds,
        }
        return structs.replace(
            self,
            own=own,
            loop_seconds=beat.loop_seconds - beat.began,
            kept_seconds=max(0.0, beat.kept_seconds - beat.began) if beat.saves_completed else 0.0,
            progress=beat.saves_completed > 0,
            in_replay=beat.in_replay,
        )

    def with_stuck(self, stuck: StuckTime) -> RunState:
        """With the time for which the attempt was stuck."""
        return structs.replace(
            self,
            own=self.own | {STUCK: stuck.seconds},
            stuck_since_kept=stuck.since_kept if self.kept_seconds < stuck.kept_seconds + _SAME_SECONDS else 0.0,
            stuck_within={STARTUP: stuck.in_startup, REPLAY: stuck.in_replay},
        )

    def newer(self, beat: Beat) -> RunState:
        """With the heartbeat of the process that wrote this, if that is newer."""
        if beat.life != self.life or beat.unix_seconds <= self.time:
            return self
        found = self.with_beat(beat)
        if beat.stuck is not None:
            found = found.with_stuck(beat.stuck)
        else:
            kept_before = found.kept_seconds < self.kept_seconds + _SAME_SECONDS
            found = structs.replace(
                found,
                own=found.own | {STUCK: self.own.get(STUCK, 0.0)},
                stuck_since_kept=self.stuck_since_kept if kept_before else 0.0,
            )
        return structs.replace(found, time=beat.unix_seconds, progress=self.progress or found.progress)

    def next(self, *, process: str, life: str, started: float) -> RunState:
        """The state that the next attempt begins with.

        Args:
            process: tells its process from others.
            life: its agent.
            started: Unix time at which its process started.
        """
        # The agent was stopped and started again; if it was not stopped, the process has executed another program.
        if process == self.process and self.finished:
            return RunState(self.run, self.attempt, process, life, self.time, progress=self.progress,
                            without_progress=self.without_progress, carried=self.lost())  # fmt: skip
        carried = self.lost()
        carried[DOWN] += max(0.0, started - self.time)
        if not self.finished:
            in_vain = REPLAY if self.in_replay else REDONE
            carried[in_vain] += max(0.0, self.loop_seconds - self.kept_seconds - self.stuck_since_kept)
        stalled = 0 if self.progress or self.finished else self.without_progress + 1
        return RunState(self.run, self.attempt + 1, process, life, started, without_progress=stalled, carried=carried)


class RankCounts(msgspec.Struct, frozen=True):
    """The counts of a rank.

    Attributes:
        run: name of the run.
        life: the agent that wrote this, whose heartbeat may be newer.
        samples_before, tokens_before, steps_before: of the attempts before. One that did not know its own has added
            nothing.
        samples, tokens, steps: of this attempt; 0 if they are not known, or not yet.
    """

    run: str
    life: str
    samples_before: Count = 0
    tokens_before: Count = 0
    steps_before: Count = 0
    samples: Count = 0
    tokens: Count = 0
    steps: Count = 0

    def newer(self, beat: Beat) -> RankCounts:
        """With the heartbeat of the process that wrote this, which is there if it was killed."""
        return structs.replace(
            self,
            samples=max(self.samples, beat.samples_total or 0),
            tokens=max(self.tokens, beat.tokens_total or 0),
            steps=max(self.steps, beat.steps_total),
        )

    def next(self, life: str) -> RankCounts:
        """What the next attempt begins with. ``life``: its agent."""
        return RankCounts(
            self.run,
            life,
            samples_before=self.samples_before + self.samples,
            tokens_before=self.tokens_before + self.tokens,
            steps_before=self.steps_before + self.steps,
        )


_Record = TypeVar("_Record", RunState, RankCounts, Beat)


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """The record in a file; None if it cannot be read or makes no sense."""
    try:
        return msgspec.json.decode(read_small(path, _MAX_BYTES), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


def _beat_of(folder: Path, life: str) -> Beat | None:
    """The heartbeat of a life, which comes from a file: it must not lead out of the folder."""
    return read_record(folder / f"{life}.beat", Beat) if life.isalnum() else None


def _write(path: Path, record: RunState | RankCounts) -> None:
    content = msgspec.json.encode(record) + b"\n"
    try:
        replace_file(path, content, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, 0o644)


# -- this attempt ------------------------------------------------------------------------------------------------------


class Heartbeat:
    """The file with the newest state of this process.

    It is written over in place once a tick: one system call, and no new block on the disk. A process that ends by
    itself removes it: its log has everything.

    Args:
        path: unique to this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Descriptor | None = None

    def write(self, content: bytes) -> None:
        """Write the newest state.

        Raises:
            OSError: it cannot be written.
            ValueError: it is too long.
        """
        if len(content) >= BEAT_BYTES:
            raise ValueError(f"a heartbeat has at most {BEAT_BYTES - 1} bytes, not {len(content)}")
        if self._file is None or not self._file.is_in_place():
            self.forget()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = Descriptor(opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
        os.pwrite(self._file.number, content.ljust(BEAT_BYTES - 1) + b"\n", 0)

    def end(self) -> None:
        """The process ends by itself."""
        if self._file is not None:
            remove_file(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the file: in a forked child, whose copy it is."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass


class AttemptLog:
    """What the log tells of this attempt: where it resumed, its checkpoints, and that it lives. Agent thread only.

    Args:
        run_dir: the run folder.
        pid: of this process.
        life: of this agent, see `EventLog`.

    Attributes:
        end: how this process ends.
        seconds_before: how long the process had been there when the agent started.
        saves_completed: checkpoints that can be resumed from; ``kept_seconds``: of the training loop up to the newest.
        stuck: for how long it has been stuck, for the heartbeat; None before that is known. On rank 0.
    """

    def __init__(
        self,
        run_dir: Path,
        pid: int,
        life: str,
        *,
        tracker: StepTracker,
        accounting: Accounting,
        wall: WallClock,
        errors: ErrorLog,
    ) -> None:
        self._resume = tracker.resume
        self._tracker = tracker
        self._accounting = accounting
        self._wall = wall
        self._errors = errors
        self._life = life
        self._replay = ReplayWatch()
        self._heartbeat = Heartbeat(run_dir / FOLDER / f"{life}.beat")
        self._next_beat_ns = 0
        self._told = False
        self._waiting: list[SavedCheckpoint] = []  # whose phase has not come out of the ledger yet
        self._before_last: Sequence[SavedCheckpoint] = ()
        self._started = identities.process_started(pid)
        # Once: later the clock may have been stepped.
        began = wall.unix_seconds(accounting.ledger.start_ns)
        self.seconds_before = 0.0 if self._started is None else max(0.0, began - self._started)
        self._launch, self._restarts = identities.launch_of()
        self._oom = OomCounter()
        self.end = EndEvidence()
        self.saves_completed = 0
        self.kept_seconds = 0.0
        self.stuck: StuckTime | None = None
        self._holds_optimizer = False  # whether any checkpoint does: then others are not resumed from
        self._begun_at: dict[int, float] = {}  # seconds of the loop at asynchronous checkpoints, by optimizer steps

    def unix_now(self) -> float:
        """Unix time."""
        return self._wall.unix_seconds(now_ns())

    def add_steps(self, steps: list[Step]) -> None:
        """Steps have closed."""
        if not self._replay.settled:
            self._replay.add(steps, self._tracker.optimizer_steps)

    def tick(self) -> None:
        """Everything up to now has been counted: write it where it outlives this process."""
        self._settle_replay()
        if self._replay.settled:
            self._accounting.samples.settle(self._replay.batches)
        if now_ns() < self._next_beat_ns:
            return
        try:
            self._heartbeat.write(self._state())
        except (OSError, ValueError) as error:
            self._next_beat_ns = now_ns() + _RETRY_SECONDS * NS  # it may last for long, or the disk is full for a while
            if not self._told:
                self._told = True
                self._errors.tell("heartbeat", f"no heartbeats: {error}; the log tells when this process was killed")

    def _settle_replay(self, *, ended: bool = False) -> None:
        self._replay.settle(
            self._tracker.optimizer_steps,
            self._accounting.ledger.first_wait_ns / NS,
            most=self._accounting.steps_without_optimizer,
            ended=ended,
        )

    def end_replay(self) -> None:
        """No more steps could tell how many batches were thrown away: samples of the others are trained."""
        self._settle_replay(ended=True)
        self._accounting.samples.settle(self._replay.batches)

    def close(self) -> None:
        """The process ends by itself, and the log tells all."""
        self._heartbeat.end()

    def after_fork_in_child(self) -> None:
        """The file is the parent's."""
        self._heartbeat.forget()

    def head_fields(self) -> dict[str, Any]:
        """For the first line of a log."""
        return {
            "process_started": None if self._started is None else iso_time(self._started),
            "launch": self._launch,
            "restarts": self._restarts,
            **self._oom.head_fields(),
            **self._oom_kills(),
        }

    def fields(self) -> dict[str, Any]:
        """Of the run so far, for every line with totals."""
        found: dict[str, Any] = {"optimizer_steps_total": self._tracker.optimizer_steps, **self._oom_kills()}
        resumption = msgspec.to_builtins(self._resumption())
        return found | ({"resumption": resumption} if resumption else {})

    def _oom_kills(self) -> dict[str, int]:
        count = self._oom.count()
        return {} if count is None else {"oom_kills_total": count}

    def _resumption(self) -> Resumption:
        resume, replay = self._resume, self._replay
        since, loaded = resume.restoring_since, resume.source is not None
        return Resumption(
            optimizers=resume.optimizers if resume.optimizers > 1 else None,
            restore_seconds=(resume.restore_ns + (now_ns() - since if since else 0)) / NS,
            resumed_step=resume.step if loaded else None,
            resumed_from=resume.source,
            resumed_at_optimizer_steps=resume.at_optimizer_steps if loaded else None,
            replayed_batches=replay.batches,
            replay_seconds=replay.seconds,
            replay_wait_seconds=replay.wait_seconds,
        )

    def phase_lines(self, spans: Sequence[PhaseSpan], *, last: bool = False) -> Iterator[dict[str, Any]]:
        """Lines of phases that have ended, those of checkpoints with the steps that they contain.

        Args:
            spans: of the ledger, and those that the script has named.
            last: there is no later call.
        """
        pending = [*self._waiting]
        while self._resume.saves:
            pending.append(self._resume.saves.popleft())
        lines: list[tuple[bool, dict[str, Any]]] = []  # each with whether its phase was short
        shortest = _shortest_of_line(spans)
        for span in spans:
            of_ledger = span.category == CHECKPOINT and span.loop_seconds is not None
            save = next((each for each in pending if _is_of(each, span)), None) if of_ledger else None
            if save is not None:
                pending.remove(save)
            line = self._line(span) | ({} if save is None else self._of(save, span.loop_seconds))
            short = span.seconds < shortest
            if not short or (save is not None and save.complete):
                lines.append((short, line))
        newest_short = max((place for place, (short, _) in enumerate(lines) if short), default=None)
        for place, (short, line) in enumerate(lines):
            if not short or place == newest_short:
                yield line
        self._waiting = []
        for save in pending:
            if not (save.background or last or save in self._before_last):
                self._waiting.append(save)  # its span is still in the ring
                continue
            seconds = (save.end_ns - save.start_ns) / NS
            yield self._line(PhaseSpan(WRITTEN, OTHER, save.start_ns, seconds)) | self._of(save, None)
        self._before_last = self._waiting

    def _line(self, span: PhaseSpan) -> dict[str, Any]:
        return {**phase(span, self._wall.iso(span.start_ns))}

    def _of(self, save: SavedCheckpoint, loop: tuple[float, float] | None) -> dict[str, Any]:
        self._count(save, None if loop is None else sum(loop))
        fields: dict[str, Any] = {
            "complete": save.complete,
            "holds_optimizer": save.holds_optimizer,
            "optimizer_steps_total": save.optimizer_steps,
            "steps_total": save.steps,
        }
        if loop is not None:
            fields["loop_seconds"] = {"data_wait": round(loop[0], 6), "compute": round(loop[1], 6)}
        return fields

    def _count(self, save: SavedCheckpoint, loop_seconds: float | None) -> None:
        """Note the newest checkpoint that can be resumed from."""
        if loop_seconds is not None and not save.complete:
            self._begun_at = {save.optimizer_steps: loop_seconds}
        if loop_seconds is None:
            loop_seconds = self._begun_at.get(save.optimizer_steps, self.kept_seconds)
        if save.complete and (save.holds_optimizer or not self._holds_optimizer):
            self._holds_optimizer |= save.holds_optimizer
            self.saves_completed += 1
            self.kept_seconds = max(self.kept_seconds, loop_seconds)

    def beat(self) -> Beat:
        """The newest state of this process."""
        accounting, ledger = self._accounting, self._accounting.ledger
        return Beat(
            life=self._life,
            unix_seconds=round(self._wall.unix_seconds(accounting.updated_ns), 6),
            wall_seconds=round(ledger.wall_seconds, 6),
            steps_total=accounting.steps_total,
            optimizer_steps_total=self._tracker.optimizer_steps,
            ledger_total_seconds={category: round(ns / NS, 6) for category, ns in ledger.ns.items()},
            first_wait_seconds=round(ledger.first_wait_ns / NS, 6),
            seconds_before=round(self.seconds_before, 6),
            kept_seconds=round(self.kept_seconds, 6),
            saves_completed=self.saves_completed,
            resumption=self._resumption(),
            samples_total=accounting.trained_samples(),
            tokens_total=accounting.tokens(),
            oom_kills_total=self._oom.count(),
            stuck=self.stuck if self.stuck is not None and self.stuck.seconds else None,
        )

    def _state(self) -> bytes:
        return msgspec.json.encode(self.beat())


def _shortest_of_line(spans: Sequence[PhaseSpan]) -> float:
    """The shortest duration in seconds of a phase that has a line of its own."""
    if len(spans) <= _MAX_PHASE_LINES:
        return _SHORTEST_PHASE_SECONDS
    return max(_SHORTEST_PHASE_SECONDS, sorted([span.seconds for span in spans])[-_MAX_PHASE_LINES])


def _is_of(save: SavedCheckpoint, span: PhaseSpan) -> bool:
    return not save.background and save.start_ns <= span.start_ns <= save.end_ns


# -- how it ends and how it began --------------------------------------------------------------------------------------

_PEER_LOST: Final = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat",
    re.IGNORECASE,
)
"""In the text of one of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = re.compile(
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)",
    re.IGNORECASE | re.DOTALL,
)
"""Gloo's are plain ones, which also come out of ``backward()``. Their text names the line of gloo's source."""

_MAX_TEXT: Final = 20_000


class EndEvidence:
    """How this process ends, as far as that is known: an uncaught exception, an exit status, or another program.

    Python prints an exception that nobody catches, keeps it in `sys`, and only then calls the functions of `atexit`. So
    it is read there, and neither a hook nor a handler of ours is involved. The exit status of ``sys.exit`` is kept
    nowhere: ``telemetry run`` sees it pass.

    Nothing shows afterwards that the process has executed another program, such as its own script anew: it keeps its
    pid and its start, `atexit` is not called, and the agent is gone at once, as if it were killed. So the agent hooks
    the functions of ``os`` that do it, and ends before.

    Attributes:
        process_ends: whether the interpreter ends, and not only the agent.
        replaced: whether this process is about to execute another program.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._exception: BaseException | None = None
        self.replaced = False
        self.process_ends = False

    def leaving(self, code: object) -> None:
        """The script ends with this argument of ``sys.exit``."""
        # The kernel keeps the lowest byte: `sys.exit(256)` is a success.
        self._status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1

    def at_exit(self) -> None:
        """The interpreter ends. To be called by `atexit`, and nowhere else: before, an older exception may be kept."""
        self.process_ends = True
        if not hasattr(sys, "ps1"):
            last: Any = getattr(sys, "last_value", None)
            self._exception = last if isinstance(last, BaseException) else None

    @property
    def finished(self) -> bool:
        """Whether nothing tells that its work is not done."""
        return self._exception is None and not self._status and not self.replaced

    def fields(self) -> dict[str, Any]:
        """Of the last line of the log. What is not known is absent."""
        found: dict[str, Any] = {}
        if self._status is not None:
            found["exit_status"] = self._status
        if self._exception is not None:
            found["exception"] = type(self._exception).__name__
            found["lost_peer"] = _lost_peer(self._exception)
        if self.replaced:
            found["replaced"] = True
        self._exception = None
        return found


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception tells that another process of the job is gone, which then ended first.

    Only torch.distributed's exceptions tell that: the words of others are about anything, such as a data set's server.
    """
    kind = type(error)
    try:
        if kind.__module__ == "torch.distributed":
            return bool(_PEER_LOST.search(str(error)[:_MAX_TEXT]))
        return kind is RuntimeError and bool(_GLOO_PEER_LOST.search(str(error)[:_MAX_TEXT]))
    except Exception:
        return False


_MAX_COMPUTE_RATIO: Final = 0.125
"""A batch is thrown away if less than this share of a usual step's compute comes after it."""

_MIN_BATCHES: Final = 3
"""A loop that reads a batch or two ahead throws none away."""

_MAX_STEPS: Final = 1 << 16
"""Of the tick in which an optimizer steps first, which is cut off from there on."""

_USUAL: Final = 8

_ENOUGH: Final = 4
"""Steps that are sure to be no replay. One of them may be long because the machine is busy."""

_MAX_HELD_UP_RATIO: Final = 0.5
"""A batch before the first step of an optimizer may be held up for up to this share of a usual step's compute."""


class ReplayWatch:
    """Finds the replay: batches that are thrown away before the first step, to come to where a checkpoint was written.

    They look like steps that compute nothing: the loop asks for the next batch as soon as one has come.

    Attributes:
        settled: whether it is known how much was replay.
        batches: thrown away. ``seconds``, ``wait_seconds``: their part of the loop's time, and of its waits.
    """

    def __init__(self) -> None:
        self.settled = False
        self.batches = 0
        self.seconds = 0.0
        self.wait_seconds = 0.0
        # Steps before any optimizer has stepped: number, wait and compute, by the bits of their compute in ns.
        self._before: dict[int, list[float]] = {}
        self._after: list[tuple[float, float]] = []  # wait and compute of the others, and of the tick in between

    def add(self, steps: Sequence[Step], optimizer_steps: int) -> None:
        """Steps have closed. ``optimizer_steps``: counted so far, maybe later than these steps."""
        for step in () if self.settled else steps:
            wait, compute = step.wait_seconds, max(0.0, step.seconds - step.wait_seconds)
            if not optimizer_steps:
                bits = int(compute * NS).bit_length()
                if bits not in self._before:
                    self._before[bits] = [0, 0.0, 0.0]
                sums = self._before[bits]
                sums[0] += 1
                sums[1] += wait
                sums[2] += compute
            elif len(self._after) < _MAX_STEPS:
                self._after.append((wait, compute))

    def settle(self, optimizer_steps: int, first_wait_seconds: float, *, most: float, ended: bool = False) -> None:
        """Decide, once optimizers have stepped. To be called when all steps so far have been added.

        Args:
            optimizer_steps: so far.
            first_wait_seconds: the wait for the first batch, which is no replay.
            most: how many batches can have been drawn without a step of an optimizer. In a loop that steps after each
                batch it tells all. Where gradients are accumulated or steps are skipped, the durations decide.
            ended: there are no more steps to wait for.
        """
        if self.settled or optimizer_steps < 2 or not self._after:
            return
        if most < _MIN_BATCHES:
            self._end()
            return
        if optimizer_steps <= _ENOUGH and not ended:
            return
        usual = statistics.median(compute for _, compute in self._after[-min(_USUAL, optimizer_steps - 1) :])
        limit = usual * _MAX_COMPUTE_RATIO
        number, wait, compute, short = 0.0, 0.0, 0.0, 0.0
        for bits, sums in self._before.items():
            if (1 << bits) / NS <= usual * _MAX_HELD_UP_RATIO:
                number, wait, compute = number + sums[0], wait + sums[1], compute + sums[2]
            if (1 << bits) / NS <= limit:
                short += sums[0]
        if short < number / 2:  # short steps, such as those of accumulated gradients, and no replay
            number, wait, compute = 0.0, 0.0, 0.0
        else:
            for each_wait, each_compute in self._after[: _short_ones([each for _, each in self._after], limit)]:
                number, wait, compute = number + 1, wait + each_wait, compute + each_compute
        if number >= _MIN_BATCHES:
            self.batches = int(min(number, most))
            self.wait_seconds = max(0.0, wait - first_wait_seconds)
            self.seconds = self.wait_seconds + compute
        self._end()

    def _end(self) -> None:
        self.settled = True
        self._before, self._after = {}, []


def _short_ones(compute_seconds: Sequence[float], limit: float) -> int:
    """How many steps at the beginning are short, though a busy machine may make one of them long."""
    ahead, most, best = 0, 0, 0
    for place, seconds in enumerate(compute_seconds, 1):
        ahead += 1 if seconds <= limit else -1
        if ahead > most:
            most, best = ahead, place
    return best


# -- the run so far ----------------------------------------------------------------------------------------------------


class RunLosses:
    """What restarts and hangs have cost the run so far, over all its attempts. Kept by rank 0 in the state file.

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

    def tick(self, identity: Identity, *, has_batch: bool, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Bring it up to now. Write it if a checkpoint has been completed, and every 30 s while the run is stuck.

        Args:
            identity: rank 0 keeps the state of the run.
            has_batch: whether the first batch has come.
            stuck_for_seconds: for which the run has been stuck now; 0 if it is not.
            stuck_in: in which category it is stuck, or was until now.
        """
        attempt = self._attempt
        if identity.rank == 0 and self._state is None:
            self._state = self._begin(identity)
            self._write()
        beat = attempt.beat()
        self._follow_hang(beat.loop_seconds, stuck_for_seconds, stuck_in)
        if identity.rank != 0 or self._state is None:
            self._state = None
            return
        if beat.saves_completed:  # then it is known how long the replay was
            self._hangs = [hang for hang in self._hangs if hang[0] < beat.began or hang[0] >= beat.cut]
        self._first_wait = 0.0 if has_batch else beat.first_wait_seconds
        self._stuck_told = 0.0 if attempt.stuck is None else attempt.stuck.seconds
        state = self._state.with_beat(beat)
        attempt.stuck = stuck = StuckTime(
            seconds=self._stuck_before + self._stuck_now,
            in_startup=self._stuck_between(-math.inf, beat.first_wait_seconds),
            in_replay=self._stuck_between(beat.first_wait_seconds, beat.began),
            since_kept=self._stuck_between(beat.cut, math.inf),
            kept_seconds=state.kept_seconds,
        )
        self._state = state.with_stuck(stuck)
        new = beat.saves_completed != self._written_saves or self._stuck_now > 0
        if new and now_ns() - self._written_ns >= _WRITE_SECONDS * NS:
            self._write()

    def end(self, *, finished: bool) -> None:
        """The process ends by itself; ``finished``: its work is done."""
        if self._state is not None:
            self._state = structs.replace(self._state, finished=finished)
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

    def _follow_hang(self, loop_seconds: float, stuck_for_seconds: float, stuck_in: str | None) -> None:
        """Note where in the loop hangs begin, and how long they are. Those in other categories are no part of it."""
        if stuck_for_seconds < self._stuck_now:
            self._stuck_before += self._stuck_now
            if self._stuck_since is not None:
                self._hangs.append((self._stuck_since, self._stuck_now))
        if stuck_for_seconds > self._stuck_now:
            in_loop = stuck_in in {DATA_WAIT, COMPUTE}
            self._stuck_since = loop_seconds - stuck_for_seconds if in_loop else None
        self._stuck_now = stuck_for_seconds

    def _stuck_between(self, first: float, last: float) -> float:
        """For how long the run was stuck in hangs that began between these seconds of its loop."""
        hangs = [*self._hangs, *([] if self._stuck_since is None else [(self._stuck_since, self._stuck_now)])]
        return sum(seconds for began, seconds in hangs if first <= began < last)

    def _begin(self, identity: Identity) -> RunState:
        started = identities.process_started(identity.pid)
        process = f"{identity.node}/{process_name(identity.pid)}"
        now = self._attempt.unix_now()
        before = read_record(self._folder / RUN_FILE, RunState)
        if before is None or before.run != identity.run:
            return RunState(identity.run, 0, process, self._life, now)
        beat = _beat_of(self._folder, before.life)
        if beat is not None:
            before = before.newer(beat)
        if before.process == process and started is not None:  # it has been there longer, but that time is booked
            booked = max(0.0, before.time - started)
            self._attempt.seconds_before = max(0.0, self._attempt.seconds_before - booked)
        return before.next(process=process, life=self._life, started=now if started is None else started)

    def _write(self) -> None:
        if self._state is None:
            return
        self._state = structs.replace(self._state, time=self._attempt.unix_now())
        self._written_ns, saves = now_ns(), self._attempt.saves_completed
        try:
            _write(self._folder / RUN_FILE, self._state)
            self._written_saves = saves
        except OSError as error:
            self._errors.tell("attempts", f"the state of the run cannot be written: {error.strerror}")


class RunCounts:
    """The steps, samples and tokens of this rank over all attempts of the run, continued from the file of the rank.

    Args:
        folder: the folder of that file and the heartbeats.
        life: of this agent.
    """

    def __init__(self, folder: Path, life: str, errors: ErrorLog) -> None:
        self._folder = folder
        self._life = life
        self._errors = errors
        self._rank: int | None = None
        self._counts: RankCounts | None = None

    @property
    def before(self) -> tuple[int, int]:
        """Samples and tokens of the attempts before this one."""
        counts = self._counts
        return (0, 0) if counts is None else (counts.samples_before, counts.tokens_before)

    @property
    def steps_before(self) -> int:
        """Training steps of the attempts before this one."""
        return 0 if self._counts is None else self._counts.steps_before

    def tick(self, identity: Identity, totals: Totals) -> None:
        """Bring them up to now. At the first time, read what is there, and write that this attempt has begun."""
        if self._counts is None or self._rank != identity.rank or self._counts.run != identity.run:
            self._rank = identity.rank
            self._counts = self._begin(identity)
            self.end()
        self._counts = structs.replace(
            self._counts, samples=totals.samples or 0, tokens=totals.tokens or 0, steps=totals.steps
        )

    def end(self) -> None:
        """Write them: the process ends by itself."""
        if self._counts is None:
            return
        try:
            _write(self._folder / f"rank-{self._rank}.json", self._counts)
        except OSError as error:
            self._errors.tell("attempts", f"the counts of this rank cannot be written: {error.strerror}")

    def _begin(self, identity: Identity) -> RankCounts:
        before = read_record(self._folder / f"rank-{identity.rank}.json", RankCounts)
        if before is None or before.run != identity.run:
            return RankCounts(identity.run, self._life)
        beat = _beat_of(self._folder, before.life) if before.life != self._life else None
        return (before if beat is None else before.newer(beat)).next(self._life)
