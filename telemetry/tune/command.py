"""``telemetry tune SCRIPT``: runs the trials and prints their results."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from telemetry.agent.trial import LOADER_SETTINGS, SHARING
from telemetry.tune.process import Candidate, TrialFigures, run_trial, settings_for
from telemetry.tune.search import GridError, Limits, Search, as_run, is_grid, settings_grid
from telemetry.util.text import byte_size, complain, milliseconds, rounded_percent, show, show_json, table, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from telemetry.tune.process import Settings, Trial

_START_SECONDS: Final = 10.0
"""Expected time of a trial before its first step, for the first estimate."""

_INTERRUPTED: Final = 130
_USAGE_ERROR: Final = 2

_HEADINGS: Final = ("settings", "loading", "training", "steps/s", "predicted", "memory", "trial")
_BAR: Final = 40

_SAME: Final = 1.02
"""Paces that differ by less are equal: two trials with equal settings differ as much."""

_AS_GOOD: Final = 0.98
"""Of trials whose pace is this close to the fastest, the one with the fewest workers is the best."""

_MUCH_EVALUATION: Final = 0.2


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


def tune(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return _usage_error("start tune once on the node, without torchrun: telemetry tune --nproc-per-node N SCRIPT")
    script, parts = [options.target, *options.arguments], list(options.grid)
    while options.grid and script and is_grid(script[0]):  # --grid num_workers=0,2 prefetch_factor=2,4 SCRIPT
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


# -- trials ------------------------------------------------------------------------------------------------------


class _Tuning:
    """The trials of one command: those of the grid, or if that is empty, those that the model chooses."""

    def __init__(self, options: argparse.Namespace, folder: Path, grid: Sequence[Settings]) -> None:
        self._options = options
        self._folder = folder
        self._grid = grid
        self._trials: list[Trial] = []
        self._notes: list[str] = []

    def run(self) -> int:
        interrupted = False
        limits = Limits.measured(self._options.memory, self._options.nproc_per_node or 1)
        try:
            first = self._run_trial(Candidate({}))
            if first.failed or not first.tuned:
                _explain(first)
                return 1
            if self._grid:
                why = self._run_grid(first)
            else:
                why = self._search(dataclasses.replace(limits, loaders=len(first.tuned)))
        except KeyboardInterrupt:
            interrupted, why = True, "stopped before the end"
        except OSError as error:
            complain(f"a trial cannot be started: {error}")
            return 1
        if not self._trials:
            complain("stopped before the first trial has ended")
            return _INTERRUPTED
        status = self._print(why)
        return _INTERRUPTED if interrupted else status

    def _run_trial(self, candidate: Candidate) -> Trial:
        """Run one trial.

        Raises:
            OSError: it cannot be started.
            KeyboardInterrupt: the user has stopped the command.
        """
        number, most = len(self._trials) + 1, 1 + len(self._grid) if self._grid else self._options.trials
        folder = self._folder / str(number)
        took = [trial.seconds for trial in self._trials]
        each = sum(took) / len(took) if took else _START_SECONDS + self._options.warm_up + self._options.seconds
        name = settings_text(candidate.settings) if candidate.settings else "the script's own settings"
        warn(f"trial {number} of at most {most}: {name}; at most {(most - len(took)) * each:.0f} s left\n")
        trial = run_trial(self._options, folder, candidate, self._trials[0].tuned if self._trials else [])
        self._trials.append(trial)
        shutil.rmtree(folder, ignore_errors=True)
        return trial

    def _run_grid(self, first: Trial) -> str:
        """Run the grid, except the settings of the first trial. Settings that a loader does not get are noted."""
        left_out = {
            f"{name} is left alone at line {facts.line} of {Path(facts.file).name}: {facts.refused[name]}"
            for facts in first.tuned
            for settings in self._grid
            for name in settings.keys() - settings_for(facts, settings).keys()
        }
        self._notes = sorted(left_out)
        own = as_run(first)
        run = [own]
        for settings in self._grid:
            applied = own.copy()
            for facts in first.tuned:
                applied |= settings_for(facts, settings)
            if applied not in run:
                run.append(applied)
                self._run_trial(Candidate(settings))
        return "the grid is complete"

    def _search(self, limits: Limits) -> str:
        """Run trials until no improvement is in sight. Returns why it stopped."""
        search = Search(limits)
        while len(self._trials) < self._options.trials:
            found = search.next(self._trials)
            self._notes = search.notes
            if isinstance(found, str):
                return found
            self._run_trial(found)
        return "all trials were run"

    def _print(self, why: str) -> int:
        first, best = self._trials[0], simplest_of_the_best(self._trials)
        if self._options.json:
            gain = _speedup(first, best)
            found = TuneResult(
                first.figures,
                best.figures,
                None if gain is None else round(gain, 4),
                [trial.figures for trial in self._trials],
                _changes(first, best) if best is not first else [],
                why,
                self._notes,
            )
            return show_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        text = _trial_table(self._trials)
        text += "\n" + _bars(self._trials) if self._grid else ""
        text += "\n" + _verdict(first, best, why) + _evaluation_note(first)
        text += "".join(f"Note: {note}.\n" for note in self._notes)
        return show(text)


def simplest_of_the_best(trials: Sequence[Trial]) -> Trial:
    """The best trial: of those about as fast as the fastest, the script's own or the one with the fewest workers."""
    top = max(trial.steps_per_second or 0.0 for trial in trials)
    close = [trial for trial in trials if (trial.steps_per_second or 0.0) >= _AS_GOOD * top]
    return close[0] if close[0] is trials[0] else min(close, key=lambda t: int(t.settings.get("num_workers") or 0))


def _explain(trial: Trial) -> None:
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


# -- text --------------------------------------------------------------------------------------------------------


def settings_text(settings: Settings) -> str:
    """Settings as a person types them, the number of workers first, without meaningless ones."""
    workers = settings.get("num_workers")
    shown = [f"num_workers={workers}"] if workers is not None else []
    for name in (*LOADER_SETTINGS[1:], SHARING):
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


def _bars(trials: Sequence[Trial]) -> str:
    most = max(trial.steps_per_second or 0.0 for trial in trials)
    names = [settings_text(trial.settings) for trial in trials]
    lines = []
    for trial, name in zip(trials, names, strict=True):
        rate = trial.steps_per_second
        bar = "failed" if rate is None else f"{'#' * max(1, round(_BAR * rate / most))} {rate:.2f}"
        lines.append(f"{name.ljust(max(map(len, names)))}  {bar}\n")
    return "".join(lines)


def _verdict(first: Trial, best: Trial, why: str) -> str:
    gain = _speedup(first, best)
    if gain is None:
        return ""
    changes = _changes(first, best)
    if best is first or gain < _SAME or not changes:
        return f"The script's own settings are the best that was found ({why}).\n"
    lines = [f"{gain:.2f} times the steps per second of the script's own settings ({why}). Change:"]
    for change in changes:
        lines += [f"  {_shown(change.file)}:{change.line}", f"    {change.code}"]
        if change.library is not None:
            lines.append(f"    {change.library} makes this loader: use its own options for these settings")
    return "\n".join(lines) + "\n"


def _speedup(first: Trial, best: Trial) -> float | None:
    before, after = first.steps_per_second, best.steps_per_second
    return after / before if before and after else None


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
    if SHARING in best.candidate.settings:
        code = f"torch.multiprocessing.set_sharing_strategy({best.candidate.settings[SHARING]!r})"
        changes.append(Change(best.tuned[0].file, best.tuned[0].line, code, None))
    return changes


def _evaluation_note(first: Trial) -> str:
    evidence, others = first.evidence, [f for f in first.outcome.loaders if f.evaluation_batches and not f.trains]
    ratio = 0.0 if evidence is None else evidence.evaluation_seconds / evidence.window_seconds
    if ratio < _MUCH_EVALUATION or not others:
        return ""
    places = ", ".join(f"{_shown(facts.file)}:{facts.line}" for facts in others)
    return f"Evaluations took {rounded_percent(ratio)} of the time. Their loader ({places}) was left as it is.\n"


def _shown(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
