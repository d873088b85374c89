"""The advice of a report in one list: for stalls, findings and restarts, and from the traces of snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.findings import reason_of
from telemetry.records import REPLAY
from telemetry.report.contract import RankedAdvice
from telemetry.report.process_log import findings_of, stalls_of
from telemetry.util.text import percent, plain_number, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from telemetry.records import Advice
    from telemetry.report.contract import Snapshot
    from telemetry.report.goodput import Goodput
    from telemetry.report.process_log import ProcessLog

_REPLAY_WORTH: Final = 0.01
"""From this share of the wall clock on, replay is worth an advice."""

_INTERVAL_WORTH: Final = 0.01
"""With a smaller gain in productive time, no interval is advised."""


def ranked_advice(
    processes: Sequence[ProcessLog], goodput: Goodput, snapshots: Iterable[Snapshot]
) -> list[RankedAdvice]:
    """Each advice once, and for each setting one, the largest predicted speed-up first, then by the cost of the stall.

    Args:
        processes: those that no later one has replaced: the verdict is about them.
        goodput: the attempts of the run.
        snapshots: the traces that were read. Each has its best advice in the list.
    """
    found: dict[str, RankedAdvice] = {}

    def add(about: str, advices: Iterable[Advice]) -> None:
        for each in advices:
            told = RankedAdvice(
                each.action, each.setting, each.value, each.predicted_speedup, each.because, each.predicted_low, about
            )
            found.setdefault(each.setting or each.action, told)

    stalls = [stall for process in processes for stall in stalls_of(process)]
    findings = findings_of(processes)
    for stall in sorted(stalls, key=lambda stall: -stall.lost_seconds):
        for cause, advice in ((stall.cause, stall.advice), *((other.cause, other.advice) for other in stall.also)):
            if reason_of(cause, stall.rank, findings) is None:
                add(f"for {cause} on rank {stall.rank}", advice)
    for finding in findings:
        add(f"for {finding.kind} on rank {finding.rank}", finding.advice)
    for text in _on_attempts(goodput):
        action, _, because = text.partition(": ")
        found.setdefault(action, RankedAdvice(action, because=because, about="for restarts"))
    for snapshot in snapshots:
        for each in snapshot.suggestions[:1]:
            share = f" (up to {percent(each.share_ratio, 0)} of the step)" if each.share_ratio else ""
            told = RankedAdvice(each.action, because=f"{each.because}{share}", about="from a trace")
            found.setdefault(each.action, told)
    return sorted(found.values(), key=lambda each: -(each.predicted_speedup or 0.0))


def _on_attempts(goodput: Goodput) -> list[str]:
    """Advice on checkpoints and replays, with the predicted gain."""
    found, told, replay = [], goodput.experience, goodput.seconds[REPLAY]
    advised = told.advised()
    if advised is not None and told.gain(advised) >= _INTERVAL_WORTH:
        found.append(
            f"write a checkpoint every {_rounded(advised.best_interval_seconds)} instead of every "
            f"{_rounded(advised.interval_seconds)}: predicted effective training time "
            f"{rounded_percent(advised.predicted_ettr_ratio)}; a checkpoint stops the training for "
            f"{_rounded(told.checkpoint_seconds)}, and the run fails once in {_rounded(advised.failure_seconds)}"
        )
    elif told.failures and not told.checkpoints:
        found.append("write checkpoints: the run has written none, so each restart begins from nothing")
    if goodput.wall_seconds > 0 and replay / goodput.wall_seconds >= _REPLAY_WORTH:
        found.append(
            "resume the data without drawing batches again: a stateful loader (torchdata's StatefulDataLoader), or a "
            f"sampler that skips; {_rounded(replay)} went into batches that were thrown away"
        )
    return found


def _rounded(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{plain_number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
