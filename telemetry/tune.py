"""``telemetry tune SCRIPT``: finds better DataLoader settings with short trials of the unchanged script.

A trial is the script in a process of its own (`telemetry.agent.trial`). The first one has the script's own settings.

1. The model of a step predicts the pace with other numbers of workers, and with each advice on a setting of the loader.
2. The candidate with the highest prediction is tried, if that is better than the best trial by `_WORTH_A_TRIAL`.
3. If the model sees none, but the best trial still waits for data, its neighbours are tried: the model may be wrong.
4. Otherwise no improvement is in sight, and the search stops.

Settings that a loader, the cores or the memory cannot hold are not tried.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psutil

from telemetry.agent.trial import (
    ENDED_LATE,
    ENDED_SCRIPT,
    LOADER_SETTINGS,
    TrialOutcome,
    TrialPlan,
    outcome_path,
)
from telemetry.config import ENV_PREFIX, TRIAL_VARIABLE
from telemetry.diagnosis.advice import shortest_step, step_with_workers
from telemetry.diagnosis.causes import loader_advice
from telemetry.diagnosis.costs import THRESHOLDS
from telemetry.diagnosis.model import MAX_WORKERS, MAX_WORKERS_PER_CORE
from telemetry.sources.cgroup import MemoryLimit, MemoryLimits, PressureSource
from telemetry.sources.collector import CollectorError
from telemetry.util.text import byte_size, complain, milliseconds, rounded_percent, show, show_json, table, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from telemetry.agent.trial import LoaderFacts
    from telemetry.diagnosis.evidence import Evidence

Settings = dict[str, Any]
"""Settings of loaders, by name."""


class Candidate(NamedTuple):
    """Settings to try. ``predicted``: steps per second; None without a prediction."""

    settings: Settings
    predicted: float | None = None


# -- the command -------------------------------------------------------------------------------------------------------

_START_SECONDS: Final = 10.0
"""Expected time of a trial before its first step, for the first estimate."""

_INTERRUPTED: Final = 130
_USAGE_ERROR: Final = 2


def tune(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return _usage_error("start tune once on the node, without torchrun: telemetry tune --nproc-per-node N SCRIPT")
    script, parts = [options.target, *options.arguments], list(options.grid)
    while options.grid and script and _is_grid(script[0]):  # --grid num_workers=0,2 prefetch_factor=2,4 SCRIPT
        parts.append(script.pop(0))
    if not script:
        return _usage_error("there is no script to tune")
    if not options.module and not Path(script[0]).is_file():
        return _usage_error(f"cannot open {script[0]}: there is no such file")
    try:
        grid = settings_grid(parts) if parts else []
    except GridError as error:
        return _usage_error(str(error))
    options.script = script
    with tempfile.TemporaryDirectory(prefix="telemetry-tune-", ignore_cleanup_errors=True) as folder:
        return _Tuning(options, Path(folder), grid).run()


def _usage_error(message: str) -> int:
    complain(message)
    return _USAGE_ERROR


class _Tuning:
    """The trials of one command: those of the grid, or if that is empty, those that the model chooses."""

    def __init__(self, options: argparse.Namespace, folder: Path, grid: Sequence[Settings]) -> None:
        self._options = options
        self._folder = folder
        self._grid = grid
        self._most = 1 + len(grid) if grid else options.trials
        self._trials: list[Trial] = []

    def run(self) -> int:
        interrupted, why = False, "all trials were run"
        notes: list[str] = []
        room = memory_left(self._options.memory).available  # before the first trial
        try:
            first = self._run_trial(Candidate({}))
            if first.failed or not first.tuned:
                _explain(first)
                return 1
            ranks = self._options.nproc_per_node or 1
            search = Grid(self._grid, first) if self._grid else Search(Limits.measured(room, ranks, len(first.tuned)))
            notes = search.notes
            while self._grid or len(self._trials) < self._most:
                found = search.next(self._trials)
                notes = search.notes
                if isinstance(found, str):
                    why = found
                    break
                self._run_trial(found)
        except KeyboardInterrupt:
            interrupted, why = True, "stopped before the end"
        except OSError as error:
            complain(f"a trial cannot be started: {error}")
            return 1
        if not self._trials:
            complain("stopped before the first trial has ended")
            return _INTERRUPTED
        status = _show(self._trials, why, notes, as_json=self._options.json)
        return _INTERRUPTED if interrupted else status

    def _run_trial(self, candidate: Candidate) -> Trial:
        """Run one trial. Raises what `run_trial` raises."""
        done = len(self._trials)
        took = sum(trial.seconds for trial in self._trials)
        each = took / done if done else _START_SECONDS + self._options.warm_up + self._options.seconds
        name = settings_text(candidate.settings) if candidate.settings else "the script's own settings"
        left = (self._most - done) * each
        warn(f"trial {done + 1} of at most {self._most}: {name}; at most {left:.0f} s left\n")
        folder = self._folder / str(done + 1)
        trial = run_trial(self._options, folder, candidate, self._trials[0].tuned if self._trials else [])
        self._trials.append(trial)
        shutil.rmtree(folder, ignore_errors=True)
        return trial


# -- one trial: its results --------------------------------------------------------------------------------------------

_MIN_STEPS: Final = 2
"""With fewer steps a trial has no pace."""

_SHARE_OF_WAIT: Final = 0.1
"""A loader is tuned if the training waits for it for at least this share of its waits."""

_MEMORY_SHORT: Final = "memory was short"


class TrialFigures(msgspec.Struct, frozen=True):
    """A trial in ``telemetry tune --json``. Figures that it does not have, as after a failure, are None."""

    settings: Settings
    steps_per_second: float | None
    predicted_steps_per_second: float | None
    wait_ratio: float | None
    memory_bytes: int | None
    seconds: float
    steps: int
    failed: str | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial that has ended.

    Attributes:
        candidate: the settings that were tried.
        place: place of the loader whose settings are shown; None for the loader with the longest wait.
        outcomes: outcomes of its ranks, if they were written.
        status: exit status; negative for a signal.
        stopped: why it was ended from outside; empty if it was not.
        output: the last lines that the script printed.
        seconds: length from start to end.
        memory_bytes: the most that all its processes had together; 0 if unknown. ``main_bytes``: part of the training
            processes.
    """

    candidate: Candidate
    place: str | None
    outcomes: tuple[TrialOutcome, ...]
    status: int
    stopped: str
    output: tuple[str, ...]
    seconds: float
    memory_bytes: int
    main_bytes: int

    @property
    def outcome(self) -> TrialOutcome:
        """The outcome of the rank that waited most."""
        return max(self._measured, key=_wait_ratio, default=None) or next(iter(self.outcomes), TrialOutcome())

    @property
    def steps_per_second(self) -> float | None:
        """The pace of the slowest rank, which is that of all; None if the trial has failed."""
        return None if self.failed else round(min(each.steps / each.seconds for each in self._measured), 4)

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of `outcome`; None if the trial has failed."""
        return None if self.failed else self.outcome.evidence

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Seconds of a step: the wait for data that the device felt, and the rest; None if the trial has failed."""
        found = self.evidence
        if found is None:
            return None
        waited = found.wait_seconds if found.exposed_seconds is None else found.exposed_seconds
        return waited / found.steps, (found.loop_seconds - waited) / found.steps

    @property
    def wait_ratio(self) -> float | None:
        """The share of the wait in the training loop."""
        return None if self.step_seconds is None else round(self.step_seconds[0] / sum(self.step_seconds), 4)

    @property
    def tuned(self) -> list[LoaderFacts]:
        """The loaders whose settings matter for the training, the one that is waited for longest first."""
        training = [facts for facts in self.outcome.loaders if facts.trains]
        training.sort(key=lambda facts: -facts.wait_seconds)
        enough = _SHARE_OF_WAIT * sum(facts.wait_seconds for facts in training)
        return training[:1] + [facts for facts in training[1:] if facts.wait_seconds >= enough]

    @property
    def settings(self) -> Settings:
        """The settings of the loader with the longest wait in the first trial."""
        shown = [facts for facts in self.outcome.loaders if facts.place == self.place] or self.tuned
        return dict(shown[0].applied if shown else self.candidate.settings)

    @property
    def as_candidate(self) -> Settings:
        """The settings in the form of a candidate's, with those that the script itself gave."""
        given = {name: value for name, value in self.settings.items() if value is not None}
        return _meaningful({"num_workers": 0, **given})

    @property
    def worker_bytes(self) -> int | None:
        """The memory of a worker; None without workers."""
        workers = sum(int(facts.applied.get("num_workers") or 0) for facts in self.outcome.loaders) * len(self.outcomes)
        beyond = self.memory_bytes - self.main_bytes
        return beyond // workers if workers and beyond > 0 else None

    @property
    def short(self) -> bool:
        """Whether it was ended because memory was short."""
        return self.stopped.startswith(_MEMORY_SHORT)

    @property
    def failed(self) -> str:
        """Why it has no pace; empty if it has one."""
        if self.stopped or self._measured:
            return self.stopped
        if self.status:
            how = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
            return f"the script failed ({how})"
        outcome = self.outcome
        if not outcome.loaders:
            return "the script made no DataLoader"
        if not any(facts.batches or facts.evaluation_batches for facts in outcome.loaders):
            return "no batch was drawn from a DataLoader"
        if outcome.end == ENDED_LATE:
            return f"only {outcome.steps} steps ended in time"
        return f"the script ended after {outcome.steps} measured steps"

    @property
    def remarks(self) -> list[str]:
        """Notes for a person about the trial."""
        outcome, how = self.outcome, f" with exit status {self.status}" if self.status else ""
        early, late = outcome.end == ENDED_SCRIPT, outcome.end == ENDED_LATE
        remarks = {
            f"the script ended{how} before the trial did; what was measured until then counts": early,
            "that includes the first steps, which may be slower": early and not outcome.warm,
            f"only {outcome.steps} steps ended in time": late and outcome.steps,
            f"{outcome.saves} checkpoints were not written": outcome.saves,
            f"{outcome.hook_errors} hooks failed": outcome.hook_errors,
        }
        return [remark for remark, holds in remarks.items() if holds]

    @property
    def _measured(self) -> list[TrialOutcome]:
        return [each for each in self.outcomes if each.steps >= _MIN_STEPS and each.seconds and each.evidence]

    @property
    def figures(self) -> TrialFigures:
        """The figures of the trial for ``tune --json``."""
        predicted = self.candidate.predicted
        return TrialFigures(
            self.settings,
            self.steps_per_second,
            predicted and round(predicted, 4),
            self.wait_ratio,
            self.memory_bytes or None,
            round(self.seconds, 3),
            self.outcome.steps,
            self.failed or None,
        )


def _wait_ratio(outcome: TrialOutcome) -> float:
    return 0.0 if outcome.evidence is None else outcome.evidence.wait_seconds / outcome.seconds


def settings_for(facts: LoaderFacts, wanted: Settings) -> Settings:
    """The settings that one loader gets in a trial, without those that it must not have."""
    return {
        name: value
        for name, value in wanted.items()
        if name not in facts.refused or _is_harmless(name, value, facts.max_workers)
    }


def _is_harmless(name: str, value: Any, max_workers: int) -> bool:
    """Whether a value of a setting that must not be changed freely is safe nevertheless."""
    if name == "num_workers":
        return bool(value <= max_workers)
    return (name, value) in {("in_order", True), ("persistent_workers", False)}


# -- one trial: its process, whose memory is watched -------------------------------------------------------------------

_MAX_SHARE: Final = 6.0
"""A trial may take this many times the seconds that it measures: evaluations do not count as measured."""

_PATIENCE_SECONDS: Final = 60.0
"""A trial may exceed its own limits by this time before it is ended from outside."""

_POLL_SECONDS: Final = 0.05
_MEMORY_SECONDS: Final = 2.0
"""Time between two readings of every process's memory. One takes some milliseconds for each."""

_RESERVE: Final = 0.08
"""A trial is ended when less than this share of the memory is left."""

_FIRST_VICTIM: Final = "800"
"""If memory is short nevertheless, the kernel ends a trial before anything else."""

_LAST_LINES: Final = 15
_LIMITS: Final = MemoryLimits(Path("/proc"), Path("/sys/fs/cgroup"))
_NO_LIMIT: Final = 1 << 60


def run_trial(options: argparse.Namespace, folder: Path, candidate: Candidate, tuned: list[LoaderFacts]) -> Trial:
    """Run one trial to its end.

    Args:
        options: options of the command.
        folder: folder for the files of the trial, which is made.
        candidate: the settings to try.
        tuned: the loaders that get these settings; none in the first trial.

    Raises:
        OSError: the trial cannot be started.
        KeyboardInterrupt: the user has stopped the command. All processes of the trial have ended.
    """
    plan = TrialPlan(
        folder=str(folder),
        seconds=options.seconds,
        steps=options.steps,
        warm_up_seconds=max(0.0, options.warm_up),
        start_seconds=options.start_seconds,
        max_seconds=max(0.0, options.warm_up) + _MAX_SHARE * options.seconds,
        loaders={facts.place: settings_for(facts, candidate.settings) for facts in tuned},
        saves=options.no_protection,
    )
    for new in (folder, folder / "tmp", folder / "work"):
        new.mkdir()
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    ranks, began = options.nproc_per_node or 1, time.monotonic()
    memory = TrialMemory(str(path), options.memory)
    try:
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                _command(options, folder),
                cwd=folder / "work" if options.scratch else None,
                env=_environment(path),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        stopped = _wait(process, plan, memory, ranks)
    finally:
        _end_all(str(path))
    status = process.wait()
    outcomes = [msgspec.json.decode(file.read_bytes(), type=TrialOutcome) for file in _outcome_files(folder, ranks)]
    lines = (folder / "output.txt").read_bytes()[-20000:].decode("utf-8", "replace").splitlines()
    return Trial(
        candidate=candidate,
        place=tuned[0].place if tuned else None,
        outcomes=tuple(outcomes),
        status=status,
        stopped=stopped,
        output=tuple(lines[-_LAST_LINES:]),
        seconds=time.monotonic() - began,
        memory_bytes=memory.most,
        main_bytes=sum(memory.sizes.get(outcome.pid, 0) for outcome in outcomes),
    )


def _wait(process: subprocess.Popen[bytes], plan: TrialPlan, memory: TrialMemory, ranks: int) -> str:
    """Wait for the end of the trial. Returns why it was ended from here; empty if it was not."""
    until = time.monotonic() + plan.start_seconds + plan.max_seconds + _PATIENCE_SECONDS
    while process.poll() is None:
        short = memory.short()
        if short:
            return short
        if time.monotonic() > until:
            return "it did not end in time"
        if ranks > 1 and len(_outcome_files(Path(plan.folder), ranks)) == ranks:
            return ""  # they end one by one, and torchrun would take the first for a failure
        time.sleep(_POLL_SECONDS)
    return ""


def _outcome_files(folder: Path, ranks: int) -> list[Path]:
    return [path for rank in range(ranks) if (path := outcome_path(str(folder), rank)).exists()]


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    script = options.script[0]
    if options.scratch and not options.module:
        script = str(Path(script).absolute())
    launcher = [sys.executable]
    if options.nproc_per_node is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc_per_node)]
    agent = ["-m", "telemetry", "run", "--run-dir", str(folder / "run"), *(["-m"] if options.module else [])]
    return [*launcher, *agent, script, *options.script[1:]]


def _environment(plan: Path) -> dict[str, str]:
    """The variables of a trial: those of this process, without settings of the agent, and with trackers off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', os.getuid())}"
    return kept | {
        TRIAL_VARIABLE: str(plan),
        "TELEMETRY_PORT": "off",
        "TELEMETRY_INTERVAL_SECONDS": "0.25",
        "TELEMETRY_MAX_SNAPSHOTS": "0",
        "TELEMETRY_START_LINE": "off",
        "TELEMETRY_END_LINE": "off",
        "TMPDIR": str(plan.parent / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": kept.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file:{plan.parent / 'mlflow'}",
        "COMET_MODE": "disabled",
    }


class TrialMemory:
    """The memory of a trial.

    Args:
        plan: the path of the plan, which the trial's processes have in their environment.
        allowed: the most bytes that it may take; None for the limit of the machine.

    Attributes:
        most: the most bytes of all processes together so far. ``sizes``: bytes of each at that time, by pid.
    """

    def __init__(self, plan: str, allowed: int | None) -> None:
        self._plan = plan
        self._allowed = allowed
        self._due = time.monotonic() + _MEMORY_SECONDS / 2
        self._newest = 0
        self.most = 0
        self.sizes: dict[int, int] = {}

    def short(self) -> str:
        """Why the trial must end now, because memory is short; empty if it need not."""
        now = time.monotonic()
        if now >= self._due:
            self._measure()
            self._due = now + _MEMORY_SECONDS
        left, limit = memory_left(self._allowed, self._newest)
        if left < _RESERVE * limit:
            return f"{_MEMORY_SHORT}: {left >> 20} of {limit >> 20} MiB were left"
        return ""

    def _measure(self) -> None:
        sizes = {}
        for pid in _processes_of(self._plan):
            with suppress(psutil.Error):
                sizes[pid] = psutil.Process(pid).memory_full_info().pss  # shared memory is divided by its users
        self._newest = sum(sizes.values())
        if self._newest > self.most:
            self.most, self.sizes = self._newest, sizes


def memory_left(allowed: int | None, used: int = 0) -> MemoryLimit:
    """The bytes that the tightest limit leaves: of a cgroup, of the machine, or of the user for the trial itself."""
    rooms = [_LIMITS.tightest() or MemoryLimit(_NO_LIMIT, _NO_LIMIT)]
    if allowed is not None:
        rooms.append(MemoryLimit(allowed - used, allowed))
    return min(rooms)


def _processes_of(plan: str) -> list[int]:
    """The processes of a trial, and all that they have started: they inherit the variable with the plan's path."""
    wanted = f"{TRIAL_VARIABLE}={plan}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended but was not waited for has no environment
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _end_all(plan: str) -> None:
    """End every process of a trial at once. A signal that a script can handle would let it write a checkpoint."""
    for _ in range(100):
        left = _processes_of(plan)
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


# -- which settings are tried: those of a grid -------------------------------------------------------------------------

_WITHOUT_WORKERS: Final = frozenset({"num_workers", "pin_memory"})
"""Settings that have a meaning without workers."""

_ALLOWED: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("persistent_workers", "pin_memory", "in_order"), (True, False)),
    "multiprocessing_context": ("fork", "spawn", "forkserver"),
}
_SMALLEST: Final = {"num_workers": 0, "prefetch_factor": 1}
_MAX_TRIALS: Final = 200


class GridError(ValueError):
    """A grid cannot be understood; the text has the reason."""


def _is_grid(text: str) -> bool:
    """Whether an argument is a part of a grid, such as ``num_workers=0,2``."""
    return text.partition("=")[0] in LOADER_SETTINGS and "=" in text


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
        raise GridError(f"{name!r} is no setting of a DataLoader that can be tuned: {', '.join(LOADER_SETTINGS)}")
    allowed = {str(value): value for value in _ALLOWED[name]}
    if text not in allowed:
        raise GridError(f"{name} is {' or '.join(allowed)}, not {text!r}")
    return allowed[text]


def _meaningful(settings: Settings) -> Settings:
    """The settings; if there are no workers, only those that then have a meaning."""
    if settings.get("num_workers", 1):
        return settings
    return {name: value for name, value in settings.items() if name in _WITHOUT_WORKERS}


class Grid:
    """Goes through the settings of a grid, without those that a trial has had.

    Attributes:
        notes: settings that a loader does not get, for a person.
    """

    def __init__(self, grid: Sequence[Settings], first: Trial) -> None:
        self._left = list(grid)
        self._tuned = first.tuned
        self._run = [first.as_candidate]
        left_out = {
            f"{name} is left alone at line {facts.line} of {Path(facts.file).name}: {facts.refused[name]}"
            for facts in first.tuned
            for settings in grid
            for name in settings.keys() - settings_for(facts, settings).keys()
        }
        self.notes = sorted(left_out)

    def next(self, _trials: Sequence[Trial]) -> Candidate | str:
        """The next trial, or why there is no other."""
        while self._left:
            settings, applied = self._left.pop(0), self._run[0].copy()
            for facts in self._tuned:
                applied |= settings_for(facts, settings)
            if applied not in self._run:
                self._run.append(applied)
                return Candidate(settings)
        return "the grid is complete"


# -- which settings are tried: those that the model predicts to be good ------------------------------------------------

_WORTH_A_TRIAL: Final = 1.03
_NEARLY_AS_GOOD: Final = 0.985
"""Of candidates that are predicted to be this close to the best one, the one with the fewest workers is tried."""

_STILL_WAITS: Final = 0.05
"""From this share of waiting on, the neighbours of the best trial are worth a trial."""

_NOT_FAR_BELOW: Final = 0.9
"""A neighbour is left out if it is predicted to have less than this share of the best pace."""

_DEFAULT_PREFETCH: Final = 2
_MAX_PREFETCH: Final = 64

_USABLE: Final = 0.8
"""Share of the memory that a proposal may fill."""

_GROWTH: Final = 1.3
"""Workers grow after a trial: pages that they share with the training process are copied when they are touched."""

_UNKNOWN: Final = 0.5
"""Assumed memory of a worker before one was measured, as a share of that of the training process."""


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
    def measured(cls, room: int, ranks: int, loaders: int) -> Limits:
        """The present limits of this machine."""
        shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108
        cores = len(os.sched_getaffinity(0))
        with suppress(CollectorError):
            quota = PressureSource().read().cgroup_cpu_limit
            cores = cores if quota is None else max(1, min(cores, math.ceil(quota)))
        return cls(room, None if shared is None else shared.f_bavail * shared.f_frsize, cores, ranks, loaders)

    @property
    def max_workers(self) -> int:
        """The most workers of one loader that the cores can hold."""
        return max(1, min(MAX_WORKERS, MAX_WORKERS_PER_CORE * self.cores // (self.ranks * self.loaders)))

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
        present = best.as_candidate
        counts = range(self._limits.max_workers + 1)
        found = [self._with_workers(best, evidence, n) for n in counts if n != present["num_workers"]]
        for advice in loader_advice(evidence):
            if advice.setting != "num_workers" and advice.setting is not None and advice.value is not None:
                gain = advice.predicted_speedup
                changed = present | {advice.setting: _value(advice.setting, advice.value)}
                found.append(Candidate(changed, None if gain is None else rate * gain))
        return found

    def _with_workers(self, best: Trial, evidence: Evidence, workers: int) -> Candidate:
        step = step_with_workers(evidence, workers * self._limits.loaders)
        settings = best.as_candidate
        if workers and not settings["num_workers"]:
            settings["prefetch_factor"] = _DEFAULT_PREFETCH
            if evidence.edges.count >= _DEFAULT_PREFETCH and not _refusal(best, "persistent_workers"):
                settings["persistent_workers"] = True
        return Candidate(_meaningful(settings | {"num_workers": workers}), 1 / step if step else None)

    def _neighbours(self, best: Trial, evidence: Evidence, rate: float) -> list[Candidate]:
        """Settings next to the best, the most likely first."""
        settings = best.as_candidate
        workers = settings["num_workers"]
        order = (-1, 1, 2) if _is_crowded(evidence) else (1, -1, 2)
        found = [self._with_workers(best, evidence, workers + more) for more in order if workers + more >= 0]
        if workers:
            factor = min(_MAX_PREFETCH, 2 * int(settings.get("prefetch_factor") or _DEFAULT_PREFETCH))
            found.append(Candidate(settings | {"prefetch_factor": factor}, None))
        return [c for c in found if c.predicted is None or c.predicted >= _NOT_FAR_BELOW * rate]

    def _allowed(self, wanted: Settings, best: Trial, trials: Sequence[Trial]) -> bool:
        """Whether settings are new, and the loader and the machine can take them. Others are noted."""
        if any(wanted in (trial.candidate.settings, trial.as_candidate) for trial in trials):
            return False
        present = best.as_candidate
        most = min((f.max_workers for f in best.tuned if "num_workers" in f.refused), default=0)
        for name, value in wanted.items():
            reason = _refusal(best, name)
            if reason and value != present.get(name) and not _is_harmless(name, value, most):
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
    if name == "pin_memory" and best.outcome.device is None:
        return "the training uses no device that batches are copied to"
    return ""


def _workers(trial: Trial) -> int:
    return int(trial.candidate.settings.get("num_workers", trial.settings.get("num_workers")) or 0)


def _is_crowded(evidence: Evidence) -> bool:
    return (evidence.workers.runnable_ratio or 0.0) >= THRESHOLDS.runnable


# -- the results -------------------------------------------------------------------------------------------------------

_HEADINGS: Final = ("settings", "loading", "training", "steps/s", "predicted", "memory", "trial")

_SAME: Final = 1.02
"""Paces that differ by less are equal: two trials with equal settings differ as much."""

_AS_GOOD: Final = 0.98
"""Of trials whose pace is this close to the fastest, the one with the fewest workers is the best."""


class Change(msgspec.Struct, frozen=True):
    """A line to change: its new text, and the library that makes the loader, if the script does not."""

    file: str
    line: int
    code: str
    library: str | None


class TuneResult(msgspec.Struct, frozen=True):
    """The output of ``telemetry tune --json``. ``speedup``: None without two paces. ``stopped``: why it ended."""

    baseline: TrialFigures
    best: TrialFigures
    speedup: float | None
    trials: list[TrialFigures]
    changes: list[Change]
    stopped: str
    notes: list[str]


def _show(trials: Sequence[Trial], why: str, notes: list[str], *, as_json: bool) -> int:
    """Print the results. ``why``: the trials have ended. Returns the exit status."""
    first, best = trials[0], _simplest_of_the_best(trials)
    before, after = first.steps_per_second, best.steps_per_second
    gain = after / before if before and after else None
    changes = _changes(first, best) if best is not first else []
    if as_json:
        speedup, figures = None if gain is None else round(gain, 4), [trial.figures for trial in trials]
        found = TuneResult(first.figures, best.figures, speedup, figures, changes, why, notes)
        return show_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    text = _trial_table(trials) + "\n"
    if gain is not None and (gain < _SAME or not changes):
        text += f"The script's own settings are the best that was found ({why}).\n"
    elif gain is not None:
        text += f"{gain:.2f} times the steps per second of the script's own settings ({why}). Change:\n"
        text += "".join(_change_text(change) for change in changes)
    return show(text + "".join(f"Note: {note}.\n" for note in notes))


def _simplest_of_the_best(trials: Sequence[Trial]) -> Trial:
    """The best trial: of those about as fast as the fastest, the script's own or the one with the fewest workers."""
    top = max(trial.steps_per_second or 0.0 for trial in trials)
    close = [trial for trial in trials if (trial.steps_per_second or 0.0) >= _AS_GOOD * top]
    return close[0] if close[0] is trials[0] else min(close, key=lambda t: int(t.settings.get("num_workers") or 0))


def _changes(first: Trial, best: Trial) -> list[Change]:
    """The lines to change: the arguments of each loader that differ from the script's own and have a meaning."""
    changes: list[Change] = []
    for facts in best.tuned:
        before = next((other.applied for other in first.outcome.loaders if other.place == facts.place), {})
        call = [
            f"{name}={value!r}"
            for name, value in facts.applied.items()
            if value is not None
            and value != before.get(name)
            and (facts.applied.get("num_workers") or name in {"num_workers", "pin_memory"})
            and not (name == "prefetch_factor" and value == 2 and before.get(name) is None)
        ]
        if call:
            changes.append(Change(facts.file, facts.line, f"DataLoader(..., {', '.join(call)})", facts.library))
    return changes


def _change_text(change: Change) -> str:
    relative = os.path.relpath(change.file)
    shown = change.file if relative.startswith("..") else relative
    library = f"    {change.library} makes this loader: use its own options for these settings\n"
    return f"  {shown}:{change.line}\n    {change.code}\n" + (library if change.library is not None else "")


def settings_text(settings: Settings) -> str:
    """Settings as a person types them, the number of workers first, without meaningless ones."""
    workers = settings.get("num_workers")
    shown = [f"num_workers={workers}"] if workers is not None else []
    for name in LOADER_SETTINGS[1:]:
        value = settings.get(name)
        default = (name, value) in {("in_order", True), ("persistent_workers", False), ("pin_memory", False)}
        if value is not None and not default and (workers or name == "pin_memory"):
            shown.append(f"{name}={value}")
    return " ".join(shown) or "as in the script"


def _trial_table(trials: Sequence[Trial]) -> str:
    rows, remarks = [], []
    for trial in trials:
        name, rate = settings_text(trial.settings), trial.steps_per_second
        wait, compute = ("-", "-") if trial.step_seconds is None else map(milliseconds, trial.step_seconds)
        rows.append((
            name + (" (the script's own)" if trial is trials[0] else ""),
            wait,
            compute,
            "failed" if rate is None else f"{rate:.2f}",
            "-" if trial.candidate.predicted is None else f"{trial.candidate.predicted:.2f}",
            byte_size(trial.memory_bytes) if trial.memory_bytes else "-",
            f"{trial.seconds:.0f} s",
        ))  # fmt: skip
        if trial.failed:
            last = next((line.strip() for line in reversed(trial.output) if line.strip()), "")
            remarks.append(f"  {name}: {trial.failed}{last and f'; its last line: {last}'}")
        remarks += [f"  {name}: {remark}" for remark in trial.remarks]
    return "\n".join(dict.fromkeys([*table(_HEADINGS, rows, names_first=True), *remarks])) + "\n"


def _explain(trial: Trial) -> None:
    """Print why nothing can be tuned, after the first trial."""
    if not trial.failed:
        complain("nothing can be tuned: no batch of a DataLoader was used for training")
        return
    complain(f"nothing can be tuned: {trial.failed}")
    warn("".join(f"  | {line}\n" for line in trial.output))
    if any("FileNotFoundError" in line for line in trial.output) and trial.outcome.saves:
        warn("A trial writes no checkpoint, so none can be renamed or read. Let it write them with --no-protection.\n")
    elif "DataLoader" in trial.failed:
        warn("Only DataLoaders of torch can be tuned. Draw at least a few batches, in this process or its ranks.\n")
    elif "steps" in trial.failed:
        warn("Give it more time with --start-seconds, or a shorter trial with --seconds and --warm-up.\n")
    else:
        warn("Run it without `telemetry tune` first: `python SCRIPT` must work with the same arguments.\n")
