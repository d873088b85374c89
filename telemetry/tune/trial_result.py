"""What is known of one trial: its settings, its pace, its memory, or why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.trial_records import ENDED_LATE, ENDED_SCRIPT, SHARING, LoaderFacts
from telemetry.diagnose.evidence_record import from_record
from telemetry.tune.trial_process import MEMORY_SHORT

if TYPE_CHECKING:
    from telemetry.diagnosis.evidence import Evidence
    from telemetry.tune.trial_process import Ended

MIN_STEPS: Final = 2
"""With fewer steps a trial has no pace."""

_SHARE_OF_WAIT: Final = 0.1
"""A loader is tuned if the training waits for it for at least this share of its waits."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a trial. ``loader``: those that override the script's own, by name. ``sharing``: None to leave it."""

    loader: dict[str, Any] = field(default_factory=dict)
    sharing: str | None = None

    def key(self) -> tuple[object, ...]:
        """Equal for equal settings."""
        return (*sorted(self.loader.items()), self.sharing)


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Attributes:
        number: from 1.
        wanted: the settings that it was to have.
        settings: those that the loader had which the first trial waits for longest, as JSON values.
        steps_per_second: measured; None if it failed. ``predicted``: before it ran; None without a prediction.
        wait_ratio: share of the training loop spent waiting for data that the device felt.
        step_wait_seconds, step_compute_seconds: of one step.
        memory_bytes: the most that all its processes had together. ``worker_bytes``: of that, each worker.
        batch_bytes: the largest batch.
        seconds: from start to end.
        steps: that were measured.
        failed: why it has no pace; empty if it has one.
        remarks: what a person should know of it.
        output: the last lines that the script printed.
        evidence: of the rank that waited most; None if it failed.
        loaders: where loaders were made.
        device: type of the device that trained; None for the CPU.
        evaluation_ratio: share of the time spent in evaluations.
        short: whether it was ended because memory was short.
    """

    number: int
    wanted: Settings
    settings: dict[str, Any]
    steps_per_second: float | None
    predicted: float | None
    wait_ratio: float | None
    step_wait_seconds: float | None
    step_compute_seconds: float | None
    memory_bytes: int
    worker_bytes: int | None
    batch_bytes: int
    seconds: float
    steps: int
    failed: str
    remarks: tuple[str, ...]
    output: tuple[str, ...]
    evidence: Evidence | None
    loaders: tuple[LoaderFacts, ...]
    device: str | None
    evaluation_ratio: float
    short: bool = False

    def as_json(self) -> dict[str, Any]:
        """The fields of a trial in ``tune --json``."""
        return {
            "settings": self.settings,
            "steps_per_second": self.steps_per_second,
            "predicted_steps_per_second": self.predicted,
            "wait_ratio": self.wait_ratio,
            "memory_bytes": self.memory_bytes or None,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "failed": self.failed or None,
        }


def tuned_loaders(loaders: tuple[LoaderFacts, ...]) -> tuple[LoaderFacts, ...]:
    """The loaders whose settings matter for the training, the one that is waited for longest first."""
    training = sorted((facts for facts in loaders if facts.trains), key=lambda facts: -facts.wait_seconds)
    whole = sum(facts.wait_seconds for facts in training)
    return tuple(
        facts for number, facts in enumerate(training) if not number or facts.wait_seconds >= _SHARE_OF_WAIT * whole
    )


def settings_for(facts: LoaderFacts, wanted: Settings) -> dict[str, Any]:
    """The settings that one loader gets in a trial: those that it must not have are left out."""
    return {
        name: value
        for name, value in wanted.loader.items()
        if name not in facts.refused or is_harmless(name, value, facts.max_workers)
    }


def is_harmless(name: str, value: Any, max_workers: int) -> bool:
    """Whether a value of a setting that must not be changed freely is safe nevertheless."""
    if name == "num_workers":
        return bool(value <= max_workers)
    return (name, value) in {("in_order", True), ("persistent_workers", False)}


def result_of(number: int, wanted: Settings, predicted: float | None, ended: Ended, place: str | None = None) -> Trial:
    """Turn the end of a trial into its result.

    In a job of several ranks, the slowest rank has the pace of all. The evidence is of the one that waited most.

    Args:
        number: of the trial, from 1.
        wanted: the settings that it was to have.
        predicted: the pace that was predicted for it.
        ended: how it ended.
        place: of the loader whose settings are shown; None for the one that is waited for longest.
    """
    measured = [outcome for outcome in ended.outcomes if outcome["steps"] >= MIN_STEPS and outcome.get("seconds")]
    outcome = max(measured, key=_waited, default=None) or (ended.outcomes[0] if ended.outcomes else {})
    loaders = tuple(LoaderFacts(**facts) for facts in outcome.get("loaders", ()))
    tuned = tuned_loaders(loaders)
    failed = _failure(ended, outcome, loaders) if not measured or ended.wanting else ""
    rate = min((each["steps"] / each["seconds"] for each in measured), default=None)
    evidence = from_record(outcome["evidence"]) if measured and not failed else None
    shown = next((facts for facts in loaders if facts.place == place), next(iter(tuned), None))
    settings = dict(wanted.loader if shown is None else shown.applied)
    if wanted.sharing is not None:
        settings[SHARING] = wanted.sharing
    workers = len(ended.outcomes) * sum(int(f.applied.get("num_workers") or 0) for f in loaders if f.loaders)
    beyond = ended.memory_bytes - ended.main_bytes
    steps = evidence.steps if evidence is not None else 0
    exposed = None if evidence is None else evidence.exposed_wait_seconds
    waited = 0.0 if evidence is None else (evidence.wait_seconds if exposed is None else exposed)
    return Trial(
        number=number,
        wanted=wanted,
        settings=settings,
        steps_per_second=None if failed or rate is None else round(rate, 4),
        predicted=None if predicted is None else round(predicted, 4),
        wait_ratio=round(waited / evidence.loop_seconds, 4) if evidence is not None and evidence.loop_seconds else None,
        step_wait_seconds=waited / steps if evidence is not None and steps else None,
        step_compute_seconds=(evidence.loop_seconds - waited) / steps if evidence is not None and steps else None,
        memory_bytes=ended.memory_bytes,
        worker_bytes=beyond // workers if workers and beyond > 0 else None,
        batch_bytes=max((facts.batch_bytes for facts in tuned), default=0),
        seconds=ended.seconds,
        steps=int(outcome.get("steps", 0)),
        failed=failed,
        remarks=_remarks(ended, outcome),
        output=ended.output,
        evidence=evidence,
        loaders=loaders,
        device=outcome.get("device"),
        evaluation_ratio=evidence.evaluation_seconds / evidence.seconds if evidence and evidence.seconds else 0.0,
        short=ended.wanting.startswith(MEMORY_SHORT),
    )


def _waited(outcome: dict[str, Any]) -> float:
    return float(outcome["evidence"]["wait_seconds"]) / max(1e-9, float(outcome["seconds"]))


def _failure(ended: Ended, outcome: dict[str, Any], loaders: tuple[LoaderFacts, ...]) -> str:
    if ended.wanting:
        return ended.wanting
    if ended.status:
        how = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
        return f"the script failed ({how})"
    if not loaders:
        return "the script made no DataLoader"
    if not any(facts.batches or facts.evaluation_batches for facts in loaders):
        return "no batch was drawn from a DataLoader"
    if outcome.get("end") == ENDED_LATE:
        return f"only {outcome.get('steps', 0)} steps ended in time"
    return f"the script ended after {outcome.get('steps', 0)} measured steps"


def _remarks(ended: Ended, outcome: dict[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    if outcome.get("end") == ENDED_SCRIPT:
        how = f" with exit status {ended.status}" if ended.status else ""
        found.append(f"the script ended{how} before the trial did; what was measured until then counts")
        if not outcome.get("warm"):
            found.append("that includes the first steps, which may be slower")
    if outcome.get("end") == ENDED_LATE and outcome.get("steps"):
        found.append(f"only {outcome['steps']} steps ended in time")
    if outcome.get("saves"):
        found.append(f"{outcome['saves']} checkpoints were not written")
    found += [f"what the script wrote to {path} was thrown away" for path in outcome.get("redirected", ())]
    if outcome.get("hook_errors"):
        found.append(f"{outcome['hook_errors']} hooks failed")
    return tuple(found)
