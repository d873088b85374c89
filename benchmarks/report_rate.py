"""``python -m benchmarks.report_rate``: what ``telemetry report`` needs for a week of logs (about a minute).

The logs are simulated, of as many ranks as fit on a small disk. What a larger run needs follows from the rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.simulated_run import SimulatedRun, write_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WEEK_SECONDS = 7 * 86_400
LARGE_RANKS = 1_000


@dataclass(frozen=True)
class Reading:
    """One run of the command: seconds, CPU seconds, and MB of memory."""

    seconds: float
    cpu_seconds: float
    memory_mb: float


def read(run_dir: Path) -> Reading:
    """Run the command."""
    command = [sys.executable, "-m", "telemetry", "report", str(run_dir), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"telemetry report ended with status {status}")
    return Reading(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


def row(readings: list[Reading], megabytes: float) -> str:
    """The row of the table."""
    seconds = statistics.median(reading.seconds for reading in readings)
    spread = f"{min(r.seconds for r in readings):.1f} to {max(r.seconds for r in readings):.1f}"
    cpu = statistics.median(reading.cpu_seconds for reading in readings)
    memory = max(reading.memory_mb for reading in readings)
    rates = f"{megabytes / seconds:.0f} | {megabytes / cpu:.0f}"
    return f"| {seconds:.1f} ({spread}) | {cpu:.1f} | {rates} | {memory:.0f} |"


def main() -> None:
    """Measure, print the table, and write it to the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_rate", description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="report-rate-") as folder:
        run_dir = Path(folder) / "run"
        megabytes = write_run(run_dir, SimulatedRun(options.ranks, WEEK_SECONDS)) / 1e6
        read(run_dir)  # into the page cache
        readings = [read(run_dir) for _ in range(options.times)]
    cpu = statistics.median(reading.cpu_seconds for reading in readings)
    about = machine.describe()
    path = RESULTS / f"report-rate-{machine.slug(about)}.md"
    week = f"A week of {options.ranks} simulated ranks, {megabytes / 1e3:.2f} GB: the newest 128 MiB of each, as the"
    large = f"a week of {LARGE_RANKS:,} ranks, {megabytes / options.ranks * LARGE_RANKS / 1e3:.0f} GB, takes"
    page = f"""# What a report of large logs costs

Measured by `python -m benchmarks.report_rate` on {about["cpu"]}, {about["cores"]} shared cores;
Python {about["python"]}. {week} default limits leave. The files are in the page cache. Medians of {options.times} runs.

| s (range) | CPU s | MB a second | MB a CPU second | MB of memory |
|---|---|---|---|---|
{row(readings, megabytes)}

At this rate {large} {cpu / options.ranks * LARGE_RANKS:.0f} CPU seconds.
"""
    path.write_text(page, encoding="utf-8")
    print(page, path, sep="\n")


if __name__ == "__main__":
    main()
