"""``python -m tests.programs``: runs each program under the agent, and compares the report with what the program says.

Steps, optimizer steps, epochs and samples must be the same; the seconds of evaluations, the parts of a step, the verdict
and the first advice must be right. Exits with 0 if 95 % are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks import machine
from tests.campaign import RESULTS, Goal, RunError, Table, end_on_sigterm

from .cases import ALL, Program
from .judgement import Judged, judge
from .run import run

MIN_RIGHT: Final = 0.95
TITLE: Final = "What the report says of programs with the loops of real ones"
HEADINGS: Final = ("program", "like", "verdict", "figures right", "wrong")


def table(programs: list[Program], results: list[Judged], described: dict[str, object]) -> Table:
    """The results as they are shown."""
    figures = [right for result in results for right in result.figures.values()]
    said = [right for result in results for right in (result.verdict_right, result.advice_right) if right is not None]
    goals = (
        Goal("figures", sum(figures), len(figures), "figures", MIN_RIGHT),
        Goal("verdict and first advice", sum(said), len(said), "answers", MIN_RIGHT),
    )
    rows = [
        (
            program.name,
            program.like,
            "right" if result.verdict_right else "wrong",
            f"{sum(result.figures.values())} of {len(result.figures)}",
            "; ".join(result.wrong),
        )
        for program, result in zip(programs, results, strict=True)
    ]
    return Table(TITLE, described, goals, HEADINGS, rows)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=TITLE)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="programs whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep each run folder, output and report there")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: with the benchmarks', of whole runs only")
    options = parser.parse_args()
    programs = [one for one in ALL if not options.only or one.name.startswith(tuple(options.only))]
    if not programs:
        parser.error(f"no program's name begins so; they are {', '.join(one.name for one in ALL)}")
    end_on_sigterm()
    described, results = machine.describe(), []
    for program in programs:
        with tempfile.TemporaryDirectory(prefix=f"{program.name}-") as folder:
            try:
                result = judge(program, *run(program, (options.keep or Path(folder)) / program.name))
            except RunError as error:
                result = Judged(verdict_right=False, wrong=[f"failed: {error}"])
        results.append(result)
        print(f"{program.name:24} {'; '.join(result.wrong) or 'right'}", flush=True)
    shown = table(programs, results, described)
    print("\n" + shown.text())
    folder = options.results or (None if options.only else RESULTS)
    if folder is not None:
        content = {"programs": {one.name: result.wrong for one, result in zip(programs, results, strict=True)}}
        shown.write(folder, f"programs-{machine.slug(described)}", content)
    return 0 if all(goal.met for goal in shown.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
