"""The newest figures of this rank, for `telemetry.metrics()` and the sinks."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from telemetry.config import TRIAL_VARIABLE
from telemetry.node.metrics import GROUPS
from telemetry.records import CATEGORIES, DATA_WAIT
from telemetry.util.clock import now_ns
from telemetry.util.errors import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from telemetry.agent.attempt import RunSoFar
    from telemetry.agent.log import LogWindow
    from telemetry.config import Config
    from telemetry.node.metrics import Metric, RunView, StallView
    from telemetry.records import StallRecord
    from telemetry.sinks.thread import Sink, SinkThread
    from telemetry.totals import Totals
    from telemetry.util.clock import WallClock
    from telemetry.util.errors import ErrorLog
    from telemetry.util.processes import Identity
    from telemetry.util.sketch import Percentiles


# -- the table of figures: `telemetry.metrics()`, the callbacks and the sinks give it to a logger ----------------------

_PREFIX: Final = "training_"

_LEFT_OUT: Final = frozenset({"training_run_ended", "training_last_step_timestamp_seconds"})
"""Metrics that mean nothing in a chart."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the newest log window or of the rank's state. ``read`` returns None if it was not measured."""

    name: str
    help: str
    read: Callable[[Any], float | None]


def _rate(name: str, what: str) -> Figure:
    def read(window: LogWindow) -> float | None:
        count, seconds = getattr(window.added, name), window.added.wall_seconds
        return count / seconds if count is not None and seconds > 0 else None

    return Figure(f"{name}_per_second", f"{what} per second of wall clock.", read)


def _share(name: str, what: str, of: Callable[[Totals], float | None]) -> Figure:
    def read(window: LogWindow) -> float | None:
        seconds, loop = of(window.added), window.added.all_loop_seconds
        return None if seconds is None or loop <= 0 else seconds / loop

    return Figure(f"{name}_ratio", f"Share of the training loop (wait plus compute) that was {what}.", read)


def _quantiles(name: str, what: str, of: Callable[[LogWindow], Percentiles | None]) -> Iterator[Figure]:
    for field, word in {"p50": "median", "p95": "95th percentile", "p99": "99th percentile", "max": "maximum"}.items():
        yield Figure(
            f"{name}_{field}",
            f"{what}, {word}.",
            lambda window, field=field: getattr(of(window), field, None),  # type: ignore[misc] # no step: no Percentiles
        )


def _of_view(names: Iterable[str], name: str, what: str, of: Callable[[RunView], dict[str, float]]) -> Iterator[Figure]:
    """A figure for each key of a dictionary of the view."""
    for key in names:
        read = partial(lambda view, key: of(view).get(key), key=key)
        yield Figure(name.format(key), what.format(f"`{key}`"), read)


def _of_stalls(name: str, what: str, of: Callable[[StallView], float]) -> Figure:
    return Figure(name, what, lambda view: None if view.stalls is None else of(view.stalls))


WINDOW_FIGURES: Final = (
    _rate("steps", "Training steps"),
    _rate("samples", "Samples that this rank trained on,"),
    _rate("tokens", "Tokens that this rank trained on,"),
    _share("data_wait", "wait", lambda added: added.ledger_seconds.get(DATA_WAIT, 0.0)),
    _share("exposed_wait", "exposed wait", lambda added: added.exposed_wait_seconds),
    *_quantiles("step_seconds", "Duration of a step", lambda window: window.step),
    *_quantiles("data_wait_seconds", "Wait of a step for its batch", lambda window: window.wait),
)

STATE_FIGURES: Final = (
    *_of_view(
        CATEGORIES,
        "{}_seconds_total",
        "Time of the ledger's category {} so far.",
        lambda view: view.totals.ledger_seconds,
    ),
    _of_stalls("stall_active", "1 while a stall is open, else 0.", lambda stalls: float(stalls.active is not None)),
    _of_stalls("stalls_total", "Stalls that have opened so far.", lambda stalls: sum(stalls.opened.values())),
    _of_stalls(
        "stall_lost_seconds_total",
        "Time that this rank has lost in stalls so far.",
        lambda stalls: sum(stalls.lost_seconds.values()),
    ),
    *_of_view(
        ("training", "agent"),
        "overhead_{}_seconds_total",
        "Time that the agent has cost so far, thread {}.",
        lambda view: view.totals.overhead_seconds,
    ),
)


def _is_figure(metric: Metric[Any]) -> bool:
    return (
        metric.name.startswith(_PREFIX)
        and metric.type != "histogram"
        and metric.label is None
        and not metric.name.endswith("_info")
        and metric.name not in _LEFT_OUT
    )


_OF_GROUPS: Final = tuple(
    (
        group.record,
        # A metric without a label is read as a number.
        tuple(Figure(m.name.removeprefix(_PREFIX), m.help, m.read) for m in group.metrics if _is_figure(m)),  # type: ignore[arg-type]
    )
    for group in GROUPS
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


# -- the sinks get the figures of each window of the log, and each stall -----------------------------------------------

_SOURCE: Final = "sinks"

_MIN_SHARE: Final = 0.2
"""A run's last window goes to the sinks if it has at least this share of the usual length."""


def make_sinks(names: Iterable[str], run_dir: Path) -> tuple[list[Sink], dict[str, str]]:
    """Make sinks and import what they need, in the order of writing. Returns them, and why each other name has none."""
    sinks: list[Sink] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            if not is_installed(name):
                missing[name] = "the package is not installed"
            elif name == "tensorboard":
                from telemetry.sinks.tensorboard import TensorBoardSink

                sinks.append(TensorBoardSink(run_dir / "tensorboard"))
            else:
                from telemetry.sinks.trackers import TRACKERS

                sinks.append(TRACKERS[name]())
        except Exception as error:  # the package is broken
            missing[name] = kind_of(error)
    return sinks, missing


def is_installed(name: str) -> bool:
    """Whether a package is there. A folder of its name is no package: ``wandb`` makes one in the working folder."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class FigureOutput:
    """Keeps the newest figures, and passes the figures of each window on to the sinks.

    Attributes:
        newest: the newest figures. The dictionary is replaced, never changed, so that any thread may read it.
        said: the sinks, for the start line; empty without sinks.
    """

    def __init__(
        self, config: Config, identity: Identity, run_so_far: RunSoFar, errors: ErrorLog, wall: WallClock
    ) -> None:
        self._identity = identity
        self._config = config
        self._run_so_far = run_so_far  # the step axis of the sinks continues after earlier attempts
        self._errors = errors
        self._wall = wall
        self._sinks: SinkThread | None = None
        self._written: LogWindow | None = None
        self.newest: dict[str, float] = {}
        self.said = ""

    def start(self, run_dir: Path) -> None:
        """Make the sinks. Called on the training thread, because the agent's threads must not import anything.

        A rank that does not write has none, and a trial of ``telemetry tune`` neither: its figures are not a run's.
        """
        others = self._identity.rank > 0 and self._identity.rank_given and self._config.sink_ranks != "all"
        if not self._config.sinks or others or TRIAL_VARIABLE in os.environ:
            return
        with self._errors.contained(_SOURCE):
            from telemetry.sinks.thread import SinkThread  # a run without sinks does not need it

            sinks, missing = make_sinks(self._config.sinks, run_dir)
            for name, why in missing.items():
                self._errors.note(_SOURCE, f"{name}: {why}; no figures are written there")
            parts = [f"figures to {', '.join(sink.name for sink in sinks)}"] if sinks else []
            parts += [f"no {name} ({why})" for name, why in missing.items()]
            self.said = "".join(f", {part}" for part in parts)
            if sinks:
                self._sinks = SinkThread(sinks)

    def update(self, view: RunView, window: LogWindow | None) -> None:
        """Make the newest figures. ``window``: the newest window of the log."""
        with self._errors.contained("figures"):
            self.newest = figures(view, window)

    def are_due(self, window: LogWindow) -> bool:
        """Whether `write` has not had this window yet."""
        return window is not self._written

    def write(self, view: RunView, window: LogWindow) -> None:
        """Pass the figures of a new window on."""
        usual = window.added.wall_seconds >= _MIN_SHARE * self._config.log_interval_seconds
        # A run's short last window has totals, but its rates would mean nothing.
        self.update(view, window if usual or self._written is None else None)
        self._written = window
        self._offer(figures=self.newest)

    def stall_opened(self, stall: StallRecord) -> None:
        """Give the sinks a stall in words: its cause, its size, and its first advice."""
        with self._errors.contained(_SOURCE):
            ratio = stall.exposed_wait_ratio
            size = "" if ratio is None else f", exposed wait {100 * ratio:.0f} %"
            action = "".join(f": {advice.action}" for advice in stall.advice[:1])
            self._offer(stall=f"stall {stall.cause} at step {stall.first_step}{size}{action}")

    def _offer(self, *, figures: dict[str, float] | None = None, stall: str = "") -> None:
        rank, several = self._identity.rank, self._config.sink_ranks == "all"
        if self._sinks is None or (rank and not several):
            return
        step = self._run_so_far.steps_before + int(self.newest.get("steps_total", 0))
        now = self._wall.unix_seconds(now_ns())
        from telemetry.sinks.thread import SinkItem  # a rank without sinks does not load it

        self._sinks.offer(SinkItem(step, now, rank, several, figures or {}, stall))

    def note_news(self) -> None:
        """Log what the sinks have reported, and count their failures. Called once a tick."""
        for text, failures in self._sinks.take_news() if self._sinks is not None else ():
            if failures:
                self._errors.note(_SOURCE, text, count=failures)
            else:
                self._errors.tell(_SOURCE, text)

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
        self.note_news()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the sinks' thread."""
        return self._sinks.cpu_seconds if self._sinks is not None else 0.0

    def after_fork_in_child(self) -> None:
        """Make the copy in a forked child write nothing."""
        self.newest = {}
        if self._sinks is not None:
            self._sinks.after_fork_in_child()
