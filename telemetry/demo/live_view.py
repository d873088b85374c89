"""What the demo shows while the training runs: rows from its metrics endpoint, and a part of what it serves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from typing import TYPE_CHECKING, Final

from telemetry.demo.console import say
from telemetry.demo.demo_plan import DemoError
from telemetry.demo.scrape import Reading, lines_that_matter
from telemetry.top.endpoints import ScrapeError, fetch

if TYPE_CHECKING:
    from pathlib import Path

    from telemetry.demo.demo_plan import DemoPlan

MAX_EXTRA_SECONDS: Final = 120.0
"""How much longer than planned a training may take before it counts as hung."""


class LiveView:
    """Polls the metrics of a running training every few seconds, and prints a row each time.

    Args:
        child: the training.
        run: its run folder.
        plan: how often to poll, and how long the training takes.
    """

    _HEADING = "    time   steps  steps/s  waiting for data  step p50   most time in   newest line of the script"

    def __init__(self, child: subprocess.Popen[bytes], run: Path, plan: DemoPlan) -> None:
        self._child = child
        self._run = run
        self._plan = plan
        self._began = time.monotonic()
        self._url: str | None = None
        self._before = Reading(0.0, {}, (), None)
        self._unanswered = False
        self._exposition = ""
        self._shown_exposition = False

    def until_exit(self) -> None:
        """Print rows until the training has ended.

        Raises:
            DemoError: it does not end in time.
        """
        while True:
            try:
                self._child.wait(self._plan.poll_seconds)
                break
            except subprocess.TimeoutExpired:
                pass
            passed = time.monotonic() - self._began
            if passed > self._plan.seconds + MAX_EXTRA_SECONDS:
                raise DemoError(f"the training has not ended in {passed:.0f} s, and was ended; see {self._run}")
            self._poll(passed)
        if self._child.returncode == 0 and not self._shown_exposition:
            self._show_exposition()

    def _poll(self, passed: float) -> None:
        if self._url is None:
            self._find_endpoint()
        if self._url is None:
            return
        try:
            self._exposition = fetch(self._url)
        except ScrapeError as error:
            if self._unanswered:  # not the first time: a run closes its endpoint before its process ends
                say(f"  {passed:4.0f} s   {error}")
            self._unanswered = True
            return
        self._unanswered = False
        self._row(passed, Reading.of(self._exposition))
        if not self._shown_exposition and passed >= self._plan.seconds / 2 and self._before.steps:
            self._show_exposition()

    def _find_endpoint(self) -> None:
        """Read the URL of the metrics from the first line of the run's log."""
        for log in (self._run / "logs").glob("rank-*.jsonl"):
            with log.open(encoding="utf-8") as lines, contextlib.suppress(ValueError):  # the line is being written
                head = json.loads(lines.readline())
                self._url = head.get("metrics_url")
                if self._url is None:
                    raise DemoError("the run has no metrics endpoint; `telemetry doctor` says why")
                say(f"   metrics at {self._url}, log in {log}", "", self._HEADING)

    def _row(self, passed: float, now: Reading) -> None:
        """Print what has happened since the last row."""
        stalled_before = self._before.stall
        new, self._before = now.since(self._before), now
        seconds = new.wall_seconds
        if seconds <= 0:
            return  # the agent has published nothing new
        rate = f"{new.steps / seconds:.1f}"
        waiting = "-" if new.waiting_ratio is None else f"{100 * new.waiting_ratio:.0f} %"
        median = "-" if new.median_step_seconds is None else f"{1e3 * new.median_step_seconds:.0f} ms"
        most = max(new.ledger_seconds, key=lambda category: new.ledger_seconds[category]).replace("_", " ")
        row = f"  {passed:4.0f} s  {now.steps:6.0f}  {rate:>7}  {waiting:>16}  {median:>8}   {most:<12}   "
        say((row + self._newest_output()).rstrip())
        if now.stall and now.stall != stalled_before:
            say(f"          the agent reports a stall: {now.stall}")

    def _newest_output(self) -> str:
        lines = (self._run / "train.out").read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def _show_exposition(self) -> None:
        lines = lines_that_matter(self._exposition)
        if lines:
            self._shown_exposition = True
            say("", "3. What Prometheus would scrape at this moment (a part of it):", "")
            say(f"   $ curl -s {self._url}", *(f"   {line}" for line in lines), "")
            if self._child.poll() is None:
                say(self._HEADING)
