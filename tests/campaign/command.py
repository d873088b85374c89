"""The command of a campaign: runs its specimens, prints the table, writes the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks import machine
from tests.campaign import RESULTS, Journal, Table, end_on_sigterm

from . import judgement, runner
from .judgement import Result
from .runner import How

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .specimen import Specimen


@dataclass(frozen=True, slots=True)
class Campaign:
    """A list of specimens with what is published of them.

    Attributes:
        name: of its module in ``tests``. ``title``: of its page.
        headings: the columns of its table, of those of `Score.cells`.
        max_off: how far a prediction may be from the real speed-up, as a share of it.
        rivals: another tool's diagnoses by specimen, asked with a journal.
    """

    name: str
    title: str
    specimens: Sequence[Specimen]
    headings: Sequence[str]
    max_off: float
    repeat: int = 1
    rivals: Callable[[Sequence[Specimen], Journal], Mapping[str, str]] | None = None

    def chosen(self, names: Iterable[str]) -> list[Specimen]:
        """The specimens whose names begin with one of ``names``; all of them without any.

        Raises:
            ValueError: no specimen has such a name.
        """
        wanted = tuple(names)
        for name in wanted:
            if not any(specimen.name.startswith(name) for specimen in self.specimens):
                there = ", ".join(specimen.name for specimen in self.specimens)
                raise ValueError(f"no specimen's name begins with {name!r}; they are {there}")
        return [s for s in self.specimens if not wanted or s.name.startswith(wanted)]

    def table(
        self, described: Mapping[str, object], scored: Sequence[judgement.Score], rivals: Mapping[str, str]
    ) -> Table:
        """The results as they are shown."""
        cells = [score.cells(rivals.get(score.specimen.name, "")) for score in scored]
        rows = [[cell[heading] for heading in self.headings] for cell in cells]
        return Table(self.title, described, judgement.goals(scored, self.max_off), self.headings, rows)

    def main(self) -> int:
        """Run the command. Returns 1 if a goal is missed, 2 for a mistake on the command line."""
        options = self._options()
        try:
            specimens = self.chosen(options.only)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if options.list:
            for specimen in specimens:
                print(f"{specimen.name:32}{specimen.truth:44}{specimen.about}")
            return 0
        end_on_sigterm()
        described = machine.describe() | {"repetitions": options.repeat}
        settings = dict(setting.split("=", 1) for setting in options.setting)
        how = How(
            settings, not options.no_advice, options.most_others, options.steady, keep=options.keep, again=options.again
        )
        journal = Journal(options.journal)
        results: list[Result] = []
        for repetition in range(options.repeat):
            for specimen in specimens:
                result = result_of(specimen, repetition, how, journal)
                results.append(result)
                print(f"{repetition + 1}/{options.repeat}  {_line(specimen, result)}", flush=True)
                if options.evidence is not None:
                    _keep_evidence(options.evidence, specimen, result, repetition)
        rivals = {} if self.rivals is None or options.no_rival else self.rivals(specimens, journal)
        scored = judgement.scores(specimens, results)
        shown = self.table(described, scored, rivals)
        print("\n" + shown.text())
        whole = not (options.only or options.again or options.no_advice)
        folder = options.results or (RESULTS if whole else None)
        if folder is not None:
            name = f"jobs-{self.name}" if all(specimen.nodes > 1 for specimen in specimens) else self.name
            content = {"specimens": judgement.published(scored, rivals)}
            shown.write(folder, f"{name}-{machine.slug(described)}", content)
        return 0 if all(goal.met for goal in shown.goals) else 1

    def _options(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m tests.{self.name}", description=self.title)
        parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="specimens whose names begin so")
        parser.add_argument("--repeat", type=int, default=self.repeat, metavar="N", help="default: %(default)s")
        parser.add_argument("--no-rival", action="store_true", help="without TraceML's verdicts")
        parser.add_argument("--no-advice", action="store_true", help="do not follow the advice")
        parser.add_argument(
            "--setting", action="append", default=[], metavar="TELEMETRY_NAME=VALUE", help="of the agent; default: none"
        )
        parser.add_argument(
            "--results", type=Path, metavar="DIR", help="default: with the benchmarks', of whole runs only"
        )
        parser.add_argument("--evidence", type=Path, metavar="DIR", help="keep each stall's evidence as a file")
        parser.add_argument("--keep", type=Path, metavar="DIR", help="keep each report, as text and JSON")
        parser.add_argument("--again", action="store_true", help="judge the reports kept in --keep, and run nothing")
        parser.add_argument(
            "--journal", type=Path, metavar="FILE", help="keep results there, and do not run them again"
        )
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
            help="follow advice between two runs without it, and again if their paces differ by more (default: one run)",
        )
        parser.add_argument("--list", action="store_true", help="say what there is, and end")
        options = parser.parse_args()
        if options.again and options.keep is None:
            parser.error("--again needs --keep")
        return options


def result_of(specimen: Specimen, repetition: int, how: How, journal: Journal) -> Result:
    """The result in the journal, if the specimen and the agent's code have not changed; else that of a run."""
    specimen = specimen.repeated(repetition)
    key = f"{specimen.name} {runner.version_of(specimen, runner.agents_version())} {repetition}"
    kept = journal.known(key)
    if kept is not None:
        return msgspec.convert(kept, Result)
    result = runner.run(specimen, how)
    journal.keep(key, dataclasses.asdict(result))
    return result


_WRONG: Final = "  <-- WRONG"


def _line(specimen: Specimen, result: Result) -> str:
    if result.failed:
        return f"{specimen.name:32} {specimen.truth}: FAILED, {result.error}"
    parts = [f"{specimen.name:32} {specimen.truth}: {result.named or 'nothing'}{'' if result.good else _WRONG}"]
    if result.others:
        parts.append(f"also {', '.join(result.others)}")
    if result.line is not None:
        parts.append(f"line {result.line_named or 'none'}{'' if result.line else ' (wrong)'}")
    if result.advice is False or result.harmful:
        parts.append(f"HARMFUL {result.harmful}" if result.harmful else f"{result.advice_given or 'no advice'} (wrong)")
    if result.advised is not None:
        realised = "failed" if result.realised is None else f"{result.realised:.2f}"
        followed = [*result.advised.arguments, *(f"{k}={v}" for k, v in result.advised.variables.items())]
        parts.append(f"{' '.join(followed)}: predicted {result.advised.predicted:.2f}, realised {realised}")
    if specimen.fails and not result.right:
        parts.append(f"how it ended is not said: {result.verdict}")
    if result.error:
        parts.append(result.error)
    others = ", ".join(f"{load['others_cores']:.1f}" for load in result.load)
    pace = "no pace" if result.steps_per_second is None else f"{result.steps_per_second:.1f}/s"
    if result.pace_after is not None:
        pace += f" before and {result.pace_after:.1f}/s after"
    return f"{'; '.join(parts)}  [{pace}; others use {others} cores]"


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
