"""The lines of the log, a record for each event, and the heartbeat of a process.

The agent writes these records (`agent.event_log`), and the report reads them (`log.reader`). A field that was not
measured is null in the log. A field that does not apply is absent; the writer marks it with `ABSENT`. A reader gets
None for both.

Times are ISO-8601 in UTC unless the name says ``unix``. ``_seconds``, ``_bytes``, ``_hertz``, ``_watts``, ``_joules``
and ``_celsius`` are units. ``_ratio`` is from 0 to 1. ``_total`` counts since the process started. Dictionaries of
seconds are by category of the ledger unless a docstring names another key.
"""

from __future__ import annotations

import re
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta, Struct, structs

from telemetry.model.records import (
    COMPUTE,
    DATA_WAIT,
    REPLAY,
    STARTUP,
    Advice,
    CodeLines,
    Count,
    Epochs,
    FindingKind,
    HotLine,
    Number,
    StallRecord,
    StepTrend,
)
from telemetry.safety.files import read_small
from telemetry.util.clock import iso_time

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ABSENT: Final[Any] = msgspec.UNSET

Scalar = str | bool | Number
SketchCounts = dict[Annotated[int, Meta(ge=-9999, le=9999)], Count]
"""A `Sketch` of durations: counts by bucket."""

Seconds = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds of a heartbeat. No run is longer, and no clock shows more."""


# -- the lines with totals ---------------------------------------------------------------------------------------------


class Line(Struct, frozen=True, kw_only=True):
    """The fields of every line beside its event. ``step``: ended steps of the process."""

    time: str = ""
    run: str = ""
    rank: Count | None = None
    local_rank: Count | None = None
    node: str | None = None
    pid: Count | None = None
    tid: Count | None = None
    step: Count | None = None


class SurroundingsLine(Line, frozen=True, kw_only=True):
    """Versions, cores and the script, and the settings of the DataLoader. A window has them only if they have changed.

    Attributes:
        oom_kills_total: processes of this cgroup that the OOM killer has killed.
    """

    environment: dict[str, Scalar | None] = {}
    loader: dict[str, Scalar | None] | None = None
    oom_kills_total: Count | None = None


class MemoryForecast(Struct, frozen=True, omit_defaults=True):
    """Growth of memory. ``where``: the growing part, see `MEMORY_PARTS`; ``exhausted``: memory that will run out."""

    growth_bytes_per_hour: Number | None = None
    where: str | None = None
    exhausted_in_seconds: Number | None = None
    exhausted: str | None = None
    copied_on_write: bool = False
    advice: str | None = None


class Resumption(Struct, frozen=True, omit_defaults=True):
    """The beginning of an attempt. Fields of what did not happen are absent.

    Attributes:
        optimizers: number of optimizers that step; absent for one.
        restore_seconds: time in loading functions before the first step.
        resumed_from: source of ``resumed_step``. ``resumed_at_optimizer_steps``: steps of this process's optimizers
            before it loaded that state. ``resumed_step``: position in optimizer steps of the whole training.
        replayed_batches: batches that were drawn and thrown away; absent before that is known. ``replay_seconds``: time
            of the loop for them, of which ``replay_wait_seconds`` was waiting.
    """

    optimizers: Count | None = None
    restore_seconds: Number = 0.0
    resumed_from: str | None = None
    resumed_at_optimizer_steps: Count | None = None
    resumed_step: Count | None = None
    replayed_batches: Count | None = None
    replay_seconds: Number = 0.0
    replay_wait_seconds: Number = 0.0


class TotalsLine(SurroundingsLine, frozen=True, kw_only=True):
    """A line with the totals of the process: every window, and the last line.

    Attributes:
        wall_seconds: time since the agent started; the sum of ``ledger_total_seconds``.
        estimated_steps_total: about how many steps there were, by samples of the stack. Absent if steps were counted.
        exposed_wait_total_seconds: null if it was not measured; ``exposed_wait_absent``: the reason.
        first_wait_seconds: the wait for the first batch, a part of the ledger's ``data_wait``.
        unseen_steps_total: steps whose batches the hooks did not see.
        overhead_seconds: cost of the agent by thread: ``training`` and ``agent``.
        stall_lost_total_seconds: by cause.
        stuck_total_seconds: seconds without progress, once they were noticed, by place: the category of the ledger, or
            ``startup`` in the wait for the first batch, or ``replay``. Absent if the process was never stuck.
        child_processes: processes that the script has started with multiprocessing.
        samples_total, tokens_total: null if they are not known.
        epochs: absent before the end of the first.
        compute_total_seconds: by part; absent before they are known.
        gpu_energy_total_joules: energy of the whole GPUs. ``gpu_uuid``: theirs, separated by spaces.
        cpu_total_seconds: CPU time in the training loop by user: ``used``, the process and its workers; ``others``, all
            others of the machine; ``known``, the wall clock over which these two were measured; ``thread`` and
            ``thread_delay``, the training thread's and its run-queue delay, over its whole life; ``worker`` and
            ``worker_delay``, of the mean worker. Null before the first are known.
    """

    steps_total: Count | None = None
    estimated_steps_total: Count | None = None
    wall_seconds: Number = 0.0
    ledger_total_seconds: dict[str, Number] = {}
    exposed_wait_total_seconds: Number | None = None
    exposed_wait_absent: str | None = None
    first_wait_seconds: Number = 0.0
    overhead_seconds: dict[str, Number] = {}
    stall_lost_total_seconds: dict[str, Number] | None = None
    stuck_total_seconds: dict[str, Number] = {}
    dropped_steps_total: Count = 0
    child_processes: Count = 0
    unseen_steps_total: Count = 0
    samples_total: Count | None = None
    tokens_total: Count | None = None
    epochs: Epochs | None = None
    compute_total_seconds: dict[str, Number] = {}
    gpu_energy_total_joules: dict[str, Number] | None = None
    gpu_uuid: str | None = None
    cpu_total_seconds: dict[str, Number] | None = None
    memory: MemoryForecast = MemoryForecast()
    optimizer_steps_total: Count = 0
    resumption: Resumption = Resumption()

    @property
    def waits_unseen(self) -> bool:
        """Whether the loop has run, and no hook has seen a request for a batch: its waits were not measured."""
        ledger, seen = self.ledger_total_seconds, (self.steps_total or 0) - self.unseen_steps_total
        return bool(ledger.get(COMPUTE)) and not ledger.get(DATA_WAIT) and seen <= 0

    @property
    def is_whole(self) -> bool:
        """Whether it has the totals. A damaged line may lack them."""
        return bool(self.ledger_total_seconds) and self.wall_seconds > 0 and self.steps_total is not None


class WindowLine(TotalsLine, frozen=True, kw_only=True, tag_field="event", tag="window"):
    """One logging interval, with the totals of the run at its end.

    Attributes:
        exposed_wait_ratio: share of the training loop, wait and compute. ``exposed_wait_source``: how it was measured.
        step_seconds, data_wait_seconds: ``p50``, ``p95``, ``p99`` and ``max`` of its steps; null without a step.
    """

    window_seconds: Number = 0.0
    steps: Count = 0
    optimizer_steps: Count = 0
    ledger_seconds: dict[str, Number] = {}
    exposed_wait_seconds: Number | None = None
    exposed_wait_ratio: Number | None = None
    exposed_wait_source: str | None = None
    step_seconds: dict[str, Number] | None = None
    data_wait_seconds: dict[str, Number] | None = None
    step_sketch: SketchCounts = {}
    data_wait_sketch: SketchCounts = {}


class GpuMemoryFull(Struct, frozen=True):
    """The memory of the GPU when an allocation of ``tried_bytes`` failed, as torch's exception tells it.

    ``free_bytes`` of ``total_bytes`` belonged to no process. Of those that torch held, ``allocated_bytes`` were in use
    and ``unallocated_bytes`` were not.
    """

    tried_bytes: Count
    total_bytes: Count
    free_bytes: Count
    allocated_bytes: Count
    unallocated_bytes: Count


class RunEndLine(TotalsLine, frozen=True, kw_only=True, tag_field="event", tag="run_end"):
    """The last line of a process that ended by itself.

    Attributes:
        exit_status: the argument of ``sys.exit``.
        exception: type of the exception that ended the script. ``exception_at``: the innermost line of the user's code
            in it, or that left with an exit status, such as ``main at train.py:42``. ``failure``: what it means, one of
            `FAILURES`; null for others.
        shared_memory_bytes: size of /dev/shm, if it was full. ``gpu_memory``: the memory of the GPU, if it was full.
        lost_peer: whether the exception means another rank's end.
        stuck_for_seconds: time for which it had been stuck when it ended.
        log_lines_dropped: lines that could not be written.
        step_trend: how the steps of a short run have changed.
    """

    exit_status: Number | None = None
    exception: str | None = None
    exception_at: str | None = None
    failure: str | None = None
    shared_memory_bytes: Count | None = None
    gpu_memory: GpuMemoryFull | None = None
    lost_peer: bool = False
    stuck_for_seconds: Number | None = None
    errors_total: dict[str, Count] = {}
    log_lines_dropped: Count = 0
    step_trend: StepTrend | None = None

    @property
    def failed(self) -> bool:
        """Whether the process has ended with an exception or an exit status."""
        return bool(self.exception or self.exit_status)


class Settings(Struct, frozen=True):
    """The settings that a report needs. The line has all of them."""

    interval_seconds: Number = 1.0
    log_interval_seconds: Number = 10.0
    stall_enter_ratio: Number = 0.2
    gpu_hour_price: Number | None = None


class RunStartLine(SurroundingsLine, frozen=True, kw_only=True, tag_field="event", tag="run_start"):
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

    started: str = ""
    world_size: Count | None = None
    launcher: str | None = None
    rank_source: str | None = None
    claimed_rank: Count | None = None
    life: str | None = None
    telemetry_version: str | None = None
    python_version: str | None = None
    cpu_count: Count | None = None
    metrics_url: str | None = None
    step_sketch: SketchCounts | None = None
    step_max_seconds: Number = 0.0
    data_wait_sketch: SketchCounts | None = None
    data_wait_max_seconds: Number = 0.0
    process_started: str | None = None
    launch: str | None = None
    restarts: Count | None = None
    memory_group: str | None = None
    memory_events: str | None = None
    settings: Settings = Settings()
    continued: bool = False


# -- the means of the samples of a window: only the fields that a report or `top` shows. The agent writes all fields of
# the samples in `telemetry.model.records`, see `telemetry.sources.polling`.


class GpuLine(Line, frozen=True, kw_only=True, tag_field="event", tag="gpu"):
    """A GPU of this rank.

    Attributes:
        throttled: reasons for reduced clocks.
        wait_measured: whether the exposed wait is measured on it; None if it is the only one.
    """

    name: str | None = None
    utilization_ratio: Number | None = None
    sm_active_ratio: Number | None = None
    memory_used_bytes: Number | None = None
    memory_total_bytes: Number | None = None
    power_watts: Number | None = None
    temperature_celsius: Number | None = None
    sm_clock_hertz: Number | None = None
    throttled: list[str] | None = None
    wait_measured: bool | None = None


class HostLine(Line, frozen=True, kw_only=True, tag_field="event", tag="host"):
    """The machine and the memory of the training. ``pressure_ratio``: by resource."""

    cpu_ratio: Number | None = None
    memory_used_bytes: Number | None = None
    memory_total_bytes: Number | None = None
    process_resident_memory_bytes: Number | None = None
    workers_bytes: Number | None = None
    shared_memory_bytes: Number | None = None
    pressure_ratio: dict[str, Number] = {}

    @property
    def rank_bytes(self) -> float | None:
        """Memory of the training process and its workers; None if it is not known."""
        resident = self.process_resident_memory_bytes
        return None if resident is None else resident + (self.workers_bytes or 0)


# At the first use msgspec looks for the types of the fields by the module's name, which may be the project's by then.
msgspec.convert({}, HostLine)


class WorkersLine(Line, frozen=True, kw_only=True, tag_field="event", tag="workers"):
    """The DataLoader workers of this rank."""

    workers: Count | None = None
    ready_batches: Count | None = None
    cpu_ratio: Number | None = None
    runnable_ratio: Number | None = None
    blocked_ratio: Number | None = None


# -- the lines of single events ----------------------------------------------------------------------------------------


class PhaseLine(Line, frozen=True, kw_only=True, tag_field="event", tag="phase"):
    """An evaluation, checkpoint or named phase that has ended. Only a checkpoint has the last six fields.

    Attributes:
        complete: whether everything is written. ``holds_optimizer``: whether training can be resumed from it.
        loop_seconds: seconds of the training loop so far; absent if it was completed on another thread.
        stuck_total_seconds: as in a `TotalsLine`.
    """

    name: str = ""
    category: str = ""
    started: str = ""
    seconds: Number = 0.0
    complete: bool | None = None
    holds_optimizer: bool | None = None
    optimizer_steps_total: Count | None = None
    steps_total: Count | None = None
    loop_seconds: dict[str, Number] | None = None
    stuck_total_seconds: dict[str, Number] = {}


class StallLine(Line, frozen=True, kw_only=True):
    """A stall, as it was when the line was written. The reader decodes ``stall`` from the fields of the line itself."""

    stall: StallRecord = msgspec.field(default_factory=StallRecord)


class StallOpenLine(StallLine, frozen=True, kw_only=True, tag_field="event", tag="stall_open"):
    """A stall that has begun."""


class StallCodeLine(StallLine, frozen=True, kw_only=True, tag_field="event", tag="stall_lines"):
    """A stall that is open, with its lines of code."""


class StallCloseLine(StallLine, frozen=True, kw_only=True, tag_field="event", tag="stall_close"):
    """A stall that is over."""


class FindingLine(Line, frozen=True, kw_only=True, tag_field="event", tag="finding"):
    """A `Finding` when it is new, and when it has changed. The newest line of a kind counts."""

    kind: FindingKind | None = None
    share_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    text: str | None = None
    lines: list[HotLine] = []
    advice: list[Advice] = []


class ChangedFigure(Struct, frozen=True):
    """A figure that changed together with the steps. Its name contains its unit."""

    what: str
    before: Number
    after: Number


class ChangeLine(Line, frozen=True, kw_only=True, tag_field="event", tag="change"):
    """A lasting change of the steps. ``ratio``: step time after it over step time before it; ``at``: its time.

    ``part``: the part of a step that changed most, ``data_wait`` or ``compute``.
    """

    at: str = ""
    first_step: Count | None = None
    ratio: Number = 0.0
    part: str | None = None
    step_before_seconds: Number | None = None
    step_after_seconds: Number | None = None
    figures: list[ChangedFigure] = msgspec.field(default_factory=list, name="with")


class StragglerCodeLine(Line, frozen=True, kw_only=True, tag_field="event", tag="straggler_lines"):
    """The lines in which a rank spends its steps while other ranks wait for it."""

    evidence: CodeLines = msgspec.field(default_factory=CodeLines)


class StepCodeLine(Line, frozen=True, kw_only=True, tag_field="event", tag="step_lines"):
    """The lines of code in which the steps of a run spend their time, from some samples in a minute."""

    lines: list[HotLine] = []
    samples: Count = 0


class Suspect(Struct, frozen=True):
    """A rank that the others wait for while the job hangs, and its activity."""

    rank: Count | None = None
    node: str | None = None
    where: str | None = None
    doing: str | None = None


class WaitingRanges(Struct, frozen=True):
    """Ranks that wait in the same collective: the first and the last rank of each range."""

    ranks: list[tuple[Count, Count]] = []
    collective: str | None = None
    sequence: Count | None = None


class HangLine(Line, frozen=True, kw_only=True, tag_field="event", tag="hang"):
    """Why the job hangs, see `HangVerdict`; with ``over``, that it goes on.

    ``since``: begin of the hang. ``recorder``: how to see the collectives, if nothing shows them.
    """

    since: str | None = None
    verdict: str | None = None
    kind: str | None = None
    over: bool = False
    suspects: list[Suspect] = []
    suspects_total: Count = 0
    waiting: list[WaitingRanges] = []
    silent_ranks: Count = 0
    recorder: str | None = None


class SnapshotLine(Line, frozen=True, kw_only=True, tag_field="event", tag="snapshot"):
    """A snapshot that has ended.

    Attributes:
        why: why there is no trace. ``asked_by``: who asked for it, in words.
        path: path of its trace in the run folder; null without one.
        breakdown: shares of its average step, for a report without the trace. The agent does not write it.
        pause_seconds: how long the training thread was held up, by what held it up.
        size_bytes, trace_bytes: of the trace, compressed and before. ``held_seconds``: how long saving it held the GIL.
    """

    result: str | None = None
    why: str | None = None
    id: str | None = None
    reason: str | None = None
    asked_by: str | None = None
    first_step: Count | None = None
    last_step: Count | None = None
    path: str | None = None
    breakdown: dict[str, Number] = {}
    pause_seconds: dict[str, Number] = {}
    started: str | None = None
    ended: str | None = None
    size_bytes: Count | None = None
    trace_bytes: Count | None = None
    held_seconds: dict[str, Number] = {}


class GpuErrorLine(Line, frozen=True, kw_only=True, tag_field="event", tag="gpu_error"):
    """An Xid error that the driver reports of a GPU of this rank. ``gpu``: its index. ``text``: what it means."""

    gpu: Count | None = None
    uuid: str | None = None
    xid: Count = 0
    text: str | None = None


class GpuOutOfMemoryLine(Line, frozen=True, kw_only=True, tag_field="event", tag="gpu_out_of_memory"):
    """An allocation on a GPU that failed, and torch's allocator at that moment.

    Attributes:
        gpu: torch's index of the GPU.
        tried_bytes: size of the allocation. ``free_bytes``, of ``total_bytes``: what the GPU had left for this process.
        allocated_bytes: in use by tensors. ``reserved_bytes``: these, and what torch keeps for later ones.
        largest_free_bytes: the largest block that torch keeps and no tensor uses.
        allocated_before_bytes: ``allocated_bytes`` at the last tick before; None without one.
        failed_total: allocations that have failed so far, also while no line was written.
        file: name of PyTorch's memory snapshot in the run folder, if one was written.
        memory: what grows.
    """

    gpu: Count | None = None
    tried_bytes: Count = 0
    total_bytes: Count = 0
    free_bytes: Count = 0
    allocated_bytes: Count = 0
    reserved_bytes: Count = 0
    largest_free_bytes: Count = 0
    allocated_before_bytes: Count | None = None
    failed_total: Count = 0
    file: str | None = None
    memory: MemoryForecast = MemoryForecast()


class ErrorLine(Line, frozen=True, kw_only=True, tag_field="event", tag="error"):
    """A failure of the agent's own parts, or news of them. ``errors_total``: count for this source; 0 for news."""

    source: str = ""
    message: str = ""
    errors_total: Count = 0


AnyLine = (
    RunStartLine | WindowLine | GpuLine | HostLine | WorkersLine | PhaseLine | StallOpenLine | StallCodeLine
    | StallCloseLine | FindingLine | StragglerCodeLine | StepCodeLine | HangLine | ChangeLine | SnapshotLine
    | GpuErrorLine | GpuOutOfMemoryLine | ErrorLine | RunEndLine
)  # fmt: skip

KINDS: Final[Mapping[str, type[Line]]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in get_args(AnyLine)}
)
"""The record of each event."""

LOG_NAME: Final = re.compile(r"rank-(?P<rank>\d+)\.(?P<pid>\d+)(?:\.(?P<number>\d+))?\.jsonl(?:\.(?P<rotated>\d+))?")
"""The name of a log file. ``number`` counts the processes that have had this rank and pid (none for the first).
``rotated`` is the number of an older file of the same log; the oldest has the highest."""


def fields_of(line: Line) -> dict[str, Any]:
    """The fields of a line without those of every line, its own before those with the totals; without absent ones."""
    values: dict[str, Any] = msgspec.to_builtins(line, str_keys=True)
    kinds = [kind for kind in type(line).__mro__ if issubclass(kind, Line)]
    names: list[str] = []
    for kind, base in pairwise(kinds):
        names += kind.__struct_encode_fields__[len(base.__struct_encode_fields__) :]
    return {name: values[name] for name in names if name in values}


# -- the heartbeat -----------------------------------------------------------------------------------------------------


_LOOP_PLACES: Final = (STARTUP, REPLAY, DATA_WAIT, COMPUTE)


def stuck_in_loop(stuck_total_seconds: Mapping[str, float]) -> float:
    """Seconds of the training loop in which a process was stuck."""
    return sum(stuck_total_seconds.get(place, 0.0) for place in _LOOP_PLACES)


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """The newest state of a process, which shows when it was killed and what it had done by then.

    Attributes:
        life: identifies the process, as in its log.
        unix_seconds: when this state was read.
        wall_seconds: seconds since the agent started.
        seconds_before: how long the process had run when the agent started.
        kept_seconds: seconds of the training loop up to the newest checkpoint from which it can be resumed, without
            those in which it was stuck.
        saves_completed: number of such checkpoints.
        oom_kills_total: OOM kills in the cgroup; None if the cgroup has no such counter.
    """

    life: str
    unix_seconds: Annotated[float, Meta(ge=0, le=2e11)]  # the largest is in the year 8307
    wall_seconds: Seconds
    steps_total: Count
    ledger_total_seconds: dict[str, Seconds]
    optimizer_steps_total: Count = 0
    first_wait_seconds: Seconds = 0.0
    seconds_before: Seconds = 0.0
    kept_seconds: Seconds = 0.0
    saves_completed: Count = 0
    resumption: Resumption = Resumption()
    samples_total: Count | None = None
    tokens_total: Count | None = None
    oom_kills_total: Count | None = None
    stuck_total_seconds: dict[str, Seconds] = {}

    # All of these are seconds of the training loop, without those in which the process was stuck.

    @property
    def loop_seconds(self) -> float:
        """All of them."""
        spent = self.ledger_total_seconds
        return spent.get(DATA_WAIT, 0.0) + spent.get(COMPUTE, 0.0) - stuck_in_loop(self.stuck_total_seconds)

    @property
    def first_wait(self) -> float:
        """Those in the wait for the first batch."""
        return max(0.0, self.first_wait_seconds - self.stuck_total_seconds.get(STARTUP, 0.0))

    @property
    def replay(self) -> float:
        """Those in the replay, once it is known."""
        return max(0.0, self.resumption.replay_seconds - self.stuck_total_seconds.get(REPLAY, 0.0))

    @property
    def cut(self) -> float:
        """Those before the newest checkpoint, or before the first step, which no checkpoint can keep."""
        return max(self.first_wait + self.replay, self.kept_seconds if self.saves_completed else 0.0)

    def over(self, totals: TotalsLine) -> TotalsLine:
        """The totals of an older line, with those that the heartbeat has."""
        newer = {
            name: value
            for name in set(self.__struct_fields__) & set(totals.__struct_fields__)
            if (value := getattr(self, name)) is not None
        }
        return structs.replace(totals, time=iso_time(self.unix_seconds), **newer)


_decode_heartbeat: Final = msgspec.json.Decoder(Heartbeat).decode


def read_heartbeat(folder: Path, life: str | None) -> Heartbeat | None:
    """The heartbeat of a process, from the folder ``attempts`` of its run; None without one that makes sense."""
    if not life or not life.isalnum():
        return None
    try:
        found = _decode_heartbeat(read_small(folder / f"{life}.beat"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if found.life == life else None
