"""What a reader of a comparison must know about the logs and the runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from telemetry.compare.pace_interval import FEWEST_BLOCKS, MIN_BLOCKS
from telemetry.compare.run_pair import turns_of
from telemetry.report.process_log import child_processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.compare.run_pair import Run

_EXPECTED: Final = frozenset({"node"})
"""Runs of one version may well differ in it."""


def notes_on(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Lines for the text, on each run and on all pairs together."""
    notes = []
    for number, pair in enumerate(pairs, 1):
        for which, run in zip("AB", pair, strict=True):
            notes += _of_run(which if len(pairs) == 1 else f"{which} of pair {number}", run)
    return notes + _of_pairs(pairs)


def _of_run(which: str, run: Run) -> list[str]:
    torn = sum(process.torn_lines for process in run.logs)
    notes = [f"{which} has {torn} torn line(s) in its logs; they were skipped"] if torn else []
    if any(not process.ended for process in run.logs):
        notes.append(f"{which} has not ended, or was killed: its newest window counts as its end")
    if FEWEST_BLOCKS <= len(run.pace.blocks) < MIN_BLOCKS:
        notes.append(
            f"{which} has {len(run.pace.blocks)} windows after its first steps; more make the interval shorter"
        )
    if child_processes(run.processes):
        notes.append(
            f"{which} has started processes with multiprocessing; as long as they live, they count as other programs, "
            "and the time in which they hold the run up is left out"
        )
    return notes


def _of_pairs(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """What makes several pairs say less than they could."""
    notes = []
    turns = turns_of(pairs)
    if turns < len(pairs):
        notes.append(
            f"the runs of A and B did not take turns often enough, and the machine may have changed in between: so the "
            f"{len(pairs)} pairs count as {turns}"
        )
    for which, runs in zip("AB", zip(*pairs, strict=True), strict=True):
        told = sorted(_differing(runs) - _EXPECTED)
        if told:
            notes.append(f"the runs of {which} differ in {', '.join(told)}: are all of them of one version?")
    return notes


def _differing(runs: Sequence[Run]) -> set[str]:
    """Names of the facts in which a run is not like the first one."""
    first = runs[0].facts
    return {name for run in runs for name, value in run.facts.items() if name in first and value != first[name]}
