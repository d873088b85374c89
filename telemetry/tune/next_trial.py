"""Picks the next trial from what the trials so far have shown, with the model of a step.

1. The model predicts the pace with other numbers of workers, and with each advice on a setting of the loader.
2. The candidate with the highest prediction is tried, if that is better than the best trial by `_WORTH_A_TRIAL`.
3. If the model sees none, but the best trial still waits for data, its neighbours are tried: the model may be wrong.
4. Otherwise no improvement is in sight, and the search stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.diagnosis.advice import loader_advice, shortest_step, step_with_workers, wants_shared_files
from telemetry.tune.trial_result import Settings, is_harmless, tuned_loaders
from telemetry.util.text import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.tune.settings_limits import Limits
    from telemetry.tune.trial_result import Trial

_WORTH_A_TRIAL: Final = 1.03
_NEARLY_AS_GOOD: Final = 0.985
"""Of candidates that are predicted to be this close to the best one, the one with the fewest workers is tried."""

_STILL_WAITS: Final = 0.05
"""From this share of waiting on, the neighbours of the best trial are worth a trial."""

_NOT_FAR_BELOW: Final = 0.9
"""A neighbour is left out if it is predicted to have less than this share of the best pace."""

_WITHOUT_CORE: Final = 0.35
_NOT_TRIED: Final = "not tried"
_DEFAULT_PREFETCH: Final = 2
_MAX_PREFETCH: Final = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try. ``predicted``: steps per second; None without a prediction."""

    settings: Settings
    predicted: float | None
    because: str


@dataclass(frozen=True, slots=True)
class Stop:
    """No further trial, and why."""

    because: str


class Search:
    """The search for the best settings.

    Args:
        limits: what the machine can hold.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.notes: list[str] = []

    def next(self, trials: Sequence[Trial]) -> Candidate | Stop:
        """The next trial, or why there is no other. The first trial is the script as it is."""
        best = fastest(trials)
        self.notes = [note for note in self.notes if not note.startswith(_NOT_TRIED)]  # more may be known by now
        if best is None or best.evidence is None or best.steps_per_second is None:
            return Stop("no trial has a pace")
        bound = shortest_step(best.evidence)
        if bound is not None and best.steps_per_second * bound > 1 / _WORTH_A_TRIAL:
            return Stop("the training hardly waits for data any more")
        tried = {trial.wanted.key() for trial in trials} | {as_run(trial).key() for trial in trials}
        possible = [
            c for c in self._candidates(best) if c.settings.key() not in tried and self._allowed(c, best, trials)
        ]
        top = max((c.predicted or 0.0 for c in possible), default=0.0)
        if top >= _WORTH_A_TRIAL * best.steps_per_second:
            close = [c for c in possible if (c.predicted or 0.0) >= _NEARLY_AS_GOOD * top]
            return min(close, key=lambda c: int(c.settings.loader.get("num_workers") or 0))
        if (best.wait_ratio or 0.0) >= _STILL_WAITS or _is_crowded(best.evidence):
            beside = [
                c for c in self._neighbours(best) if c.settings.key() not in tried and self._allowed(c, best, trials)
            ]
            if beside:
                return beside[0]
        gain = f"at most {rounded_percent(max(0.0, top / best.steps_per_second - 1))} more is predicted"
        return Stop(f"no improvement is in sight: {gain}" if top else "no other setting is predicted to help")

    def _candidates(self, best: Trial) -> list[Candidate]:
        evidence, rate = best.evidence, best.steps_per_second
        if evidence is None or rate is None:
            return []
        found = [
            self._with_workers(best, evidence, workers)
            for workers in range(self._limits.max_workers + 1)
            if workers != int(best.settings.get("num_workers") or 0)
        ]
        for cause, advice in loader_advice(evidence):
            if advice.setting == "num_workers" or advice.setting is None or advice.value is None:
                continue
            changed = as_run(best).loader | {advice.setting: _parsed(advice.value)}
            predicted = None if advice.predicted_speedup is None else rate * advice.predicted_speedup
            found.append(Candidate(Settings(changed, best.wanted.sharing), predicted, f"{cause}: {advice.action}"))
        if wants_shared_files(evidence) and best.wanted.sharing is None:
            step = (evidence.loop_seconds - evidence.delivery.transfer_wait_seconds) / evidence.steps
            shared = Settings(as_run(best).loader, "file_system")
            found.append(Candidate(shared, 1 / step if step > 0 else None, "busy workers send batches late"))
        return found

    def _with_workers(self, best: Trial, evidence: Evidence, workers: int) -> Candidate:
        step = step_with_workers(evidence, workers * self._limits.loaders)
        settings = as_run(best).loader | {"num_workers": workers}
        if not workers:
            settings = {name: value for name, value in settings.items() if name in {"num_workers", "pin_memory"}}
        elif not best.settings.get("num_workers"):
            settings["prefetch_factor"] = _DEFAULT_PREFETCH
            if evidence.epochs.boundaries >= _DEFAULT_PREFETCH and self._refusal(best, "persistent_workers") is None:
                settings["persistent_workers"] = True
        return Candidate(
            Settings(settings, best.wanted.sharing), 1 / step if step else None, f"predicted for {workers} workers"
        )

    def _neighbours(self, best: Trial) -> list[Candidate]:
        """Settings next to the best, the most likely first."""
        evidence, loader = best.evidence, as_run(best).loader
        workers = int(best.settings.get("num_workers") or 0)
        if evidence is None:
            return []
        more = [workers + 1, workers + 2]
        fewer = [n for n in (workers - 1,) if n >= 0]
        order = [*fewer, *more] if _is_crowded(evidence) else [more[0], *fewer, more[1]]
        found = [self._with_workers(best, evidence, n) for n in order]
        if workers:
            factor = int(best.settings.get("prefetch_factor") or _DEFAULT_PREFETCH)
            further = loader | {"prefetch_factor": min(_MAX_PREFETCH, 2 * factor)}
            found.append(Candidate(Settings(further, best.wanted.sharing), None, "next to the best"))
        least = _NOT_FAR_BELOW * (best.steps_per_second or 0.0)
        return [candidate for candidate in found if candidate.predicted is None or candidate.predicted >= least]

    def _allowed(self, candidate: Candidate, best: Trial, trials: Sequence[Trial]) -> bool:
        """Whether the loader and the machine can take it. What cannot be done is noted once."""
        present = as_run(best).loader
        most = min((f.max_workers for f in tuned_loaders(best.loaders) if "num_workers" in f.refused), default=0)
        for name, value in candidate.settings.loader.items():
            reason = self._refusal(best, name)
            if reason is not None and value != present.get(name) and not is_harmless(name, value, most):
                self._note(f"{name} is left alone: {reason}")
                return False
        workers = int(candidate.settings.loader.get("num_workers") or 0)
        if _workers_fail(workers, trials):
            self._note("num_workers is left alone: the script fails with workers, see the trial above")
            return False
        if any(trial.short and 0 < _workers(trial) <= workers for trial in trials):
            return False  # the row of that trial says so
        reason = self._limits.against(candidate.settings, best, trials)
        if reason:
            self._note(f"{_NOT_TRIED}: {reason}")
        return not reason

    def _refusal(self, best: Trial, name: str) -> str | None:
        for facts in tuned_loaders(best.loaders):
            if name in facts.refused:
                return facts.refused[name]
        if name == "pin_memory" and best.device is None:
            return "the training uses no device that batches are copied to"
        return None

    def _note(self, text: str) -> None:
        first_of_its_kind = not (text.startswith(_NOT_TRIED) and any(n.startswith(_NOT_TRIED) for n in self.notes))
        if text not in self.notes and first_of_its_kind:
            self.notes.append(text)


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The trial with the most steps per second; None if none has a pace."""
    return max(
        (trial for trial in trials if trial.steps_per_second is not None),
        key=lambda trial: trial.steps_per_second or 0.0,
        default=None,
    )


def _workers_fail(workers: int, trials: Sequence[Trial]) -> bool:
    """Whether a trial with workers has failed in the script's own code, and none has succeeded."""
    with_workers = [trial for trial in trials if _workers(trial)]
    failed = any(trial.failed and not trial.short for trial in with_workers)
    return workers > 0 and failed and all(trial.failed for trial in with_workers)


def _workers(trial: Trial) -> int:
    return int(trial.wanted.loader.get("num_workers", trial.settings.get("num_workers")) or 0)


def as_run(trial: Trial) -> Settings:
    """The settings of a trial, with those that the script itself gave, in the form of a candidate's."""
    names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
    given = {name: trial.settings[name] for name in names if trial.settings.get(name) is not None}
    if not given.get("num_workers"):
        given = {name: value for name, value in given.items() if name in {"num_workers", "pin_memory"}}
    if trial.settings.get("multiprocessing_context") and given.get("num_workers"):
        given["multiprocessing_context"] = trial.settings["multiprocessing_context"]
    return Settings(given, trial.wanted.sharing)


def _is_crowded(evidence: Evidence) -> bool:
    return (evidence.workers.runnable_ratio or 0.0) >= _WITHOUT_CORE


def _parsed(text: str) -> Any:
    if text in {"True", "False"}:
        return text == "True"
    return int(text) if text.isdigit() else text
