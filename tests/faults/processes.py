"""Real processes for the fault tests. Every wait for them has a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import telemetry

ROOT = Path(telemetry.__file__).resolve().parent.parent
TESTS = ROOT / "tests"

HANG = 180.0
"""The time after which something counts as hung. Nothing here takes more than a few seconds on a quiet machine. On a
busy one, importing torch alone has taken half a minute."""

RUN = ("-m", "telemetry", "run", "--run-dir", "run")
"""Arguments of Python that run a script under the agent."""

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_", "SLURM", "KUBERNETES_", "NODE_NAME", "JOB_NAME")


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without those that the agent reads, plus the given ones."""
    dropped = ("TELEMETRY_", "PYTHON", "PROMETHEUS_", *_LAUNCHERS)
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "TELEMETRY_PORT": "0"}
    env["TELEMETRY_END_LINE"] = "off"  # its own tests turn it on
    return env | variables


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
    return path


def python(*arguments: object, cwd: Path, env: dict[str, str] | None = None, stdin: str = "", timeout: float = HANG):
    """Run Python to its end."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment() if env is None else env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_script(
    source: str, folder: Path, *arguments: object, env: dict[str, str] | None = None, ok: bool = True, run=python
):
    """Run a script that writes its results into ``results.json``, which `results` reads. ``run``: a kind of `python`."""
    script = write(folder, "script.py", source)
    done = run(script, *arguments, cwd=folder, env=env)
    if ok:
        assert done.returncode == 0, done.stderr
    return done


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


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
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=cwd,
                env=environment() if env is None else env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Child:
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

    def tell(self, line: str = "go") -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        return self.process.wait(HANG)


START_LINE = re.compile(r"telemetry: run .*, rank \d+: .*\n")


def without_start_line(text: str) -> tuple[str, int]:
    """Text on stderr without the agent's start line, and how often that line was there."""
    return START_LINE.subn("", text)


def log_lines(run_dir: Path, *, running: bool = False) -> list[dict]:
    """Every line of a run's logs. Fails on a line that is not a JSON object.

    While the run is ``running``, the newest line may be incomplete, so it is left out.
    """
    lines = []
    for path in sorted((run_dir / "logs").iterdir()):
        for raw in path.read_bytes().splitlines(keepends=True):
            if running and not raw.endswith(b"\n"):
                continue
            line = json.loads(raw)
            assert isinstance(line, dict)
            lines.append(line)
    return lines


def events(run_dir: Path, event: str, *, running: bool = False) -> list[dict]:
    return [line for line in log_lines(run_dir, running=running) if line["event"] == event]


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
