"""What a run lost most to: the decision behind the verdict of a report and behind the agent's last line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from telemetry.records import speedup_text

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_STEPS: Final = "no steps"
UNMEASURED: Final = "unmeasured"
STARVED: Final = "starved"
UNKNOWN: Final = "unknown"
STALLED: Final = "stalled"
HEALTHY: Final = "healthy"
STUCK: Final = "stuck"
HANGS: Final = "hangs"
HUNG: Final = "hung"

STARVED_RATIO: Final = 0.20
"""The default of ``stall_enter_ratio``, for logs that do not have it."""

_MAX_UNSEEN_RATIO: Final = 0.05
"""If a rank did not see the batches of more than this share of its steps, it is unknown whether it waits for data."""


def batches_unseen(unseen: int, steps: int) -> bool:
    """Whether the batches of so many of the steps were not seen that it is unknown whether a rank waits for data."""
    return steps > 0 and unseen / steps >= _MAX_UNSEEN_RATIO


@dataclass(frozen=True, slots=True)
class RankWaits:
    """How long one rank waited for data, over the whole run.

    Attributes:
        steps: steps that have ended. ``unseen_steps``: those that had no batch request that the hooks see.
        wait_seconds: all waits. ``first_wait_seconds``: the part before the first batch.
        exposed_seconds: None if it was not measured; ``unmeasured`` says why, if that is known.
        starved_ratio: its ``stall_enter_ratio``: from this share of the training loop on it is starved.
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
        """The same without the wait for the first batch. Each run has that wait, and it is no sign of starvation."""
        left = self.loop_seconds - self.first_wait_seconds
        return ((self.exposed_seconds or 0.0) - self.first_wait_seconds) / left if left > 0 else 0.0


def healthy_share(worst: RankWaits) -> tuple[float, str]:
    """What the rank that waited most lost of its loop if no rank is starved, and words that go after it.

    In a short run the wait for the first batch may be most of the loop. Then the share is that of the time after it.
    """
    ratio = worst.exposed_ratio or 0.0
    if ratio < worst.starved_ratio:
        return ratio, ""
    return max(0.0, worst.exposed_after_start_ratio), " after the first batch"


@dataclass(frozen=True, slots=True)
class RankStall:
    """The cause of a stall of a rank, and the seconds that it has cost."""

    rank: int
    cause: str
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class RunFinding:
    """What a run lost most to.

    Attributes:
        kind: `NO_STEPS`, `UNMEASURED`, `STARVED`, `UNKNOWN`, `STALLED` or `HEALTHY`.
        worst: the rank that waited most; None without steps, and if only batches were seen that nobody waited for.
        starving: how many ranks are starved. ``measured``: how many have exposed wait.
        unseen: the rank with the largest share of unseen batches, if it is too large; else None.
        stalled: the stall that cost most; None without one.
    """

    kind: str
    worst: RankWaits | None = None
    starving: int = 0
    measured: int = 0
    unseen: RankWaits | None = None
    stalled: RankStall | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is all right, and else what it loses most to.

    Attributes:
        kind: that of the finding, `STUCK`, `HANGS`, or `HUNG` if it has ended so.
        text: in words.
        finding: what it lost most to, hangs aside.
    """

    kind: str
    text: str
    finding: RunFinding


def find(ranks: Sequence[RankWaits], stalls: Sequence[RankStall]) -> RunFinding:
    """Decide for these ranks of one run, with all their stalls."""
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
        most = max(stalls, key=lambda stall: stall.lost_seconds, default=None)
        return RunFinding(UNKNOWN, measured=len(measured), unseen=unseen, stalled=most)
    worst = max(measured, key=lambda rank: rank.exposed_after_start_ratio)
    # A rank that waits for a slow rank loses as much as that one. The slow rank's own stall names the cause.
    slowest = max(stalls, key=lambda stall: weight(stall.cause, stall.lost_seconds), default=None)
    kind = HEALTHY if slowest is None else STALLED
    return RunFinding(kind, worst, measured=len(measured), stalled=slowest)


def lost_seconds(stall: dict[str, Any]) -> float:
    """The seconds that a stall has cost by its own cause.

    Args:
        stall: its fields, as in the log.
    """
    lost: float = stall["evidence"].get("lost_seconds", {}).get(stall["cause"], 0.0)
    return lost


def weight(cause: str | None, lost: float) -> tuple[bool, float]:
    """What stalls are compared by: causes of a rank's own come before its wait for another rank."""
    return cause != "straggler", lost


def costliest(stalls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The stall with a cause that weighs most, see `weight`; None without one."""
    return max(
        (stall for stall in stalls if stall["cause"]),
        key=lambda stall: weight(stall["cause"], lost_seconds(stall)),
        default=None,
    )


class Recommended(NamedTuple):
    """What an advice says to change: ``typed``, such as ``num_workers=2``, and the predicted ``gain``.

    The gain is a factor or a range of factors. Each is empty if the advice does not have it.
    """

    typed: str
    gain: str


def recommended(advice: dict[str, Any]) -> Recommended:
    """The change that an advice names, as the verdict and the last line write it."""
    setting, value = advice.get("setting"), advice.get("value")
    return Recommended(f"{setting}={value}" if setting and value else "", speedup_text(advice))


def other_cause(stall: dict[str, Any]) -> dict[str, Any] | None:
    """The next largest cause at the time of a stall, with its share; None without one."""
    return next((other for other in stall["evidence"].get("also", []) if "cause" in other), None)
