"""Chooses the settings to try: those of a grid, or those that the model of a step predicts from earlier trials.

1. The model predicts the pace with other numbers of workers, and with each advice on a setting of the loader.
2. The candidate with the highest prediction is tried, if that is better than the best trial by `_WORTH_A_TRIAL`.
3. If the model sees none, but the best trial still waits for data, its neighbours are tried: the model may be wrong.
4. Otherwise no improvement is in sight, and the search stops.

Settings that a loader, the cores or the memory cannot hold are not tried.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from telemetry.agent.trial import LOADER_SETTINGS, SHARING
from telemetry.diagnosis.advice import shortest_step, step_with_workers, wants_shared_files
from telemetry.diagnosis.causes import loader_advice
from telemetry.sources.cgroup import PressureSource
from telemetry.sources.collector import CollectorError
from telemetry.tune.process import Candidate, is_harmless, memory_left
from telemetry.util.text import rounded_percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.diagnosis.evidence import Evidence
    from telemetry.tune.process import Settings, Trial

_WORTH_A_TRIAL: Final = 1.03
_NEARLY_AS_GOOD: Final = 0.985
"""Of candidates that are predicted to be this close to the best one, the one with the fewest workers is tried."""

_STILL_WAITS: Final = 0.05
"""From this share of waiting on, the neighbours of the best trial are worth a trial."""

_NOT_FAR_BELOW: Final = 0.9
"""A neighbour is left out if it is predicted to have less than this share of the best pace."""

_WITHOUT_CORE: Final = 0.35
_DEFAULT_PREFETCH: Final = 2
_MAX_PREFETCH: Final = 64

_WORKERS_PER_CORE: Final = 4
_MAX_WORKERS: Final = 32
"""As in the advice: more workers than cores help only if fetches wait for storage."""

_USABLE: Final = 0.8
"""Share of the memory that a proposal may fill."""

_GROWTH: Final = 1.3
"""Workers grow after a trial: pages that they share with the training process are copied when they are touched."""

_UNKNOWN: Final = 0.5
"""Assumed memory of a worker before one was measured, as a share of that of the training process."""

_WITHOUT_WORKERS: Final = frozenset({"num_workers", "pin_memory", SHARING})
"""Settings that have a meaning without workers."""

_ALLOWED: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("persistent_workers", "pin_memory", "in_order"), (True, False)),
    "multiprocessing_context": ("fork", "spawn", "forkserver"),
    SHARING: ("file_descriptor", "file_system"),
}
_SMALLEST: Final = {"num_workers": 0, "prefetch_factor": 1}
_MAX_TRIALS: Final = 200


class GridError(ValueError):
    """A grid cannot be understood; the text has the reason."""


def is_grid(text: str) -> bool:
    """Whether an argument is a part of a grid, such as ``num_workers=0,2``."""
    return text.partition("=")[0] in {*LOADER_SETTINGS, SHARING} and "=" in text


def settings_grid(parts: Sequence[str]) -> list[Settings]:
    """All combinations of ``NAME=VALUE,VALUE`` parts, without duplicates in effect.

    Raises:
        GridError: a name is unknown, a value is not allowed, or there are too many combinations.
    """
    values: dict[str, list[Any]] = {}
    for part in parts:
        name, _, text = part.partition("=")
        if name in values:
            raise GridError(f"{name} is in the grid twice")
        values[name] = [_value(name, one) for one in text.split(",")]
    found: list[Settings] = []
    for combination in itertools.product(*values.values()):
        settings = _meaningful(dict(zip(values, combination, strict=True)))
        if settings not in found:
            found.append(settings)
    if len(found) > _MAX_TRIALS:
        raise GridError(f"the grid has {len(found)} trials; at most {_MAX_TRIALS} are run")
    return found


def _value(name: str, text: str) -> Any:
    if name in _SMALLEST:
        if not text.isdigit() or int(text) < _SMALLEST[name]:
            raise GridError(f"{name} is a whole number from {_SMALLEST[name]} on, not {text!r}")
        return int(text)
    if name not in _ALLOWED:
        names = ", ".join((*LOADER_SETTINGS, SHARING))
        raise GridError(f"{name!r} is no setting of a DataLoader that can be tuned: {names}")
    allowed = {str(value): value for value in _ALLOWED[name]}
    if text not in allowed:
        raise GridError(f"{name} is {' or '.join(allowed)}, not {text!r}")
    return allowed[text]


def _meaningful(settings: Settings) -> Settings:
    """The settings; if there are no workers, only those that then have a meaning."""
    if settings.get("num_workers", 1):
        return settings
    return {name: value for name, value in settings.items() if name in _WITHOUT_WORKERS}


def as_run(trial: Trial) -> Settings:
    """The settings of a trial in the form of a candidate's, with those that the script itself gave."""
    given = {name: value for name, value in trial.settings.items() if value is not None}
    return _meaningful({"num_workers": 0, **given})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this machine.

    Attributes:
        room: bytes left before the first trial. ``shared``: bytes for batches in shared memory; None if unknown.
        cores: cores of this job. ``ranks``: processes that train.
        loaders: number of loaders that are tuned. All get the same settings.
    """

    room: int
    shared: int | None
    cores: int
    ranks: int
    loaders: int = 1

    @classmethod
    def measured(cls, allowed: int | None, ranks: int) -> Limits:
        """The present limits of this machine. ``allowed``: bytes that the user allows."""
        shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108
        cores = len(os.sched_getaffinity(0))
        try:
            quota = PressureSource().read().cgroup_cpu_limit
        except CollectorError:
            quota = None
        return cls(
            room=memory_left(allowed).available,
            shared=None if shared is None else shared.f_bavail * shared.f_frsize,
            cores=cores if quota is None else max(1, min(cores, math.ceil(quota))),
            ranks=ranks,
        )

    @property
    def max_workers(self) -> int:
        """The most workers of one loader that the cores can hold."""
        return max(1, min(_MAX_WORKERS, _WORKERS_PER_CORE * self.cores // (self.ranks * self.loaders)))

    def against(self, wanted: Settings, known: Trial, trials: Sequence[Trial]) -> str:
        """Why changes of a ``known`` trial cannot be tried; empty if they can. Trials show the memory of a worker."""
        settings = {**known.settings, **wanted}
        workers = int(settings.get("num_workers") or 0)
        if workers > self.max_workers:
            return f"{workers} workers are more than {self.cores} cores can hold"
        if not workers:
            return ""
        copies = self.ranks * self.loaders
        ahead = workers * int(settings.get("prefetch_factor") or _DEFAULT_PREFETCH)
        batch = max((facts.batch_bytes for facts in known.tuned), default=0)
        if self.shared is not None and ahead * batch * copies > _USABLE * self.shared:
            return f"{ahead} batches of {batch >> 20} MiB do not fit into /dev/shm"
        memory, present = known.memory_bytes, int(known.settings.get("num_workers") or 0)
        if not memory:
            return ""
        each = max((trial.worker_bytes or 0 for trial in trials), default=0)
        each = int(_GROWTH * each) if each else int(_UNKNOWN * memory / self.ranks)
        need = memory + copies * (workers * each - present * (known.worker_bytes or 0) + ahead * batch)
        # Before any worker was measured, only the limit during the trial itself counts.
        if need > _USABLE * self.room and (workers > 1 or known.worker_bytes):
            return f"{workers} workers would need about {need >> 20} of {self.room >> 20} MiB"
        return ""


class Search:
    """Searches for the best settings within the limits of the machine."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left_alone: dict[str, None] = {}
        self._too_much = ""  # why the first candidate that the machine cannot hold was not tried

    @property
    def notes(self) -> list[str]:
        """Notes for a person about settings that were not tried."""
        return [*self._left_alone, *([f"not tried: {self._too_much}"] if self._too_much else [])]

    def next(self, trials: Sequence[Trial]) -> Candidate | str:
        """The next trial, or why there is no other. The first trial is the script as it is."""
        best = max(trials, key=lambda trial: trial.steps_per_second or 0.0)
        self._too_much = ""  # the last trial may have changed it
        if best.evidence is None or best.steps_per_second is None:
            return "no trial has a pace"
        evidence, rate = best.evidence, best.steps_per_second
        bound = shortest_step(evidence)
        if bound is not None and rate * bound > 1 / _WORTH_A_TRIAL:
            return "the training hardly waits for data any more"
        possible = [c for c in self._candidates(best, evidence, rate) if self._allowed(c.settings, best, trials)]
        top = max((c.predicted or 0.0 for c in possible), default=0.0)
        if top >= _WORTH_A_TRIAL * rate:
            close = [c for c in possible if (c.predicted or 0.0) >= _NEARLY_AS_GOOD * top]
            return min(close, key=lambda c: int(c.settings.get("num_workers") or 0))
        if (best.wait_ratio or 0.0) >= _STILL_WAITS or _is_crowded(evidence):
            for candidate in self._neighbours(best, evidence, rate):
                if self._allowed(candidate.settings, best, trials):
                    return candidate
        gain = f"at most {rounded_percent(max(0.0, top / rate - 1))} more is predicted"
        return f"no improvement is in sight: {gain}" if top else "no other setting is predicted to help"

    def _candidates(self, best: Trial, evidence: Evidence, rate: float) -> list[Candidate]:
        present = as_run(best)
        counts = range(self._limits.max_workers + 1)
        found = [self._with_workers(best, evidence, n) for n in counts if n != present["num_workers"]]
        for advice in loader_advice(evidence):
            if advice.setting != "num_workers" and advice.setting is not None and advice.value is not None:
                gain = advice.predicted_speedup
                changed = present | {advice.setting: _value(advice.setting, advice.value)}
                found.append(Candidate(changed, None if gain is None else rate * gain))
        if wants_shared_files(evidence) and SHARING not in present:
            step = (evidence.loop_seconds - evidence.waits.transfer_seconds) / evidence.steps
            found.append(Candidate(present | {SHARING: "file_system"}, 1 / step if step > 0 else None))
        return found

    def _with_workers(self, best: Trial, evidence: Evidence, workers: int) -> Candidate:
        step = step_with_workers(evidence, workers * self._limits.loaders)
        settings = as_run(best)
        if workers and not settings["num_workers"]:
            settings["prefetch_factor"] = _DEFAULT_PREFETCH
            if evidence.edges.count >= _DEFAULT_PREFETCH and not _refusal(best, "persistent_workers"):
                settings["persistent_workers"] = True
        return Candidate(_meaningful(settings | {"num_workers": workers}), 1 / step if step else None)

    def _neighbours(self, best: Trial, evidence: Evidence, rate: float) -> list[Candidate]:
        """Settings next to the best, the most likely first."""
        settings = as_run(best)
        workers = settings["num_workers"]
        order = (-1, 1, 2) if _is_crowded(evidence) else (1, -1, 2)
        found = [self._with_workers(best, evidence, workers + more) for more in order if workers + more >= 0]
        if workers:
            factor = min(_MAX_PREFETCH, 2 * int(settings.get("prefetch_factor") or _DEFAULT_PREFETCH))
            found.append(Candidate(settings | {"prefetch_factor": factor}, None))
        return [c for c in found if c.predicted is None or c.predicted >= _NOT_FAR_BELOW * rate]

    def _allowed(self, wanted: Settings, best: Trial, trials: Sequence[Trial]) -> bool:
        """Whether settings are new, and the loader and the machine can take them. Others are noted."""
        if any(wanted in (trial.candidate.settings, as_run(trial)) for trial in trials):
            return False
        present = as_run(best)
        most = min((f.max_workers for f in best.tuned if "num_workers" in f.refused), default=0)
        for name, value in wanted.items():
            reason = _refusal(best, name)
            if reason and value != present.get(name) and not is_harmless(name, value, most):
                self._left_alone[f"{name} is left alone: {reason}"] = None
                return False
        workers = int(wanted.get("num_workers") or 0)
        with_workers = [trial for trial in trials if _workers(trial)]
        broken = any(trial.failed and not trial.short for trial in with_workers)
        if workers and broken and all(trial.failed for trial in with_workers):
            self._left_alone["num_workers is left alone: the script fails with workers, see the trial above"] = None
            return False
        if any(trial.short and _workers(trial) <= workers for trial in with_workers):
            return False  # the row of that trial shows it
        reason = self._limits.against(wanted, best, trials)
        self._too_much = self._too_much or reason
        return not reason


def _refusal(best: Trial, name: str) -> str:
    for facts in best.tuned:
        if name in facts.refused:
            return facts.refused[name]
    if name == "pin_memory" and (best.outcome.device is None):
        return "the training uses no device that batches are copied to"
    return ""


def _workers(trial: Trial) -> int:
    return int(trial.candidate.settings.get("num_workers", trial.settings.get("num_workers")) or 0)


def _is_crowded(evidence: Evidence) -> bool:
    return (evidence.workers.runnable_ratio or 0.0) >= _WITHOUT_CORE
