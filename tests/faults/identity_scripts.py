"""Scripts and readers for the tests of process identity."""

from __future__ import annotations

from pathlib import Path

from telemetry.report.logs import load
from tests.report_logs import summarize

from .processes import environment

TRAIN = """
    import os, sys, telemetry, time

    def batches(seconds):
        while True:
            time.sleep(seconds)
            yield 1

    def train(steps, wait=0.001, source=None):
        for number, _ in enumerate(telemetry.watch(batches(wait) if source is None else source), 1):
            time.sleep(0.002)
            if number >= steps:
                return
"""

QUIET = {
    "TELEMETRY_START_LINE": "0", "TELEMETRY_INTERVAL_SECONDS": "0.1", "TELEMETRY_LOG_INTERVAL_SECONDS": "0.2",
    "TELEMETRY_RUN": "job", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def env(**variables: str) -> dict[str, str]:
    return environment(**(QUIET | variables))


def report(run: Path) -> dict:
    summary = summarize(load(run))
    assert all(process.torn_lines == 0 for process in load(run))
    return summary


def ranks_of(summary: dict) -> list[tuple[int, int]]:
    return [(rank["rank"], rank["pid"]) for rank in summary["ranks"]]
