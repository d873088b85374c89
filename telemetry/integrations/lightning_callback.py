"""A callback for Trainer of Lightning, of the package ``lightning`` or ``pytorch_lightning``.

    from telemetry.integrations.lightning_callback import TelemetryLightningCallback

    trainer = Trainer(callbacks=[TelemetryLightningCallback()], log_every_n_steps=50)

It gives the figures to the trainer's loggers every ``log_every_n_steps``, and marks evaluations. ``telemetry run``
works without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from telemetry.integrations import MarkedPhase, prefixed, tell_tokens

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

if TYPE_CHECKING:
    from collections.abc import Callable


class TelemetryLightningCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Without an agent it does nothing. Checkpoints need no mark: the agent times the functions that Lightning calls.

    Args:
        tokens: returns the number of tokens of a batch. Not called if it is None; tokens are then not counted.
    """

    def __init__(self, *, tokens: Callable[[Any], int] | None = None) -> None:
        self._phase = MarkedPhase()
        self._logged = 0
        self._tokens = tokens

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._tokens is not None:
            tell_tokens(self._tokens(batch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step  # the same for several batches if gradients are accumulated
        if step == self._logged or not trainer.log_every_n_steps or step % trainer.log_every_n_steps:
            return
        self._logged = step
        figures = prefixed()
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(dict(figures), step=step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._phase.begin("evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.end()

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._phase.end()
