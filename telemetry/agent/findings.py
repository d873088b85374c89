"""What is found beside stalls: the agent looks at the steps of the run now and then, and logs findings."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import structs

from telemetry.diagnosis.findings import by_weight
from telemetry.diagnosis.lines import line_shares
from telemetry.diagnosis.step_time import StepTime, findings_of
from telemetry.sources.lines import StepSampler
from telemetry.sources.proc import ThreadLoads
from telemetry.util.profiles import STEP
from telemetry.util.threads import OwnThread, natives

if TYPE_CHECKING:
    from telemetry.agent.collectors import Samples
    from telemetry.agent.log import EventLog
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.diagnosis.findings import Finding, FindingKind
    from telemetry.hooks.tracker import StepTracker
    from telemetry.records import HotLine
    from telemetry.sources.proc import ThreadLoad
    from telemetry.totals import Tick, Totals

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
        self._logged[kind] = self._newest[kind]
        self._event_log.emit("finding", structs.asdict(self._newest[kind]))


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
    """Finds what costs the steps of one rank time without a stall. Used on the agent thread.

    Attributes:
        sampler: samples the training thread now and then.
    """

    def __init__(self, tracker: StepTracker, findings: FindingLog, event_log: EventLog) -> None:
        self.sampler = StepSampler(tracker)
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
                for finding in findings_of(time, self.sampler, evidence):
                    self._findings.tell(finding)
        if self.sampler.steps.samples >= _MORE * self._logged:
            self._log_lines()

    def end(self) -> None:
        """End the sampling, and log the lines of the steps once more."""
        self.sampler.end()
        if self.sampler.steps.samples > self._logged:
            self._log_lines()

    def lines(self) -> list[HotLine]:
        """The lines in which the steps of the run spend their time, the largest share first. Empty if not known yet."""
        return [line.told() for line in line_shares(self.sampler.steps, STEP)]

    def _log_lines(self) -> None:
        lines = self.lines()
        if lines:
            self._logged = self.sampler.steps.samples
            self._event_log.emit("step_lines", {"lines": lines, "samples": self._logged})

    def _thread_loads(self, *, itself: bool) -> tuple[ThreadLoad | None, list[ThreadLoad]]:
        """The threads of this process, if it may have too many, and of its workers, since the last time.

        Our threads and those that run Python, except the training thread, are not part of an operator.
        """
        here = os.getpid()
        workers = [pid for loader in self._tracker.loaders.live() for pid in loader.pids if pid]
        python = {thread.native_id for thread in list(getattr(threading, "_active", {}).values())}
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
        thread = OwnThread(lambda: answers.append(torch.get_num_threads()), name="telemetry-threads", others_code=True)
        thread.start()
        thread.join(1.0)
    return answers[0] if answers else None
