"""MLflow: the figures become metrics of the script's active run.

An active run of MLflow belongs to a thread. The thread of the sinks has none, so the newest run of all threads is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.publish.sinks.sink import SinkWaits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.sink_item import SinkItem

_METRICS_AT_ONCE: Final = 1000
"""The most metrics that MLflow's server takes in one request."""

_TAG_LENGTH: Final = 500


class MlflowSink:
    """Writes into the newest active run of the process. Never imports MLflow: the script has to start the run.

    The run's end is not noticed: what is left is written into the run that was active last.
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

    def close(self) -> None:
        """Nothing to close: the run is the script's."""

    def forget(self) -> None:
        """Nothing to forget."""


def _active_run_id(mlflow: Any) -> str | None:
    """The run of the thread that has started one last. MLflow's public functions tell only this thread's run."""
    fluent = getattr(getattr(mlflow, "tracking", None), "fluent", None)
    newest = getattr(fluent, "_get_latest_active_run", None)
    run = newest() if newest is not None else None
    return None if run is None else str(run.info.run_id)
