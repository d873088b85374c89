"""``telemetry tune SCRIPT``: runs the trials and prints what was found."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.trial_records import SHARING, TrialPlan
from telemetry.tune import tune_text
from telemetry.tune.memory_room import MemoryRoom, shared_memory_left
from telemetry.tune.next_trial import Search, Stop, as_run, fastest
from telemetry.tune.progress import Progress
from telemetry.tune.settings_grid import settings_grid
from telemetry.tune.settings_limits import Limits, usable_cores
from telemetry.tune.trial_process import Launch, remove_folder, run_trial
from telemetry.tune.trial_result import Settings, Trial, result_of, settings_for, tuned_loaders
from telemetry.util.files import dump_object
from telemetry.util.text import complain, show, show_json, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

_START_SECONDS: Final = 10.0
"""What a trial is expected to take before its first step, for the first estimate."""

_MAX_SHARE: Final = 6.0
"""A trial may take this many times the seconds that it measures: evaluations do not count as measured."""

_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The command's options.

    Attributes:
        launch: how the script is started.
        seconds, steps, warm_up_seconds, start_seconds: see `TrialPlan`.
        trials: the most trials, the first included.
        grid: parts of an exhaustive grid; empty to let the model choose.
        memory: the most bytes that a trial may take; None for what the machine has.
        writable: files and folders that a trial may change. ``protect``: whether others are protected.
        as_json: print one JSON object.
    """

    launch: Launch
    seconds: float = 10.0
    steps: int | None = None
    warm_up_seconds: float = 3.0
    start_seconds: float = 600.0
    trials: int = 5
    grid: tuple[str, ...] = ()
    memory: int | None = None
    writable: tuple[str, ...] = ()
    protect: bool = True
    as_json: bool = False


class Tuning:
    """The trials of one command.

    Args:
        options: the command's options.
        folder: for the files of the trials.
        most_trials: how many trials there will be at most.
    """

    def __init__(self, options: TuneOptions, folder: Path, most_trials: int) -> None:
        self._options = options
        self._folder = folder
        self._memory = MemoryRoom(options.memory)
        self._progress = Progress(most_trials)
        self.trials: list[Trial] = []
        self.room = self._memory.now()

    def run(self, wanted: Settings, predicted: float | None = None) -> Trial:
        """Run one trial.

        Raises:
            OSError: it cannot be started.
            KeyboardInterrupt: the user wants no more.
        """
        options, number = self._options, len(self.trials) + 1
        folder = self._folder / str(number)
        folder.mkdir()
        shown = wanted.loader | ({} if wanted.sharing is None else {SHARING: wanted.sharing})
        name = tune_text.settings_text(shown) if shown else "the script's own settings"
        self._progress.begin(number, name, _START_SECONDS + options.warm_up_seconds + options.seconds)
        plan = TrialPlan(
            folder=str(folder),
            seconds=options.seconds,
            steps=options.steps,
            warm_up_seconds=options.warm_up_seconds,
            start_seconds=options.start_seconds,
            max_seconds=options.warm_up_seconds + _MAX_SHARE * options.seconds,
            loaders={facts.place: settings_for(facts, wanted) for facts in self._tuned()},
            sharing_strategy=wanted.sharing,
            protect=options.protect,
            writable=tuple(str(Path(path).absolute()) for path in options.writable),
        )
        try:
            ended = run_trial(options.launch, plan, self._memory, self._progress.tick)
        finally:
            self._progress.end()
        place = next((facts.place for facts in self._tuned()), None)
        trial = result_of(number, wanted, predicted, ended, place)
        self.trials.append(trial)
        remove_folder(folder)
        return trial

    def limits(self) -> Limits:
        """What the machine can hold, after the first trial."""
        ranks = self._options.launch.ranks or 1
        return Limits(self.room, shared_memory_left(), usable_cores(), ranks, max(1, len(self._tuned())))

    def _tuned(self) -> Sequence[Any]:
        return tuned_loaders(self.trials[0].loaders) if self.trials else ()


def tune(options: TuneOptions) -> int:
    """Run the trials and print the result. Returns the exit status.

    Raises:
        GridError: the grid cannot be understood.
    """
    grid = settings_grid(options.grid) if options.grid else []
    most = 1 + len(grid) if grid else options.trials
    with tempfile.TemporaryDirectory(prefix="telemetry-tune-", ignore_cleanup_errors=True) as folder:
        tuning = Tuning(options, Path(folder), most)
        notes: list[str] = []
        interrupted = False
        why = "the grid is complete"
        try:
            if not _first(tuning):
                return 1
            if grid:
                _all_of(tuning, grid, notes)
            else:
                why = search_settings(tuning, options.trials, notes)
        except KeyboardInterrupt:
            interrupted, why = True, "stopped before the end"
        except OSError as error:
            complain(f"a trial cannot be started: {error}")
            return 1
    if not tuning.trials:
        complain("stopped before the first trial has ended")
        return _INTERRUPTED
    status = _print(tuning, why, notes, as_json=options.as_json, grid=bool(grid))
    return _INTERRUPTED if interrupted else status


def _first(tuning: Tuning) -> bool:
    """Run the script as it is. Returns whether it can be tuned; if not, the reason was printed."""
    trial = tuning.run(Settings())
    if trial.failed:
        complain(f"nothing can be tuned: {trial.failed}")
        if trial.output:
            warn("".join(f"  | {line}\n" for line in trial.output))
        warn(_help_with(trial))
        return False
    if not tuned_loaders(trial.loaders):
        complain("nothing can be tuned: no batch of a DataLoader was used for training")
        return False
    return True


def _help_with(trial: Trial) -> str:
    text = "\n".join(trial.output)
    if "ProtectedFileError" in text:
        return "Allow the change with --writable PATH, or give the script another folder for its output.\n"
    if "DataLoader" in trial.failed:
        return "Only DataLoaders of torch can be tuned. Draw at least a few batches, in this process or its ranks.\n"
    if "steps" in trial.failed:
        return "Give it more time with --start-seconds, or a shorter trial with --seconds and --warm-up.\n"
    return "Run it without `telemetry tune` first: `python SCRIPT` must work with the same arguments.\n"


def _all_of(tuning: Tuning, grid: Sequence[Settings], notes: list[str]) -> None:
    """Run the grid, without what the first trial has run already. Settings that a loader does not get are noted."""
    first = tuning.trials[0]
    own, tuned = as_run(first), tuned_loaders(first.loaders)
    left_out = {
        f"{name} is left alone at line {facts.line} of {Path(facts.file).name}: {facts.refused[name]}"
        for facts in tuned
        for settings in grid
        for name in settings.loader.keys() - settings_for(facts, settings).keys()
    }
    notes += sorted(left_out)
    run = {own.key()}
    for settings in grid:
        applied = dict(setting for facts in tuned for setting in settings_for(facts, settings).items())
        key = Settings(own.loader | applied, settings.sharing).key()
        if key not in run:
            run.add(key)
            tuning.run(settings)


def search_settings(tuning: Tuning, most: int, notes: list[str]) -> str:
    """Run trials until no improvement is in sight. Returns why it stopped."""
    search = Search(tuning.limits())
    try:
        while len(tuning.trials) < most:
            found = search.next(tuning.trials)
            if isinstance(found, Stop):
                return found.because
            tuning.run(found.settings, found.predicted)
        return "all trials were run"
    finally:
        notes += search.notes


def _print(tuning: Tuning, why: str, notes: Sequence[str], *, as_json: bool, grid: bool) -> int:
    first, best = tuning.trials[0], simplest_of_the_best(tuning.trials)
    if as_json:
        gain = tune_text.speedup(first, best)
        found = {
            "baseline": first.as_json(),
            "best": best.as_json(),
            "speedup": None if gain is None else round(gain, 4),
            "trials": [trial.as_json() for trial in tuning.trials],
            "changes": tune_text.changed_lines(first, best) if best is not first else [],
            "stopped": why,
            "notes": list(notes),
        }
        return show_json(dump_object(found, indent=2).decode())
    text = tune_text.trial_table(tuning.trials)
    text += "\n" + tune_text.bars(tuning.trials) if grid else ""
    text += "\n" + tune_text.verdict(first, best, why) + tune_text.evaluation_note(first)
    text += "".join(f"Note: {note}.\n" for note in notes)
    return show(text)


_AS_GOOD: Final = 0.98
"""Of trials whose pace is this close to the fastest, the one with the fewest workers is the best."""


def simplest_of_the_best(trials: Sequence[Trial]) -> Trial:
    """The best trial: of those about as fast as the fastest, the script's own or the one with the fewest workers."""
    top = fastest(trials)
    if top is None or top.steps_per_second is None:
        return trials[0]
    close = [trial for trial in trials if (trial.steps_per_second or 0.0) >= _AS_GOOD * top.steps_per_second]
    return min(close, key=lambda trial: (trial.number != 1, int(trial.settings.get("num_workers") or 0), trial.number))
