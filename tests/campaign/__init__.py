"""Shared by the campaigns `tests.zoo`, `tests.reports` and `tests.lines`.

A campaign runs real scripts whose fault is known as a person would run them, and judges what the agent's report says of
each. Here scripts are started, and results are kept and shown. `specimen` says what is true of a script, `runner` runs
it, `judgement` compares, and `command` is the command of the zoo and of the scripts after public reports.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"
_ADOPT: Final = Path(__file__).with_name("adopt.py")

_PATIENCE_SECONDS: Final = 90.0
"""How much longer than its training a run may take: data is written, workers start, the agent writes its log."""

# -- runs --------------------------------------------------------------------------------------------------------------


class RunError(RuntimeError):
    """A run failed; the text is one line."""


def under_the_agent(run: Path) -> list[str]:
    """The arguments of Python that run a script under the agent, with this run folder. The script follows them."""
    return ["-m", "telemetry", "run", "--run-dir", str(run), "--port", "0"]


def finish(
    command: Sequence[str], folder: Path, seconds: float, variables: Mapping[str, str], *, cores: int | None = None
) -> tuple[int, str]:
    """Run a command in a folder to its end. Returns its exit status and its output.

    Raises:
        RunError: it took much longer than ``seconds``, and was ended.
    """
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_ADOPT), *command],
            cwd=folder,
            env=dict(variables),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            if cores is not None:  # inherited by all processes that it starts
                os.sched_setaffinity(process.pid, sorted(os.sched_getaffinity(0))[:cores])
            code = process.wait(seconds + _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(f"has not ended within {seconds + _PATIENCE_SECONDS:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that outlive it, too
            process.wait()
        output.seek(0)
        return code, output.read()


def report_of(run: Path, *form: str) -> str:
    """What ``telemetry report`` prints of a run.

    Raises:
        RunError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "telemetry", "report", str(run), *form],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise RunError(f"no report: {last_line(done.stderr)}")
    return done.stdout


def environment(**added: str) -> dict[str, str]:
    """This process's variables, without settings of the agent, of threads or of a job. The package can be imported."""
    dropped = ("TELEMETRY_", "TRACEML_", "PROMETHEUS_", "SLURM_", "OMP_", "MKL_")
    single = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k not in single}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | added


def last_line(text: str) -> str:
    """The last line of an output, for an error."""
    return (text.strip().splitlines() or ["nothing was said"])[-1][:200]


def end_on_sigterm() -> None:
    """Let SIGTERM end the run in progress, too. 143: the exit status that a shell reports for such a command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Load:
    """Load of the machine by other processes since this was made. On a busy machine other causes may be the true ones."""

    def __init__(self) -> None:
        self._start = _read()

    def since(self) -> dict[str, float]:
        """Mean cores used by others, and the shares of the time stolen and under CPU pressure."""
        passed, busy, stolen, pressed = (now - before for now, before in zip(_read(), self._start, strict=True))
        return {
            "others_cores": round(max(0.0, busy / passed), 2),
            "stolen_ratio": round(stolen / passed / (os.cpu_count() or 1), 3),
            "load_average": round(os.getloadavg()[0], 2),
            "cpu_pressure_ratio": round(pressed / passed, 3),
        }


def _read() -> tuple[float, float, float, float]:
    """Seconds: a stamp, those that cores were busy for others, stolen, and under pressure (0 if that is not told)."""
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    pressed = 0.0
    with suppress(OSError, AttributeError):
        found = re.search(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text())
        pressed = int(found[1]) / 1e6  # type: ignore[index]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(usage.ru_utime + usage.ru_stime for usage in own)
    return time.monotonic(), (user + nice + system + irq + soft) / ticks - ours, steal / ticks, pressed


# -- results -----------------------------------------------------------------------------------------------------------


class Journal:
    """Keeps what was found immediately, so that a campaign that was stopped goes on. A file of JSON lines.

    Args:
        path: path of the file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._entries.update([json.loads(line)])

    def known(self, key: str) -> Any:
        """What is kept under this key; else None."""
        return self._entries.get(key)

    def keep(self, key: str, said: Any) -> None:
        """Keep something."""
        self._entries[key] = said
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, said]) + "\n")


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: how many of how many must reach it (a share), and how many do."""

    name: str
    reached: int
    of: int
    what: str = "runs"
    least: float = 1.0
    tells_missed: bool = False

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.reached >= self.least * self.of

    @property
    def told(self) -> str:
        """Such as ``57 of 60 runs``. With ``tells_missed``, of those that do not reach it."""
        return f"{self.of - self.reached if self.tells_missed else self.reached} of {self.of} {self.what}"

    def __str__(self) -> str:
        return f"{'reached' if self.met else 'NOT REACHED'}: {self.name} ({self.told})"


@dataclass(frozen=True, slots=True)
class Table:
    """The results of a campaign, to be shown and published."""

    title: str
    machine: Mapping[str, Any]
    goals: Sequence[Goal]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def about(self) -> str:
        """When and on which machine it ran."""
        told = self.machine
        return (
            f"{told['date']}: {told['cpu']}, {told['cores']} cores, {told['memory_gib']} GiB; {told['kernel']}, Python "
            f"{told['python']}, torch {told['torch']}; load {' '.join(map(str, told['load_average']))} at the start."
        )

    def text(self) -> str:
        """The table for a terminal."""
        rows = [self.headings, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.headings))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.about, "", *lines, "", *map(str, self.goals)])

    def markdown(self) -> str:
        """The table as a Markdown page."""
        lines = [f"# {self.title}", "", self.about, "", *(f"- {goal}" for goal in self.goals), ""]
        lines += [f"| {' | '.join(self.headings)} |", "|---" * len(self.headings) + "|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows), ""])

    def write(self, folder: Path, name: str, results: Mapping[str, Any]) -> None:
        """Write the page and the results as JSON. They replace those of an earlier run on the same kind of machine."""
        folder.mkdir(parents=True, exist_ok=True)
        goals = [{"name": goal.name, "met": goal.met, "reached": goal.told} for goal in self.goals]
        content = {"machine": dict(self.machine), "goals": goals, **results}
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(self.markdown(), encoding="utf-8")
        print(f"\nwritten: {folder / name}.md and .json")
