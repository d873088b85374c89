"""The newest figures of this rank, for `telemetry.metrics()` and the sinks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from telemetry.config import TRIAL_VARIABLE
from telemetry.core.clock import now_ns
from telemetry.core.sink_item import SinkItem
from telemetry.publish.figures import figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.agent.event_log import EventLog
    from telemetry.config import Config
    from telemetry.core.clock import WallClock
    from telemetry.core.errors import ErrorLog
    from telemetry.core.identity import Identity
    from telemetry.core.log_window import LogWindow
    from telemetry.core.views import RunView
    from telemetry.publish.sinks.sink_thread import SinkThread

_SOURCE: Final = "sinks"

_MIN_SHARE: Final = 0.2
"""The last window of a run goes to the sinks if it is at least this share of a usual one."""


class FigureOutput:
    """Keeps the newest figures, and passes those of each window on to the sinks.

    Args:
        config: names the sinks, and the ranks that write.
        event_log: its windows are those of the figures.
        errors: counts what fails in the sinks.
        wall: gives the time of each window.
        identity: returns the identity of this process.
        steps_before: returns the steps of the attempts before. The step axis of the sinks goes on after them.

    Attributes:
        newest: the newest figures. The dictionary is replaced, never changed, so that any thread may read it.
        said: what the start line says of the sinks; empty without sinks.
    """

    def __init__(
        self,
        config: Config,
        event_log: EventLog,
        errors: ErrorLog,
        wall: WallClock,
        identity: Callable[[], Identity],
        *,
        steps_before: Callable[[], int],
    ) -> None:
        self._config = config
        self._event_log = event_log
        self._errors = errors
        self._wall = wall
        self._identity = identity
        self._steps_before = steps_before
        self._sinks: SinkThread | None = None
        self._written: LogWindow | None = None
        self.newest: dict[str, float] = {}
        self.said = ""

    def start(self, run_dir: Path) -> None:
        """Make the sinks, and import what they need. Called on the training thread, before the agent thread starts.

        A rank that does not write has none. Neither has a trial of ``telemetry tune``: its figures are not a run's.
        """
        identity = self._identity()
        others = identity.rank > 0 and identity.rank_given and self._config.sink_ranks != "all"
        if not self._config.sinks or others or TRIAL_VARIABLE in os.environ:
            return
        with self._errors.contained(_SOURCE):
            # Imported here, because a run without sinks does not need it.
            from telemetry.publish.sinks.make_sinks import make_sinks
            from telemetry.publish.sinks.sink_thread import SinkThread

            sinks, missing = make_sinks(self._config.sinks, run_dir)
            for name, why in missing.items():
                self._errors.note(_SOURCE, f"{name}: {why}; no figures are written there")
            parts = [f"figures to {', '.join(sink.name for sink in sinks)}"] if sinks else []
            parts += [f"no {name} ({why})" for name, why in missing.items()]
            self.said = "".join(f", {part}" for part in parts)
            if sinks:
                self._sinks = SinkThread(sinks)

    def update(self, view: RunView) -> None:
        """Make the newest figures."""
        with self._errors.contained("figures"):
            self.newest = figures(view, self._event_log.newest_window)

    def write(self, view: Callable[[], RunView]) -> None:
        """Pass the figures on if the log has a new window, and count what has failed. Called once a tick."""
        window = self._event_log.newest_window
        if window is not self._written and window is not None:
            usual = window.added.wall_seconds >= _MIN_SHARE * self._config.log_interval_seconds
            # What is left of a run at its end has totals, but its rates would say nothing.
            with self._errors.contained("figures"):
                self.newest = figures(view(), window if usual or self._written is None else None)
            self._written = window
            self._offer(values=self.newest)
        self._note_news()

    def emit(self, event: str, values: dict[str, Any]) -> bool:
        """Write a line into the log. A stall that opens also goes to the sinks."""
        if event == "stall_open" and self._sinks is not None:
            with self._errors.contained(_SOURCE):
                self._offer(stall=_words(values))
        return self._event_log.emit(event, values)

    def end(self) -> None:
        """Let the sinks write what is left. Returns at once."""
        if self._sinks is not None:
            self._sinks.end()

    def wait(self, seconds: float) -> None:
        """Wait until the sinks have written everything, at most this many seconds."""
        if self._sinks is None:
            return
        if not self._sinks.wait(seconds):
            self._errors.tell(_SOURCE, "the run has ended, and a sink has not written everything")
        self._note_news()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the sinks' thread."""
        return self._sinks.cpu_seconds if self._sinks is not None else 0.0

    def after_fork_in_child(self) -> None:
        """Make the copy in a forked child write nothing."""
        self.newest = {}
        if self._sinks is not None:
            self._sinks.after_fork_in_child()

    def _offer(self, *, values: dict[str, float] | None = None, stall: str = "") -> None:
        identity, several = self._identity(), self._config.sink_ranks == "all"
        if self._sinks is None or (identity.rank and not several):
            return
        self._sinks.offer(
            SinkItem(
                step=self._steps_before() + int(self.newest.get("steps_total", 0)),
                unix_seconds=self._wall.unix_seconds(now_ns()),
                rank=identity.rank,
                several=several,
                figures=values or {},
                stall=stall,
            )
        )

    def _note_news(self) -> None:
        for text, failures in self._sinks.take_news() if self._sinks is not None else ():
            if failures:
                self._errors.note(_SOURCE, text, count=failures)
            else:
                self._errors.tell(_SOURCE, text)


def _words(stall: dict[str, Any]) -> str:
    """A stall in words: its cause, its size, and the first advice."""
    ratio, advice = stall.get("exposed_wait_ratio"), stall.get("advice") or ()
    size = "" if ratio is None else f", exposed wait {100 * ratio:.0f} %"
    return f"stall {stall['cause']} at step {stall['first_step']}{size}" + "".join(
        f": {a['action']}" for a in advice[:1]
    )
