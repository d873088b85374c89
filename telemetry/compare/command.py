"""``telemetry compare RUN_A RUN_B [--json] [--fail-over PERCENT]``: prints whether B is faster than A, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from telemetry.compare.comparison import NOT_COMPARABLE, compare_runs, slower_than
from telemetry.compare.comparison_text import render
from telemetry.core.terminal import complain, show, show_json
from telemetry.report.log_files import NoRunError
from telemetry.report.log_reader import load
from telemetry.report.rank_processes import child_processes, not_replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.report.process_log import ProcessLog

COMPARED: Final = 0
TOO_SLOW: Final = 1
MISTAKE: Final = 2


def compare(run_a: str, run_b: str, *, as_json: bool, fail_over: float | None) -> int:
    """Print the comparison.

    Args:
        run_a: the run folder that B is compared with.
        run_b: the other run folder.
        as_json: print one JSON object instead of text.
        fail_over: fail if B is slower by more than this, in percent; None: never.

    Returns:
        The exit status: 0; 1 if B is slower than ``fail_over`` allows; 2 if the runs cannot be compared.
    """
    try:
        a, b = load(Path(run_a), all_windows=True), load(Path(run_b), all_windows=True)
    except NoRunError as error:
        complain(str(error))
        return MISTAKE
    result = compare_runs(a, b)
    if as_json:
        written = show_json(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        written = show(render(result, [*_notes("A", a), *_notes("B", b)]))
    if written or result["verdict"] == NOT_COMPARABLE:
        return MISTAKE
    return TOO_SLOW if fail_over is not None and slower_than(result, fail_over) else COMPARED


def _notes(which: str, processes: Sequence[ProcessLog]) -> list[str]:
    """What a reader of the comparison must know about the logs."""
    torn = sum(process.torn_lines for process in processes)
    notes = [f"{which} has {torn} torn line(s) in its logs; they were skipped"] if torn else []
    if any(not process.ended for process in processes):
        notes.append(f"{which} has not ended, or was killed: its newest window counts as its end")
    if child_processes(not_replaced(processes)):
        notes.append(
            f"{which} has started processes with multiprocessing; as long as they live, they count as other programs, "
            "and the time in which they hold the run up is left out"
        )
    return notes
