"""What ``report --json`` prints, and what the text and the page are made of. Names and order are the contract.

docs/output.md explains the fields. Times are ISO-8601 in UTC. None: not measured, or not known.
"""

from __future__ import annotations

import msgspec

from telemetry.diagnosis.findings import Finding
from telemetry.log.lines import ChangedFigure, Suspect
from telemetry.model.records import Epochs, HotLine, Number, RankedAdvice, StallRecord, StepTrend
from telemetry.trace.trace_advice import Suggestion


class Durations(msgspec.Struct):
    """Seconds of the steps, or of the waits, of a whole run."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Growth(msgspec.Struct):
    """How the memory of a rank grows, by its newest line."""

    growth_bytes_per_hour: Number | None = None
    where: str | None = None
    exhausted_in_seconds: Number | None = None


class Rank(msgspec.Struct, kw_only=True):
    """One process of the run. A rank that was restarted has several, the newest last.

    ``optimizer_steps``: of all optimizers of torch; None if none has stepped.
    ``compute_seconds``: seconds of the compute by part, as far as it was split; empty if it was not.
    ``step_lines``: the lines of code in which its steps spend their time; empty if they are not known.
    ``steps``: null if no hook saw them. ``estimated_steps``: about how many there were then, by samples of the stack.
    ``data_wait_seconds``: null if no hook saw the loop's batches; the ledger has such waits in ``compute``.
    """

    rank: int
    local_rank: int | None
    node: str | None
    pid: int
    steps: int | None
    optimizer_steps: int | None
    samples: int | None
    tokens: int | None
    epochs: Epochs | None
    step_trend: StepTrend | None
    gpu_energy_joules: dict[str, float] | None
    wall_seconds: float
    ledger: dict[str, float]
    compute_seconds: dict[str, float]
    step_seconds: Durations
    data_wait_seconds: Durations
    exposed_wait_ratio: float | None
    overhead_seconds: dict[str, float]
    memory: Growth
    attempt: int | None
    step_lines: list[HotLine]
    estimated_steps: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def loop_seconds(self) -> float:
        """Seconds of the rank in the training loop."""
        return self.ledger["data_wait"] + self.ledger["compute"]

    @property
    def measured(self) -> dict[str, float | None]:
        """The ledger for a person: None for waits that no hook saw, and that are therefore booked as compute."""
        unseen = self.data_wait_seconds.p50 is None and not self.ledger["data_wait"] and self.ledger["compute"] > 0
        return {c: None if unseen and c == "data_wait" else seconds for c, seconds in self.ledger.items()}

    @property
    def steps_text(self) -> str:
        """The number of its steps, with a tilde if it is an estimate."""
        return f"~{self.estimated_steps}" if self.estimated_steps else "-" if self.steps is None else str(self.steps)


class Waiting(msgspec.Struct):
    """Ranks that wait in the same collective."""

    ranks: list[int]
    collective: str | None
    sequence: int | None


class HangRecord(msgspec.Struct):
    """Why the job hangs."""

    since: str | None
    verdict: str
    kind: str
    suspects: list[Suspect]
    waiting: list[Waiting]


class Change(msgspec.Struct):
    """A lasting change of the steps of a rank. ``ratio``: step time after it over step time before it."""

    at: str
    step: int | None
    rank: int
    ratio: float
    part: str | None
    figures: list[ChangedFigure] = msgspec.field(name="with")


class Snapshot(msgspec.Struct, kw_only=True):
    """A recorded trace. ``breakdown``: shares of its average step; empty, as ``advice``, if it was not read."""

    rank: int
    first_step: int | None
    last_step: int | None
    path: str
    reason: str | None
    breakdown: dict[str, float]
    advice: list[Suggestion] | msgspec.UnsetType = msgspec.UNSET

    @property
    def suggestions(self) -> list[Suggestion]:
        """The advice; empty if the trace was not read."""
        return self.advice or []


class JobAttempt(msgspec.Struct, kw_only=True):
    """One attempt. ``resumed_from``: where its position comes from, see `telemetry.report.attempt_list.Course`."""

    attempt: int
    started: str
    ended: str | None
    end: str
    reason: str | None
    ranks: int
    steps: int
    resumed_from_step: int | None
    resumed_from: str
    lost_steps: int


class Books(msgspec.Struct):
    """Where the wall clock of the run went: the mean over the ranks."""

    wall_seconds: float
    goodput_ratio: float | None
    ettr_ratio: float | None
    seconds: dict[str, float]


class CheckpointInterval(msgspec.Struct, kw_only=True):
    """The best interval between checkpoints by the experience of the run."""

    checkpoint_seconds: float
    interval_seconds: float
    failure_seconds: float
    best_interval_seconds: float
    predicted_ettr_ratio: float


class Job(msgspec.Struct):
    """All attempts of the run. ``ranks``: number of ranks of the newest attempt."""

    nodes: list[str]
    ranks: int
    attempts: list[JobAttempt]
    goodput: Books
    checkpoint_interval: CheckpointInterval | None


class Throughput(msgspec.Struct, kw_only=True):
    """Samples and tokens of all ranks, repeated training included. Rates are per second of the training loop."""

    samples: int | None
    samples_per_second: float | None
    tokens: int | None
    tokens_per_second: float | None


class Cost(msgspec.Struct, kw_only=True):
    """Amounts in the currency of the price. They overlap: a wait during a stall is part of both."""

    gpu_hour_price: float
    gpu_hours: float
    total: float
    waiting: float | None
    stalls: float
    restarts: float


class ReportValues(msgspec.Struct, kw_only=True):
    """The whole document."""

    run: str
    verdict: str
    ranks: list[Rank]
    stalls: list[StallRecord]
    findings: list[Finding]
    advice: list[RankedAdvice]
    hang: HangRecord | None
    changes: list[Change]
    snapshots: list[Snapshot]
    job: Job
    throughput: Throughput
    gpu_energy_joules: dict[str, float] | None
    cost: Cost | None
