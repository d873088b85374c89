"""``python -m tests.lines``: runs scripts with a planted hot line, and compares what the agent says with their own timers.

For each script: is the first line the planted one, how far is its share from that of the script's timers, and how far is
the predicted speed-up from that of the same script without the line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from tests.campaign import (
    RESULTS,
    Goal,
    Journal,
    RunError,
    Table,
    environment,
    finish,
    last_line,
    report_of,
    under_the_agent,
)
from tests.campaign.judgement import error_of
from tests.lines.planted_kinds import KINDS, RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE: Final = Path(__file__).resolve().parent
WINDOW_SECONDS: Final = 6

MAX_OFF_POINTS: Final = 5.0
MAX_OFF_GAIN: Final = 0.20
_LEAST: Final = 0.95
_HEADINGS: Final = (
    *("script", "cause", "first line right", "share", "by its timers", "predicted", "realised", "off", "samples"),
)


@dataclass(frozen=True)
class Outcome:
    """What came of one script.

    Attributes:
        first: the line that was named first, ``file:line calls``; empty without one.
        right: whether it is the planted line.
        share, own_share: the line's share by the agent, and by the script's own timers.
        predicted, realised: the speed-up without the line.
        predicted_low: the least speed-up, if a range is predicted.
        second_share, own_second_share: of the second line, where that is marked.
    """

    kind: str
    cause: str
    first: str
    right: bool
    share: float | None
    own_share: float
    predicted: float | None
    realised: float
    samples: int
    second_share: float | None = None
    own_second_share: float | None = None
    predicted_low: float | None = None

    @property
    def points_off(self) -> float | None:
        """How far the share is off, in points. With a second line, the larger of both."""
        if self.share is None:
            return None
        second = abs((self.second_share or 0.0) - (self.own_second_share or 0.0))
        return 100 * max(abs(self.share - self.own_share), second)

    @property
    def gain_off(self) -> float | None:
        """How far the predicted speed-up is off, as a share of the realised one. In a predicted range it is not."""
        return None if self.predicted is None else error_of(self.predicted, self.predicted_low, self.realised)

    def row(self) -> list[str]:
        """Its row in the table."""
        second = "" if self.second_share is None else f", second line {100 * self.second_share:.0f} %"
        own_second = "" if self.own_second_share is None else f", {100 * self.own_second_share:.0f} %"
        low = "" if self.predicted_low is None else f"{self.predicted_low:.2f} to "
        return [
            f"`{self.kind}`",
            f"`{self.cause}`",
            "yes" if self.right else f"no: {self.first or 'nothing'}",
            "-" if self.share is None else f"{100 * self.share:.0f} %{second}",
            f"{100 * self.own_share:.0f} %{own_second}",
            "-" if self.predicted is None else f"{low}{self.predicted:.2f}",
            f"{self.realised:.2f}",
            "-" if self.gain_off is None else f"{100 * self.gain_off:.0f} %",
            str(self.samples),
        ]


def planted(kind: str, mark: str = "hot") -> tuple[str, int] | None:
    """File name and number of the line with a mark; None without one."""
    for name in ("train.py", "planted_kinds.py", "hot_helpers.py"):
        for number, line in enumerate((HERE / name).read_text(encoding="utf-8").splitlines(), 1):
            if re.search(rf"# {mark}:.* {kind}(,|$)", line):
                return name, number
    return None


def run(kind: str, folder: Path, *, seconds: float, without: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a script under the agent. Returns its own answer, and the report.

    Raises:
        RunError: it failed.
    """
    answer, run_dir = folder / f"answer-{without}.json", folder / f"run-{without}"
    ranks = RANKS.get(kind)
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "tests.lines.train", kind, "--seconds", str(seconds), "--answer", str(answer)]
    command = [sys.executable, *launcher, *under_the_agent(run_dir), *script, *(["--without"] if without else [])]
    code, output = finish(command, folder, seconds, environment(TELEMETRY_STALL_WINDOW_SECONDS=str(WINDOW_SECONDS)))
    if code:
        raise RunError(f"{kind} ended with {code}: {last_line(output)}")
    return json.loads(answer.read_text(encoding="utf-8")), json.loads(report_of(run_dir, "--json"))


def judged(kind: str, *, seconds: float) -> Outcome:
    """Run a script, and again without its hot line. A job runs longer: it must first be known which rank is slow."""
    seconds *= RANKS.get(kind, 1)
    with tempfile.TemporaryDirectory(prefix=f"lines-{kind}-") as name:
        answer, report = run(kind, Path(name), seconds=seconds)
        without, _ = run(kind, Path(name), seconds=seconds / 2, without=True)
    stalls = [stall for stall in report["stalls"] if stall["evidence"].get("lines")]
    stall = max(stalls, key=lambda one: one["evidence"]["line_samples"], default=None)
    realised = without["steps_per_second"] / answer["steps_per_second"]
    if stall is None:
        cause = ", ".join(one["cause"] for one in report["stalls"])
        return Outcome(kind, cause, "", False, None, answer["share"], None, realised, 0)
    lines = stall["evidence"]["lines"]
    line = lines[0]
    at = Path(line["file"]).name, line["line"]
    share, second = (
        sum(one["share_ratio"] for one in lines if (Path(one["file"]).name, one["line"]) == planted(kind, mark))
        for mark in ("hot", "second")
    )
    removed = next((advice for advice in stall["advice"] if advice["action"].startswith("take ")), {})
    first = f"{at[0]}:{at[1]}" + (f" {line['calls']}" if line["calls"] else "")
    return Outcome(
        kind, stall["cause"], first, at == planted(kind), share, answer["share"],
        removed.get("predicted_speedup"), realised, stall["evidence"]["line_samples"],
        second if planted(kind, "second") else None, answer["second_share"], removed.get("predicted_low"),
    )  # fmt: skip


def table(described: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Table:
    """The results as they are shown. Each goal shall be reached by 95 of 100 runs, or predictions."""
    runs, predicted = len(outcomes), [one for one in outcomes if one.predicted is not None]
    near = sum(one.points_off is not None and one.points_off <= MAX_OFF_POINTS for one in outcomes)
    gains = sum((one.gain_off or 0.0) <= MAX_OFF_GAIN for one in predicted)
    goals = [
        Goal("the first line is the planted one", sum(one.right for one in outcomes), runs, least=_LEAST),
        Goal("its share is within 5 points of the script's own timers", near, runs, least=_LEAST),
        Goal(
            "the predicted speed-up is within 20 % of that without the line, or the range has it",
            gains, len(predicted), "predictions", _LEAST,
        ),
    ]  # fmt: skip
    title = "Planted lines: what the agent names, and what removing them brings"
    return Table(title, described, goals, _HEADINGS, [one.row() for one in outcomes])


def main() -> int:
    """Run the campaign. Returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lines", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*KINDS], metavar="KIND")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=22.0, help="of each script")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: with the benchmarks', of whole runs only")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep outcomes there, and do not run those again")
    options = parser.parse_args()
    journal = Journal(options.journal)
    outcomes: list[Outcome] = []
    for repetition in range(options.repeat):
        for kind in options.only:
            kept = journal.known(f"{kind} {repetition}")
            outcome = judged(kind, seconds=options.seconds) if kept is None else Outcome(**kept)
            if kept is None:
                journal.keep(f"{kind} {repetition}", asdict(outcome))
            outcomes.append(outcome)
            print("  ".join(outcome.row()), flush=True)
    described = machine.describe()
    shown = table(described, outcomes)
    print("\n" + shown.text())
    folder = options.results or (RESULTS if options.only == [*KINDS] else None)
    if folder is not None:
        shown.write(folder, f"lines-{machine.slug(described)}", {"outcomes": [asdict(each) for each in outcomes]})
    return 0 if all(goal.met for goal in shown.goals) else 1


if __name__ == "__main__":
    sys.exit(main())
