"""Follows a trial of ``telemetry tune`` from inside: leaves out the warm-up, measures, and ends the process.

The process is ended with `os._exit`. So nothing of the script runs after that: no last checkpoint, no upload, no
``finally`` block and no exit handler. The training thread does it when it asks for its next batch: no file stays half
written. If it does not ask for one soon, the agent thread does it.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.trial_attachment import TrialAttachment
from telemetry.core.trial_records import ENDED_LATE, ENDED_SCRIPT, ENDED_STEPS, outcome_path, read_plan
from telemetry.diagnose.evidence_record import to_record
from telemetry.diagnosis.evidence import aggregate
from telemetry.hooks import accelerator
from telemetry.util.clock import monotonic
from telemetry.util.files import dump_object, replace_file

if TYPE_CHECKING:
    from telemetry.agent.agent import AgentParts
    from telemetry.core.trial_records import LoaderFacts, TrialPlan
    from telemetry.node.endpoint import NodeService
    from telemetry.records import Tick
    from telemetry.util.processes import Identity

_MIN_STEPS: Final = 3
_EXTRA_WARM_UP: Final = 2
"""Steps that are not measured, in addition to those whose batches may lie ready already."""

_MAX_WARM_UP_SHARE: Final = 0.25
"""The warm-up takes at most this share of the maximum time."""

_OTHERS_SECONDS: Final = 20.0
"""How long to wait for the other ranks at the end."""

_NEXT_FETCH_SECONDS: Final = 5.0
"""How long to wait for the training thread's next fetch at the end."""


class TrialRun:
    """One rank of a trial. Used by the agent thread.

    Args:
        plan: what the trial shall do.
        parts: the parts of this process's agent.
    """

    def __init__(self, plan: TrialPlan, parts: AgentParts) -> None:
        self._plan = plan
        self._parts = parts
        self._tracker = parts.tracker
        self._accounting = parts.accounting
        self._attached = TrialAttachment(plan, parts.tracker, partial(parts.errors.note, "trial"))
        self._began = monotonic()
        self._first: float | None = None  # when the first step had ended
        self._warm = False
        self._ticks: list[Tick] = []  # of what is measured
        self._open_before = 0.0  # seconds of the open step at the first of these
        self._measured: float | None = None  # when the outcome was written
        self._asked: float | None = None  # when the training thread was asked to end the process
        self._end = ""

    def start(self) -> None:
        """Place the hooks.

        Raises:
            OSError: the trial's folder cannot be used.
        """
        self._attached.attach()

    def tick(self, tick: Tick, node: NodeService | None) -> None:
        """Follow the trial. Ends the process when the trial is over. ``node``: this rank is removed from it then."""
        identity = self._parts.identity
        with self._parts.errors.contained("trial"):
            if self._measured is None:
                end = self._follow(tick)
                if end:
                    self._finish(end)
            if self._measured is None:
                return
            if not self._others_are_done(identity) and monotonic() - self._measured < _OTHERS_SECONDS:
                return
            if self._asked is None:
                self._asked = monotonic()
                if node is not None:
                    node.leave()
                self._attached.loaders.over = True
        if self._measured is not None and self._waited_for_a_fetch(self._measured):
            os._exit(0)

    def _waited_for_a_fetch(self, measured: float) -> bool:
        """Whether the training thread has had its time to end the process. It has none if it never fetched a batch."""
        asked = measured + _OTHERS_SECONDS if self._asked is None else self._asked  # None: asking failed
        return self._first is None or monotonic() - asked >= _NEXT_FETCH_SECONDS

    def _follow(self, tick: Tick) -> str:
        """Why the measurement ends now; empty if it goes on."""
        now = monotonic()
        steps = tick.totals.steps
        if self._first is None:
            if steps:
                self._first = now
                self._restart(tick)
            elif now - self._began > self._plan.start_seconds:
                return ENDED_LATE
            return ""
        self._ticks.append(tick)
        if not self._warm:
            if self._is_warm(now - self._first, steps):
                self._warm = True
                self._restart(tick)
            return ""
        if self._is_measured():
            return ENDED_STEPS
        return ENDED_LATE if now - self._first > self._plan.max_seconds else ""

    def script_ended(self, tick: Tick) -> None:
        """The script has ended before the trial. What was measured so far counts."""
        if self._measured is None:
            if self._first is not None:
                self._ticks.append(tick)
            self._finish(ENDED_SCRIPT)

    def _restart(self, tick: Tick) -> None:
        self._ticks = [tick]
        self._open_before = self._accounting.ledger.open_step_seconds

    def _is_warm(self, seconds: float, steps: int) -> bool:
        ahead = sum(_ready_at_most(facts) for facts in self._loaders if facts.trains)
        if seconds >= self._plan.max_seconds * _MAX_WARM_UP_SHARE:
            return True
        return seconds >= self._plan.warm_up_seconds and steps >= ahead + _EXTRA_WARM_UP

    def _is_measured(self) -> bool:
        steps, seconds = self._passed()
        if self._plan.steps is not None and steps >= self._plan.steps:
            return True
        return seconds >= self._plan.seconds and steps >= _MIN_STEPS

    def _passed(self) -> tuple[int, float]:
        """Whole steps, and the seconds of the training loop in which they were made."""
        first, last = self._ticks[0].totals, self._ticks[-1].totals
        seconds = last.loop_seconds - first.loop_seconds
        return last.steps - first.steps, seconds + self._open_before - self._accounting.ledger.open_step_seconds

    @property
    def _loaders(self) -> list[LoaderFacts]:
        return list(self._attached.loaders.places.all.values())

    def _finish(self, end: str) -> None:
        """Write the outcome. The script goes on while other ranks still measure: they may wait for this one."""
        self._measured, self._end = monotonic(), end
        identity = self._parts.identity
        path = outcome_path(self._plan.folder, identity.rank)
        replace_file(path, dump_object(self._outcome(identity)))

    def _others_are_done(self, identity: Identity) -> bool:
        return all(outcome_path(self._plan.folder, rank).exists() for rank in range(identity.world_size))

    def _outcome(self, identity: Identity) -> dict[str, Any]:
        outcome: dict[str, Any] = {
            "rank": identity.rank,
            "world_size": identity.world_size,
            "pid": identity.pid,
            "end": self._end,
            "warm": self._warm,
            "device": accelerator.in_use(self._tracker.trained_on),
            "loaders": [asdict(facts) for facts in self._loaders],
            "hook_errors": self._tracker.errors,
            "steps": 0,
        }
        files = self._attached.files
        if files is not None:
            outcome |= {"saves": files.saves, "redirected": list(files.redirected)}
        if len(self._ticks) > 1:
            steps, seconds = self._passed()
            evidence = aggregate(self._ticks, rank=identity.rank)
            outcome |= {"steps": steps, "seconds": seconds, "evidence": to_record(evidence)}
        return outcome


def _ready_at_most(facts: LoaderFacts) -> int:
    """How many batches of a loader may lie ready."""
    workers = int(facts.applied.get("num_workers") or 0)
    return workers * int(facts.applied.get("prefetch_factor") or 0)


def begin(path: str, parts: AgentParts) -> TrialRun:
    """Begin the trial of a plan. Its hooks are in place when this returns.

    Raises:
        TrialError: the plan cannot be read.
        OSError: the trial's folder cannot be used.
    """
    trial = TrialRun(read_plan(path), parts)
    trial.start()
    return trial
