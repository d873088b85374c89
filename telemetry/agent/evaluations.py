"""Follows the evaluations of a run: how long they wait for their own loader, and what else they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.evaluation import EvaluationTimes, evaluation_finding
from telemetry.diagnosis.lines import WAIT, line_shares, reading_place
from telemetry.records import EVALUATION, Totals, difference
from telemetry.util.clock import NS

if TYPE_CHECKING:
    from telemetry.agent.accounting import EvaluationWaits
    from telemetry.agent.findings import FindingLog
    from telemetry.records import Tick
    from telemetry.sources.lines import StepSampler


_ONLY_EVALUATION: Final = 0.95
"""If evaluations took so much of a tick, its CPU time is theirs."""

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
        self._cpu_seconds = self._cpu_known_seconds = 0.0
        self._cores = 1.0

    def tick(self, tick: Tick, evaluations: int) -> None:
        """Add a tick. ``evaluations``: how many have ended."""
        totals, before = tick.totals, self._before
        self._before, self._cores = totals, tick.conditions.cores
        passed = totals.wall_seconds - before.wall_seconds
        evaluated = _evaluation(totals) - _evaluation(before)
        used = difference(totals.process_cpu_seconds, before.process_cpu_seconds)
        if used is not None and evaluated >= _ONLY_EVALUATION * passed > 0:
            self._cpu_seconds, self._cpu_known_seconds = self._cpu_seconds + used, self._cpu_known_seconds + passed
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
            cpu_ratio=self._cpu_seconds / self._cpu_known_seconds if self._cpu_known_seconds else None,
            cores=self._cores,
            place=reading_place(profile),
        )
        found = evaluation_finding(times, totals, line_shares(profile, WAIT))
        if found is not None:
            self._findings.tell(found)


def _evaluation(totals: Totals) -> float:
    return totals.ledger_seconds.get(EVALUATION, 0.0)
