"""What ``telemetry report --html`` costs, for a week of 64 ranks and an hour of 1,000 ranks; how fast the page opens.

``python -m benchmarks.html_report`` writes 10 GB of simulated logs into the temporary folder, and needs Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from benchmarks import machine, report
from benchmarks.report import AT_MOST, BELOW, Row, Target
from benchmarks.simulated_run import SimulatedRun, write_run
from benchmarks.spread import spread

RUNS: Final = {
    "a week of 64 ranks": SimulatedRun(64, 7 * 86400),
    "an hour of 1,000 ranks": SimulatedRun(1000, 3600),
}
_RESULTS: Final = Path(__file__).parent / "results"
_OPENINGS: Final = 5
_LOOK_SECONDS: Final = 0.1
"""Between two looks at the memory of the processes."""


@dataclass
class Measured:
    """What was measured of one run."""

    log_gigabytes: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    page_megabytes: float = 0.0
    seen_seconds: list[float] = field(default_factory=list)
    drawn_seconds: list[float] = field(default_factory=list)


def measure(run: SimulatedRun, folder: Path, repeats: int) -> Measured:
    """Make the page of a run some times, and open it."""
    measured = Measured(write_run(folder, run) / 1e9)
    page = folder / "report.html"
    for _ in range(repeats):
        began, peak = time.perf_counter(), 0
        process = subprocess.Popen([sys.executable, "-m", "telemetry", "report", folder, "--html", page])
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, _memory_of(process.pid))
            time.sleep(_LOOK_SECONDS)
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"the report ended with status {process.returncode}")
        measured.seconds.append(time.perf_counter() - began)
        measured.cpu_seconds.append(usage.ru_utime + usage.ru_stime)
        measured.megabytes.append(peak / 1e6)
    measured.page_megabytes = page.stat().st_size / 1e6
    _open(page, measured)
    return measured


def _memory_of(pid: int) -> int:
    """Memory of a process and its children, in bytes. What they share is counted once."""
    found = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += each.memory_full_info().pss
    return found


def _open(page: Path, measured: Measured) -> None:
    """Open a page in Chromium. How long until it is seen, and until all charts are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(_OPENINGS):
            tab = browser.new_page(viewport={"width": 1200, "height": 900})
            began = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-drawn]", state="attached")
            measured.drawn_seconds.append(time.perf_counter() - began)
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            measured.seen_seconds.append(tab.evaluate(paint) / 1e3)
            tab.close()
        browser.close()


def rows_of(name: str, found: Measured, *, judged: bool) -> list[Row]:
    """The rows of a run. ``judged``: the targets are for it."""

    def row(what: str, unit: str, values: list[float], target: Target | None = None, note: str = "") -> Row:
        return Row(name, what, unit, spread(values), target if judged else None, note)

    return [
        row("logs", "GB", [found.log_gigabytes], note="as many as the default limits leave"),
        row("time of the command", "s", found.seconds, Target(BELOW, 20)),
        row("CPU time of the command", "s", found.cpu_seconds, note="the logs are read on all cores"),
        row("peak memory of the command", "MB", found.megabytes, Target(BELOW, 500), "all its processes"),
        row("page", "MB", [found.page_megabytes], Target(AT_MOST, 2)),
        row("until the verdict is seen in Chromium", "s", found.seen_seconds, Target(AT_MOST, 1)),
        row("until all charts are drawn", "s", found.drawn_seconds, note="without a GPU"),
    ]


def main() -> None:
    """Measure all runs and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    load = [round(each, 2) for each in os.getloadavg()]
    rows: list[Row] = []
    for at, (name, run) in enumerate(RUNS.items()):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(run, Path(folder) / "run", options.repeats if at == 0 else 1)
        rows += rows_of(name, found, judged=at == 0)
    description = machine.describe() | {"load_average": load}
    sys.stdout.write(report.text(description, rows) + "\n")
    title = "What the HTML report costs"
    report.write(_RESULTS, machine.slug(description), description, rows, name="html-report", title=title)


if __name__ == "__main__":
    main()
