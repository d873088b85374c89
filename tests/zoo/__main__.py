"""``python -m tests.zoo``: runs the zoo, prints the table, writes the results. Exits with 0 if all goals are reached."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import machine
from benchmarks import traceml as benchmarked
from tests.campaign import RESULTS, Journal, end_on_sigterm

from . import judgement, runner, traceml
from .judgement import Result
from .specimens import ALL, Specimen, chosen

if TYPE_CHECKING:
    from collections.abc import Sequence


def main() -> int:
    """Run the command. Returns 1 if a goal is missed, 2 for a mistake on the command line."""
    options = _options()
    if options.list:
        for specimen in ALL:
            print(f"{specimen.name:24}{specimen.truth:28}{specimen.about}")
        return 0
    try:
        specimens = chosen(options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    end_on_sigterm()
    about_machine = machine.describe() | {"repetitions": options.repeat}
    journal = Journal(options.journal)
    results: list[Result] = []
    for repetition in range(options.repeat):
        for specimen in specimens:
            result = result_of(specimen, repetition, options, journal)
            results.append(result)
            print(f"{repetition + 1}/{options.repeat}  {_line(specimen, result)}", flush=True)
            if options.evidence is not None:
                _keep_evidence(options.evidence, specimen, result, repetition)
    rivals = {} if options.no_rival else _ask_traceml(specimens, journal)
    scored = judgement.scores(specimens, results)
    shown = judgement.table(about_machine, scored, rivals)
    print("\n" + shown.text())
    folder = options.results or (RESULTS if not options.only else None)
    if folder is not None:
        name = "jobs-zoo" if all(specimen.nodes > 1 for specimen in specimens) else "zoo"
        judgement.write(folder, f"{name}-{machine.slug(about_machine)}", shown, scored, rivals)
    return 0 if all(goal.met for goal in shown.goals) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="specimens whose names begin so")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (default: %(default)s)")
    parser.add_argument("--no-rival", action="store_true", help="without TraceML's verdicts")
    parser.add_argument("--no-advice", action="store_true", help="do not follow the advice")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="TELEMETRY_NAME=VALUE", help="of the agent; default: none"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: with the benchmarks', of whole runs only")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="keep each stall's evidence as a file")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep results there, and do not run them again")
    parser.add_argument(
        "--most-others",
        type=float,
        default=math.inf,
        metavar="CORES",
        help="run again what ran while others used more of the machine (default: never)",
    )
    parser.add_argument(
        "--steady",
        type=float,
        default=math.inf,
        metavar="SHARE",
        help="follow advice between two runs without it, and again where their paces differ by more (default: one run)",
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    return parser.parse_args()


def result_of(specimen: Specimen, repetition: int, options: argparse.Namespace, journal: Journal) -> Result:
    """The result in the journal, if the specimen and the agent's code have not changed; else that of a run."""
    key = f"{specimen.name} {runner.version_of(specimen, runner.agents_version())} {repetition}"
    kept = journal.known(key)
    if kept is not None:
        return msgspec.convert(kept, Result)
    settings = dict(setting.split("=", 1) for setting in options.setting)
    follow, quiet, steady = not options.no_advice, options.most_others, options.steady
    result = runner.run(specimen, settings, follow=follow, most_others=quiet, steady=steady)
    journal.keep(key, dataclasses.asdict(result))
    return result


def _line(specimen: Specimen, result: Result) -> str:
    truth = specimen.truth
    if result.failed:
        return f"{specimen.name:22} {truth}: FAILED, {result.error}"
    good = result.right if not specimen.healthy else not result.accused
    text = f"{specimen.name:22} {truth}: {result.named or 'nothing'} {'' if good else '  <-- WRONG'}"
    if result.others:
        text += f" (also {', '.join(result.others)})"
    if result.advised is not None:
        realised = "failed" if result.realised is None else f"{result.realised:.2f}"
        text += f"; {' '.join(result.advised.arguments)}: predicted {result.advised.predicted:.2f}, realised {realised}"
    others = ", ".join(f"{load['others_cores']:.1f}" for load in result.load)
    pace = "no" if result.steps_per_second is None else f"{result.steps_per_second:.1f}"
    if result.pace_after is not None:
        pace += f" before and {result.pace_after:.1f} after"
    return f"{text}  [{pace} steps/s; others use {others} cores]"


def _ask_traceml(specimens: Sequence[Specimen], journal: Journal) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    try:
        interpreter = traceml.python()
    except traceml.ToolError as error:
        print(f"without TraceML's verdicts: {error}")
        return verdicts
    for specimen in specimens:
        if specimen.nodes > 1:
            continue  # TraceML judges one node
        key = f"TraceML {specimen.name} {runner.version_of(specimen, benchmarked.VERSION)}"
        verdict = journal.known(key)
        if verdict is None:
            verdict = traceml.verdict(interpreter, specimen)
            journal.keep(key, verdict)
        verdicts[specimen.name] = verdict
        print(f"TraceML  {specimen.name:22} {verdict}", flush=True)
    return verdicts


def _keep_evidence(folder: Path, specimen: Specimen, result: Result, repetition: int) -> None:
    """Write one small file for each stall: its evidence, the cause that was named, and the true causes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, stall in enumerate(result.stalls):
        content = {
            "specimen": specimen.name,
            "causes": specimen.causes,
            "rank": stall["rank"],
            "named": stall["cause"],
            "evidence": stall["evidence"],
        }
        path = folder / f"{specimen.name}.{repetition}.{number}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
