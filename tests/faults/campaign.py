"""The trials of a campaign: each is printed, and all are written with the results of the benchmarks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Trial:
    """One thing that was made to go wrong, and what was said of it.

    Attributes:
        way: what was done. ``truth``: to which rank, on which node.
        right: whether the verdict is right. ``seconds``: from what was done to the verdict; None where there is to be none.
        said: the verdict, or what there was instead of one.
    """

    way: str
    truth: str
    right: bool
    seconds: float | None
    said: str


@dataclass
class Campaign:
    """The trials so far.

    Attributes:
        kind: begins the names of the files. ``title``: of the page. ``about``: what was done, in a few sentences.
        command: that was run.
    """

    kind: str
    title: str
    about: str
    command: str
    trials: list[Trial] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine.describe)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        seconds = "" if trial.seconds is None else f"{trial.seconds:.1f} s"
        mark = "" if trial.right else "  <-- WRONG"
        print(f"{trial.way:16} {trial.truth:24} {seconds:>8}  {trial.said}{mark}", flush=True)

    def summary(self) -> str:
        return f"{sum(trial.right for trial in self.trials)} of {len(self.trials)} are right"

    def write(self) -> None:
        """Write both files. They replace those of an earlier campaign on the same kind of machine."""
        ways: dict[str, dict[str, Any]] = {}
        for way in dict.fromkeys(trial.way for trial in self.trials):
            some = [trial for trial in self.trials if trial.way == way]
            longest = max((trial.seconds for trial in some if trial.seconds is not None), default=None)
            ways[way] = {"right": sum(trial.right for trial in some), "of": len(some), "longest_seconds": longest}
        result = {
            "machine": self.machine, "command": self.command, "right": sum(trial.right for trial in self.trials),
            "of": len(self.trials), "ways": ways, "trials": [asdict(trial) for trial in self.trials],
        }  # fmt: skip
        about, wrong = self.machine, [trial for trial in self.trials if not trial.right]
        lines = [
            f"# {self.title}",
            "",
            f"{self.about} {self.summary()}.",
            "",
            f"Measured by `{self.command}` on {about['date'][:10]}:",
            f"{about['cpu']}, {about['cores']} shared cores; Python {about['python']}, torch {about['torch']}.",
            "",
            "| what | right | longest time to the verdict, s |",
            "|---|---|---|",
        ]
        for way, found in ways.items():
            longest = "" if found["longest_seconds"] is None else f"{found['longest_seconds']:.1f}"
            lines.append(f"| {way} | {found['right']} of {found['of']} | {longest} |")
        lines += ["", *(["Wrong:", "", *(f"- {t.way}, {t.truth}: {t.said}" for t in wrong), ""] if wrong else [])]
        path = RESULTS / f"{self.kind}-{machine.slug(self.machine)}"
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def line_in(script: str, comment: str) -> int:
    """The line of a script that has this comment."""
    (number,) = [n for n, text in enumerate(script.lstrip("\n").splitlines(), 1) if text.endswith(f"# {comment}")]
    return number
