"""What a campaign has found: printed, and written with the results of the benchmarks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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


class Campaign:
    """The trials so far.

    Args:
        kind: begins the names of the files.
        title: of the page. ``about``: what was done, in a few sentences.
        command: that was run.
    """

    def __init__(self, kind: str, title: str, about: str, command: str) -> None:
        self._kind, self._title, self._about, self.command = kind, title, about, command
        self._machine = machine.describe()
        self.trials: list[Trial] = []

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        mark = "" if trial.right else "  <-- WRONG"
        seconds = "" if trial.seconds is None else f"{trial.seconds:.1f} s"
        print(f"{trial.way:16} {trial.truth:24} {seconds:>8}  {trial.said}{mark}", flush=True)

    def result(self) -> dict[str, Any]:
        """The counts, in all and by way, and every trial."""
        ways = {}
        for way in dict.fromkeys(trial.way for trial in self.trials):
            some = [trial for trial in self.trials if trial.way == way]
            longest = max((trial.seconds for trial in some if trial.seconds is not None), default=None)
            ways[way] = {"right": sum(trial.right for trial in some), "of": len(some), "longest_seconds": longest}
        return {
            "machine": self._machine,
            "command": self.command,
            "right": sum(trial.right for trial in self.trials),
            "of": len(self.trials),
            "ways": ways,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def page(self) -> str:
        """The result as Markdown."""
        result, about = self.result(), self._machine
        lines = [
            f"# {self._title}",
            "",
            f"{self._about} {result['right']} of {result['of']} are right.",
            "",
            f"Measured by `{self.command}` on {about['date'][:10]}:",
            f"{about['cpu']}, {about['cores']} shared cores; Python {about['python']}, torch {about['torch']}.",
            "",
            "| what | right | longest time to the verdict, s |",
            "|---|---|---|",
            *(
                f"| {way} | {found['right']} of {found['of']} | {_or_none(found['longest_seconds'])} |"
                for way, found in result["ways"].items()
            ),
            "",
        ]
        wrong = [trial for trial in self.trials if not trial.right]
        lines += ["Wrong:", "", *(f"- {t.way}, {t.truth}: {t.said}" for t in wrong), ""] if wrong else []
        return "\n".join(lines)

    def write(self, folder: Path = RESULTS) -> list[Path]:
        """Write both files. They replace those of an earlier campaign on the same kind of machine."""
        name = f"{self._kind}-{machine.slug(self._machine)}"
        paths = [folder / f"{name}.json", folder / f"{name}.md"]
        paths[0].write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")
        paths[1].write_text(self.page(), encoding="utf-8")
        return paths


def _or_none(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
