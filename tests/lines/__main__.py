"""``python -m tests.lines``: runs scripts with a planted hot line, and compares what the agent says with their own timers.

For each script: is the first line the planted one, how far is its share from that of the script's timers, and how far is
the predicted speed-up from that of the same script without the line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import machine
from tests.lines import train
from tests.lines.planted_kinds import RANKS

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
WINDOW_SECONDS: Final = 6

MAX_OFF_POINTS: Final = 5.0
MAX_OFF_GAIN: Final = 0.20


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
        if self.predicted is None:
            return None
        least = self.predicted if self.predicted_low is None else self.predicted_low
        nearest = min(max(self.realised, least), self.predicted)
        return abs(nearest / self.realised - 1)


def planted(kind: str, mark: str = "hot") -> tuple[str, int] | None:
    """File name and number of the line with a mark; None without one."""
    for name in ("train.py", "planted_kinds.py", "hot_helpers.py"):
        for number, line in enumerate((HERE / name).read_text(encoding="utf-8").splitlines(), 1):
            if re.search(rf"# {mark}:.* {kind}(,|$)", line):
                return name, number
    return None


def run(kind: str, folder: Path, *, seconds: float, without: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a script under the agent. Returns its own answer, and the report."""
    answer, run_dir = folder / f"answer-{without}.json", folder / f"run-{without}"
    ranks = RANKS.get(kind)
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        *(sys.executable, *launcher, "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", "0"),
        *("-m", "tests.lines.train", kind, "--seconds", str(seconds), "--answer", str(answer)),
        *(["--without"] if without else []),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TELEMETRY_")}
    environment |= {"PYTHONPATH": str(ROOT), "TELEMETRY_STALL_WINDOW_SECONDS": str(WINDOW_SECONDS)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds + 90, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{kind} ended with {done.returncode}: {done.stderr[-2000:]}")
    told = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(run_dir), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(answer.read_text(encoding="utf-8")), json.loads(told.stdout)


def judged(kind: str, *, seconds: float) -> Outcome:
    """Run a script, and again without its hot line. A job runs longer: it must first be known which rank is slow."""
    seconds *= RANKS.get(kind, 1)
    with tempfile.TemporaryDirectory(prefix=f"lines-{kind}-") as name:
        answer, report = run(kind, Path(name), seconds=seconds)
        without, _ = run(kind, Path(name), seconds=seconds / 2, without=True)
    stalls = [stall for stall in report["stalls"] if stall["evidence"].get("lines")]
    stall = max(stalls, key=lambda one: one["evidence"]["line_samples"], default=None)
    realised = without["steps_per_second"] / answer["steps_per_second"]
    cause = ", ".join(one["cause"] for one in report["stalls"])
    if stall is None:
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


def row(outcome: Outcome) -> str:
    """One row of the table."""
    share = "-" if outcome.share is None else f"{100 * outcome.share:.0f} %"
    low = "" if outcome.predicted_low is None else f"{outcome.predicted_low:.2f} to "
    predicted = "-" if outcome.predicted is None else f"{low}{outcome.predicted:.2f}"
    off = "-" if outcome.gain_off is None else f"{100 * outcome.gain_off:.0f} %"
    return (
        f"| `{outcome.kind}` | `{outcome.cause}` | {'yes' if outcome.right else 'no: ' + (outcome.first or 'nothing')} "
        f"| {share} | {100 * outcome.own_share:.0f} % | {predicted} | {outcome.realised:.2f} | {off} "
        f"| {outcome.samples} |"
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many reached each goal."""
    return {
        "runs": len(outcomes),
        "scripts": len({outcome.kind for outcome in outcomes}),
        "first_line_right": sum(outcome.right for outcome in outcomes),
        "share_within_5_points": sum((o.points_off or 0) <= MAX_OFF_POINTS for o in outcomes if o.share is not None),
        "gain_within_20_percent": sum((o.gain_off or 0) <= MAX_OFF_GAIN for o in outcomes if o.predicted is not None),
        "predictions": sum(outcome.predicted is not None for outcome in outcomes),
    }


def missed(told: dict[str, Any]) -> bool:
    """Whether a goal is missed: each shall be reached by 95 of 100 runs, that of predictions by those that have one."""
    wholes = {"first_line_right": "runs", "share_within_5_points": "runs", "gain_within_20_percent": "predictions"}
    return any(told[goal] < 0.95 * told[whole] for goal, whole in wholes.items())


_SELDOM: Final = frozenset({"second_share", "own_second_share", "predicted_low"})


def recorded(outcome: Outcome) -> dict[str, Any]:
    """An outcome as it is kept, without figures of a second line, or of a range, where there is none."""
    return {name: value for name, value in asdict(outcome).items() if value is not None or name not in _SELDOM}


def page(outcomes: Sequence[Outcome], about: dict[str, Any]) -> str:
    """The results as a page."""
    told = summary(outcomes)
    seconds = [
        f"- The second line of `{one.kind}` has {100 * one.second_share:.0f} %, and {100 * one.own_second_share:.0f} % by its "
        "timers."
        for one in outcomes
        if one.second_share is not None and one.own_second_share is not None
    ]
    return "\n".join(
        [
            "# Planted lines: what the agent names, and what removing them brings",
            "",
            (
                f"Measured by `python -m tests.lines` on {about['cpu']}, {about['cores']} cores shared with other work; "
                f"Python {about['python']}, torch {about['torch']}."
            ),
            "",
            (
                f"- The first line is the planted one in {told['first_line_right']} of {told['runs']} runs of "
                f"{told['scripts']} scripts."
            ),
            f"- Its share is within 5 points of the script's own timers in {told['share_within_5_points']}.",
            (
                f"- The predicted speed-up is within 20 % of that without the line, or the predicted range has it, in "
                f"{told['gain_within_20_percent']} of {told['predictions']}."
            ),
            *seconds,
            "",
            "| Script | Cause | First line right | Share | By its timers | Predicted | Realised | Off | Samples |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(row, outcomes),
            "",
        ]
    )


def main() -> int:
    """Run the campaign. Returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lines", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*train.KINDS], metavar="KIND")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=22.0, help="of each script")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: with the benchmarks', of whole runs only")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep outcomes there, and do not run those again")
    options = parser.parse_args()
    kept: list[dict[str, Any]] = []
    if options.journal is not None and options.journal.exists():
        kept = [json.loads(line) for line in options.journal.read_text(encoding="utf-8").splitlines()]
    outcomes: list[Outcome] = []
    for repetition in range(options.repeat):
        for kind in options.only:
            known = [one for one in kept if one["kind"] == kind][repetition : repetition + 1]
            outcome = Outcome(**known[0]) if known else judged(kind, seconds=options.seconds)
            if not known and options.journal is not None:
                with options.journal.open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps(recorded(outcome)) + "\n")
            outcomes.append(outcome)
            print(row(outcome), flush=True)
    about, told = machine.describe(), summary(outcomes)
    folder = options.results or (RESULTS if options.only == [*train.KINDS] else None)
    if folder is not None:
        path = folder / f"lines-{machine.slug(about)}.md"
        path.write_text(page(outcomes, about), encoding="utf-8")
        rows = {"machine": about, "summary": told, "outcomes": [recorded(outcome) for outcome in outcomes]}
        path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path}")
    print(told)
    return int(missed(told))


if __name__ == "__main__":
    sys.exit(main())
