"""The harness of these tests: real processes, bare and under the agent, what they say, and what is in the run folder.

Every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import telemetry

ROOT = Path(telemetry.__file__).resolve().parent.parent
TESTS = ROOT / "tests"

HANG = 180.0
"""The time after which something counts as hung. Nothing here takes more than a few seconds on a quiet machine. On a
busy one, importing torch alone has taken half a minute."""

RUN = ("-m", "telemetry", "run", "--run-dir", "run")
"""Arguments of Python that run a script under the agent."""

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_", "SLURM", "KUBERNETES_", "NODE_NAME", "JOB_NAME")

# -- starting processes --------------------------------------------------------------------------------------------


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without those that the agent reads, plus the given ones."""
    dropped = ("TELEMETRY_", "PYTHON", "PROMETHEUS_", *_LAUNCHERS)
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "TELEMETRY_PORT": "0"}
    env["TELEMETRY_END_LINE"] = "off"  # its own tests turn it on
    return env | variables


QUIET = {"TELEMETRY_START_LINE": "off", "TELEMETRY_INTERVAL_SECONDS": "0.1", "TELEMETRY_LOG_INTERVAL_SECONDS": "0.1"}


def quiet(*, path: Path | None = None, **variables: str) -> dict[str, str]:
    """`environment` for an agent that says nothing and ticks fast. ``path``: a folder that modules come from first."""
    env = environment(**(QUIET | variables))
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
    return env


def of_rank(rank: int, ranks: int = 2, **variables: str) -> dict[str, str]:
    """`quiet` for a rank of a job on one node."""
    return quiet(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **variables)


def with_driver(folder: Path, **more: Any) -> dict[str, str]:
    """`quiet` for a machine with a GPU: a fake driver is below the real binding. ``hang``: functions that hang in it."""
    from fakes import nvml

    fake = nvml.subprocess_environment(folder, **more)
    return quiet(path=folder, FAKE_NVML_STATE=fake["FAKE_NVML_STATE"])


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return path


def python(*arguments: object, cwd: Path, env: dict[str, str] | None = None, stdin: str = "", timeout: float = HANG):
    """Run Python to its end."""
    return finished([sys.executable, *arguments], cwd=cwd, env=env, stdin=stdin, timeout=timeout)


def finished(command, *, cwd: Path, env: dict[str, str] | None = None, stdin: str = "", timeout: float = HANG):
    """Run a command to its end."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment() if env is None else env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run(folder: Path, source: str, *arguments, under=(), env=None, start=python, code=0, out="", err="", **more):
    """Run a script to its end. It must end and say what is expected: by default nothing, with status 0.

    Args:
        folder: where the script is written and runs.
        source, arguments: of the script.
        under: arguments of Python before it, such as `RUN`.
        env: `quiet` by default.
        start: `python`, or another function like it.
        code, out, err: its exit status and its output; None for any.

    Returns:
        What it has written with `inside.tell`; None if it has written nothing.
    """
    found = folder / "results.json"
    found.unlink(missing_ok=True)
    done = start(*under, write(folder, "script.py", source), *arguments, cwd=folder, env=env or quiet(), **more)
    assert code in (None, done.returncode), (done.returncode, done.stderr)
    assert err in (None, done.stderr), done.stderr
    assert out in (None, done.stdout), done.stdout
    return json.loads(found.read_text(encoding="utf-8")) if found.exists() else None


START_LINE = re.compile(r"telemetry: run .*, rank \d+: .*\n")


def without_start_line(text: str) -> tuple[str, int]:
    """Text on stderr without the agent's start line, and how often that line was there."""
    return START_LINE.subn("", text)


@dataclass
class Ended:
    """How a process ended, and what it said. Two are equal if nobody can tell them apart."""

    code: int
    out: str
    err: str


def both(folder: Path, *command, start=python, env=None, **more) -> tuple[Ended, Ended, int]:
    """A command of Python without the agent and with it, and how many start lines the second one has said."""
    done = [start(*under, *command, cwd=folder, env=env or environment(), **more) for under in ((), RUN)]
    err, start_lines = without_start_line(done[1].stderr)
    bare, ours = (Ended(d.returncode, d.stdout, e) for d, e in zip(done, (done[0].stderr, err), strict=True))
    return bare, ours, start_lines


def wait_for(condition, what: str, seconds: float = HANG):
    """Poll until the condition is true. Returns its value. Fails with ``what`` after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


class Child:
    """A Python process that reports its progress in lines on stdout, and continues when it gets a line on stdin."""

    def __init__(self, *arguments: object, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.stderr_path = cwd / f"stderr-{time.monotonic_ns()}.txt"
        with self.stderr_path.open("wb") as stderr:
            self.process = self._start(arguments, cwd, environment() if env is None else env, stderr)

    def _start(self, arguments, cwd, env, stderr):
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # including forked children, which may outlive it
        except ProcessLookupError:
            pass
        self.process.wait(HANG)
        self.process.stdin.close()
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(encoding="utf-8")

    def line(self) -> str:
        """The next line of its output; fails if the process ends without one."""
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(HANG)}: {self.stderr}"
        return line.rstrip("\n")

    def tell(self, line: object = "go") -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line: object) -> str:
        """Tell it a line. Returns the next one of its output."""
        self.tell(line)
        return self.line()

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> int:
        return self.process.wait(HANG)

    def ends(self, code: int = 0, err: str = "") -> None:
        """It must end so."""
        assert (self.wait(), self.stderr) == (code, err)


# -- places to run in ----------------------------------------------------------------------------------------------

_NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@functools.cache
def can(*command: str) -> bool:
    """Whether a command of this machine works."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def tmpfs(folder: object, options: str) -> str:
    """A line of shell that mounts a small file system."""
    return f'mount -t tmpfs -o {options} none "{folder}"'


def mounted(mounts: list[str], script: Path, *arguments: object) -> list[str]:
    """A command line that runs Python where these mounts are done, which nobody else sees. Skips where none is allowed."""
    if not can(*_NAMESPACE, "sh", "-c", tmpfs("/mnt", "size=64k")):
        required = os.environ.get("TELEMETRY_TEST_REQUIRE_STACK") == "1"
        (pytest.fail if required else pytest.skip)("a file system of one's own needs mount namespaces")
    line = " && ".join([*mounts, 'exec "$0" "$@"'])
    return [*_NAMESPACE, "sh", "-c", line, sys.executable, *map(str, (script, *arguments))]


def mounting(*mounts: str):
    """A way to start Python, for `run`: where these mounts are done."""

    def start(script, *arguments, cwd, **more):
        return finished(mounted([*mounts], script, *arguments), cwd=cwd, **more)

    return start


# -- what there is of a run ----------------------------------------------------------------------------------------


def log_lines(run_dir: Path, *, running: bool = False) -> list[dict]:
    """Every line of a run's logs. Fails on a line that is not a JSON object.

    While the run is ``running``, there may be no log yet, or one that is just being made, and the newest line may be
    incomplete: it is left out.
    """
    lines = []
    for path in sorted((run_dir / "logs").glob("*") if running else (run_dir / "logs").iterdir()):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if running:
                continue
            raise
        for raw in content.splitlines(keepends=True):
            if running and not raw.endswith(b"\n"):
                continue
            line = json.loads(raw)
            assert isinstance(line, dict)
            lines.append(line)
    return lines


def events(run_dir: Path, event: str, *, running: bool = False, **fields: object) -> list[dict]:
    """The lines of one kind, with these fields."""
    lines = log_lines(run_dir, running=running)
    return [line for line in lines if line["event"] == event and fields.items() <= line.items()]


def told(run_dir: Path, source: str, *, running: bool = False) -> list[str]:
    """What the log says of a part of the agent that failed, or has something to say."""
    return [line["message"] for line in events(run_dir, "error", running=running, source=source)]


def end_of(run_dir: Path) -> dict:
    """The last line of a run of one process."""
    (end,) = events(run_dir, "run_end")
    return end


def report_text(run_dir: Path, *options: str) -> str:
    """What ``telemetry report`` prints."""
    from telemetry.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(["report", str(run_dir), *options]) == 0
    return text.getvalue()


def report(run_dir: Path) -> dict:
    """``telemetry report --json``."""
    return json.loads(report_text(run_dir, "--json"))


def fetch(url: str, timeout: float = 10.0) -> str:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode("utf-8")


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """An exposition by sample name, through the reference parser."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(text: str, name: str, **labels: str) -> float | None:
    """The only sample with this name and these labels; else None."""
    matching = [v for have, v in samples(text).get(name, []) if labels.items() <= have.items()]
    assert len(matching) <= 1, (name, labels, matching)
    return matching[0] if matching else None


def ranks_in(text: str, name: str = "training_steps_total") -> dict[str, float]:
    """The values of a metric by rank. Fails if a rank has two."""
    found = samples(text).get(name, [])
    by_rank = {labels["rank"]: value for labels, value in found}
    assert len(by_rank) == len(found), found
    return by_rank
