"""The verdict on a run: its largest loss, in the words of a report and of the agent's last line."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from telemetry.records import CHECKPOINT, COMPUTE, EVALUATION, STARTUP, Advice, stuck_in_words
from telemetry.util.text import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from telemetry.diagnosis.findings import Finding

NO_STEPS: Final = "no steps"
UNMEASURED: Final = "unmeasured"
STARVED: Final = "starved"
UNKNOWN: Final = "unknown"
STALLED: Final = "stalled"
SLOWED: Final = "slowed"
HEALTHY: Final = "healthy"
STUCK: Final = "stuck"
HANGS: Final = "hangs"
HUNG: Final = "hung"

STARVED_RATIO: Final = 0.20
"""The default of ``stall_enter_ratio``, for logs that do not have it."""

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
        wait_seconds: all waits. ``first_wait_seconds``: the part before the first batch.
        exposed_seconds: None if it was not measured; ``unmeasured``: the reason, if it is known.
        starved_ratio: share of the training loop from which on it is starved (its ``stall_enter_ratio``).
    """

    rank: int
    steps: int
    wait_seconds: float
    compute_seconds: float
    first_wait_seconds: float
    exposed_seconds: float | None
    unseen_steps: int = 0
    starved_ratio: float = STARVED_RATIO
    unmeasured: str = ""

    @property
    def loop_seconds(self) -> float:
        """Seconds of the training loop."""
        return self.wait_seconds + self.compute_seconds

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
    """The share of the loop that the rank with the longest wait lost if no rank is starved, and words that follow it.

    In a short run the wait for the first batch may be most of the loop. Then the share is that of the time after it.
    """
    ratio = worst.exposed_ratio or 0.0
    if ratio < worst.starved_ratio:
        return ratio, ""
    return max(0.0, worst.exposed_after_start_ratio), " after the first batch"


@dataclass(frozen=True, slots=True)
class RunFinding:
    """The largest loss of a run.

    Attributes:
        kind: `NO_STEPS`, `UNMEASURED`, `STARVED`, `UNKNOWN`, `STALLED`, `SLOWED` or `HEALTHY`.
        worst: the rank that waited most; None without steps, or if nobody waited for any batch that was seen.
        starving: number of starved ranks. ``measured``: number of ranks with exposed wait.
        unseen: the rank with the largest share of unseen batches, if it is too large; else None.
        stalled: the stall that cost most, as in the log, with its rank; None without one.
        slowed_by: the most important finding; None without one.
    """

    kind: str
    worst: RankWaits | None = None
    starving: int = 0
    measured: int = 0
    unseen: RankWaits | None = None
    stalled: dict[str, Any] | None = None
    slowed_by: Finding | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is all right, or else what it loses most to. ``finding``: the largest loss apart from hangs.

    ``kind``: kind of the finding, or `STUCK`, `HANGS`, or `HUNG` for a run that has ended so.
    """

    kind: str
    text: str
    finding: RunFinding


def find(ranks: Sequence[RankWaits], stalls: Sequence[dict[str, Any]], findings: Sequence[Finding] = ()) -> RunFinding:
    """Find the largest loss of one run from its ranks, all their stalls, and the findings in their order."""
    stepping = [rank for rank in ranks if rank.steps]
    if not stepping:
        return RunFinding(NO_STEPS)
    measured = [rank for rank in stepping if rank.exposed_ratio is not None]
    most_unseen = max(stepping, key=lambda rank: rank.unseen_steps / rank.steps)
    unseen = most_unseen if batches_unseen(most_unseen.unseen_steps, most_unseen.steps) else None
    if not measured and unseen is None:
        return RunFinding(UNMEASURED, max(stepping, key=lambda rank: rank.wait_ratio))
    starving = [rank for rank in measured if rank.exposed_after_start_ratio >= rank.starved_ratio]
    if starving:
        worst = max(starving, key=lambda rank: rank.exposed_after_start_ratio)
        return RunFinding(STARVED, worst, len(starving), len(measured), unseen)
    if unseen is not None or not any(rank.wait_seconds for rank in measured):
        most = max(stalls, key=lost_seconds, default=None)
        return RunFinding(UNKNOWN, measured=len(measured), unseen=unseen, stalled=most)
    worst = max(measured, key=lambda rank: rank.exposed_after_start_ratio)
    # A rank that waits for a slow rank loses as much as that one. The slow rank's own stall names the cause.
    slowest = max(stalls, key=lambda stall: weight(stall["cause"], lost_seconds(stall)), default=None)
    first = next(iter(findings), None)
    kind = STALLED if slowest is not None else SLOWED if first is not None else HEALTHY
    return RunFinding(kind, worst, measured=len(measured), stalled=slowest, slowed_by=first)


def lost_seconds(stall: dict[str, Any]) -> float:
    """The seconds that a stall, as in the log, has cost by its own cause."""
    lost: float = stall["evidence"].get("lost_seconds", {}).get(stall["cause"], 0.0)
    return lost


def weight(cause: str | None, lost: float) -> tuple[bool, float]:
    """Weight of a stall for comparisons: a rank's own causes come before its wait for another rank."""
    return cause != "straggler", lost


def costliest(stalls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The stall with a cause and the largest `weight`; None without one."""
    return max(
        (stall for stall in stalls if stall["cause"]),
        key=lambda stall: weight(stall["cause"], lost_seconds(stall)),
        default=None,
    )


def costliest_of(rank: int, stalls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The stall of a rank with the largest `weight`; None without one."""
    return costliest([stall for stall in stalls if stall["rank"] == rank])


# -- in words ----------------------------------------------------------------------------------------------------------

_WATCH: Final = "Put telemetry.watch() around what the training loop takes its batches from."

_NOTHING_SEEN: Final = (
    f" The training thread requested no batch of a DataLoader or a watched iterable; batches that come another way are "
    f"not seen, and waiting for them is counted as compute. {_WATCH}"
)

_MIN_MENTIONED_RATIO: Final = 0.20
"""From this share of the wall clock on, a category outside of the training loop is mentioned."""


def judge(
    ranks: Sequence[RankWaits],
    stalls: Sequence[dict[str, Any]],
    *,
    findings: Sequence[Finding] = (),
    world_size: int = 0,
    hang: str = "",
    stuck: Sequence[tuple[dict[str, Any], bool]] = (),
    ended: bool = False,
    ledger: Mapping[str, float] = MappingProxyType({}),
    children: int = 0,
) -> Verdict:
    """The verdict on a run.

    Args:
        ranks: the known ranks.
        stalls: stalls of these ranks, with the fields of the log and ``rank``.
        findings: what was found beside the stalls, the most important first.
        world_size: number of ranks, if not all may be known.
        hang: why the whole job hangs; empty if it does not.
        stuck: stalls of ranks that are stuck, or were until they ended. Each with whether its process has ended.
        ended: whether the run has ended.
        ledger: seconds by category, to mention other large categories.
        children: number of processes that the script has started with multiprocessing.
    """
    finding = find(ranks, stalls, findings)
    if hang:
        return Verdict(HUNG if ended else HANGS, f"{'Hung before its end' if ended else 'Hangs'}: {hang}.", finding)
    if stuck:
        return Verdict(STUCK, _stuck(stuck), finding)
    worst, other_time = finding.worst, _other_time(ledger)
    if finding.kind == NO_STEPS:
        text = _no_steps(children)
    elif finding.kind == UNKNOWN or worst is None:
        stall = finding.stalled
        stalled = "" if stall is None else f" Rank {stall['rank']} stalled.{_why(stall['rank'], stalls)}"
        unseen = _unseen(finding.unseen) or _NOTHING_SEEN
        text = f"Not known whether this run waits for data.{unseen}{stalled}{other_time}"
    elif finding.kind == UNMEASURED:
        text = (
            f"Rank {worst.rank} spent {rounded_percent(worst.wait_ratio)} of its training loop waiting for data; "
            f"how much of that the GPU felt was not measured{worst.unmeasured and f': {worst.unmeasured}'}."
        )
    elif finding.kind == STARVED:
        starved = _starved(worst, finding, all_known=len(ranks) >= world_size)
        text = starved + _why(worst.rank, stalls) + _unseen(finding.unseen)
    elif finding.stalled is not None:
        rank = finding.stalled["rank"]
        text = f"Not starved, but rank {rank} stalled.{_why(rank, stalls)}"
    elif finding.slowed_by is not None:
        text = f"Not starved, but slower than need be. {_told(finding.slowed_by)}{other_time}"
    else:
        ratio, after = healthy_share(worst)
        who = "no rank lost more than" if finding.measured >= world_size else f"rank {worst.rank} lost"
        lost = f"{rounded_percent(ratio)} of its training loop waiting for data{after}"
        text = f"Healthy: {who} {lost}.{other_time}"
    return Verdict(finding.kind, text, finding)


def _no_steps(children: int) -> str:
    others = "another process" if children == 1 else f"{children} processes"
    return "No training step has ended yet." + (
        f" The script has started {others} with multiprocessing; if the training runs there, it is not seen: call "
        "telemetry.start() in the function that is spawned."
        if children
        else ""
    )


def _unseen(rank: RankWaits | None) -> str:
    """A sentence about steps whose batches were not seen; empty if there are few."""
    if rank is None:
        return ""
    return (
        f" The batches of {min(rank.steps, rank.unseen_steps)} of {rank.steps} steps of rank {rank.rank} reached the "
        f"training thread in a way that is not seen, and waiting for them is counted as compute. {_WATCH}"
    )


def _stuck(stuck: Sequence[tuple[dict[str, Any], bool]]) -> str:
    # Ranks in compute mostly wait for a rank that is not, and ranks in a collective for one that has not reached it.
    stall, ended = min(
        stuck, key=lambda pair: (pair[0]["cause"] == "straggler", pair[0]["evidence"]["stuck_in"] == COMPUTE)
    )
    others = {other["rank"] for other, _ in stuck} - {stall["rank"]}
    doing = f"{'was' if ended else 'is'} {stuck_in_words(stall['evidence']['stuck_in'])}"
    more = f" So {'are' if len(others) > 1 else 'is'} {len(others)} more." if others else ""
    at, stands = stall["evidence"].get("stuck_at"), "stood" if ended else "stands"
    return (
        f"Stuck{' before its end' if ended else ''}: rank {stall['rank']} {doing} and {'had' if ended else 'has'} not "
        f"gone on since before {stall['opened']}. Cause: {stall['cause']}{f'; it {stands} at {at}' if at else ''}."
        f"{more if not ended else ''}"
    )


def _starved(worst: RankWaits, finding: RunFinding, *, all_known: bool) -> str:
    ratio, measured = worst.exposed_ratio or 0.0, finding.measured
    lost = f"{rounded_percent(ratio)} of its training loop waiting for data"
    bound = 1 / (1 - ratio) if ratio < 0.99 else None
    gain = f"; without that wait its steps would be up to {bound:.1f} times faster" if bound else ""
    if measured == 1 or not all_known:
        return f"Starved: rank {worst.rank} spent {lost}{gain}."
    if finding.starving == measured:
        return f"Starved: every rank waits for data; the worst, rank {worst.rank}, spent {lost}{gain}."
    others = "the other ranks wait for it inside their compute" if finding.starving == 1 else "the rest wait for them"
    return f"Starved: rank {worst.rank} spent {lost}{gain}; {others}."


def _why(rank: int, stalls: Sequence[dict[str, Any]]) -> str:
    stall = costliest_of(rank, stalls)
    if stall is None:
        return ""
    text = f" Cause: {stall['cause']}"
    for advice in msgspec.convert(stall["advice"][:1], list[Advice]):
        text += f"; try {advice.typed}" if advice.typed else f"; {advice.action}"
        text += f" ({advice.because})" if stall["cause"] == "straggler" else ""
        text += f", predicted {advice.gain} times the steps per second" if advice.gain else ""
    other = next((other for other in stall["evidence"].get("also", []) if "cause" in other), None)
    if other is not None:
        text += (
            f". At the same time {other['cause']} takes {rounded_percent(other.get('share_ratio', 0.0))} of the time"
        )
    line = stall["evidence"].get("line_verdict")
    return f"{text}. {line[:1].upper()}{line[1:]}." if line else f"{text}."


def _told(finding: Finding) -> str:
    """A finding with its first advice."""
    text = finding.text
    for advice in finding.advice[:1]:
        text += f"; try {advice.typed}" if advice.typed else f"; {advice.action}"
        text += f", predicted {advice.gain} times the steps per second" if advice.gain else ""
    return f"{text}."


def _other_time(ledger: Mapping[str, float]) -> str:
    """Other categories with a large share of the wall clock."""
    wall = sum(ledger.values())
    words = {STARTUP: "starting up", EVALUATION: "evaluating", CHECKPOINT: "writing checkpoints"}
    shares = {c: ledger.get(c, 0.0) / wall for c in words} if wall > 0 else {}
    large = [f"{rounded_percent(share)} {words[c]}" for c, share in shares.items() if share >= _MIN_MENTIONED_RATIO]
    return f" Of its wall clock the run spent {' and '.join(large)}." if large else ""
