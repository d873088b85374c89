"""Two causes at once: those that cost nearly as much as the one that a stall is named after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.core.formatting import rounded_percent
from telemetry.diagnose.causes import costs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.core.recommendation import Advice
    from telemetry.diagnose.evidence import Evidence

_SIMILAR: Final = 0.5
"""A cause is also named if it costs at least this share of what the first one costs ..."""

_MIN_SHARE: Final = 0.1
"""... and this share of the time."""

_MAX_NAMED: Final = 2


@dataclass(frozen=True, slots=True)
class CauseShare:
    """A cause, the seconds that it cost in the window, and their share of its training loop and checkpoints."""

    cause: str
    seconds: float
    share: float


def shares_of(cause: str, evidence: Evidence) -> tuple[CauseShare, ...]:
    """The cause of a stall, and those of similar size after it, the largest first.

    Args:
        cause: the cause that the stall is named after. It stays the first, even if another costs more in this window.
        evidence: the window.
    """
    whole = evidence.loop_and_checkpoint_seconds
    lost = costs(evidence)
    if whole <= 0 or cause not in lost:
        return ()
    shares = [CauseShare(name, seconds, min(1.0, seconds / whole)) for name, seconds in lost.items()]
    (first,) = [share for share in shares if share.cause == cause]
    similar = [
        share
        for share in shares
        if share.cause not in {cause, "unknown"}
        and share.seconds >= _SIMILAR * first.seconds
        and share.share >= _MIN_SHARE
    ]
    return (first, *sorted(similar, key=lambda share: -share.seconds)[:_MAX_NAMED])


def with_what_remains(advice: Sequence[Advice], others: Sequence[CauseShare], evidence: Evidence) -> tuple[Advice, ...]:
    """Advice for the first cause that also says what the others take after it was followed."""
    if not others:
        return tuple(advice)
    return tuple(replace(one, because=f"{one.because}; {_remains(one, others, evidence)}") for one in advice)


def _remains(advice: Advice, others: Sequence[CauseShare], evidence: Evidence) -> str:
    if advice.predicted_speedup is None:
        return f"{_named((share.cause, share.share) for share in others)} of the time remain"
    whole = evidence.loop_and_checkpoint_seconds / advice.predicted_speedup
    left = _named((share.cause, min(1.0, share.seconds / whole)) for share in others)
    return f"afterwards {left} of the time remain"


def _named(shares: Iterable[tuple[str, float]]) -> str:
    return " and ".join(f"{cause} with {rounded_percent(share)}" for cause, share in shares)
