"""``python -m tests.reports``: runs the scripts after public reports, and judges what the agent says of them.

For each script: is the cause right, is the line right, is the first advice right and none harmful, and is a predicted
speed-up near the real one, in samples of new data per second without the agent. Exits with 0 if all goals are reached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import machine
from tests.campaign import RESULTS, Journal, end_on_sigterm

from . import runner
from .cases import ALL
from .judgement import published, table

if TYPE_CHECKING:
    from .cases import Case
    from .judgement import Judged


def main() -> int:
    """Run the command. Returns 1 if a goal is missed, 2 for a mistake on the command line."""
    options = _options()
    unknown = [name for name in options.only if not any(case.name.startswith(name) for case in ALL)]
    if unknown:
        print(f"no script begins with {', '.join(unknown)}", file=sys.stderr)
        return 2
    cases = [case for case in ALL if not options.only or case.name.startswith(tuple(options.only))]
    if options.list:
        for case in cases:
            print(f"{case.name:32}{case.truth:44}{', '.join(case.public)}")
        return 0
    end_on_sigterm()
    described = machine.describe()
    paces = Journal(options.paces)
    results: dict[str, Judged] = {}
    for case in cases:
        results[case.name] = runner.run(case, paces, speedups=options.speedups, keep=options.keep, again=options.again)
        print(_line(case, results[case.name]), flush=True)
    shown = table(described, cases, results)
    print("\n" + shown.text())
    if options.results is not None:
        shown.write(options.results, "reports", {"scripts": [published(case, results[case.name]) for case in cases]})
    return 0 if all(goal.met for goal in shown.goals) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.reports", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="scripts whose names begin so")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument(
        "--speedups",
        choices=("none", "predicted", "all"),
        default="predicted",
        help="which real speed-ups to measure (default: %(default)s)",
    )
    parser.add_argument("--paces", type=Path, metavar="FILE", help="keep paces without the agent, to measure them once")
    parser.add_argument("--again", action="store_true", help="judge the reports kept in --keep, and run no script anew")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep each report, as text and JSON")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help=f"write the table there ({RESULTS.name}: published)"
    )
    options = parser.parse_args()
    if options.again and options.keep is None:
        parser.error("--again needs --keep")
    return options


def _line(case: Case, result: Judged) -> str:
    if result.failed:
        return f"{case.name:32} FAILED: {result.error}"
    parts = [f"{case.name:32} {'right' if result.right else 'WRONG'}: {result.named}"]
    if result.others:
        parts.append(f"also {', '.join(result.others)}")
    if result.line_named:
        parts.append(f"line {Path(result.line_named).name}{'' if result.line is not False else ' (wrong)'}")
    if result.advice_given:
        parts.append(f"{result.advice_given}{'' if result.advice is not False else ' (wrong)'}")
    if result.harmful:
        parts.append(f"HARMFUL {result.harmful}")
    if result.predicted is not None or result.speedup is not None:
        parts.append(f"predicted {result.predicted}, real {result.speedup and round(result.speedup, 2)}")
    if case.end and not result.cause:
        parts.append(f"how it ended is not said: {result.verdict}")
    if result.error:
        parts.append(result.error)
    return f"{'; '.join(parts)}  [others use {result.load['others_cores']:.1f} cores]"


if __name__ == "__main__":
    sys.exit(main())
