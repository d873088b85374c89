"""``telemetry compare RUN_A RUN_B [--again RUN_A RUN_B] …``: prints whether B is faster than A, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from telemetry.compare.comparison import NOT_COMPARABLE, compare_runs, slower_than
from telemetry.compare.comparison_text import render
from telemetry.compare.notes import notes_on
from telemetry.compare.run_pair import Run
from telemetry.report.logs import NoRunError, load
from telemetry.util.text import complain, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPARED: Final = 0
TOO_SLOW: Final = 1
MISTAKE: Final = 2


def compare(pairs: Sequence[tuple[str, str]], *, as_json: bool, fail_over: float | None) -> int:
    """Print the comparison.

    Args:
        pairs: the run folder of A and that of B, of one or more pairs. Of several pairs, no folder may be
            named twice.
        as_json: print one JSON object instead of text.
        fail_over: fail if B is slower by more than this, in percent; None: never.

    Returns:
        The exit status: 0; 1 if B is slower than ``fail_over`` allows; 2 if the runs cannot be compared.
    """
    twice = _used_twice(pairs)
    if twice is not None:
        complain(f"{twice} is named twice: with --again, each pair needs two runs of its own")
        return MISTAKE
    try:
        runs = [(_run(a), _run(b)) for a, b in pairs]
    except NoRunError as error:
        complain(str(error))
        return MISTAKE
    result = compare_runs(runs)
    if as_json:
        written = show_json(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        written = show(render(result, notes_on(runs)))
    if written or result["verdict"] == NOT_COMPARABLE:
        return MISTAKE
    return TOO_SLOW if fail_over is not None and slower_than(result, fail_over) else COMPARED


def _run(folder: str) -> Run:
    return Run.of(load(Path(folder), all_windows=True))


def _used_twice(pairs: Sequence[tuple[str, str]]) -> str | None:
    """A folder that is named twice among several pairs: its errors would be taken for independent ones."""
    seen: set[str] = set()
    for folder in (folder for pair in pairs for folder in pair if len(pairs) > 1):
        real = os.path.realpath(folder)
        if real in seen:
            return folder
        seen.add(real)
    return None
