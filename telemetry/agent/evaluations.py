"""Follows the evaluations of a run: how long they wait for their own loader, and what else they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.evaluation import EvaluationTimes, evaluation_finding
from telemetry.diagnosis.lines import line_shares, reading_place
from telemetry.records import EVALUATION, Totals, difference
from telemetry.util.clock import NS
from telemetry.util.profiles import WAIT

if TYPE_CHECKING:
    from telemetry.agent.accounting import EvaluationWaits
    from telemetry.agent.findings import FindingLog
    from telemetry.records import Tick
    from telemetry.sources.lines import StepSampler


_MIN_APART: Final = 0.05
"""The CPU time of evaluations is known if some ticks have so much less evaluation than others."""

_ENOUGH: Final = 2
"""The first evaluation is not judged before the end of the run: a check before the training may be the only one."""


class EvaluationMonitor:
    """Finds out whether evaluations lose time to their own loader. Used on the agent thread.

    Args:
        waits: the waits of evaluations.
        sampler: has the stacks of these waits.
        findings: gets the finding.
    """

    def __init__(self, waits: EvaluationWaits, sampler: StepSampler, findings: FindingLog) -> None:
        self._waits = waits
        self._sampler = sampler
        self._findings = findings
        self._before = Totals()
        self._ended = 0  # evaluations
        self._cpu = _CpuSplit()
        self._cores = 1.0

    def tick(self, tick: Tick, evaluations: int) -> None:
        """Add a tick. ``evaluations``: how many have ended."""
        totals, before = tick.totals, self._before
        self._before, self._cores = totals, tick.conditions.cores
        passed = totals.wall_seconds - before.wall_seconds
        evaluated = _evaluation(totals) - _evaluation(before)
        used = difference(totals.process_cpu_seconds, before.process_cpu_seconds)
        if used is not None and before.process_cpu_seconds and passed > 0:
            self._cpu.add(evaluated, passed - evaluated, used)
        if evaluations > self._ended:
            self._ended = evaluations
            if evaluations >= _ENOUGH:
                self._judge(totals)

    def end(self, totals: Totals) -> None:
        """Judge the whole run."""
        self._judge(totals)

    def _judge(self, totals: Totals) -> None:
        waits, profile = self._waits.costliest, self._sampler.evaluation
        if waits is None:
            return
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
        )
        found = evaluation_finding(times, totals, line_shares(profile, WAIT))
        if found is not None:
            self._findings.tell(found)


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
