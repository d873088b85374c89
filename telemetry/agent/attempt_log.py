"""What the log tells of this attempt of the run: where it resumed, its checkpoints, and that it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from telemetry.agent.end_evidence import EndEvidence
from telemetry.diagnose.replay import ReplayWatch, in_replay
from telemetry.publish import log_fields
from telemetry.publish.heartbeat import Heartbeat
from telemetry.records import CHECKPOINT, OTHER, PhaseSpan
from telemetry.sources.cgroup import OomCounter
from telemetry.util import processes as identities
from telemetry.util.clock import NS, iso_time, now_ns
from telemetry.util.files import dump_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from telemetry.agent.accounting import Accounting
    from telemetry.hooks.tracker import StepTracker
    from telemetry.job.run_state import StuckTime
    from telemetry.records import SavedCheckpoint, Step
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog

FOLDER: Final = "attempts"
"""Of the run folder: heartbeats, and the state of the run."""

WRITTEN: Final = "checkpoint_write"
"""Name of the phase of a checkpoint that was completed on another thread."""

_RETRY_SECONDS: Final = 30
"""After this time a heartbeat that could not be written is tried again."""

_SHORTEST_PHASE_SECONDS: Final = 0.001
"""Shorter ones are in the ledger, but no line of the log; of shorter checkpoints the newest of a tick."""

_MAX_PHASE_LINES: Final = 20
"""If more phases have ended since the tick before, the longest have lines. Each line is a write, after which the
agent thread waits for the GIL. Beside 250 phases a second, whose C calls held the GIL, it had no time for a tick."""


class AttemptLog:
    """Fields of log lines, and the heartbeat. Used by the agent thread.

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
        self._resumption_before: dict[str, Any] = {}
        self._resumption_text = "{}"
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

    @property
    def restore_seconds(self) -> float:
        """Time spent in loading functions before the first step."""
        since = self._resume.restoring_since
        return (self._resume.restore_ns + (now_ns() - since if since else 0)) / NS

    @property
    def replay_seconds(self) -> float:
        """Loop time of batches that were thrown away."""
        return self._replay.seconds

    @property
    def in_replay(self) -> bool:
        """Whether batches are drawn to come to where a checkpoint was written."""
        return in_replay(self._resumption(), self._tracker.optimizer_steps, self._accounting.steps_total)

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
            self._heartbeat.beat(self._state())
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
        resumption = self._resumption()
        return found | ({"resumption": resumption} if resumption else {})

    def _oom_kills(self) -> dict[str, int]:
        count = self._oom.count()
        return {} if count is None else {"oom_kills_total": count}

    def _resumption(self) -> dict[str, Any]:
        """How this attempt began. What did not happen is left out."""
        resume = self._resume
        restored = self.restore_seconds
        found: dict[str, Any] = {}
        if resume.optimizers > 1:
            found["optimizers"] = resume.optimizers
        if restored:
            found["restore_seconds"] = restored
        if resume.source is not None:
            found |= {"resumed_step": resume.step, "resumed_from": resume.source}
            found["resumed_at_optimizer_steps"] = resume.at_optimizer_steps
        if self._replay.batches:
            found["replayed_batches"] = self._replay.batches
            found["replay_seconds"] = self._replay.seconds
            found["replay_wait_seconds"] = self._replay.wait_seconds
        return found

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
        return log_fields.phase(span, self._wall.iso(span.start_ns))

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

    def _state(self) -> bytes:
        """One JSON object, made by hand: this is done at every tick."""
        accounting = self._accounting
        ledger = accounting.ledger
        resumption = self._resumption()
        if resumption != self._resumption_before:
            self._resumption_before, self._resumption_text = resumption, dump_object(resumption).decode().strip()
        spent = ",".join([f'"{category}":{ns / NS:.6f}' for category, ns in ledger.ns.items()])
        counts = (("samples_total", accounting.trained_samples()), ("tokens_total", accounting.tokens()))
        counted = "".join([f'"{name}":{count},' for name, count in counts if count is not None])
        oom_kills = "".join([f'"{name}":{count},' for name, count in self._oom_kills().items()])
        stuck = f'"stuck":{self.stuck.encoded()},' if self.stuck is not None and self.stuck.seconds else ""
        return (
            f'{{"life":"{self._life}",{oom_kills}{stuck}"unix_seconds":{self._wall.unix_seconds(accounting.updated_ns):.6f},'
            f'"steps_total":{accounting.steps_total},"optimizer_steps_total":{self._tracker.optimizer_steps},'
            f'"wall_seconds":{ledger.wall_seconds:.6f},"first_wait_seconds":{ledger.first_wait_ns / NS:.6f},'
            f'"seconds_before":{self.seconds_before:.6f},"kept_seconds":{self.kept_seconds:.6f},'
            f'"saves_completed":{self.saves_completed},{counted}'
            f'"ledger_total_seconds":{{{spent}}},"resumption":{self._resumption_text}}}'
        ).encode()


def _shortest_of_line(spans: Sequence[PhaseSpan]) -> float:
    """The shortest duration in seconds of a phase that has a line of its own."""
    if len(spans) <= _MAX_PHASE_LINES:
        return _SHORTEST_PHASE_SECONDS
    return max(_SHORTEST_PHASE_SECONDS, sorted([span.seconds for span in spans])[-_MAX_PHASE_LINES])


def _is_of(save: SavedCheckpoint, span: PhaseSpan) -> bool:
    return not save.background and save.start_ns <= span.start_ns <= save.end_ns
