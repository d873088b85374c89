"""Switches of torch that make steps longer as long as they are on: those for debugging, and some that may be wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from telemetry.diagnosis.findings import Finding
from telemetry.diagnosis.model import gain_without
from telemetry.model.records import ANOMALY, CUDA_BLOCKING, DETERMINISTIC, PROFILER, SYNC_DEBUG, Advice
from telemetry.util.words import listed, rounded_percent

if TYPE_CHECKING:
    from collections.abc import Collection

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.model.records import FindingKind
    from telemetry.sources.sampler import Sampler


class _Switch(NamedTuple):
    """What a switch does in each step; it completes "it ...". And how to turn it off."""

    effect: str
    off: str


_DEBUG: Final = {
    ANOMALY: _Switch(
        "keeps the Python stack of each operator and looks for NaN in each gradient",
        "torch.autograd.set_detect_anomaly(False), or detect_anomaly=False of a trainer",
    ),
    PROFILER: _Switch(
        "records the operators of all steps",
        "end its block after some steps, or give it a schedule, torch.profiler.schedule(wait=..., active=...)",
    ),
    CUDA_BLOCKING: _Switch("makes the host wait for each kernel", "unset the variable CUDA_LAUNCH_BLOCKING"),
}
_HINTS: Final = {
    SYNC_DEBUG: _Switch("warns of each wait for the GPU", 'torch.cuda.set_sync_debug_mode("default")'),
    DETERMINISTIC: _Switch(
        "takes other algorithms, of which some are slower",
        "torch.use_deterministic_algorithms(False), if results need not be the same to the last bit",
    ),
}

_MIN_SAMPLES: Final = 20
"""Minimum samples to tell a share. The prediction is a range, also by their number."""

_OF_OPERATORS: Final = 0.5
"""In the anomaly mode, at most this part of what is seen in operators belongs to it as well. With small layers on a CPU
the checks for NaN took 0.4 of the backward pass. And a thread without a free core is seen less often in Python."""


def switch_findings(on: Collection[str], sampled: Sampler, evidence: Evidence) -> list[Finding]:
    """What the switches that are on cost, as far as it is known. ``on``: names of `switches_on`."""
    found = []
    debug = {name: switch for name, switch in _DEBUG.items() if name in on}
    if debug:
        finding = _finding("debug_switch", debug, "makes")
        found.append(_with_share(finding, sampled, evidence) if ANOMALY in on else finding)
    hints = {name: switch for name, switch in _HINTS.items() if name in on}
    return [*found, _finding("slow_setting", hints, "may make")] if hints else found


def _finding(kind: FindingKind, on: dict[str, _Switch], makes: str) -> Finding:
    text = f"{listed([*on])} {'is' if len(on) == 1 else 'are'} on, which {makes} steps longer"
    advice = [Advice(f"turn off {name}: {each.off}", because=f"it {each.effect}") for name, each in on.items()]
    return Finding(kind=kind, text=text, advice=tuple(advice))


def _with_share(finding: Finding, sampled: Sampler, evidence: Evidence) -> Finding:
    """Anomaly mode with what it costs: samples show the stacks, and the rest is a part of the operators."""
    steps, seen = sampled.steps, sampled.seen
    if steps.samples < _MIN_SAMPLES or not evidence.steps:
        return finding
    stacks = operators = 0
    for stack, time in steps.times.items():
        if any(spot.function == "format_stack" for spot in stack):
            stacks += time.wall_ns
        elif not any(spot.module.startswith("torch.optim") for spot in stack):
            operators += time.wall_ns
    in_steps, share = seen.step / (seen.step + seen.wait + seen.boundary), stacks / max(1, steps.wall_ns)
    error = math.sqrt(max(share * (1 - share), 0.01) / steps.samples)
    surely = in_steps * max(0.0, share - error)
    most = in_steps * min(0.95, share + error + _OF_OPERATORS * operators / max(1, steps.wall_ns))
    first, *others = finding.advice
    evidence = structs.replace(evidence, peers=())  # it is on in all ranks
    first = structs.replace(
        first,
        predicted_speedup=gain_without(evidence, most),
        predicted_low=gain_without(evidence, surely),
        because=f"{first.because}; the stacks alone take {rounded_percent(in_steps * share)} of the training loop",
    )
    return structs.replace(finding, share_ratio=round(in_steps * share, 4), advice=(first, *others))
