"""The verdict on a run: its largest loss in one sentence, its cause, what to do, and what to expect of it.

Every report and the agent's last line have the same. Its advice is the first of the report's list.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import UNSET, structs

from telemetry.diagnosis.causes import CAUSES
from telemetry.diagnosis.endings import SHM
from telemetry.diagnosis.findings import HINTS, reason_of
from telemetry.model.records import (
    CHECKPOINT,
    COMPUTE,
    CUDA,
    DOWN,
    EVALUATION,
    LOST,
    OTHER,
    PRODUCTIVE,
    REDONE,
    REPLAY,
    RESTORE,
    SHARED_MEMORY,
    STARTUP,
    STUCK,
    TRAINING,
    WORKERS,
    RankedAdvice,
    stuck_in_words,
)
from telemetry.util.stacks import is_library
from telemetry.util.words import byte_size, listed, percent, plain_number, rough_duration, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from telemetry.diagnosis.endings import EndInWords, RunEnd
    from telemetry.diagnosis.findings import Finding
    from telemetry.log.lines import MemoryForecast
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

    @property
    def starved_at_first(self) -> bool:
        """Whether only the wait for the first batch makes its share as large as that of a starved rank."""
        return self.exposed_after_start_ratio < self.starved_ratio <= (self.exposed_ratio or 0.0)


def healthy_share(worst: RankWaits) -> tuple[float, str]:
    """The share of the loop that the rank with the longest wait lost, and words to add; for a run that is not starved.

    In a short run the wait for the first batch may be most of the loop. Then the share is of the time after that wait.
    """
    ratio = worst.exposed_ratio or 0.0
    if ratio < worst.starved_ratio:
        return ratio, ""
    return max(0.0, worst.exposed_after_start_ratio), " after the first batch"


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
        attempt_seconds: for a run of several attempts, its seconds by category: those of all ranks if ``on_gpus``, else
            their mean. ``killed``, ``failed``: how many attempts were killed, and how many failed.
        advice: what is advised besides that for stalls and findings.
        run_before: how an earlier run in the same folder ended; empty without one.
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
    attempt_seconds: Mapping[str, float] = field(default_factory=dict)
    on_gpus: bool = False
    killed: int = 0
    failed: int = 0
    memory_ends: Sequence[MemoryEnd] = ()
    advice: Sequence[RankedAdvice] = ()
    run_before: str = ""

    @property
    def several(self) -> bool:
        """Whether the job has several ranks."""
        return max(self.world_size, len(self.ranks)) > 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run is all right, and if not, what costs it most.

    Attributes:
        sentence: all in one sentence. ``why``: sentences that belong to it.
        cause: the name of a cause or of a kind of finding. ``line``: what takes the time there, and in which line.
        do: what to do, and ``expect``: what to expect of it. Each is empty if it is not known.
        notes: further sentences on the run.
        loss: its largest loss apart from hangs.
        advice: all advice, the best first.
    """

    kind: VerdictKind
    sentence: str
    why: tuple[str, ...] = ()
    cause: str = ""
    line: str = ""
    do: str = ""
    expect: str = ""
    notes: tuple[str, ...] = ()
    loss: Loss
    advice: tuple[RankedAdvice, ...] = ()

    @property
    def text(self) -> str:
        """All of it in one line."""
        labelled = (("Cause: ", self.cause), ("", _upper(self.line)), ("Do: ", self.do), ("Expect: ", self.expect))
        return " ".join(
            [self.sentence, *self.why, *(f"{label}{text}." for label, text in labelled if text), *self.notes]
        )

    @property
    def lines(self) -> list[str]:
        """A line for each part of it."""
        means = CAUSES[self.cause].means if self.cause in CAUSES else ""
        labelled = (
            ("cause", f"{self.cause}{means and f': {means}'}"),
            ("line", self.line),
            ("do", self.do),
            ("expect", self.expect),
        )
        parts = [f"  {label + ':':7} {text}" for label, text in labelled if text]
        return [self.sentence, *(f"  {text}" for text in self.why), *parts, *(f"  {text}" for text in self.notes)]

    def lines_within(self, most: int) -> list[str]:
        """The lines, without the less important ones if there are more."""
        found = self
        for shorter in (self, replace(self, notes=()), replace(self, notes=(), line="")):
            found = shorter
            if len(found.lines) <= most:
                break
        return found.lines

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


# -- the advice in one list --------------------------------------------------------------------------------------------

_EASIER: Final = 1.2
"""Predictions are off by up to 20 %. Of two that may be equal, the change of a setting comes first: it is easier. With
a gain of this size it comes before all that else is advised for the same stall: a line may not be removable."""


def _ranked(facts: RunFacts, ending: str) -> tuple[RankedAdvice, ...]:
    """Each action and each setting once: what ends a failure or a hang first, then the largest predicted speed-up."""
    found: dict[str, tuple[tuple[bool, float], RankedAdvice]] = {}

    def add(about: str, advices: Iterable[Advice], *, first: bool = False) -> None:
        most = math.inf
        for each in advices:
            worth = min(_worth(each), most)
            if each.setting and (each.predicted_speedup or 0.0) >= _EASIER:
                most = worth
            ranked = RankedAdvice(**(structs.asdict(each) | {"about": about}))
            found.setdefault(each.setting or each.action, ((first, worth), ranked))

    def against(cause: str | None, rank: int) -> str:
        return f"against {cause}{f' on rank {rank}' if facts.several else ''}"

    if ending:
        add("for how the run ended", [RankedAdvice(ending)], first=True)
    for stall, _ in facts.stuck:
        add(against(stall.cause, stall.rank), stall.advice, first=True)
    for stall in sorted(facts.stalls, key=lambda stall: -stall.cost_seconds):
        also = ((other.cause, other.advice) for other in stall.details.also)
        for cause, advices in ((stall.cause, stall.advice), *also):
            if _reason(cause, advices, stall.rank, facts) is None:
                add(against(cause, stall.rank), advices)
    for finding in facts.findings:
        add(against(finding.kind, finding.rank), finding.advice)
    for each in facts.advice:
        add(each.about, [each])
    return tuple(advice for _, advice in sorted(found.values(), key=lambda pair: pair[0], reverse=True))


def _reason(cause: str | None, advices: Sequence[Advice], rank: int, facts: RunFacts) -> Finding | None:
    """The finding behind a cause; None if cores are missing, but what is advised on the cause itself brings more."""
    reason = reason_of(cause, rank, facts.findings)
    if reason is not None and reason.kind == "cores_missing":
        cores, own = (max(map(_worth, each), default=0.0) for each in (reason.advice, advices))
        return reason if cores >= own else None
    return reason


def _worth(advice: Advice) -> float:
    """The gain by which it is ranked. That of a change of the code counts as far as it is sure."""
    if advice.setting or advice.value:
        return _EASIER * (advice.predicted_speedup or 0.0)
    return advice.predicted_low or advice.predicted_speedup or 0.0


# -- in words ----------------------------------------------------------------------------------------------------------

_WATCH: Final = "put telemetry.watch() around what the training loop takes its batches from"

_NOTHING_SEEN: Final = (
    "Its training thread asks no DataLoader and no watched iterable for batches, so such waits count as compute."
)

_MIN_MENTIONED_RATIO: Final = 0.20
"""From this share of the wall clock on, a category outside of the training loop is mentioned."""


class _Said(NamedTuple):
    """The parts of a verdict that are about one loss or hang.

    ``also``: sentences for the notes. ``bound``: the most that there is to gain, as a factor.
    """

    sentence: str
    why: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    cause: str = ""
    line: str = ""
    bound: float | None = None
    do: str = ""


def judge(facts: RunFacts) -> Verdict:
    """The verdict on a run."""
    loss = _largest_loss(facts)
    kind, over, stepped = loss.kind, facts.ended or facts.broke_off, any(rank.ran for rank in facts.ranks)
    end = None if facts.end is None else facts.end.in_words(several=facts.several, stepped=stepped)
    advice = _ranked(facts, "" if end is None else end.advice)
    if facts.hang:
        kind = VerdictKind.HUNG if over else VerdictKind.HANGS
        said = _Said(f"{'Hung before its end' if over else 'Hangs'}: {facts.hang}.")
    elif facts.stuck:
        kind, said = VerdictKind.STUCK, _stuck([(stall, ended or over) for stall, ended in facts.stuck])
    else:
        broken = facts.broke_off and kind in {VerdictKind.HEALTHY, VerdictKind.NO_STEPS}
        kind = VerdictKind.FAILED if broken else kind
        said = _loss_said(loss, facts)
    if end is not None:
        said = _with_end(said, end, hangs=bool(facts.hang or facts.stuck), stepped=stepped)
    hints = {each.action for finding in facts.findings if finding.kind in HINTS for each in finding.advice}
    first = next((each for each in advice if each.action not in hints), None)
    if facts.hang and not (facts.stuck or (end is not None and end.advice)):
        first = None  # the advice is not for the hang
    notes = [*said.also, f"{_upper(said.do)}." if said.do and first is not None else ""]
    if facts.ledger_in_full and stepped and kind in {VerdictKind.HEALTHY, VerdictKind.FAILED}:
        notes.append(whole_ledger(facts.ranks[0].steps, facts.ledger))
    notes += [_claimed(rank, claims) for rank, claims in facts.claims.items()]
    notes += [_trace(facts.trace), _attempts(facts), _memory_end(facts.memory_ends)]
    notes += [f"This is a new run in the same folder; the run before {facts.run_before}." if facts.run_before else ""]
    return Verdict(
        kind=kind,
        sentence=said.sentence,
        why=said.why,
        cause=said.cause,
        line=said.line,
        do=said.do if first is None else _to_do(first, said.cause),
        expect=_expected(first, said),
        notes=tuple(filter(None, notes)),
        loss=loss,
        advice=advice,
    )


def _with_end(said: _Said, end: EndInWords, *, hangs: bool, stepped: bool) -> _Said:
    """How the run ended comes first, unless it hung. What is advised for the end goes before the loss until then."""
    if hangs:
        return said._replace(why=(*said.why, end.sentence, *end.why))
    if not stepped:
        return _Said(end.sentence, (*end.why, *said.why))
    until = said.sentence if said.sentence.startswith("Until then") else f"Until then: {said.sentence}"
    if end.advice:
        return _Said(end.sentence, (*end.why, until), said.also)
    return said._replace(sentence=end.sentence, why=(*end.why, until, *said.why))


def _to_do(advice: RankedAdvice, cause: str) -> str:
    """What to do, as the end of a sentence."""
    text = f"set {advice.typed}: {advice.action}" if advice.typed else advice.action
    if advice.about.startswith("against straggler"):
        return f"{text} ({advice.because})"
    for_this = not cause or advice.about.startswith(f"against {cause}")
    return text if for_this else f"{text} ({advice.about})"


def _expected(advice: RankedAdvice | None, said: _Said) -> str:
    """What to expect of the advice, or the most that there is to gain."""
    gain, most = "" if advice is None else advice.gain, "" if said.bound is None else f"{said.bound:.1f} times"
    if gain:
        return f"{gain} times the steps per second"
    return f"at most {most} the steps per second, if no step had to wait" if most else ""


def _loss_said(loss: Loss, facts: RunFacts) -> _Said:  # noqa: PLR0911, one return for each kind
    """What is said of the largest loss of a run that does not hang."""
    worst, stalled, slowed = loss.worst, loss.stalled, loss.slowed_by
    other = () if facts.ledger_in_full else tuple(filter(None, [_other_time(facts.ledger)]))
    if loss.kind == VerdictKind.NO_STEPS:
        return _no_steps(facts)
    if slowed is not None and worst is None and loss.kind == VerdictKind.SLOWED:
        found = _found("Slower than need be", slowed)
        if slowed.kind == "reader_thread":
            return found._replace(why=(*found.why, *other))
        about, code = _to_paste(facts)
        unknown = ("Whether it also waits for data is not known.", *_steps(facts), *filter(None, [about]), *other)
        return found._replace(why=(*found.why, *unknown), do=code)
    if loss.kind == VerdictKind.UNKNOWN or worst is None:
        cause = _Said("") if stalled is None else _why(stalled.rank, facts)
        stall = () if stalled is None else (f"Rank {stalled.rank} stalled.",)
        about, code = _to_paste(facts)
        why = (_unseen(loss.unseen), *stall, *other, *_steps(facts), *filter(None, [about]))
        return cause._replace(sentence="Not known whether this run waits for data.", why=why, do=code)
    if loss.kind == VerdictKind.UNMEASURED:
        return _Said(
            f"Rank {worst.rank} spent {rounded_percent(worst.wait_ratio)} of its training loop waiting for data; "
            f"how much of that the GPU felt was not measured{worst.unmeasured and f': {worst.unmeasured}'}."
        )
    if loss.kind == VerdictKind.STARVED:
        starved = _starved(worst, loss, all_known=len(facts.ranks) >= facts.world_size)
        why, ratio = _why(worst.rank, facts), worst.exposed_ratio or 0.0
        unseen = (_unseen(loss.unseen),) if loss.unseen else ()
        bound = 1 / (1 - ratio) if ratio < 0.99 else None
        return why._replace(sentence=starved, why=(*why.why, *unseen), bound=bound)
    if stalled is not None:
        why = _why(stalled.rank, facts)
        return why._replace(sentence=f"Not starved, but rank {stalled.rank} stalled.")
    if slowed is not None:
        found = _found("Not starved, but slower than need be", slowed)
        return found._replace(why=(*found.why, *other))
    ratio, after = healthy_share(worst)
    who = "no rank lost more than" if loss.measured >= facts.world_size else f"rank {worst.rank} lost"
    lost = f"{who} {rounded_percent(ratio)} of its training loop waiting for data{after}."
    return _Said(f"Until then {lost}" if facts.broke_off else f"Healthy: {lost}", (*other, *_steps(facts)))


_MIN_LINE: Final = 0.1
_MAX_LINES: Final = 2


def _steps(facts: RunFacts) -> tuple[str, ...]:
    """The lines of code in which the steps of the first rank with known lines spend most of their time."""
    rank, lines = min(facts.step_lines.items(), default=(0, ()))
    parts = [f"{rounded_percent(line.share_ratio)} in {line.named}" for line in lines if line.share_ratio >= _MIN_LINE]
    whose = f" of rank {rank}" if len(facts.ranks) > 1 else ""
    what = "steps" if all(line.part is UNSET for line in lines) else "loop"
    spend = f"Its {what}{whose} spend{'s' * (what == 'loop')}"
    return (f"{spend} {' and '.join(parts[:_MAX_LINES])}.",) if parts else ()


_LEAST_PASTED: Final = 0.02
"""A line with a smaller share of the loop is not worth a phase of its own."""


def _to_paste(facts: RunFacts) -> tuple[str, str]:
    """What samples estimate of a loop without loaders, and code for the script that measures its waits."""
    if any(rank.wait_seconds for rank in facts.ranks):
        return "", _WATCH
    about = max((rank.estimated_steps or 0 for rank in facts.ranks), default=0)
    lines = min(facts.step_lines.items(), default=(0, ()))[1]
    own = [line for line in lines if line.part == OTHER and not is_library(line.file)]
    why, code = "", []
    if not any(rank.steps for rank in facts.ranks):
        why = f"It made about {about} steps, by stack samples." if about else ""
        at = f" in {lines[0].function} ({lines[0].file_name})" if lines and not is_library(lines[0].file) else ""
        code.append(f"to count them, put with telemetry.step(): around the body of the loop{at}")
    if own and own[0].share_ratio >= _LEAST_PASTED:
        name = own[0].calls or "data"
        code.append(f'to time it, put with telemetry.phase("{name}"): around {own[0].place}')
    of_library = bool(lines) and all(is_library(line.file) for line in lines)
    return why, "; ".join(code) or ("" if of_library else _WATCH)


def _no_steps(facts: RunFacts) -> _Said:
    others = "another process" if facts.children == 1 else f"{facts.children} processes"
    none = "No training step had ended." if facts.broke_off else "No training step has ended yet."
    if facts.last_seconds:
        most_in = f"; most ranks are in {facts.most_in.replace('_', ' ')}" if facts.most_in else ""
        none = f"No training step has ended in the last {rough_duration(facts.last_seconds)}{most_in}."
    if not facts.children:
        return _Said(none)
    spawned = (
        f"The script has started {others} with multiprocessing; if the training runs there, it is not seen: call "
        "telemetry.start() in the function that is spawned."
    )
    return _Said(none, (spawned,))


def _unseen(rank: RankWaits | None) -> str:
    if rank is None or (rank.unseen_steps >= rank.steps and not rank.wait_seconds):
        return _NOTHING_SEEN
    return (
        f"On rank {rank.rank}, {min(rank.steps, rank.unseen_steps)} of {rank.steps} steps took their batch from code "
        "that the agent does not see, so that a wait for it counts as compute."
    )


def _stuck(stuck: Sequence[tuple[StallRecord, bool]]) -> _Said:
    # Ranks in compute mostly wait for a rank that is not, and ranks in a collective for one that has not reached it.
    stall, ended = min(stuck, key=lambda pair: (pair[0].cause == "straggler", pair[0].details.stuck_in == COMPUTE))
    details = stall.details
    others = {other.rank for other, _ in stuck} - {stall.rank}
    doing = f"{'was' if ended else 'is'} {stuck_in_words(details.stuck_in or '')}"
    more = (f"So {'are' if len(others) > 1 else 'is'} {len(others)} more.",) if others and not ended else ()
    at, stands = details.stuck_at, "stood" if ended else "stands"
    places = [f"it {stands} at {at}"] if at else []
    places += [f"its worker {stands} in {details.worker_at}"] if details.worker_at else []
    return _Said(
        f"Stuck{' before its end' if ended else ''}: rank {stall.rank} {doing} and {'had' if ended else 'has'} not "
        f"gone on since before {stall.opened}.",
        also=more,
        cause=str(stall.cause),
        line="; ".join(places),
    )


def _starved(worst: RankWaits, loss: Loss, *, all_known: bool) -> str:
    measured = loss.measured
    lost = f"{rounded_percent(worst.exposed_ratio or 0.0)} of its training loop waiting for data"
    if measured == 1 or not all_known:
        return f"Starved: rank {worst.rank} spent {lost}."
    if loss.starving == measured:
        return f"Starved: every rank waits for data; the worst, rank {worst.rank}, spent {lost}."
    others = "the other ranks wait for it inside their compute" if loss.starving == 1 else "the rest wait for them"
    return f"Starved: rank {worst.rank} spent {lost}; {others}."


def _why(rank: int, facts: RunFacts) -> _Said:
    """The cause and the line of a rank's costliest stall; empty without one."""
    stall = costliest([stall for stall in facts.stalls if stall.rank == rank])
    if stall is None:
        return _Said("")
    cause, reason = str(stall.cause), _reason(stall.cause, stall.advice, rank, facts)
    if reason is not None:
        return _Said("", cause=cause, line=_lower(reason.text))
    also = tuple(
        f"At the same time {other.cause} takes {rounded_percent(other.share_ratio)} of the time."
        for other in stall.details.also[:1]
    )
    line = stall.details.line_verdict.partition(";")[0]  # what it would be without the line is in the list of advice
    return _Said("", also=also, cause=cause, line=_lower(line))


_MOST_WORDS: Final = 30
"""A sentence that is longer is not understood at once."""


def _found(begins: str, finding: Finding) -> _Said:
    """A finding as one sentence, with the parts of its text that fit. The others follow."""
    first, *parts = re.split(r"(?<=[;:.]) ", finding.text)
    while parts and len(f"{begins} {first} {parts[0]}".split()) <= _MOST_WORDS:
        first = f"{first} {parts.pop(0)}"
    rest = (f"{_upper(' '.join(parts))}.",) if parts else ()
    return _Said(f"{begins}: {_lower(first.rstrip(';:.'))}.", rest, cause=finding.kind)


def _lower(text: str) -> str:
    """Text as the end of a sentence. A name in capitals stays as it is."""
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _other_time(ledger: Mapping[str, float]) -> str:
    wall = sum(ledger.values())
    words = {STARTUP: "starting up", EVALUATION: "evaluating", CHECKPOINT: "writing checkpoints"}
    shares = {c: ledger.get(c, 0.0) / wall for c in words} if wall > 0 else {}
    large = [f"{rounded_percent(share)} {words[c]}" for c, share in shares.items() if share >= _MIN_MENTIONED_RATIO]
    return f"Of its wall clock the run spent {' and '.join(large)}." if large else ""


_MIN_RATIO: Final = 0.005
"""The whole ledger and the sum of the attempts leave out categories with a smaller share."""


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
    SHARED_MEMORY: (SHM, "grows"),
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


def _attempts(facts: RunFacts) -> str:
    """Where the time of a run of several attempts went: GPU-hours if it has GPUs, else its own time."""
    seconds_in = facts.attempt_seconds
    total = sum(seconds_in.values())
    if total <= 0:
        return ""
    of, unit = (_hours, " GPU-hours") if facts.on_gpus else (_short, "")
    kinds = ((facts.killed, "kill"), (facts.failed, "failure"))
    after = " and ".join(f"{number} {word}{'s' * (number != 1)}" for number, word in kinds if number)
    parts = []
    for seconds, category in sorted(((seconds_in[c], c) for c in LOST), reverse=True):
        if seconds / total >= _MIN_RATIO:
            cause = f" after {after}" if after and category == REDONE else ""
            parts.append(f"{of(seconds)} {_LOST_IN[category]}{cause}")
    productive = seconds_in[PRODUCTIVE]
    kept = f"{of(productive)} were productive ({rounded_percent(productive / total)})"
    return f"Of {of(total)}{unit}, {kept}{': ' if parts else ''}{', '.join(parts)}."


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f}" if hours >= 9.95 else f"{hours:.1f}" if hours >= 0.995 else plain_number(hours, 2)


def _short(seconds: float) -> str:
    """Seconds in the unit that fits."""
    if seconds >= 7200:
        return f"{plain_number(seconds / 3600, 2)} h"
    return f"{seconds:.1f} s" if seconds < 9.95 else rough_duration(seconds)


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
        SHARED_MEMORY: f"{SHM} of node {first.node} is full",
        CUDA: f"The GPU of rank {first.rank} runs out of memory",
    }.get(first.forecast.exhausted or "", f"Node {first.node} runs out of memory")
    return f"{what} in about {left}: {grows}."
