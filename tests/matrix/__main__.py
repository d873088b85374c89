"""``make test-matrix``: the test suite on other versions of Python and torch, and the table of docs/versions.md.

Each combination gets a virtual environment of its own below ``.venv-matrix/``. A wheel of torch for CUDA takes about
5 GB of disk; it is imported, and the tests run, without a GPU. What needs real servers (``stack``) or a GPU (``gpu``)
does not depend on these versions alone and is left to `make test` and to a machine with a GPU.

    python -m tests.matrix                      all combinations
    python -m tests.matrix 3.12:2.9.1 --keep    one of them; its environment stays for the next time
    python -m tests.matrix 3.12:2.9.1 --failed  once more what failed there; what passes now is recorded as mended
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.matrix import debian

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-matrix"
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- results: made by `make test-matrix` -->", "<!-- end of results -->"

COMBINATIONS = ("3.10:2.4.1", "3.11:2.13.0", "3.12:2.9.1", "3.12:2.15.0", "3.13:2.14.0", "3.13:2.15.0", "3.14:2.15.0")
"""The oldest of both, the versions that development is pinned to, one in between, and the newest."""

NEEDED_INSIDE = ("gcc", "libc6-dev", "procps", "git", "python3")
"""What the tests run beside Python."""

PYPI_TORCH = re.compile(r"^(torch|numpy)==")


@dataclass(frozen=True)
class Result:
    """Result of the suite on one combination of versions.

    Attributes:
        failed: tests that failed in the run of the whole suite, and have not passed since.
        mended: tests that failed in that run, and passed when they were run again later, or now say why they cannot.
        commit: short hash of the code in the run of the whole suite; None if it was not recorded.
    """

    python: str
    torch: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: int
    mended: tuple[str, ...] = ()
    commit: str | None = None


def main() -> int:
    """Run what was asked for. Returns 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("combinations", nargs="*", default=COMBINATIONS, metavar="PYTHON:TORCH")
    parser.add_argument("--keep", action="store_true", help="keep the environments for the next time")
    parser.add_argument("--failed", action="store_true", help="run again what failed, and record what passes now")
    parser.add_argument("--tests", nargs="*", default=[], help="run these tests only, and publish nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job that a shell has put in the background
    results = []
    for combination in options.combinations:
        python, _, torch = combination.partition(":")
        if options.failed:
            results.append(again(recorded(python, torch)))
        else:
            results.append(run(python, torch, options.tests))
        print(results[-1], flush=True)
        if not options.keep:
            shutil.rmtree(environment_of(python, torch))
        if not options.tests:
            publish(results[-1])
    return int(any(result.failed for result in results))


def environment_of(python: str, torch: str) -> Path:
    """The folder of the environment of one combination."""
    return ENVIRONMENTS / f"{python}-torch-{torch}"


def interpreter(version: str) -> str | None:
    """This machine's Python of this version: pyenv's, or the one on the PATH. None if it has none."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


def command_of(python: str, torch: str) -> list[str]:
    """The interpreter of an environment. A Python of Debian's testing suite runs only inside it."""
    path = environment_of(python, torch) / "bin" / "python"
    return debian.inside(path) if interpreter(python) is None else [str(path)]


def prepare(python: str, torch: str) -> list[str]:
    """Make the environment, unless it is there from an earlier run. Returns the command of its interpreter."""
    folder, inside = environment_of(python, torch), command_of(python, torch)
    if (folder / ".ready").exists():
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    found = interpreter(python)
    if found is None and (lacking := debian.lacking()):
        raise SystemExit(
            f"there is no Python {python}: install it with pyenv, or put python{python} on the PATH. "
            f"Debian's testing suite may have it; that needs {lacking}"
        )
    if found is None:
        debian.install(f"python{python}-venv", *NEEDED_INSIDE)
    subprocess.run([*([found] if found else debian.inside(f"python{python}")), "-m", "venv", folder], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not PYPI_TORCH.match(line)]
    constraints = folder / "constraints.txt"
    # Old wheels of torch were built for numpy 1, and torch without any is fine too.
    numpy = ["numpy<2"] if tuple(map(int, torch.split(".")[:2])) < (2, 5) else []
    constraints.write_text("\n".join([*pins, f"torch=={torch}", *numpy]) + "\n")
    pip = [*inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints]
    subprocess.run([*pip, "-e", f"{ROOT}[dev]"], check=True, stdout=sys.stderr)
    (folder / ".ready").touch()
    return inside


def run(python: str, torch: str, tests: list[str]) -> Result:
    """The suite on one combination."""
    inside = prepare(python, torch)
    report = environment_of(python, torch) / "junit.xml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TELEMETRY_")}
    began, commit = time.monotonic(), checked_out()
    pytest = [*inside, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not stack and not gpu"]
    command = [*pytest, f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)
    cases = list(ET.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return Result(
        python=python,
        torch=torch,
        passed=len(cases) - len(failed) - len(skipped),
        skipped=len(skipped),
        failed=tuple(f"{case.get('classname')}.{case.get('name')}" for case in failed),
        seconds=round(time.monotonic() - began),
        commit=commit,
    )


def checked_out() -> str | None:
    """Short hash of the commit that is checked out, with ``-dirty`` if files differ from it; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return found.stdout.strip() or None


def recorded(python: str, torch: str) -> Result:
    """The result of an earlier run of the whole suite."""
    for row in json.loads(RESULTS.read_text()):
        if (row["python"], row["torch"]) == (python, torch):
            return Result(**row | {"failed": tuple(row["failed"]), "mended": tuple(row.get("mended", ()))})
    raise SystemExit(f"nothing is recorded of Python {python} with torch {torch}: run the whole suite first")


def again(before: Result) -> Result:
    """The same result, after what failed was run once more."""
    now = run(before.python, before.torch, [node_of(test) for test in before.failed])
    if now.passed + now.skipped + len(now.failed) != len(before.failed):
        raise SystemExit("not all of them are there any more: run the whole suite")
    failed = set(now.failed)
    return replace(
        before,
        failed=tuple(test for test in before.failed if test in failed),
        mended=(*before.mended, *(test for test in before.failed if test not in failed)),
    )


def node_of(test: str) -> str:
    """A test as pytest wants it named, from its name in the record: ``tests.test_x.test_y`` is in a file."""
    names, bracket, parameters = test.partition("[")
    *folders, name = names.split(".")
    return f"{'/'.join(folders)}.py::{name}{bracket}{parameters}"


def publish(result: Result) -> None:
    """Put a result in the place of an older one of the same versions, in the record and in the table."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [each for each in found if (each["python"], each["torch"]) != (result.python, result.torch)]
    rows = sorted(
        [*kept, asdict(result)], key=lambda row: [[int(n) for n in row[k].split(".")] for k in ("python", "torch")]
    )
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")


def table(rows: list[dict]) -> str:
    """The table of docs/versions.md. The names of the tests that failed are in the results file."""
    lines = ["| Python | torch | commit | passed | skipped | failed | passed later |", f"|{' --- |' * 7}"]
    for row in rows:
        lines.append(
            f"| {row['python']} | {row['torch']} | {row.get('commit') or '-'} | {row['passed']} | {row['skipped']} "
            f"| {len(row['failed'])} | {len(row.get('mended', ()))} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
