"""What is found in a run beside its stalls: the closed set of kinds, and the record of the log and the report."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from telemetry.model.records import Advice, FindingKind, HotLine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FINDINGS: Final[Mapping[FindingKind, str]] = MappingProxyType(
    {
        "cores_missing": "The training thread is ready to run, but others, its workers or its threads use the cores.",
        "threads_oversubscribed": "The training process or its workers run more threads than they have cores.",
        "gil_held": "Another thread of the training process holds the GIL, so that the training thread waits for it.",
        "host_work": "The step spends its time in Python between the operators: logging, `.item()`, loops.",
        "reader_thread": "The step waits for another thread of the training process, which reads a DataLoader.",
        "own_gc_collect": "The script itself calls `gc.collect()` in its training loop.",
        "iterator_per_step": "The script makes an iterator of the loader for each step, so its workers start anew.",
        "empty_workers": "Some workers have no data: the data set has fewer shards than workers.",
        "duplicate_samples": "Several workers give the same samples, because the data set does not split its stream.",
        "step_growth": "Steps become longer and longer.",
        "uneven_steps": "Steps differ because batches of samples in random order differ in length.",
        "between_loops": "After an epoch's last batch, and before the next epoch, the script does something else.",
        "evaluation_loader": "The evaluation waits for its own loader, or takes too small batches from it.",
        "no_sync": "With several batches for each optimizer step, DDP reduces the gradients of each of them.",
        "debug_switch": "A switch of torch for debugging is on, such as autograd's anomaly mode.",
        "slow_setting": "A setting of torch is on that may make steps longer. How much it costs is not known.",
    }
)
"""The kinds of findings, with their documentation. A finding is no stall: it may be there in a run that never waits."""

HINTS: Final = frozenset({"slow_setting"})
"""Findings that are told, but are no verdict: nobody knows whether they cost anything."""

_BEHIND: Final = frozenset({"cores_missing", "gil_held", "threads_oversubscribed"})
_EXPLAINED: Final = frozenset({"batch_transfer", "uneven_batches", "workers_throttled", "unknown"})
"""Behind these causes of waits may be those findings. Then the advice for the cause alone would miss it."""

_MOSTLY: Final = 0.5
"""If the training thread has no core for so much of the time, that is behind any cause: its fetches lack it, too."""

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of a rank. The newest finding of a kind replaces the earlier ones.

    Attributes:
        rank: the rank; `telemetry.agent.step_monitor.FindingLog` sets it.
        share_ratio: share of the rank's training loop (of the run, for an evaluation) that it costs; None if unknown.
        text: one sentence with its figures, without its full stop.
        lines: the lines of code in which it is, the largest share first.
        advice: what to change, the best first.
    """

    rank: int = 0
    kind: FindingKind
    share_ratio: _Share | None = None
    text: str
    lines: tuple[HotLine, ...] = ()
    advice: tuple[Advice, ...] = ()


def by_weight(finding: Finding) -> tuple[float, float]:
    """The order of findings, the most important first: by the speed-up that is sure, and then by the share."""
    gains = (advice.predicted_low or advice.predicted_speedup or 1.0 for advice in finding.advice)
    gain = max(gains, default=1.0)
    return -max(gain, 1 / (1 - min(0.99, finding.share_ratio or 0.0))), -(finding.share_ratio or 0.0)


def reason_of(cause: str | None, rank: int, findings: Iterable[Finding]) -> Finding | None:
    """The finding that is behind a cause on this rank; None without one."""
    for each in findings:
        without_core = each.kind == "cores_missing" and (each.share_ratio or 0.0) >= _MOSTLY
        if each.rank == rank and each.kind in _BEHIND and (cause in _EXPLAINED or without_core):
            return each
    return None
