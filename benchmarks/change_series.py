"""Measures how often a lasting change of the steps is found, how soon, and how often one is found that is not there.

    python -m benchmarks.change_series [--days 20] [--runs 40] [--output FOLDER]

The loops are simulated (`benchmarks.step_series`), and go through the agent's own code from the totals of a tick on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.step_series import Loop, ticks
from telemetry.diagnosis.changes import ChangeDetector
from telemetry.log.lines import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable

DAY: Final = 86_400.0
AT: Final = 5400.0
"""When the change happens, seconds from the start."""

STEADY: Final = {
    "quiet": Loop(scatter=0.01),
    "noisy": Loop(scatter=0.10),
    "other processes come and go": Loop(scatter=0.05, memory=0.95),
    "a random mix of sequence lengths": Loop(long_share=0.3),
    "long sequences, 5 of 25 minutes": Loop(long_share=0.2, long_seconds=300),
    "pauses of a minute, ten a day": Loop(pause_every_seconds=DAY / 10, pause_seconds=60),
    "epochs of 10 minutes with evaluations": Loop(epoch_seconds=600, evaluation_seconds=60),
    "epochs of 20 seconds": Loop(epoch_seconds=20, evaluation_seconds=5),
    "starved": Loop(wait_share=0.7, scatter=0.05),
}

_HOURS: Final = 3600.0


def _sudden(wait: float, compute: float) -> Callable[[float], tuple[float, float]]:
    return lambda now: (wait, compute) if now >= AT else (1.0, 1.0)


CHANGES: Final = {
    "compute 12 % longer": Loop(slower=_sudden(1.0, 1.12)),
    "compute 12 % longer, noisy": Loop(scatter=0.10, slower=_sudden(1.0, 1.12)),
    "compute 12 % longer, others come and go": Loop(scatter=0.05, memory=0.95, slower=_sudden(1.0, 1.12)),
    "GPU clock 1980 to 1410 MHz": Loop(slower=_sudden(1.0, 1.98 / 1.41)),
    "waits twice as long (10 % of a step)": Loop(slower=_sudden(2.0, 1.0)),
    "compute 12 % longer, epochs with evaluations": Loop(
        epoch_seconds=600, evaluation_seconds=60, slower=_sudden(1.0, 1.12)
    ),
    "25 % longer over 4 hours": Loop(slower=lambda now: (1.0, 1 + 0.25 * min(1.0, max(0.0, now - AT) / 4 / _HOURS))),
}


def changes_in(loop: Loop, seconds: float, seed: int) -> list[tuple[float, dict[str, Any]]]:
    """The changes that are logged, each with when it was logged, in seconds from the start."""
    logged: list[tuple[float, dict[str, Any]]] = []
    detector = ChangeDetector()
    for totals, newest in ticks(loop, seconds, random.Random(seed)):
        change = detector.tick(totals, newest)
        if change is not None:
            logged.append((totals.wall_seconds, fields_of(change.line(str(change.at.at_seconds)))))
    return logged


def steady(loop: Loop, days: int) -> float:
    """Changes a day that are logged although there is none: of runs of a day each."""
    return sum(len(changes_in(loop, DAY, seed)) for seed in range(days)) / days


def found(loop: Loop, runs: int) -> dict[str, Any]:
    """How many slow-downs are found within 6 hours, the minutes until then, and the ratio that is logged."""
    delays, ratios, missed = [], [], 0
    for seed in range(runs):
        after = [(now, fields) for now, fields in changes_in(loop, AT + 6 * _HOURS, 1000 + seed) if now > AT]
        slower = [(now, fields["ratio"]) for now, fields in after if fields["ratio"] > 1]
        if slower:
            delays.append((slower[0][0] - AT) / 60)
            ratios.append(slower[0][1])
        else:
            missed += 1
    delays.sort()
    return {
        "found": 1 - missed / runs,
        "median_minutes": statistics.median(delays) if delays else None,
        "p95_minutes": delays[round(0.95 * (len(delays) - 1))] if delays else None,
        "median_ratio": statistics.median(ratios) if ratios else None,
    }


def measure(days: int, runs: int) -> dict[str, Any]:
    """All figures."""
    return {
        "days": days,
        "runs": runs,
        "false_per_day": {name: steady(loop, days) for name, loop in STEADY.items()},
        "changes": {name: found(loop, runs) for name, loop in CHANGES.items()},
    }


def text_of(figures: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = [
        "# Changes within a run",
        "",
        f"By `python -m benchmarks.change_series --days {figures['days']} --runs {figures['runs']}`. The loops are",
        "simulated; the agent's own code judges them.",
        "",
        f"## Nothing has changed ({figures['days']} days each)",
        "",
        "| Loop | Changes logged a day |",
        "| --- | --- |",
        *(f"| {name} | {value:.2f} |" for name, value in figures["false_per_day"].items()),
        "",
        f"## Slow-downs ({figures['runs']} runs each)",
        "",
        "| Change | Found within 6 h | Minutes until then: median, 95 % | Ratio logged, median |",
        "| --- | --- | --- | --- |",
        *(_row(name, each) for name, each in figures["changes"].items()),
        "",
    ]
    return "\n".join(lines)


def _row(name: str, each: dict[str, Any]) -> str:
    if each["median_minutes"] is None:
        return f"| {name} | 0 % | - | - |"
    minutes = f"{each['median_minutes']:.0f}, {each['p95_minutes']:.0f}"
    return f"| {name} | {100 * each['found']:.0f} % | {minutes} | {each['median_ratio']:.2f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.change_series", description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=20, help="simulated days of each loop that does not change")
    parser.add_argument("--runs", type=int, default=40, help="simulated runs of each change")
    parser.add_argument("--output", type=Path, help="also write changes.json and changes.md into this folder")
    options = parser.parse_args()
    figures = measure(options.days, options.runs)
    text = text_of(figures)
    print(text)
    if options.output:
        (options.output / "changes.json").write_text(json.dumps(figures, indent=1) + "\n")
        (options.output / "changes.md").write_text(text)


if __name__ == "__main__":
    main()
