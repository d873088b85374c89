"""What the page says first: the state of the run, what to do about it, and its main figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.core import run_verdict
from telemetry.core.recommendation import speedup_text
from telemetry.core.run_verdict import lost_seconds
from telemetry.records import COMPUTE, DATA_WAIT
from telemetry.report.attempts import FAILED, KILLED, RUNNING
from telemetry.report.goodput_text import advice as goodput_advice
from telemetry.report.stall_losses import lost_by_cause
from telemetry.report.summary import finding_of, stalls_of
from telemetry.util.text import duration, percent, plain_number, rough_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.run_verdict import RunFinding
    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog

GOOD: Final = "good"
BAD: Final = "bad"
UNKNOWN: Final = "unknown"

_STATES: Final = {
    run_verdict.HEALTHY: ("Healthy", GOOD),
    run_verdict.STARVED: ("Starved", BAD),
    run_verdict.STUCK: ("Stuck", BAD),
    run_verdict.HANGS: ("Hangs", BAD),
    run_verdict.HUNG: ("Hung", BAD),
    run_verdict.STALLED: ("Stalled", BAD),
    run_verdict.UNKNOWN: ("Not known", UNKNOWN),
    run_verdict.NO_STEPS: ("No step yet", UNKNOWN),
    run_verdict.UNMEASURED: ("Measured", UNKNOWN),
}
"""For each kind of verdict: the state in two words, and whether it is a good one."""

_MAX_ADVICE: Final = 3

_COSTLY_RESTARTS: Final = 0.05
"""From this share of the wall clock on, restarts belong to the state of a run."""


@dataclass(frozen=True, slots=True)
class AdviceCard:
    """One change.

    Attributes:
        typed: what to set, if it is a setting.
        speedup: factor on the steps per second; None without a prediction. ``gain``: the same as text, which may be a
            range.
    """

    typed: str
    action: str
    because: str
    about: str
    speedup: float | None = None
    gain: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the run, as text. ``note``: what it is of, or why it is absent."""

    label: str
    value: str
    note: str = ""


def state_of(summary: dict[str, Any], verdict: str) -> tuple[str, str]:
    """The state of the run in a few words, and `GOOD`, `BAD` or `UNKNOWN`. ``verdict``: its kind, see `JudgedRun`."""
    words, kind = _STATES[verdict]
    attempts, ettr = summary["job"]["attempts"], summary["job"]["goodput"]["ettr_ratio"]
    end = attempts[-1]["end"] if attempts else RUNNING
    if end in {FAILED, KILLED}:
        return f"{words}, then {end}", BAD
    if len(attempts) > 1 and ettr is not None and 1 - ettr >= _COSTLY_RESTARTS:
        return f"{words}, and restarts cost {percent(1 - ettr, 0)}", BAD
    return words, kind


def advice_cards(summary: dict[str, Any], now: Sequence[ProcessLog], goodput: Goodput) -> list[AdviceCard]:
    """All advice, the largest predicted speed-up first, then by the cost of the stall; each change once.

    Args:
        summary: the report.
        now: the processes that no later one has replaced. The verdict is about these, so advice is for their stalls.
        goodput: the books of the run.
    """
    cards: dict[tuple[str, str], AdviceCard] = {}
    stalls = [stall for process in now for stall in stalls_of(process)]
    for stall in sorted(stalls, key=lambda stall: -lost_seconds(stall)):
        about = f"for {stall['cause']} on rank {stall['rank']}"
        for advice in stall["advice"]:
            _add(cards, advice, about)
        for other in stall["evidence"].get("also", []):
            for advice in other.get("advice", []):
                _add(cards, advice, f"for {other.get('cause')} on rank {stall['rank']}")
    for text in goodput_advice(goodput):
        change, _, because = text.partition(": ")
        cards.setdefault(("", text), AdviceCard("", change, because, "for restarts"))
    for snapshot in summary["snapshots"]:
        for advice in snapshot.get("advice", ())[:1]:
            share = f" (up to {percent(advice['share_ratio'], 0)} of the step)" if advice["share_ratio"] else ""
            card = AdviceCard("", advice["action"], f"{advice['because']}{share}", "from a trace")
            cards.setdefault(("", card.action), card)
    return sorted(cards.values(), key=lambda card: -(card.speedup or 0.0))


def _add(cards: dict[tuple[str, str], AdviceCard], advice: dict[str, Any], about: str) -> None:
    setting, value = advice.get("setting"), advice.get("value")
    typed = f"{setting}={value}" if setting and value is not None else str(setting or "")
    action, because = str(advice.get("action") or ""), str(advice.get("because") or "")
    card = AdviceCard(typed, action, because, about, advice.get("predicted_speedup"), speedup_text(advice))
    cards.setdefault((str(setting or ""), action), card)


def tiles(summary: dict[str, Any], processes: Sequence[ProcessLog], now: Sequence[ProcessLog]) -> list[Tile]:
    """The main figures. What was not measured says so.

    Args:
        summary: the report.
        processes: of the run.
        now: those that no later one has replaced. The verdict is about these.
    """
    ranks, job = summary["ranks"], summary["job"]
    books = job["goodput"]
    loop = sum(rank["ledger"][DATA_WAIT] + rank["ledger"][COMPUTE] for rank in ranks)
    steps = sum(rank["steps"] for rank in ranks)
    wall = sum(rank["wall_seconds"] for rank in ranks)
    lost = sum(lost_by_cause(processes).values())
    agent = sum(sum(rank["overhead_seconds"].values()) for rank in ranks)
    goodput = books["goodput_ratio"]
    return [
        Tile("Wall clock", rough_duration(books["wall_seconds"]), _attempts(len(job["attempts"]))),
        Tile("Goodput", percent(goodput), "of the wall clock trained something that was kept"),
        Tile("Steps per second", plain_number(steps / loop) if loop > 0 else "-", "of the training loop, mean rank"),
        _exposed_wait(finding_of(now)),
        Tile("Lost in stalls", f"{plain_number(lost / 3600)} h", "GPU-hours, over all ranks"),
        Tile(
            "Cost of the agent",
            percent(agent / wall, 3) if wall > 0 else "-",
            f"{duration(agent / steps)} a step" if steps else "",
        ),
    ]


def _exposed_wait(finding: RunFinding) -> Tile:
    """The share that the verdict tells, of the same rank."""
    worst = finding.worst
    if worst is None:
        return Tile("Exposed wait", "not known" if finding.kind == run_verdict.UNKNOWN else "-")
    if worst.exposed_ratio is None:
        return Tile("Exposed wait", "not measured")
    starved = finding.kind == run_verdict.STARVED
    ratio, after = (worst.exposed_ratio, "") if starved else run_verdict.healthy_share(worst)
    return Tile("Exposed wait", percent(ratio), f"of the training loop{after}, worst rank ({worst.rank})")


def _attempts(number: int) -> str:
    return "1 attempt" if number == 1 else f"{number} attempts"


def first_cards(cards: Sequence[AdviceCard]) -> tuple[list[AdviceCard], list[AdviceCard]]:
    """Those that are shown at once, and the rest."""
    return list(cards[:_MAX_ADVICE]), list(cards[_MAX_ADVICE:])
