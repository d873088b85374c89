"""What one attempt of a run leaves for the next: its number, and the time that the run has lost so far.

Rank 0 writes it into a small file of the run folder when it starts, when a checkpoint is complete, and when it ends.
The heartbeat of the same process is newer, should it be killed in between.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Final

from telemetry.util.files import dump_object, parse_object

NAME: Final = "run.json"
"""Of the file in the folder ``attempts``."""

MAX_BYTES: Final = 8192

_LARGEST: Final = 1e12
"""No run has more seconds or attempts, and no clock shows more seconds. A larger number is damaged."""

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


@dataclass(frozen=True, slots=True)
class StuckTime:
    """For how long an attempt has been stuck, as it also stands in its heartbeat.

    Attributes:
        seconds: in all.
        in_startup: in hangs that began in the first wait; ``in_replay``: in the replay.
        since_kept: in hangs that began after the newest complete checkpoint. ``kept_seconds``: of the loop up to that.
    """

    seconds: float = 0.0
    in_startup: float = 0.0
    in_replay: float = 0.0
    since_kept: float = 0.0
    kept_seconds: float = 0.0

    def encoded(self) -> str:
        """As JSON."""
        return f"[{','.join(f'{seconds:.3f}' for seconds in astuple(self))}]"

    @staticmethod
    def parsed(value: Any) -> StuckTime | None:
        """From the JSON of a heartbeat; None if it has none.

        Raises:
            TypeError, ValueError: it is damaged.
        """
        return None if value is None else StuckTime(*map(figure, value))


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run.

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
    attempt: int = 0
    process: str = ""
    life: str = ""
    time: float = 0.0
    finished: bool = False
    progress: bool = False
    without_progress: int = 0
    loop_seconds: float = 0.0
    kept_seconds: float = 0.0
    stuck_since_kept: float = 0.0
    in_replay: bool = False
    carried: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    stuck_within: dict[str, float] = field(default_factory=dict)

    def lost(self) -> dict[str, float]:
        """Seconds lost so far, by category."""
        return {
            name: self.carried.get(name, 0.0) + max(0.0, self.own.get(name, 0.0) - self.stuck_within.get(name, 0.0))
            for name in LOST
        }

    def with_stuck(self, stuck: StuckTime) -> RunState:
        """With the time for which the attempt was stuck."""
        since_kept = stuck.since_kept if self.kept_seconds < stuck.kept_seconds + _SAME_SECONDS else 0.0
        return replace(self, own=self.own | {STUCK: stuck.seconds}, stuck_since_kept=since_kept,
                       stuck_within={STARTUP: stuck.in_startup, REPLAY: stuck.in_replay})  # fmt: skip

    def newer(self, beat: RunState) -> RunState:
        """With what the heartbeat of the same process tells, if that is newer.

        Args:
            beat: the attempt's figures in it. Unless it was stuck, they do not tell for how long.
        """
        if beat.life != self.life or beat.time <= self.time:
            return self
        told = STUCK in beat.own
        kept = told or beat.kept_seconds < self.kept_seconds + _SAME_SECONDS
        stuck_since_kept = (beat if told else self).stuck_since_kept if kept else 0.0
        return replace(beat, attempt=self.attempt, process=self.process, without_progress=self.without_progress,
                       progress=self.progress or beat.progress, carried=self.carried,
                       own={STUCK: self.own.get(STUCK, 0.0)} | beat.own, stuck_since_kept=stuck_since_kept)  # fmt: skip

    def next(self, *, process: str, life: str, started: float) -> RunState:
        """The state that the next attempt begins with.

        Args:
            process: tells its process from others.
            life: its agent.
            started: Unix time at which its process started.
        """
        # The agent was stopped and started again; if it was not stopped, the process has executed another program.
        if process == self.process and self.finished:
            return replace(self, life=life, finished=False, carried=self.lost(), own={}, stuck_within={},
                           loop_seconds=0.0, kept_seconds=0.0, stuck_since_kept=0.0, in_replay=False)  # fmt: skip
        carried = self.lost()
        carried[DOWN] += max(0.0, started - self.time)
        if not self.finished:
            in_vain = REPLAY if self.in_replay else REDONE
            carried[in_vain] += max(0.0, self.loop_seconds - self.kept_seconds - self.stuck_since_kept)
        stalled = 0 if self.progress or self.finished else self.without_progress + 1
        return RunState(self.run, self.attempt + 1, process, life, started, without_progress=stalled, carried=carried)

    def encoded(self) -> bytes:
        """As it is written."""
        return dump_object(asdict(self))


def decoded(content: bytes) -> RunState | None:
    """The state in a file; None where the content is no such state."""
    value = parse_object(content)
    if value is None or not isinstance(value.get("run"), str):
        return None
    known: dict[str, Any] = asdict(RunState(value["run"]))
    try:
        for name, default in known.items():
            known[name] = _as(default, value.get(name, default))
    except (TypeError, ValueError):
        return None
    return RunState(**known)


def figure(given: Any) -> float:
    """Seconds, or a number of things, as another process has written them.

    Raises:
        TypeError: it is no number.
        ValueError: no run has so many of them.
    """
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(given)
    if not 0 <= given <= _LARGEST:  # NaN compares false
        raise ValueError(given)
    return float(given)


def _as(default: Any, given: Any) -> Any:
    """A value of the type of another.

    Raises:
        TypeError, ValueError: it is of another type, or out of range.
    """
    if isinstance(default, dict) and isinstance(given, dict):
        return {name: figure(each) for name, each in given.items() if name in LOST}
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return type(default)(figure(given))
    if type(given) is not type(default):
        raise TypeError(given)
    return given
