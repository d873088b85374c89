"""Follows the evaluations of a run: how long they wait for their own loader, and what else they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.evaluation import EvaluationTimes, evaluation_finding, small_batches
from telemetry.diagnosis.hot_lines import line_shares, reading_place
from telemetry.model.records import EVALUATION
from telemetry.model.totals import Totals, difference
from telemetry.util.clock import NS
from telemetry.util.profiles import EVALUATING, EVALUATION_WAIT, STEP, WAIT, StackProfile

if TYPE_CHECKING:
    from telemetry.diagnosis.findings import Finding
    from telemetry.loop.evaluation_waits import EvaluationWaits
    from telemetry.model.totals import Tick
    from telemetry.sources.sampler import Sampler


_MOSTLY: Final = 0.9
"""If an evaluation took at least this share of a tick, the CPU time of the tick counts as the evaluation's."""

_ENOUGH: Final = 2
"""The first evaluation is not judged before the end of the run: a check before the training may be the only one."""


class EvaluationMonitor:
    """Finds out whether evaluations lose time to their own loader. Used on the agent thread."""

    def __init__(self, waits: EvaluationWaits, sampler: Sampler) -> None:
        self._waits = waits
        self._sampler = sampler
        self._before = Totals()
        self._ended = 0  # evaluations
        self._cpu_seconds = self._cpu_of_seconds = 0.0  # CPU time in so many seconds of evaluation
        self._cores = 1.0
        self._trained_size: int | None = None

    def tick(self, tick: Tick, evaluations: int) -> Finding | None:
        """Add a tick. ``evaluations``: how many have ended."""
        totals, before = tick.totals, self._before
        self._before, self._cores = totals, tick.conditions.cores
        self._trained_size = tick.conditions.traits.batch_size or self._trained_size
        passed = totals.wall_seconds - before.wall_seconds
        evaluated = _evaluation(totals) - _evaluation(before)
        used = difference(totals.process_cpu_seconds, before.process_cpu_seconds)
        if used is not None and before.process_cpu_seconds and evaluated >= _MOSTLY * passed > 0:
            self._cpu_seconds += used
            self._cpu_of_seconds += passed
        if evaluations <= self._ended:
            return None
        self._ended = evaluations
        return self.judge(totals) if evaluations >= _ENOUGH else None

    def judge(self, totals: Totals) -> Finding | None:
        """What the evaluations so far have shown, if it is worth telling."""
        waits, run = self._waits.costliest, self._sampler.run
        profile, computing = (run.get(kind) or StackProfile() for kind in (EVALUATION_WAIT, EVALUATING))
        if waits is None:
            return None
        times = EvaluationTimes(
            kind=waits.kind,
            settings=waits.settings,
            evaluations=max(1, waits.iterations),
            batches=waits.batches,
            seconds=_evaluation(totals),
            wait_seconds=waits.wait_ns / NS,
            start_seconds=waits.start_ns / NS,
            cpu_ratio=self._cpu_seconds / self._cpu_of_seconds if self._cpu_of_seconds else None,
            cores=self._cores,
            place=reading_place(profile),
            batch_size=waits.batch_size,
            trained_size=self._trained_size,
        )
        waited = evaluation_finding(times, totals, line_shares(profile, WAIT))
        small = small_batches(times, totals, line_shares(computing, STEP))
        found = [each for each in (waited, small) if each is not None]
        return max(found, key=lambda each: each.share_ratio or 0.0, default=None)


def _evaluation(totals: Totals) -> float:
    return totals.ledger_seconds.get(EVALUATION, 0.0)
