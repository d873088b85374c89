"""A rank whose training thread does as told, with its real monitor and ledger, and no clock but the test's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from telemetry.agent.stall_monitor import StallMonitor
from telemetry.config import Config
from telemetry.diagnosis.stalls import StallCounts
from telemetry.loop.ledger import Ledger, StepStats
from telemetry.loop.tick_totals import Overhead, TotalsBuilder
from telemetry.model.records import CHECKPOINT, COMPUTE, DATA_WAIT, OTHER, RankPace, Samples
from telemetry.safety.errors import ErrorLog
from telemetry.seams.tracker import StepTracker
from telemetry.sources.sampler import Sampler
from telemetry.util.clock import sleep
from tests.slice_cases import IDLE

SECOND = 1_000_000_000
FETCHING = dict(workers=1, training_workers=1, busy_ratio=1.0, blocked_ratio=1.0)


class FakeAccounting(SimpleNamespace):
    """As much of `Accounting` as is read."""

    unseen_steps = updated_ns = 0

    @property
    def steps_total(self) -> int:
        return self.stats.steps + self.ledger.dropped_steps

    def trained_samples(self) -> None:
        """Not known."""

    def tokens(self) -> None:
        """Not known."""

    @property
    def exposed_seconds(self) -> float:
        return self.exposed.seconds


class Run:
    """A rank whose training thread does as told, and its monitor, a tick a second. Stamps: seconds from the start."""

    def __init__(self, tracker: StepTracker) -> None:
        config = Config.load({"stall_window_seconds": 10})
        self.lines: list[tuple[str, dict]] = []
        self.errors = ErrorLog()
        self.samples: dict[str, object] = {}
        self.exposed: float | None = None  # as the host sees it
        self.peers: tuple[RankPace, ...] = ()
        self.accounting = FakeAccounting(
            ledger=Ledger(0),
            stats=StepStats(config.step_buckets),
            exposed=SimpleNamespace(seconds=0.0),
            take_source=lambda: SimpleNamespace(kind="workers", settings={}),
        )
        self.tracker = tracker
        self.collectors = SimpleNamespace(samples=Samples(), cpu_seconds=0.0)
        self.sampler = Sampler(tracker, sleep)
        overhead = Overhead(tracker, [self.collectors])
        self.builder = TotalsBuilder(self.accounting, tracker, self.collectors, self.sampler, overhead)
        self.stall_monitor = StallMonitor(
            config,
            tracker,
            StallCounts(),
            errors=self.errors,
            event_log=SimpleNamespace(
                emit=lambda event, fields: self.lines.append((event, fields)),
                identity=SimpleNamespace(rank=0, node="", world_size=1),
            ),
            wall=SimpleNamespace(iso=lambda: "now"),
        )

    def request(self, start: float, end: float, *, opens: bool = True, batch: bool = True) -> None:
        after = COMPUTE if batch else OTHER
        span = (int(start * SECOND), int(end * SECOND), DATA_WAIT, after, opens, opens, batch, False)
        self.tracker.explicit = True
        self.accounting.ledger.fold([span])
        self.accounting.stats.add(self.accounting.ledger.take_steps())

    def checkpoint(self, start: float, end: float) -> None:
        for stamp, category in ((start, CHECKPOINT), (end, COMPUTE)):
            self.accounting.ledger.fold([(int(stamp * SECOND),) * 2 + (category, category, *[False] * 4)])

    def tick(self, now: float, *, waiting_since: float = 0.0, **seen: float) -> None:
        """``seen``: of the workers."""
        self.accounting.ledger.advance(int(now * SECOND), int(waiting_since * SECOND))
        waited = self.accounting.ledger.ns[DATA_WAIT] / SECOND
        self.accounting.exposed.seconds = waited if self.exposed is None else self.exposed
        self.samples["workers"] = dataclasses.replace(IDLE, **FETCHING | seen)
        self.collectors.samples = Samples(**self.samples)
        self.stall_monitor.tick(self.builder.tick(self.peers), self.accounting)

    def wait_for_the_first_batch(self) -> None:
        self.request(0.1, 0.2, opens=False, batch=False)  # the workers are started
        for second in range(1, 9):
            self.tick(second, waiting_since=0.5, fetching_seconds=second - 0.5)
        self.request(0.5, 8.5)

    @property
    def causes(self) -> list[str]:
        return [fields["cause"] for event, fields in self.lines if event == "stall_open"]
