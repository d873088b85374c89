"""What is found beside stalls: the agent looks at the steps of the run now and then, and at how long they take."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.changes import ChangeDetector, GrowthDetector, growth_finding
from telemetry.diagnosis.findings import by_weight
from telemetry.diagnosis.hot_lines import line_shares
from telemetry.diagnosis.step_time import StepTime, findings_of
from telemetry.log.lines import ChangedFigure, ChangeLine, FindingLine, StepCodeLine
from telemetry.safety.threads import OwnThread, listed_threads, natives
from telemetry.sources.proc import ThreadLoads
from telemetry.util.profiles import STEP, StackProfile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.agent.event_log import EventLog
    from telemetry.diagnosis.changes import StepChange
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.findings import Finding
    from telemetry.diagnosis.hot_lines import LineShare
    from telemetry.loop.tick_totals import TotalsBuilder
    from telemetry.model.records import FindingKind, HotLine, Samples, StepTrend
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

_MORE: Final = 2
"""The lines of the steps are logged again once there are so many times the samples."""

_FIRST_STEPS: Final = 10
"""The first steps are not judged: they compile, allocate and warm up."""


class StepMonitor:
    """Finds what costs the steps of one rank time without a stall. Used on the agent thread."""

    def __init__(self, tracker: StepTracker, sampler: Sampler, findings: FindingLog, event_log: EventLog) -> None:
        self._sampler = sampler
        self._tracker = tracker
        self._findings = findings
        self._event_log = event_log
        self._logged = 0  # samples in the lines that were logged last
        self._marks: deque[Totals] = deque()
        self._loads = ThreadLoads()

    def tick(self, tick: Tick, samples: Samples, evidence: Evidence | None) -> None:
        """Look at the process now and then. ``evidence``: the newest window."""
        totals, marks = tick.totals, self._marks
        if totals.steps < _FIRST_STEPS or evidence is None or evidence.loop_seconds <= 0:
            return
        every = _EVERY_SECONDS if totals.wall_seconds < _FIRST_SECONDS else _LATER_SECONDS
        if marks and totals.wall_seconds - marks[-1].wall_seconds < every:
            return
        marks.append(totals)
        cores = tick.conditions.cores
        few = samples.process is None or samples.process.threads <= cores
        load, worker_loads = self._thread_loads(itself=not few)
        if len(marks) > _INTERVALS:
            added = totals - marks.popleft()
            if added.loop_seconds > 0:
                time = StepTime(
                    seconds=added.loop_seconds,
                    wait_ratio=added.wait_seconds / added.loop_seconds,
                    blocked_ratio=_blocked_ratio(added),
                    garbage=added.garbage,
                    cores=cores,
                    load=load,
                    worker_loads=worker_loads,
                    torch_threads=torch_threads() if load is not None and load.active > cores else None,
                )
                for finding in findings_of(time, self._sampler, evidence):
                    self._findings.tell(finding)
        if self._sampler.steps.samples >= _MORE * self._logged:
            self._log_lines()

    def end(self) -> None:
        """Log the lines of the steps once more."""
        if self._sampler.steps.samples > self._logged:
            self._log_lines()

    def lines(self) -> list[HotLine]:
        """The lines in which the steps of the run spend their time, the largest share first. Empty if not known yet."""
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


def _blocked_ratio(added: Totals) -> float | None:
    """The share of the loop in which the training thread had nothing to run, without its waits for fetches."""
    ran, wanted = added.thread_cpu_seconds, added.run_queue_delay_seconds
    if ran is None or wanted is None:
        return None
    fetch, transfer = added.deliveries.fetch_wait_seconds, added.deliveries.transfer_wait_seconds
    waited = added.wait_seconds * (fetch / (fetch + transfer) if fetch + transfer > 0 else 1.0)
    return min(1.0, max(0.0, (added.loop_seconds - ran - wanted - waited) / added.loop_seconds))


def torch_threads() -> int | None:
    """The number of threads of one operator of torch, as the training has set it; None if torch does not tell.

    Each thread has its own copy of the number, made at its first operator. So a new thread reads it.
    """
    torch = sys.modules.get("torch")
    answers: list[int] = []
    if torch is not None:
        thread = OwnThread(lambda: answers.append(torch.get_num_threads()), name="telemetry-threads")
        thread.start()
        thread.join(1.0)
    return answers[0] if answers else None


# -- changes of the step time ------------------------------------------------------------------------------------------

_YOUNG_SECONDS: Final = 120.0
"""Until so many seconds of training, there are enough samples of the run to compare its halves."""


class ChangeMonitor:
    """Looks for changes of the step time once a tick: lasting ones, and growth within minutes.

    Args:
        sampler: has samples of the steps, for the line of code that grows.
        findings: gets the growth.
    """

    def __init__(self, sampler: Sampler, findings: FindingLog) -> None:
        self._sampler = sampler
        self._findings = findings
        self._detector = ChangeDetector()
        self._growth = GrowthDetector()
        self._told: StepChange | None = None
        self._young = True

    def tick(self, totals: Totals, samples: Samples) -> StepChange | None:
        """Add a tick, and tell growth that is new or has gone on. Returns a lasting change that this tick confirms."""
        gauges = _gauges(samples)
        self._growth.tick(totals, gauges | _memory(samples))
        if self._growth.growth is not self._told:
            if self._told is None and totals.loop_seconds >= _YOUNG_SECONDS:
                self._sampler.follow()
            self.tell(totals)
        return self._detector.tick(totals, gauges)

    def skipped(self, builder: TotalsBuilder) -> None:
        """Add a skipped tick. In the first minutes steps can become twice as long within a few ticks."""
        if self._young:
            totals = builder.current()  # 0.2 ms, a fifth of what a skipped tick costs
            self._young = totals.loop_seconds < _YOUNG_SECONDS
            self._growth.tick(totals, {})

    @property
    def ratio(self) -> float | None:
        """Step time now divided by step time before a lasting slow-down, see `ChangeDetector`."""
        return self._detector.ratio

    @property
    def step_trend(self) -> StepTrend | None:
        """The trend of a short run; None for other runs."""
        return self._growth.trend()

    def tell(self, totals: Totals) -> None:
        """Tell the growth, if there is any, with what it has cost in the run so far."""
        growth, newest = self._growth.growth, self._sampler.newest
        self._told = growth
        if growth is None:
            return
        parts, ends = self._sampler.parts, (growth.before_seconds, growth.after_seconds)
        half, quarter = len(parts) // 2, (ends[1] - ends[0]) / 4
        if newest is None:
            before, after = (ends[0] + quarter, _merged(parts[:half])), (ends[1] - quarter, _merged(parts[half:]))
        else:
            before, after = (ends[0], _merged(parts)), (ends[1], newest)
        self._findings.tell(growth_finding(growth, totals, _by_growth(*before, *after)))


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


def _gauges(samples: Samples) -> dict[str, float]:
    """The machine's gauges."""
    gpu, pressure = samples.gpu, samples.pressure
    found: dict[str, float | None] = {}
    if gpu is not None:
        found |= {"gpu_clock_hertz": gpu.sm_clock_hertz, "gpu_temperature_celsius": gpu.temperature_celsius}
    if pressure is not None:
        found |= {f"{name}_pressure_ratio": ratio for name, ratio in pressure.pressure_ratio.items()}
    return _measured(found)


def _memory(samples: Samples) -> dict[str, float]:
    memory, allocator = samples.memory, samples.torch_memory
    return _measured(
        {
            "training_bytes": None if memory is None else memory.training_bytes,
            "cuda_bytes": None if allocator is None else allocator.allocated_bytes,
        }
    )


def _measured(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def change_line(change: StepChange, at: str) -> ChangeLine:
    """The log line of a change. ``at``: when it happened, ISO-8601."""
    return ChangeLine(
        at=at,
        first_step=change.at.step,
        ratio=round(change.ratio, 4),
        part=change.part,
        step_before_seconds=change.before_seconds,
        step_after_seconds=change.after_seconds,
        figures=[ChangedFigure(each.what, each.before, each.after) for each in change.companions],
    )
