"""The lines of the log: the type of each event, the heartbeat of a process, and how samples become a line.

The agent writes these types (`telemetry.agent.log`) and the report reads them (`telemetry.report.logs`). They are typed
dictionaries, because a log line distinguishes what is null (it was not measured) from what is absent (it does not
apply), and because the totals of a heartbeat are merged over those of a line.

Times are ISO-8601 in UTC unless the name says ``unix``. ``_seconds``, ``_bytes``, ``_hertz``, ``_watts``, ``_joules``
and ``_celsius`` are units. ``_ratio`` is from 0 to 1. ``_total`` counts since the process started. Dictionaries of
seconds are by category of the ledger unless it is said otherwise.
"""

from __future__ import annotations

import re
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, get_type_hints

import msgspec

from telemetry.diagnosis.findings import FindingKind
from telemetry.records import (
    LOG_KIND,
    Advice,
    Deliveries,
    GpuSample,
    HostSample,
    HotLine,
    MemorySample,
    OtherCause,
    PressureSample,
    ProcessSample,
    TorchMemorySample,
    WorkersSample,
    rounded,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_LARGEST: Final = 10**15
"""No seconds, bytes or steps of a run are larger. A field with a larger number is damaged."""

Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Number = (
    Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
)
UnixSeconds = Annotated[float, msgspec.Meta(ge=0, le=2e11)]
"""The largest is in the year 8307, the last of the calendar."""

Scalar = str | bool | Number
SketchCounts = dict[Annotated[int, msgspec.Meta(ge=-9999, le=9999)], Count]
"""A `Sketch` of durations: counts by bucket."""


class Line(TypedDict, total=False):
    """The fields of every line. ``step``: ended steps of the process."""

    time: str
    event: str
    run: str
    rank: Count
    local_rank: Count
    node: str
    pid: Count
    tid: Count
    step: Count


class MemoryFields(TypedDict, total=False):
    """Growth of memory. ``where``: the growing part, see `MEMORY_PARTS`; ``exhausted``: memory that will run out."""

    growth_bytes_per_hour: Number
    where: str
    exhausted_in_seconds: Number
    exhausted: str
    copied_on_write: bool
    advice: str


class ResumptionFields(TypedDict, total=False):
    """The beginning of this attempt. Fields of what did not happen are absent.

    Attributes:
        optimizers: number of optimizers that step; absent for one.
        restore_seconds: time in loading functions before the first step.
        resumed_step: position in optimizer steps of the whole training. ``resumed_from``: source of this number.
        resumed_at_optimizer_steps: steps of this process's optimizers before it loaded that state.
        replayed_batches: batches that were drawn and thrown away. ``replay_seconds``: time of the loop for them, of
            which ``replay_wait_seconds`` was waiting.
    """

    optimizers: Count
    restore_seconds: Number
    resumed_step: Count
    resumed_from: str
    resumed_at_optimizer_steps: Count
    replayed_batches: Count
    replay_seconds: Number
    replay_wait_seconds: Number


class RunTotals(TypedDict, total=False):
    """The totals of the process, in every window, in the last line and in the heartbeat.

    Attributes:
        wall_seconds: time since the agent started; the sum of ``ledger_total_seconds``.
        exposed_wait_total_seconds: null if it was not measured; ``exposed_wait_absent``: the reason.
        first_wait_seconds: the wait for the first batch, a part of the ledger's ``data_wait``.
        unseen_steps_total: steps whose batches the hooks did not see.
        overhead_seconds: cost of the agent by thread: ``training`` and ``agent``.
        stall_lost_total_seconds: seconds lost in stalls, by cause.
        child_processes: processes that the script has started with multiprocessing.
        samples_total, tokens_total: samples and tokens of the training; null if they are not known.
        gpu_energy_total_joules: energy of the whole GPU ``gpu_uuid``.
        cpu_total_seconds: CPU time in the training loop by user: ``used``, the process and its workers; ``others``, all
            others of the machine; ``known``, the wall clock over which these two were measured; ``thread`` and
            ``thread_delay``, the training thread's and its run-queue delay, over its whole life; ``worker`` and
            ``worker_delay``, of the mean worker. Null before the first are known.
        oom_kills_total: processes of this cgroup that the OOM killer has killed.
    """

    steps_total: Count
    wall_seconds: Number
    ledger_total_seconds: dict[str, Number]
    exposed_wait_total_seconds: Number | None
    exposed_wait_absent: str | None
    first_wait_seconds: Number
    overhead_seconds: dict[str, Number]
    stall_lost_total_seconds: dict[str, Number]
    dropped_steps_total: Count
    child_processes: Count
    unseen_steps_total: Count
    samples_total: Count | None
    tokens_total: Count | None
    gpu_energy_total_joules: dict[str, Number] | None
    gpu_uuid: str | None
    cpu_total_seconds: dict[str, Number] | None
    memory: MemoryFields
    optimizer_steps_total: Count
    oom_kills_total: Count
    resumption: ResumptionFields


class Heartbeat(RunTotals, total=False):
    """The newest state of a process that has not ended by itself. ``life`` identifies the process, as in its log.

    Attributes:
        time: ``unix_seconds`` as in a log line; the reader sets it.
        seconds_before: age of the process when the agent started.
        kept_seconds: seconds of the training loop up to the newest checkpoint from which it can be resumed.
        saves_completed: number of such checkpoints.
    """

    life: str
    unix_seconds: UnixSeconds
    time: str
    seconds_before: Number
    kept_seconds: Number
    saves_completed: Count


class SettingFields(TypedDict, total=False):
    """The settings that a report needs. The line has all of them."""

    interval_seconds: Number
    log_interval_seconds: Number
    stall_enter_ratio: Number
    gpu_hour_price: Number | None


class Surroundings(TypedDict, total=False):
    """Versions, cores and the script; the settings of the DataLoader. A window has them only if they have changed."""

    environment: dict[str, Scalar | None]
    loader: dict[str, Scalar | None]


class RunStartLine(Line, Surroundings, total=False):
    """The first line of a process, and of each of its files.

    Attributes:
        started: start of the agent. ``process_started``: start of the process.
        continued: whether the process goes on here in another file, or as another rank.
        claimed_rank: the rank that the process itself claims; ``rank`` may differ if several claim the same.
        life: a name that differs for each start of an agent.
        launcher, launch, restarts: the launcher of the process, the id of its start, and the number of restarts.
        memory_group, memory_events: the cgroup, and its file with the counter of OOM kills.
        step_sketch, step_max_seconds: steps of the process so far. ``data_wait_…``: their waits. Absent before a step.
    """

    started: str
    world_size: Count
    launcher: str
    rank_source: str
    claimed_rank: Count
    life: str
    process_started: str | None
    launch: str | None
    restarts: Count | None
    memory_group: str | None
    memory_events: str | None
    oom_kills_total: Count
    telemetry_version: str
    python_version: str
    cpu_count: Count | None
    metrics_url: str | None
    settings: SettingFields
    step_sketch: SketchCounts
    step_max_seconds: Number
    data_wait_sketch: SketchCounts
    data_wait_max_seconds: Number
    continued: bool


class WindowLine(Line, RunTotals, Surroundings, total=False):
    """One logging interval, with the totals of the run at its end.

    Attributes:
        exposed_wait_ratio: share of the training loop, wait and compute. ``exposed_wait_source``: how it was measured.
        step_seconds, data_wait_seconds: ``p50``, ``p95``, ``p99`` and ``max`` of its steps; null without a step.
    """

    window_seconds: Number
    steps: Count
    optimizer_steps: Count
    ledger_seconds: dict[str, Number]
    exposed_wait_seconds: Number | None
    exposed_wait_ratio: Number | None
    exposed_wait_source: str | None
    step_seconds: dict[str, Number] | None
    data_wait_seconds: dict[str, Number] | None
    step_sketch: SketchCounts
    data_wait_sketch: SketchCounts


_OLDER_NAMES: Final = {"pickling_ratio": "packing_ratio"}
"""Log names of fields that have another name in the code."""


def _samples_line(name: str, *samples: tuple[type, str], **more: Any) -> type:
    """The type of a line with the fields of some samples, each with a prefix, as `mean_of` writes them."""
    line = get_type_hints(Line, include_extras=True) | more
    for sample, prefix in samples:
        for spec in fields(sample):
            what, _, absent = str(spec.type).partition(" | ")
            number = Number if what == "float" or spec.name.endswith("_bytes") else Count
            kinds = {"str": str, "tuple[str, ...]": list[str], "dict[str, float]": dict[str, Number]}
            kind: Any = number if what in {"int", "float"} else kinds.get(what)
            if kind is not None and spec.metadata.get(LOG_KIND) != "skip":
                line[prefix + _OLDER_NAMES.get(spec.name, spec.name)] = kind | None if absent else kind
    return TypedDict(name, line, total=False)  # type: ignore[operator,no-any-return]


class PhaseLine(Line, total=False):
    """An evaluation, checkpoint or named phase that has ended. Only a checkpoint has the last five fields.

    Attributes:
        complete: whether everything is written. ``holds_optimizer``: whether training can be resumed from it.
        loop_seconds: seconds of the training loop so far; absent if it was completed on another thread.
    """

    name: str
    category: str
    started: str
    seconds: Number
    complete: bool
    holds_optimizer: bool
    optimizer_steps_total: Count
    steps_total: Count
    loop_seconds: dict[str, Number]


class StallEvidence(TypedDict, total=False):
    """The evidence of a stall that code reads, see `StallRecord`. The other fields are copied, see `evidence_field`.

    Attributes:
        lost_seconds: seconds lost, by cause.
        stuck_in: category of the ledger in which the rank is stuck; only for a hang, like the next three.
        lines, lines_of: lines with their shares of the time, and of which time: fetch, wait, sampler, step, checkpoint.
        line_verdict: a sentence about the lines.
        share_ratio: share of the cause, if other causes are of similar size: ``also``.
    """

    straggler_rank: Count
    straggler_node: str
    straggler_reason: str
    lost_seconds: dict[str, Number]
    stuck_in: str
    stuck_at: str | None
    stuck_for_seconds: Number
    stacks: list[str]
    lines: list[HotLine]
    lines_of: str
    line_verdict: str | None
    share_ratio: Number
    also: list[OtherCause]


class StallLine(Line, total=False):
    """A `StallRecord` when it opens (``stall_open``), while it is open (``stall_lines``), and when it closes."""

    cause: str
    first_step: Count
    last_step: Count
    exposed_wait_ratio: Number | None
    evidence: dict[str, Any]
    advice: list[Advice]
    opened: str
    closed: str


class FindingLine(Line, total=False):
    """A `Finding` when it is new, and when it has changed. The newest line of a kind counts."""

    kind: FindingKind
    share_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    text: str
    lines: list[HotLine]
    advice: list[Advice]


class ChangedFigure(TypedDict, total=False):
    """A figure that changed together with the steps. Its name contains its unit."""

    what: str
    before: Number
    after: Number


_With = TypedDict("_With", {"with": list[ChangedFigure]}, total=False)  # the word cannot be a field of a class


class ChangeLine(Line, _With, total=False):
    """A lasting change of the steps. ``ratio``: step time after it over step time before it; ``at``: its time.

    ``part``: the part of a step that changed most, ``data_wait`` or ``compute``.
    """

    at: str
    first_step: Count
    ratio: Number
    part: str
    step_before_seconds: Number
    step_after_seconds: Number


class StragglerLines(Line, total=False):
    """The lines in which a rank spends its steps while other ranks wait for it."""

    evidence: dict[str, Any]


class StepLines(Line, total=False):
    """The lines of code in which the steps of a run spend their time, from some samples in a minute."""

    lines: list[HotLine]
    samples: Count


class SuspectFields(TypedDict, total=False):
    """A `HangSuspect`."""

    rank: Count
    node: str | None
    where: str | None
    doing: str


class WaitingFields(TypedDict, total=False):
    """`WaitingRanks`: the first and the last rank of each range."""

    ranks: list[tuple[Count, Count]]
    collective: str | None
    sequence: Count | None


class HangLine(Line, total=False):
    """Why the job hangs, see `HangVerdict`; with ``over``, that it goes on. ``since``: begin of the hang."""

    since: str | None
    verdict: str
    kind: str
    over: bool
    suspects: list[SuspectFields]
    suspects_total: Count
    waiting: list[WaitingFields]
    silent_ranks: Count
    recorder: str


class SnapshotLine(Line, total=False):
    """A snapshot that has ended. ``path``: path of its trace in the run folder; null without one, then with ``why``."""

    result: str
    why: str | None
    id: str
    reason: str | None
    asked_by: str
    first_step: Count | None
    last_step: Count | None
    path: str | None
    pause_seconds: dict[str, Number]
    started: str
    ended: str
    size_bytes: Number
    trace_bytes: Number
    held_seconds: dict[str, Number]
    breakdown: dict[str, Number]


class ErrorLine(Line, total=False):
    """A failure of the agent's own parts, or news of them. ``errors_total``: count for this source; 0 for news."""

    source: str
    message: str
    errors_total: Count


class StepTrendFields(TypedDict, total=False):
    """A `StepTrend`."""

    kind: str
    before_seconds: Number
    after_seconds: Number
    loop_seconds: Number


class RunEndLine(Line, RunTotals, total=False):
    """The last line of a process that ended by itself.

    Attributes:
        exception: type of the exception that ended the script. ``lost_peer``: whether it means another rank's end.
        replaced: whether the process has executed another program.
        stuck_for_seconds: time for which it had been stuck when it ended.
        log_lines_dropped: lines that could not be written.
        step_trend: how the steps of a short run have changed.
    """

    exit_status: Number
    exception: str
    lost_peer: bool
    replaced: bool
    stuck_for_seconds: Number
    errors_total: dict[str, Count]
    log_lines_dropped: Count
    step_trend: StepTrendFields


EVENTS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "run_start": RunStartLine,
        "window": WindowLine,
        "gpu": _samples_line("GpuLine", (GpuSample, ""), (TorchMemorySample, "")),
        "host": _samples_line(
            "HostLine", (HostSample, ""), (ProcessSample, "process_"), (PressureSample, ""), (MemorySample, "")
        ),
        "workers": _samples_line(
            "WorkersLine", (WorkersSample, ""), **dict.fromkeys(Deliveries().log_fields(), Number)
        ),
        "phase": PhaseLine,
        "stall_open": StallLine,
        "stall_lines": StallLine,
        "stall_close": StallLine,
        "finding": FindingLine,
        "straggler_lines": StragglerLines,
        "step_lines": StepLines,
        "hang": HangLine,
        "change": ChangeLine,
        "snapshot": SnapshotLine,
        "error": ErrorLine,
        "run_end": RunEndLine,
    }
)
"""The type of the lines of each event."""

LOG_NAME: Final = re.compile(r"rank-(?P<rank>\d+)\.(?P<pid>\d+)(?:\.(?P<number>\d+))?\.jsonl(?:\.(?P<rotated>\d+))?")
"""The name of a log file. ``number`` counts the processes that have had this rank and pid (none for the first).
``rotated`` is the number of an older file of the same log; the oldest has the highest."""


def mean_of(samples: Sequence[Any]) -> dict[str, Any]:
    """Merge the samples of a window into one set of fields, each by its kind, see `LOG_KIND`.

    A number is the mean of the samples that have it, or null without any.
    """
    newest = samples[-1]
    merged: dict[str, Any] = {}
    for spec in fields(newest):
        kind = spec.metadata.get(LOG_KIND)
        values = [v for s in samples if (v := getattr(s, spec.name)) is not None]
        last = values[-1] if values and kind == "newest" else getattr(newest, spec.name)
        if kind == "skip":
            continue
        if hasattr(last, "log_fields"):
            merged |= rounded(last.log_fields())
        elif kind != "newest" and values and all(map(_is_number, values)):
            mean = sum(values) / len(values)
            merged[spec.name] = round(mean) if isinstance(values[-1], int) else rounded(mean)
        else:
            merged[spec.name] = list(last) if isinstance(last, tuple) else rounded(last)
    for name, older in _OLDER_NAMES.items():
        if name in merged:
            merged[older] = merged.pop(name)
    return merged


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
