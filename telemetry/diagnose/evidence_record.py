"""Evidence as plain values that another process can turn into evidence again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import msgspec

from telemetry.diagnosis.evidence import (
    CheckpointEvidence,
    CpuEvidence,
    DeliveryEvidence,
    EpochEvidence,
    Evidence,
    GarbageEvidence,
    GpuEvidence,
    SamplerEvidence,
    WorkerEvidence,
)
from telemetry.records import pace_from

_PARTS: Final[dict[str, Any]] = {
    "epochs": EpochEvidence,
    "delivery": DeliveryEvidence,
    "sampler": SamplerEvidence,
    "checkpoints": CheckpointEvidence,
    "garbage": GarbageEvidence,
    "workers": WorkerEvidence,
    "cpu": CpuEvidence,
    "gpu": GpuEvidence,
}


def to_record(evidence: Evidence) -> dict[str, Any]:
    """All figures, as values for JSON."""
    record: dict[str, Any] = msgspec.to_builtins(evidence)
    return record


def from_record(record: dict[str, Any]) -> Evidence:
    """The evidence that `to_record` was made of.

    Raises:
        KeyError, TypeError: a figure is missing.
    """
    values = {spec.name: record[spec.name] for spec in fields(Evidence)}
    for name, kind in _PARTS.items():
        values[name] = kind(**values[name])
    values["pace"] = pace_from(values["pace"])
    values["peers"] = tuple(pace_from(pace) for pace in values["peers"])
    return Evidence(**values)
