"""The output of ``telemetry tune`` for a person: a row for each trial, bars of a grid, and the lines to change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.trial_records import LOADER_SETTINGS, SHARING
from telemetry.tune.trial_result import tuned_loaders
from telemetry.util.text import byte_size, milliseconds, rounded_percent, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.trial_records import LoaderFacts
    from telemetry.tune.trial_result import Trial

_HEADINGS: Final = ("settings", "loading", "training", "steps/s", "predicted", "memory", "trial")
_BAR: Final = 40
_SAME: Final = 1.02
"""Paces that differ by less are the same: two trials with equal settings differ as much."""


def settings_text(settings: dict[str, Any]) -> str:
    """Settings as a person types them, the number of workers first. Those without a meaning are left out."""
    workers = settings.get("num_workers")
    names = [name for name in (*LOADER_SETTINGS, SHARING) if settings.get(name) is not None]
    shown = [f"num_workers={workers}"] if workers is not None else []
    for name in names:
        default = (name, settings[name]) in {("in_order", True), ("persistent_workers", False), ("pin_memory", False)}
        if name != "num_workers" and not default and (workers or name == "pin_memory"):
            shown.append(f"{name}={settings[name]}")
    return " ".join(shown) or "as in the script"


def trial_table(trials: Sequence[Trial]) -> str:
    """A row for each trial."""
    rows = []
    for trial in trials:
        rate, predicted = trial.steps_per_second, trial.predicted
        rows.append((
            settings_text(trial.settings) + (" (the script's own)" if trial.number == 1 else ""),
            "-" if trial.step_wait_seconds is None else milliseconds(trial.step_wait_seconds),
            "-" if trial.step_compute_seconds is None else milliseconds(trial.step_compute_seconds),
            "failed" if rate is None else f"{rate:.2f}",
            "-" if predicted is None else f"{predicted:.2f}",
            byte_size(trial.memory_bytes) if trial.memory_bytes else "-",
            f"{trial.seconds:.0f} s",
        ))  # fmt: skip
    lines = table(_HEADINGS, rows, names_first=True)
    for trial in trials:
        name = settings_text(trial.settings)
        if trial.failed:
            last = next((line.strip() for line in reversed(trial.output) if line.strip()), "")
            lines.append(f"  {name}: {trial.failed}{last and f'; its last line: {last}'}")
        lines += [f"  {name}: {remark}" for remark in trial.remarks]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def bars(trials: Sequence[Trial]) -> str:
    """The pace of each trial as a bar."""
    most = max((trial.steps_per_second or 0.0 for trial in trials), default=0.0)
    if most <= 0:
        return ""
    width = max(len(settings_text(trial.settings)) for trial in trials)
    lines = []
    for trial in trials:
        rate = trial.steps_per_second
        bar = "failed" if rate is None else f"{'#' * max(1, round(_BAR * rate / most))} {rate:.2f}"
        lines.append(f"{settings_text(trial.settings).ljust(width)}  {bar}")
    return "\n".join(lines) + "\n"


def changed_lines(first: Trial, best: Trial) -> list[dict[str, Any]]:
    """The lines to change: file, line, code, and the library that makes the loader, if the script does not."""
    changes: list[dict[str, Any]] = []
    for facts in tuned_loaders(best.loaders):
        before = next((other for other in first.loaders if other.place == facts.place), None)
        new = changed_settings(before.settings if before is not None else {}, facts)
        if new:
            call = ", ".join(f"{name}={value!r}" for name, value in new.items())
            code = f"DataLoader(..., {call})"
            changes.append({"file": facts.file, "line": facts.line, "code": code, "library": facts.library})
    if best.wanted.sharing is not None:
        code = f"torch.multiprocessing.set_sharing_strategy({best.wanted.sharing!r})"
        facts = tuned_loaders(best.loaders)[0]
        changes.append({"file": facts.file, "line": facts.line, "code": code, "library": None})
    return changes


def changed_settings(before: dict[str, Any], facts: LoaderFacts) -> dict[str, Any]:
    """The arguments that differ from the script's own and have a meaning."""
    workers = facts.applied.get("num_workers")
    return {
        name: value
        for name, value in facts.applied.items()
        if value is not None
        and value != before.get(name)
        and (workers or name in {"num_workers", "pin_memory"})
        and not (name == "prefetch_factor" and value == 2 and before.get(name) is None)
    }


def verdict(first: Trial, best: Trial, why: str) -> str:
    """What to do, in one or a few lines."""
    gain = speedup(first, best)
    if gain is None:
        return ""
    changes = changed_lines(first, best)
    if best.number == first.number or gain < _SAME or not changes:
        return f"The script's own settings are the best that was found ({why}).\n"
    lines = [f"{gain:.2f} times the steps per second of the script's own settings ({why}). Change:"]
    for change in changes:
        lines.append(f"  {_shown(change['file'])}:{change['line']}")
        lines.append(f"    {change['code']}")
        if change["library"] is not None:
            lines.append(f"    {change['library']} makes this loader: use its own options for these settings")
    return "\n".join(lines) + "\n"


def evaluation_note(first: Trial) -> str:
    """A line on evaluations that take long; empty if they do not."""
    others = [f for f in first.loaders if f.evaluation_batches and not f.trains]
    if first.evaluation_ratio < 0.2 or not others:
        return ""
    places = ", ".join(f"{_shown(facts.file)}:{facts.line}" for facts in others)
    return (
        f"Evaluations took {rounded_percent(first.evaluation_ratio)} of the time. Their loader ({places}) was left as "
        "it is.\n"
    )


def speedup(first: Trial, best: Trial) -> float | None:
    """Steps per second of the best trial over those of the first; None if one of them has none."""
    if not first.steps_per_second or not best.steps_per_second:
        return None
    return best.steps_per_second / first.steps_per_second


def _shown(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
