"""Weights & Biases: the figures join the row that the script logs next, in its own active run.

The script numbers its rows. A row of ours would take a number, and W&B drops rows whose number is smaller than the
newest. So ours are logged with ``commit=False`` and without a step: W&B stores them with the script's next row. The
charts have an axis of their own, ``telemetry/step``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.core.sink_item import NAMESPACE
from telemetry.publish.sinks.sink import SinkWaits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.core.sink_item import SinkItem

_STEP: Final = f"{NAMESPACE}/step"


class WandbSink:
    """Writes into ``wandb.run``. Never imports wandb: without the script's import there is no run."""

    name = "wandb"
    gather_seconds = 0.0

    def __init__(self) -> None:
        self._defined: str | None = None  # id of the run that knows our axis

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

    def close(self) -> None:
        """Nothing to close: the run is the script's."""

    def forget(self) -> None:
        """Nothing to forget."""
