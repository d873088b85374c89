"""A stall as log fields. The user's callback and a snapshot's manifest get the same fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from telemetry.diagnosis.advice import advise
from telemetry.diagnosis.causes import shares_of, with_what_remains
from telemetry.diagnosis.evidence import evidence_field
from telemetry.diagnosis.stragglers import absent_rank, straggler
from telemetry.records import CAUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.agent.hangs import Hang
    from telemetry.agent.stalls import LineFindings
    from telemetry.diagnosis.causes import CauseShare
    from telemetry.diagnosis.stalls import Stall
    from telemetry.diagnosis.stragglers import Straggler
    from telemetry.records import Advice


@dataclass(slots=True)
class StallCounts:
    """Stalls so far, by cause: how many have opened, and the seconds lost."""

    opened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    lost_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def lost(self) -> dict[str, float]:
        """The seconds lost; causes that cost nothing are left out."""
        return {cause: seconds for cause, seconds in self.lost_seconds.items() if seconds}


def stall_fields(stall: Stall, hang: Hang | None, node: str, lines: LineFindings | None = None) -> dict[str, Any]:
    """The fields of a stall: cause, evidence and advice.

    Args:
        stall: the stall, as far as it is known now.
        hang: the hang, if the stall is one; else None.
        node: name of this node.
        lines: the lines that it spends its time in, if they are known.
    """
    lost = {cause: round(seconds, 3) for cause, seconds in stall.lost_seconds.items()}
    ratio, hang = stall.exposed_ratio, hang if stall.is_hang else None
    evidence = evidence_field(stall.evidence) | {"lost_seconds": lost}
    slow = slow_rank(stall, hang)
    if slow is not None:
        evidence |= {"straggler_rank": slow.rank, "straggler_node": slow.node or node, "straggler_reason": slow.why}
    advice = advise(stall.cause, stall.evidence)
    shares = shares_of(stall.cause, stall.evidence) if hang is None else ()
    if len(shares) > 1:
        first, *others = shares
        advice = with_what_remains(advice, others, stall.evidence)
        evidence |= {"share_ratio": round(first.share, 4), "also": [_also(other, stall) for other in others]}
    if hang is not None:
        evidence |= hang.evidence()
        advice = advice if stall.cause == "worker_stuck" else hang.advice()
    if lines is not None:
        evidence |= lines.evidence()
        advice = (*advice, *lines.advice)
    return {
        "cause": stall.cause,
        "first_step": stall.opened_step,
        "exposed_wait_ratio": None if ratio is None else round(ratio, 4),
        "evidence": evidence,
        "advice": _advice_fields(advice),
    }


def _also(other: CauseShare, stall: Stall) -> dict[str, Any]:
    """A cause of similar size, as `report --json` has it in the evidence."""
    return {
        "cause": other.cause,
        "share_ratio": round(other.share, 4),
        "advice": _advice_fields(advise(other.cause, stall.evidence)),
    }


def _advice_fields(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    return [
        {
            "action": a.action,
            "setting": a.setting,
            "value": a.value,
            "predicted_speedup": a.predicted_speedup,
            "predicted_low": a.predicted_low,
            "because": a.because,
        }
        for a in advice
    ]


def slow_rank(stall: Stall, hang: Hang | None) -> Straggler | None:
    """The rank that this one waits for, if the stall is caused by a straggler; else None."""
    if stall.cause != "straggler":
        return None
    if stall.is_hang:
        return absent_rank(hang.missing) if hang is not None and hang.missing is not None else None
    evidence = stall.evidence
    return straggler(evidence.pace, evidence.peers, evidence.earlier_paces)
