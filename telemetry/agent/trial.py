"""Runs a trial of ``telemetry tune`` in its process: leaves out the warm-up, measures, and ends the process.

It ends with `os._exit`, so nothing of the script runs after that: no last checkpoint, no upload, no ``finally`` block
and no exit handler. The training thread does it when it asks for its next batch, so that no file stays half written. If
it does not ask for one soon, the agent thread does it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.diagnosis.evidence import (
    Evidence,
    aggregate,
)
from telemetry.hooks.device import device_in_use
from telemetry.hooks.trial import LoaderFacts, TrialHooks, TrialPlan
from telemetry.util.clock import monotonic
from telemetry.util.files import replace_file

if TYPE_CHECKING:
    from telemetry.agent.accounting import Accounting
    from telemetry.hooks.tracker import StepTracker
    from telemetry.node.endpoint import NodeService
    from telemetry.records import Tick
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity

ENDED_STEPS: Final = "measured"
ENDED_SCRIPT: Final = "script ended"
ENDED_LATE: Final = "time was over"

_MIN_STEPS: Final = 3
_EXTRA_WARM_UP: Final = 2
"""Steps that are not measured, in addition to those whose batches may already be ready."""

_MAX_WARM_UP_SHARE: Final = 0.25
"""The warm-up takes at most this share of the maximum time."""

_OTHERS_SECONDS: Final = 20.0
"""How long to wait for the other ranks at the end."""

_NEXT_FETCH_SECONDS: Final = 5.0
"""How long to wait for the training thread's next fetch at the end."""


class TrialOutcome(msgspec.Struct, frozen=True):
    """What one rank of a trial has measured. The training process writes it, and ``telemetry tune`` reads it.

    Attributes:
        pid: pid of the training process.
        end: why the measurement ended, one of ``ENDED_…``.
        warm: whether the warm-up was left out.
        device: type of the device that trained; None for the CPU.
        loaders: where loaders were made.
        saves: how many checkpoints were not written.
        hook_errors: how many hooks failed.
        steps: whole steps that were measured. ``seconds``: their time in the training loop.
        evidence: the evidence of the measured time; None without a step.
    """

    pid: int = 0
    end: str = ""
    warm: bool = False
    device: str | None = None
    loaders: list[LoaderFacts] = msgspec.field(default_factory=list)
    saves: int = 0
    hook_errors: int = 0
    steps: int = 0
    seconds: float = 0.0
    evidence: Evidence | None = None


def outcome_path(folder: str, rank: int) -> Path:
    """Where a rank writes its outcome."""
    return Path(folder) / f"outcome-{rank}.json"


class TrialRun:
    """One rank of a trial. Making it places the hooks. After that the agent thread uses it.

    Args:
        path: the file of the plan.
        identity: rank and size of the job.
        tracker, accounting, errors: parts of this process's agent.

    Raises:
        OSError, msgspec.MsgspecError: the plan cannot be read.
    """

    def __init__(
        self, path: str, identity: Identity, tracker: StepTracker, accounting: Accounting, errors: ErrorLog
    ) -> None:
        self._plan = msgspec.json.decode(Path(path).read_bytes(), type=TrialPlan)
        self._identity = identity
        self._tracker = tracker
        self._accounting = accounting
        self._errors = errors
        self._hooks = TrialHooks(self._plan, tracker, errors)
        self._began = monotonic()
        self._first: float | None = None  # when the first step ended
        self._warm = False
        self._ticks: list[Tick] = []  # the measured ticks
        self._open_before = 0.0  # seconds of the open step at the first of them
        self._measured: float | None = None  # when the outcome was written
        self._asked: float | None = None  # when the training thread was asked to end the process

    def tick(self, tick: Tick, node: NodeService | None) -> None:
        """Follow the trial, and end the process when it is over. ``node``: this rank is then removed from it."""
        with self._errors.contained("trial"):
            if self._measured is None and (end := self._follow(tick)):
                self._finish(end)
            if self._measured is None:
                return
            # The script goes on while other ranks measure, because they may wait for this one.
            if not self._others_are_done() and monotonic() - self._measured < _OTHERS_SECONDS:
                return
            if self._asked is None:
                self._asked = monotonic()
                if node is not None:
                    node.leave()
                self._hooks.over = True
        if self._measured is not None:
            asked = self._measured + _OTHERS_SECONDS if self._asked is None else self._asked  # None: asking failed
            if self._first is None or monotonic() - asked >= _NEXT_FETCH_SECONDS:  # None: it never fetched a batch
                os._exit(0)

    def script_ended(self, tick: Tick) -> None:
        """Keep what was measured so far, because the script has ended before the trial."""
        if self._measured is None:
            if self._first is not None:
                self._ticks.append(tick)
            self._finish(ENDED_SCRIPT)

    def _follow(self, tick: Tick) -> str:
        """Why the measurement ends now; empty if it goes on."""
        now, plan = monotonic(), self._plan
        if self._first is None:
            if tick.totals.steps:
                self._first = now
                self._restart(tick)
                return ""
            return ENDED_LATE if now - self._began > plan.start_seconds else ""
        self._ticks.append(tick)
        if not self._warm:
            if self._is_warm(now - self._first, tick.totals.steps):
                self._warm = True
                self._restart(tick)
            return ""
        steps, seconds = self._passed()
        if (plan.steps is not None and steps >= plan.steps) or (seconds >= plan.seconds and steps >= _MIN_STEPS):
            return ENDED_STEPS
        return ENDED_LATE if now - self._first > plan.max_seconds else ""

    def _restart(self, tick: Tick) -> None:
        self._ticks = [tick]
        self._open_before = self._accounting.ledger.open_step_seconds

    def _is_warm(self, seconds: float, steps: int) -> bool:
        applied = [facts.applied for facts in list(self._hooks.loaders.values()) if facts.trains]
        ahead = sum(int(one.get("num_workers") or 0) * int(one.get("prefetch_factor") or 0) for one in applied)
        enough = seconds >= self._plan.warm_up_seconds and steps >= ahead + _EXTRA_WARM_UP
        return enough or seconds >= self._plan.max_seconds * _MAX_WARM_UP_SHARE

    def _passed(self) -> tuple[int, float]:
        first, last = self._ticks[0].totals, self._ticks[-1].totals
        seconds = last.loop_seconds - first.loop_seconds
        return last.steps - first.steps, seconds + self._open_before - self._accounting.ledger.open_step_seconds

    def _others_are_done(self) -> bool:
        ranks = range(self._identity.world_size)
        return all(outcome_path(self._plan.folder, rank).exists() for rank in ranks)

    def _finish(self, end: str) -> None:
        self._measured = monotonic()
        identity, tracker = self._identity, self._tracker
        measured = len(self._ticks) > 1
        steps, seconds = self._passed() if measured else (0, 0.0)
        outcome = TrialOutcome(
            pid=identity.pid,
            end=end,
            warm=self._warm,
            device=device_in_use(tracker.trained_on),
            loaders=list(self._hooks.loaders.values()),
            saves=self._hooks.saves,
            hook_errors=tracker.errors,
            steps=steps,
            seconds=seconds,
            evidence=aggregate(self._ticks, rank=identity.rank) if measured else None,
        )
        replace_file(outcome_path(self._plan.folder, identity.rank), msgspec.json.encode(outcome))
