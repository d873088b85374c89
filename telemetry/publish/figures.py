"""The flat table of figures: what `telemetry.metrics()`, the callbacks and the sinks give to a logger.

Most figures are metrics without a label. They have the metric's name without ``training_``, and are read as the
endpoint reads them. The others are computed from the newest window of the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.labels import CATEGORIES, COMPUTE, DATA_WAIT
from telemetry.publish.metrics.metric import HISTOGRAM, NEVER
from telemetry.publish.metrics.table import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.core.distribution import Percentiles
    from telemetry.core.log_window import LogWindow
    from telemetry.core.views import RunView

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
    for section in SECTIONS:
        for group in section.groups:
            readers = tuple(
                (metric.name.removeprefix(_PREFIX), metric.read) for metric in group.metrics if _is_figure(metric)
            )
            if readers:
                found.append((group.record, readers))
    return tuple(found)


def _is_figure(metric: Any) -> bool:
    return (
        metric.name.startswith(_PREFIX)
        and metric.type != HISTOGRAM
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
        for section in SECTIONS
        for group in section.groups
        for metric in group.metrics
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
