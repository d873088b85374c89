"""One trial: the script in a process of its own, whose memory is watched, and its results."""

from __future__ import annotations

import os
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

from telemetry.agent.trial import ENDED_LATE, ENDED_SCRIPT, SHARING, TrialOutcome, TrialPlan, outcome_path
from telemetry.config import ENV_PREFIX, TRIAL_VARIABLE
from telemetry.sources.cgroup import MemoryLimit, MemoryLimits

if TYPE_CHECKING:
    import argparse

    from telemetry.agent.trial import LoaderFacts
    from telemetry.diagnosis.evidence import Evidence

Settings = dict[str, Any]
"""Settings of loaders, and the sharing strategy, by name."""

_MIN_STEPS: Final = 2
"""With fewer steps a trial has no pace."""

_SHARE_OF_WAIT: Final = 0.1
"""A loader is tuned if the training waits for it for at least this share of its waits."""

_MAX_SHARE: Final = 6.0
"""A trial may take this many times the seconds that it measures: evaluations do not count as measured."""

_POLL_SECONDS: Final = 0.05
_MEMORY_SECONDS: Final = 2.0
"""Time between two readings of every process's memory. One takes some milliseconds for each."""

_RESERVE: Final = 0.08
"""A trial is ended when less than this share of the memory is left."""

_LIMITS: Final = MemoryLimits(Path("/proc"), Path("/sys/fs/cgroup"))
_NO_LIMIT: Final = 1 << 60
_MEMORY_SHORT: Final = "memory was short"

_PATIENCE_SECONDS: Final = 60.0
"""A trial may exceed its own limits by this time before it is ended from outside."""

_LAST_LINES: Final = 15
_FIRST_VICTIM: Final = "800"
"""If memory is short nevertheless, the kernel ends a trial before anything else."""


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


class Candidate(NamedTuple):
    """Settings to try. ``predicted``: steps per second; None without a prediction."""

    settings: Settings
    predicted: float | None = None


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
        wanted = self.candidate.settings
        shared = {SHARING: wanted[SHARING]} if SHARING in wanted else {}
        return {**(shown[0].applied if shown else wanted), **shared}

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
        found: list[str] = []
        outcome = self.outcome
        if outcome.end == ENDED_SCRIPT:
            how = f" with exit status {self.status}" if self.status else ""
            found.append(f"the script ended{how} before the trial did; what was measured until then counts")
            if not outcome.warm:
                found.append("that includes the first steps, which may be slower")
        if outcome.end == ENDED_LATE and outcome.steps:
            found.append(f"only {outcome.steps} steps ended in time")
        if outcome.saves:
            found.append(f"{outcome.saves} checkpoints were not written")
        if outcome.hook_errors:
            found.append(f"{outcome.hook_errors} hooks failed")
        return found

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
        if name not in facts.refused or is_harmless(name, value, facts.max_workers)
    }


def is_harmless(name: str, value: Any, max_workers: int) -> bool:
    """Whether a value of a setting that must not be changed freely is safe nevertheless."""
    if name == "num_workers":
        return bool(value <= max_workers)
    return (name, value) in {("in_order", True), ("persistent_workers", False)}


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
        sharing_strategy=candidate.settings.get(SHARING),
        saves=options.no_protection,
    )
    for new in (folder, folder / "tmp", folder / "work"):
        new.mkdir()
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    ranks = options.nproc_per_node or 1
    began = time.monotonic()
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
    files = _outcome_files(plan.folder, ranks)
    outcomes = tuple(msgspec.json.decode(file.read_bytes(), type=TrialOutcome) for file in files)
    lines = (folder / "output.txt").read_bytes()[-20000:].decode("utf-8", "replace").splitlines()
    return Trial(
        candidate=candidate,
        place=tuned[0].place if tuned else None,
        outcomes=outcomes,
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
        if ranks > 1 and len(_outcome_files(plan.folder, ranks)) == ranks:
            return ""  # they end one by one, and torchrun would take the first for a failure
        time.sleep(_POLL_SECONDS)
    return ""


def _outcome_files(folder: str, ranks: int) -> list[Path]:
    return [path for rank in range(ranks) if (path := outcome_path(folder, rank)).exists()]


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
        most: the most bytes that it may take; None for the limit of the machine.

    Attributes:
        most: the most bytes of all processes together so far. ``sizes``: bytes of each at that time, by pid.
    """

    def __init__(self, plan: str, most: int | None) -> None:
        self._plan = plan
        self._allowed = most
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
