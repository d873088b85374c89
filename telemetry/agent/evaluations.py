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


_MIN_APART: Final = 0.05
"""The CPU time of evaluations is known if some ticks have so much less evaluation than others."""

_ENOUGH: Final = 2
"""The first evaluation is not judged before the end of the run: a check before the training may be the only one."""


class EvaluationMonitor:
    """Finds out whether evaluations lose time to their own loader. Used on the agent thread."""

    def __init__(self, waits: EvaluationWaits, sampler: Sampler) -> None:
        self._waits = waits
        self._sampler = sampler
        self._before = Totals()
        self._ended = 0  # evaluations
        self._cpu = _CpuSplit()
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
        if used is not None and before.process_cpu_seconds and passed > 0:
            self._cpu.add(evaluated, passed - evaluated, used)
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
            cpu_ratio=self._cpu.of_evaluation(),
            cores=self._cores,
            place=reading_place(profile),
            batch_size=waits.batch_size,
            trained_size=self._trained_size,
        )
        waited = evaluation_finding(times, totals, line_shares(profile, WAIT))
        small = small_batches(times, totals, line_shares(computing, STEP))
        found = [each for each in (waited, small) if each is not None]
        return max(found, key=lambda each: each.share_ratio or 0.0, default=None)


class _CpuSplit:
    """Splits the CPU time of ticks into that of evaluations and that of the rest, by least squares."""

    def __init__(self) -> None:
        self._evaluated = self._both = self._rest = self._used_evaluated = self._used_rest = 0.0

    def add(self, evaluated: float, rest: float, used: float) -> None:
        """Add a tick: its seconds in evaluations and in all else, and the CPU seconds."""
        self._evaluated += evaluated * evaluated
        self._both += evaluated * rest
        self._rest += rest * rest
        self._used_evaluated += used * evaluated
        self._used_rest += used * rest

    def of_evaluation(self) -> float | None:
        """CPU seconds for each second of evaluation; None if all ticks are alike."""
        if not self._evaluated:
            return None
        if not self._rest:
            return self._used_evaluated / self._evaluated
        apart = self._evaluated * self._rest - self._both * self._both
        if apart < _MIN_APART * self._evaluated * self._rest:
            return None
        return max(0.0, (self._used_evaluated * self._rest - self._used_rest * self._both) / apart)


def _evaluation(totals: Totals) -> float:
    return totals.ledger_seconds.get(EVALUATION, 0.0)
