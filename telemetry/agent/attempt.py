"""What this process leaves behind and resumes: its end, its replay, its checkpoints, its heartbeat, and the run so far.

    RUN_DIR/attempts/LIFE.beat      the newest state of a process, while it is there or if it was killed
    RUN_DIR/attempts/rank-N.json    what the attempts before have done and lost on a rank; written at the start and end

A life is one agent in one process. After a kill, the heartbeat of its life is newer than the rank's file, and the next
attempt reads both.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import structs

from telemetry.log.lines import (
    ABSENT,
    GpuMemoryFull,
    Heartbeat,
    PhaseLine,
    Resumption,
    RunEndLine,
    RunStartLine,
    Seconds,
    read_heartbeat,
    stuck_in_loop,
)
from telemetry.model.records import (
    CHECKPOINT,
    COMPUTE,
    DATA_WAIT,
    DOWN,
    FAILURES,
    GPU_MEMORY_FULL,
    LOST,
    OTHER,
    REDONE,
    REPLAY,
    RESTORE,
    SHARED_MEMORY_FULL,
    STARTUP,
    STUCK,
    Count,
    PhaseSpan,
)
from telemetry.node.metrics import AttemptView
from telemetry.safety import processes
from telemetry.safety.files import Descriptor, opened, read_small, remove_file, replace_file
from telemetry.sources.cgroup import OomCounter
from telemetry.util.clock import NS, iso_time, now_ns
from telemetry.util.stacks import is_library

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from telemetry.loop.ledger import Accounting
    from telemetry.model.records import SavedCheckpoint, Step
    from telemetry.safety.errors import ErrorLog
    from telemetry.safety.processes import Identity
    from telemetry.seams.tracker import StepTracker
    from telemetry.util.clock import WallClock


# -- how this process ends: by itself, by an exception or by an exit status --------------------------------------------

_MAX_TEXT: Final = 20_000
_MAX_CHAIN: Final = 8
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only its size is read

_SIZES: Final = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE: Final = r"(\d{1,9}(?:\.\d+)?) (bytes|[kmg]ib)"
_OUT_OF_MEMORY: Final = (
    f"tried to allocate {_SIZE}.*?total capacity of {_SIZE} of which {_SIZE} is free.*?of the allocated memory {_SIZE} "
    f"is allocated by pytorch.*?and {_SIZE} is reserved by pytorch but unallocated"
)
"""Matches the text of torch's exception, from torch 2.1 on."""

_PEER_LOST: Final = (
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat"
)
"""Matches the text of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = (
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)"
)
"""Gloo raises plain exceptions, also out of ``backward()``. Their text contains the line of gloo's source."""


class EndEvidence:
    """What is known of how this process ends: an uncaught exception or an exit status.

    Python prints an uncaught exception, keeps it in `sys`, and only then calls the functions of `atexit`. So it is read
    there, and we need neither a hook nor a handler. Nothing keeps the exit status of ``sys.exit``: ``telemetry run``
    sees it pass. A process that executes another program is gone at once, as after a kill.

    ``process_ends``: whether the interpreter ends. False: only the agent ends.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._exception: BaseException | None = None
        self._settled: RunEndLine | None = None
        self.process_ends = False

    def leaving(self, code: object) -> None:
        """Take the argument of ``sys.exit`` with which the script ends."""
        # The kernel keeps the lowest byte: `sys.exit(256)` is a success.
        self._status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1

    def at_exit(self) -> None:
        """Take the uncaught exception. Only `atexit` may call this: before that, `sys` may hold an older exception."""
        self.process_ends = True
        if not hasattr(sys, "ps1"):
            last: Any = getattr(sys, "last_value", None)
            self._exception = last if isinstance(last, BaseException) else None

    @property
    def settled(self) -> RunEndLine:
        """What the last line of the log has of it. Forgets the exception, whose frames keep objects of the script."""
        if self._settled is None:
            error, self._exception = self._exception, None
            failure = None if error is None else failure_of(error)
            shared_memory: Any = ABSENT
            gpu_memory = None if error is None or failure != GPU_MEMORY_FULL else _gpu_memory(error)
            if failure == SHARED_MEMORY_FULL:
                with suppress(OSError):
                    size = os.statvfs(_SHARED_MEMORY)
                    shared_memory = size.f_blocks * size.f_frsize
            self._settled = RunEndLine(
                exit_status=ABSENT if self._status is None else self._status,
                exception=ABSENT if error is None else type(error).__name__,
                exception_at=ABSENT if error is None else _users_line(error),
                failure=failure or ABSENT,
                shared_memory_bytes=shared_memory,
                gpu_memory=gpu_memory or ABSENT,
                lost_peer=ABSENT if error is None else _lost_peer(error),
            )
        return self._settled


def _users_line(error: BaseException) -> str | None:
    """The innermost line of the user's code in an exception; None if there is none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = f"{code.co_name} at {os.path.basename(code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119 - text
        trace = trace.tb_next
    return found


def failure_of(error: BaseException) -> str | None:
    """What an exception of torch means, see `FAILURES`. Its text is only matched, because it may hold anything."""
    texts = _texts(error)
    return next(
        (name for name, each in FAILURES.items() if any(re.search(each.told, text, re.DOTALL) for text in texts)), None
    )


def _texts(error: BaseException) -> list[str]:
    """The texts of an exception and of those that it follows, as far as they may be torch's."""
    texts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(texts) < _MAX_CHAIN:
        if isinstance(each, (RuntimeError, MemoryError, OSError)):
            texts.append(_text(each))
        each = each.__cause__ or each.__context__
    return texts


def _gpu_memory(error: BaseException) -> GpuMemoryFull | None:
    """The sizes in the text of torch's exception; None if it has no such text."""
    for text in _texts(error):
        found = re.search(_OUT_OF_MEMORY, text, re.DOTALL)
        if found is not None:
            sizes = zip(found.groups()[::2], found.groups()[1::2], strict=True)
            return GpuMemoryFull(*(round(float(number) * _SIZES[unit]) for number, unit in sizes))
    return None


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process of the job ended first.

    Only torch.distributed's exceptions are read: other ones may name any peer, such as a data set's server.
    """
    if type(error).__module__ == "torch.distributed":
        return bool(re.search(_PEER_LOST, _text(error)))
    return type(error) is RuntimeError and bool(re.search(_GLOO_PEER_LOST, _text(error), re.DOTALL))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_TEXT].lower()
    except Exception:  # the script's own class may raise anything
        return ""


# -- replay: batches that a resumed run draws and throws away to come to where its checkpoint was written --------------

_MIN_BATCHES: Final = 3
"""A loop that reads one or two batches ahead does not throw them away."""

_MAX_GROUP: Final = 1024
"""At most so many batches are taken for one optimizer step."""

_MAX_STEPS: Final = 1 << 16
"""With so many steps after the first optimizer step it must be known how many batches one takes."""


class Replay:
    """Counts the batches of a resumed run without an optimizer step, and adds up their seconds.

    All batches are counted, and all optimizer steps. How many batches an optimizer step takes shows in two looks at
    both counts, after the first optimizer step. The batches that are left were thrown away.

    Attributes:
        settled: whether the replay has been decided, or cannot be any more.
        batches: batches thrown away; None before that is known. ``seconds``, ``wait_seconds``: what they took in the
            loop, and in its waits.
    """

    def __init__(self) -> None:
        self.settled = False
        self.batches: int | None = None
        self.seconds = self.wait_seconds = 0.0
        self._oldest = (0, 0.0, 0.0)  # number, seconds and wait of the first steps
        self._newer: deque[Step] = deque()
        self._look: tuple[int, int] | None = None  # the first

    def add(self, steps: Sequence[Step], *, trained: bool) -> None:
        """Add closed steps. ``trained``: whether an optimizer has stepped."""
        if self.settled:
            return
        self._newer.extend(steps)
        while not trained and len(self._newer) > _MAX_GROUP:
            number, seconds, wait = self._oldest
            step = self._newer.popleft()
            self._oldest = number + 1, seconds + step.seconds, wait + step.wait_seconds
        if len(self._newer) > _MAX_GROUP + _MAX_STEPS:
            self.settle(0, 0.0)

    def look(self, batches: int, optimizer_steps: int, first_wait_seconds: float) -> None:
        """Decide how much was replay, if that is possible.

        Args:
            batches: those of steps that had closed at a moment.
            optimizer_steps: steps of the whole model until then, since its state was loaded.
            first_wait_seconds: the wait for the first batch, which is no replay.
        """
        if self.settled or optimizer_steps < 1 or batches > self._oldest[0] + len(self._newer):
            return
        before, steps = self._look = self._look or (batches, optimizer_steps)
        if optimizer_steps == steps:
            return
        each = max(1, round((batches - before) / (optimizer_steps - steps)))
        if optimizer_steps - steps >= 2 * each - 1:  # else the count of an open group may hide what a step takes
            left = min(batches - each * optimizer_steps, before - each * steps)
            self.settle(left if left >= _MIN_BATCHES else 0, first_wait_seconds)

    def settle(self, batches: int, first_wait_seconds: float) -> None:
        """Decide that so many batches were replay."""
        number, seconds, wait = self._oldest
        for _ in range(min(batches - number, len(self._newer))):
            step = self._newer.popleft()
            seconds, wait = seconds + step.seconds, wait + step.wait_seconds
        self.settled, self.batches = True, batches
        if batches:
            self.wait_seconds = max(0.0, wait - first_wait_seconds)
            self.seconds = max(0.0, seconds - first_wait_seconds)
        self._newer.clear()


# -- the log lines of phases, and the checkpoints from which a run can be resumed --------------------------------------

_WRITTEN: Final = "checkpoint_write"
"""The phase of a checkpoint that another thread has completed."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""A shorter phase is only in the ledger. Of shorter checkpoints, the newest complete one of a tick still has a line."""

_MAX_PHASE_LINES: Final = 20
"""If more phases end between two ticks, only the longest have lines. Each line is a write, after which the agent thread
waits for the GIL. With 250 phases a second whose C calls held the GIL, the agent had no time for a tick."""


class PhaseLog:
    """Makes the lines of phases, and follows the checkpoints.

    Args:
        saves: checkpoints that the hooks have seen; this empties it.
        wall: dates the phases.

    Attributes:
        saves_completed: checkpoints that a run can resume from.
        kept_seconds: seconds of the training loop before the newest of them, without those in which it was stuck.
    """

    def __init__(self, saves: deque[SavedCheckpoint], wall: WallClock) -> None:
        self._saves = saves
        self._wall = wall
        self._waiting: list[SavedCheckpoint] = []  # the ledger has not yet returned their phases
        self._before_last: Sequence[SavedCheckpoint] = ()
        self.saves_completed = 0
        self.kept_seconds = 0.0
        self._holds_optimizer = False  # once a checkpoint holds an optimizer, a run does not resume from others
        self._begun_at: dict[int, float] = {}  # loop seconds when an asynchronous checkpoint began, by optimizer steps

    def lines(self, spans: Sequence[PhaseSpan], stuck: dict[str, float], *, last: bool = False) -> Iterator[PhaseLine]:
        """Make the lines of phases that have ended. A checkpoint's line has its steps.

        Args:
            spans: phases from the ledger, and phases that the script has named.
            stuck: seconds without progress so far, by place.
            last: this is the last call.
        """
        pending = [*self._waiting]
        while self._saves:
            pending.append(self._saves.popleft())
        found = [(span, _taken_from(pending, span)) for span in spans]
        shortest = _SHORTEST_PHASE_SECONDS
        if len(spans) > _MAX_PHASE_LINES:
            shortest = max(shortest, sorted(span.seconds for span in spans)[-_MAX_PHASE_LINES])
        short = [span for span, save in found if save is not None and save.complete and span.seconds < shortest]
        for span, save in found:
            line = self._line(span, save, stuck)
            if span.seconds >= shortest or (short and span is short[-1]):
                yield line
        self._waiting = []
        for save in pending:
            if not (save.background or last or save in self._before_last):
                self._waiting.append(save)  # its span is still in the ring
                continue
            span = PhaseSpan(_WRITTEN, OTHER, save.start_ns, (save.end_ns - save.start_ns) / NS)
            yield self._line(span, save, stuck)
        self._before_last = self._waiting

    def _line(self, span: PhaseSpan, save: SavedCheckpoint | None, stuck: dict[str, float]) -> PhaseLine:
        """Make the line of a phase. With a checkpoint, note the newest one that a run can resume from."""
        line = PhaseLine(
            name=span.name,
            category=span.category,
            started=self._wall.iso(span.start_ns),
            seconds=round(span.seconds, 6),
            complete=ABSENT,
            holds_optimizer=ABSENT,
            optimizer_steps_total=ABSENT,
            steps_total=ABSENT,
            loop_seconds=ABSENT,
            stuck_total_seconds=ABSENT,
        )
        if save is None:
            return line
        loop = span.loop_seconds
        if loop is None:
            before = self._begun_at.get(save.optimizer_steps, self.kept_seconds)
        else:
            before = sum(loop) - stuck_in_loop(stuck)
            if not save.complete:
                self._begun_at = {save.optimizer_steps: before}
        if save.complete and (save.holds_optimizer or not self._holds_optimizer):
            self._holds_optimizer |= save.holds_optimizer
            self.saves_completed += 1
            self.kept_seconds = max(self.kept_seconds, before)
        return structs.replace(
            line,
            complete=save.complete,
            holds_optimizer=save.holds_optimizer,
            optimizer_steps_total=save.optimizer_steps,
            steps_total=save.steps,
            loop_seconds=ABSENT if loop is None else {DATA_WAIT: round(loop[0], 6), COMPUTE: round(loop[1], 6)},
            stuck_total_seconds=stuck or ABSENT,
        )


def _taken_from(pending: list[SavedCheckpoint], span: PhaseSpan) -> SavedCheckpoint | None:
    """Remove the checkpoint that was written in this phase; None if there is none."""
    if span.category == CHECKPOINT and span.loop_seconds is not None:
        for save in pending:
            if not save.background and save.start_ns <= span.start_ns <= save.end_ns:
                pending.remove(save)
                return save
    return None


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
        self._started = processes.process_started(pid)
        # Read once: the clock may be stepped later.
        began = wall.unix_seconds(accounting.ledger.start_ns)
        self.seconds_before = 0.0 if self._started is None else max(0.0, began - self._started)
        self._launch, self._restarts = processes.launch_of()
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
        self._replay.add(steps, trained=self._tracker.optimizer_steps > 0)

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


# -- the run so far: what all attempts have done and lost, for the next one --------------------------------------------


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
                in_vain = REDONE if stepped or beat.steps_total < _MIN_BATCHES else REPLAY
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
        process = f"{identity.node}/{processes.process_name(identity.pid)}"
        before = read_run_state(self._path)
        if before is None or before.run != identity.run:
            return RunState(identity.run, first.life, process, first)
        if before.life == first.life:  # this agent had this rank before
            return before
        beat = read_heartbeat(self._folder, before.life)
        if beat is not None and beat.unix_seconds > before.newest.unix_seconds:
            before = structs.replace(before, newest=beat)
        started = processes.process_started(identity.pid) or first.unix_seconds
        return before.next(process=process, first=first, started=started)

    def _write(self) -> None:
        content = msgspec.json.encode(self._state) + b"\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content, 0o644)
        except OSError as error:
            self._errors.tell("attempts", f"the state of the run cannot be written: {error.strerror}")
