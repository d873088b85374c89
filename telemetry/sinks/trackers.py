"""Experiment trackers: the figures join the script's own active run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.sinks.thread import NAMESPACE, Sink, SinkWaits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.sinks.thread import SinkItem


# -- Weights & Biases: the figures join the row that the script logs next, in its own active run -----------------------
# The script numbers its rows. A row of ours would take a number, and W&B drops rows whose number is smaller than the
# newest. So ours are logged with ``commit=False`` and without a step: W&B stores them with the script's next row. The
# charts have an axis of their own, ``telemetry/step``.

_STEP: Final = f"{NAMESPACE}/step"


class WandbSink(Sink):
    """Writes into ``wandb.run``. Never imports wandb: without the script's import there is no run."""

    name = "wandb"

    def __init__(self) -> None:
        self._defined: str | None = None  # id of the run that has our axis

    def write(self, items: Sequence[SinkItem]) -> None:
        """Give the newest figures to the active run.

        Raises:
            SinkWaits: there is no active run.
        """
        run: Any = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and self._defined is not None:
            raise SinkWaits("the W&B run has ended")
        if run is None:
            raise SinkWaits("there is no active W&B run yet; figures are written after the script's wandb.init()")
        if run.id != self._defined:
            run.define_metric(_STEP, hidden=True)
            run.define_metric(f"{NAMESPACE}/*", step_metric=_STEP)
            self._defined = run.id
        values: dict[str, float] = {}
        for item in items:
            if item.figures:
                values |= {item.key(name): value for name, value in item.figures.items()} | {_STEP: item.step}
            if item.stall:
                run.summary.update({item.key("last_stall"): item.stall})
        if values:
            run.log(values, commit=False)


# -- MLflow: the figures become metrics of the script's active run -----------------------------------------------------
# An active run belongs to a thread. The sinks' thread has none, so the newest run of all threads is used.

_METRICS_AT_ONCE: Final = 1000
"""MLflow's server takes at most this many metrics in one request."""

_TAG_LENGTH: Final = 500


class MlflowSink(Sink):
    """Writes into the newest active run of the process. Never imports MLflow: the script has to start the run.

    The run's end is not noticed: the rest is written into the run that was active last.
    """

    name = "mlflow"
    gather_seconds = 25.0  # three windows written together cost half as much as three alone

    def __init__(self) -> None:
        self._run_id: str | None = None

    def write(self, items: Sequence[SinkItem]) -> None:
        """Write all items into the run.

        Raises:
            SinkWaits: there has been no active run yet.
        """
        mlflow: Any = sys.modules.get("mlflow")
        self._run_id = _active_run_id(mlflow) or self._run_id
        if self._run_id is None:
            raise SinkWaits("there is no active MLflow run yet; figures are written after the script's start_run()")
        client = mlflow.MlflowClient()
        metrics = [
            mlflow.entities.Metric(item.key(name), value, int(item.unix_seconds * 1000), item.step)
            for item in items
            for name, value in item.figures.items()
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_AT_ONCE], synchronous=True)
        for item in items:
            if item.stall:
                client.set_tag(self._run_id, item.key("last_stall"), item.stall[:_TAG_LENGTH])


def _active_run_id(mlflow: Any) -> str | None:
    """The run that any thread has started last. MLflow's public functions give only this thread's run."""
    fluent = getattr(getattr(mlflow, "tracking", None), "fluent", None)
    newest = getattr(fluent, "_get_latest_active_run", None)
    run = newest() if newest is not None else None
    return None if run is None else str(run.info.run_id)


TRACKERS: Final = {"wandb": WandbSink, "mlflow": MlflowSink}
"""The sinks by their names in the setting ``sinks``."""
