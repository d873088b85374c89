"""What is found beside stalls: the agent looks at the steps of the run now and then, and at how long they take."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.changes import YOUNG_SECONDS
from telemetry.diagnosis.cores import core_use, cores_missing
from telemetry.diagnosis.findings import by_weight
from telemetry.diagnosis.hot_lines import line_shares, loop_lines
from telemetry.diagnosis.loop_gaps import LoopGaps
from telemetry.diagnosis.step_time import StepTime, findings_of, growth_finding
from telemetry.diagnosis.switches import switch_findings
from telemetry.diagnosis.uneven_steps import uneven_steps
from telemetry.log.lines import FindingLine, StepCodeLine
from telemetry.safety.threads import listed_threads, natives
from telemetry.seams.switches import switches_on
from telemetry.sources.proc import ThreadLoads
from telemetry.util.profiles import BETWEEN, STEP, StackProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.agent.event_log import EventLog
    from telemetry.diagnosis.changes import StepChange
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.findings import Finding
    from telemetry.diagnosis.hot_lines import LineShare
    from telemetry.loop.ledger import StepStats
    from telemetry.model.records import FindingKind, HotLine, Samples
    from telemetry.model.totals import Tick, Totals
    from telemetry.seams.tracker import StepTracker
    from telemetry.sources.proc import ThreadLoad
    from telemetry.sources.sampler import Sampler

# -- the findings of this process --------------------------------------------------------------------------------------

_NEWS: Final = 0.05
"""A finding is logged again once its share has changed by this much, or its advice. The text has many figures."""


class FindingLog:
    """Logs findings, each kind once and then when it has changed. Used on the agent thread."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._newest: dict[FindingKind, Finding] = {}
        self._logged: dict[FindingKind, Finding] = {}

    def tell(self, finding: Finding) -> None:
        """Log a finding. It may be told at every tick: only what is new is logged."""
        self._newest[finding.kind] = structs.replace(finding, rank=self._event_log.identity.rank)
        before = self._logged.get(finding.kind)
        if before is None or _has_changed(before, finding):
            self._write(finding.kind)

    def end(self) -> None:
        """Log what has changed since it was logged, at the end of the run."""
        for kind in [kind for kind, finding in self._newest.items() if self._logged[kind] != finding]:
            self._write(kind)

    @property
    def newest(self) -> list[Finding]:
        """The findings so far, the most important first."""
        return sorted(self._newest.values(), key=by_weight)

    def _write(self, kind: FindingKind) -> None:
        finding = self._logged[kind] = self._newest[kind]
        lines, advice = [*finding.lines], [*finding.advice]
        self._event_log.write(
            FindingLine(kind=kind, share_ratio=finding.share_ratio, text=finding.text, lines=lines, advice=advice)
        )


def _has_changed(before: Finding, now: Finding) -> bool:
    if (before.share_ratio is None) != (now.share_ratio is None):
        return True
    settings = [[(each.setting, each.value) for each in found.advice] for found in (before, now)]
    return settings[0] != settings[1] or abs((before.share_ratio or 0.0) - (now.share_ratio or 0.0)) >= _NEWS


# -- what costs the steps time -----------------------------------------------------------------------------------------

_EVERY_SECONDS: Final = 10.0
_FIRST_SECONDS: Final = 300.0
_LATER_SECONDS: Final = 60.0
"""Seconds from one look to the next: in the first minutes of a run, and later."""

_INTERVALS: Final = 2
"""Figures are compared over two intervals, so that a moment of other work is no finding."""

_ENOUGH_OF_GAPS: Final = 200
"""With so many samples of the time between two loops, its lines are known."""

_MORE: Final = 2
"""The lines of the steps are logged again once there are so many times the samples."""

_FIRST_STEPS: Final = 10
"""The first steps are not judged: they compile, allocate and warm up."""


class StepMonitor:
    """Finds what costs the steps of one rank time without a stall. Used on the agent thread.

    Attributes:
        gaps: the time between two loops.
    """

    def __init__(
        self,
        tracker: StepTracker,
        sampler: Sampler,
        findings: FindingLog,
        event_log: EventLog,
        stats: StepStats | None = None,
    ) -> None:
        self._sampler = sampler
        self._tracker = tracker
        self._findings = findings
        self._event_log = event_log
        self._stats = stats
        self._grows = False
        self._logged = 0  # samples in the lines that were logged last
        self._first: Totals | None = None  # when steps had begun
        self._marks: deque[Totals] = deque()
        self.gaps = LoopGaps()
        self._loads = ThreadLoads()
        self._switches: dict[str, int] = {}  # for how many looks each has been on

    def tick(self, tick: Tick, samples: Samples, evidence: Evidence | None) -> None:
        """Look at the process now and then. ``evidence``: the newest window."""
        totals, marks = tick.totals, self._marks
        self.gaps.add(totals)
        self._first = self._first or (totals if totals.steps else None)
        if totals.steps < _FIRST_STEPS or evidence is None or evidence.loop_seconds <= 0:
            return
        every = _EVERY_SECONDS if totals.wall_seconds < _FIRST_SECONDS else _LATER_SECONDS
        if marks and totals.wall_seconds - marks[-1].wall_seconds < every:
            return
        marks.append(totals)
        cores = tick.conditions.cores
        few = samples.process is None or samples.process.threads <= cores
        load, worker_loads = self._thread_loads(itself=not few)
        self._switches = {switch: self._switches.get(switch, 0) + 1 for switch in switches_on()}
        if len(marks) > _INTERVALS:
            added = totals - marks.popleft()
            if added.loop_seconds > 0 and self._first is not None:
                time = StepTime(added, totals - self._first, cores, load, worker_loads)
                for finding in findings_of(time, self._sampler, evidence):
                    self._findings.tell(finding)
                on = [switch for switch, looks in self._switches.items() if looks > _INTERVALS]
                for finding in switch_findings(on, self._sampler, evidence):
                    self._findings.tell(finding)
        self._tell(self.gaps.finding(self._sampler.run.get(BETWEEN)))
        if self._first is not None:
            self._tell_uneven(evidence, core_use(totals - self._first, evidence).delay_ratio)
        if self._sampler.steps.samples >= _MORE * self._logged:
            self._log_lines()

    def tell_growth(self, growth: StepChange | None, totals: Totals) -> None:
        """Tell that steps become slower and slower, with what it has cost in the run so far, and with the lines."""
        if growth is None:
            return
        sampler, ends = self._sampler, (growth.before_seconds, growth.after_seconds)
        if not self._grows and totals.loop_seconds >= YOUNG_SECONDS:
            sampler.follow()
        self._grows = True
        half, quarter = len(sampler.parts) // 2, (ends[1] - ends[0]) / 4
        if sampler.newest is None:  # there are enough samples of a young run to compare its halves
            before, after = (_merged(parts) for parts in (sampler.parts[:half], sampler.parts[half:]))
            lines = _by_growth(ends[0] + quarter, before, ends[1] - quarter, after)
        else:
            lines = _by_growth(ends[0], _merged(sampler.parts), ends[1], sampler.newest)
        self._findings.tell(growth_finding(growth, totals, lines))

    @property
    def wants_gaps(self) -> bool:
        """Whether the time between two loops matters, and has too few samples."""
        profile = self._sampler.run.get(BETWEEN)
        return self.gaps.matter and (profile is None or profile.samples < _ENOUGH_OF_GAPS)

    def judge(self, totals: Totals, evidence: Evidence | None) -> None:
        """Look at the cores and at the time between loops of the whole run at its end: a short run has had no look."""
        self.gaps.add(totals)
        self._tell(self.gaps.finding(self._sampler.run.get(BETWEEN)))
        if evidence is None or self._first is None or totals.loop_seconds < _EVERY_SECONDS / 2:
            return
        use = core_use(totals - self._first, evidence)
        self._tell(cores_missing(use, evidence))
        self._tell_uneven(evidence, use.delay_ratio)

    def _tell_uneven(self, evidence: Evidence, delay_ratio: float) -> None:
        if self._stats is not None and evidence.traits.own_collate:
            self._tell(uneven_steps(self._stats.all_steps(), evidence, delay_ratio))

    def _tell(self, finding: Finding | None) -> None:
        if finding is not None:
            self._findings.tell(finding)

    def end(self) -> None:
        """Log the lines of the steps once more."""
        if self._sampler.steps.samples > self._logged:
            self._log_lines()

    def lines(self) -> list[HotLine]:
        """The lines in which the steps of the run spend their time, the largest share first. Empty if not known yet.

        Of a loop without loaders, the lines of the loop itself: they show rollouts, and where it gets its batches.
        """
        if not self._tracker.batch_seen:
            return loop_lines(self._sampler.steps, self._sampler.part_of)
        return [line.told() for line in line_shares(self._sampler.steps, STEP)]

    def _log_lines(self) -> None:
        lines = self.lines()
        if lines:
            self._logged = self._sampler.steps.samples
            self._event_log.write(StepCodeLine(lines=lines, samples=self._logged))

    def _thread_loads(self, *, itself: bool) -> tuple[ThreadLoad | None, list[ThreadLoad]]:
        """The threads of this process, if it may have too many, and of its workers, since the last time.

        Our threads and those that run Python, except the training thread, are not part of an operator.
        """
        here = os.getpid()
        workers = [pid for loader in self._tracker.loaders.live() for pid in loader.pids if pid]
        python = {native for thread in listed_threads().values() if (native := thread.native_id) is not None}
        others = (natives() | python) - {self._tracker.native_thread}
        found = self._loads.read([*workers, here] if itself else workers, without=others)
        return found.get(here), [found[pid] for pid in workers if pid in found]


# -- the code that grows -----------------------------------------------------------------------------------------------


def _merged(parts: Sequence[StackProfile]) -> StackProfile:
    merged = StackProfile()
    for part in parts:
        merged.merge(part)
    return merged


def _by_growth(
    before_seconds: float, before: StackProfile, after_seconds: float, after: StackProfile
) -> list[LineShare]:
    """The lines of the later steps, first the one that has grown most. ``seconds``: of a step."""
    known = {(line.file, line.line, line.calls): line.share for line in line_shares(before, STEP)}
    lines = line_shares(after, STEP)
    if not known:  # too few samples
        return [*lines]

    def growth(line: LineShare) -> float:
        return line.share * after_seconds - known.get((line.file, line.line, line.calls), 0.0) * before_seconds

    return sorted(lines, key=growth, reverse=True)


def gauges(samples: Samples) -> dict[str, float]:
    """What may explain a change of the steps: figures of `Block`."""
    gpu, pressure, memory, allocator = samples.gpu, samples.pressure, samples.memory, samples.torch_memory
    found: dict[str, float | None] = {
        "training_bytes": None if memory is None else memory.training_bytes,
        "cuda_bytes": None if allocator is None else allocator.allocated_bytes,
    }
    if gpu is not None:
        found |= {"gpu_clock_hertz": gpu.sm_clock_hertz, "gpu_temperature_celsius": gpu.temperature_celsius}
    if pressure is not None:
        found |= {f"{name}_pressure_ratio": ratio for name, ratio in pressure.pressure_ratio.items()}
    return {name: value for name, value in found.items() if value is not None}
