"""The table of figures, which `telemetry.metrics()`, the callbacks and the sinks give to loggers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from telemetry.model.records import CATEGORIES, DATA_WAIT
from telemetry.node.metrics import GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from telemetry.model.totals import LogWindow
    from telemetry.node.metrics import Metric, RunView
    from telemetry.util.sketch import Percentiles


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a record: the newest log window, the rank's state, or that of a group of metrics.

    The last word of the name but ``total`` is its unit. ``read`` returns None if it was not measured.
    """

    name: str
    help: str
    read: Callable[[Any], float | None]


def _per(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def _percentiles(name: str, what: str, of: Callable[[LogWindow], Percentiles | None]) -> Iterator[Figure]:
    for field, word in {"p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "maximum"}.items():
        read = partial(lambda window, field: getattr(of(window), field, None), field=field)  # no step: no Percentiles
        yield Figure(f"{name}_{field}", f"{what}, {word}.", read)


_OF_LOOP: Final = "Share of the training loop that was"

WINDOW_FIGURES: Final = (
    Figure("steps_per_second", "Training steps per second of wall clock.",
           lambda window: _per(window.added.steps, window.added.wall_seconds)),
    Figure("samples_per_second", "Samples of this rank per second of wall clock.",
           lambda window: _per(window.added.samples, window.added.wall_seconds)),
    Figure("tokens_per_second", "Tokens of this rank per second of wall clock.",
           lambda window: _per(window.added.tokens, window.added.wall_seconds)),
    Figure("data_wait_ratio", f"{_OF_LOOP} wait.",
           lambda window: _per(window.added.ledger_seconds.get(DATA_WAIT, 0.0), window.added.all_loop_seconds)),
    Figure("exposed_wait_ratio", f"{_OF_LOOP} exposed wait.",
           lambda window: _per(window.added.exposed_wait_seconds, window.added.all_loop_seconds)),
    *_percentiles("step_seconds", "Duration of a step", lambda window: window.step),
    *_percentiles("data_wait_seconds", "Wait of a step for its batch", lambda window: window.wait),
)  # fmt: skip
"""Of a `LogWindow`."""

STATE_FIGURES: Final = (
    *(Figure(f"{name}_seconds_total", f"Time in `{name}` so far.",
             partial(lambda view, name: view.totals.ledger_seconds.get(name), name=name)) for name in CATEGORIES),
    Figure("stall_active", "1 while a stall is open, else 0.",
           lambda view: view.stalls and float(view.stalls.active is not None)),
    Figure("stalls_total", "Stalls that have opened so far.",
           lambda view: view.stalls and sum(view.stalls.opened.values())),
    Figure("stall_lost_seconds_total", "Time lost in stalls so far.",
           lambda view: view.stalls and sum(view.stalls.lost_seconds.values())),
    *(Figure(f"overhead_{name}_seconds_total", f"Cost of the agent so far, thread `{name}`.",
             partial(lambda view, name: view.totals.overhead_seconds.get(name), name=name))
      for name in ("training", "agent")),
)  # fmt: skip
"""Of a `RunView`."""

_PREFIX: Final = "training_"

_LEFT_OUT: Final = frozenset({"training_run_ended", "training_last_step_timestamp_seconds"})
"""Metrics that mean nothing in a chart."""


def _of_metric(metric: Metric[Any]) -> Iterator[Figure]:
    is_number = metric.type != "histogram" and metric.label is None and not metric.name.endswith("_info")
    if is_number and metric.name.startswith(_PREFIX) and metric.name not in _LEFT_OUT:
        yield Figure(metric.name.removeprefix(_PREFIX), metric.help, metric.read)  # type: ignore[arg-type] # no label


_OF_GROUPS: Final = tuple(
    (group.record, tuple(figure for metric in group.metrics for figure in _of_metric(metric))) for group in GROUPS
)

METRIC_FIGURES: Final = tuple(figure for _, of_group in _OF_GROUPS for figure in of_group)
"""The metrics without a label, by their name without ``training_``."""


def figures(view: RunView, window: LogWindow | None) -> dict[str, float]:
    """All figures of a rank at one moment. What was not measured is missing, and no value is NaN or infinite.

    Args:
        view: the state of the rank.
        window: the newest window of the log; None before the first.
    """
    groups = [(record(view), found) for record, found in _OF_GROUPS]
    tables = [(window, WINDOW_FIGURES), (view, STATE_FIGURES), *groups]
    values = {figure.name: figure.read(record) for record, found in tables if record is not None for figure in found}
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}
