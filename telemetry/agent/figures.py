"""The newest figures of this rank, for `telemetry.metrics()` and the sinks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from telemetry.config import TRIAL_VARIABLE
from telemetry.node.metrics import GROUPS, NEVER, metrics
from telemetry.records import CATEGORIES, COMPUTE, DATA_WAIT, SinkItem
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.agent.log import EventLog
    from telemetry.config import Config
    from telemetry.node.metrics import RunView
    from telemetry.records import LogWindow, Percentiles
    from telemetry.sinks.thread import SinkThread
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity


# -- the flat table of figures: what `telemetry.metrics()`, the callbacks and the sinks give to a logger ---------------
# Most figures are metrics without a label. They have the metric's name without ``training_``, and are read as the
# endpoint reads them. The others are computed from the newest window of the log.

_PREFIX: Final = "training_"

_LEFT_OUT: Final = frozenset({"training_run_ended", "training_last_step_timestamp_seconds"})
"""Metrics that mean nothing in a chart."""

_NO_WINDOW: Final = "before the first window, which lasts 1 s"
_NO_STEP: Final = "if no step has ended in the window"


@dataclass(frozen=True, slots=True)
class WindowFigure:
    """A figure of the newest window of the log. ``read`` returns None if it was not measured."""

    name: str
    unit: str
    help: str
    absent: str
    read: Callable[[LogWindow], float | None]


@dataclass(frozen=True, slots=True)
class StateFigure:
    """A figure of the rank's state that is no metric of its own."""

    name: str
    unit: str
    help: str
    absent: str
    read: Callable[[RunView], float | None]


def _loop_ratio(window: LogWindow, seconds: float | None) -> float | None:
    ledger = window.added.ledger_seconds
    loop = ledger.get(DATA_WAIT, 0.0) + ledger.get(COMPUTE, 0.0)
    return None if seconds is None or loop <= 0 else seconds / loop


def _per_second(window: LogWindow, count: float | None) -> float | None:
    seconds = window.added.wall_seconds
    return count / seconds if count is not None and seconds > 0 else None


def _quantiles(
    name: str, what: str, of: Callable[[LogWindow], Percentiles | None]
) -> tuple[tuple[str, str, Callable[[LogWindow], float | None]], ...]:
    def reader(field: str) -> Callable[[LogWindow], float | None]:
        def read(window: LogWindow) -> float | None:
            found = of(window)
            return None if found is None else float(getattr(found, field))

        return read

    words = {"p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "maximum"}
    return tuple((f"{name}_{field}", f"{what}, {word}.", reader(field)) for field, word in words.items())


WINDOW_FIGURES: Final = (
    WindowFigure(
        "steps_per_second",
        "steps per second",
        "Training steps per second of wall clock.",
        _NO_WINDOW,
        lambda window: _per_second(window, window.added.steps),
    ),
    WindowFigure(
        "samples_per_second",
        "samples per second",
        "Samples that this rank trained on, per second of wall clock.",
        "where `samples_total` is absent, and in the first window that has it",
        lambda window: _per_second(window, window.added.samples),
    ),
    WindowFigure(
        "tokens_per_second",
        "tokens per second",
        "Tokens that this rank trained on, per second of wall clock.",
        "where `tokens_total` is absent, and in the first window that has it",
        lambda window: _per_second(window, window.added.tokens),
    ),
    WindowFigure(
        "data_wait_ratio",
        "ratio",
        "Share of the training loop (wait plus compute) that was wait.",
        "without training in the window",
        lambda window: _loop_ratio(window, window.added.ledger_seconds.get(DATA_WAIT, 0.0)),
    ),
    WindowFigure(
        "exposed_wait_ratio",
        "ratio",
        "Share of the training loop that was exposed wait.",
        "without training in the window, and where `exposed_wait_seconds_total` is absent",
        lambda window: _loop_ratio(window, window.added.exposed_wait_seconds),
    ),
    *(
        WindowFigure(name, "seconds", help_text, _NO_STEP, read)
        for name, help_text, read in (
            *_quantiles("step_seconds", "Duration of a step", lambda window: window.step),
            *_quantiles("data_wait_seconds", "Wait of a step for its batch", lambda window: window.wait),
        )
    ),
)

STATE_FIGURES: Final = (
    *(
        StateFigure(
            f"{category}_seconds_total",
            "seconds",
            f"Time of the ledger's category `{category}` so far.",
            NEVER,
            lambda view, category=category: view.totals.ledger_seconds.get(category),  # type: ignore[misc]
        )
        for category in CATEGORIES
    ),
    StateFigure(
        "stall_active",
        "",
        "1 while a stall is open, else 0.",
        NEVER,
        lambda view: None if view.stalls is None else float(view.stalls.active is not None),
    ),
    StateFigure(
        "stalls_total",
        "stalls",
        "Stalls that have opened so far.",
        NEVER,
        lambda view: None if view.stalls is None else sum(view.stalls.opened.values()),
    ),
    StateFigure(
        "stall_lost_seconds_total",
        "seconds",
        "Time that this rank has lost in stalls so far.",
        NEVER,
        lambda view: None if view.stalls is None else sum(view.stalls.lost_seconds.values()),
    ),
    *(
        StateFigure(
            f"overhead_{thread}_seconds_total",
            "seconds",
            f"Time that the agent has cost so far, thread `{thread}`.",
            NEVER,
            lambda view, thread=thread: view.totals.overhead_seconds.get(thread),  # type: ignore[misc]
        )
        for thread in ("training", "agent")
    ),
)


@dataclass(frozen=True, slots=True)
class MetricFigure:
    """A metric without a label, as a figure."""

    name: str
    unit: str
    help: str
    absent: str
    metric: str


def _metric_figures() -> tuple[tuple[Callable[[RunView], Any], tuple[tuple[str, Callable[[Any], Any]], ...]], ...]:
    """By group: what gets its record, and for each figure its name and what reads it from the record."""
    found = []
    for group in GROUPS:
        readers = tuple(
            (metric.name.removeprefix(_PREFIX), metric.read) for metric in group.metrics if _is_figure(metric)
        )
        if readers:
            found.append((group.record, readers))
    return tuple(found)


def _is_figure(metric: Any) -> bool:
    return (
        metric.name.startswith(_PREFIX)
        and metric.type != "histogram"
        and metric.label is None
        and not metric.name.endswith("_info")
        and metric.name not in _LEFT_OUT
    )


_READERS: Final = _metric_figures()


def metric_figures() -> tuple[MetricFigure, ...]:
    """The figures that are metrics, for the documentation."""
    return tuple(
        MetricFigure(
            metric.name.removeprefix(_PREFIX),
            metric.unit,
            metric.help,
            group.absent if metric.absent is None else metric.absent,
            metric.name,
        )
        for group, metric in metrics()
        if _is_figure(metric)
    )


def figures(view: RunView, window: LogWindow | None) -> dict[str, float]:
    """All figures of a rank at one moment. What was not measured is not in it, and no value is NaN or infinite.

    Args:
        view: the state of the rank.
        window: the newest window of the log; None before the first.
    """
    found: dict[str, float] = {}
    if window is not None:
        for of_window in WINDOW_FIGURES:
            _put(found, of_window.name, of_window.read(window))
    for of_state in STATE_FIGURES:
        _put(found, of_state.name, of_state.read(view))
    for record_of, readers in _READERS:
        record = record_of(view)
        if record is not None:
            for name, read in readers:
                _put(found, name, read(record))
    return found


def _put(found: dict[str, float], name: str, value: float | None) -> None:
    if value is not None and isfinite(value):
        found[name] = float(value)


# -- the newest figures of this rank, for `telemetry.metrics()` and the sinks ------------------------------------------

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
            from telemetry.sinks.make import make_sinks
            from telemetry.sinks.thread import SinkThread

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
