"""The verdict on a run: its largest loss, and all its sentences, which every report and the agent's last line have."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.diagnosis.findings import HINTS, reason_of
from telemetry.model.records import (
    CHECKPOINT,
    COMPUTE,
    CUDA,
    DOWN,
    EVALUATION,
    FAILURES,
    GPU_MEMORY_FULL,
    LOST,
    OTHER,
    PRODUCTIVE,
    REDONE,
    REPLAY,
    RESTORE,
    SHARED_MEMORY,
    SHARED_MEMORY_FULL,
    STARTUP,
    STUCK,
    TRAINING,
    WORKERS,
    XIDS,
    XIDS_OF_SCRIPTS,
    stuck_in_words,
)
from telemetry.util.stacks import is_library
from telemetry.util.words import (
    binary_size,
    byte_size,
    listed,
    named,
    percent,
    plain_number,
    rough_duration,
    rounded_percent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.diagnosis.findings import Finding
    from telemetry.log.lines import GpuErrorLine, GpuMemoryFull, MemoryForecast, RunEndLine
    from telemetry.model.records import Advice, HotLine, StallRecord
    from telemetry.trace.trace_advice import Suggestion


class VerdictKind(Enum):
    """The kinds of verdicts. The last three are about a hang, the others about the largest loss.

    A run that loses nothing is `HEALTHY`, or `FAILED` if it broke off.
    """

    NO_STEPS = "no steps"
    UNMEASURED = "unmeasured"
    STARVED = "starved"
    UNKNOWN = "unknown"
    STALLED = "stalled"
    SLOWED = "slowed"
    FAILED = "failed"
    HEALTHY = "healthy"
    STUCK = "stuck"
    HANGS = "hangs"
    HUNG = "hung"


GOOD: Final = "good"
BAD: Final = "bad"
UNSURE: Final = "unknown"
"""The levels of a verdict."""

_MAX_UNSEEN_RATIO: Final = 0.05
"""If a rank did not see the batches of more than this share of its steps, it is unknown whether it waits for data."""


def batches_unseen(unseen: int, steps: int) -> bool:
    """Whether too many steps had unseen batches, so that it is unknown whether a rank waits for data."""
    return steps > 0 and unseen / steps >= _MAX_UNSEEN_RATIO


@dataclass(frozen=True, slots=True)
class RankWaits:
    """The waits for data of one rank over the whole run.

    Attributes:
        steps: steps that have ended. ``unseen_steps``: steps without a batch request that the hooks see.
            ``estimated_steps``: about how many there were, if no hook saw any.
        wait_seconds: all waits. ``first_wait_seconds``: the part before the first batch.
        exposed_seconds: None if it was not measured; ``unmeasured``: the reason, if it is known.
        starved_ratio: share of the training loop from which on it is starved (its ``stall_enter_ratio``).
        waited_before: whether it waited for a batch before the part of the run that this is about.
    """

    rank: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    first_wait_seconds: float
    exposed_seconds: float | None
    starved_ratio: float
    unseen_steps: int = 0
    unmeasured: str = ""
    waited_before: bool = False
    estimated_steps: int | None = None

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

    @property
    def ran(self) -> bool:
        """Whether its loop ran: a step has ended, or samples show a backward pass and no hook saw a batch."""
        return self.steps > 0 or (self.compute_seconds > 0 and not self.wait_seconds)

    @property
    def unseen_ratio(self) -> float:
        """The share of its steps without a batch request that the hooks see."""
        return self.unseen_steps / self.steps if self.steps else 1.0

    @property
    def wait_ratio(self) -> float:
        """Waits over training-loop seconds."""
        return self.wait_seconds / self.loop_seconds if self.loop_seconds > 0 else 0.0

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed wait over training-loop seconds; None if it was not measured."""
        if self.exposed_seconds is None or self.loop_seconds <= 0:
            return None
        return self.exposed_seconds / self.loop_seconds

    @property
    def exposed_after_start_ratio(self) -> float:
        """`exposed_ratio` without the wait for the first batch, which each run has and which is no starvation."""
        left = self.loop_seconds - self.first_wait_seconds
        return ((self.exposed_seconds or 0.0) - self.first_wait_seconds) / left if left > 0 else 0.0


def healthy_share(worst: RankWaits) -> tuple[float, str]:
    """The share of the loop that the rank with the longest wait lost, and words to add; for a run that is not starved.

    In a short run the wait for the first batch may be most of the loop. Then the share is of the time after that wait.
    """
    ratio = worst.exposed_ratio or 0.0
    if ratio < worst.starved_ratio:
        return ratio, ""
    return max(0.0, worst.exposed_after_start_ratio), " after the first batch"


FAULT_SECONDS: Final = 60.0
"""An error of the GPU that is older when its process ends is not the cause."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run broke off.

    Attributes:
        ranks: the rank that failed first, or the ranks that were killed.
        process: the last line of the rank that failed; None if the ranks were killed.
        killed_by_oom: what the OOM killer did; empty if it did nothing.
        gpu_fault: the error that a GPU reported before, with its rank; None without one.
    """

    ranks: tuple[int, ...]
    process: RunEndLine | None
    killed_by_oom: str = ""
    gpu_fault: GpuErrorLine | None = None


class RankClaim(NamedTuple):
    """A process that claims the same rank as another one at the same time. ``shown_as``: the rank in the report."""

    pid: int
    node: str | None
    shown_as: int


class TraceShares(NamedTuple):
    """A trace of some steps of a rank.

    Attributes:
        shares: shares of its average step, by name.
        suggestions: what to change, the best first.
    """

    rank: int
    first_step: int | None
    last_step: int | None
    shares: Mapping[str, float]
    suggestions: Sequence[Suggestion] = ()


class MemoryEnd(NamedTuple):
    """A rank with memory that runs out. ``over``: whether its process has ended."""

    rank: int
    node: str | None
    forecast: MemoryForecast
    over: bool


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a verdict is made of.

    Attributes:
        ranks: the known ranks. ``stalls``: their stalls. ``findings``: the most important first.
        world_size: number of ranks, if not all may be known.
        hang: why the whole job hangs; empty if it does not.
        stuck: the stalls of ranks that are stuck, or that were stuck when they ended. With each comes whether its
            process has ended.
        ended: whether the run has ended. ``broke_off``: whether it ended before its work was done. ``end``: how.
        ledger: seconds by category. The verdict mentions large ones, or with ``ledger_in_full`` has all of them at its
            end, for the first of ``ranks``.
        children: number of processes that the script has started with multiprocessing.
        step_lines: by rank, the lines of code in which its steps spend their time, the largest share first.
        last_seconds: length of the newest part of the run, if the facts are only about that. ``most_in``: the category
            of the ledger in which most ranks are now; empty if not known.
        claims: the processes that claim one rank at the same time, by rank.
        gpu_seconds: for a run of several attempts, the seconds of all ranks by category. ``killed``, ``failed``: how
            many attempts were killed, and how many failed.
    """

    ranks: Sequence[RankWaits]
    stalls: Sequence[StallRecord] = ()
    findings: Sequence[Finding] = ()
    world_size: int = 0
    hang: str = ""
    stuck: Sequence[tuple[StallRecord, bool]] = ()
    ended: bool = False
    broke_off: bool = False
    end: RunEnd | None = None
    ledger: Mapping[str, float] = field(default_factory=dict)
    ledger_in_full: bool = False
    children: int = 0
    step_lines: Mapping[int, Sequence[HotLine]] = field(default_factory=dict)
    last_seconds: float = 0.0
    most_in: str = ""
    claims: Mapping[int, Sequence[RankClaim]] = field(default_factory=dict)
    trace: TraceShares | None = None
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    killed: int = 0
    failed: int = 0
    memory_ends: Sequence[MemoryEnd] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """The largest loss of a run.

    Attributes:
        kind: the kind of the verdict if there is no hang.
        worst: the rank that waited most; None without steps, or if nobody waited for any batch that was seen.
        starving: number of starved ranks. ``measured``: number of ranks with exposed wait.
        unseen: the rank with the largest share of unseen batches, if it is too large; else None.
        stalled: the stall that cost most; None without one.
        slowed_by: the most important finding; None without one.
    """

    kind: VerdictKind
    worst: RankWaits | None = None
    starving: int = 0
    measured: int = 0
    unseen: RankWaits | None = None
    stalled: StallRecord | None = None
    slowed_by: Finding | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is all right, and if not, what costs it most. ``loss``: its largest loss apart from hangs."""

    kind: VerdictKind
    text: str
    loss: Loss

    @property
    def level(self) -> str:
        """Whether the run is all right: `GOOD`, `BAD` or `UNSURE`."""
        if self.kind in {VerdictKind.UNKNOWN, VerdictKind.NO_STEPS, VerdictKind.UNMEASURED}:
            return UNSURE
        return GOOD if self.kind == VerdictKind.HEALTHY else BAD


def _largest_loss(facts: RunFacts) -> Loss:
    stepping, stalls = [rank for rank in facts.ranks if rank.ran], facts.stalls
    if not stepping:
        return Loss(VerdictKind.NO_STEPS)
    measured = [rank for rank in stepping if rank.exposed_ratio is not None]
    most_unseen = max(stepping, key=lambda rank: rank.unseen_ratio)
    unseen = most_unseen if most_unseen.unseen_ratio >= _MAX_UNSEEN_RATIO else None
    if not measured and unseen is None:
        return Loss(VerdictKind.UNMEASURED, max(stepping, key=lambda rank: rank.wait_ratio))
    starving = [rank for rank in measured if rank.exposed_after_start_ratio >= rank.starved_ratio]
    if starving:
        worst = max(starving, key=lambda rank: rank.exposed_after_start_ratio)
        return Loss(VerdictKind.STARVED, worst, len(starving), len(measured), unseen)
    first = next((finding for finding in facts.findings if finding.kind not in HINTS), None)
    if unseen is not None or not any(rank.wait_seconds or rank.waited_before for rank in measured):
        most = max(stalls, key=lambda stall: stall.cost_seconds, default=None)
        kind = VerdictKind.UNKNOWN if first is None or most is not None else VerdictKind.SLOWED
        return Loss(kind, measured=len(measured), unseen=unseen, stalled=most, slowed_by=first)
    worst = max(measured, key=lambda rank: rank.exposed_after_start_ratio)
    # A rank that waits for a slow rank loses as much as that one. The slow rank's own stall names the cause.
    slowest = costliest(stalls)
    kind = VerdictKind.HEALTHY if first is None else VerdictKind.SLOWED
    kind = kind if slowest is None else VerdictKind.STALLED
    return Loss(kind, worst, measured=len(measured), stalled=slowest, slowed_by=first)


def weight(cause: str | None, lost: float) -> tuple[bool, float]:
    """Weight of a stall for comparisons: a rank's own causes come before its wait for another rank."""
    return cause != "straggler", lost


def costliest(stalls: Sequence[StallRecord]) -> StallRecord | None:
    """The stall with the largest `weight`; None without one."""
    return max(stalls, key=lambda stall: weight(stall.cause, stall.cost_seconds), default=None)


# -- in words ----------------------------------------------------------------------------------------------------------

_WATCH: Final = "Put telemetry.watch() around what the training loop takes its batches from."

_NOTHING_SEEN: Final = (
    " Its training thread asks no DataLoader and no watched iterable for batches, so such waits count as compute."
)

_MIN_MENTIONED_RATIO: Final = 0.20
"""From this share of the wall clock on, a category outside of the training loop is mentioned."""


def judge(facts: RunFacts) -> Verdict:
    """The verdict on a run."""
    loss = _largest_loss(facts)
    kind, end = loss.kind, _end(facts.end, several=max(facts.world_size, len(facts.ranks)) > 1)
    over = facts.ended or facts.broke_off
    if facts.hang:
        kind = VerdictKind.HUNG if over else VerdictKind.HANGS
        texts = [f"{'Hung before its end' if over else 'Hangs'}: {facts.hang}.", end]
    elif facts.stuck:
        kind, texts = VerdictKind.STUCK, [_stuck([(stall, ended or over) for stall, ended in facts.stuck]), end]
    else:
        kind = VerdictKind.FAILED if facts.broke_off and kind == VerdictKind.HEALTHY else kind
        texts = [end, _loss_text(loss, facts)]
    if facts.ledger_in_full and kind in {VerdictKind.HEALTHY, VerdictKind.FAILED}:
        texts.append(whole_ledger(facts.ranks[0].steps, facts.ledger))
    texts += [_claimed(rank, claims) for rank, claims in facts.claims.items()]
    texts += [_trace(facts.trace), _gpu_hours(facts), _memory_end(facts.memory_ends)]
    return Verdict(kind, " ".join(filter(None, texts)), loss)


def _loss_text(loss: Loss, facts: RunFacts) -> str:  # noqa: PLR0911, one return for each kind
    """The sentences on the largest loss of a run that does not hang."""
    worst, stalled = loss.worst, loss.stalled
    other_time = "" if facts.ledger_in_full else _other_time(facts.ledger)
    if loss.kind == VerdictKind.NO_STEPS:
        return _no_steps(facts)
    if loss.slowed_by is not None and worst is None and loss.kind == VerdictKind.SLOWED:
        seen = ""
        if loss.slowed_by.kind != "reader_thread":
            seen = f" Whether it also waits for data is not known.{_steps(facts)}{_to_paste(facts)}"
        return f"Slower than need be. {_found(loss.slowed_by)}{seen}{other_time}"
    if loss.kind == VerdictKind.UNKNOWN or worst is None:
        stall = "" if stalled is None else f" Rank {stalled.rank} stalled.{_why(stalled.rank, facts)}"
        unseen = _unseen(loss.unseen)
        return f"Not known whether this run waits for data.{unseen}{stall}{other_time}{_steps(facts)}{_to_paste(facts)}"
    if loss.kind == VerdictKind.UNMEASURED:
        return (
            f"Rank {worst.rank} spent {rounded_percent(worst.wait_ratio)} of its training loop waiting for data; "
            f"how much of that the GPU felt was not measured{worst.unmeasured and f': {worst.unmeasured}'}."
        )
    if loss.kind == VerdictKind.STARVED:
        starved = _starved(worst, loss, all_known=len(facts.ranks) >= facts.world_size)
        return starved + _why(worst.rank, facts) + (_unseen(loss.unseen) if loss.unseen else "")
    if stalled is not None:
        return f"Not starved, but rank {stalled.rank} stalled.{_why(stalled.rank, facts)}"
    if loss.slowed_by is not None:
        return f"Not starved, but slower than need be. {_found(loss.slowed_by)}{other_time}"
    ratio, after = healthy_share(worst)
    who = "no rank lost more than" if loss.measured >= facts.world_size else f"rank {worst.rank} lost"
    lost = f"{who} {rounded_percent(ratio)} of its training loop waiting for data{after}"
    text = f"{lost}.{other_time}{_steps(facts)}"
    return f"Until then {text}" if facts.broke_off else f"Healthy: {text}"


_MIN_LINE: Final = 0.1
_MAX_LINES: Final = 2


def _steps(facts: RunFacts) -> str:
    """The lines of code in which the steps of the first rank with known lines spend most of their time."""
    rank, lines = min(facts.step_lines.items(), default=(0, ()))
    parts = [f"{rounded_percent(line.share_ratio)} in {line.named}" for line in lines if line.share_ratio >= _MIN_LINE]
    whose = f" of rank {rank}" if len(facts.ranks) > 1 else ""
    return f" Its steps{whose} spend {' and '.join(parts[:_MAX_LINES])}." if parts else ""


_LEAST_PASTED: Final = 0.05
"""A line with a smaller share of the loop is not worth a phase of its own."""


def _to_paste(facts: RunFacts) -> str:
    """Code for the script that measures what samples only estimate, for a loop without loaders; else empty."""
    if any(rank.wait_seconds for rank in facts.ranks):
        return ""
    about = max((rank.estimated_steps or 0 for rank in facts.ranks), default=0)
    lines = min(facts.step_lines.items(), default=(0, ()))[1]
    own = [line for line in lines if line.part == OTHER and not is_library(line.file)]
    text = ""
    if about and not any(rank.steps for rank in facts.ranks):
        at = f" in {lines[0].function} ({lines[0].file_name})" if lines and not is_library(lines[0].file) else ""
        text = f" It made about {about} steps, by stack samples; to count them: with telemetry.step(): around the body"
        text += f" of the loop{at}."
    if own and own[0].share_ratio >= _LEAST_PASTED:
        name = own[0].calls or "data"
        text += f' To time it: with telemetry.phase("{name}"): around {own[0].place}.'
    return text or f" {_WATCH}"


_SHM: Final = "/dev/shm"  # noqa: S108 - only its name

_LESS_MEMORY: Final = (
    "Raise the memory limit of its cgroup, or use less: fewer DataLoader workers, or a smaller prefetch_factor."
)


def _end(end: RunEnd | None, *, several: bool) -> str:
    """How a run has ended; empty if it has finished or goes on."""
    if end is None:
        return ""
    oom = f" {end.killed_by_oom[:1].upper()}{end.killed_by_oom[1:]}. {_LESS_MEMORY}" if end.killed_by_oom else ""
    fault = _fault(end.gpu_fault, several=several)
    if end.process is None:
        who = named(end.ranks)
        itself = "itself" if len(end.ranks) == 1 else "themselves"
        killed = f"{oom[:1]}{oom[1].lower()}{oom[2:]}" if oom else f" {who} did not end by {itself}."
        return f"Killed:{killed}{fault}"
    process, rank = end.process, f" on rank {end.ranks[0]}" if several and end.ranks else ""
    at = f" in {process.exception_at}" if process.exception_at else ""
    if process.exception == "KeyboardInterrupt":
        return f"Interrupted{rank}: KeyboardInterrupt{at}."
    if not process.exception:
        return f"Failed{rank}: exit status {process.exit_status or 0:.0f}.{oom}{fault}"
    failure = FAILURES.get(process.failure or "")
    means, advice = (failure.means, failure.advice) if failure is not None else ("", "")
    if process.failure == SHARED_MEMORY_FULL and process.shared_memory_bytes:
        means = means.replace(_SHM, f"{_SHM} of {byte_size(process.shared_memory_bytes)}")
    elif process.failure == GPU_MEMORY_FULL and process.gpu_memory:
        more, advice = _full(process.gpu_memory)
        means += more
    return f"Failed{rank}: {process.exception}{at}{means and f': {means}'}.{advice and f' {advice}'}{oom}{fault}"


def _full(memory: GpuMemoryFull) -> tuple[str, str]:
    """What filled the memory of the GPU, and advice; empty if none is known to help."""
    tried, total, spare = map(binary_size, (memory.tried_bytes, memory.total_bytes, memory.unallocated_bytes))
    held = f"{binary_size(memory.allocated_bytes)} of {total} were allocated, and {spare} reserved but not allocated"
    in_pieces = memory.unallocated_bytes >= memory.tried_bytes
    advice = (
        "The reserved memory is in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True." if in_pieces else ""
    )
    return f" ({tried} more did not fit; {held})", advice


def _fault(fault: GpuErrorLine | None, *, several: bool) -> str:
    """What a GPU reported before the end of its process."""
    if fault is None:
        return ""
    gpu = "The GPU" if fault.gpu is None else f"GPU {fault.gpu}"
    rank = f" of rank {fault.rank}" if several else ""
    node = f" on node {fault.node}" if fault.node else ""
    means = f": {XIDS[fault.xid]}" if fault.xid in XIDS else ""
    advice = "Have the node checked (nvidia-smi -q, dmesg) before it is used again."
    if fault.xid in XIDS_OF_SCRIPTS:
        advice = "With CUDA_LAUNCH_BLOCKING=1 the exception names the call."
    return f" {gpu}{rank}{node} had reported Xid {fault.xid}{means}. {advice}"


def _no_steps(facts: RunFacts) -> str:
    others = "another process" if facts.children == 1 else f"{facts.children} processes"
    none = "No training step had ended." if facts.broke_off else "No training step has ended yet."
    if facts.last_seconds:
        most_in = f"; most ranks are in {facts.most_in.replace('_', ' ')}" if facts.most_in else ""
        none = f"No training step has ended in the last {rough_duration(facts.last_seconds)}{most_in}."
    return none + (
        f" The script has started {others} with multiprocessing; if the training runs there, it is not seen: call "
        "telemetry.start() in the function that is spawned."
        if facts.children
        else ""
    )


def _unseen(rank: RankWaits | None) -> str:
    if rank is None or (rank.unseen_steps >= rank.steps and not rank.wait_seconds):
        return _NOTHING_SEEN
    return (
        f" The batches of {min(rank.steps, rank.unseen_steps)} of {rank.steps} steps of rank {rank.rank} reached the "
        f"training thread in a way that is not seen, and waiting for them is counted as compute. {_WATCH}"
    )


def _stuck(stuck: Sequence[tuple[StallRecord, bool]]) -> str:
    # Ranks in compute mostly wait for a rank that is not, and ranks in a collective for one that has not reached it.
    stall, ended = min(stuck, key=lambda pair: (pair[0].cause == "straggler", pair[0].details.stuck_in == COMPUTE))
    details = stall.details
    others = {other.rank for other, _ in stuck} - {stall.rank}
    doing = f"{'was' if ended else 'is'} {stuck_in_words(details.stuck_in or '')}"
    more = f" So {'are' if len(others) > 1 else 'is'} {len(others)} more." if others else ""
    at, stands = details.stuck_at, "stood" if ended else "stands"
    worker = f"; its worker {stands} in {details.worker_at}" if details.worker_at else ""
    return (
        f"Stuck{' before its end' if ended else ''}: rank {stall.rank} {doing} and {'had' if ended else 'has'} not "
        f"gone on since before {stall.opened}. Cause: {stall.cause}{f'; it {stands} at {at}' if at else ''}{worker}."
        f"{more if not ended else ''}"
    )


def _starved(worst: RankWaits, loss: Loss, *, all_known: bool) -> str:
    ratio, measured = worst.exposed_ratio or 0.0, loss.measured
    lost = f"{rounded_percent(ratio)} of its training loop waiting for data"
    bound = 1 / (1 - ratio) if ratio < 0.99 else None
    gain = f"; without that wait its steps would be up to {bound:.1f} times faster" if bound else ""
    if measured == 1 or not all_known:
        return f"Starved: rank {worst.rank} spent {lost}{gain}."
    if loss.starving == measured:
        return f"Starved: every rank waits for data; the worst, rank {worst.rank}, spent {lost}{gain}."
    others = "the other ranks wait for it inside their compute" if loss.starving == 1 else "the rest wait for them"
    return f"Starved: rank {worst.rank} spent {lost}{gain}; {others}."


def _why(rank: int, facts: RunFacts) -> str:
    """The cause and the first advice of a rank's costliest stall; empty without one."""
    stall = costliest([stall for stall in facts.stalls if stall.rank == rank])
    if stall is None:
        return ""
    reason = reason_of(stall.cause, rank, facts.findings)
    if reason is not None:
        return f" Cause: {stall.cause}. {_found(reason)}"
    text = f" Cause: {stall.cause}{_advised(stall.advice, with_reason=stall.cause == 'straggler')}"
    for other in stall.details.also[:1]:
        text += f". At the same time {other.cause} takes {rounded_percent(other.share_ratio)} of the time"
    line = stall.details.line_verdict
    return f"{text}. {line[:1].upper()}{line[1:]}." if line else f"{text}."


def _found(finding: Finding) -> str:
    return f"{finding.text}{_advised(finding.advice)}."


def _advised(advices: Sequence[Advice], *, with_reason: bool = False) -> str:
    """The first advice as the end of a sentence; empty without one."""
    text = ""
    for advice in advices[:1]:
        text += f"; try {advice.typed}" if advice.typed else f"; {advice.action}"
        text += f" ({advice.because})" if with_reason else ""
        text += f", predicted {advice.gain} times the steps per second" if advice.gain else ""
    return text


def _other_time(ledger: Mapping[str, float]) -> str:
    wall = sum(ledger.values())
    words = {STARTUP: "starting up", EVALUATION: "evaluating", CHECKPOINT: "writing checkpoints"}
    shares = {c: ledger.get(c, 0.0) / wall for c in words} if wall > 0 else {}
    large = [f"{rounded_percent(share)} {words[c]}" for c, share in shares.items() if share >= _MIN_MENTIONED_RATIO]
    return f" Of its wall clock the run spent {' and '.join(large)}." if large else ""


_MIN_RATIO: Final = 0.005
"""The whole ledger and the GPU-hours leave out categories with a smaller share."""


def whole_ledger(steps: int, ledger: Mapping[str, float]) -> str:
    """Steps and wall clock of a rank, and the shares of the categories, as a sentence."""
    wall = sum(ledger.values())
    shares = {c: seconds / wall for c, seconds in ledger.items()} if wall > 0 else {}
    large = sorted(((share, c) for c, share in shares.items() if share >= _MIN_RATIO), reverse=True)
    parts = ", ".join(f"{rounded_percent(share)} {category.replace('_', ' ')}" for share, category in large)
    return f"{steps} step{'' if steps == 1 else 's'} in {rough_duration(wall)}: {parts}."


# -- in words: more than the largest loss ------------------------------------------------------------------------------

_MAX_NAMED: Final = 8

_MIN_TRACE_SHARE: Final = 0.05
"""A sentence leaves out categories with a smaller share of a step."""

_LOST_IN: Final = {
    REDONE: "redone",
    DOWN: "down",
    STUCK: "stuck",
    RESTORE: "restoring",
    REPLAY: "replaying",
    STARTUP: "starting up",
}
_GROWING: Final = {
    TRAINING: ("the training process", "grows"),
    WORKERS: ("the workers", "grow"),
    SHARED_MEMORY: (_SHM, "grows"),
    CUDA: ("the tensors on the GPU", "grow"),
}


def _claimed(rank: int, claims: Sequence[RankClaim]) -> str:
    who = [
        f"pid {claim.pid} on {claim.node}{'' if claim.shown_as == rank else f', shown as rank {claim.shown_as}'}"
        for claim in claims
    ]
    return (
        f"{len(claims)} processes claim rank {rank} at the same time ({listed(who, _MAX_NAMED)}); each is counted "
        "separately. Tell each process its rank: set RANK and WORLD_SIZE, or call "
        "torch.distributed.init_process_group. If they are separate jobs, give each its own run folder."
    )


def trace_text(shares: Mapping[str, float], suggestions: Sequence[Suggestion]) -> str:
    """The contents of a trace as part of a sentence; empty if it was not read."""
    parts = sorted(shares.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {percent(ratio, 0)}" for name, ratio in parts if ratio >= _MIN_TRACE_SHARE)
    worth = [each for each in suggestions if each.share_ratio >= _MIN_TRACE_SHARE]
    if text and worth:
        text += f"; {worth[0].action} (up to {percent(worth[0].share_ratio, 0)} of the step)"
    return text


def _trace(trace: TraceShares | None) -> str:
    if trace is None:
        return ""
    steps = f"steps {trace.first_step} to {trace.last_step}"
    return f"The trace of {steps} on rank {trace.rank} shows {trace_text(trace.shares, trace.suggestions)}."


def _gpu_hours(facts: RunFacts) -> str:
    seconds_in = facts.gpu_seconds
    total = sum(seconds_in.values())
    if total <= 0:
        return ""
    kinds = ((facts.killed, "kill"), (facts.failed, "failure"))
    after = " and ".join(f"{number} {word}{'s' * (number != 1)}" for number, word in kinds if number)
    parts = []
    for seconds, category in sorted(((seconds_in[c], c) for c in LOST), reverse=True):
        if seconds / total >= _MIN_RATIO:
            cause = f" after {after}" if after and category == REDONE else ""
            parts.append(f"{_hours(seconds)} {_LOST_IN[category]}{cause}")
    productive = seconds_in[PRODUCTIVE]
    kept = f"{_hours(productive)} were productive ({rounded_percent(productive / total)})"
    return f"Of {_hours(total)} GPU-hours, {kept}{': ' if parts else ''}{', '.join(parts)}."


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}" if hours >= 0.995 else plain_number(hours, 2)


def growth_text(memory: MemoryForecast, rank: int, *, over: bool) -> str:
    """The end of a sentence: which memory of a rank grows, and how fast. ``over``: its process has ended."""
    what, grows = _GROWING.get(memory.where or "", ("memory outside of this run's processes", "grows"))
    of_rank = f" of rank {rank}" if memory.where is not None else ""
    advice = f"; {memory.advice}" if memory.advice else ""
    return f"{what}{of_rank} {'grew' if over else grows} {byte_size(memory.growth_bytes_per_hour or 0)}/h{advice}"


def _memory_end(ends: Sequence[MemoryEnd]) -> str:
    """The memory that runs out first."""
    if not ends:
        return ""
    # A rank also reports that another rank fills the memory. Name the one that fills it.
    first = min(ends, key=lambda end: (end.forecast.where is None, end.forecast.exhausted_in_seconds or 0.0))
    left = rough_duration(first.forecast.exhausted_in_seconds or 0.0)
    grows = growth_text(first.forecast, first.rank, over=first.over)
    if first.over:
        return f"When its log ends, memory was to run out in about {left}: {grows}."
    what = {
        SHARED_MEMORY: f"{_SHM} of node {first.node} is full",
        CUDA: f"The GPU of rank {first.rank} runs out of memory",
    }.get(first.forecast.exhausted or "", f"Node {first.node} runs out of memory")
    return f"{what} in about {left}: {grows}."
