"""``telemetry tune SCRIPT``: finds better DataLoader settings with short trials of the unchanged script.

A trial is the script in a process of its own (`telemetry.agent.trial`). The first one has the script's own settings.
The others are those of ``--grid``, or else the usual ones: more and more workers, then `prefetch_factor` and
`pin_memory`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from telemetry.agent.trial import TrialPlan, TrialResult, result_path
from telemetry.config import ENV_PREFIX, TRIAL_VARIABLE
from telemetry.diagnosis.model import MAX_WORKERS, MAX_WORKERS_PER_CORE
from telemetry.model.records import LoaderSettings
from telemetry.util.words import complain, milliseconds, show, show_json, table, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOADER_SETTINGS: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "multiprocessing_context",
    "in_order",
)
"""The arguments of DataLoader that can be tuned."""

# -- one trial ---------------------------------------------------------------------------------------------------------

_MIN_STEPS: Final = 2
"""With fewer steps a trial has no pace."""

_POLL_SECONDS: Final = 0.05
_END_SECONDS: Final = 5.0
"""How long a trial may take to end by itself, between two steps, when all ranks have measured."""

_KILLS: Final = 10
"""A process that is just being started shows no environment yet, so it may be seen only by the next look."""

_FIRST_VICTIM: Final = "800"
"""If memory is short, the kernel ends a trial before anything else."""

_LAST_LINES: Final = 15


class Figures(msgspec.Struct, frozen=True):
    """A trial in ``telemetry tune --json``. What is not known is None.

    Attributes:
        settings: those of the loader.
        steps_per_second: the pace of the slowest rank, which is that of all.
        wait_ratio: share of the training loop that was exposed wait, on the rank with the most.
        seconds: length from start to end. ``steps``: that were measured.
        failed: why it has no pace.
    """

    settings: LoaderSettings
    steps_per_second: float | None
    wait_ratio: float | None
    seconds: float
    steps: int
    failed: str | None
    predicted_steps_per_second: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Trial:
    """One trial that has ended.

    Attributes:
        wanted: the settings that were changed.
        result: that of the slowest rank; without a pace that of any; None without any.
        output: the last lines that the script printed.
    """

    wanted: LoaderSettings
    figures: Figures
    result: TrialResult | None
    output: tuple[str, ...]

    @property
    def pace(self) -> float:
        """Steps per second; 0 if it has failed."""
        return self.figures.steps_per_second or 0.0

    @property
    def workers(self) -> int:
        """How many workers the loader has."""
        return int(self.figures.settings["num_workers"] or 0)

    @property
    def waits(self) -> bool:
        """Whether a faster loader could help; also after a failure."""
        return self.figures.wait_ratio is None or self.figures.wait_ratio >= _WORTH_A_TRIAL


def run_trial(options: argparse.Namespace, folder: Path, wanted: LoaderSettings) -> Trial:
    """Run one trial to its end.

    Args:
        options: options of the command.
        folder: folder for the files of the trial, which is made.
        wanted: the settings to change.

    Raises:
        OSError: the trial cannot be started.
        KeyboardInterrupt: the user has stopped the command. All processes of the trial have ended.
    """
    for new in (folder, folder / "tmp", folder / "work"):
        new.mkdir()
    plan = TrialPlan(str(folder), wanted, options.warm_up, options.seconds, options.steps, options.no_protection)
    paths = [result_path(str(folder), rank) for rank in range(options.nproc_per_node or 1)]
    began = time.monotonic()
    status = _run(options, folder, msgspec.json.encode(plan).decode(), paths)
    results = [msgspec.json.decode(path.read_bytes(), type=TrialResult) for path in paths if path.exists()]
    measured = [each for each in results if each.steps >= _MIN_STEPS and each.seconds > 0]
    result = min(measured or results, key=lambda each: each.steps / max(each.seconds, 1e-9), default=None)
    steps = 0 if result is None else result.steps
    failed = pace = None
    if result is not None and measured:
        pace = round(steps / result.seconds, 4)
    elif status is None:
        failed = f"too few steps ended within {options.timeout:.0f} s: raise --timeout, or lower --seconds"
    elif status:
        failed = f"the script failed ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
    else:
        failed = f"the script ended after {steps} measured steps"
    known = {} if result is None else result.settings
    lines = (folder / "output.txt").read_bytes()[-20000:].decode("utf-8", "replace").splitlines()
    figures = Figures(
        settings={name: known.get(name, wanted.get(name)) for name in LOADER_SETTINGS},
        steps_per_second=pace,
        wait_ratio=round(max(each.wait_ratio for each in measured), 4) if measured else None,
        seconds=round(time.monotonic() - began, 3),
        steps=steps,
        failed=failed,
    )
    return Trial(wanted, figures, result, tuple(lines[-_LAST_LINES:]))


def _run(options: argparse.Namespace, folder: Path, plan: str, results: Sequence[Path]) -> int | None:
    """Run the script until all ranks have written their results. Returns the exit status; None if it did not end."""
    try:
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                _command(options, folder),
                cwd=folder / "work" if options.scratch else None,
                env=_environment(plan, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        until = time.monotonic() + options.timeout
        while process.poll() is None and time.monotonic() < until:
            if all(path.exists() for path in results):
                until = min(until, time.monotonic() + _END_SECONDS)
            time.sleep(_POLL_SECONDS)
        return process.poll()
    finally:
        _end_all(plan)  # Ctrl-C may come while the process is being started, so it is looked for, too


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    script = options.target
    if options.scratch and not options.module:
        script = str(Path(script).absolute())
    launcher = [sys.executable]
    if options.nproc_per_node is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc_per_node)]
    agent = ["-m", "telemetry", "run", "--run-dir", str(folder / "run"), *(["-m"] if options.module else [])]
    return [*launcher, *agent, script, *options.arguments]


def _environment(plan: str, folder: Path) -> dict[str, str]:
    """The variables of a trial: those of this process, without settings of the agent, and with trackers off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', os.getuid())}"
    return kept | {
        TRIAL_VARIABLE: plan,
        "TELEMETRY_PORT": "off",
        "TELEMETRY_INTERVAL_SECONDS": "0.25",
        "TELEMETRY_MAX_SNAPSHOTS": "0",
        "TELEMETRY_START_LINE": "off",
        "TELEMETRY_END_LINE": "off",
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": kept.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlflow'}",
        "COMET_MODE": "disabled",
    }


def _end_all(plan: str) -> None:
    """End every process of a trial, which all inherit its plan. A signal that a script can handle would let it save."""
    for _ in range(_KILLS):
        left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(TRIAL_VARIABLE) == plan]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if not left:
            return
        psutil.wait_procs(left, timeout=1)


# -- which settings are tried ------------------------------------------------------------------------------------------

_DEFAULT_PREFETCH: Final = 2

_WORTH_A_TRIAL: Final = 0.03
"""With a smaller share of waits, a faster loader does not help: what is faster then is faster by chance."""

_SLOWER: Final = 0.95
"""A smaller difference may be chance: then the next number of workers is tried, too."""

_AS_GOOD: Final = 0.98
"""Paces that are this close are equal: two trials with equal settings differ as much."""


def settings_grid(parts: Sequence[str]) -> list[LoaderSettings]:
    """All combinations of ``NAME=VALUE,VALUE`` parts, without duplicates in effect.

    Raises:
        ValueError: a name is unknown; the text says which.
    """
    values: dict[str, list[Any]] = {}
    for part in parts:
        name, _, text = part.partition("=")
        if name not in LOADER_SETTINGS:
            raise ValueError(
                f"{name!r} is not a setting of a DataLoader that can be tuned: {', '.join(LOADER_SETTINGS)}"
            )
        values.setdefault(name, []).extend(_value(one) for one in text.split(","))
    found: list[LoaderSettings] = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        if settings.get("num_workers") == 0:  # the others have no meaning without workers
            settings = {name: value for name, value in settings.items() if name in {"num_workers", "pin_memory"}}
        if settings not in found:
            found.append(settings)
    return found


def _value(text: str) -> str | int | bool:
    return int(text) if text.isdecimal() else {"True": True, "False": False}.get(text, text)


def _usual(trials: Sequence[Trial], most: int) -> Iterator[LoaderSettings]:
    """More and more workers until it is slower twice or waits no more; then the other settings of the best trial.

    ``trials``: those that were run, which become more between two settings. The first is the script as it is.
    ``most``: the most workers.
    """
    own = trials[0]
    counts = {0, *(2**power for power in range(most.bit_length())), own.workers}
    fastest, slower = 0.0, 0
    for count in sorted(counts) if own.waits else ():
        if count != own.workers:
            yield {"num_workers": count}
        trial = own if count == own.workers else trials[-1]
        fastest = max(fastest, trial.pace)
        slower = slower + 1 if trial.pace < _SLOWER * fastest else 0
        if slower == 2 or not trial.waits:
            break
    best = best_of(trials)
    if best.workers and best.waits:
        factor = int(best.figures.settings["prefetch_factor"] or _DEFAULT_PREFETCH)
        yield {**best.wanted, "prefetch_factor": 2 * factor}
    best = best_of(trials)
    if own.result is not None and own.result.on_gpu and not best.figures.settings["pin_memory"]:
        yield {**best.wanted, "pin_memory": True}


def best_of(trials: Sequence[Trial]) -> Trial:
    """Of the trials about as fast as the fastest, the script's own or the one with the fewest workers."""
    top = max(trial.pace for trial in trials)
    close = [trial for trial in trials if trial.pace >= _AS_GOOD * top]
    return close[0] if close[0] is trials[0] else min(close, key=lambda trial: trial.workers)


# -- the command -------------------------------------------------------------------------------------------------------

_INTERRUPTED: Final = 130
_USAGE_ERROR: Final = 2

_OWN: Final = "the script's own settings"
_ONE_WORKER: Final = (
    "more than one worker was not tried: the IterableDataset does not call get_worker_info(), so each worker would "
    "give all items"
)
_HEADINGS: Final = ("settings", "loading", "training", "steps/s", "trial")


class Change(msgspec.Struct, frozen=True):
    """What to change, and the line that iterates the loader."""

    file: str
    line: int
    code: str


class TuneResult(msgspec.Struct, frozen=True):
    """The output of ``telemetry tune --json``."""

    baseline: Figures
    best: Figures
    speedup: float
    trials: list[Figures]
    changes: list[Change]
    notes: list[str]


def tune(**given: Any) -> int:
    """Run the command with its options, see `telemetry.cli`. Returns the exit status."""
    options = argparse.Namespace(**given)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return _usage_error("start tune once on the node, without torchrun: telemetry tune --nproc-per-node N SCRIPT")
    parts, script = list(options.grid), [options.target, *options.arguments]
    while parts and script and script[0].partition("=")[0] in LOADER_SETTINGS:  # --grid num_workers=0,2 pin_memory=True
        parts.append(script.pop(0))
    if not script:
        return _usage_error("there is no script to tune")
    options.target, *options.arguments = script
    if not options.module and not Path(options.target).is_file():
        return _usage_error(f"cannot open {options.target}: there is no such file")
    try:
        grid = settings_grid(parts)
    except ValueError as error:
        return _usage_error(str(error))
    with tempfile.TemporaryDirectory(prefix="telemetry-tune-", ignore_cleanup_errors=True) as folder:
        return _tune(options, Path(folder), grid if parts else None)


def _usage_error(message: str) -> int:
    complain(message)
    return _USAGE_ERROR


def _tune(options: argparse.Namespace, folder: Path, grid: Sequence[LoaderSettings] | None) -> int:
    trials: list[Trial] = []
    notes: list[str] = []
    status = 0
    try:
        _add_trial(trials, options, folder, {})
        own, first = trials[0], trials[0].result
        if first is None or own.figures.failed or own.figures.settings["num_workers"] is None:
            return _explain(own)
        most = max(1, min(MAX_WORKERS, int(MAX_WORKERS_PER_CORE * first.cores / (options.nproc_per_node or 1))))
        one_at_most = first.one_worker_at_most and own.workers < 2  # with more, the script knows what it does
        if one_at_most:
            most = 1
            notes.append(_ONE_WORKER)
        for wanted in _usual(trials, most) if grid is None else grid:
            too_many = one_at_most and int(wanted.get("num_workers") or 0) > 1
            if not too_many and not wanted.items() <= own.figures.settings.items():
                _add_trial(trials, options, folder, wanted)
        if len(trials) == 1 and grid is None:
            notes.append("no others were tried: the training hardly waits for data")
    except KeyboardInterrupt:
        status = _INTERRUPTED
        notes.append("stopped before the end")
    except OSError as error:
        complain(f"a trial cannot be started: {error}")
        return 1
    if not trials:
        complain("stopped before the first trial has ended")
        return status
    return _show(trials, notes, as_json=options.as_json) or status


def _add_trial(trials: list[Trial], options: argparse.Namespace, folder: Path, wanted: LoaderSettings) -> None:
    warn(f"trial {len(trials) + 1}: {settings_text(wanted) or _OWN}\n")
    own_folder = folder / str(len(trials) + 1)
    trials.append(run_trial(options, own_folder, wanted))
    shutil.rmtree(own_folder, ignore_errors=True)


def _explain(trial: Trial) -> int:
    """Print why nothing can be tuned, after the first trial. Returns the exit status."""
    complain(f"nothing can be tuned: {trial.figures.failed or 'the batches come from no DataLoader of torch'}")
    warn("".join(f"  | {line}\n" for line in trial.output))
    if trial.result is not None and trial.result.unsaved:
        warn("A trial writes no checkpoint, so none can be renamed or read. Let it write them with --no-protection.\n")
    return 1


def _show(trials: Sequence[Trial], notes: list[str], *, as_json: bool) -> int:
    own, best = trials[0], best_of(trials)
    gain = best.pace / own.pace
    changes = []
    if best is not own and best.result is not None and best.result.iterated_at is not None:
        file, line, _ = best.result.iterated_at
        changes = [Change(file, line, f"DataLoader(..., {', '.join(f'{n}={v!r}' for n, v in best.wanted.items())})")]
    unsaved = max(trial.result.unsaved for trial in trials if trial.result is not None)
    notes += [f"up to {unsaved} checkpoints of a trial were not written"] if unsaved else []
    if as_json:
        found = TuneResult(own.figures, best.figures, round(gain, 4), [t.figures for t in trials], changes, notes)
        return show_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    text = _trial_table(trials)
    if best is own:
        text += "The script's own settings are the best that was found.\n"
    else:
        text += f"{gain:.2f} times the steps per second of the script's own settings. Change the loader of:\n"
        text += "".join(f"  {_near(change.file)}:{change.line}\n    {change.code}\n" for change in changes)
    return show(text + "".join(f"Note: {note}.\n" for note in notes))


def _near(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def settings_text(settings: LoaderSettings) -> str:
    """Settings as a person types them, without those that are the default or unknown."""
    default = {"in_order": True, "persistent_workers": False, "pin_memory": False}
    return " ".join(f"{n}={v}" for n, v in settings.items() if v is not None and v != default.get(n))


def _trial_table(trials: Sequence[Trial]) -> str:
    rows, remarks = [], []
    for trial in trials:
        figures, rate = trial.figures, trial.pace
        name, wait = settings_text(figures.settings), figures.wait_ratio or 0.0
        rows.append((
            f"{name} (the script's own)" if trial is trials[0] else name,
            milliseconds(wait / rate) if rate else "-",
            milliseconds((1 - wait) / rate) if rate else "-",
            f"{rate:.2f}" if rate else "failed",
            f"{figures.seconds:.0f} s",
        ))  # fmt: skip
        if figures.failed:
            last = next((line.strip() for line in reversed(trial.output) if line.strip()), "")
            remarks.append(f"  {name}: {figures.failed}{last and f'; its last line: {last}'}")
        elif trial.result is not None and trial.result.early:
            remarks.append(f"  {name}: the script ended before the trial did; what was measured until then counts")
    return "\n".join([*table(_HEADINGS, rows, names_first=True), *remarks]) + "\n"
